"""What describes the package to others says the same as pyproject.toml: the conda recipe, workflows, SchemaStore."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

from launcher.cli.main import cli
from tests.harness.documents import README, read
from tests.harness.places import ROOT

PACKAGING = ROOT / ".github" / "packaging"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def table(name: str) -> str:
    """The text of a table of pyproject.toml."""
    return PYPROJECT.partition(f"[{name}]")[2].partition("\n[")[0]


def run_lines(workflow: str) -> list[str]:
    """The shell lines of a workflow's steps."""
    jobs = load(ROOT / ".github" / "workflows" / f"{workflow}.yml")["jobs"].values()
    return [
        line.strip()
        for job in jobs
        for step in job.get("steps", ())
        for line in step.get("run", "").splitlines()
    ]  # fmt: skip


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_package() -> None:
    recipe = load(PACKAGING / "conda" / "recipe.yaml")
    needed = [Requirement(each) for each in metadata.requires("distlaunch") or ()]
    run = {f"{each.name.lower()} {each.specifier}" for each in needed if each.marker is None}
    optional = {f"{each.name} {each.specifier}" for each in needed if each.name == "tensorflow"}
    build = [table(name) for name in ("build-system", "tool.hatch.build.targets.wheel.hooks.custom")]

    assert recipe["context"]["version"] == metadata.version("distlaunch")
    assert {*recipe["requirements"]["run"]} == {"python >=${{ python_min }}", *run}
    assert {*recipe["requirements"]["run_constraints"]} == optional
    assert {*recipe["requirements"]["host"]} == {
        "python ${{ python_min }}.*",
        "pip",
        *(word.replace(">", " >") for text in build for word in re.findall(r'"([^"]+>=[^"]+)"', text)),
    }
    [script] = re.findall(r"^distlaunch = .+", PYPROJECT, re.MULTILINE)
    assert recipe["build"]["python"]["entry_points"] == [script.replace('"', "")]


def test_schemastore_finds_the_schema_of_the_latest_release_by_a_specs_name() -> None:
    entry = json.loads((PACKAGING / "schemastore.json").read_text(encoding="utf-8"))
    [schemas] = [line for line in run_lines("build") if "distlaunch schema" in line]

    assert [pattern for pattern in entry["fileMatch"] if fnmatch("two_nodes.distlaunch.yaml", pattern)]
    assert not [pattern for pattern in entry["fileMatch"] if fnmatch("compose.yaml", pattern)]
    assert entry["url"].endswith("/releases/latest/download/spec.schema.json")
    assert '"dist/$what.schema.json"' in schemas


def test_a_release_publishes_every_schema() -> None:
    [loop] = [line for line in run_lines("build") if line.startswith("for what in")]

    assert re.findall(r"\w+", loop)[3:-1] == [*cli.commands["schema"].params[0].type.choices]  # type: ignore[attr-defined]


def test_workflows_install_and_test_as_the_readme_says() -> None:
    [command] = re.findall(r"^python3 -m venv .*pytest$", read(README), re.MULTILINE)

    assert command in run_lines("test")
    assert [line for line in run_lines("test") if line.endswith(".ci/run")]


def test_workflows_test_each_version_of_python_that_the_package_names() -> None:
    versions = load(WORKFLOWS[-1])["jobs"]["pytest"]["strategy"]["matrix"]["python"]

    assert f">={versions[0]}" in PYPROJECT
    assert versions == re.findall(r"Programming Language :: Python :: (3\.\d+)", PYPROJECT)


def test_workflows_pin_what_they_use_to_a_commit_and_may_only_read_unless_they_publish() -> None:
    assert [path.name for path in WORKFLOWS] == ["build.yml", "release.yml", "test.yml"]
    for path in WORKFLOWS:
        used = re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8"))
        assert used
        assert [each for each in used if not re.fullmatch(r"\./.+|[\w/-]+@[0-9a-f]{40}", each)] == []
        assert load(path)["permissions"] in ({}, {"contents": "read"})
