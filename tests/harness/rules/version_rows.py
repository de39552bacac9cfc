"""The tests of other versions of TensorFlow and Keras, and the rows that they add to the end of a run's output.

A plugin of pytest. A test records its row as a property, which reaches pytest's main process in its report.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

FOLDER = PurePosixPath("tests/versions")
ROW = "versions"
"""The name of the property."""


def is_of_versions(module: str) -> bool:
    return FOLDER in PurePosixPath(module).parents


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "call":
                for name, row in report.user_properties:
                    if name == ROW:
                        terminalreporter.write_line(row)
