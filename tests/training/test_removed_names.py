"""A name of Keras 2 in a program is explained; real Keras raises each of these errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launcher.verdict.known_failures import find_known
from tests.harness.builders.removed_names import STATEMENTS

COVERS = ("launcher/verdict/removed_names.py", "launcher/verdict/known_failures.py")

PROGRAM = """
import json, sys
import keras, tensorflow as tf
said = {}
for name, statement in json.loads(sys.argv[1]).items():
    try:
        exec(statement)
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.mark.slow
def test_each_removed_keras_2_name_is_explained_from_the_real_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(STATEMENTS)], capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout.splitlines()[-1])
    explained = {}
    for name, text in said.items():
        found = find_known(text.splitlines())
        explained[name] = found.hint if found is not None else text
    assert {name for name, hint in explained.items() if f"Keras 3 has no `{name}`: " not in hint} == set(), explained
    assert said.keys() == STATEMENTS.keys()
