"""The agent's side of its connection to the controller, which a later connection may replace."""
