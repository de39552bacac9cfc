"""A separate process, which may hang or crash, reads GPUs with NVML or nvidia-smi; both are stand-ins here."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launcher.commands.requests import ask_status
from launcher.rundir.directory import RunDir
from tests.harness.apart import linux
from tests.harness.gpu_stand_ins import compile_library, install_smi
from tests.harness.polling import eventually
from tests.harness.processes.commands import distlaunch_command
from tests.harness.witness import wait_until
from worker_entry.agent.gpus import watch as gpu_watch
from worker_entry.agent.gpus.reader import choose_visible
from worker_entry.agent.gpus.watch import GpuWatch
from worker_entry.protocol.samples import GpuSample
from worker_entry.system import nvidia_smi
from worker_entry.system.nvml import LIBRARY, GpuReading, Nvml

COVERS = (
    "worker_entry/agent/gpus/reader.py",
    "worker_entry/agent/gpus/watch.py",
    "worker_entry/agent/tasks/sampling.py",
)

WHOLE = GpuReading(0, "GPU-00-uuid", 0.37, 20 << 30, 80 << 30, 251.5, 64.0)
SAMPLE = GpuSample("0", 0.37, 20 << 30, 80 << 30, 251.5, 64.0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(tmp_path_factory.mktemp("old"), "-DOLD")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without GPUs: neither the library nor the program is found. Returns the first folder of PATH."""
    for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVML_GPUS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_watch, "DEVICES", ())
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


# --- the library ---


