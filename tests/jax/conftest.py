"""Tests in this folder start programs with JAX."""

from __future__ import annotations

import pytest

from tests.harness.processes.jax import has_jax


@pytest.fixture(autouse=True, scope="session")
def _jax() -> None:
    if not has_jax():
        pytest.skip("no Python with JAX, Keras and TensorFlow: name it in DISTLAUNCH_JAX_PYTHON")
