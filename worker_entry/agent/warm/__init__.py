"""Agents that stay between two runs with TensorFlow imported: how they wait, and how the next run finds them.

An agent keeps a forkserver that its run no longer needs. The wait ends with the connection of the next run, or when the
agent's time is over.
"""
