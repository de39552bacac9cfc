"""Reports on runs and checks.

In: finished attempts, or the answers of a check. Out: the models of report.json, and their text. Pure.
"""
