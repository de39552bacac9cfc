"""A change selects the costly tests that it can break; a file that no module covers selects all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.places import ROOT
from tests.harness.rules import selection
from tests.harness.rules.selection import (
    SELECTS_ALL,
    Module,
    RevisionError,
    Selection,
    read_changes,
    read_covers,
    read_tests,
    select,
)
from tests.harness.rules.tiers import is_default, refuse_without_covers, tier_of


def covering(*covers: str, uses: tuple[str, ...] = ()) -> Module:
    return Module(frozenset(covers), frozenset(uses))


MODULES = {
    "tests/conftest.py": covering("launcher/errors.py", uses=("tests/harness/rules/tiers.py",)),
    "tests/harness/rules/tiers.py": covering(),
    "tests/hosts/test_slurm.py": covering("launcher/slurm", uses=("tests/conftest.py", "tests/harness/hosts/slurm.py")),
    "tests/harness/hosts/slurm.py": covering("launcher/spec/nodes.py", uses=("tests/harness/polling.py",)),
    "tests/harness/polling.py": covering(),
    "tests/test_fit.py": covering("worker_entry/hooks", uses=("tests/programs/fit.py", "tests/golden/a.txt")),
    "tests/programs/fit.py": covering(uses=("tests/programs/tiny.py",)),
    "tests/programs/tiny.py": covering(),
    "tests/test_both.py": covering("launcher/slurm/step.py", "worker_entry/hooks", uses=("tests/harness/polling.py",)),
}


def selected_by(*changed: str) -> set[str]:
    selection = select(changed, MODULES)
    assert selection.everything is None
    return {Path(name).stem for name in selection.modules}


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        pytest.param("launcher/slurm/step.py", {"test_slurm", "test_both"}, id="a folder and a file that are covered"),
        pytest.param("launcher/slurm/calls.py", {"test_slurm"}, id="a folder that is covered"),
        pytest.param("launcher/slurm/new.py", {"test_slurm"}, id="a new file, or one that is gone"),
        pytest.param("launcher/spec/nodes.py", {"test_slurm"}, id="what a helper imports"),
        pytest.param("tests/harness/polling.py", {"test_slurm", "test_both"}, id="a helper of a helper"),
        pytest.param("tests/test_fit.py", {"test_fit"}, id="a test module"),
        pytest.param("tests/test_gone.py", set(), id="a test module that is gone"),
        pytest.param("tests/programs/fit.py", {"test_fit"}, id="a program"),
        pytest.param("tests/programs/tiny.py", {"test_fit"}, id="what a program imports"),
        pytest.param("tests/golden/a.txt", {"test_fit"}, id="data"),
        pytest.param("README.md", set(), id="a document"),
        pytest.param(".ci/base", set(), id="the base itself"),
    ],
)
def test_a_change_selects_what_covers_it(file: str, expected: set[str]) -> None:
    assert selected_by(file) == expected


def test_each_changed_file_adds_to_the_selection_and_the_first_is_named() -> None:
    selection = select(["worker_entry/hooks/a.py", "launcher/slurm/calls.py", "README.md"], MODULES)
    assert selection == Selection(
        {
            "tests/hosts/test_slurm.py": "launcher/slurm/calls.py",
            "tests/test_both.py": "worker_entry/hooks/a.py",
            "tests/test_fit.py": "worker_entry/hooks/a.py",
        }
    )


@pytest.mark.parametrize(
    "file",
    [
        "pyproject.toml",
        ".ci/run",
        "tests/conftest.py",
        "tests/harness/rules/tiers.py",
        "worker_entry/children/sitecustomize.py",
        "worker_entry/bootstrap/install.py",
        "worker_entry/bootstrap/callback.py",
        "launcher/new/module.py",
        "launcher/errors.py",
        "tests/programs/unknown.py",
        "Makefile",
    ],
)
def test_what_everything_depends_on_and_what_nobody_covers_selects_all(file: str) -> None:
    assert select(["launcher/slurm/calls.py", file], MODULES) == Selection({}, file)


# --- what the tests on disk say ---


def test_what_a_module_covers_names_and_imports_is_read_from_its_source() -> None:
    modules = read_tests()
    found = modules["tests/harness/rules/test_selection.py"]
    assert {"tests/harness/rules/selection.py", "tests/harness/places.py"} <= found.uses
    assert "tests/programs/tiny_keras.py" in modules["tests/programs/keras_cases.py"].uses, "programs import each other"
    assert "tests/programs/resume_flaws/small.py" in modules["tests/programs/resume_flaws/no_checkpoint.py"].uses
    resume_programs = modules["tests/harness/processes/resume_programs.py"]
    assert "tests/programs/resume_flaws/no_checkpoint.py" in resume_programs.uses, "a program of a folder is named"
    assert "tests/programs/keras_cases.py" in modules["tests/training/keras/test_fit.py"].uses, "a program is named"
    assert "tests/harness/processes/takeover_driver.py" in modules["tests/node/test_takeover.py"].uses, (
        "a helper is run by its name"
    )
    assert any(file.startswith("tests/golden/") for file in modules["tests/unit/plan/test_golden_plans.py"].uses)
    assert "launcher/errors.py" in modules["tests/conftest.py"].covers


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("launcher/pages/assets/report.html.j2", {"hosts/browser/test_pages", "training/test_pictures"}),
        (
            "tests/programs/meet.py",
            {"hosts/slurm/test_runs", "hosts/network/test_tunnel", "harness/rules/test_selection"},
        ),
        (
            "tests/harness/hosts/containers.py",
            {"hosts/docker/test_clusters", "parts/transports/test_connectors", "docs/test_benchmarks"},
        ),
        ("docker/Dockerfile", {"hosts/docker/test_clusters"}),
    ],
)
def test_a_template_a_program_or_a_helper_selects_the_modules_that_use_it(file: str, expected: set[str]) -> None:
    selection = select([file], read_tests())
    found = {Path(name).relative_to("tests").with_suffix("").as_posix() for name in selection.modules}
    assert (found, selection.everything) == (expected, None)


def test_covers_is_a_literal_at_module_level() -> None:
    assert [*read_covers(b"x = 1\nCOVERS = ('launcher/gang', 'docker')\ndef f():\n    COVERS = ('a',)\n")] == [
        "launcher/gang",
        "docker",
    ]


def test_all_that_modules_cover_exists() -> None:
    covered = {place: name for name, module in read_tests().items() for place in module.covers}
    assert len(covered) > 50
    assert {place: name for place, name in covered.items() if not (ROOT / place).exists()} == {}


def test_each_file_of_the_product_is_covered_by_a_costly_module() -> None:
    """Otherwise, an ordinary change would select all costly tests; what is meant to do so is in SELECTS_ALL."""
    files = [
        file.relative_to(ROOT).as_posix()
        for folder in ("launcher", "worker_entry", "cluster_specs", "docker")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.name != ".gitignore"
    ]
    assert len(files) > 400
    assert select([file for file in files if not file.startswith(SELECTS_ALL)], read_tests()).everything is None


# --- the tiers ---


@pytest.mark.parametrize(
    ("marks", "tier", "default"),
    [
        ({"parametrize"}, 2, True),
        ({"slow"}, 4, False),
        ({"slow", "smoke"}, 2, True),
        ({"tensorflow"}, 4, False),
        ({"tensorflow", "slow", "smoke"}, 3, True),
        ({"ssh", "smoke"}, 3, False),
        ({"ssh", "tensorflow", "smoke"}, 3, False),
    ],
)
def test_marks_decide_the_tier_and_what_runs_by_default(marks: set[str], tier: int, default: bool) -> None:
    assert (tier_of(marks), is_default(marks)) == (tier, default)


def test_a_pure_test_is_in_the_first_tier() -> None:
    assert (tier_of(set(), pure=True), tier_of({"slow"}, pure=True)) == (1, 4)


def test_a_module_with_costly_tests_names_what_it_covers() -> None:
    def item(module: str, *marks: str, covers: tuple[str, ...] = ()) -> Any:
        found = [SimpleNamespace(name=mark) for mark in marks]
        module_value = SimpleNamespace(COVERS=covers) if covers else SimpleNamespace()
        return SimpleNamespace(path=Path(module), module=module_value, iter_markers=lambda: found)

    refuse_without_covers([item("test_a.py", "ssh", covers=("launcher",)), item("test_b.py", "slow", "smoke")])
    with pytest.raises(pytest.UsageError, match=r"without COVERS.*: test_c\.py, test_d\.py$"):
        refuse_without_covers([item("test_c.py", "slow"), item("test_c.py"), item("test_d.py", "ssh", "smoke")])


@pytest.mark.parametrize("options", [(), ("--all",), ("-m", "tensorflow or not tensorflow"), ("--since", "HEAD")])
def test_tests_of_other_versions_run_only_with_their_option_and_nothing_else_does(options: tuple[str, ...]) -> None:
    pure, of_versions = "tests/unit/gang/test_decide.py", "tests/versions/test_versions.py"
    assert collect(*options, pure, of_versions) == {pure}
    assert collect(*options, "--versions", pure, of_versions) == {of_versions}


def collect(*arguments: str) -> set[str]:
    """The modules of the tests that pytest would run."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-q", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.OK, done.stdout + done.stderr
    return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}


