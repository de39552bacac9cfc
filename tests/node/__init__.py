"""The node: agents, tasks, and calls of the operating system, with real processes of this machine."""
