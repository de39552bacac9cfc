"""One fault in one worker of a training program: NAME PLACE WORKER STEP MOMENT.

The programs call `at` at their places: `start` (before the framework is imported), `cluster`, `ready` (before the
first step), `data`, `layer`, `train-step`, `step` (after each) and `end`. The worker with the index WORKER calls the
function NAME at this PLACE and STEP, and first writes the time to the file MOMENT. A comment `# fault: NAME` marks the
line that is to be named.
"""

import atexit
import contextlib
import ctypes
import importlib
import json
import mmap
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

NAME, PLACE = sys.argv[1:3]
WORKER, STEP = map(int, sys.argv[3:5])
MOMENT = Path(sys.argv[5])
STEPS = 30
TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {})
INDEX = int(os.environ.get("RANK", TASK.get("index", -1)))
WRAPS = NAME.startswith("wrapped-")
"""Whether the program raises an exception of its own when a step fails, as a framework around the loop does."""
LASTING = ("slow", "handled")
"""These do not happen once, but from this step on."""


def at(place: str, step: int = 0) -> None:
    """Calls the fault's function here; the faults without a function are in the programs."""
    function = globals().get(NAME.replace("-", "_"))
    if function is not None and due(NAME, place, step):
        function()


def due(name: str, place: str, step: int = 0) -> bool:
    """Whether this worker has the fault of this name here and now."""
    now = step >= STEP if NAME in LASTING else step == STEP
    if (name, place, INDEX) != (NAME, PLACE, WORKER) or not now:
        return False
    note_moment()
    return True


def note_moment() -> None:
    if not MOMENT.exists():
        MOMENT.write_text(repr(time.time()))


# --- exceptions ---


def key_error() -> None:
    raise KeyError("no label for image 4711")  # fault: key-error


def wrapped_key_error() -> None:
    raise KeyError("no label for image 4712")  # fault: wrapped-key-error


def json_error() -> None:
    json.loads('{"image": 12, "label"')  # fault: json-error


def missing_file() -> None:
    Path("/data/shard-0017.tfrecord").read_bytes()  # fault: missing-file


def shape_error() -> None:
    import numpy as np

    np.zeros(784).reshape(28, 29)  # fault: shape-error


def chained() -> None:
    try:
        key_error()
    except KeyError as error:
        raise RuntimeError("batch 25 cannot be used") from error  # fault: chained


def assertion() -> None:
    sizes = [32, 31]
    assert sizes[0] == sizes[1]  # fault: assertion


def nan_loss() -> None:
    loss = float("inf") - float("inf")
    if loss != loss:
        raise FloatingPointError(f"the loss is {loss}")  # fault: nan-loss


def recursion() -> None:
    recursion()  # fault: recursion


def several_lines() -> None:
    raise ValueError("the batch has 2 errors:\n  image 3 is empty\n  image 5 has no label")  # fault: several-lines


def connection_reset() -> None:
    """A storage server, which is no part of the cluster, closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted = server.accept()[0]
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        client.recv(1)  # fault: connection-reset


class UnavailableError(Exception):
    """Has the name of TensorFlow's exception, as that of a client of a storage service has."""


def storage_unavailable() -> None:
    raise UnavailableError("bucket images: Socket closed")  # fault: storage-unavailable


def interrupt() -> None:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell without a terminal starts programs that ignore it
    signal.raise_signal(signal.SIGINT)  # fault: interrupt


def old_name() -> None:
    import numpy as np

    np.asscalar(np.zeros(1))  # type: ignore[attr-defined]  # fault: old-name - NumPy has removed it


def missing_module() -> None:
    importlib.import_module("image_codec")  # fault: missing-module


def missing_symbol() -> None:
    ctypes.CDLL(None).codec_of_another_version()  # fault: missing-symbol


# --- threads, children and exit handlers ---


def thread_then_exit() -> None:
    thread = threading.Thread(target=load_ahead, name="loader")
    thread.start()
    thread.join()
    sys.exit(1)


