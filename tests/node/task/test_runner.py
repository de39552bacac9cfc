"""The task runner behaves like plain Python: both run the same program, and their output and status are compared."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import worker_entry
from tests.harness.apart import linux
from tests.harness.cases import first_quick
from tests.harness.places import PROGRAMS
from tests.harness.processes.task_runs import IDENTITY, PROGRAMS_TO_COMPARE, WAYS, Ended, run, write
from worker_entry.protocol.framing import parse
from worker_entry.protocol.values import CrashRecord, FirstError, SourceLine
from worker_entry.task import crash_record
from worker_entry.task.crash_record import MESSAGE_LIMIT

COVERS = ("worker_entry/task", "worker_entry/program", "worker_entry/__main__.py")

ENTRY = str(Path(worker_entry.__file__).parent)
BY_PATH = [ENTRY, "run"]
AS_MODULE = ["-m", "worker_entry", "run"]
TASK_RAISE = str(PROGRAMS / "task_raise.py")
python_311 = pytest.mark.skipif(sys.version_info < (3, 11), reason="since Python 3.11")


def compare(
    folder: Path, arguments: Sequence[str], runner: Sequence[str] = BY_PATH, **options: Any
) -> tuple[Ended, Ended]:
    """How plain Python and the task runner end with the same arguments."""
    arguments = [argument.replace("{here}", str(folder)) for argument in arguments]
    return run(folder, arguments, **options), run(folder, [*runner, *arguments], **options)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_has_the_same_argv_and_main_module_as_in_plain_python(tmp_path: Path, way: str) -> None:
    write(tmp_path, IDENTITY)
    arguments = [*WAYS[way], "a", "b c", "-m", "--help", "é"]
    plain, ours = compare(tmp_path, arguments)
    assert ours == plain
    assert "I am the main program" in plain.stdout
    if way in ("a script", "a module", "a folder"):
        assert compare(tmp_path, arguments, AS_MODULE)[1] == plain


@python_311
@pytest.mark.parametrize("runner", [BY_PATH, AS_MODULE], ids=["by its path", "as a module"])
@pytest.mark.parametrize("way", ["a script", "a folder", "a zip file"])
def test_pythonsafepath_has_the_same_effect_as_in_plain_python(tmp_path: Path, way: str, runner: list[str]) -> None:
    write(tmp_path, IDENTITY)
    plain, ours = compare(tmp_path, WAYS[way], runner, env={"PYTHONSAFEPATH": "1"})
    assert ours == plain
    assert "I am the main program" in plain.stdout


@python_311
def test_with_pythonsafepath_a_module_in_the_working_directory_is_not_found(tmp_path: Path) -> None:
    write(tmp_path, IDENTITY)
    plain, ours = compare(tmp_path, WAYS["a module"], env={"PYTHONSAFEPATH": "1"})
    assert ours == plain
    assert plain.status == 1


@pytest.mark.parametrize("name", first_quick(PROGRAMS_TO_COMPARE, 16))
def test_a_script_has_the_same_output_and_status_as_in_plain_python(tmp_path: Path, name: str) -> None:
    source = PROGRAMS_TO_COMPARE[name]
    write(tmp_path, source)
    plain, ours = compare(tmp_path, ["program.py"])
    assert ours == plain


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("a module", "exception"),
        ("a module", "syntax error"),
        ("a module", "keyboard interrupt"),
        ("a package", "exit text"),
        ("a package", "exception"),
        ("a folder", "exception"),
        ("a folder", "syntax error"),
        ("a symbolic link to a script", "exception"),
    ],
)
def test_modules_packages_and_folders_end_as_in_plain_python(tmp_path: Path, way: str, name: str) -> None:
    """They differ in how the source is found and in the frames of the traceback, not in the end."""
    write(tmp_path, PROGRAMS_TO_COMPARE[name])
    plain, ours = compare(tmp_path, WAYS[way])
    assert ours == plain


@pytest.mark.parametrize("name", ["exception", "exit text", "at exit, after an exception", "keyboard interrupt"])
def test_stdout_and_stderr_in_one_file_have_the_order_of_plain_python(tmp_path: Path, name: str) -> None:
    write(tmp_path, PROGRAMS_TO_COMPARE[name])
    plain, ours = compare(tmp_path, ["program.py"], together=True)
    assert ours == plain


@pytest.mark.parametrize(
    "arguments",
    [["absent.py"], ["folder"], ["-m", "absent"], ["-m", "absent.deeper"], ["-m", "folder"], ["-m", "program.deeper"]],
    ids=" ".join,
)
def test_a_missing_program_has_the_same_error_as_in_plain_python(tmp_path: Path, arguments: list[str]) -> None:
    write(tmp_path, "print('never')")
    plain, ours = compare(tmp_path, arguments)
    assert ours == plain
    assert plain.status != 0


def test_multiprocessing_children_of_a_module_find_their_main_program(tmp_path: Path) -> None:
    write(tmp_path, PROGRAMS_TO_COMPARE["multiprocessing"])
    plain, ours = compare(tmp_path, WAYS["a module"])
    assert ours == plain
    assert "[2, 4]" in plain.stdout


# --- intended differences ---


def test_the_task_runner_enables_faulthandler(tmp_path: Path) -> None:
    write(tmp_path, "import faulthandler; print(faulthandler.is_enabled())")
    plain, ours = compare(tmp_path, ["program.py", "a"])
    assert plain.stdout == "False\n"
    assert ours.stdout == "True\n"


def test_the_task_runner_imports_only_standard_library_and_worker_entry_modules(tmp_path: Path) -> None:
    """A program's own `json.py` is not imported, for example: the standard library's is imported already."""
    write(tmp_path, "import sys; print(*sys.modules)")
    plain, ours = compare(tmp_path, ["program.py"])
    more = {name.partition(".")[0] for name in set(ours.stdout.split()) - set(plain.stdout.split())}
    assert more - sys.stdlib_module_names == {"worker_entry"}
    assert not more & {"multiprocessing", "concurrent", "asyncio", "logging", "subprocess", "socket", "selectors"}


def test_the_task_runner_uses_fewer_than_12_stack_frames(tmp_path: Path) -> None:
    source = """
        def depth(n):
            try:
                return depth(n + 1)
            except RecursionError:
                return n
        print(depth(0))
    """
    write(tmp_path, source)
    plain, ours = compare(tmp_path, ["program.py"])
    assert 0 < int(plain.stdout) - int(ours.stdout) < 12


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (b"x = 1\nprint('\xe9')\n", "codec can't decode byte 0xe9"),
        (b"# coding: klingon\nprint(1)\n", "unknown encoding: klingon"),
    ],
    ids=["not UTF-8", "an unknown encoding"],
)
def test_a_source_that_cannot_be_decoded_raises_a_syntax_error(tmp_path: Path, source: bytes, said: str) -> None:
    write(tmp_path, source)
    plain, ours = compare(tmp_path, ["program.py"])
    assert plain.status == ours.status == 1
    assert "SyntaxError: " in plain.stderr
    assert re.search(f"SyntaxError: .*{said}", ours.stderr)
    assert "worker_entry" not in ours.stderr


@linux
def test_a_segmentation_fault_prints_the_line_of_the_program(tmp_path: Path) -> None:
    source = """
        import ctypes
        def crash():
            ctypes.string_at(0)
        crash()
    """
    write(tmp_path, source)
    ours = run(tmp_path, [*BY_PATH, "program.py"], preexec=no_core)
    assert ours.status == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in ours.stderr
    assert f'File "{tmp_path}/program.py", line 4 in crash' in ours.stderr


def no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


# --- crash records ---


@dataclass(frozen=True)
class Task:
    """Runs programs as an agent does, with an order in a file."""

    folder: Path

    @property
    def crash_file(self) -> Path:
        return self.folder / "crash.json"

    @property
    def finished_file(self) -> Path:
        return self.folder / "finished"

    def run(self, source: str | bytes, *, kind: str = "script", target: str = "program.py", **options: Any) -> Ended:
        if not (self.folder / "program.py").exists():
            write(self.folder, source)
        order = {
            "program": {"kind": kind, "target": target, "args": []},
            "crash_file": str(options.pop("crash_file", self.crash_file)),
            "finished_file": str(self.finished_file),
            "status_file": str(self.folder / "status.json"),
            "stacks_file": str(self.folder / "stacks"),
            "patch_keras": False,
            "coordination_timeout_s": 0.0,
        }
        (self.folder / "order.json").write_text(json.dumps(order))
        return run(self.folder, [ENTRY, "task", "order.json"], **options)

    def crash(self, source: str | bytes, **options: Any) -> CrashRecord:
        """The crash record of a program that is expected to fail."""
        before = time.time()
        assert self.run(source, **options).status != 0
        record: CrashRecord = parse(CrashRecord, json.loads(self.crash_file.read_text()), "crash record")
        assert before <= record.time <= time.time()
        record.message.encode()  # can be written to any file
        return record


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task(tmp_path)


@pytest.mark.parametrize(
    ("source", "exception", "message", "line"),
    [
        ("x = 1\nraise ValueError('no batch')", "ValueError", "no batch", 2),
        ("def f():\n    {}['a']\nf()", "KeyError", "'a'", 2),
        ("class A:\n    class B(Exception): pass\nraise A.B('x')", "A.B", "x", 3),
        (
            "try:\n    1 / 0\nexcept Exception as e:\n    raise RuntimeError('gone') from e",
            "RuntimeError",
            "gone",
            4,
        ),
        ("assert False", "AssertionError", "", 1),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "", 1),
        ("import sys\nsys.exit(3)", "SystemExit", "sys.exit(3)", 2),
        ("import sys\nsys.exit(256 + 3)", "SystemExit", "sys.exit(259)", 2),
        ("import sys\nsys.exit('no data')", "SystemExit", "sys.exit('no data')", 2),
        ("raise ValueError('caf\\udce9')", "ValueError", "caf\\udce9", 1),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E", "<exception str() failed>", 3),
        ("class R:\n    def __repr__(self): 1 / 0\nraise SystemExit(R())", "SystemExit", "<exception str() failed>", 3),
        ("raise ValueError('x' * 10_000_000)", "ValueError", "x" * (MESSAGE_LIMIT * 3 // 4), 1),
        ("import json\njson.loads('{')", "JSONDecodeError", "Expecting property name", 2),
        ("import importlib\nimportlib.import_module('absent')", "ModuleNotFoundError", "No module named 'absent'", 2),
        ("exec('1 / 0')", "ZeroDivisionError", "division by zero", 1),
        ("import ast\nast.parse('f(')", "SyntaxError", "was never closed", 2),
        ("x = 1\ny = (\n", "SyntaxError", "was never closed", 2),
    ],
)
def test_a_crash_record_has_the_exception_its_message_and_the_user_line(
    task: Task, source: str, exception: str, message: str, line: int
) -> None:
    record = task.crash(source)
    assert record.exception == exception
    assert message in record.message
    assert len(record.message) <= MESSAGE_LIMIT
    assert (record.file, record.line) == (str(task.folder / "program.py"), line)


CATCH = "def load():\n    raise KeyError('no label')\ntry:\n    load()\nexcept KeyError as error:\n    raise "


@pytest.mark.parametrize("how", ["ValueError('gone') from error", "ValueError('gone')"])
def test_a_crash_record_has_the_first_error_from_which_the_last_one_follows(task: Task, how: str) -> None:
    record = task.crash(CATCH + how)
    assert (record.exception, record.line) == ("ValueError", 6)
    assert record.first == FirstError("KeyError", "'no label'", str(task.folder / "program.py"), 2)


@pytest.mark.parametrize("source", [CATCH + "ValueError('gone') from None", "raise ValueError('gone')"])
def test_a_crash_record_has_no_first_error_if_python_shows_none(task: Task, source: str) -> None:
    assert task.crash(source).first is None


def test_a_crash_record_is_written_although_errors_follow_from_each_other_in_a_circle(task: Task) -> None:
    record = task.crash("one, two = KeyError('1'), KeyError('2')\none.__cause__, two.__cause__ = two, one\nraise one")
    assert record.first is not None
    assert (record.message, record.first.message) == ("'1'", "'2'")


@pytest.mark.parametrize(
    ("kind", "target", "file"),
    [
        ("script", "folder/program.py", "folder/program.py"),
        ("script", "link.py", "link.py"),
        ("script", "directory", "directory/__main__.py"),
        ("module", "program", "program.py"),
        ("module", "package", "package/__main__.py"),
    ],
)
def test_a_crash_record_has_the_user_line_of_scripts_folders_and_modules(
    task: Task, kind: str, target: str, file: str
) -> None:
    record = task.crash("import json\n\njson.loads('{')", kind=kind, target=target)
    assert (record.file, record.line) == (str(task.folder / file), 3)


def test_the_user_line_is_the_innermost_outside_of_installed_packages(task: Task) -> None:
    """Even if a package calls back into the user's code, as Keras does."""
    packages = task.folder / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "framework.py").write_text("def call(f):\n    f()\n    raise ValueError\n")
    source = f"""if True:
        import sys
        sys.path.append({str(packages)!r})
        import framework
        def inner(): framework.call(lambda: None)
        def outer(): framework.call(inner)
        outer()
    """
    record = task.crash(source)
    assert (record.file, record.line) == (str(task.folder / "program.py"), 5)


