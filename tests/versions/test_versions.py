"""The Keras comparisons and a smoke test pass with the oldest, the newest and the nightly TensorFlow and Keras.

Each combination has an environment of its own, which later runs bring up to date. The tests in it are those of this
checkout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.available import find_python
from tests.harness.places import ROOT
from tests.harness.processes.environments import Environment, NotInstallableError, find_requirements
from tests.harness.processes.keras_runs import OLDER_KERAS
from tests.harness.rules.version_rows import ROW
from worker_entry.keras_patches.patching import OLDEST

TESTS = ("tests/training/keras", "tests/training/test_demo.py", "tests/training/test_progress.py")
RUN_S = 3600.0
"""Ends a run that hangs; two cores need a quarter of an hour."""


def find_oldest_tensorflow() -> str:
    """The oldest TensorFlow that the extra `tensorflow` allows."""
    found = re.search(r'^tensorflow = \["tensorflow>=([\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


@dataclass(frozen=True)
class Combination:
    """Versions that go together. `may_be_missing`: whether the package index need not have them."""

    name: str
    python: str
    requirements: tuple[str, ...]
    may_be_missing: bool = False


NEWEST = ("tensorflow", "keras", "tf_keras")
COMBINATIONS = [
    Combination(
        "oldest",
        "3.10",
        (
            f"tensorflow=={find_oldest_tensorflow()}.*",
            f"keras=={OLDEST}.*",
            f"tf_keras=={find_oldest_tensorflow()}.*",
        ),
    ),
    Combination("oldest-python", "3.10", NEWEST),
    Combination("newest", "3.13", NEWEST),
    Combination("nightly", "3.13", ("tf-nightly", "keras-nightly", "tf-keras-nightly"), may_be_missing=True),
]


@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: combination.name)
def test_keras_trains_with_these_versions_as_one_process_does(
    combination: Combination, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    interpreter = find_python(combination.python)
    if interpreter is None:
        pytest.skip(f"no python{combination.python} on PATH or from pyenv")
    environment = Environment(f"{combination.name}-{combination.python}", interpreter)
    try:
        environment.install([*find_requirements(), *combination.requirements])
    except NotInstallableError as error:
        if not combination.may_be_missing:
            raise
        pytest.skip(f"pip cannot install {' '.join(combination.requirements)}: {error}")
    found = environment.inspect()
    # Not the comparisons with another version of Keras, which would be installed beside this one.
    done = environment.run_tests(
        *TESTS, "-m", "tensorflow", "-k", f"not {OLDER_KERAS}", results=tmp_path / "results.xml", timeout=RUN_S
    )
    row = (
        f"{combination.name}: Python {found['python']}, TensorFlow {found['tensorflow']}, Keras {found['keras']}: "
        f"{done.passed} passed, {done.failed} failed, {len(done.skipped)} skipped in {done.seconds / 60:.0f} min; "
        f"{found['patched']} faults patched, {len(found['changed'])} places changed; {environment.size() / 1e9:.1f} GB"
    )
    record_property(ROW, "\n  ".join([row, *done.skipped, *found["lines"]]))
    if done.status != 0 or done.failed or not done.passed:
        pytest.fail(f"{row}\n{done.output[-30_000:]}", pytrace=False)
    assert found["changed"] == [], found["lines"]
