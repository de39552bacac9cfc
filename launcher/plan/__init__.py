"""The plan of a run: the node, address, port, share of the node, environment and TF_CONFIG of each task.

In: a `ClusterSpec`, and the nodes' reports about themselves. Out: a frozen `LaunchPlan`, and its renderings. Pure.
"""
