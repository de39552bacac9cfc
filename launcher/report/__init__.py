"""What remains of a run.

In: finished attempts, or the answers of a check. Out: the models of report.json, and the same as text. Pure.
"""