# --- the change ---


def git(folder: Path, *arguments: str) -> str:
    identity = {f"GIT_{who}_{what}": "x@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, **identity},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_change_is_what_differs_now_committed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    for name in ("same", "gone", "moved with enough text to be known again", "later"):
        (tmp_path / name).write_text(name)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "rm", "-q", "gone")
    git(tmp_path, "mv", "moved with enough text to be known again", "é moved")
    git(tmp_path, "commit", "-qm", "second")
    (tmp_path / "later").write_text("changed")
    (tmp_path / "new").touch()
    assert read_changes("HEAD^") == {"gone", "moved with enough text to be known again", "é moved", "later", "new"}
    assert read_changes("HEAD") == {"later", "new"}
    for revision in ("unknown", "--output=x"):
        with pytest.raises(RevisionError, match=re_of(revision)):
            read_changes(revision)


def re_of(revision: str) -> str:
    return revision.lstrip("-")


def test_the_base_of_ci_is_an_earlier_commit() -> None:
    """CI tests what has changed since this commit; with HEAD as base, it would test too little."""
    base = (ROOT / ".ci" / "base").read_text().strip()
    try:
        head = git(ROOT, "rev-parse", "HEAD")
        is_shallow = git(ROOT, "rev-parse", "--is-shallow-repository") == "true"
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no checkout of git here")
    if is_shallow:
        pytest.skip("a shallow clone; fetch its history with `git fetch --unshallow`")
    assert base != head, ".ci/base is HEAD: write the commit there from which the work began"
    assert git(ROOT, "merge-base", base, head) == base, ".ci/base is no ancestor of HEAD"


def test_an_unknown_revision_is_an_error_of_usage() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--since",
        "no-such-revision",
        "--collect-only",
        "-q",
        "tests/unit/gang/test_decide.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--since no-such-revision: fatal: " in done.stderr
