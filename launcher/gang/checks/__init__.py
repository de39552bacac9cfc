"""What the checks before a start find: the nodes themselves, their connections, and their speed."""
