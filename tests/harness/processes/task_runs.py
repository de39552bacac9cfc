"""A program run by itself, and as a task."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import zipapp
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WAYS = {
    "a script": ["program.py"],
    "a script with ./": ["./program.py"],
    "a script by its full path": ["{here}/program.py"],
    "a script in a folder": ["folder/program.py"],
    "a script by a detour": ["folder/../program.py"],
    "a symbolic link to a script": ["link.py"],
    "a module": ["-m", "program"],
    "a module of a package": ["-m", "package.program"],
    "a package": ["-m", "package"],
    "a folder": ["directory"],
    "a folder with ./": ["./directory/"],
    "a zip file": ["program.pyz"],
}


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str


def run(
    cwd: Path,
    arguments: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    together: bool = False,
    preexec: Callable[[], object] | None = None,
) -> Ended:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},  # as tasks have it
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        timeout=60,
        preexec_fn=preexec,
        check=False,
    )

    return Ended(done.returncode, readable(done.stdout), readable(done.stderr or b""))


def readable(data: bytes) -> str:
    """A program's output, without the parts that differ from one process to the next."""
    return re.sub(r"0x[0-9a-f]{6,}|\bpid=\d+", "…", data.decode(errors="backslashreplace"))


def write(folder: Path, source: str | bytes) -> None:
    """Writes the program so that it can be run in every way."""
    data = source if isinstance(source, bytes) else textwrap.dedent(source).encode()
    (folder / "folder").mkdir()
    for package in ("package", "directory"):
        (folder / package).mkdir()
    (folder / "package" / "__init__.py").write_text("'''A package.'''\n")
    for path in ("program.py", "folder/program.py", "package/program.py", "package/__main__.py"):
        (folder / path).write_bytes(data)
    (folder / "directory" / "__main__.py").write_bytes(data)
    (folder / "link.py").symlink_to("folder/program.py")
    zipapp.create_archive(folder / "directory", folder / "program.pyz", "/usr/bin/env python3")


# --- the same as plain Python ---
#
# Object addresses and similar numbers are left out of the messages; nothing else is.


