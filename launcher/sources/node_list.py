"""Finds the nodes of a spec that does not list them: runs the command that names them, or reads the Slurm job."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from launcher import helpers
from launcher.errors import DistlaunchError, InterruptionError, UsageError
from launcher.signals import Interruption, Interrupts
from launcher.slurm.allocation import expect_nodes, find_allocation, make_nodes
from launcher.spec.models import ClusterSpec
from launcher.spec.node_list import NodeListError, take_fields, take_nodes
from launcher.spec.nodes import SLURM
from launcher.spec.parts import NodeSourceSpec
from launcher.spec.pods import KUBERNETES, PodsSpec
from launcher.spec.redaction import hide_text, hide_words
from launcher.wording import SHOWN_LIMIT

ANSWER_S = 60.0
"""How long a command may take."""
OUTPUT_LIMIT = 16 << 20
"""Bytes that a command may print."""
STDERR_LINES = 5
"""Lines of the command's stderr that an error shows."""
STDERR_LIMIT = 1 << 16
"""Bytes at the end of stderr that are searched for these lines."""
_POLL_S = 0.1


class NodeCommandError(DistlaunchError):
    """The command that names the nodes failed, was too slow, or named none."""

    reference = "node-list"


def find_nodes(
    spec: ClusterSpec, is_wanted: Callable[[], bool] = lambda: True, limit_s: float = ANSWER_S
) -> ClusterSpec:
    """The spec with the nodes that its source names now; the same spec if it has no source.

    Args:
        spec: the spec to find nodes for.
        is_wanted: whether the answer is still wanted; if not, returns the spec unchanged.
        limit_s: how long the command may take.

    Raises:
        NodeCommandError: the command gives no valid nodes.
    """
    if spec.source is None:
        return spec
    if spec.source == SLURM:
        return _take_allocation(spec)
    if isinstance(spec.source, PodsSpec):
        return preview_pods(spec)
    command = spec.source.command
    shown = shlex.join(hide_words(command))
    answer = _run(command, shown, is_wanted, limit_s)
    if answer is None:
        return spec
    try:
        return take_nodes(spec, answer)
    except NodeListError as error:
        lines = [hide_text(line) for line in error.errors[:SHOWN_LIMIT]]
    raise NodeCommandError(f"the nodes that `{shown}` names cannot be used", evidence=lines)


def _take_allocation(spec: ClusterSpec) -> ClusterSpec:
    """The spec with the nodes of the Slurm job that this process belongs to."""
    allocation = find_allocation(os.environ)
    return place_nodes(spec, make_nodes(allocation, spec), f"job {allocation.job}")


def preview_nodes(spec: ClusterSpec) -> ClusterSpec:
    """The spec with nodes for a plan or a rehearsal; a Slurm job need not exist yet.

    Raises:
        UsageError: the nodes of the Slurm job do not fit the spec.
        InterruptionError, NodeCommandError: see `find_nodes_first`.
    """
    if spec.source == SLURM:
        return place_nodes(spec, expect_nodes(spec), "the job that it asks for")
    return find_nodes_first(spec)


def preview_pods(spec: ClusterSpec) -> ClusterSpec:
    """The spec with placeholder nodes for its pods; the real names are known once Kubernetes has created the pods."""
    assert isinstance(spec.source, PodsSpec)
    return place_pods(spec, [(f"pod-{index}", None) for index in range(spec.source.count)])


def place_pods(spec: ClusterSpec, pods: Sequence[tuple[str, str | None]]) -> ClusterSpec:
    """The spec with these pods, by name and address."""
    assert isinstance(spec.source, PodsSpec)
    nodes = [
        {
            "host": name,
            "connection": KUBERNETES,
            "tasks": spec.tasks_for(spec.source.workers_per_pod, index),
            **({"address": address} if address is not None else {}),
            **({"python": spec.source.python} if spec.source.python is not None else {}),
        }
        for index, (name, address) in enumerate(pods)
    ]
    return place_nodes(spec, nodes, "what `nodes:` asks for")


def place_nodes(spec: ClusterSpec, nodes: Sequence[Mapping[str, Any]], source: str) -> ClusterSpec:
    """The spec with these nodes; `source` describes them in an error.

    Raises:
        UsageError: the nodes do not fit the spec.
    """
    try:
        return take_fields(spec, nodes)
    except NodeListError as error:
        raise UsageError(f"{source} does not fit the spec", evidence=error.errors) from None


def find_nodes_first(spec: ClusterSpec) -> ClusterSpec:
    """Like `find_nodes`, for the time before a run handles signals itself.

    Raises:
        InterruptionError: a signal arrived; the command has ended too.
        NodeCommandError: the command gives no valid nodes.
    """
    if spec.source is None or threading.current_thread() is not threading.main_thread():
        return find_nodes(spec)
    interrupts = Interrupts()
    interrupts.install()
    try:
        if isinstance(spec.source, NodeSourceSpec):
            answered = find_nodes(spec, lambda: interrupts.asked is None)
            with interrupts.raising():  # a signal may have arrived in the meantime
                return answered
        with interrupts.raising():
            return find_nodes(spec)
    except Interruption as interruption:
        raise InterruptionError(interruption.signum) from None
    finally:
        interrupts.restore()


def with_nodes(spec: ClusterSpec) -> ClusterSpec:
    """The spec, with nodes if it has none yet; see `find_nodes_first`."""
    return spec if spec.nodes else find_nodes_first(spec)


def _run(command: Sequence[str], shown: str, is_wanted: Callable[[], bool], limit_s: float) -> bytes | None:
    """Returns the command's output, None if no longer wanted, after the command's process group has ended."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:  # a pipe would have to be drained
        try:
            process = helpers.start(
                [os.path.expanduser(command[0]), *command[1:]],  # noqa: PTH111 - keeps a name without a slash
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
        except OSError as error:
            raise NodeCommandError(
                f"cannot run `{shown}`, which names the nodes: {error.strerror}", hint="check `nodes.from.command`"
            ) from None
        try:
            problem = _wait(process, stdout, is_wanted, limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if not is_wanted():
            return None
        answer = _read(stdout, 0)
        if not problem and not answer.strip():
            problem = "printed nothing; it must print one host a line, or JSON"
        if not problem:
            return answer
        lines = _read(stderr, -STDERR_LIMIT).decode(errors="replace").splitlines()
    raise NodeCommandError(
        f"`{shown}`, which names the nodes, {problem}",
        evidence=[hide_text(line) for line in lines if line.strip()][-STDERR_LINES:],
        hint="run the command by hand; it runs on this machine, in the current folder",
    )


def _wait(process: subprocess.Popen[bytes], stdout: IO[bytes], is_wanted: Callable[[], bool], limit_s: float) -> str:
    """Waits until the command has ended; returns its problem, or an empty string."""
    until = time.monotonic() + limit_s
    while is_wanted():
        status = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(_POLL_S)
        if os.fstat(stdout.fileno()).st_size > OUTPUT_LIMIT:
            return f"printed more than {OUTPUT_LIMIT >> 20} MiB"
        if status is not None and status != 0:
            return f"ended with {f'status {status}' if status > 0 else signal.Signals(-status).name}"
        if status == 0:
            return ""
        if time.monotonic() > until:
            return f"did not end within {limit_s:g} s"
    return ""


def _read(file: IO[bytes], start: int) -> bytes:
    """Returns the file's content from `start`, up to the limit; a negative start counts from the end."""
    size = os.fstat(file.fileno()).st_size
    file.seek(start if start >= 0 else max(size + start, 0))
    return file.read(OUTPUT_LIMIT)
