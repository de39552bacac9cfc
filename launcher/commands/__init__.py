"""Commands on existing runs and their nodes: clean, profile, requests to a running run.

In: a run's folder or name, or a spec. Out: findings, captured profiles and stopped processes.
"""
