"""The wheel and the sdist: built as for a release, and used in clean environments, as users do."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import cli
from tests.harness.available import find_program, find_python
from tests.harness.places import ROOT
from tests.harness.processes.environments import clean_env
from tests.harness.processes.in_process import run_here
from tests.harness.witness import assert_none_left, make_mark

COVERS = (".github/packaging", "launcher/cli", "launcher/__main__.py", "launcher/public", "worker_entry/program")

pytestmark = pytest.mark.packages

PYTHONS = ("3.10", "3.13")
"""The oldest and the newest that the package supports."""
BIN = Path(sys.executable).parent
COPIED = ("launcher", "worker_entry", ".github", "pyproject.toml", "README.md", "LICENSE", ".gitignore")
MODULES = 250
"""More than these are imported."""
IMPORT_ALL = """\
import importlib, pkgutil
names = []
for package in ("launcher", "worker_entry.agent", "worker_entry.protocol", "distlaunch"):
    found = importlib.import_module(package)
    names += [each.name for each in pkgutil.walk_packages(found.__path__, f"{package}.") if "__main__" not in each.name]
for name in names:
    if "metrics" not in name:  # needs the extra `metrics`
        importlib.import_module(name)
print(len(names))
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**clean_env(), "UV_PYTHON_DOWNLOADS": "never", **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def succeed(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """The output of a command that succeeds."""
    done = run(*command, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, *, umask: int, age_s: float) -> Path:
    """Builds the sdist, and the wheel from it, in a copy of the sources that has other times and permissions."""
    copy = folder / "sources"
    before = os.umask(umask)
    try:
        for name in COPIED:
            place = ROOT / name
            if place.is_dir():
                shutil.copytree(place, copy / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=_copy)
            else:
                _copy(place, copy / name)
    finally:
        os.umask(before)
    for path in copy.rglob("*"):
        os.utime(path, (age_s, age_s))
    succeed(BIN / "uv", "build", "--quiet", "--out-dir", folder / "dist", copy, cwd=folder)
    return folder / "dist"


def _copy(source: str | Path, to: str | Path) -> None:
    Path(to).write_bytes(Path(source).read_bytes())  # with the permissions that the umask leaves


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    return build(tmp_path_factory.mktemp("built"), umask=0o022, age_s=1_000_000_000)


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    [found] = dist.glob("*.whl")
    return found


@pytest.fixture(params=PYTHONS)
def python(request: pytest.FixtureRequest) -> str:
    found = find_python(request.param)
    if found is None:
        pytest.skip(f"no python{request.param} on PATH or from pyenv")
    return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a user who has never used distlaunch, uv's tools or pipx; no process of theirs is left."""
    mark = make_mark()
    folder = tmp_path / "home"
    folder.mkdir()
    cache = succeed(BIN / "uv", "cache", "dir", cwd=tmp_path).strip()  # has what was downloaded before
    yield {**mark, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state"), "UV_CACHE_DIR": cache}
    assert_none_left(mark)


def install(wheel: Path, python: str, folder: Path) -> Path:
    """Installs the wheel into a clean environment, and returns the environment's folder of programs."""
    succeed(BIN / "uv", "venv", "--quiet", "--python", python, folder / "clean", cwd=folder)
    programs = folder / "clean" / "bin"
    succeed(BIN / "uv", "pip", "install", "--quiet", "--python", programs / "python", wheel, cwd=folder)
    return programs


# --- what is built ---


def test_the_same_sources_give_the_same_bytes_from_any_copy(dist: Path, tmp_path: Path) -> None:
    again = build(tmp_path, umask=0o077, age_s=1_500_000_000)

    first, second = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("distlaunch-*")}
        for folder in (dist, again)
    )
    assert len(first) == 2
    assert first == second


def test_twine_accepts_the_wheel_and_the_sdist(dist: Path) -> None:
    checked = succeed(BIN / "twine", "--no-color", "check", "--strict", *dist.glob("distlaunch-*"), cwd=dist)

    assert checked.count("PASSED") == 2


