"""The node's part in the checks before a start: what the node has, and which addresses it reaches."""
