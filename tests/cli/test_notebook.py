"""Clusters and reports in a notebook, with a real kernel."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from launcher.report.models import RunReport
from launcher.report.notebook import SHOWN_TASKS, render_report, render_status
from launcher.report.status_report import TaskState
from launcher.verdict.models import Verdict
from tests.harness.builders.statuses import make_status
from tests.harness.witness import MARK, await_none_left, make_mark

COVERS = ("launcher/python", "launcher/public", "launcher/report/notebook.py")


class Recorder(NotebookClient):
    """Runs a notebook, and keeps all HTML that it shows, also what later output replaces."""

    def __init__(self, *cells: str, folder: Path) -> None:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        where = {"metadata": {"path": str(folder)}}
        super().__init__(
            notebook,
            timeout=120,
            kernel_name="python3",
            resources=where,
            allow_errors=True,
        )
        self.shown: list[str] = []

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.shown += [msg["content"]["data"]["text/html"]] if "text/html" in msg["content"].get("data", {}) else []
        return super().process_message(msg, cell, cell_index)

    def outputs(self, cell: int) -> list[dict[str, Any]]:
        """What the cell shows at last."""
        return [dict(output.get("data", {"text/plain": output.get("text")})) for output in self.nb.cells[cell].outputs]


def text_of(page: str) -> str:
    """The text of HTML, with a `|` after each cell of a table."""
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"</t[dh]>", "|", page)))


@pytest.mark.slow
@pytest.mark.smoke
def test_a_notebook_cell_shows_a_running_cluster_and_then_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = make_mark()
    monkeypatch.setenv(MARK, mark[MARK])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "waits.sh").write_text("until test -e seen; do sleep 0.1; done\n")
    client = Recorder(
        "from distlaunch import *",
        "from time import sleep\n"
        "with Cluster(local_spec(command=['sh', 'waits.sh'], workers=2)) as cluster:\n"
        "    while 'running' not in cluster._repr_html_(): sleep(0.1)\n"
        "    sleep(2.5)\n"
        "    open('seen', 'w').close()\n"
        "    report = cluster.wait()",
        "report",
        "print(cluster)",
        "run_local(command=['false'], workers=1)",
        folder=tmp_path,
    )
    client.execute()
    await_none_left(mark)
    first, second, third, fourth = (client.outputs(cell) for cell in (1, 2, 3, 4))
    states = [text_of(page) for page in client.shown]
    assert any("worker:0|local|running|" in state for state in states)  # shown while the cell ran
    [table] = first  # replaced, not repeated
    assert "worker:1|local|exit status 0|" in text_of(table["text/html"])
    assert ": succeeded, attempt 1, " in text_of(table["text/html"])
    [drawn] = second
    assert re.match(r"<RunReport \S+-local-2-\w+: succeeded in [\d.]+ s>", drawn["text/plain"])
    assert "worker:0|local|exit status 0|attempt-1/worker-0.log|" in text_of(drawn["text/html"])
    [printed] = third
    assert printed["text/plain"].startswith("<Cluster ")
    _, failed = fourth
    assert "Error: worker:0 on local exited with status 1" in text_of(failed["text/html"])
    assert "worker:0|local|exit status 1|" in text_of(failed["text/html"])


def test_the_notebook_table_escapes_html_in_names_and_states() -> None:
    task = TaskState(task="worker:0", node="<b>", state="<script>", metrics={}, gpus=[])
    page = render_status(make_status(task, run_id="<run>", now=5.0))
    assert "<script>" not in page
    assert "<run>: running, attempt 1, 5 s" in text_of(page)
    assert "worker:0|<b>|<script>|" in text_of(page)
    assert "Loss" not in page  # a column without a value


def test_the_notebook_table_is_truncated_for_many_tasks() -> None:
    task = TaskState(task="worker:0", node="a", state="running", metrics={}, gpus=[])
    page = render_status(make_status(*[task] * (SHOWN_TASKS + 1000)))
    assert page.count("<td>worker:0</td>") == SHOWN_TASKS
    assert "and 1,000 more tasks" in page


def test_the_notebook_report_of_a_run_without_attempts_shows_its_cause() -> None:
    verdict = Verdict(reference="interrupted", message="<ssh> was interrupted")
    report = RunReport(
        run_id="x", name="x", outcome="interrupted", exit_status=130, versions={}, directory="/", started=1.0,
        ended=2.0, verdict=verdict, attempts=[],
    )  # fmt: skip
    page = text_of(render_report(report))
    assert "x: interrupted after 1.0 s, exit status 130" in page
    assert "Error: <ssh> was interrupted [interrupted]" in page
