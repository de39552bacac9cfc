"""The installed command, as a user runs it on one machine."""
