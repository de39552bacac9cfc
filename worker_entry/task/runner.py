"""Runs the user's Python program in this interpreter, as `python train.py` or `python -m train` would.

The program gets its own `__main__`, `sys.argv` and `sys.path[0]`, and exits with the status that plain Python would
give it. In addition it gets `faulthandler`, the patches for Keras (`keras_patches`) and, when it fails, a crash record:
a small JSON file with the exception, its line, and the time. The time matters: an interpreter takes about a second to
shut down, so the exit statuses of a cluster's tasks can arrive in the wrong order.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import functools
import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Sequence
from typing import Optional

from worker_entry.hooks import (
    built_strategy,
    collective_time,
    coordination_timeout,
    devices,
    import_garbage,
    input_time,
    jax_cluster,
    jax_time,
    own_resolver,
    own_tf_config,
    python_data,
    served_ports,
)
from worker_entry.keras_patches import patching
from worker_entry.protocol import child_order, environment
from worker_entry.protocol.pod_statuses import PREEMPTED
from worker_entry.protocol.strategy_names import JAX, NO_STRATEGY
from worker_entry.protocol.values import HAS_JOINED, Injection, KerasPatch, ModelDigest, Program, Progress, TaskOrder
from worker_entry.system import clock
from worker_entry.task import crash_record, faults, keras_progress, status_file
from worker_entry.task.meter import Meter
from worker_entry.task.meter import install as install_meter
from worker_entry.task.signal_handlers import (
    note_term_handler,
    restore_in_children,
    watch_interrupts,
    watch_term_handlers,
)


def run(order: TaskOrder) -> None:
    """Runs the program; returns or raises SystemExit, so that the interpreter exits as plain Python would.

    Args:
        order: the task's order; its program must be a script or a module, not a command.
    """
    program = order.program
    _prepare(order)
    process = os.getpid()

    threads: list[str] = []

    def record(error: BaseException, thread: Optional[str] = None) -> None:
        if thread is not None:
            threads.append(thread)
        elif threads and isinstance(error, SystemExit):
            return  # the program exits because of its thread's exception, whose record is more useful
        if os.getpid() == process:  # not in a child that the program has forked
            if thread is None and not _has_saved(error):
                jax_cluster.note_failure()
            if order.crash_file is not None:
                write_crash(order.crash_file, error, thread)

    def finish() -> None:
        if order.finished_file is not None and os.getpid() == process:
            with contextlib.suppress(OSError):
                with open(os.open(order.finished_file, os.O_WRONLY | os.O_CREAT, 0o600), "w") as stream:
                    stream.write(repr(clock.now()))

    _watch_threads(record)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if "__annotations__" in vars(sys.modules["__main__"]):  # up to Python 3.13
        main.__annotations__ = {}
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing, imported early, has stored the old module there
        sys.modules["__mp_main__"] = main
    _set_arguments(program)
    # Registered before the program's exit handlers, so that it runs after them.
    interrupted = _InterruptedAtExit()
    try:
        if program.kind == "module":
            _set_first_path(os.getcwd())
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        elif os.path.isdir(program.target) or zipfile.is_zipfile(program.target):
            sys.path.insert(0, os.path.join(os.getcwd(), program.target))
            runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # as `python DIRECTORY` does
        else:
            _run_script(program.target, main)
    except SystemExit as error:
        if crash_record.find_exit_status(error) != 0:
            record(error)
        else:
            finish()
        raise
    except BaseException as error:  # noqa: BLE001 - it is printed and recorded, and ends the process
        record(error)
        uncaught = error
    else:
        finish()
        return
    # Here, and not while the exception is handled: it must not become the context of an exception that a hook raises.
    uncaught.__traceback__ = _without_our_frames(uncaught.__traceback__)
    interrupted.by_signal = isinstance(uncaught, KeyboardInterrupt)
    _show_uncaught(uncaught)
    raise SystemExit(1)  # without a second traceback


def report_phases(status: status_file.StatusFile) -> jax_cluster.Joining:
    """Reports the import of the program's framework; returns what reports that the program joins its cluster."""
    status_file.report_phases(status, JAX if jax_cluster.is_here() else status_file.TENSORFLOW)
    return jax_cluster.Joining(
        begin=functools.partial(status.report_strategy, JAX),
        end=functools.partial(status.report_phase, HAS_JOINED),
    )


def make_meter(status: status_file.StatusFile) -> Meter:
    """A meter that reports to this status, and knows how long the program waits for other tasks and for input."""
    if jax_cluster.is_here():
        clock_of_jax = jax_time.JaxClock()
        return Meter(status, clock_of_jax.waited_s, clock_of_jax.read_s)
    return Meter(status, collective_time.CollectiveClock().waited_s, input_time.InputClock().waited_s)


