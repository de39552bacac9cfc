"""Tiers of tests, by what they cost, and which of them run; a plugin of pytest.

1  tests that start nothing, and
2  tests that start processes of this machine: run always
3  the main promises of each costly part, marked `smoke`: run always in CI; `pytest` runs those of TensorFlow
4  all other costly tests: run if a change selects them (--since), if the user asks for them, and with --all

Tests of other versions of TensorFlow and Keras belong to no tier: they run with --versions, and nothing else does.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Set
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest

from tests.harness.available import HAS_GPU
from tests.harness.rules import version_rows
from tests.harness.rules.second_chance import PURE
from tests.harness.rules.selection import RevisionError, Selection, read_changes, read_tests, select

FOLDERS = {
    "training": "tensorflow",
    "hosts/browser": "browser",
    "hosts/docker": "docker",
    "hosts/kubernetes": "kubernetes",
    "hosts/network": "ssh",
    "hosts/prometheus": "prometheus",
    "hosts/slurm": "slurm",
    "hosts/ssh": "ssh",
    "jax": "jax",
}
"""The folders of `tests/` in which all tests have the same requirement, and its mark."""
REQUIREMENTS = {"tensorflow", "ssh", "docker", "browser", "prometheus", "slurm", "kubernetes", "packages", "jax", "gpu"}
COSTLY = {*REQUIREMENTS, "slow"}
"""Marks of tests that run always only if they are marked `smoke` as well."""
SMOKE = "smoke"
GPU = "gpu"


def tier_of(marks: Container[str], *, pure: bool = False) -> int:
    """The tier of a test with these marks; the first two differ in what it does."""
    if not any(mark in marks for mark in COSTLY):
        return 1 if pure else 2
    if SMOKE not in marks:
        return 4
    return 3 if any(mark in marks for mark in REQUIREMENTS) else 2


def is_default(marks: Container[str]) -> bool:
    """Whether `pytest` alone runs a test with these marks."""
    others = any(mark in marks for mark in REQUIREMENTS - {"tensorflow"})
    return tier_of(marks) < 3 or (SMOKE in marks and not others)


SELECTED = pytest.StashKey[Selection]()
"""What --since selects; xdist's processes receive it under the name below."""
SELECTED_NAME = "selected"


def mark_of(module: str) -> str | None:
    """The mark of the folder of a module: of `tests/hosts/ssh/test_up.py`, it is `ssh`."""
    folders = PurePosixPath(module).parents
    return next((mark for folder, mark in FOLDERS.items() if PurePosixPath("tests", folder) in folders), None)


def pytest_itemcollected(item: pytest.Item) -> None:
    if (mark := mark_of(_module_of(item))) is not None:
        item.add_marker(mark)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # one of xdist's processes: the main process sends it what is selected
    config.pluginmanager.register(Times())
    if config.option.since is not None:
        try:
            config.stash[SELECTED] = select(read_changes(config.option.since), read_tests())
        except RevisionError as error:
            raise pytest.UsageError(f"--since {config.option.since}: {error}") from None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    selection = node.config.stash.get(SELECTED, None)
    if selection is not None:
        node.workerinput[SELECTED_NAME] = (dict(selection.modules), selection.everything)


def _find_selection(config: pytest.Config) -> Selection | None:
    sent = getattr(config, "workerinput", {}).get(SELECTED_NAME)
    return Selection(*sent) if sent is not None else config.stash.get(SELECTED, None)


def pytest_report_header(config: pytest.Config) -> list[str]:
    selection = _find_selection(config)
    if selection is None:
        return []
    if selection.everything is not None:
        return [f"since {config.option.since}: {selection.everything} selects all costly tests"]
    lines = [f"  {module} because of {file}" for module, file in selection.modules.items()]
    return [f"since {config.option.since}: costly tests of {len(lines)} modules are selected", *lines]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests that run by default, and those that the user asks for: with --all, --since, -m, or by name.

    With DISTLAUNCH_QUICK_PASSED set, as in CI after `pytest` has passed, --all and --since leave out its tests.
    """
    refuse_without_covers(items)
    _keep(config, items, lambda item: version_rows.is_of_versions(_module_of(item)) == config.option.versions)
    if not config.option.markexpr and not config.option.versions:
        named = _find_named(config)
        if not HAS_GPU:  # few machines have one: no reason to skip these tests on all others
            _keep(config, items, lambda item: GPU not in marks_of(item) or item.path in named)
        is_kept = _find_rule(config)
        _keep(config, items, lambda item: is_kept(item, marks_of(item)))


def _keep(config: pytest.Config, items: list[pytest.Item], is_kept: Callable[[pytest.Item], bool]) -> None:
    kept = {item: is_kept(item) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not kept[item]])
    items[:] = [item for item in items if kept[item]]


def _find_rule(config: pytest.Config) -> Callable[[pytest.Item, Set[str]], bool]:
    selection = _find_selection(config)
    if config.option.all or selection is not None:
        passed = "DISTLAUNCH_QUICK_PASSED" in os.environ
        every = config.option.all or selection is None or selection.everything is not None
        selected = selection.modules if selection is not None else {}
        return lambda item, marks: (
            not (passed and is_default(marks)) and (every or tier_of(marks) < 4 or _module_of(item) in selected)
        )
    modules = _find_named(config)
    return lambda item, marks: is_default(marks) or item.path in modules


def _find_named(config: pytest.Config) -> set[Path]:
    """The files that were asked for by name: of all others, pytest collects the folder."""
    named = [Path(config.invocation_params.dir, name.partition("::")[0]) for name in config.args]
    return {path.resolve() for path in named if path.is_file()}


def marks_of(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def _module_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def refuse_without_covers(items: list[pytest.Item]) -> None:
    """Refuses costly tests whose module and folders have no COVERS, by which changes select them."""
    costly = {item.path: item for item in items if tier_of(marks_of(item)) > 2}
    lacking = sorted(str(path) for path, item in costly.items() if not _has_covers(getattr(item, "module", None)))
    if lacking:
        raise pytest.UsageError(
            f"modules with costly tests, but without COVERS, the folders that they exercise: {', '.join(lacking)}"
        )


def _has_covers(module: ModuleType | None) -> bool:
    folder = PurePosixPath(getattr(module, "__name__", "").replace(".", "/"))
    modules = [module, *(sys.modules.get(str(name).replace("/", ".")) for name in folder.parents)]
    return any(getattr(each, "COVERS", ()) for each in modules)


class Times:
    """Adds up how long the tests of each tier take; only in pytest's main process."""

    def __init__(self) -> None:
        self._tests: Counter[int] = Counter()
        self._seconds: dict[int, float] = {}
        self._running: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._running[report.nodeid] = self._running.get(report.nodeid, 0) + report.duration
        if report.when == "teardown":
            tier = tier_of(report.keywords, pure=getattr(report, PURE, False))
            self._tests[tier] += 1
            self._seconds[tier] = self._seconds.get(tier, 0) + self._running.pop(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for tier, tests in sorted(self._tests.items()):
            seconds = self._seconds[tier]
            terminalreporter.write_line(f"tier {tier}: {tests} tests, {seconds:.0f} s in all processes together")
