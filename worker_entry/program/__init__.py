"""Facts about the user's program that are known before it runs: its location, and the variables that it sets."""
