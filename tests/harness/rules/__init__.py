"""Which tests run, in which order and process, and what a failure means."""
