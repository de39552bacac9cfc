"""The pictures of a real run in the documents: its terminal while a worker is killed, and its report."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pyte
import pytest

from tests.harness.browser import CHROMIUM, open_browser
from tests.harness.pictures import draw_film, keep, read_description, read_frames
from tests.harness.places import PROGRAMS, ROOT
from tests.harness.processes.commands import distlaunch_command
from tests.harness.processes.in_process import run_here
from tests.harness.terminals import Screen, terminal

COVERS = ("launcher/console", "launcher/gang", "launcher/pages", "launcher/report")

COLUMNS, ROWS = 110, 24
WIDE = 1_000
"""Columns of a terminal on which no line is wrapped."""
LABEL = "│"
HEADINGS = "[...document.querySelectorAll('h1, h2, h3, th')].map(each => each.innerText).join('\\n')"


@dataclass(frozen=True)
class Recorded:
    """A run on a terminal. `writes`: the time and the data of each output, with the folders that users have."""

    writes: list[tuple[float, bytes]]
    home: Path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    home = tmp_path_factory.mktemp("home")
    shutil.copy(PROGRAMS / "resumes.py", home / "train.py")
    argv = distlaunch_command("local", "--workers", "2", "--chaos", "kill:worker:1@epoch=3", "train.py")
    with terminal(argv, columns=COLUMNS, rows=ROWS, cwd=home, HOME=str(home), XDG_STATE_HOME="") as opened:
        assert opened.end() == 0, opened.text
    names = {str(home): b"~", sys.prefix: b"~/.venv", str(ROOT): b"~/distlaunch"}
    writes = opened.writes
    for folder, name in names.items():
        writes = [(time, data.replace(folder.encode(), name)) for time, data in writes]
    return Recorded(writes, home)


def shapes(text: str) -> set[str]:
    """The lines, without what differs between runs."""
    return {*re.sub(r"\d[\d.,]*", "0", re.sub(r"\d{8}-\d{6}-[\w-]+", "RUN", text)).splitlines()}


def test_the_recording_in_the_documents_shows_what_distlaunch_says_about_a_killed_worker(recorded: Recorded) -> None:
    wide = Screen(WIDE, ROWS, history=10_000)
    pyte.ByteStream(wide).feed(b"".join(data for _, data in recorded.writes))
    above = ["".join(row[x].data for x in range(WIDE)) for row in wide.history.top]
    lines = [line.rstrip() for line in [*above, *wide.display]]
    ours = sorted(line for line in lines if line and not line.startswith(" ") and LABEL not in line)
    said = "\n".join(ours)

    frames = [*read_frames(recorded.writes, COLUMNS, ROWS)]
    keep("chaos.svg", draw_film(frames, COLUMNS, ROWS, said), said)

    assert "Restarting: attempt 2 (restart 1 of 1)" in said
    assert len(frames) > 5
    assert shapes(read_description("chaos.svg")) <= shapes(said)  # a slow machine may say more


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_picture_of_the_report_in_the_documents_shows_what_a_report_shows(
    recorded: Recorded, tmp_path: Path
) -> None:
    [run] = (recorded.home / ".local" / "state" / "distlaunch" / "runs").glob("2*")
    page = tmp_path / "report.html"
    assert run_here("report", str(run), "-o", str(page), cwd=tmp_path).returncode == 0
    page.write_text(page.read_text(encoding="utf-8").replace(str(recorded.home), "~"), encoding="utf-8")
    with open_browser(tmp_path / "profile") as browser:
        browser.size(1200, 1000)
        browser.call("Emulation.setScrollbarsHidden", hidden=True)
        browser.open(page)
        headings = browser.run(HEADINGS)
        keep("report.png", browser.picture(), headings)

    assert len(shapes(headings)) > 10
    assert shapes(read_description("report.png")) <= shapes(headings)
