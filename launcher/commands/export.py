"""`distlaunch export kubernetes`: reads the contents of the manifests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from launcher.controller.bundle import make_bundle
from launcher.errors import UsageError
from launcher.kubernetes.entry import ENTRY, LIMIT, PROGRAM, PackedFile, make_entry, pack, too_large
from launcher.kubernetes.export import choose_pods, make_export
from launcher.kubernetes.exported import Export, Kind
from launcher.rundir.names import current_directory
from launcher.sources.kubernetes import read_pod_template
from launcher.spec.models import ClusterSpec
from launcher.spec.parts import SyncSpec
from launcher.transports.payload import PACKAGE

_DEMO = "demo"
_RATIO = 20
"""No program's folder is compressed by more than this factor."""


def read_export(spec: ClusterSpec, kind: Kind, image: str | None, volumes: Mapping[str, str]) -> Export:
    """The export of a spec, with the files that its pods need.

    Args:
        spec: the cluster.
        kind: the kind of the exported objects.
        image: replaces the spec's image.
        volumes: claims and their folders, in addition to the spec's.

    Raises:
        UsageError: no manifest can express the spec, or a file cannot be read.
    """
    pods = choose_pods(spec, image, volumes)
    template = read_pod_template(pods, str(current_directory()))
    files = {ENTRY: _make_entry(demo=spec.runs_demo)}
    if spec.sync is not None:
        files[PROGRAM] = pack_program(spec.sync)
    return make_export(spec, kind, pods, template=template, files=files)


@functools.cache
def _make_entry(*, demo: bool) -> bytes:
    """The archive with `worker_entry`; contains the demo only if `demo`."""
    return make_entry(_read_sources(demo=demo))


def _read_sources(*, demo: bool) -> Iterator[PackedFile]:
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".npz")):
        inner = path.relative_to(PACKAGE)
        if demo or inner.parts[0] != _DEMO:
            yield PackedFile(str(Path(PACKAGE.name, inner)), path.read_bytes())


def pack_program(sync: SyncSpec) -> bytes:
    """The program's folder as an archive.

    Raises:
        UsageError: the folder cannot be read, or is far too large for a pod's files.
    """
    return pack(_read_program(sync))


def _read_program(sync: SyncSpec) -> Iterator[PackedFile]:
    bundle = make_bundle(sync, current_directory())
    size = sum(entry.size for entry in bundle.entries)
    if size > LIMIT * _RATIO:  # too large even when compressed: do not read the files
        raise too_large(f"{size:,} bytes")
    for entry in bundle.entries:
        try:
            data = (bundle.root / entry.path).read_bytes()  # follows links
        except OSError as error:
            raise UsageError(
                f"{entry.path!r} in the folder {bundle.root} cannot be read: {error.strerror}",
                hint="exclude it with `sync.exclude`",
            ) from None
        yield PackedFile(entry.path, data, entry.executable)
