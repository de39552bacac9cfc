"""What an agent and the processes of its own node agree on, besides the files in `file_names`."""

import signal

STACKS_SIGNAL = signal.SIGURG
"""Asks a task for its Python stacks; ignored by default, so other programs never notice it."""
GO = b"go"
"""The agent's answer when it knows the pid of a forked task: the task may begin."""
