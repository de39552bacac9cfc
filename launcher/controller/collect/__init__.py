"""Collects files that the tasks have written on other machines into the folder of the run."""
