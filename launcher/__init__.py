"""The controller of distlaunch: it reads a cluster spec and runs the cluster that the spec describes."""
