"""The node agent, one per node and run.

In: orders from the controller, on stdin. Out: messages on stdout; tasks that run, and none left when it ends.
"""
