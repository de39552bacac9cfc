"""What distlaunch runs on a node: standard library only, Python 3.9 or newer, no import of `launcher`."""
