"""The first process of a pod: a task without an agent, whose end it tells to Kubernetes; or a keeper for agents."""
