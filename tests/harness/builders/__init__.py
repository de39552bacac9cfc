"""Specs, histories, results and folders of runs, made without running anything."""
