"""`distlaunch report` makes a page of every run that has a folder: damaged, copied, lost, never started, running."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from launcher.commands import page
from launcher.commands.requests import ask_status, ask_to_end
from launcher.errors import UsageError
from launcher.exporters.page_reading import LINES_OF_KIND, read_page_data
from launcher.exporters.page_writing import write_at_end, write_page, write_proof
from launcher.proof.models import ResumeProof
from launcher.report.samples import NodeUseSample, ProgressSample, TaskUseSample, render_sample
from launcher.rundir.directory import RunDir
from launcher.rundir.select import select_run
from tests.harness.builders.pages import T0, make_attempt, make_report
from tests.harness.builders.proofs import make_fault_result, make_inexact_result, make_proof
from tests.harness.builders.run_folders import RunFolder
from tests.harness.builders.runs_on_disk import GONE, append_events, write_run
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch, Ran, distlaunch_command
from worker_entry.protocol.samples import NodeSample, TaskSample

LOSS = str(PROGRAMS / "loss.py")


def words(text: str) -> str:
    """A page's text, without markup."""
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", text)))


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has failed in its second attempt, with a page that it has made itself."""
    folder = tmp_path_factory.mktemp("failed")
    command = distlaunch_command(
        *("local", "-n", "2", "--oversubscribe", "--run-dir", "run", "--report", "--set", "sample_every_s=0.2"),
        *("--max-restarts", "1", "-e", "PLAIN=geheim-1", "--env=OTHER=geheim-2", "--set", "env={THIRD: geheim-3}"),
        *("--", sys.executable, "-c", FAILS),
    )
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90)
    assert done.returncode == 1, done.stderr
    assert f"Open in a browser: {folder / 'run' / 'report.html'}" in done.stderr
    return folder / "run"


FAILS = """
import os, time
from worker_entry import progress
for step in range(1, 31):
    time.sleep(0.02)
    progress.report(step=step, loss=1 / step)
    if step == 20 + int(os.environ["DISTLAUNCH_ATTEMPT"]) and os.environ["DISTLAUNCH_TASK"] == "worker:1":
        raise ValueError("no label for <batch>")
