"""Benchmarks, not tests: most print the ratio to a named rival that runs in turn with distlaunch, as a median."""
