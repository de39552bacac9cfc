"""x"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from tests.harness.hosts.containers import build_image, output_of, skip_without_docker


@contextlib.contextmanager
def running_container(shared: Path) -> Iterator[str]:
    """A container without sshd or network, which sees this folder at the same path."""
    skip_without_docker()
    name = f"distlaunch-way-{secrets.token_hex(4)}"
    wait = "trap 'exit 0' TERM; while :; do sleep 1; done"
    options = ("-d", "--rm", "--network", "none", "--user", "root", "--entrypoint", "sh", "--name", name)
    output_of("docker", "run", *options, "-v", f"{shared}:{shared}", build_image(), "-c", wait)
    try:
        yield name
    finally:
        output_of("docker", "stop", name)