@pytest.mark.parametrize(
    "file", ["numpy/random/_generator.pyx", "/build/h5py/_objects.pyx", "built/elsewhere.py", "/built/elsewhere.py"]
)
def test_the_user_line_is_in_an_existing_file_never_in_cython_code(task: Task, file: str) -> None:
    record = task.crash(f"x = 1\nexec(compile('\\n1 / 0', {file!r}, 'exec'))")
    assert (record.file, record.line) == (str(task.folder / "program.py"), 2)


@pytest.mark.tensorflow
def test_the_user_line_of_a_numpy_error_is_the_call_of_numpy(task: Task) -> None:
    record = task.crash("import numpy\n\nnumpy.random.default_rng().choice([], 3)")
    assert (record.exception, record.file, record.line) == ("ValueError", str(task.folder / "program.py"), 3)


def test_the_user_line_can_be_inside_a_zip_archive(task: Task) -> None:
    with zipfile.ZipFile(task.folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import part\n")
        archive.writestr("part.py", "x = 1\nx / 0\n")
    record = task.crash("", target="app.zip")
    assert (record.file, record.line) == (str(task.folder / "app.zip" / "part.py"), 2)


def test_the_first_failure_in_a_graph_error_message_gives_the_user_line(task: Task) -> None:
    trace = 'Detected at node a defined at (most recent call last):\n  File "program.py", line {}, in f\n\n'
    message = f"Graph execution error:\n\n{trace.format(7)}{trace.format(8)}2 root error(s) found.\n"
    record = task.crash(f"x = 1\nraise ValueError({message!r})")
    assert (record.file, record.line) == ("program.py", 7)


@pytest.mark.parametrize(("function", "line"), [("<module>", 3), ("call", 2)])
def test_a_graph_error_has_the_line_of_the_failed_call_or_traced_function(task: Task, function: str, line: int) -> None:
    """Unless the line is in a function that was traced into the graph: that function no longer runs."""
    trace = 'Detected at node a defined at (most recent call last):\\n  File "%s", line 2, in ' + function
    record = task.crash(f"x = 1\n\nraise ValueError('{trace}' % __file__)")
    assert (record.file, record.line) == (str(task.folder / "program.py"), line)
    assert record.place == SourceLine(str(task.folder / "program.py"), 3)


@pytest.mark.parametrize(
    ("library", "call"),
    [
        ("def fit(): raise ValueError", "fit"),
        ("def _fit(): raise ValueError\nfit = _fit", "fit"),
        ("fit = lambda: 1 / 0", "fit"),
        (
            "def handled(fn):\n    def error_handler(): fn()\n    return error_handler\n@handled\ndef fit(): 1 / 0",
            "fit",
        ),
    ],
)
def test_a_crash_record_names_the_library_function_that_the_program_called(
    task: Task, library: str, call: str | None
) -> None:
    packages = task.folder / "site-packages"
    packages.mkdir()
    (packages / "library.py").write_text(library)
    record = task.crash(f"import sys\nsys.path.append({str(packages)!r})\nimport library\nlibrary.fit()")
    assert record.place == SourceLine(str(task.folder / "program.py"), 4, call)


def test_a_crash_record_names_the_patched_function_not_one_that_the_patch_calls(task: Task) -> None:
    """Keras' own frames are removed, so the next frame is distlaunch's: the patched `fit`, or a helper of a patch."""
    ours = Path(crash_record.__file__).parents[1] / "keras_patches" / "callbacks.py"
    (task.folder / "patched.py").write_text(
        f"code = compile('def fit(x): 1 / 0\\ndef reduce(x): 1 / 0', {str(ours)!r}, 'exec')\nexec(code)\n"
        "fit(list(())) if __import__('os').environ.get('PATCHED') else None\n"
    )
    record = task.crash("import os\nos.environ['PATCHED'] = '1'\nimport patched")
    assert record.place == SourceLine(str(task.folder / "patched.py"), 3, "fit")


@pytest.mark.parametrize(("line", "call"), [("model.fit(x)", "fit"), ("model.fit(list(x))", None), ("x[1]", None)])
def test_a_crash_record_reads_the_called_function_from_the_line_without_frames(
    task: Task, line: str, call: str | None
) -> None:
    """Keras omits the frames of a nested call, such as `evaluate` in a callback of `fit`."""
    (task.folder / "filtered.py").write_text(
        "class Model:\n    def fit(self, x): 1 / 0\nmodel, x = Model(), ()\n"
        f"def run():\n    {line}\n"
        "def cut():\n    try: run()\n    except Exception as error:\n"
        "        error.__traceback__.tb_next.tb_next = None\n"
        "        raise error.with_traceback(error.__traceback__.tb_next)\n"
    )
    record = task.crash("import filtered\nfiltered.cut()")
    assert record.place == SourceLine(str(task.folder / "filtered.py"), 5, call)


def test_a_crash_record_keeps_the_beginning_and_end_of_a_long_message(task: Task) -> None:
    record = task.crash("raise ValueError('begins ' + 'x' * 100_000 + ' ends')")
    assert len(record.message) == MESSAGE_LIMIT
    assert record.message.startswith("begins x")
    assert "x\n… (cut here; the log has the whole message)\nx" in record.message
    assert record.message.endswith("x ends")


def test_a_syntax_error_in_an_imported_module_is_recorded_with_its_line(task: Task) -> None:
    (task.folder / "wrong.py").write_text("x = 1\nf(:\n")
    record = task.crash("import wrong")
    assert (record.exception, record.file, record.line) == ("SyntaxError", str(task.folder / "wrong.py"), 2)


def test_a_crash_record_has_the_time_of_the_raise_not_of_the_exit(task: Task) -> None:
    record = task.crash("import atexit, time\natexit.register(time.sleep, 0.5)\n1 / 0")
    assert time.time() - record.time >= 0.5


@pytest.mark.parametrize(
    "source", ["pass", "import sys; sys.exit()", "import sys; sys.exit(0)", "import sys; sys.exit(256)"]
)
def test_a_successful_program_leaves_no_crash_record(task: Task, source: str) -> None:
    assert task.run(source).status == 0
    assert not task.crash_file.exists()


def test_a_failed_forked_child_leaves_no_crash_record_for_its_parent(task: Task) -> None:
    assert task.run(PROGRAMS_TO_COMPARE["forked, and the child fails"]).status == 0
    assert not task.crash_file.exists()


def test_a_crash_record_is_private(task: Task) -> None:
    task.crash("1 / 0", preexec=lambda: os.umask(0))
    assert task.crash_file.stat().st_mode & 0o777 == 0o600
    assert not list(task.folder.glob("crash.json.*"))  # no partial file


@pytest.mark.parametrize("crash_file", ["no/such/folder/crash.json", "folder"])
def test_a_crash_record_that_cannot_be_written_does_not_hide_the_error(task: Task, crash_file: str) -> None:
    ended = task.run("1 / 0", crash_file=crash_file)
    assert ended.status == 1
    assert "distlaunch: could not write the crash record: " in ended.stderr
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ended.stderr.count("Traceback") == 1
    assert "worker_entry" not in ended.stderr
    assert not list(task.folder.glob("folder.*"))


@linux
def test_a_full_disk_does_not_change_the_error_and_status_of_a_program(task: Task) -> None:
    def full_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    ended = task.run("1 / 0", preexec=full_disk, env={"COVERAGE_PROCESS_START": ""})  # coverage would write a file
    assert ended.status == 1
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert ended.stderr.count("Traceback") == 1
    assert not task.crash_file.exists()


# --- without an agent ---


@pytest.mark.parametrize("runner", [BY_PATH, AS_MODULE], ids=["by its path", "as a module"])
def test_worker_entry_run_starts_a_program_without_an_agent(tmp_path: Path, runner: list[str]) -> None:
    shutil.copy(TASK_RAISE, tmp_path / "train.py")
    for arguments in (
        ["train.py"],
        ["-m", "train"],
        ["--no-keras-patch", "train.py"],
        ["--no-keras-patch", "-m", "train"],
    ):
        ended = run(tmp_path, [*runner, *arguments])
        assert ended.status == 1
        assert ended.stdout == "about to fail\n"
        assert ended.stderr.endswith("ValueError: no batch of 32\n")
    assert not list(tmp_path.glob("*.json"))  # only an agent asks for a crash record


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["run", "-m"], ["run", "--no-keras-patch"], ["dance"]], ids=" ".join
)
def test_a_wrong_worker_entry_command_line_prints_the_usage(tmp_path: Path, arguments: list[str]) -> None:
    ended = run(tmp_path, ["-m", "worker_entry", *arguments])
    assert ended.status == 1
    assert ended.stderr.startswith("usage: python -m worker_entry ")
    assert ended.stderr.count("\n") == 1