def load_ahead() -> None:
    raise OSError("image 4711 is cut off")  # fault: thread-then-exit


def thread_then_wait() -> None:
    batch = threading.Event()
    threading.Thread(target=load_for_ever, name="loader").start()
    batch.wait()


def load_for_ever() -> None:
    raise OSError("image 4712 is cut off")  # fault: thread-then-wait


def child_error() -> None:
    subprocess.run([sys.executable, "-c", "raise ValueError('no such codec')"], check=True)  # fault: child-error


def child_killed() -> None:
    subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], check=True)  # fault: child-killed


def child_hangs() -> None:
    subprocess.run(["sleep", "600"], check=True)  # fault: child-hangs


def error_and_handler_error() -> None:
    atexit.register(upload)
    raise KeyError("no label for image 4713")  # fault: error-and-handler-error


def upload() -> None:
    raise ConnectionError("the log server does not answer")


def error_and_handler_exit() -> None:
    atexit.register(os._exit, 0)
    raise KeyError("no label for image 4714")  # fault: error-and-handler-exit


def handler_exit() -> None:
    atexit.register(os._exit, 4)


def handler_hangs() -> None:
    atexit.register(wait_for_upload)


def wait_for_upload() -> None:
    threading.Event().wait()  # fault: handler-hangs


def thread_stays() -> None:
    threading.Thread(target=keep_uploading, name="uploader").start()


def keep_uploading() -> None:
    threading.Event().wait()  # fault: thread-stays


# --- ends without an exception ---


def os_exit() -> None:
    os._exit(5)


wrapped_os_exit = os_exit


def exit_text() -> None:
    sys.exit("the data ran out")  # fault: exit-text


def exit_three() -> None:
    sys.exit(3)  # fault: exit-three


def exit_zero() -> None:
    sys.exit(0)


def segfault() -> None:
    ctypes.string_at(0)


def abort() -> None:
    os.abort()


def bus_error() -> None:
    """The file of a mapped data set is cut off."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def term() -> None:
    """Gives SIGTERM its default action, which TensorFlow takes away, and gets it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def term_handled() -> None:
    """Ends as a program does that handles SIGTERM, for example to save."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.kill(os.getpid(), signal.SIGTERM)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


# --- hangs ---


def hang() -> None:
    threading.Event().wait()  # fault: hang


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # fault: deadlock


def hang_in_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.recv(1)  # fault: hang-in-read


# --- memory and disk ---


def memory_error() -> None:
    [pages] = re.findall(r"^\d+", Path("/proc/self/statm").read_text())
    soft = int(pages) * mmap.PAGESIZE + (1 << 26)
    resource.setrlimit(resource.RLIMIT_AS, (soft, soft))
    bytearray(1 << 28)  # fault: memory-error


def array_too_big() -> None:
    import numpy as np

    np.ones((1 << 23, 1 << 22))  # fault: array-too-big


def full_disk() -> None:
    with open("/dev/full", "wb") as file:
        file.write(bytes(1 << 20))  # fault: full-disk


def file_too_big() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 25))  # fault: file-too-big


# --- the network ---


def port_taken() -> None:
    """Another program has the port of this worker."""
    host, _, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][INDEX].rpartition(":")
    globals()["_taken"] = socket.create_server((host, int(port)))


def metrics_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        socket.create_server(first.getsockname())  # fault: metrics-port-taken


def lost_link() -> None:
    """Cuts every connection of this process."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as link:
            if link.family in (socket.AF_INET, socket.AF_INET6):
                link.shutdown(socket.SHUT_RDWR)


# --- no faults ---


def slow() -> None:
    time.sleep(0.1)


def slow_start() -> None:
    time.sleep(5)


def handled() -> None:
    try:
        key_error()
    except KeyError:
        traceback.print_exc()


def none() -> None:
    """Nothing is wrong."""
