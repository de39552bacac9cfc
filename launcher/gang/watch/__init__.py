"""Watches running tasks: hangs, the stacks of hanging tasks, and tasks that are slower than the others."""