"""


def test_the_report_option_writes_the_page_at_the_end_of_a_run(failed: Path) -> None:
    report = json.loads((failed / "report.json").read_text())
    shown = words((failed / "report.html").read_text())
    assert report["verdict"]["message"] in shown
    assert f"{report['ended'] - report['started']:.1f} s" in shown
    assert "ValueError: no label for <batch>" in shown
    assert stat.S_IMODE((failed / "report.html").stat().st_mode) == 0o600


def test_the_page_shows_the_command_without_the_values_of_variables(failed: Path) -> None:
    command = json.loads((failed / "run.json").read_text())["command"]
    assert command.startswith("distlaunch local -n 2 --oversubscribe --run-dir run --report")
    assert "geheim" not in command
    assert command in words((failed / "report.html").read_text())


def test_the_report_command_prints_the_path_of_the_page(failed: Path, distlaunch: Distlaunch, tmp_path: Path) -> None:
    done = distlaunch("report", str(failed), "-o", "page.html", run_dir=False)
    assert (done.status, done.stdout) == (0, "page.html\n"), done.stderr
    assert (tmp_path / "page.html").read_text().endswith("</html>\n")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_the_report_command_writes_to_stdout_for_a_dash(failed: Path, distlaunch: Distlaunch, tmp_path: Path) -> None:
    done = distlaunch("report", str(failed), "-o", "-", run_dir=False)
    assert done.status == 0
    assert done.stdout.startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == []
    assert distlaunch("report", str(failed), "-o", "-", "--open", run_dir=False).status == 2


def test_report_open_starts_a_browser(failed: Path, distlaunch: Distlaunch, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text('#!/bin/sh\necho "$1" > "$0.asked"\n')
    browser.chmod(0o755)
    done = distlaunch("report", str(failed), "-o", "a b.html", "--open", env={"BROWSER": str(browser)}, run_dir=False)
    assert done.status == 0, done.stderr
    assert (tmp_path / "browser.asked").read_text() == f"{(tmp_path / 'a b.html').as_uri()}\n"


def test_a_report_page_that_cannot_be_written_is_a_usage_error(failed: Path, distlaunch: Distlaunch) -> None:
    done = distlaunch("report", str(failed), "-o", "missing/page.html", run_dir=False)
    assert done.status == 2
    assert "cannot write missing/page.html: No such file or directory [usage]" in done.stderr


def test_the_report_command_rejects_a_folder_that_is_not_a_run(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = distlaunch("report", "./empty", run_dir=False)
    assert (done.status, done.stderr.partition("\n")[0]) == (
        3,
        f"Error: {tmp_path}/empty is not a run's folder [run-directory]",
    )


def test_a_copied_run_folder_has_the_same_page(failed: Path, tmp_path: Path) -> None:
    shutil.copytree(failed, tmp_path / "copy")
    made = re.compile(rf"Made at \S+ \S+ UTC|{failed}|{tmp_path}/copy")
    assert made.sub("", page.make(RunDir(tmp_path / "copy"))) == made.sub("", page.make(RunDir(failed)))


def test_the_page_of_a_run_that_never_started_shows_its_verdict(distlaunch: Distlaunch, tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)  # so that its node judges the syntax
    (tmp_path / "broken.py").write_text("if x\n")
    ran: Ran = distlaunch("local", "-n", "1", "--python", "./python", "--report", "broken.py")
    assert ran.status == 2
    shown = words((ran.directory / "report.html").read_text())
    assert ran.report["verdict"]["message"] in shown
    assert ran.report["verdict"]["reference"] in shown


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    folder = tmp_path_factory.mktemp("running")
    command = distlaunch_command("local", "-d", "-n", "1", "--run-dir", "run", LOSS, "100000", "0.02")
    subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, check=True, capture_output=True, timeout=90)
    files = RunDir(folder / "run")

    def check() -> None:
        assert ask_status(files).tasks[0].state == "training"

    eventually(check)
    yield files
    ask_to_end(files, now=True)


class TestPageOfARunningRun:
    def test_the_page_of_a_running_run_shows_its_state_and_time(self, running: RunDir) -> None:
        shown = words(page.make(running))
        assert "Still running" in shown
        assert re.search(
            r"This run is not over\. The page shows its state at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\.", shown
        )
        assert "is training" in shown

    def test_the_page_of_a_copied_running_run_shows_it_as_lost(self, running: RunDir, tmp_path: Path) -> None:
        shutil.copytree(running.root, tmp_path / "copy")
        shown = words(page.make(RunDir(tmp_path / "copy")))
        assert "Lost" in shown
        assert "the controller of the run has ended without a report" in shown

    def test_the_page_of_a_resumed_run_ignores_its_older_report(self, running: RunDir) -> None:
        running.report.write_text(make_report([make_attempt(1, T0, T0 + 20, failed=True)]).model_dump_json())
        try:
            assert read_page_data(running, now=0.0).report is None
        finally:
            running.report.unlink()


def test_the_page_notes_a_controller_that_does_not_answer(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run")  # its controller is this process, which has no control socket
    assert "its controller did not answer, so the state comes from its files" in words(page.make(files))


def test_the_page_of_a_lost_run_shows_attempts_from_its_journal(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run", controller=GONE, started=T0)
    attempt = make_attempt(1, T0, T0 + 20, failed=True)
    append_events(
        files,
        {"time": T0, "attempt": 1, "event": "state", "state": "connecting", "reference": "", "message": ""},
        {"time": T0 + 20, "attempt": 1, "event": "attempt-ended", "report": attempt.model_dump(mode="json")},
    )
    shown = words(page.make(files))
    assert "Lost" in shown
    assert f"the last attempt that had ended: {attempt.verdict.message}" in shown


def test_the_page_tolerates_damaged_files_and_named_pipes(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run", outcome="failed", exit_status=1)
    files.report.write_text('{"torn": ')
    files.plan.write_text("[" * 100_000)
    files.events.write_bytes(b'{"time": 1}\n\xff\xfe\n{"event": "said", "time": "x"}\n' + b"[" * 100_000 + b"\n{")
    os.mkfifo(files.stacks)
    os.mkfifo(files.spec)
    folder = files.root / "attempt-1"
    folder.mkdir()
    os.mkfifo(folder / "worker-0.log")
    os.mkfifo(folder / "worker-0.samples.jsonl")
    (folder / "worker-1.samples.jsonl").write_bytes(b'{"sample":"progress","time":"x"}\n\xff\n{"sample":"use"')
    (folder / "worker-2.log").symlink_to("/nowhere")
    (folder / "nobody.samples.jsonl").write_text("x")
    assert "Failed" in words(page.make(files))


def test_the_page_escapes_and_truncates_hostile_logs(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.write("worker:0", [(1.0, b"<script>alert(1)</script>\n"), (2.0, b"x" * (10 << 20))])
    text = page.make(RunDir(run.root))
    assert len(text.encode()) < 300_000
    assert "x" * 400 in text
    assert "<script>alert(1)" not in text
    run.write("worker:1", [(1.0, b"\x1b[31mred\x1b[0m \0 </pre><script>alert(1)</script>\n")])
    assert "\nred ␀ &lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in page.make(RunDir(run.root)).replace(
        ">", ">\n"
    )


def test_the_page_reads_a_bounded_number_of_samples(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run", outcome="succeeded", started=T0, ended_at=T0 + 60_000)
    (files.root / "attempt-1").mkdir()
    with (files.root / "attempt-1" / "worker-0.samples.jsonl").open("wb") as file:
        for number in range(50_000):
            file.write(render_sample(ProgressSample(T0 + number, number)))
            if number % 10 == 0:
                file.write(render_sample(TaskUseSample(T0 + number, TaskSample("worker:0", float(number), 1))))
    with files.node_samples(1).open("wb") as file:
        for number in range(60_000):
            node = f"gpu-{number % 2}"
            file.write(render_sample(NodeUseSample(T0 + number, node, NodeSample(1.0, 8, 5, 9))))
    data = read_page_data(files, now=T0)
    assert [(each.node, len(each.use)) for each in data.nodes] == [("gpu-0", 15_000), ("gpu-1", 15_000)]
    [samples] = data.tasks
    assert LINES_OF_KIND / 2 < len(samples.progress) <= LINES_OF_KIND
    assert len(samples.use) == 5000


def test_a_page_file_is_replaced_atomically(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(path, "first")
    with path.open() as reader:
        write_page(path, "second")
        assert reader.read() == "first"
    assert path.read_text() == "second"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(UsageError, match="cannot write"):
        write_page(tmp_path, "a folder")


def test_a_page_failure_at_the_end_of_a_run_is_a_warning(tmp_path: Path) -> None:
    files = write_run(tmp_path / "run")
    files.page.mkdir()
    said: list[str] = []
    assert write_at_end(files, make_report([make_attempt(1, T0, T0 + 20, failed=True)]), said.append) == ""
    [text] = said
    assert text.startswith(f"the page of the run is missing: cannot write {files.page}: ")
    assert text.endswith(f"; `distlaunch report {files.root}` writes it")


def test_the_page_and_the_data_of_a_resume_test_are_private_files_in_its_folder(tmp_path: Path) -> None:
    proof = make_proof(make_fault_result(), make_inexact_result())
    assert write_proof(tmp_path, proof, pytest.fail) == str(tmp_path / "resume.html")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"resume.html": 0o600, "resume.json": 0o600}
    assert "Resume is not exact after 1 of 2 faults" in words((tmp_path / "resume.html").read_text())
    assert ResumeProof.model_validate_json((tmp_path / "resume.json").read_text()) == proof


def test_a_page_failure_at_the_end_of_a_resume_test_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "resume.html").mkdir()
    said: list[str] = []
    assert write_proof(tmp_path, make_proof(make_fault_result()), said.append) == ""
    [text] = said
    assert text.startswith("the page of the test is missing: IsADirectoryError")
    assert (tmp_path / "resume.json").is_file()


def test_the_report_command_without_a_run_uses_the_latest_run(
    failed: Path, distlaunch: Distlaunch, tmp_path: Path
) -> None:
    runs = tmp_path / "state" / "distlaunch" / "runs"
    runs.mkdir(parents=True)
    shutil.copytree(failed, runs / "20261122-x")
    done = distlaunch("report", env={"XDG_STATE_HOME": str(tmp_path / "state")}, run_dir=False)
    assert done.stdout == f"{runs}/20261122-x/report.html\n", done.stderr
    assert select_run(str(runs / "20261122-x")).page.is_file()
