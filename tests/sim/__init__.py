"""Whole runs and attempts in one thread and fake time, on nodes that follow a script."""
