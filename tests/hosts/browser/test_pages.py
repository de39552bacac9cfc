"""Pages of `distlaunch report` in Chromium: they are drawn, fetch nothing, log no errors, and show the run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.commands import page
from launcher.commands.requests import ask_to_end
from launcher.pages.html import render_page, render_proof_page
from launcher.rundir.directory import RunDir
from tests.harness.browser import CHROMIUM, Browser, open_browser
from tests.harness.builders.pages import (
    HOSTILE,
    T0,
    hostile_page_data,
    to_curves,
    write_page,
)
from tests.harness.builders.proofs import make_fault_result, make_hostile_proof, make_inexact_result, make_proof
from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command

COVERS = ("launcher/pages", "launcher/exporters/page_reading.py", "launcher/exporters/page_writing.py")

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")]

SIZE_LIMIT = 6_000_000
POINTS_LIMIT = 1000


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@dataclass(frozen=True)
class Run:
    """A run and its page."""

    folder: Path
    page: Path

    @property
    def report(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return loaded


@pytest.fixture(autouse=True)
def _as_a_user_has_it(browser: Browser) -> None:
    browser.size(1280, 1000)
    browser.colours("light")
    browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Run]]:
    """A successful, a failed, a restarted and an unfinished run; all of them run at the same time."""
    folder = tmp_path_factory.mktemp("runs")
    wanted = {  # each attempt takes long enough for some samples of the node
        "succeeded": (0, ["100", "0.03"], []),
        "failed": (1, ["100", "0.03", "fail"], []),
        "restarted": (0, ["100", "0.1", "fail"], ["--max-restarts", "1"]),
    }
    started = {name: _start(folder / name, program, options) for name, (_, program, options) in wanted.items()}
    running = _start(folder / "running", ["100000", "0.02"], [])
    for name, process in started.items():
        assert process.wait(90) == wanted[name][0], (folder / f"{name}.stderr").read_text()
    goes_on = RunDir(folder / "running")
    eventually(lambda: _has_stepped(goes_on))
    made = {name: Run(folder / name, folder / f"{name}.html") for name in (*wanted, "running")}
    for each in made.values():
        page.write(RunDir(each.folder), each.page)
    yield made
    ask_to_end(goes_on, now=True)
    running.wait(30)


def _start(folder: Path, program: list[str], options: list[str]) -> subprocess.Popen[bytes]:
    run = ["local", "-n", "2", "--oversubscribe", "--set", "sample_every_s=0.2", "--run-dir", str(folder), *options]
    with folder.with_suffix(".stderr").open("wb") as stderr:
        return subprocess.Popen(
            distlaunch_command(*run, str(PROGRAMS / "loss.py"), *program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def _has_stepped(files: RunDir) -> None:
    found = [*files.root.glob("attempt-1/worker-*.samples.jsonl")]
    assert len(found) == 2
    assert all(path.read_text().count('"progress"') >= 2 for path in found)


def open_all(browser: Browser, path: Path) -> None:
    """Opens a page, and waits until all of its curves are drawn."""
    browser.open(path)
    height = browser.run("document.documentElement.scrollHeight")
    browser.size(1280, min(height, 16_000))
    eventually(lambda: _check_drawn(browser))


def _check_drawn(browser: Browser) -> None:
    assert count_undrawn(browser) == 0


def count_undrawn(browser: Browser) -> int:
    return int(browser.run("document.querySelectorAll('.curves:not([data-drawn])').length"))


def check_clean(browser: Browser, path: Path) -> None:
    assert browser.complaints() == []
    assert [address for address in browser.requests() if not address.startswith("data:")] == [path.as_uri()]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["succeeded", pytest.param("failed", marks=pytest.mark.smoke), "restarted", "running"])
def test_a_page_is_drawn_without_console_errors_or_network_requests(
    browser: Browser, runs: Mapping[str, Run], name: str, scheme: str
) -> None:
    browser.colours(scheme)
    open_all(browser, runs[name].page)
    check_clean(browser, runs[name].page)
    curves, charts = browser.run(
        "['.main-svg .scatterlayer', '.curves'].map((each) => document.querySelectorAll(each).length)"
    )
    assert curves == charts >= 4
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


@pytest.mark.parametrize("name", ["succeeded", "failed", "restarted"])
def test_a_page_shows_the_numbers_of_the_run_report(browser: Browser, runs: Mapping[str, Run], name: str) -> None:
    report = runs[name].report
    browser.open(runs[name].page)
    facts = {
        "#outcome": report["outcome"].capitalize(),
        "#message": report["verdict"]["message"],
        "#reference": report["verdict"]["reference"],
        "#fact-elapsed": f"{report['ended'] - report['started']:.1f} s",
        "#fact-restarts": str(report["attempts"][-1]["attempt"] - 1),
        "#fact-exit-status": str(report["exit_status"]),
        "#fact-step": str(max(t["progress"]["step"] for a in report["attempts"] for t in a["tasks"])),
        "#versions": " · ".join(f"{name} {version}" for name, version in report["versions"].items()),
    }
    if report["goodput"] is not None:
        facts["#fact-goodput"] = f"{100 * report['goodput']['share']:.1f} %"
    shown = {selector: (browser.text(selector) or "").lstrip("✓✕▶■ ") for selector in facts}
    assert shown == facts
    evidence = browser.run("[...document.querySelectorAll('.verdict .evidence li')].map((each) => each.textContent)")
    assert evidence == report["verdict"]["evidence"]


@pytest.mark.smoke
def test_a_page_of_a_failed_run_shows_the_failed_task_and_its_line(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["failed"].page)
    [task] = [task for task in runs["failed"].report["attempts"][0]["tasks"] if task["task"] == "worker:1"]
    assert browser.text("#cause-task") == "worker:1 on local"
    assert browser.text("#cause-place") == f"{task['crash']['file']}:{task['crash']['line']}"
    assert browser.run("document.querySelectorAll('.timeline .st-failed').length") == 1


def test_a_page_shows_a_restart_in_the_timeline_and_the_attempts_table(
    browser: Browser, runs: Mapping[str, Run]
) -> None:
    browser.open(runs["restarted"].page)
    titles = browser.run("[...document.querySelectorAll('.mark title')].map((each) => each.textContent)")
    assert [title for title in titles if "attempt 2 began" in title]
    assert [title for title in titles if "ValueError: batch <b>20</b> has no label" in title]
    assert browser.run("document.querySelectorAll('#attempts + details tbody tr').length") == 2


def test_a_page_of_an_unfinished_run_is_marked_as_still_running(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["running"].page)
    assert "Still running" in (browser.text("#outcome") or "")
    assert "This run is not over" in (browser.text(".live-note") or "")
    assert browser.run("document.querySelectorAll('.timeline .st-training').length") == 2


def test_a_drag_zooms_the_timeline_and_a_double_click_resets_it(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["restarted"].page)
    browser.run("document.getElementById('lanes').scrollIntoView({behavior: 'instant', block: 'start'})")
    box = browser.run("(({x, y, width}) => [x, y, width])(document.getElementById('lanes').getBoundingClientRect())")

    def mouse(kind: str, share: float, **more: Any) -> None:
        place = {"x": box[0] + share * box[2], "y": box[1] + 36}
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", **place, **more)

    mouse("mouseMoved", 0.5)
    assert "worker:0, attempt" in (browser.text("#tip") or "")
    mouse("mousePressed", 0.25, clickCount=1)
    mouse("mouseMoved", 0.5)
    mouse("mouseReleased", 0.75, clickCount=1)
    eventually(lambda: _check_width(browser, "200%"))
    assert browser.run("document.getElementById('reset').hidden") is False
    for count in (1, 2):
        mouse("mousePressed", 0.5, clickCount=count)
        mouse("mouseReleased", 0.5, clickCount=count)
    eventually(lambda: _check_width(browser, "100%"))
    check_clean(browser, runs["restarted"].page)


def test_zooming_one_chart_zooms_the_timeline_and_all_other_charts(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["restarted"].page)
    to_curves(browser, "#metric-0")
    mouse(browser, "#metric-0", "mousePressed", 0.25, clickCount=1)
    mouse(browser, "#metric-0", "mouseMoved", 0.5)
    mouse(browser, "#metric-0", "mouseMoved", 0.75)
    mouse(browser, "#metric-0", "mouseReleased", 0.75, clickCount=1)
    eventually(lambda: _check_width(browser, "200%"))
    labels = "(id) => [...document.querySelectorAll(`#${id} .xtick`)].map((each) => each.textContent)"
    zoomed = browser.run(f"['metric-0', 'metric-1'].map({labels})")
    assert zoomed[0] == zoomed[1]
    to_curves(browser, "#machines")  # its curves are drawn only now, a frame after they come into view

    def drawn() -> None:
        assert browser.run(f"({labels})('node-cpu')") == zoomed[0]

    eventually(drawn)
    to_curves(browser, "#metric-0")

    def double_click() -> None:
        for count in (1, 2):
            mouse(browser, "#metric-0", "mousePressed", 0.5, clickCount=count)
            mouse(browser, "#metric-0", "mouseReleased", 0.5, clickCount=count)
        eventually(lambda: _check_width(browser, "100%"), 2)

    # Plotly expects both clicks within half a second, which may be too short for four messages on a busy machine.
    eventually(double_click)
    assert browser.run(f"({labels})('metric-1')") != zoomed[0]
    check_clean(browser, runs["restarted"].page)


def test_a_chart_shows_the_values_under_the_pointer_in_a_tooltip(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["succeeded"].page)
    to_curves(browser, "#steps")
    mouse(browser, "#steps", "mouseMoved", 0.6)
    eventually(lambda: _check_told(browser, "worker:0", "worker:1"))
    assert float((browser.text("#tip .near") or "").split()[0]) > 1
    mouse(browser, "#steps", "mouseMoved", 0.6, up=60)
    eventually(lambda: _check_told(browser))


def _check_told(browser: Browser, *labels: str) -> None:
    assert browser.run("document.getElementById('tip').hidden") is not bool(labels)
    rows = browser.run("[...document.querySelectorAll('#tip div')].map((each) => each.textContent)")
    assert [row for row in rows if not row.endswith(labels or row)] == []
    assert not labels or len(rows) == len(labels)


def test_chart_colours_follow_the_colour_scheme_of_the_system(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["succeeded"].page)
    to_curves(browser, "#metric-0")
    _check_stroke(browser, "rgb(0, 114, 178)")
    browser.colours("dark")
    eventually(lambda: _check_stroke(browser, "rgb(74, 168, 224)"))


def _check_stroke(browser: Browser, colour: str) -> None:
    assert browser.run("getComputedStyle(document.querySelector('#metric-0 .js-line')).stroke") == colour


def test_a_click_on_a_legend_label_hides_and_shows_its_curve(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["succeeded"].page)
    to_curves(browser, "#metric-0")
    count = "document.querySelectorAll('#metric-0 .js-line').length"
    assert browser.run(count) == 2
    label = "document.querySelector('#metric-0 .legend button')"
    assert browser.run(f"{label}.click(), {count}") == 1
    assert browser.run(f"{label}.click(), {count}") == 2


def mouse(browser: Browser, chart: str, kind: str, share: float, *, up: float = -60, **more: Any) -> None:
    """Sends a mouse event at this share of a chart's width, below its upper edge."""
    found = browser.run(
        f"(({{x, y, width}}) => [x, y, width])(document.querySelector('{chart} .nsewdrag').getBoundingClientRect())"
    )
    place = {"x": found[0] + share * found[2], "y": found[1] - up}
    browser.call("Input.dispatchMouseEvent", type=kind, button="left", **place, **more)


