"""One run from start to end: all effects are here.

In: a `ClusterSpec`. Out: a `RunReport`, and the run's folder; nothing is left running.
"""