def test_worker_entry_run_names_a_missing_command(tmp_path: Path) -> None:
    ended = run(tmp_path, ["-m", "worker_entry", "run", "--", "no-such-command"])
    assert (ended.status, ended.stderr) == (1, "no-such-command: No such file or directory\n")


OTHER_TENSORFLOW = {
    "distribute.distribute_lib": "class Strategy: pass",
    "distribute.cross_device_utils": "class CollectiveReplicaLauncher:\n    def all_reduce(self, tensor): pass",
    "data.ops.iterator_ops": "class OwnedIterator:\n    def get_next(self, name): pass",
    "eager.context": "class Context:\n    def configure_coordination_service(self, timeout): pass",
}
"""Modules of a TensorFlow that lacks the names that are patched."""


def test_a_tensorflow_without_the_expected_functions_is_not_patched(tmp_path: Path) -> None:
    lines = ["from worker_entry.hooks import built_strategy, collective_time, coordination_timeout, input_time"]
    lines += ["built_strategy.watch_strategies(print)", "coordination_timeout.lengthen(60.0)"]
    lines += ["clocks = collective_time.CollectiveClock(), input_time.InputClock()"]
    for name, source in OTHER_TENSORFLOW.items():
        file = tmp_path / "tensorflow" / "python" / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (tmp_path / "tensorflow", tmp_path / "tensorflow" / "python", file.parent):
            (folder / "__init__.py").touch()
        file.write_text(source)
        lines += [f"from tensorflow.python.{name} import *"]
    lines += ["for cls in Strategy, CollectiveReplicaLauncher, OwnedIterator, Context:"]
    lines += ["    print(*(name for name in vars(cls) if not name.startswith('__')))"]
    lines += ["    assert not any(hasattr(value, '__wrapped__') for value in vars(cls).values())"]
    lines += ["print(*(clock.waited_s() for clock in clocks))"]
    (tmp_path / "program.py").write_text("\n".join(lines))
    ended = run(tmp_path, ["program.py"])
    assert ended == Ended(0, "\nall_reduce\nget_next\nconfigure_coordination_service\nNone None\n", "")


