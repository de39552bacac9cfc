"""Connections to other machines over SSH, configured as the user's own `ssh`."""
