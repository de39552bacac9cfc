"""The node's part of the checks before a start: the node inspects itself, and dials the other nodes' addresses."""
