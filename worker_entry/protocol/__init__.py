"""The contract between controller, agent and tasks: messages as frozen values, their bytes, and file names."""
