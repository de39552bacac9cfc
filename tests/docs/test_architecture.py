"""Which folders of the two packages may import which, and what a command imports before it does anything."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.builders.runs_on_disk import write_run
from tests.harness.places import ROOT
from tests.harness.rules.import_graph import LAUNCHER, WORKER_ENTRY, Import, read_imports, read_modules

LINE_LIMIT = 800
BASICS = {
    "bounded_server",
    "clock",
    "described",
    "errors",
    "failures",
    "helpers",
    "in_parallel",
    "own_command",
    "printable",
    "program_calls",
    "result",
    "signals",
    "tasks",
    "wording",
}
"""Modules of `launcher` that all folders may import."""
PURE = {"spec", "plan", "gang", "verdict", "report", "proof", "pages"}
"""Folders that import nothing from the node's side except the protocol."""
ONLY_IN = {
    "IPython": {"launcher.python.notebook"},
    "click": {"launcher.cli", "launcher.console.writer", "launcher.console.labels"},
    "cryptography": {"launcher.controller.actions"},
    "jinja2": {"launcher.pages.html"},
    "plotly": set(),
    "yaml": {
        "launcher.spec.yaml_positions",
        "launcher.spec.writing",
        "launcher.plan.compose",
        "launcher.kubernetes.yaml_comments",
        "launcher.kubernetes.template",
    },
    "pathspec": {"launcher.controller.bundle"},
    "psutil": {"launcher.rundir.owner"},
    "rich": {"launcher.console"},
    "pydantic": {"launcher.spec", "launcher.result", "launcher.gang", "launcher.verdict", "launcher.report"},
    "pydantic_core": {"launcher.spec", "launcher.plan.planner", "launcher.tasks", "launcher.python.resume_test"},
    "paramiko": {"launcher.transports.ssh"},
    "prometheus_client": {
        "launcher.report.metrics",
        "launcher.exporters.start",
        "launcher.exporters.metrics",
    },
}
"""Third-party packages, and the folders and modules of `launcher` that may import them, even within a function."""
MODULES = {**read_modules("launcher"), **read_modules("worker_entry")}


@functools.cache
def all_imports() -> tuple[Import, ...]:
    return tuple(found for name, path in MODULES.items() for found in read_imports(name, path.read_bytes(), MODULES))


def imports_between(package: str) -> Iterator[tuple[Import, str, str]]:
    """Imports from one part of the package to another: the import, and both parts."""
    for found in all_imports():
        if found.importer.startswith(f"{package}.") and found.module.startswith(f"{package}."):
            here, there = found.importer.split(".")[1], found.module.split(".")[1]
            if here != there:
                yield found, here, there


def test_the_import_reader_sees_every_kind_of_import() -> None:
    source = (
        b"import a, b.c as d\nfrom e import f\nfrom launcher.spec import models\n"
        b"from launcher.errors import UsageError\n"
        b"if TYPE_CHECKING:\n    import g\ntry:\n    import h\nexcept ImportError:\n    pass\n"
        b"class A:\n    import i\n    def j(self):\n        import k\n"
    )
    found = {(name.module, name.late) for name in read_imports("x", source, MODULES)}
    early = {"a", "b.c", "e", "launcher.spec.models", "launcher.errors", "h", "i"}
    assert found == {(name, False) for name in early} | {("g", True), ("k", True)}


def test_folders_of_the_controller_import_only_earlier_folders() -> None:
    order = [*LAUNCHER, "__main__", "public"]
    wrong = [
        found
        for found, here, there in imports_between("launcher")
        if there not in BASICS and (here in BASICS or order.index(there) > order.index(here))
    ]
    assert wrong == []


def test_folders_of_the_node_import_only_allowed_folders() -> None:
    assert [found for found, here, there in imports_between("worker_entry") if there not in WORKER_ENTRY[here]] == []


def test_modules_have_no_import_cycles() -> None:
    """Only imports at module level count: within functions, modules may import each other."""
    needs: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in all_imports():
        if not found.late and found.module in MODULES and MODULES[found.module].name != "__init__.py":
            needs[found.importer].add(found.module)
    while free := {name for name, needed in needs.items() if not needed & needs.keys()}:
        needs = {name: needed for name, needed in needs.items() if name not in free}
    assert needs == {}