def _has_saved(error: BaseException) -> bool:
    """Whether the program ends because it is preempted: its process then leaves when the others have saved as well."""
    return isinstance(error, SystemExit) and crash_record.find_exit_status(error) in PREEMPTED


def _prepare(order: TaskOrder) -> None:
    """Sets up everything that the program gets in addition to plain Python; called before the program begins."""
    in_cluster = own_tf_config.NAME in os.environ
    faulthandler.enable(all_threads=True)
    if order.stacks_file is not None:
        status_file.dump_on_signal(order.stacks_file)
    restore_in_children()
    if order.handler_file is not None:
        watch_term_handlers(order.handler_file)
    if order.interrupted_file is not None:
        watch_interrupts(order.interrupted_file)
    patches: list[KerasPatch] = []
    note_patch = patches.append
    note_model: Callable[[ModelDigest], None] = _ignore
    joining = jax_cluster.UNNOTED
    if order.status_file is not None:
        status = status_file.StatusFile(order.status_file, order.not_forked)
        joining = report_phases(status)
        note_model = status.report_model
        watchers: list[Callable[[Progress], None]] = []
        built: list[str] = []

        def note_strategy(name: str) -> None:
            built.append(name)
            status.report_strategy(name)

        if order.progress:
            meter = make_meter(status)
            install_meter(meter)
            if os.environ.get(environment.TRACE):
                from worker_entry.task import trace  # most tasks need none of what it imports

                last_step = os.environ.get(environment.TRACE_STEPS)
                trace.Trace(os.environ[environment.TRACE], int(last_step) if last_step else None).install(meter)

            def begin_keras() -> None:
                for patch in patches:
                    status.report_keras(patch)
                begin_training()

            def begin_training() -> None:
                if (in_cluster or jax_cluster.is_here()) and not built and not built_strategy.is_connected():
                    note_strategy(NO_STRATEGY)

            keras_progress.install(meter, begin_keras, begin_training)
            watchers = meter.watchers
        else:  # without a meter, it is not known when training begins
            note_patch = status.report_keras
        faults.install(order.injections, status, watchers)
        built_strategy.watch_preemption_handlers(status.report_preemption_handler)
        if jax_cluster.is_here():
            jax_cluster.watch_preemption(functools.partial(_note_saving, order, status))
        if in_cluster:
            built_strategy.watch_strategies(lambda strategy: note_strategy(built_strategy.find_name(strategy)))
            built_strategy.watch_jax(note_strategy)
            own_tf_config.install(status.report_own_tf_config, keep=order.keep_own_tf_config)
            if not order.keep_own_tf_config:
                own_resolver.install(status.report_own_resolver)
    patch_libraries(order, note_patch, note_model, joining)
    import_garbage.install()
    os.environ.update(child_order.make_child_env(order, os.environ))


def _ignore(_: ModelDigest) -> None:
    pass


def _note_saving(order: TaskOrder, status: status_file.StatusFile) -> None:
    """Notes that the program saves when it gets SIGTERM, which JAX handles for it, and then ends by itself."""
    status.report_preemption_handler()
    if order.handler_file is not None:
        note_term_handler(order.handler_file)


def patch_libraries(
    order: TaskOrder,
    report: Callable[[KerasPatch], None] = lambda _: None,
    report_model: Callable[[ModelDigest], None] = _ignore,
    joining: jax_cluster.Joining = jax_cluster.UNNOTED,
    *,
    quiet: bool = False,
) -> None:
    """Patches TensorFlow and Keras as soon as they are imported.

    Args:
        order: selects the patches.
        report: called with the patch of Keras, if anything was patched.
        report_model: called with each digest of a model that is trained.
        joining: called when the program connects its process to a cluster of JAX.
        quiet: whether to patch without logging it.
    """
    if order.coordination_timeout_s and "TF_CONFIG" in os.environ:
        coordination_timeout.lengthen(order.coordination_timeout_s)
    if own_tf_config.NAME in os.environ:
        served_ports.install()
    if jax_cluster.is_here():
        jax_cluster.install(order.coordination_timeout_s, joining)
    python_data.install()
    if os.environ.get(environment.DEVICES):
        devices.install(int(os.environ[environment.DEVICES]))
    if order.patch_keras:
        log = _log if not quiet else lambda _: None
        several = own_tf_config.NAME in os.environ or jax_cluster.is_here()
        patching.install(log, report, report_model, cluster=several)


