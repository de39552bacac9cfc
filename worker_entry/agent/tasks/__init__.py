"""The tasks of an attempt: how they start and end, what they read and write, and their state."""
