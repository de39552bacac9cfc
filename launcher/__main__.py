"""`python -m launcher`, and the `distlaunch` command. Ctrl-C during start-up exits at once, without a traceback."""

import _signal  # type: ignore[import-not-found]  # built in, unlike `signal`, whose import takes a millisecond
import os

TYPE_CHECKING = False  # importing `typing` takes several
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """The `distlaunch` command."""
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # not ignored, as below `nohup`
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))  # an import would show a traceback
    from launcher.cli.main import main

    main()


if __name__ == "__main__":
    main()
