"""Waits for SIGINT in one of several ways, and prints what it notices: WAY."""

import asyncio
import atexit
import ctypes
import multiprocessing
import signal
import subprocess
import sys
import threading
import time


def wait() -> None:
    print("ready", flush=True)
    time.sleep(600)


def finally_() -> None:
    try:
        wait()
    finally:
        print("finally", flush=True)


def except_() -> None:
    try:
        wait()
    except KeyboardInterrupt:
        print("saving", flush=True)
        time.sleep(4.5)  # longer than a program may take that does nothing about the signal
        print("saved", flush=True)


def nothing() -> None:
    atexit.register(print, "exit handler")
    wait()


def handler() -> None:
    def handle(signum: int, _: object) -> None:
        print("handler", flush=True)
        sys.exit(7)

    signal.signal(signal.SIGINT, handle)
    wait()


def slow_handler() -> None:
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    print("ready", flush=True)
    while not stop.wait(0.05):
        pass
    time.sleep(4.5)
    print("saved", flush=True)


def coroutine() -> None:
    async def main() -> None:
        print("ready", flush=True)
        try:
            await asyncio.sleep(600)
        finally:
            print("cancelled", flush=True)

    asyncio.run(main())


def pool() -> None:
    with multiprocessing.get_context("fork").Pool(1) as workers:
        workers.apply(abs, (1,))
        finally_()


def child() -> None:
    print("ready", flush=True)
    try:
        subprocess.run(["sleep", "600"], check=False)
    except KeyboardInterrupt:
        print("interrupted", flush=True)


def term_handler() -> None:
    def handle(*_: object) -> None:
        print("SIGTERM", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, handle)
    wait()


def native() -> None:
    """The main thread waits in C, as in an operation of TensorFlow; nothing that Python does can end that."""
    mutex = ctypes.create_string_buffer(64)
    print("ready", flush=True)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)


WAYS = {
    "finally": finally_,
    "except KeyboardInterrupt, then 4.5 s": except_,
    "nothing, and an exit handler": nothing,
    "a handler of SIGINT": handler,
    "a handler of SIGINT, then 4.5 s": slow_handler,
    "asyncio.run": coroutine,
    "multiprocessing.Pool": pool,
    "subprocess.run": child,
    "ignores SIGINT, handles SIGTERM": term_handler,
    "waits in C": native,
}
WAYS[sys.argv[1]]()
