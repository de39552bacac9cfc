"""What controller, agent and tasks say to each other, as frozen values, bytes and file names."""
