"""How a node's agent is started and spoken to."""