IDENTITY = """
    '''What a program can know of itself.'''
    import sys, os
    spec = __spec__ and (__spec__.name, __spec__.origin, __spec__.parent)
    print(__name__, __file__, __doc__, __package__, spec, __cached__, type(__loader__))
    print(sys.argv, sys.orig_argv)
    print(sys.path)
    print(os.getcwd())
    print(sorted(globals()))
    import __main__
    print(__main__.__dict__ is globals(), sys.modules["__main__"] is __main__, vars(__main__) is globals())
    def f(x: int) -> None: ...
    print(f.__annotations__, f.__module__, f.__code__.co_filename, f)
    if __name__ == "__main__":
        print("I am the main program")
"""
PROGRAMS_TO_COMPARE = {
    "exit None": "import sys; sys.exit(None)",
    "exit without a word": "import sys; sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit 256": "import sys; sys.exit(256)",
    "exit 257": "import sys; sys.exit(257)",
    "exit -1": "import sys; sys.exit(-1)",
    "exit True": "import sys; sys.exit(True)",
    "exit False": "import sys; sys.exit(False)",
    "exit text": "import sys; sys.exit('no data in ./here, é')",
    "exit empty text": "import sys; sys.exit('')",
    "exit float": "import sys; sys.exit(0.0)",
    "exit object": """
        import sys
        class Reason:
            def __str__(self): return "a reason"
        sys.exit(Reason())
    """,
    "raise SystemExit with two": "raise SystemExit(1, 2)",
    "exit of the system at once": "import os; print('gone', flush=True); os._exit(5)",
    "quit": "quit(4)",
    "exception": """
        def f(x):
            return 1 / x
        print("before")
        f(0)
    """,
    "exception from": """
        def f():
            try:
                {}["a"]
            except KeyError as error:
                raise RuntimeError("no a") from error
        f()
    """,
    "exception during another": """
        try:
            {}["a"]
        except KeyError:
            int("b")
    """,
    "exception from None": """
        try:
            {}["a"]
        except KeyError:
            raise ValueError("b") from None
    """,
    "exception group": """
        def f(): raise TypeError("inner")
        try:
            f()
        except TypeError as error:
            raise ExceptionGroup("several", [error, ValueError(2), ExceptionGroup("more", [OSError(1, "x")])])
    """,
    "exception with notes": """
        error = ValueError("x")
        error.add_note("a note")
        raise error
    """,
    "exception without text": """
        class Broken(Exception):
            def __str__(self): raise RuntimeError("no text")
        raise Broken
    """,
    "exception with surrogates": "raise ValueError('caf\\udce9 \\ud800')",
    "exception of a nested class": """
        class A:
            class B(Exception): pass
        raise A.B(1, 2)
    """,
    "exception in a library": "import json\njson.loads('{')",
    "exception in an imported module": """
        import pathlib, sys
        pathlib.Path("other.py").write_text("def g():\\n    raise ValueError('of other')\\n")
        import other
        other.g()
    """,
    "syntax error in an imported module": """
        import pathlib, sys
        pathlib.Path("wrong.py").write_text("x = 1\\ndef f(:\\n    pass\\n")
        import wrong
    """,
    "syntax error": "x = 1\ndef f(:\n    pass\n",
    "indentation error": "def f():\nreturn 1\n",
    "relative import": "from . import other",
    "keyboard interrupt": "print('before'); raise KeyboardInterrupt",
    "interrupted by a signal": """
        import atexit, signal
        atexit.register(print, "at exit")
        def f(): signal.raise_signal(signal.SIGINT)
        f()
    """,
    "interrupted, with threads": """
        import threading
        def late():
            threading.main_thread().join()  # which is over once its traceback is written
            print("late")
        threading.Thread(target=late).start()
        raise KeyboardInterrupt
    """,
    "interrupt caught": """
        import signal
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise SystemExit(9)
    """,
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; print('x', flush=True); os.kill(os.getpid(), signal.SIGTERM)",
    "handlers of signals": """
        import signal
        print([signal.getsignal(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE")])
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """,
    "at exit, in reverse": """
        import atexit
        atexit.register(print, "first registered")
        atexit.register(print, "second registered")
        print("main")
    """,
    "at exit, after an exception": "import atexit; atexit.register(print, 'at exit'); 1 / 0",
    "exception at exit": """
        import atexit
        def fail(): raise ValueError("at exit")
        atexit.register(fail)
    """,
    "exit at exit": """
        import atexit, sys
        atexit.register(sys.exit, 7)
    """,
    "a thread that outlives main": """
        import threading
        def late():
            threading.main_thread().join()
            print("late")
        threading.Thread(target=late).start()
        print("main ends")
    """,
    "exception in a thread": """
        import threading
        def fail(): raise ValueError("in a thread")
        thread = threading.Thread(target=fail, name="T")
        thread.start()
        thread.join()
    """,
    "the end of objects": """
        class A:
            def __del__(self): print("gone")
        a = A()
    """,
    "multiprocessing": """
        import multiprocessing
        class Result:
            def __init__(self, value): self.value = value
        def work(value): return Result(value * 2)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print([result.value for result in pool.map(work, [1, 2])])
        else:
            print("imported as", __name__, flush=True)
    """,
    "forked": """
        import os, sys
        pid = os.fork()
        if pid == 0:
            sys.exit(3)
        print(os.waitpid(pid, 0)[1])
    """,
    "forked, and the child fails": """
        import os, sys
        pid = os.fork()
        if pid == 0:
            raise ValueError("of the child")
        print(os.waitpid(pid, 0)[1])
    """,
    "pickle": """
        import pickle
        class A:
            def __eq__(self, other): return type(other) is A
        data = pickle.dumps(A())
        print(data, pickle.loads(data) == A())
    """,
    "dataclass": """
        import dataclasses, typing
        @dataclasses.dataclass
        class A:
            x: "int" = 1
            b: typing.Optional["A"] = None
        print(A(), typing.get_type_hints(A))
    """,
    "annotations": """
        print(__annotations__)
        x: int = 1
        print(__annotations__)
    """ if sys.version_info < (3, 14) else "x: int = 1",
    "source": """
        import inspect
        def f():
            '''What f does.'''
            return 1
        print(inspect.getsource(f), inspect.getsourcefile(f), inspect.getmodule(f))
    """,
    "doctest": """
        '''
        >>> 1 + 1
        3
        '''
        import doctest
        print(doctest.testmod())
    """,
    "data of the package": """
        import pkgutil
        print(pkgutil.get_data("__main__", "program.py")[:20])
    """,
    "deprecation warning": """
        import warnings
        warnings.warn("old", DeprecationWarning)
    """,
    "syntax warning": "print('\\d', 1 is 1)",
    "hook for exceptions": """
        import sys
        def hook(kind, error, trace): print("hooked", kind, error, trace.tb_lineno, trace.tb_frame.f_code.co_name)
        sys.excepthook = hook
        1 / 0
    """,
    "hook that exits": """
        import sys
        sys.excepthook = lambda *_: sys.exit(12)
        1 / 0
    """,
    "hook that fails": """
        import sys
        def hook(*_): raise ValueError("of the hook", sys.exc_info())
        sys.excepthook = hook
        1 / 0
    """,
    "hook that fails in turn": """
        import sys
        def hook(kind, error, trace):
            try: {}["key"]
            except KeyError: raise error from ValueError("of the hook")
        sys.excepthook = hook
        1 / 0
    """,
    "hook that is interrupted": """
        import sys
        def hook(*_): raise KeyboardInterrupt
        sys.excepthook = hook
        1 / 0
    """,
    "hook that is no function": "import sys; sys.excepthook = None; 1 / 0",
    "hook that is missing": "import sys; del sys.excepthook; 1 / 0",
    "hook for an interrupt": """
        import atexit, sys
        sys.excepthook = lambda kind, error, trace: print("hooked", kind)
        atexit.register(lambda: print("at exit", sys.exc_info()))
        raise KeyboardInterrupt
    """,
    "the last exception, at exit": """
        import atexit, sys
        def show():
            names = [name for name in ("last_exc", "last_type", "last_value", "last_traceback") if hasattr(sys, name)]
            print(names, sys.last_type, repr(sys.last_value), sys.last_traceback.tb_lineno, sys.exc_info())
        atexit.register(show)
        1 / 0
    """,
    "its own command line": """
        import os, sys
        print(sys.orig_argv[1:], flush=True)
        if "again" not in os.environ:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "again": "1"})
    """,
    "closed output": """
        import sys
        sys.stdout.close()
        1 / 0
    """,
    "input at the end": "input()",
    "a byte order mark": b"\xef\xbb\xbfprint('caf\xc3\xa9')\n",
    "an encoding": "# -*- coding: latin-1 -*-\nprint(ascii('é'))\n".encode("latin-1"),
    "line ends of Windows": b"x = '''a\r\nb'''\r\nprint(repr(x))\r\n",
    "no line end": b"print(1)",
    "no program": b"",
}  # fmt: skip
