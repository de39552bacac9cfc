"""A task that is hard to kill: the task, its child, a daemon in its own session and a stopped child ignore TERM.

`spawn_tree.py TASK COUNT`: that task fails once COUNT tasks in this working directory have their trees.
"""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    if os.fork() == 0:
        wait()
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            wait()
        os._exit(0)
    os.waitpid(between, 0)
    stopped = os.fork()
    if stopped == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        wait()
    os.waitpid(stopped, os.WUNTRACED)
    print("the tree stands", flush=True)
    task = os.environ["DISTLAUNCH_TASK"]
    Path(f"standing-{task}").touch()
    if sys.argv[1:2] == [task]:
        while len(list(Path().glob("standing-*"))) < int(sys.argv[2]):
            time.sleep(0.01)
        sys.exit(3)
    wait()


def wait() -> None:
    while True:
        time.sleep(60)


main()
