"""Every file in `bad_specs/` has one error, and states the message that distlaunch must print about it.

The message is in a comment at the top of the file, `# expect: LINE:COLUMN field: message`, or, if the file cannot hold
a comment, in a `.txt` file next to it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from launcher.errors import SpecError
from launcher.spec.loading import load_spec
from tests.harness.places import ROOT
from tests.harness.processes.commands import Distlaunch

FOLDER = ROOT / "tests" / "bad_specs"
FILES = sorted(FOLDER.glob("*.yaml"))

ENVIRONMENT = {"HOME": "/"}
"""The environment from which `env_from` reads."""


def expected(file: Path) -> str:
    beside = file.with_suffix(".txt")
    source = beside if beside.exists() else file
    found = re.findall(r"^(?:# )?expect: (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == 1, f"{source} has to say what is expected, once"
    return str(found[0])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_bad_spec_has_the_expected_error_with_position_and_hint(file: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(file, ENVIRONMENT)

    assert caught.value.evidence == (f"{file}:{expected(file)}",)
    assert caught.value.message == "the spec has an error; nothing was started"


def test_every_expected_message_belongs_to_a_bad_spec() -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} <= {file.stem for file in FILES}
    assert len(FILES) > 100


SHOWN = [
    "unknown_field",
    "port_taken",
    "two_documents",
    "recursive_anchor",
    "utf_16",
    "binary",
    "empty",
    "max_restarts",
]


@pytest.mark.parametrize("verb", ["up", "check", "plan"])
@pytest.mark.parametrize("name", SHOWN)
def test_commands_print_a_spec_error_on_stderr_and_start_nothing(
    in_process: Distlaunch, tmp_path: Path, verb: str, name: str
) -> None:
    file = FOLDER / f"{name}.yaml"

    ran = in_process(verb, str(file), run_dir=verb == "up", env={"XDG_STATE_HOME": str(tmp_path / "state")})

    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr == f"Error: the spec has an error; nothing was started [spec]\n  {file}:{expected(file)}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["up", "check", "plan"])
@pytest.mark.parametrize(
    ("path", "reason"), [("missing.yaml", "No such file or directory"), (".", "Is a directory"), ("", "Is a directory")]
)
def test_commands_report_an_unreadable_spec_path_as_a_spec_error(
    in_process: Distlaunch, tmp_path: Path, verb: str, path: str, reason: str
) -> None:
    ran = in_process(verb, path, run_dir=verb == "up", env={"XDG_STATE_HOME": str(tmp_path / "state")})

    shown = path or "."
    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr == f"Error: cannot read the spec {shown}: {reason} [spec]\n  check the path\n"
    assert list(tmp_path.iterdir()) == []
