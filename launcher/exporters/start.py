"""Starts the exporters that the spec asks for: metrics, notifications, and curves for TensorBoard."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.console.writer import Console
from launcher.errors import UsageError
from launcher.exporters.tensorboard import Nodes, ScalarSender
from launcher.printable import printable
from launcher.report.status_report import RunStatus
from launcher.rundir.journal import Journal
from launcher.spec.models import ClusterSpec

if TYPE_CHECKING:
    from launcher.exporters.metrics import MetricsFile, MetricsServer
    from launcher.exporters.notify import Notifier, Recipients


@contextlib.contextmanager
def opened_exporters(spec: ClusterSpec, cwd: str) -> Iterator[Exporters]:
    """Opens the exporters that must exist before the run begins, and closes all of them at the end.

    Raises:
        UsageError: the spec asks for something impossible; nothing was started.
    """
    with contextlib.ExitStack() as owned:
        yield Exporters(spec, cwd, os.environ, owned)


class Exporters:
    """The exporters of a run, which never delay or fail it.

    `begin` and `attach` start them; `owned` closes them.

    Args:
        spec: the user's spec.
        cwd: where the run was started; paths and commands are relative to it.
        environ: has the URL of the webhook if the spec does not.
        owned: closes the exporters.

    Raises:
        UsageError: the spec asks for something impossible.
    """

    def __init__(self, spec: ClusterSpec, cwd: str, environ: Mapping[str, str], owned: contextlib.ExitStack) -> None:
        self._owned = owned
        self._server: MetricsServer | None = None
        self._file: MetricsFile | None = None
        self._recipients = _find_recipients(spec, environ, cwd)
        self._notifier: Notifier | None = None
        self._make_status: Callable[[], RunStatus] | None = None
        self._journal: Journal | None = None
        self._console: Console | None = None
        if spec.metrics is not None or spec.metrics_file is not None:
            _check_client()
        if spec.metrics is not None:
            from launcher.exporters.metrics import MetricsServer

            self._server = MetricsServer(spec.metrics)
            owned.callback(self._server.close)
        if spec.metrics_file is not None:
            from launcher.exporters.metrics import MetricsFile

            self._file = MetricsFile(Path(cwd, Path(spec.metrics_file).expanduser()))
            owned.callback(self._file.close)

    @contextlib.contextmanager
    def warning_at(self, console: Console) -> Iterator[None]:
        """Shows failures on the console. At the end, waits briefly for notifications, so their failures are shown."""
        self._console = console
        try:
            yield
        finally:
            if self._notifier is not None:
                self._notifier.settle()
            self._console = None

    def begin(self, make_status: Callable[[], RunStatus], journal: Journal) -> None:
        """Starts the exporters that need no nodes."""
        self._make_status, self._journal = make_status, journal
        if self._server is not None:
            self._server.begin(make_status)
        if self._file is not None:
            self._file.begin(make_status, self._warn)
        if self._recipients is not None:
            from launcher.exporters.notify import Notifier

            self._notifier = Notifier(self._recipients, make_status, self._warn)
            self._owned.callback(self._notifier.close)
            journal.listen(self._notifier.note)

    def attach(self, spec: ClusterSpec, nodes: Nodes) -> None:
        """Starts the exporters that need the nodes; `spec` has the tasks' own log directory."""
        if spec.tensorboard and spec.logs is not None and self._make_status is not None and self._journal is not None:
            sender = ScalarSender(spec.logs, self._make_status, self._journal, nodes)
            self._owned.callback(sender.close)
            sender.begin()

    def _warn(self, text: str) -> None:
        if self._console is not None:
            self._console.warn(text)
        else:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"Warning: {printable(text)}\n")


def _check_client() -> None:
    try:
        import prometheus_client  # noqa: F401 - only checks that it is installed
    except ImportError:
        raise UsageError(
            "metrics need the package prometheus_client, which is not installed",
            hint="install it: pip install 'distlaunch[metrics]'",
        ) from None


def _find_recipients(spec: ClusterSpec, environ: Mapping[str, str], cwd: str) -> Recipients | None:
    notify = spec.notify
    if notify is None:
        return None
    from launcher.exporters.notify import Recipients

    url = notify.webhook
    if notify.webhook_from is not None:
        url = environ.get(notify.webhook_from, "").strip()
        if not url.startswith(("http://", "https://")):
            problem = "is not the URL of a web server" if url else "is not set in this environment"
            raise UsageError(
                f"notify.webhook_from: {notify.webhook_from} {problem}",
                hint="export the URL; the files of a run do not contain it",
            )
    return Recipients(url, notify.command, frozenset(notify.on), cwd)
