"""What brings the agent to a node that has nothing of ours: one constant command line, and worker_entry as a zip.

The command line is the same for every node, user and program; what differs, even the name of the interpreter, goes
over stdin.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import shlex
import zipfile
from dataclasses import dataclass
from pathlib import Path

import worker_entry

PACKAGE = Path(worker_entry.__file__).parent


@dataclass(frozen=True)
class Payload:
    """`command` is executed on the node by the user's login shell, whichever that is; `archive` follows on stdin."""

    command: str
    archive: bytes

    def first_bytes(self, python: str, verb: str) -> bytes:
        """What goes over stdin before any frame: the interpreter's name, what to run, then the archive."""
        return f"{python}\n{verb}\n".encode() + self.archive


@functools.cache
def make_payload() -> Payload:
    """The payload of this distlaunch; the same bytes for the same sources."""
    archive = _make_archive()
    arrival = base64.b64encode(PACKAGE.joinpath("arrival.py").read_bytes()).decode()
    digest = hashlib.sha256(archive).hexdigest()
    # Before anything else, in words that even Python 2 can read.
    too_old = (
        "v<(3,9)and sys.exit('distlaunch: %s is Python %d.%d; a node needs 3.9 or newer'%(sys.executable,v[0],v[1]))"
    )
    script = (
        "IFS= read -r python; "
        'case $python in "~/"*) python=$HOME/${python#"~/"};; esac; '
        'command -v "$python" >/dev/null 2>&1 || { echo "distlaunch: no Python at $python"; exit 127; }; '
        f'exec "$python" -c "import base64,sys;v=sys.version_info;{too_old};exec(base64.b64decode(sys.argv[1]))" '
        f"{arrival} {digest} {len(archive)}"
    )
    # A login shell can be anything, fish and csh included: it gets words in single quotes and nothing to expand.
    return Payload(f"exec /bin/sh -c {shlex.quote(script)}", archive)


def _make_archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in (".py", ".npz"):
                name = str(Path(PACKAGE.name) / path.relative_to(PACKAGE))
                archive.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return content.getvalue()
