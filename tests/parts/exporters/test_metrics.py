"""Metrics: a run serves and writes the values of its status, in the format that Prometheus reads."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from launcher.errors import UsageError
from launcher.exporters import metrics
from launcher.exporters.metrics import MetricsFile, MetricsServer
from launcher.printable import printable
from launcher.report.goodput import Goodput
from launcher.report.metrics import make_families, make_registry
from launcher.report.state_names import StateName
from launcher.report.status_report import GpuState, NodeState, RunStatus, TaskState
from launcher.spec.fields import Endpoint, parse_endpoint
from tests.harness.builders.statuses import make_status
from tests.harness.documents import code, rows, section
from tests.harness.places import ROOT
from tests.harness.polling import eventually
from tests.harness.processes.commands import Distlaunch, distlaunch_command
from tests.harness.web_servers import free_port
from tests.harness.witness import wait_until

COVERS = (
    "launcher/report",
    "launcher/exporters/start.py",
    "launcher/exporters/metrics.py",
)

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
HOSTILE = 'a"b\\c\nd{}=,\t\0é\u202e # TYPE x counter'
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def status_of(task: str = "worker:0", **metrics: float | None) -> RunStatus:
    return make_status(
        TaskState(
            task=task,
            node="gpu-a",
            state="training",
            epoch=3,
            step=120,
            step_s=0.5,
            own_s=0.2,
            data_s=0.1,
            total_steps=500,
            total_epochs=9,
            metrics=metrics,
            cpu=1.5,
            starved=0.1,
            memory=1 << 30,
            swapped=7,
            threads=33,
            read_s=10.0,
            written_s=20.0,
            gpus=["0"],
        ),
        TaskState(task="worker:1", node="gpu-b", state="waiting for its start", metrics={}, gpus=[]),
        attempt=2,
        restarts=1,
        started=1000.5,
        now=1100.0,
        nodes=[
            NodeState(
                node="gpu-a",
                cores=8,
                cpu=4.0,
                memory=5,
                memory_total=6,
                received_s=1.0,
                sent_s=2.0,
                gpus=[
                    GpuState(gpu="0", use=0.9, memory=3, memory_total=4, power_w=250.0, celsius=70.0),
                    GpuState(gpu="1", memory=0, memory_total=4),
                ],
            )
        ],
        goodput=Goodput(connecting_s=1.0, training_s=90.0, lost_s=9.0, share=0.9),
    )


def parse_openmetrics(text: str) -> Iterable[Metric]:
    families: Iterable[Metric] = parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    return families


def read(families: Iterable[Metric]) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value for each in families for sample in each.samples
    }


def served(status: RunStatus) -> Samples:
    """What a client reads of the status."""
    text: bytes = exposition.generate_latest(make_registry(lambda: status))  # type: ignore[no-untyped-call]
    return read(parse_openmetrics(text.decode()))


def at(samples: Samples, metric: str, /, **labels: str) -> float:
    return samples[metric, frozenset({"run": "r-1", **labels}.items())]


class TestFamilies:
    def test_metrics_contain_all_values_of_the_status(self) -> None:
        samples = served(status_of(loss=0.25))
        worker, gpu = {"task": "worker:0", "node": "gpu-a"}, {"node": "gpu-a", "gpu": "0"}
        assert at(samples, "distlaunch_run_info", name="mnist", directory="/runs/r-1") == 1
        assert at(samples, "distlaunch_run_attempt") == 2
        assert at(samples, "distlaunch_run_restarts_total") == 1
        assert at(samples, "distlaunch_run_start_time_seconds") == 1000.5
        assert at(samples, "distlaunch_task_info", state="training", **worker) == 1
        assert at(samples, "distlaunch_task_step", **worker) == 120
        assert at(samples, "distlaunch_task_final_step", **worker) == 500
        assert at(samples, "distlaunch_task_step_seconds", **worker) == 0.5
        assert at(samples, "distlaunch_task_step_own_seconds", **worker) == 0.2
        assert at(samples, "distlaunch_task_step_waiting_seconds", **worker) == 0.3
        assert at(samples, "distlaunch_task_metric", name="loss", **worker) == 0.25
        assert at(samples, "distlaunch_task_memory_bytes", **worker) == 1 << 30
        assert at(samples, "distlaunch_node_memory_size_bytes", node="gpu-a") == 6
        assert at(samples, "distlaunch_gpu_use_ratio", **gpu) == 0.9
        assert at(samples, "distlaunch_gpu_temperature_celsius", **gpu) == 70
        assert at(samples, "distlaunch_goodput_seconds", kind="training") == 90
        assert at(samples, "distlaunch_goodput_seconds", kind="lost") == 9
        assert at(samples, "distlaunch_goodput_ratio") == 0.9

    def test_exactly_one_run_state_metric_is_true(self) -> None:
        states = {
            dict(labels)["distlaunch_run_state"]: value
            for (name, labels), value in served(status_of()).items()
            if name == "distlaunch_run_state"
        }
        assert set(states) == set(get_args(StateName))
        assert [state for state, value in states.items() if value] == ["running"]

    def test_unknown_values_have_no_metric_sample(self) -> None:
        samples = served(status_of(nan=None, endless=float("inf")))
        of_second = {name for name, labels in samples if ("task", "worker:1") in labels}
        assert of_second == {"distlaunch_task_info"}
        assert not [name for name, _ in samples if name == "distlaunch_task_metric"]
        power = [labels for name, labels in samples if name == "distlaunch_gpu_power_watts"]
        assert [dict(labels)["gpu"] for labels in power] == ["0"]

    def test_metrics_of_a_run_without_tasks_have_only_values_of_the_run(self) -> None:
        status = status_of().model_copy(update={"tasks": [], "nodes": [], "goodput": None})
        names = {name for name, _ in served(status)}
        assert names == {f"distlaunch_run_{name}" for name in NAMES_OF_RUN}

    def test_hostile_text_in_metrics_stays_inside_a_label_value(self) -> None:
        samples = served(status_of(task=HOSTILE, **{HOSTILE: 1.5}))
        shown = printable(HOSTILE)  # as in all results
        assert at(samples, "distlaunch_task_metric", task=shown, node="gpu-a", name=shown) == 1.5
        assert {name.partition("_")[0] for name, _ in samples} == {"distlaunch"}

    def test_metric_names_follow_the_prometheus_conventions(self) -> None:
        for family in make_families(status_of(loss=0.25)):
            assert re.fullmatch(r"distlaunch_(run|task|node|gpu|goodput)(_[a-z]+)*", family.name), family.name
            assert family.documentation.endswith("."), family.name
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter"), sample
                assert "run" in sample.labels, sample

    def test_the_readme_documents_every_metric_name(self) -> None:
        known = {sample.name for family in make_families(status_of(loss=0.25)) for sample in family.samples}
        shown = [name for cells in rows(section(ROOT / "launcher" / "README.md", "metrics")) for name in code(cells[0])]
        assert sorted(shown) == sorted(known)


NAMES_OF_RUN = ("info", "state", "restarts_total", "attempt", "start_time_seconds")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("9400", "127.0.0.1", 9400),
        (":9400", "127.0.0.1", 9400),
        ("0.0.0.0:1", "0.0.0.0", 1),
        ("[::1]:65535", "::1", 65535),
        ("gpu-a.example:9400", "gpu-a.example", 9400),
    ],
)
def test_a_metrics_address_is_parsed_and_rendered(text: str, host: str, port: int) -> None:
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host, port)
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text", ["", "x", "gpu-a", "1:0", "1:65536", "::1:9400", "[::1]", "http://h:1", "a b:1", "h:1\n"]
)
def test_an_invalid_metrics_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        parse_endpoint(text)


# --- the server ---


@contextmanager
def serving(make: Callable[[], RunStatus] = status_of) -> Iterator[int]:
    """Runs a server; yields its port."""
    server = MetricsServer(Endpoint("127.0.0.1", free_port()))
    with closing(server):
        server.begin(make)
        yield server.port


def get(port: int, accept: str = OPENMETRICS) -> tuple[str, str]:
    """The type and the text of the answer."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


