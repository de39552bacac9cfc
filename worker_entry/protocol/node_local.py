"""Conventions between an agent and the processes of its node, besides the files in `file_names`."""

import signal

STACKS_SIGNAL = signal.SIGURG
"""Makes a task write its Python stacks; ignored by default, so other programs never notice the signal."""
GO = b"go"
"""The agent's answer once it knows the pid of a forked task: the task may begin."""