def _check_width(browser: Browser, width: str) -> None:
    found = str(browser.run("document.getElementById('zoom').getAttribute('width')"))
    assert round(float(found.rstrip("%"))) == float(width.rstrip("%"))


def test_a_page_shows_verdict_log_events_and_spec_without_scripts(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(runs["failed"].page)
    report = runs["failed"].report
    # Chromium still answers over its protocol.
    document = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    shown = {}
    for selector in (
        "#message",
        "#command-line",
        "#appendix ~ details .log",
        "table.events",
        "#spec",
        "#metric-0 details",
    ):
        node = browser.call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        shown[selector] = browser.call("DOM.getOuterHTML", nodeId=node)["outerHTML"] if node else ""
    assert report["verdict"]["message"] in shown["#message"]
    assert "loss.py" in shown["#command-line"]
    assert "step 20" in shown["#appendix ~ details .log"]
    assert "task-exited" in shown["table.events"]
    assert "max_restarts" in shown["#spec"] or "loss.py" in shown["#spec"]
    assert "median" in shown["#metric-0 details"]
    check_clean(browser, runs["failed"].page)


def test_a_printed_page_contains_all_charts(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.colours("dark")
    browser.open(runs["restarted"].page)
    browser.run(
        "addEventListener('afterprint', () => {"
        "  window.drawn = document.querySelectorAll('.curves[data-drawn]').length;"
        "  window.all = document.querySelectorAll('.curves').length;"
        "})"
    )
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    assert browser.run("[window.drawn === window.all, window.all > 4]") == [True, True]
    check_clean(browser, runs["restarted"].page)


def test_a_link_to_a_closed_section_of_a_page_opens_it(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.open(runs["failed"].page)
    assert browser.run("document.getElementById('spec').open") is False
    browser.run("location.hash = '#spec'")
    eventually(lambda: _check_open(browser))


def _check_open(browser: Browser) -> None:
    assert browser.run("document.getElementById('spec').open") is True


def test_a_page_does_not_scroll_horizontally_on_a_narrow_screen(browser: Browser, runs: Mapping[str, Run]) -> None:
    browser.size(360, 800)
    browser.open(runs["restarted"].page)
    assert browser.run("document.documentElement.scrollWidth") <= 360


@pytest.mark.smoke
def test_hostile_text_in_a_page_is_neither_executed_nor_breaks_it(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(render_page(hostile_page_data()), encoding="utf-8")
    open_all(browser, path)
    to_curves(browser, "#gpu-use")
    mouse(browser, "#gpu-use", "mouseMoved", 0.2)
    eventually(lambda: _check_hostile_tip(browser))
    check_clean(browser, path)
    assert browser.told("Page.javascriptDialogOpening") == []
    assert browser.run("document.images.length") == 0
    assert browser.run("document.querySelectorAll('body script:not([type])').length") == 1
    assert "</script><script>alert(1)</script>" in (browser.text("#message") or "")
    assert browser.run(
        "[...document.querySelectorAll('.legend button')].some((each) => each.textContent.includes('<img'))"
    )
    assert browser.text("footer") is not None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_a_resume_test_draws_both_curves_and_its_marks_over_steps(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    path = tmp_path / "resume.html"
    path.write_text(render_proof_page(make_proof(make_fault_result(), make_inexact_result()), T0), encoding="utf-8")
    browser.colours(scheme)
    open_all(browser, path)
    counts = "(id, what) => document.querySelectorAll(`#${id} ${what}`).length"
    assert browser.run(f"['fault-1', 'fault-2'].map((id) => ({counts})(id, '.js-line'))") == [2, 2]
    assert browser.run(f"['fault-1', 'fault-2'].map((id) => ({counts})(id, '.shapelayer path'))") == [2, 3]
    labels = "[...document.querySelectorAll('#fault-1 .xtick')].map((each) => each.textContent)"
    assert browser.run(labels) == ["0", "10", "20", "30", "40"]
    to_curves(browser, "#fault-2")
    mouse(browser, "#fault-2", "mouseMoved", 0.75)
    eventually(lambda: _check_told(browser, "without a fault", "after the fault"))
    assert (browser.text("#tip") or "").startswith("step 30")
    check_clean(browser, path)


@pytest.mark.smoke
def test_hostile_text_in_the_page_of_a_resume_test_is_not_executed(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "resume.html"
    path.write_text(render_proof_page(make_hostile_proof(HOSTILE), T0), encoding="utf-8")
    open_all(browser, path)
    check_clean(browser, path)
    assert browser.told("Page.javascriptDialogOpening") == []
    assert browser.run("document.images.length") == 0
    assert "</script><script>alert(1)</script>" in (browser.text("#flaw-1") or "")


def _check_hostile_tip(browser: Browser) -> None:
    assert "<img" in (browser.text("#tip") or "")


def test_content_outside_of_the_content_security_policy_is_neither_run_nor_fetched(
    browser: Browser, runs: Mapping[str, Run], tmp_path: Path
) -> None:
    """Even if a bug leaves markup unescaped."""
    path = tmp_path / "page.html"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        error = (
            f'<script>window.ran = 1</script><img src="{address}" onerror="window.ran = 2"><b id="after">x</b>'
            f'<link rel="stylesheet" href="{address}"><script src="{address}"></script><b onclick="ran = 3">y</b>'
        )
        path.write_text(runs["failed"].page.read_text().replace("<footer>", f"{error}<footer>"))
        browser.open(path)
        browser.run("document.querySelector('b[onclick]').click()")
        assert browser.text("#after") == "x"
        assert browser.run("window.ran ?? null") is None
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("large") / "large.html", points=10_000)


def test_a_page_is_shown_before_plotly_is_loaded(browser: Browser, large: Path) -> None:
    browser.size(1280, 600)
    browser.open(large)
    assert browser.run("[typeof Plotly, document.querySelectorAll('#axis text').length > 2]") == ["undefined", True]
    to_curves(browser, "#training")
    assert browser.run("typeof Plotly") == "object"


def test_a_page_with_very_many_points_is_small_and_draws_only_visible_charts(browser: Browser, large: Path) -> None:
    """This is why the page appears at once; the benchmark `page` measures how long that takes."""
    assert large.stat().st_size < SIZE_LIMIT
    browser.size(1280, 600)
    browser.open(large)
    to_curves(browser, "#training")
    drawn = browser.run(
        "[...document.querySelectorAll('.js-plotly-plot')].flatMap(({ data }) => data.map(({ x }) => x.length))"
    )
    assert len(drawn) >= 8
    assert max(drawn) <= POINTS_LIMIT
    assert count_undrawn(browser) > 0
    open_all(browser, large)
    check_clean(browser, large)
