"""The command line with which distlaunch starts itself."""

from __future__ import annotations

import sys

CODE = "import sys; sys.path[:] = filter(None, sys.path); from launcher.cli.main import main; main()"
"""Like `-m launcher`, but imports nothing from the current folder, which may belong to another user.

Python's own option for that, -P, came with 3.11."""


def own_command(*arguments: str) -> list[str]:
    """The words that run `distlaunch` with these arguments, in this interpreter."""
    return [sys.executable, "-c", CODE, *arguments]
