"""Connections to other machines over SSH, configured like the user's own `ssh`."""
