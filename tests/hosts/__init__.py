"""Other machines, or programs that other machines run."""
