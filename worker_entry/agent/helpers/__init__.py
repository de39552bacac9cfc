"""Child processes for work that may block or take long, so that the agent always responds."""
