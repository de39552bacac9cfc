"""Terminal output.

In: log files, messages and states of the run. Out: lines on stdout and stderr, no faster than the terminal reads them.
"""
