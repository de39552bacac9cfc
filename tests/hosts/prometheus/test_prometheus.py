"""A real Prometheus scrapes a run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.places import PROGRAMS
from tests.harness.polling import eventually
from tests.harness.processes.background import BackgroundRun
from tests.harness.processes.warm_python import WarmPython
from tests.harness.web_servers import free_port
from tests.harness.witness import await_none_left, make_mark

COVERS = (
    "launcher/report/metrics.py",
    "launcher/exporters/metrics.py",
)

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]


@contextmanager
def scraping(folder: Path, port: int) -> Iterator[str]:
    """A Prometheus that scrapes this port on loopback; yields its own address."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: distlaunch, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )
    place = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address={place}", "--log.level=warn"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://{place}"
    finally:
        process.terminate()
        process.wait(30)


def query(address: str, what: str) -> list[dict[str, Any]]:
    """The labels of each series, with its `value`."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?query={urllib.parse.quote(what)}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, OSError) as error:
        raise AssertionError(error) from None
    return [{**each["metric"], "value": float(each["value"][1])} for each in found]


@pytest.mark.smoke
def test_prometheus_scrapes_steps_state_and_goodput_of_a_run(warm_python: WarmPython, tmp_path: Path) -> None:
    mark, port = make_mark(), free_port()

    def popen(argv: list[str], stderr: int) -> subprocess.Popen[bytes]:
        nothing = subprocess.DEVNULL
        env = {**os.environ, **mark}
        return subprocess.Popen(argv, cwd=tmp_path, env=env, stdin=nothing, stdout=nothing, stderr=stderr)

    demo = [str(PROGRAMS / "paced_demo.py"), "--epochs", "2000"]
    with scraping(tmp_path, port) as address:
        words = ["-n", "2", "--set", f"metrics={port}", *demo]
        run = BackgroundRun(tmp_path, "local", words, popen, warm_python.command)
        try:

            def advances() -> None:
                steps = query(address, "delta(distlaunch_task_step[1m])")
                assert {step["task"]: step["value"] > 0 for step in steps} == {"worker:0": True, "worker:1": True}

            eventually(advances)
            run_id = json.loads((run.directory / "run.json").read_text())["run_id"]
            for what, series in (
                ("distlaunch_run_state == 1", 1),
                ("distlaunch_task_metric{name='loss'} > 0", 2),
                ("distlaunch_task_step_seconds > 0", 2),
                ("distlaunch_task_memory_bytes > 1e7", 2),
            ):
                # The first step times are known a second after the first step.
                found = eventually(partial(find_series, address, what, series))
                assert {each["run"] for each in found} == {run_id}
            [state] = query(address, "distlaunch_run_state == 1")
            assert state["distlaunch_run_state"] == "running"
            spent = {each["kind"]: each["value"] for each in query(address, "distlaunch_goodput_seconds")}
            assert spent["training"] > 0
            assert spent["forming"] > 0
            [share] = query(address, "distlaunch_goodput_ratio")
            assert share["value"] == pytest.approx(spent["training"] / sum(spent.values()), abs=0.2)
            # Prometheus accepted everything that it scraped.
            [up] = query(address, "up")
            assert up["value"] == 1
            run.process.send_signal(signal.SIGINT)
            assert run.end() == 130
            eventually(lambda: check(query(address, "up")[0]["value"] == 0))
        finally:
            if run.process.poll() is None:
                run.process.send_signal(signal.SIGTERM)
                run.process.wait(60)
    await_none_left(mark)


def find_series(address: str, what: str, number: int) -> list[dict[str, Any]]:
    found = query(address, what)
    assert len(found) == number
    return found


def check(condition: bool) -> None:
    assert condition