def test_the_page_of_an_index_has_only_absolute_links_and_pictures(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [name] = [each for each in archive.namelist() if each.endswith("/METADATA")]
    found = re.findall(r'(?:\]\(|src=")([^)"\s]+)', archive.read(name).decode())

    assert len(found) > 20
    assert [link for link in found if not link.startswith("https://")] == []


def test_the_wheel_has_all_sources_a_man_page_for_each_command_and_completions(wheel: Path) -> None:
    files = {*zipfile.ZipFile(wheel).namelist()}
    data = {name for name in files if ".data/data/" in name}
    tracked = subprocess.run(
        ["git", "ls-files", "launcher", "worker_entry"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()  # fmt: skip
    pages = {"distlaunch", *(f"distlaunch-{name}" for name in cli.commands), "distlaunch-export-kubernetes"}

    assert {name.removeprefix("launcher/public/") for name in tracked} == {
        name for name in files - data if ".dist-info/" not in name
    }
    assert {name.partition("/data/share/")[2] for name in data} == {
        *(f"man/man1/{page}.1" for page in pages),
        "bash-completion/completions/distlaunch",
        "zsh/site-functions/_distlaunch",
        "fish/vendor_completions.d/distlaunch.fish",
    }


def test_man_renders_all_pages_without_a_warning_and_keeps_the_lines_of_examples(wheel: Path, tmp_path: Path) -> None:
    man = find_program("man", "--version")
    if man is None:
        pytest.skip("no man")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    pages = sorted(tmp_path.rglob("*.1"))
    assert pages
    shown = {}
    for page in pages:
        done = run(man, "--warnings", "--local-file", page, cwd=tmp_path, env={"MANWIDTH": "100", "LC_ALL": "C.UTF-8"})
        assert (done.returncode, done.stderr) == (0, ""), page.name
        shown[page.stem] = re.sub(".\b", "", done.stdout)

    assert "distlaunch-wait - Wait until a run ends, and exit with its exit status.\n" in shown["distlaunch-wait"]
    for line in (
        "distlaunch local                                  the built-in demo",
        "distlaunch local --workers 2 train.py --epochs 3  a script, or -m MODULE",
    ):
        assert f"       {line}\n" in shown["distlaunch-local"]
    for command in cli.commands.values():
        for option in (name for each in command.params for name in each.opts if name.startswith("--")):
            assert option in shown[f"distlaunch-{command.name}"]


def test_the_wheels_completions_are_what_the_command_prints(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    for shell, place in (("bash", "completions/distlaunch"), ("zsh", "_distlaunch"), ("fish", "distlaunch.fish")):
        [name] = [each for each in archive.namelist() if each.endswith(f"/{place}")]
        printed = run_here("completion", shell, cwd=ROOT)
        assert printed.stdout
        assert archive.read(name).decode() == printed.stdout


# --- what is installed ---


@pytest.mark.smoke
def test_an_installed_wheel_runs_clusters_without_tensorflow(
    wheel: Path, python: str, home: dict[str, str], tmp_path: Path
) -> None:
    programs = install(wheel, python, tmp_path)

    assert int(succeed(programs / "python", "-c", IMPORT_ALL, cwd=tmp_path, env=home)) > MODULES
    show = ["sh", "-c", 'echo "$TF_CONFIG"']
    for command in ([programs / "distlaunch"], [programs / "python", "-m", "distlaunch"]):
        assert succeed(*command, "--version", cwd=tmp_path, env=home).startswith("distlaunch ")
        output = succeed(*command, "local", "-n", "2", "--", *show, cwd=tmp_path, env=home)
        configs = [json.loads(line.partition(" │ ")[2]) for line in output.splitlines()]
        assert sorted(each["task"]["index"] for each in configs) == [0, 1]
    assert_runs([programs / "distlaunch"], home, tmp_path, installer=f"{programs / 'python'} -m pip install tensorflow")


@pytest.mark.tensorflow
def test_uvx_trains_the_demo_in_one_command(wheel: Path, python: str, home: dict[str, str], tmp_path: Path) -> None:
    package = f"distlaunch[tensorflow] @ file://{wheel}"
    command: list[str | Path] = [BIN / "uvx", "--quiet", "--python", python, "--from", package, "distlaunch"]

    output = succeed(*command, "local", "-n", "2", cwd=tmp_path, env=home)

    for task in (0, 1):
        [accuracy] = re.findall(rf"worker:{task} of 2: validation accuracy (\d\.\d+)", output)
        assert float(accuracy) > 0.9


def assert_runs(command: list[str | Path], env: dict[str, str], cwd: Path, *, installer: str) -> None:
    """Checks that this `distlaunch` runs a cluster, and says how its environment gets TensorFlow."""
    assert succeed(*command, "local", "-n", "2", "--", "echo", "ran", cwd=cwd, env=env).count("ran\n") == 2
    demo = run(*command, "local", "-n", "2", cwd=cwd, env=env)
    assert demo.returncode == 2
    assert f"\n  run: {installer}; or name a Python that has it with --python" in demo.stderr


@pytest.mark.smoke
def test_uvx_runs_the_wheel_in_one_command(wheel: Path, python: str, home: dict[str, str], tmp_path: Path) -> None:
    command: list[str | Path] = [BIN / "uvx", "--quiet", "--python", python, "--from", wheel, "distlaunch"]

    assert_runs(command, home, tmp_path, installer="uvx --with tensorflow distlaunch …")


def test_uv_and_pipx_install_the_command_and_pipx_its_man_pages(
    wheel: Path, python: str, home: dict[str, str], tmp_path: Path
) -> None:
    env = {**home, "PIPX_HOME": str(tmp_path / "pipx"), "UV_TOOL_DIR": str(tmp_path / "uv" / "tools")}
    local = Path(home["HOME"], ".local")
    command: list[str | Path] = [local / "bin" / "distlaunch"]

    succeed(BIN / "uv", "tool", "install", "--quiet", "--python", python, wheel, cwd=tmp_path, env=env)
    assert_runs(command, env, tmp_path, installer="uv tool install --with tensorflow distlaunch")

    succeed(BIN / "uv", "tool", "uninstall", "--quiet", "distlaunch", cwd=tmp_path, env=env)
    succeed(BIN / "pipx", "install", "--python", python, wheel, cwd=tmp_path, env=env)
    assert_runs(command, env, tmp_path, installer="pipx inject distlaunch tensorflow")
    assert (local / "share" / "man" / "man1" / "distlaunch-up.1").read_text().startswith('.TH "DISTLAUNCH UP"')
