"""Runs on pods: a restart in place against new pods, and many pods; see `hosts/kubernetes.py` in harness."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from tests.benchmarks.pairs import Pair
from tests.harness.hosts.kubernetes import IMAGE, KubernetesCluster, find_cluster
from tests.harness.places import PROGRAMS

MANY = (10, 50, 100)
_REQUEST = re.compile(r'(GET|POST|PUT|PATCH|DELETE) https?://\S+ [0-9]{3}|verb="(?:GET|POST|PUT|PATCH|DELETE)" url=')


def measure(runs: int) -> Iterator[Pair]:
    """Yields the restart's pair and one for each number of pods."""
    cluster = find_cluster()
    print("one of two workers dies, until both step again; rival: both pods are deleted and created again")
    ours, rival = [], []
    for _ in range(runs):
        with _folder() as folder:
            ours.append(_restart_in_place(cluster, folder))
        with _folder() as folder:
            rival.append(_restart_pods(cluster, folder))
    yield Pair("restart", ours, rival)
    print("`true` in many pods, from the command to its end; rival: a Job of as many pods that run `true`")
    for count in MANY:
        seconds, peak, requests = _time_true(cluster, count)
        yield Pair(f"{count} pods", [seconds], [_time_job(cluster, count)])
        print(
            f"  controller at most {peak / 2**20:.0f} MiB, {requests} requests, {requests / count:.1f} for each pod",
            flush=True,
        )
    beats = _count_while_training(cluster, 4, 60)
    print(f"  4 pods that train for a minute: {beats} requests")


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _write_spec(cluster: KubernetesCluster, folder: Path, count: int, program: str) -> Path:
    template = cluster.write_template(folder, folder)
    spec = folder / "spec.yaml"
    spec.write_text(
        f"nodes: {{from: kubernetes, image: '{IMAGE}', template: {template}, count: {count}, "
        f"python: {sys.executable}}}\nprogram: {program}\nrestart: {{max_restarts: 1}}\nworking_directory: /tmp\n"
    )
    return spec


def _up(spec: Path) -> list[str]:
    return [sys.executable, "-m", "launcher", "up", "--no-check", "--run-dir", str(spec.parent / "run"), str(spec)]


def _restart_in_place(cluster: KubernetesCluster, folder: Path) -> float:
    spec = _write_spec(cluster, folder, 2, f"{{script: {PROGRAMS / 'first_step.py'}, args: [{folder}]}}")
    subprocess.run(_up(spec), env={**os.environ, **cluster.env}, capture_output=True, check=True)
    return _read_restart(folder)


def _restart_pods(cluster: KubernetesCluster, folder: Path) -> float:
    """Does what a job controller does that replaces all pods once one of them has failed."""
    made = _make_pods(cluster, folder, 21000)
    _await(lambda: '"Failed"' in _phases(cluster, made))
    cluster.kubectl("delete", "pods", *made, "--grace-period=1")  # and waits until both are gone
    made = _make_pods(cluster, folder, 21100)
    _await(lambda: all((folder / f"again-{index}").exists() for index in range(2)))
    cluster.kubectl("delete", "pods", *made, "--grace-period=0", "--force")
    return _read_restart(folder)


def _make_pods(cluster: KubernetesCluster, folder: Path, port: int) -> list[str]:
    template = json.loads(cluster.write_template(folder, folder).read_text())
    workers = [f"127.0.0.1:{port + index}" for index in range(2)]
    made = []
    for index in range(2):
        pod = json.loads(json.dumps(template))
        pod |= {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"rival-{port}-{index}"}}
        pod["spec"] |= {"restartPolicy": "Never", "hostNetwork": True}
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        pod["spec"]["containers"][0] |= {
            "image": IMAGE,
            "command": [sys.executable, str(PROGRAMS / "first_step.py"), str(folder)],
            "env": [{"name": "TF_CONFIG", "value": json.dumps(config)}],
        }
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        made.append(f"rival-{port}-{index}")
    return made


def _phases(cluster: KubernetesCluster, pods: Sequence[str]) -> str:
    return cluster.kubectl("get", "pods", *pods, "-o", 'jsonpath={range .items[*]}"{.status.phase}" {end}')


def _read_restart(folder: Path) -> float:
    again = [float((folder / f"again-{index}").read_text()) for index in range(2)]
    return max(again) - float((folder / "died").read_text())


def _await(condition: object, limit_s: float = 120.0) -> None:
    assert callable(condition)
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextlib.contextmanager
def _counting(folder: Path) -> Iterator[tuple[dict[str, str], Path]]:
    """An environment in which `kubectl` logs its requests, and the path of that log."""
    log, real = folder / "requests", shutil.which("kubectl")
    wrapper = folder / "bin" / "kubectl"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/bash\nexec {real} -v=6 "$@" 2> >(tee -a {log} >&2)\n')
    wrapper.chmod(0o755)
    yield {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}, log


def _count(log: Path) -> int:
    return len(_REQUEST.findall(log.read_text(errors="replace")))


def _time_true(cluster: KubernetesCluster, count: int) -> tuple[float, int, int]:
    """The seconds, the controller's peak RSS in bytes, and its requests."""
    with _folder() as folder, _counting(folder) as (env, log):
        spec = _write_spec(cluster, folder, count, "{command: ['true']}")
        began, peak = time.perf_counter(), 0
        process = subprocess.Popen(
            _up(spec),
            env={**os.environ, **cluster.env, **env},
            stdout=subprocess.DEVNULL,
            stderr=(folder / "said").open("wb"),
        )
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                peak = max(peak, psutil.Process(process.pid).memory_info().rss)
            time.sleep(0.05)
        assert process.returncode == 0, (folder / "said").read_text()[-2000:]
        return time.perf_counter() - began, peak, _count(log)


def _time_job(cluster: KubernetesCluster, count: int) -> float:
    """The seconds from the creation of a Job that runs `true` in so many pods to its end."""
    with _folder() as folder:
        pod = json.loads(cluster.write_template(folder, folder).read_text())["spec"]
        pod["restartPolicy"] = "Never"
        pod["containers"][0] |= {"image": IMAGE, "command": ["true"]}
        spec = {"completions": count, "parallelism": count, "template": {"spec": pod}}
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "rival"}, "spec": spec}
        began = time.perf_counter()
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(job))
        _await(lambda: cluster.kubectl("get", "job", "rival", "-o", "jsonpath={.status.succeeded}") == str(count), 600)
        seconds = time.perf_counter() - began
        cluster.kubectl("delete", "job", "rival")
        return seconds


def _count_while_training(cluster: KubernetesCluster, count: int, seconds: float) -> int:
    """The number of requests in so many seconds in which no task starts or ends."""
    with _folder() as folder, _counting(folder) as (env, log):
        spec = _write_spec(cluster, folder, count, "{command: [sleep, '600']}")
        process = subprocess.Popen(
            _up(spec),
            env={**os.environ, **cluster.env, **env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        events = folder / "run" / "events.jsonl"
        _await(lambda: events.exists() and events.read_text().count('"task-started"') == count)
        before = _count(log)
        time.sleep(seconds)
        after = _count(log)
        process.terminate()
        process.wait()
        return after - before
