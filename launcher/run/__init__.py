"""One run from start to end, with all of its effects.

In: a `ClusterSpec`. Out: a `RunReport` and the run's folder; nothing is left running.
"""
