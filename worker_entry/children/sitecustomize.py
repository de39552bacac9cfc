"""Runs first in every Python process that a task starts, because this folder comes first in its PYTHONPATH.

`distlaunch_children` does the work. The user's own `sitecustomize`, which this file hides, runs as well.
Any Python may run this file, even Python 2: its syntax must be valid in all versions, and it must never fail.
"""

import os
import sys

finish = None
if __name__ == "sitecustomize":
    try:
        if sys.version_info >= (3, 9):  # noqa: UP036 - the program may start any Python
            finish = __import__("distlaunch_children").begin()
    except Exception:  # noqa: BLE001, S110 - the program runs without it
        pass
    # The folder is removed from sys.path but stays in PYTHONPATH, for processes that the program starts.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    ours = sys.modules.pop(__name__)
    try:
        __import__("sitecustomize")  # Python now finds the user's module, and keeps it instead of this one
    except ImportError:
        error = sys.exc_info()[1]
        if "sitecustomize" not in (getattr(error, "name", None), str(error).split(" ")[-1]):
            raise
        sys.modules[__name__] = ours
    finally:
        if finish is not None:
            finish()
