"""Benchmarks: ratios to a named rival, measured in the same run, in turn, median of several. Not tests."""
