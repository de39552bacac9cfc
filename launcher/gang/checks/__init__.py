"""The checks before a start: of the nodes themselves, their connections, and their speed."""
