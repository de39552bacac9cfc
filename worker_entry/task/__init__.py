"""Code that runs in a task's own process, around the user's program.

Input: an order file from the agent. Output: the program's exit status, its status file, and its crash record.
"""
