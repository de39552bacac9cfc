"""Tests in this folder start programs with JAX."""

from __future__ import annotations

import pytest

from tests.harness.processes.jax import skip_without_jax


@pytest.fixture(autouse=True, scope="session")
def _jax() -> None:
    skip_without_jax()
