"""What may import what: the two packages, their layers, and what a command costs before it does anything."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINE_LIMIT = 350

LAUNCHER_LAYERS = """
    tasks printable interrupts at_once
    errors log_lines results spec_fields hiding
    spec_parts strategies exception_text controller
    events spec tf_config torch_env terminal run_dir
    marked_yaml spec_errors
    overrides
    resources
    spec_file local_mode plan gang_state console sync casting stacks
    stalls out_of_step pace stragglers restarts chaos rehearsal plan_text
    compose starts
    waiting busy
    gang
    known_failures
    causes
    task_failure
    verdict
    report news preflight log_watch planner
    check_report
    transports.base transports.payload
    transports.streams inlet
    transports.way_back
    transports.frames
    transports.local transports.ssh_config transports.known_hosts
    transports.ssh_connect
    transports.ssh
    node_links ways
    gang_loop clean returning profiling
    supervisor
    run cli_options cli_runs
    cli_specs
    cli
    __main__
"""
"""A module of `launcher` imports only modules of the lines above its own."""

WORKER_LAYERS = """
    limits holes
    clock
    values lease control_groups run_files after_import arrival keras_source remote_values turns wake
    kernel orders versions program_env crash_record built_strategy child_order parameter_server_data
    messages keras_backup keras_trainer keras_layers keras_optimizers keras_variables heartbeat patience oom
    keras_saving keras_callbacks parameter_server_steps metrics
    keras_parameter_server
    protocol ports processes programs keras_support
    status_files telling collective_time devices profiling
    progress injecting own_tf_config
    keras_progress
    task early_import
    child
    for_children.distlaunch_children
    for_children.sitecustomize
    preloading
    nursery
    started_task outbox meeting inspection
    newcomer connection dialling task_watch activity running_tasks
    stacks
    node_checks cleaning log_stream replica
    agent
    guardian
    __main__
"""

ONLY_IN = {
    "click": {"launcher.cli", "launcher.cli_options", "launcher.cli_specs", "launcher.cli_runs"},
    "yaml": {"launcher.spec_file", "launcher.marked_yaml"},
    "pathspec": {"launcher.sync"},
    "psutil": {"launcher.controller"},
    "rich": {"launcher.terminal"},
    "pydantic": {f"launcher.{name}" for name in ("spec", "spec_parts", "spec_errors", "spec_fields", "results")},
    "paramiko": {f"launcher.transports.{name}" for name in ("ssh", "ssh_connect", "ssh_config", "known_hosts")},
    "tensorflow": set(),
    "keras": set(),
    "numpy": set(),
}
"""Third-party packages, and the modules of `launcher` that may import them, at the top or within a function."""


@dataclass(frozen=True)
class Import:
    """One name that a module imports. `late`: within a function, or for type checkers only."""

    module: str
    late: bool


def modules(package: str) -> dict[str, Path]:
    """The package's modules by their full names."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


LAUNCHER = modules("launcher")
WORKER_ENTRY = modules("worker_entry")
EVERYTHING = {**LAUNCHER, **WORKER_ENTRY}
OF_PROGRAMS = ("worker_entry.demo", "worker_entry.server", "worker_entry.strategies")
"""What programs run, or import, or what is a program of its own."""
AGENT_SIDE = {name: path for name, path in WORKER_ENTRY.items() if not name.startswith(OF_PROGRAMS)}


def imports_of(path: Path) -> set[Import]:
    return set(_walk(ast.parse(path.read_bytes()), late=False))


def _walk(node: ast.AST, *, late: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_for_types(child)
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "relative imports are not used here"
            assert child.module is not None
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield Import(full if full in EVERYTHING else child.module, inside)
        yield from _walk(child, late=inside)


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def of(package: str, imports: set[Import]) -> set[str]:
    return {found.module for found in imports if found.module.partition(".")[0] == package}


def layers(text: str, package: str) -> dict[str, int]:
    lines = [line.split() for line in text.strip().splitlines()]
    return {f"{package}.{name}": number for number, names in enumerate(lines) for name in names}


LAYERS = {**layers(LAUNCHER_LAYERS, "launcher"), **layers(WORKER_LAYERS, "worker_entry")}


# --- the parser itself ---


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import a, b.c as d\nfrom e import f\nfrom launcher import spec\nfrom launcher.plan import make_plan\n"
        "if TYPE_CHECKING:\n    import g\ntry:\n    import h\nexcept ImportError:\n    pass\n"
        "class A:\n    import i\n    def j(self):\n        import k\n"
    )
    found = imports_of(path)
    early = {"a", "b.c", "e", "launcher.spec", "launcher.plan", "h", "i"}
    assert {(name.module, name.late) for name in found} == {(name, False) for name in early} | {
        ("g", True),
        ("k", True),
    }


