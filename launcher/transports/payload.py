"""Brings the agent to a node that has nothing installed: one constant command line, and worker_entry as an archive.

The command line is the same for every node, user and program; everything that differs, even the interpreter's name,
goes over stdin. The archive goes only to a node that lacks this version.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import shlex
import threading
import zlib
from pathlib import Path

import worker_entry
from launcher.spec.nodes import PYTHON
from worker_entry.protocol.frozen import dataclass

IF_THERE = "?"
"""Before the path of an interpreter: if there is none, PYTHON takes its place."""
PACKAGE = Path(worker_entry.__file__).parent
_FUTURE = b"from __future__ import annotations\n"
_OWNERSHIP = b"from worker_entry.system.ownership import private, verify_private\n"


@dataclass(frozen=True)
class Payload:
    """`words` is a command for a node, which runs `verb`; `opening` follows on stdin, and `archive` on request."""

    verb: str
    words: tuple[str, ...]
    bootstrap: bytes
    archive: bytes

    @property
    def command(self) -> str:
        """The command as a line for the user's login shell on the node, whatever that shell is."""
        # Any shell will do, fish and csh included: it gets single-quoted words and nothing to expand.
        return f"exec {shlex.join(self.words)}"

    def opening(self, python: str) -> bytes:
        """The first bytes on stdin: the interpreter's name, and what it runs first."""
        return f"{python}\n".encode() + self.bootstrap


def make_payload(verb: str, first: str = "install") -> Payload:
    """The payload that runs `verb` of `worker_entry.__main__`; the same bytes for the same sources.

    `first`: the module of `worker_entry.bootstrap` that the node runs first; it has to bring the archive.
    """
    with _making:  # all nodes' threads ask at once; one of them makes it
        return _make_payload(verb, first)


_making = threading.Lock()


@functools.cache
def _make_payload(verb: str, first: str) -> Payload:
    bootstrap, archive = _read_first(first), _make_archive()
    digest = hashlib.sha256(archive).hexdigest()
    # Runs first, in syntax that even Python 2 parses.
    too_old = (
        "v<(3,9)and sys.exit('distlaunch: %s is Python %d.%d; a node needs 3.9 or newer'%(sys.executable,v[0],v[1]))"
    )
    # Nothing is imported from the current folder. A buffer of 1 reads no byte ahead.
    become = (
        "sys.path[:]=filter(None,sys.path);"
        "exec(io.BufferedReader(io.FileIO(0,closefd=False),1).read(int(sys.argv[1])));"
        "import worker_entry.__main__ as entry;entry.main()"
    )
    script = (
        "IFS= read -r python; "
        f'case $python in "{IF_THERE}"*) python=${{python#"{IF_THERE}"}}; [ -x "$python" ] || python={PYTHON};; esac; '
        'case $python in "~/"*) python=$HOME/${python#"~/"};; esac; '
        'command -v "$python" >/dev/null 2>&1 || { echo "distlaunch: no Python at $python"; exit 127; }; '
        f'exec "$python" -c "import io,sys;v=sys.version_info;{too_old};{become}" '
        f"{len(bootstrap)} {digest} {len(archive)} {verb}"
    )
    return Payload(verb, ("/bin/sh", "-c", script), bootstrap, archive)


def _read_first(first: str) -> bytes:
    """The module's text; the only module of ours that it may import takes the place of the import."""
    text = PACKAGE.joinpath("bootstrap", f"{first}.py").read_bytes()
    imported = PACKAGE.joinpath("system", "ownership.py").read_bytes().replace(_FUTURE, b"")
    return text.replace(_OWNERSHIP, imported)


@functools.cache
def _make_archive() -> bytes:
    """The archive that `worker_entry.bootstrap.install` unpacks.

    It is plain text: in a terminal, which the command should not have, a control character could hide `streams.ECHO`.
    """
    paths = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".npz"))
    contents = [path.read_bytes() for path in paths]
    names = [str(Path(PACKAGE.name) / path.relative_to(PACKAGE)) for path in paths]
    header = json.dumps([(name, len(content)) for name, content in zip(names, contents, strict=True)])
    return base64.b64encode(zlib.compress(b"\n".join([header.encode(), b"".join(contents)]), 5))
