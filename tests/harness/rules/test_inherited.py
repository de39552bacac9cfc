"""The state that a test run inherits from its starter changes no test."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.places import ROOT
from tests.harness.rules.inherited import DESCRIPTORS, LOCALE, UMASK

SHOW = """
import json, locale, os, resource, signal, sys
from tests.harness.rules.inherited import reset_inherited_state
reset_inherited_state()
print(json.dumps({
    "signals": [signal.getsignal(number) is signal.SIG_IGN for number in (1, 2, 3, 15)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "umask": os.umask(0),
    "encoding": locale.getpreferredencoding(False),
    "descriptors": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "environ": {name: value for name, value in os.environ.items() if name not in json.loads(sys.argv[1])},
}))
"""
BAD = "trap '' HUP INT QUIT TERM; umask 077; ulimit -S -n 64; cd /; exec \"$@\""
WRONG = {
    "TF_CONFIG": "{}",
    "KERAS_BACKEND": "torch",
    "JAX_PLATFORMS": "x",
    "SLURM_JOB_ID": "7",
    "DISTLAUNCH_TASK": "worker:7",
    "LANG": "de_DE",
    "LC_ALL": "POSIX",
    "NO_COLOR": "1",
    "XDG_STATE_HOME": "/nowhere",
}


def test_a_starters_signals_umask_limits_locale_and_variables_are_reset() -> None:
    kept = [*os.environ, "PYTHONPATH", "DISTLAUNCH_NO_SKIPS", "PWD", "OLDPWD", "_"]
    env = {**os.environ, **WRONG, "DISTLAUNCH_NO_SKIPS": "1", "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    names = json.dumps([name for name in kept if name not in WRONG])
    command = ["sh", "-c", BAD, "sh", sys.executable, "-c", SHOW, names]
    shown = json.loads(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    assert shown["signals"] == [False] * 4
    assert shown["blocked"] == []
    assert (shown["umask"], shown["encoding"].lower(), shown["descriptors"]) == (UMASK, "utf-8", DESCRIPTORS)
    assert shown["environ"] == {"LC_ALL": LOCALE}


def test_a_process_of_a_test_that_imports_conftest_keeps_its_variables() -> None:
    """The portable fallback is chosen by such a variable."""
    script = "import os, tests.conftest; print(os.environ['DISTLAUNCH_PORTABLE'])"
    env = {**os.environ, "DISTLAUNCH_PORTABLE": "1", "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True).stdout == b"1\n"


def test_tests_run_with_that_state() -> None:
    """In this process itself, whatever started it."""
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)] == [
        signal.default_int_handler,
        signal.SIG_DFL,
        signal.SIG_DFL,
    ]
    status = Path("/proc/self/status").read_text() if Path("/proc/self/status").exists() else "Umask:\t0022\n"
    assert f"Umask:\t{UMASK:04o}\n" in status
    assert (Path.cwd(), os.environ["LC_ALL"]) == (ROOT, LOCALE)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == DESCRIPTORS
    assert not [name for name in os.environ if name.startswith(("TF_", "SLURM_", "KERAS_", "JAX_"))]
