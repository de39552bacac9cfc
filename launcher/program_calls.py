"""Calls other programs on this machine, such as those of Slurm and Kubernetes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from launcher import helpers
from launcher.errors import DistlaunchError

EVIDENCE_LINES = 5
"""Lines of a program's stderr that an error shows."""
_NOISE = re.compile(r"[IWE][0-9]{4} [0-9:.]+ +[0-9]+ \S+\.go:")
"""The start of a line of kubectl's own log, which only repeats the last line of stderr."""


def call_program(
    words: Sequence[str],
    failure: type[DistlaunchError],
    *,
    stdin: str | None = None,
    environ: Mapping[str, str] | None = None,
    limit_s: float,
    name: str = "",
    missing: str = "",
) -> str:
    """Runs a program and returns its output.

    Args:
        words: the program and its arguments.
        failure: the error to raise.
        stdin: the program's input; by default, nothing.
        environ: the program's environment; by default, this process's.
        limit_s: how long the program may take.
        name: the program's name in errors; by default, its first word.
        missing: a hint for a missing program.

    Raises:
        DistlaunchError: the program cannot be run, failed, or was too slow; of the class `failure`.
    """
    name = name or words[0]
    try:
        process = helpers.start(
            words,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise failure(f"cannot run {words[0]}: {error.strerror}", hint=missing) from None
    with process:
        try:
            output, errors = process.communicate(stdin, limit_s)
        except subprocess.TimeoutExpired:
            raise failure(f"{name} did not answer within {limit_s:g} s") from None
        finally:
            helpers.kill(process)
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if line.strip() and not _NOISE.match(line)]
        raise failure(f"{name} ended with status {process.returncode}", evidence=lines[-EVIDENCE_LINES:])
    return str(output)
