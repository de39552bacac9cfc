"""The way to another machine: SSH, set up as the user's own `ssh` is."""
