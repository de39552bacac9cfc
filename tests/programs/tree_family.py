"""Starts the processes named on its command line, prints `NAME PID` for each, then `stands`, and waits.

child; grandchild (below a middle process); daemon (double fork, its own session, its parent gone); zombie; stopped (by
SIGSTOP). Before them: `--ignore-term` makes all of them ignore TERM; `--leave FILE` ends this process with 0 once all
are started and FILE exists.
"""

import os
import signal
import sys
import time


def main() -> None:
    arguments = sys.argv[1:]
    leave = None
    if "--ignore-term" in arguments:
        arguments.remove("--ignore-term")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--leave" in arguments:
        leave = arguments.pop(arguments.index("--leave") + 1)
        arguments.remove("--leave")
    for name in arguments:
        start(name)
    print("stands", flush=True)
    if leave is not None:
        while not os.path.exists(leave):
            time.sleep(0.01)
        os._exit(0)
    wait()


def start(name: str) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        if name == "daemon":
            os.setsid()
        if name in ("grandchild", "daemon"):
            if os.fork() != 0:
                if name == "daemon":
                    os._exit(0)
                os.close(writing)
                wait()
            # The daemon's parent is gone once another process has adopted it.
            while name == "daemon" and os.getppid() == pid:
                time.sleep(0.001)
        os.write(writing, str(os.getpid()).encode())
        os.close(writing)
        if name == "zombie":
            os._exit(0)
        if name == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        wait()
    os.close(writing)
    with os.fdopen(reading) as stream:
        member = int(stream.read())
    if name == "daemon":
        os.waitpid(pid, 0)
    if name == "stopped":
        os.waitpid(pid, os.WUNTRACED)
    if name == "zombie":
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    print(name, member, flush=True)


def wait() -> None:
    while True:
        time.sleep(60)


main()
