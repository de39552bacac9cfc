"""What every Python runs first that a task has started: this folder is the first of its PYTHONPATH.

The work is done by `distlaunch_children`. The user's own `sitecustomize`, which this one hides, is run as well.
Any Python reads this, Python 2 included: it has to be understood by all, and to fail nowhere.
"""

import os
import sys

finish = None
if __name__ == "sitecustomize":
    try:
        if sys.version_info >= (3, 9):  # noqa: UP036 - the task's Python is, which need not be this one
            finish = __import__("distlaunch_children").begin()
    except Exception:  # noqa: BLE001, S110 - the program can do without
        pass
    # The program finds nothing of ours; PYTHONPATH keeps it for those that it starts itself.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    ours = sys.modules.pop(__name__)
    try:
        __import__("sitecustomize")  # which Python looks for again, and keeps instead of this one
    except ImportError:
        error = sys.exc_info()[1]
        if "sitecustomize" not in (getattr(error, "name", None), str(error).split(" ")[-1]):
            raise
        sys.modules[__name__] = ours
    finally:
        if finish is not None:
            finish()
