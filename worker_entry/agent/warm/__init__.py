"""Agents that stay between two runs with TensorFlow imported: how they wait, and how the next run finds them.

What goes in is a forkserver that a run no longer needs; what comes out is the connection of the next run, or nothing
when its time is over.
"""
