"""The documents match the code: links, commands, options, exit statuses, fields of a spec, names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote

import click
import pytest
import yaml

from launcher import errors
from launcher.cli.defaults import options_of
from launcher.cli.main import cli
from launcher.failures import FAILURES, FailureName
from launcher.gang.checks.findings import Finding
from launcher.gang.state import Phase
from launcher.proof.models import FlawName
from launcher.report.state_names import RunState
from launcher.rundir.summary import RunSummary
from launcher.spec.contradictions import FRAMEWORK_VARIABLES
from launcher.spec.models import ClusterSpec
from launcher.spec.settings import PATHS
from tests.harness.documents import (
    COMMANDS_PAGE,
    JAX_PAGE,
    LAUNCHER_PAGE,
    PAGES,
    README,
    blocks,
    code,
    prose,
    read,
    rows,
    section,
)
from tests.harness.places import ROOT
from tests.harness.processes.in_process import run_here
from tests.harness.rules.import_graph import LAUNCHER, WORKER_ENTRY
from tests.harness.rules.tiers import COSTLY, SMOKE
from worker_entry.keras_patches.patching import OLDEST
from worker_entry.protocol import environment
from worker_entry.protocol.messages import ToController
from worker_entry.protocol.orders import ToAgent

README_LINES = 140
TABLES: Mapping[str, tuple[str, ...]] = {
    "a-cluster": (),
    "a-node": ("$defs", "NodeSpec"),
    "nodes-from-a-command": ("$defs", "ListedNodesSpec"),
    "from": ("$defs", "NodeSourceSpec"),
    "program": ("$defs", "ProgramSpec"),
    "timeouts": ("$defs", "TimeoutsSpec"),
    "restart": ("$defs", "RestartSpec"),
    "ssh": ("$defs", "SshSpec"),
    "connections": ("$defs", "ConnectionCommandSpec"),
    "slurm": ("$defs", "SlurmSpec"),
    "kubernetes": ("$defs", "PodNodesSpec"),
    "sync": ("$defs", "SyncSpec"),
    "keras": ("$defs", "KerasSpec"),
    "notify": ("$defs", "NotifySpec"),
}
"""The sections of cluster_specs/README.md that have a table of fields, and where in the schema the fields are."""


def anchors(path: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub names them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        number = next(n for n in range(99) if (slug if n == 0 else f"{slug}-{n}") not in found)
        found.add(slug if number == 0 else f"{slug}-{number}")
    return found


def links(path: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", lambda found: found[0].replace("(", " "), prose(path))
    yield from re.findall(r"\]\(([^)\s]+)\)", text)
    yield from re.findall(r'src="([^"]+)"', text)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# --- all pages ---


def test_every_markdown_page_is_checked() -> None:
    folders = (".github", *(page.parent.name for page in PAGES if page.name == "README.md" and page != README))
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    rest = {".github/CHANGELOG.md", ".github/SECURITY.md", "worker_entry/demo/DATA.md"}
    assert {name_of(page) for page in found} == rest | {name_of(page) for page in PAGES}


def test_every_local_link_has_an_existing_file_and_heading() -> None:
    broken, local = [], 0
    for page in PAGES:
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                continue
            local += 1
            name, _, anchor = unquote(link).partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and (target.is_dir() or anchor not in anchors(target))):
                broken.append((name_of(page), link))
    assert broken == []
    assert local > 50


def test_the_root_readme_links_to_every_other_readme() -> None:
    linked = {(README.parent / link.partition("#")[0]).resolve() for link in links(README)}
    assert {page for page in PAGES if page.name == "README.md"} - {README} <= linked


def test_every_file_that_a_page_names_exists() -> None:
    missing = set()
    for page in PAGES:
        for name in code(prose(page)):
            if re.fullmatch(r"(launcher|worker_entry|tests|cluster_specs|docker|\.ci)/[\w./]*", name):
                place = ROOT / name
                if not place.exists():
                    missing.add((name_of(page), name))
    assert missing == set()


def test_no_page_contains_a_path_of_the_author_machine() -> None:
    for page in PAGES:
        found = re.findall(r"(?:/root/|/tmp/|/home/(?!trainer/))\S*", read(page))
        assert found == [], page


# --- README.md ---


def test_every_promise_in_security_md_cites_existing_tests() -> None:
    text = (ROOT / ".github" / "SECURITY.md").read_text()
    promises = re.findall(r"^- (.*?)(?=^- |^$)", text.partition("## Who")[0], flags=re.MULTILINE | re.DOTALL)
    assert len(promises) >= 15
    for promise in promises:
        named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", promise)
        assert named, promise
        for file, name in named:
            last = name.rpartition("::")[2]
            assert re.search(rf"^ *def {last}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, name)


def test_the_root_readme_is_within_its_line_limit() -> None:
    assert len(read(README).splitlines()) <= README_LINES


def test_the_readme_has_the_command_lines_that_ci_extracts() -> None:
    lines = [line for block in blocks(README) for line in block.splitlines()]
    assert [line for line in lines if re.fullmatch(r"python3 -m venv .*pytest", line)]
    assert lines.count(".venv/bin/pytest --all") == 1
    assert (ROOT / "pyproject.toml").exists()


def find_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that these words begin with, possibly one of a group, and the words after it."""
    command, rest = cli.commands[words[0]], words[1:]
    while isinstance(command, click.Group) and rest:
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def test_the_page_of_commands_lists_each_with_its_required_arguments() -> None:
    named = [command for cells in rows(section(COMMANDS_PAGE, "commands")) for command in code(cells[0])]
    words = [command.split() for command in named if command.startswith("distlaunch ")]
    assert sorted(word[1] for word in words) == sorted(cli.commands)
    for word in words:
        command, rest = find_command(word[1:])
        arguments = [parameter for parameter in command.params if isinstance(parameter, click.Argument)]
        named_required = any(not name.startswith("[") for name in rest)
        assert named_required == any(argument.required for argument in arguments), word


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_prints_its_help(name: str) -> None:
    done = run_here(name, "-h")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: distlaunch {name} ")
    assert done.stderr == ""