def _run_script(path: str, main: types.ModuleType) -> None:
    absolute = os.path.join(os.getcwd(), path)  # like Python, not normalized: `./` stays
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    main.__dict__.update(__file__=absolute, __cached__=None, __loader__=loader)
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(f"{sys.executable}: can't open file {absolute!r}: [Errno {error.errno}] {error.strerror}\n")
        raise SystemExit(2) from None
    code = compile(source, absolute, "exec", dont_inherit=True)
    exec(code, main.__dict__)  # noqa: S102 - running the user's program is this module's job


def _set_arguments(program: Program) -> None:
    """Sets the program's view of its own command line, with which some programs restart themselves."""
    words = [program.target, *program.args]
    if hasattr(sys, "orig_argv"):  # since Python 3.10
        before = len(sys.orig_argv) - len(sys.argv)  # the interpreter and its options, without this package
        python = sys.orig_argv[:before]
        if python[-1:] == ["-m"]:
            del python[-1]
        sys.orig_argv[:] = [*python, *(["-m"] if program.kind == "module" else []), *words]
    sys.argv = words
    if program.kind == "module":
        sys.argv[0] = "-m"


def _show_uncaught(error: BaseException) -> None:
    """Prints an exception as Python prints an uncaught one; raises SystemExit if a hook does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    if not hasattr(sys, "excepthook"):
        _print("sys.excepthook is missing\n")
        _display(error)
        return
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as failure:  # noqa: BLE001 - it is printed
        failed = failure
    else:
        return
    failed.__traceback__ = _without_our_frames(failed.__traceback__)
    _print("Error in sys.excepthook:\n")
    _display(failed)
    _print("\nOriginal exception was:\n")
    _display(error)


def _display(error: BaseException) -> None:
    sys.__excepthook__(type(error), error, error.__traceback__)


def _print(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, or None
        sys.stderr.write(text)


def _watch_threads(record: Callable[[BaseException, str], None]) -> None:
    """Records the exception that ends a thread of the program, because the main thread may wait for ever for it."""
    show = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            record(arguments.exc_value, arguments.thread.name if arguments.thread is not None else "?")
        show(arguments)

    threading.excepthook = hook


class _InterruptedAtExit:
    """Ends the process by SIGINT after all exit handlers, as Python does after an unhandled KeyboardInterrupt."""

    by_signal = False

    def __init__(self) -> None:
        atexit.register(self._end)

    def _end(self) -> None:
        if self.by_signal:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)


def _set_first_path(path: str) -> None:
    # -P and PYTHONSAFEPATH (3.11) forbid this entry.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, path)


def _without_our_frames(trace: Optional[types.TracebackType]) -> Optional[types.TracebackType]:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def write_crash(path: str, error: BaseException, thread: Optional[str] = None) -> None:
    """Writes the record of the exception that ended the program or one of its threads."""
    try:
        crash_record.write(path, error, thread)
    except Exception as problem:  # noqa: BLE001 - such as a full disk: it must not hide the program's own error
        _log(f"could not write the crash record: {problem}")


def _log(text: str) -> None:
    with contextlib.suppress(Exception):  # stderr may be closed, and the disk may be full
        sys.stderr.write(f"distlaunch: {text}\n")
        sys.stderr.flush()


def main(arguments: Sequence[str]) -> None:
    """`task FILE`: runs the program of a JSON file, so that no text of the user is on a command line."""
    with open(arguments[0], encoding="utf-8") as stream:
        values = json.load(stream)
    program = Program(**values.pop("program"))
    injections = [Injection(**injection) for injection in values.pop("injections", ())]
    run(TaskOrder(program, injections=injections, **values))


def main_by_hand(arguments: Sequence[str]) -> None:
    """`run [--no-keras-patch] (SCRIPT | -m MODULE | -- COMMAND) [ARGS…]`: `distlaunch plan` prints such commands."""
    rest = list(arguments)
    patch = "--no-keras-patch" not in rest[:1]
    if not patch:
        del rest[0]
    kind = {"-m": "module", "--": "command"}.get(rest[0] if rest else "", "script")
    if kind != "script":
        del rest[0]
    if not rest:
        raise SystemExit(
            "usage: python -m worker_entry run [--no-keras-patch] (SCRIPT | -m MODULE | -- COMMAND) [ARGS…]"
        )
    order = TaskOrder(Program(kind=kind, target=rest[0], args=rest[1:]), patch_keras=patch, progress=False)
    if kind != "command":
        run(order)
        return
    try:
        os.execvpe(rest[0], rest, child_order.make_child_env(order, os.environ))  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise SystemExit(f"{rest[0]}: {error.strerror}") from None
