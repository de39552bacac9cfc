"""A task in a pod without an agent: runs the program, and tells Kubernetes how it ended by status and message."""
