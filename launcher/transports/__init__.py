"""Connections to the nodes.

In: a node of the spec. Out: a `Link` to the node's agent, which carries messages both ways and survives a lost
connection.
"""
