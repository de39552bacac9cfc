"""The node agent, one per node and run.

In: orders from the controller, on stdin. Out: messages on stdout, and running tasks; no task outlives the agent.
"""
