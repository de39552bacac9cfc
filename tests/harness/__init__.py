"""Shared by test modules: builders of histories, machines for tests, and the rules that decide which tests run."""