LOADER = """import threading
def load():
    {}['a']
thread = threading.Thread(target=load, name='loader')
thread.start()
"""


@pytest.mark.parametrize("source", ["", "raise SystemExit", "import sys; sys.exit(256)"])
@pytest.mark.parametrize("after", ["", "import atexit, os\natexit.register(os.abort)\n"])
def test_a_program_that_reaches_its_end_counts_as_finished_if_its_interpreter_aborts(
    task: Task, source: str, after: str
) -> None:
    assert task.run(after + source).status == (-signal.SIGABRT if after else 0)
    assert task.finished_file.exists()
    assert not task.crash_file.exists()


@pytest.mark.parametrize(
    "source",
    ["1 / 0", "raise SystemExit(3)", "import os; os._exit(0)", "import os; os.abort()", "import sys; sys.exit('no')"],
)
def test_a_failed_program_does_not_count_as_finished(task: Task, source: str) -> None:
    task.run(source)
    assert not task.finished_file.exists()


def test_the_exit_of_a_forked_child_does_not_mark_its_parent_as_finished(task: Task) -> None:
    source = "import os\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n    os._exit(os.path.exists('finished'))\n"
    assert task.run(source).status == 0


def test_an_exception_that_ends_a_thread_is_recorded_and_printed(task: Task) -> None:
    ended = task.run(LOADER + "thread.join()\n")
    assert ended.status == 0
    assert "KeyError: 'a'" in ended.stderr
    record = parse(CrashRecord, json.loads(task.crash_file.read_text()), "crash record")
    assert (record.exception, record.line, record.thread) == ("KeyError", 3, "loader")


