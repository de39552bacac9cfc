"""The contract between controller, agent and tasks: messages, their bytes on the wire, and file names."""
