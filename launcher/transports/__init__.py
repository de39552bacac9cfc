"""Connections to the nodes.

In: a node of the spec. Out: a `Link` to its agent, which carries messages both ways and survives a lost
connection.
"""
