"""The node's part of the checks before a start: it inspects itself, and dials the other nodes' addresses."""
