"""Where the nodes of a run come from, and why they are taken away: a command, Slurm, or Kubernetes."""
