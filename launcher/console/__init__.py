"""What the terminal shows.

In: log files, messages and states of the run. Out: lines on stdout and stderr, never more than the terminal can take.
"""
