"""Signals to the sessions of an sshd."""

from __future__ import annotations

from tests.harness.hosts.sshd import sessions


def send_to_sessions(signum: int) -> None:
    found = sessions()
    assert found
    for process in found:
        process.send_signal(signum)
