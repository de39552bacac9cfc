"""The first process of a pod: runs a task without an agent and reports its end to Kubernetes, or waits for agents."""
