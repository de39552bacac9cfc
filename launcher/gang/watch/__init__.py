"""What is watched while tasks run: hangs, the stacks of hanging tasks, and tasks that are slower than the others."""