# --- the two packages ---


@pytest.mark.parametrize("name", AGENT_SIDE)
def test_what_runs_on_a_node_needs_nothing_but_the_standard_library(name: str) -> None:
    for found in imports_of(AGENT_SIDE[name]):
        package = found.module.partition(".")[0]
        assert package in {*sys.stdlib_module_names, "worker_entry"}, f"{name} imports {found.module}"


def test_the_demo_needs_tensorflow_and_of_ours_only_what_programs_may_use() -> None:
    """It is an example to copy."""
    for name in set(WORKER_ENTRY) - set(AGENT_SIDE):
        found = {found.module for found in imports_of(WORKER_ENTRY[name])}
        ours = {module for module in found if module.startswith("worker_entry")}
        packages = {module.partition(".")[0] for module in found - ours}
        assert ours <= {"worker_entry", "worker_entry.strategies", "worker_entry.progress"}, name
        assert packages <= {*sys.stdlib_module_names, "keras", "numpy", "tensorflow"}, name


@pytest.mark.parametrize("name", LAUNCHER)
def test_a_third_party_package_is_imported_only_where_it_belongs(name: str) -> None:
    for found in imports_of(LAUNCHER[name]):
        package = found.module.partition(".")[0]
        if package not in {*sys.stdlib_module_names, "launcher", "worker_entry", "pydantic_core"}:
            assert package in ONLY_IN, f"{name} imports {package}, which no rule knows"
            assert name in ONLY_IN[package], f"{name} imports {package}"


# --- layers ---


def test_every_module_has_its_layer() -> None:
    packages = {"launcher", "launcher.transports", "worker_entry"}
    assert set(LAYERS) == (set(LAUNCHER) | set(AGENT_SIDE)) - packages


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_imports_only_what_lies_below_it(name: str) -> None:
    for found in of(name.partition(".")[0], imports_of(EVERYTHING[name])):
        assert found in LAYERS, f"{name} imports {found}, which is no module"
        assert LAYERS[found] < LAYERS[name], f"{name} imports {found}"


def test_the_pure_modules_know_of_the_agent_only_its_messages() -> None:
    """Those that touch the world, or a node's facts, know more."""
    world = {
        "console",
        "inlet",
        "transports.base",
        "transports.frames",
        "transports.local",
        "transports.payload",
        "transports.ssh_config",
        "gang_loop",
        "supervisor",
        "node_links",
        "run",
        "transports.streams",
        "transports.way_back",
        "sync",
        "clean",
        "local_mode",
        "run_dir",
        "profiling",
    }
    for name in LAUNCHER:
        if name.removeprefix("launcher.") not in world:
            known = {f"worker_entry.{module}" for module in ("messages", "orders", "values")}
            assert of("worker_entry", imports_of(LAUNCHER[name])) <= known, name


# --- what a command costs ---


def imported_by(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_the_command_line_imports_nothing_heavy_before_a_command_runs() -> None:
    assert imported_by("import launcher.cli") - sys.stdlib_module_names == {"click", "launcher"}


def test_the_command_line_names_no_module_of_ours_at_its_top_but_its_options() -> None:
    commands = {"launcher.cli_specs", "launcher.cli_runs", "launcher.cli_options"}
    for name in ("launcher.cli", *commands):
        early = {found.module for found in imports_of(LAUNCHER[name]) if not found.late}
        ours = {found for found in early if found.partition(".")[0] in {"launcher", "worker_entry", "pydantic", "yaml"}}
        assert ours <= {"launcher", *commands}


@pytest.mark.parametrize("module", ["launcher.supervisor", "launcher.run", "launcher.spec_file"])
def test_a_controller_needs_no_tensorflow(module: str) -> None:
    assert not imported_by(f"import {module}") & {"tensorflow", "keras", "numpy", "paramiko"}


def test_the_agent_is_imported_without_anything_installed() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker_entry.guardian, worker_entry.task"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


# --- the source ---


@pytest.mark.parametrize("name", WORKER_ENTRY)
def test_what_runs_on_a_node_is_python_39(name: str) -> None:
    ast.parse(WORKER_ENTRY[name].read_bytes(), feature_version=(3, 9))


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_module_is_short(name: str) -> None:
    assert len(EVERYTHING[name].read_text().splitlines()) < LINE_LIMIT
