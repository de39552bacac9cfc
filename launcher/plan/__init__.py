"""What each task gets: its node, address, port, share of the node, environment and TF_CONFIG.

In: a `ClusterSpec`, and what the nodes report about themselves. Out: a frozen `LaunchPlan`, and its renderings. Pure.
"""
