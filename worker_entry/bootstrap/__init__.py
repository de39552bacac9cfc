"""The code that a node's bare Python reads from stdin: it finds or installs worker_entry."""
