"""Collects the facts that `distlaunch doctor` reports about the machine that runs it."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from launcher.errors import DistlaunchError
from launcher.report.doctor import OwnFacts
from launcher.rundir.names import runs_directory

TOOLS = ("ssh", "docker", "kubectl", "sbatch", "git")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def read_own_facts(config: Path | None) -> OwnFacts:
    """The facts about distlaunch itself; `config`: the file of defaults, None if there is none."""
    state, problem = _find_state()
    keys, locked, key_problem = _find_keys()
    return OwnFacts(
        version=metadata.version("distlaunch"),
        state=str(state),
        state_problem=problem,
        state_free=_free(state),
        config=str(config or ""),
        keys=keys,
        locked_keys=locked,
        key_problem=key_problem,
        known_hosts=_count_known_hosts(),
        proxies=[name for name in os.environ if name.lower() in PROXIES and os.environ[name]],
        tools={name: shutil.which(name) or "" for name in TOOLS},
    )


def _find_state() -> tuple[Path, str]:
    """The folder of runs, and why it cannot be written; empty if it can."""
    try:
        folder = runs_directory(os.environ)
    except DistlaunchError as error:
        return Path("~"), error.message
    above = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=above):
            return folder, ""
    except OSError as error:
        return folder, str(error.strerror)


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(_existing(folder)).free
    except OSError:
        return 0


def _find_keys() -> tuple[list[str], list[str], str]:
    """The names of the SSH keys for an ordinary host, the files that need a passphrase, and why there are none."""
    from launcher.transports.base import LinkError
    from launcher.transports.ssh.authentication import list_keys
    from launcher.transports.ssh.config import load_target

    try:
        return *list_keys(load_target("gpu-a")), ""
    except LinkError as error:
        return [], [], str(error)


def _count_known_hosts() -> int:
    try:
        lines = (Path.home() / ".ssh" / "known_hosts").read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, RuntimeError):
        return 0
    return sum(bool(line.strip()) and not line.startswith("#") for line in lines)
