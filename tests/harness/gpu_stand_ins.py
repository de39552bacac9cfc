"""Stand-ins for NVIDIA's programs and library."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from tests.harness.available import find_compiler
from tests.harness.places import PROGRAMS
from worker_entry.system.nvml import LIBRARY

SMI = """#!/bin/sh
echo "$@" >> {folder}/calls
cat {folder}/listing
"""
LISTING = """\
0, GPU-00-uuid, 37, 20480, 81920, 251.50, 64
1, GPU-01-uuid, [N/A], 20480, 81920, [Not Supported], 64
2, [GPU is lost]
Unable to determine the device handle for GPU0003:00:00.0: Unknown Error
"""


def compile_library(folder: Path, *options: str) -> Path:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C compiler to build a stand-in for NVML")
    library = folder / LIBRARY
    subprocess.run(
        [compiler, "-shared", "-fPIC", *options, "-o", str(library), str(PROGRAMS / "nvml.c")], check=True, timeout=60
    )
    return library


def install_smi(folder: Path, script: str = SMI, listing: str = LISTING) -> None:
    (folder / "listing").write_text(listing)
    program = folder / "nvidia-smi"
    program.write_text(script.format(folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
