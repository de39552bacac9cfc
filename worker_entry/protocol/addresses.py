"""Addresses of tasks as text: `host:port`."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, str]:
    """`[fd00::1]:20000` → `fd00::1` and `20000`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port
