"""What several test modules need: builders of histories, machines for tests, and the rules of which tests run."""
