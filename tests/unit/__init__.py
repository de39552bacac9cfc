"""Tests of pure code, in the folders of the product. They start no process, and open no connection."""
