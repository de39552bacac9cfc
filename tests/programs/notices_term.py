"""Prints `ready` and waits for SIGTERM, handled in one WAY; a handler prints `noticed`: `notices_term.py WAY`."""

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from typing import NoReturn

_HANDLE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: [time.sleep(0.2), print("noticed", flush=True), sys.exit()])
print("ready", flush=True)
signal.pause()
"""


def ready() -> None:
    print("ready", flush=True)


def wait() -> NoReturn:
    while True:
        time.sleep(60.0)


def leave(*_: object) -> NoReturn:
    time.sleep(0.2)
    print("noticed", flush=True)
    os._exit(0)


def handle_and_wait() -> NoReturn:
    signal.signal(signal.SIGTERM, leave)
    ready()
    wait()


async def wait_in_loop() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
    ready()
    await asyncio.sleep(600.0)


match sys.argv[1]:
    case "handler":
        handle_and_wait()
    case "loop":
        asyncio.run(wait_in_loop())
    case "sigwait":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        ready()
        signal.sigwait({signal.SIGTERM})
        leave()
    case "exec":
        os.execlp(sys.executable, sys.executable, "-c", _HANDLE)
    case "child":
        subprocess.run([sys.executable, "-c", _HANDLE], check=False)
    case "fork":
        child = multiprocessing.get_context("fork").Process(target=handle_and_wait)
        child.start()
        child.join()
    case "nothing":
        ready()
        wait()
    case "default":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ready()
        wait()
    case "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready()
        wait()
    case "library":  # like TensorFlow's, a handler that Python does not know
        faulthandler.register(signal.SIGTERM, chain=False)
        ready()
        wait()
    case "library, and a child":
        faulthandler.register(signal.SIGTERM, chain=False)
        with subprocess.Popen(["sleep", "600"]):
            ready()
            wait()
