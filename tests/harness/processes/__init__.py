"""The command, agents, tasks and programs, started for a test."""
