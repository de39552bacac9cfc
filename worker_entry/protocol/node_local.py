"""What an agent agrees on with the processes of its own node, beside the files in `file_names`."""

import signal

STACKS_SIGNAL = signal.SIGURG
"""Asks a task for its Python stacks; a program that does not handle it never notices it."""
GO = b"go"
"""The agent's answer to the pid of a task that the forkserver has forked: the pid is known, the task may begin."""
