"""Ways to a node.

In: a node of the spec. Out: a `Link` to its agent, over which messages go both ways; a lost connection is resumed.
"""
