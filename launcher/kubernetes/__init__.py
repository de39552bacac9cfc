"""Kubernetes: the manifests for it, and what it reports.

In: a spec, or what the cluster's API shows of a run's pods. Out: manifests, why pods do not run yet, and why they were
taken away. Pure, except that `calls` runs `kubectl`.
"""