class TestServer:
    def test_the_metrics_server_speaks_openmetrics_and_plain_text(self) -> None:
        with serving() as port:
            kind, text = get(port)
            assert kind.startswith("application/openmetrics-text")
            assert ("distlaunch_run_attempt", frozenset({("run", "r-1")})) in read(parse_openmetrics(text))
            kind, text = get(port, "text/plain")
            assert kind.startswith("text/plain")
            assert ("distlaunch_run_attempt", frozenset({("run", "r-1")})) in read(parse_text(text))

    def test_a_silent_client_does_not_block_the_metrics_server(self) -> None:
        with serving() as port, socket.create_connection(("127.0.0.1", port)):
            assert "distlaunch_run_attempt" in get(port)[1]

    def test_the_metrics_server_closes_without_waiting_for_clients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(metrics._Handler, "timeout", 1000.0)
        with serving() as port:
            silent = socket.create_connection(("127.0.0.1", port))
            get(port)
        silent.close()

    def test_a_status_error_fails_the_scrape_with_500_and_prints_nothing(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def fail() -> RunStatus:
            raise RuntimeError("not now")

        with serving(fail) as port:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/metrics")
            assert connection.getresponse().status == 500
            connection.close()
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
    def test_a_metrics_address_of_another_machine_is_rejected(self, host: str) -> None:
        with pytest.raises(UsageError, match=f"^cannot serve metrics at {host}:9400: "):
            MetricsServer(Endpoint(host, 9400))


# --- the file ---


class TestFile:
    def test_the_metrics_file_is_complete_and_ends_with_the_last_state(self, tmp_path: Path) -> None:
        path = tmp_path / "run.prom"
        file = MetricsFile(path)
        current = [status_of()]
        file.begin(lambda: current[0], lambda _: None)
        wait_until(path.exists, "it is written")
        first = read(parse_text(path.read_text()))
        assert at(first, "distlaunch_run_state", distlaunch_run_state="running") == 1
        current[0] = status_of().model_copy(update={"state": "succeeded"})
        file.close()
        last = read(parse_text(path.read_text()))
        assert at(last, "distlaunch_run_state", distlaunch_run_state="succeeded") == 1
        assert at(last, "distlaunch_run_state", distlaunch_run_state="running") == 0
        assert os.listdir(tmp_path) == ["run.prom"]

    def test_an_unwritable_metrics_file_causes_one_warning(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        file = MetricsFile(folder / "run.prom")
        folder.rmdir()
        warnings: list[str] = []
        file.begin(status_of, warnings.append)
        eventually(lambda: check(warnings != []))
        file.close()
        assert warnings == [
            f"cannot write the metrics to {folder}/run.prom: No such file or directory; the run continues"
        ]


def check(condition: bool) -> None:
    assert condition


# --- runs ---


class TestRuns:
    def test_a_run_serves_metrics_and_its_metrics_file_has_the_outcome(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        port = free_port()
        folder, file = tmp_path / "run", tmp_path / "run.prom"
        options = ["--set", f"metrics={port}", "--set", "metrics_file=run.prom", "--run-dir", str(folder)]
        command = distlaunch_command("local", "-n", "1", *options, "--", "sleep", "600")
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as process:
            run = wait_for_state(port, "running")
            tasks = {label for name, labels in run if name == "distlaunch_task_info" for label in labels}
            assert {("task", "worker:0"), ("node", "local")} <= tasks
            with socket.create_connection(("127.0.0.1", port)):  # a client that hangs
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=60)
        assert process.returncode == 130
        assert states(read(parse_text(file.read_text()))) == ["interrupted"]
        with pytest.raises(OSError, match="refused"):
            get(port)

    @pytest.mark.slow
    def test_background_runs_and_resumed_runs_serve_metrics(self, distlaunch: Distlaunch, tmp_path: Path) -> None:
        port = free_port()
        started = distlaunch("local", "-d", "-n", "1", "--set", f"metrics=127.0.0.1:{port}", "--", "sleep", "600")
        assert started.status == 0, started.stderr
        wait_for_state(port, "running")
        assert distlaunch("down", str(started.directory), run_dir=False).status == 0
        assert distlaunch("resume", "-d", str(started.directory), run_dir=False).status == 0
        samples = wait_for_state(port, "running")
        [attempt] = [value for (name, _), value in samples.items() if name == "distlaunch_run_attempt"]
        assert attempt == 2
        assert distlaunch("down", str(started.directory), run_dir=False).status == 0

    @pytest.mark.slow
    @pytest.mark.parametrize("field", ["metrics", "metrics_file"])
    def test_an_unusable_metrics_address_or_file_is_an_error_before_the_start(
        self, field: str, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            place = str(taken.getsockname()[1]) if field == "metrics" else "missing/run.prom"
            ran = distlaunch("local", "-n", "1", "--set", f"{field}={place}", "--", "touch", "started")
        said = {
            "metrics": f"Error: cannot serve metrics at 127.0.0.1:{place}: Address already in use [usage]\n",
            "metrics_file": f"Error: cannot write the metrics to {tmp_path}/missing/run.prom [usage]\n",
        }
        assert (ran.status, ran.directory.exists(), (tmp_path / "started").exists()) == (2, False, False)
        assert ran.stderr.startswith(said[field])

    def test_the_error_for_an_invalid_metrics_address_names_the_option(self, distlaunch: Distlaunch) -> None:
        ran = distlaunch("local", "-n", "1", "--set", "metrics=x:y", "--", "true")
        assert (ran.status, ran.directory.exists()) == (2, False)
        assert "Error: --set metrics: expected ADDRESS:PORT; write it like 127.0.0.1:9400" in ran.stderr

    def test_the_error_for_a_missing_prometheus_library_has_an_install_command(
        self, distlaunch: Distlaunch, tmp_path: Path
    ) -> None:
        (tmp_path / "prometheus_client.py").write_text("raise ImportError\n")
        ran = distlaunch("local", "-n", "1", "--set", "metrics=9400", "--", "true")
        assert (ran.status, ran.directory.exists()) == (2, False)
        assert "install it: pip install 'distlaunch[metrics]'" in ran.stderr
        assert distlaunch("local", "-n", "1", "--", "true").status == 0


def states(samples: Samples) -> list[str]:
    """The states whose samples are true."""
    return [
        dict(labels)["distlaunch_run_state"]
        for (name, labels), value in samples.items()
        if name == "distlaunch_run_state" and value
    ]


def wait_for_state(port: int, state: str) -> Samples:
    """What is served once the run is in this state."""

    def look() -> Samples:
        try:
            samples = read(parse_openmetrics(get(port)[1]))
        except OSError as error:
            raise AssertionError(error) from None
        assert states(samples) == [state]
        return samples

    return eventually(look)
