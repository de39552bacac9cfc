"""Kubernetes: the manifests for it, and what it reports.

In: a spec, or the pods of a run as the cluster's API shows them. Out: manifests, why pods do not run yet, and why they
were taken away. Pure, except that `calls` runs `kubectl`.
"""