@pytest.mark.usefixtures("clean")
class TestNvml:
    def test_nvml_reads_all_values_of_each_gpu(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVML_GPUS", "aa")
        assert Nvml(str(library)).read() == [
            WHOLE,
            GpuReading(1, "GPU-01-uuid", 0.37, 20 << 30, 80 << 30, 251.5, 64.0),
        ]

    def test_gpu_values_that_nvml_does_not_support_are_unknown(
        self, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVML_GPUS", "p")
        assert Nvml(str(library)).read() == [GpuReading(0, "GPU-00-uuid", 0.37, 20 << 30, 80 << 30)]

    def test_nvml_omits_a_gpu_that_has_fallen_off_the_bus(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVML_GPUS", "ala")
        assert [gpu.index for gpu in Nvml(str(library)).read()] == [0, 2]

    def test_nvml_functions_that_a_driver_lacks_are_not_called(
        self, old_library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVML_GPUS", "a")
        assert Nvml(str(old_library)).read() == [GpuReading(0, "", 0.37, 20 << 30, 80 << 30)]

    def test_nvml_finds_no_gpus_if_the_driver_cannot_count_them(
        self, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVML_GPUS", "?")
        assert Nvml(str(library)).read() == []

    def test_nvml_raises_if_the_driver_is_not_loaded(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVML_GPUS", "no driver")
        with pytest.raises(OSError, match="nvmlInit_v2 returned 9"):
            Nvml(str(library))

    def test_nvml_raises_if_its_library_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=LIBRARY):
            Nvml(str(tmp_path / LIBRARY))


# --- the program ---


class TestNvidiaSmi:
    def test_nvidia_smi_shows_gpus_with_missing_values_but_no_lost_gpu(self, clean: Path) -> None:
        install_smi(clean)
        assert nvidia_smi.read_gpus() == [
            WHOLE,
            GpuReading(1, "GPU-01-uuid", None, 20 << 30, 80 << 30, None, 64.0),
        ]
        assert (clean / "calls").read_text().split()[0] == f"--query-gpu={','.join(nvidia_smi.FIELDS)}"

    @pytest.mark.parametrize("listing", ["", "\0\n\n", "No devices were found\n", "0\n", "-1, a, 1, 1, 1, 1, 1\n"])
    def test_an_nvidia_smi_listing_without_gpus_yields_no_gpus(self, clean: Path, listing: str) -> None:
        install_smi(clean, listing=listing)
        assert nvidia_smi.read_gpus() == []

    def test_without_nvidia_smi_there_are_no_gpus(self, clean: Path) -> None:
        assert not (clean / "nvidia-smi").exists()
        assert nvidia_smi.read_gpus() == []

    def test_a_hanging_nvidia_smi_yields_no_gpus(self, clean: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        install_smi(clean, "#!/bin/sh\nexec sleep 600\n")
        monkeypatch.setattr(nvidia_smi, "TIMEOUT_S", 0.1)
        assert nvidia_smi.read_gpus() == []


# --- visible GPUs ---


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1", "2"]),
        (["2", "0"], ["0", "2"]),
        (["GPU-01"], ["GPU-01"]),
        (["7"], []),
        ([], []),
        (["MIG-0f3e"], ["0", "1", "2"]),
    ],
    ids=["all", "by index", "by uuid", "absent", "none", "parts"],
)
def test_only_visible_gpus_are_shown_with_their_cuda_names(visible: list[str] | None, names: list[str]) -> None:
    readings = [GpuReading(index, f"GPU-0{index}-uuid") for index in range(3)]
    assert [sample.gpu for sample in choose_visible(readings, visible)] == names


# --- the agent's side ---


Watch = Callable[[], GpuWatch]


@pytest.fixture
def watch(clean: Path) -> Iterator[Watch]:
    """A function that creates a watch, as the agent does."""
    selector, made = selectors.DefaultSelector(), list[GpuWatch]()

    def make() -> GpuWatch:
        made.append(GpuWatch(selector))
        return made[-1]

    yield make
    for each in made:
        each.end()
        for pid in each.pids:
            os.waitpid(pid, 0)
    selector.close()


def turn(watch: GpuWatch, now: float | None = None) -> list[GpuSample]:
    """Runs one turn of the agent's loop; returns the GPUs."""
    for key, _ in watch.helper.selector.select(0.05):
        key.data()
    return watch.poll(time.monotonic() if now is None else now, 0.1)


@linux
class TestWatch:
    def expect(self, watch: GpuWatch, gpus: list[GpuSample]) -> None:
        def check() -> None:
            assert turn(watch) == gpus

        eventually(check)

    def test_a_gpu_watch_reads_nvml_repeatedly(
        self, watch: Watch, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVML_GPUS", "al")
        mine = watch()
        self.expect(mine, [SAMPLE])
        first = mine._expires

        def again() -> None:
            assert turn(mine) == [SAMPLE]
            assert mine._expires > first

        eventually(again)

    def test_nvidia_smi_is_used_if_nvml_cannot_be_loaded(self, watch: Watch, clean: Path) -> None:
        install_smi(clean)
        self.expect(watch(), [SAMPLE, GpuSample("1", None, 20 << 30, 80 << 30, None, 64.0)])

    def test_gpus_hidden_by_cuda_visible_devices_are_not_shown(
        self, watch: Watch, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVML_GPUS", "aaa")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00-uuid")
        self.expect(watch(), [GpuSample("GPU-00-uuid", 0.37, 20 << 30, 80 << 30, 251.5, 64.0)])

    @pytest.mark.parametrize("visible", [None, "", "-1"])
    def test_no_gpu_reader_is_started_without_visible_gpus(
        self, watch: Watch, clean: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None
    ) -> None:
        if visible is not None:
            install_smi(clean)
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        mine = watch()
        assert turn(mine) == []
        assert mine.pids == set()

    def test_a_hanging_gpu_driver_does_not_block_the_agent(
        self, watch: Watch, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVML_GPUS", "h")
        mine = watch()
        turn(mine)
        [pid] = mine.pids
        eventually(lambda: self.is_in_library(pid))
        assert turn(mine) == []
        mine.end()
        assert os.waitpid(pid, 0) == (pid, signal.SIGKILL)
        mine.pids.clear()

    @staticmethod
    def is_in_library(pid: int) -> None:
        assert LIBRARY in Path(f"/proc/{pid}/maps").read_text()

    def test_gpus_are_read_again_later_after_a_driver_crash(
        self, watch: Watch, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVML_GPUS", "c")
        mine = watch()
        turn(mine)
        [pid] = mine.pids
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        mine.pids.clear()  # as the agent does after it has reaped the reader

        def closed() -> None:
            turn(mine, 0.0)
            assert not mine.helper.is_running

        eventually(closed)
        assert turn(mine) == []
        assert mine.pids == set()
        monkeypatch.setenv("NVML_GPUS", "a")
        turn(mine, time.monotonic() + gpu_watch.FIRST_PAUSE_S)
        assert len(mine.pids) == 1
        self.expect(mine, [SAMPLE])

    def test_outdated_gpu_readings_are_not_shown(
        self, watch: Watch, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVML_GPUS", "a")
        mine = watch()
        self.expect(mine, [SAMPLE])
        assert mine.poll(time.monotonic() + 60, 0.1) == []

    def test_the_gpu_reader_ends_with_its_watch(
        self, watch: Watch, library: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
        monkeypatch.setenv("NVML_GPUS", "a")
        mine = watch()
        self.expect(mine, [SAMPLE])
        [reader] = [psutil.Process(pid) for pid in mine.pids]
        mine.end()
        reader.wait(30)
        mine.pids.clear()

    @pytest.mark.parametrize(
        "line",
        [
            b"NVML: a warning of the library",
            b"{}",
            b"[1]",
            b'{"gpus": [{"gpu": 0}], "next_s": 1}',
            b'{"gpus": [{"gpu": "0", "use": -1}], "next_s": 1}',
            b'{"gpus": [], "next_s": "soon"}',
            b"\xff\0",
        ],
    )
    def test_invalid_lines_of_the_gpu_reader_are_ignored(self, watch: Watch, line: bytes) -> None:
        mine = watch()
        mine._take(b'{"gpus": [{"gpu": "0", "use": 0.5}], "next_s": 9}')
        mine._take(line)
        assert mine.poll(time.monotonic(), 0.1) == [GpuSample("0", 0.5)]


# --- a run ---


@pytest.mark.slow
@linux
@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("kind", ["a", "h"], ids=["works", "hangs"])
def test_a_run_shows_its_gpus_and_leaves_no_reader_behind(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    monkeypatch.setenv("NVML_GPUS", kind)
    run = RunDir(tmp_path / "run")
    wait = "until [ -e go ]; do sleep 0.1; done"
    command = distlaunch_command("local", "-n", "1", "--set", "sample_every_s=0.2", "--run-dir", str(run.root))
    with subprocess.Popen([*command, "--", "sh", "-c", wait], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:

        def check() -> None:
            nodes = ask_status(run).nodes
            expected = [{**vars(SAMPLE), "gpu": "0"}] if kind == "a" else []
            assert [[gpu.model_dump() for gpu in node.gpus] for node in nodes] == [expected]

        try:
            wait_until(lambda: bool(readers(process.pid)), "the GPUs are read")
            eventually(check)
            mine = readers(process.pid)
        finally:
            (tmp_path / "go").touch()
        assert process.wait(60) == 0
    [attempt] = json.loads((run.root / "report.json").read_text())["attempts"]
    assert attempt["processes_left"] == 0
    psutil.wait_procs(mine, 30)
    assert not any(reader.is_running() for reader in mine)


def readers(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "gpus" in process.cmdline():
                found.append(process)
    return found
