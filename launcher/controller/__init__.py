"""One run from start to end: everything in this folder has side effects.

In: a `ClusterSpec`. Out: a `RunReport` and the run's folder; nothing is left running.
"""
