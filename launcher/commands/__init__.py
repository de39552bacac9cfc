"""What is done to nodes and runs outside of a run: clean, profile, ask a running run for something."""
