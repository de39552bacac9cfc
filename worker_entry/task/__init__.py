"""Runs in a task's own process, around the user's program.

In: an order file from the agent. Out: the program's exit status, its status file, and its crash record.
"""
