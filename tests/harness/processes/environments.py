"""Environments with other versions of Python, TensorFlow, PyTorch and Keras, for tests or for their programs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.requirements import Requirement

from tests.harness.places import ROOT

FOLDER = "DISTLAUNCH_VERSIONS"
"""The variable that names the folder of the environments."""
INSTALL_S = 1800.0
INSPECT_S = 300.0
TENSORFLOW = {"tensorflow", "tf-keras"}
"""The packages of the extra `test` that an environment has in other versions."""
INHERITED = re.compile(r"(DISTLAUNCH_|PYTEST_|PYTHON|VIRTUAL_ENV)")
"""Variables of this environment that must not reach another one."""
INSPECT = """
import json, platform
from worker_entry.keras_patches import patching
lines, patches = [], []
patching.install(lines.append, patches.append)
import keras, tensorflow
print(json.dumps({
    "python": platform.python_version(),
    "tensorflow": tensorflow.__version__,
    "keras": keras.__version__,
    "patched": patches[0].faults if patches else 0,
    "changed": patches[0].changed if patches else [],
    "lines": lines,
}))
"""


class NotInstallableError(Exception):
    """pip cannot install these requirements; the text is pip's own."""


@dataclass(frozen=True)
class Outcome:
    """What a run of pytest in an environment ended with; `skipped`: the reasons."""

    status: int
    passed: int
    failed: int
    skipped: list[str]
    seconds: float
    output: str


class Environment:
    """A virtual environment; kept for later runs."""

    def __init__(self, name: str, interpreter: str) -> None:
        self._folder = _find_folder() / name
        self._interpreter = interpreter
        self.python = str(self._folder / "bin" / "python")

    def install(self, requirements: list[str]) -> None:
        """Makes the environment, or brings an earlier one up to date: pip then only looks for newer versions.

        Raises:
            NotInstallableError: pip failed.
        """
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        create = [self._interpreter, "-m", "venv", str(self._folder)]
        subprocess.run(create, check=True, timeout=INSTALL_S, env=clean_env(), capture_output=True)
        done = self._run("-m", "pip", "install", "--quiet", "--upgrade", *requirements, timeout=INSTALL_S)
        if done.returncode != 0:
            raise NotInstallableError(done.stderr.strip()[-2000:])

    def inspect(self, program: str = INSPECT) -> dict[str, Any]:
        """What a program prints as JSON: the versions in this environment, and what the patches find in its Keras."""
        done = self._run("-c", program, timeout=INSPECT_S)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def run_tests(self, *arguments: str, results: Path, timeout: float) -> Outcome:
        """Runs pytest; `results` is a file for its results."""
        options = ("-q", "-n", "2", "-p", "no:cacheprovider", f"--junitxml={results}", f"--basetemp={results}.d")
        done = self._run("-m", "pytest", *options, *arguments, timeout=timeout)
        suite = ElementTree.parse(results).getroot().find("testsuite") if results.exists() else None
        if suite is None:
            return Outcome(done.returncode, 0, 0, [], 0.0, done.stdout + done.stderr)
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
        failed = counts["failures"] + counts["errors"]
        return Outcome(
            done.returncode,
            counts["tests"] - failed - counts["skipped"],
            failed,
            sorted({element.get("message", "") for element in suite.iter("skipped")}),
            float(suite.get("time", 0)),
            done.stdout + done.stderr,
        )

    def size(self) -> int:
        """The bytes on disk."""
        return sum(path.lstat().st_size for path in self._folder.rglob("*"))

    def _run(self, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
        command = [self.python, *arguments]
        env = {**clean_env(), "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )


def clean_env() -> dict[str, str]:
    """This process's variables, without those of its own environment."""
    return {name: value for name, value in os.environ.items() if not INHERITED.match(name)}


def _find_folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(FOLDER) or cache / "distlaunch-versions")


def find_requirements() -> list[str]:
    """This project and the requirements of its tests, without TensorFlow and tf_keras, as arguments of pip."""
    every = map(Requirement, importlib.metadata.requires("distlaunch") or ())
    of_tests = (each for each in every if each.marker is not None and each.marker.evaluate({"extra": "test"}))
    names = {*TENSORFLOW, "distlaunch"}
    others = [f"{each.name}{each.specifier}" for each in of_tests if each.name.replace("_", "-") not in names]
    return ["-e", str(ROOT), *others]