def test_pure_folders_import_only_the_protocol_from_worker_entry() -> None:
    for found in all_imports():
        package, _, rest = found.importer.partition(".")
        if package == "launcher" and rest.partition(".")[0] in PURE and found.module.startswith("worker_entry"):
            assert found.module.startswith("worker_entry.protocol."), found


def test_third_party_packages_are_imported_only_by_allowed_modules() -> None:
    for found in all_imports():
        package = found.module.partition(".")[0]
        if package in {*sys.stdlib_module_names, "launcher", "worker_entry"}:
            assert package != "launcher" or found.importer.startswith("launcher"), found
        elif found.importer.startswith("worker_entry.demo"):
            assert package in {"jax", "keras", "numpy", "tensorflow"}, found
        elif found.importer == "worker_entry.task.speed":
            assert package in {"numpy", "tensorflow", "torch"}, found
        elif found.importer in ("worker_entry.strategies", "worker_entry.task.server"):
            assert package == "tensorflow", found
        else:
            assert any(f"{found.importer}.".startswith(f"{place}.") for place in ONLY_IN.get(package, ())), found


def imported_by(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_command_line_imports_only_click_before_a_command_runs() -> None:
    assert imported_by("import launcher.cli.main") - sys.stdlib_module_names == {"click", "launcher"}
    early = {found.module for found in all_imports() if found.importer.startswith("launcher.cli") and not found.late}
    assert {name for name in early if name.startswith(("launcher", "worker_entry"))} == {
        "launcher.spec.field_options",
        *(name for name in early if name.startswith("launcher.cli.")),
    }


def test_importing_distlaunch_imports_no_other_package() -> None:
    assert imported_by("import distlaunch") - sys.stdlib_module_names == {"distlaunch"}


def test_the_controller_does_not_import_tensorflow_keras_numpy_or_paramiko() -> None:
    heavy = {"tensorflow", "keras", "numpy", "paramiko"}
    assert (
        not imported_by("import launcher.controller.launch, launcher.controller.supervisor, launcher.spec.loading")
        & heavy
    )
    assert not imported_by("from distlaunch import *") & heavy


def test_a_run_imports_rarely_needed_packages_only_on_demand() -> None:
    late = {"cryptography", "pathspec", "plotly", "prometheus_client", "psutil", "rich", "yaml"}
    assert (
        not imported_by("import launcher.controller.launch, launcher.controller.supervisor, launcher.spec.command_line")
        & late
    )


@pytest.mark.parametrize("words", [["ls", "-a"], ["ls", "--warm"], ["logs", "run"], ["wait", "run"]], ids=" ".join)
def test_commands_that_only_read_runs_do_not_import_pydantic_rich_yaml_or_paramiko(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_run(tmp_path / "distlaunch" / "runs" / "run", outcome="failed")
    heavy = {"pydantic", "rich", "yaml", "paramiko"}
    assert not imported_by(f"from launcher.cli.main import run_command; run_command({words!r})") & heavy


def test_the_agent_needs_only_the_standard_library() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker_entry.agent.guardian, worker_entry.task.runner"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_worker_entry_parses_as_python_39() -> None:
    for name, path in MODULES.items():
        if name.startswith("worker_entry"):
            ast.parse(path.read_bytes(), name, feature_version=(3, 9))


def test_every_package_has_a_docstring() -> None:
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_bytes())), name


def test_no_test_module_imports_another() -> None:
    tests = read_modules("tests")
    wrong = [
        (name, found.module)
        for name, path in tests.items()
        for found in read_imports(name, path.read_bytes(), tests)
        if found.module.rpartition(".")[2].startswith("test_")
    ]
    assert wrong == []


def test_every_folder_of_unit_tests_mirrors_a_product_folder() -> None:
    units = {path.name for path in (ROOT / "tests" / "unit").iterdir() if (path / "__init__.py").exists()}
    assert len(units) > 10
    assert units <= {name.split(".")[1] for name, path in MODULES.items() if path.name == "__init__.py" and "." in name}


def test_no_module_exceeds_the_line_limit() -> None:
    """A longer module has more than one purpose."""
    long = {name: lines for name, path in MODULES.items() if (lines := len(path.read_text().splitlines())) > LINE_LIMIT}
    assert long == {}
