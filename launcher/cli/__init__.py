"""What the user types. `main` is the one place where errors become exit statuses."""
