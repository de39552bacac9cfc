"""Kubernetes: what is asked of it, and what it says.

In goes a spec, or what the cluster's API shows of a run's pods; out come manifests, why pods do not run yet, and why
they were taken away. Only one module runs a program.
"""
