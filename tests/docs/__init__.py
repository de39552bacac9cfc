"""Documents, help, schema, and the order of the imports."""
