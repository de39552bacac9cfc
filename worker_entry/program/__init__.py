"""Facts about the user's program that are known before it runs: where it is, and what it sets before its imports."""