def test_every_command_line_in_a_code_block_is_valid() -> None:
    """The command exists, and it has the options given before its program."""
    seen = 0
    for page in PAGES:
        for line in "".join(blocks(page)).splitlines():
            typed = re.match(r"(?:\$ )?(?:\.venv/bin/)?distlaunch (.*)", line)
            if typed is None:
                continue
            seen += 1
            name, *words = re.sub(r"\s+#.*|[>|].*", "", typed[1]).split()
            assert name in cli.commands, line
            command, words = find_command([name, *words])
            known = {"-h", "--help"} | {option for parameter in command.params for option in parameter.opts}
            program = next((place for place, word in enumerate(words) if word == "--" or word.endswith(".py")), None)
            given = {word for word in words[:program] if word.startswith("-")}
            assert given <= known, line
    assert seen > 10


def test_the_page_of_commands_lists_all_exit_statuses() -> None:
    shown = {cells[0] for cells in rows(section(COMMANDS_PAGE, "exit-statuses"))}
    ours = {str(value) for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert shown == ours | {"128 + n"}


def test_the_table_of_failures_matches_the_code() -> None:
    words = {True: "yes", False: "no"}
    assert rows(section(COMMANDS_PAGE, "when-it-fails")) == [
        [f"`{name}`", str(each.exit_status), words[each.restarted], words[each.counted], each.meaning]
        for name, each in FAILURES.items()
    ]


def test_the_failure_name_type_lists_every_failure_class() -> None:
    assert get_args(FailureName) == tuple(FAILURES)


def test_the_table_of_resume_flaws_names_each_flaw_in_the_order_of_the_code() -> None:
    table = rows(section(COMMANDS_PAGE, "does-it-resume"))
    assert [code(cells[0]) for cells in table] == [[name] for name in get_args(FlawName)]
    assert all(len(cells) == 3 and all(cells) for cells in table)


def test_the_example_spec_in_the_readme_is_valid() -> None:
    [example] = blocks(README, "yaml")
    ClusterSpec.model_validate(yaml.load(example, Loader=yaml.BaseLoader))


# --- cluster_specs/README.md ---


SPECS_PAGE = ROOT / "cluster_specs" / "README.md"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return ClusterSpec.model_json_schema()


def test_the_spec_page_lists_every_example_spec() -> None:
    listed = {link for cells in rows(section(SPECS_PAGE, "examples")) for link in re.findall(r"\((\S+)\)", cells[0])}
    assert listed == {path.name for path in SPECS_PAGE.parent.glob("*.yaml")}


def test_every_model_of_the_spec_schema_has_a_table_of_fields(schema: dict[str, Any]) -> None:
    assert {path[1] for path in TABLES.values() if path} == set(schema["$defs"])


@pytest.mark.parametrize("anchor", TABLES)
def test_each_table_of_spec_fields_matches_the_schema(anchor: str, schema: dict[str, Any]) -> None:
    part = schema
    for key in TABLES[anchor]:
        part = part[key]
    shown = {code(cells[0])[0]: cells[1] for cells in rows(section(SPECS_PAGE, anchor))}
    assert list(shown) == list(part["properties"])
    for name, default in shown.items():
        field = part["properties"][name]
        assert (default == "required") == (name in part.get("required", ())), name
        if re.fullmatch(r"`[^`]+`", default):
            assert yaml.safe_load(default.strip("`")) == plain_default(field), name
        elif "$ref" not in field and name not in ("on", "python"):
            assert plain_default(field) is None, f"{name} has a default"


def test_tables_of_spec_fields_name_each_command_line_option() -> None:
    of_fields = {str(path[-1]): option for option, path in PATHS.items() if path[0] != "nodes"}
    named = {}
    for anchor in ("a-cluster", "restart"):
        for cells in rows(section(SPECS_PAGE, anchor)):
            for name in re.findall(r"\(`--([a-z-]+)[^`]*`\)", cells[2]):
                named[code(cells[0])[0]] = name
    assert named == {field: option.name for field, option in of_fields.items()}


def plain_default(field: Mapping[str, Any]) -> object:
    """The default of a field as a user writes it."""
    default = field.get("default")
    if isinstance(default, dict) and set(default) == {"first", "last"}:
        return f"{default['first']}-{default['last']}"
    return default


def test_the_spec_page_names_all_values_of_every_enum_field(schema: dict[str, Any]) -> None:
    fields = schema["properties"].items()
    missing = {
        value
        for name, field in fields
        for value in field.get("enum", ())
        if f"`{str(value).lower() if isinstance(value, bool) else value}`" not in read(SPECS_PAGE)
    }
    assert missing == set()


def test_the_table_of_strategies_matches_the_schema(schema: dict[str, Any]) -> None:
    shown = [code(cells[0])[0] for cells in rows(section(SPECS_PAGE, "strategies"))]
    assert shown == schema["properties"]["strategy"]["enum"]


def test_yaml_blocks_on_the_pages_of_specs_are_valid() -> None:
    pages = (SPECS_PAGE, JAX_PAGE)
    examples = [yaml.load(block, Loader=yaml.BaseLoader) for page in pages for block in blocks(page, "yaml")]
    assert len(examples) >= 3
    for example in examples:
        if "local" in example:  # the file of defaults
            assert {*example} <= {*options_of(cli.commands["up"]), *cli.commands}
            continue
        ClusterSpec.model_validate({"nodes": [{"host": "gpu-a"}], **example})


def test_the_section_on_jax_lists_every_variable_that_a_task_gets() -> None:
    shown = {name for cells in rows(section(SPECS_PAGE, "jax")) for name in code(cells[0])}
    assert shown == {
        *FRAMEWORK_VARIABLES["jax"],
        "KERAS_BACKEND",
        "JAX_NUM_CPU_DEVICES",
        environment.ADDRESS,
    }


def test_the_launcher_page_lists_folders_in_import_order() -> None:
    shown = [code(cells[0])[0] for cells in rows(section(LAUNCHER_PAGE, "the-path-of-a-run"))]
    assert shown == [f"{folder}/" for folder in LAUNCHER]


def test_the_table_of_attempt_phases_matches_the_code() -> None:
    table = rows(section(LAUNCHER_PAGE, "the-phases-of-an-attempt"))
    assert [cells[0] for cells in table] == [phase.value for phase in Phase if phase is not Phase.FINISHED]
    sent = {name for cells in table for name in code(cells[1])}
    answered = {name for cells in table for name in code(cells[2]) if name[0].isupper()}
    assert sent <= {kind.__name__ for kind in get_args(ToAgent)}
    assert answered <= {kind.__name__ for kind in get_args(ToController)}


def test_the_table_of_errors_shows_their_exit_statuses() -> None:
    shown = {name: cells[1] for cells in rows(section(LAUNCHER_PAGE, "errors")) for name in code(cells[0])}
    kinds = [kind for kind in all_kinds(errors.DistlaunchError) if kind.reference not in ("error", "shown")]
    assert len(kinds) > 5
    for kind in kinds:
        status = "128 + signal" if kind.reference == "interrupted" else str(kind.exit_status)
        assert shown.get(kind.reference) == status, kind


def all_kinds(kind: type[errors.DistlaunchError]) -> Iterator[type[errors.DistlaunchError]]:

    yield kind
    for inner in kind.__subclasses__():
        yield from all_kinds(inner)


def test_every_error_reference_in_the_code_is_documented() -> None:
    """Searches the sources for references: strings of lower-case words with hyphens."""
    explained = {name for page in (COMMANDS_PAGE, LAUNCHER_PAGE) for name in code(prose(page))}
    pattern = re.compile(r"(?:Problem\(|reference=|reference = |warn\()\s*\"([a-z]+(?:-[a-z]+)*)\"")
    found = {
        (path.name, name)
        for package in ("launcher", "worker_entry")
        for path in (ROOT / package).rglob("*.py")
        for name in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert {"cannot-reach", "no-free-port", "stalled"} <= {name for _, name in found}
    assert {
        (path, name) for path, name in found if name not in explained | {"error", "shown", "succeeded", "agent-alive"}
    } == set()
    assert Finding.model_fields["reference"]


def test_the_table_of_listed_run_fields_matches_the_code() -> None:
    shown = [name for cells in rows(section(LAUNCHER_PAGE, "the-list-of-runs")) for name in code(cells[0])]
    assert sorted(shown) == sorted(field.name for field in dataclasses.fields(RunSummary))
    states = code(dict(cells for cells in rows(section(LAUNCHER_PAGE, "the-list-of-runs")))["`state`"])
    assert states == [*get_args(RunState)]


# --- worker_entry/README.md and tests/README.md ---


def test_the_table_of_worker_entry_folders_matches_the_allowed_imports() -> None:
    page = ROOT / "worker_entry" / "README.md"
    table = {code(cells[0])[0].strip("/"): cells[2] for cells in rows(section(page, "folders"))}
    assert table.keys() == {path.parent.name for path in page.parent.glob("*/*.py")}
    for folder, cell in table.items():
        if folder not in ("task", "demo"):  # the page describes their imports in words
            assert set(code(cell)) == WORKER_ENTRY[folder], folder


def test_every_environment_variable_of_a_task_is_documented() -> None:
    page = ROOT / "worker_entry" / "README.md"
    shown = {name for cells in rows(section(page, "what-a-program-finds")) for name in code(cells[0])}
    assert shown == {environment.TF_CONFIG, *environment.OF_TASKS}


def test_every_pytest_marker_is_documented(request: pytest.FixtureRequest) -> None:
    table = rows(section(ROOT / "tests" / "README.md", "what-each-marker-needs"))
    known = {line.partition(":")[0].strip() for line in request.config.getini("markers")}
    ours = {*COSTLY, SMOKE}
    assert ours <= known
    assert ours <= {code(cells[0])[0] for cells in table}


def test_every_place_names_the_same_oldest_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    floors = dict(re.findall(r'"(tensorflow|tf_keras|tensorboard)>=([\d.]+)"', project))
    [(of_readme, keras)] = re.findall(r"TensorFlow ([\d.]+) or newer, and Keras ([\d.]+) or newer", read(README))
    assert floors == dict.fromkeys(("tensorflow", "tf_keras", "tensorboard"), of_readme)
    assert keras == OLDEST
    page = ROOT / "worker_entry" / "README.md"
    assert f"Keras before {OLDEST} is left as it is" in read(page)
    oldest = rows(section(page, "versions"))[0]
    assert [version.rpartition(".")[0] for version in oldest[1:3]] == [of_readme, keras]


def test_the_tables_of_versions_have_a_row_for_each_combination() -> None:
    source = read(ROOT / "tests" / "versions" / "test_versions.py")
    names = re.findall(r'Combination\(\s*"([\w-]+)",\s*"([\d.]+)"', source)
    assert len(names) > 2
    combinations = rows(section(ROOT / "tests" / "README.md", "versions"))
    assert [(code(cells[0])[0], cells[1]) for cells in combinations] == names
    measured = rows(section(ROOT / "worker_entry" / "README.md", "versions"))
    assert [cells[0].rpartition(".")[0] for cells in measured] == [python for _, python in names]
