"""What a bare Python on a node reads from stdin: it finds or installs worker_entry."""
