"""The command line. Only `main` turns errors into exit statuses."""