def test_sys_exit_after_a_thread_exception_keeps_the_record_of_the_thread(task: Task) -> None:
    record = task.crash(LOADER + "thread.join()\nraise SystemExit(1)\n")
    assert (record.exception, record.thread) == ("KeyError", "loader")


def test_a_main_thread_exception_replaces_the_record_of_another_thread(task: Task) -> None:
    record = task.crash(LOADER + "thread.join()\nraise ValueError('no batch')\n")
    assert (record.exception, record.line, record.thread) == ("ValueError", 7, None)


def test_the_status_file_shows_the_phases_of_the_tensorflow_import(task: Task) -> None:
    (task.folder / "tensorflow.py").write_text("print(open('status.json').read())\n")
    source = "print(open('status.json').read())\nimport tensorflow\nprint(open('status.json').read())\n"
    ended = task.run(source)
    assert [json.loads(line)["phase"] for line in ended.stdout.splitlines()] == [
        "has not imported TensorFlow",
        "is importing TensorFlow",
        "has imported TensorFlow",
    ]


@pytest.mark.parametrize("library", ["tensorflow", "torch", "jax", "keras"])
@pytest.mark.parametrize(("before", "after"), [("", True), ("gc.disable()", False)])
@pytest.mark.parametrize("end", ["", "raise ImportError"])
def test_garbage_collection_is_paused_during_a_big_import_and_then_restored(
    task: Task, library: str, before: str, after: bool, end: str
) -> None:
    (task.folder / f"{library}.py").write_text(f"import gc; print(gc.isenabled())\n{end}\n")
    ended = task.run(f"import gc; {before}\ntry: import {library}\nexcept ImportError: pass\nprint(gc.isenabled())\n")
    assert ended.stdout == f"False\n{after}\n"
