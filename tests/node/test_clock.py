"""Setting a machine's clock during a run makes no duration wrong or negative."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.available import find_compiler
from tests.harness.places import ROOT
from tests.harness.processes.background import BackgroundRun
from worker_entry.protocol import environment

DAYS = 86_400
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *time)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, time);
    if (!failed && clock == CLOCK_REALTIME) {
        long offset = 0;
        FILE *file = fopen(getenv("CLOCK_OFFSET"), "re");
        if (file && fscanf(file, "%ld", &offset) == 1) time->tv_sec += offset;
        if (file) fclose(file);
    }
    return failed;
}
"""
"""libfaketime 0.9.10 can do this too, but breaks `time.sleep` in Python 3.11 and later."""


class SetClock:
    """A wall clock that a test can set, for all processes with `env`; the monotonic clock stays real."""

    def __init__(self, folder: Path) -> None:
        compiler = find_compiler()
        if compiler is None:
            pytest.skip("there is no C compiler for a clock that can be set")
        library = folder / "clock.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"],
            input=SHIM.encode(),
            check=True,
        )
        self._file = folder / "offset"
        self.env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._file)}
        self.set(0)

    def set(self, days: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(str(days * DAYS))
        new.replace(self._file)


@pytest.fixture
def machine(tmp_path: Path) -> SetClock:
    return SetClock(tmp_path)


WATCH = """
import sys, time
from worker_entry.system import clock
clock.share()
for _ in sys.stdin:
    print(clock.now(), time.time(), flush=True)
"""


@pytest.fixture
def watched(machine: SetClock) -> Iterator[subprocess.Popen[str]]:
    """A process that prints both clocks for each line it reads."""
    with subprocess.Popen(
        [sys.executable, "-c", WATCH],
        cwd=ROOT,
        env={**os.environ, **machine.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


def ask(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    ours, walls = process.stdout.readline().split()
    return float(ours), float(walls)


def test_the_clock_starts_at_the_system_time_and_ignores_later_changes_of_it(
    machine: SetClock, watched: subprocess.Popen[str]
) -> None:
    first, wall = ask(watched)
    assert abs(first - wall) < 60  # on a busy machine, some time passes between the two readings
    for days in (-30, 7):
        machine.set(days)
        then, wall = ask(watched)
        assert abs(wall - first - days * DAYS) < 60
        assert 0 <= then - first < 60


def test_child_processes_share_the_clock_of_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CLOCK, "1000.5")
    code = "import time; from worker_entry.system import clock; print(clock.now() - time.clock_gettime(clock._STEADY))"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(told.stdout) == pytest.approx(1000.5, abs=0.1)


@pytest.mark.parametrize("odd", ["", "yesterday", "nan", "inf"])
def test_an_invalid_shared_clock_value_is_ignored(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    monkeypatch.setenv(environment.CLOCK, odd)
    code = "from worker_entry.system import clock; print(clock.now())"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(told.stdout) == pytest.approx(time.time(), abs=60)


RAISE = """
import sys
print("up", flush=True)
sys.stdin = open("go")
sys.stdin.readline()
raise ValueError("no batch")
"""


@pytest.mark.parametrize("days", [-30, 30])
def test_setting_the_system_clock_during_a_run_changes_no_duration(
    machine: SetClock, tmp_path: Path, days: int
) -> None:
    (tmp_path / "train.py").write_text(RAISE)
    os.mkfifo(tmp_path / "go")
    began = time.time()

    def start(command: list[str], stderr: int) -> subprocess.Popen[bytes]:
        env = {**os.environ, **machine.env}
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=stderr)

    run = BackgroundRun(tmp_path, "local", ["-n", "1", "train.py"], start)
    run.wait_for(b"up", 0)
    machine.set(days)
    (tmp_path / "go").write_text("\n")
    assert run.end() == 1
    attempt = run.report["attempts"][0]
    task = attempt["tasks"][0]
    moments = [run.report["started"], attempt["started"], task["started"], task["crash"]["time"], task["ended"]]
    moments += [attempt["ended"], run.report["ended"]]
    assert moments == sorted(moments)
    assert abs(moments[0] - began) < 60
    assert moments[-1] - moments[0] < 60
    told = re.findall(r" after (\S+) s", run.said)
    assert len(told) == 2
    assert all(0 <= float(seconds) < 60 for seconds in told)
