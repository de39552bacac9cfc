"""Child processes that do what may block or take long, so that the agent always answers."""
