"""Why an attempt ended.

In: the last state of the attempt, and the last lines of its logs. Out: one `Verdict`: a sentence, its evidence, a hint.
Pure.
"""
