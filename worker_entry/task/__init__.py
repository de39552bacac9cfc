"""What runs in a task's own process, around the user's program.

In: an order file of the agent's. Out: the program's exit status, its status file, and its crash record.
"""
