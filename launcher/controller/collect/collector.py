"""Collects what tasks write on their nodes into the run's folder: checkpoints as they are saved, files at the end."""

from __future__ import annotations

import itertools
import re
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from launcher.controller.bundle import Bundle, compile_patterns
from launcher.controller.collect.fetch import FolderFetch, Order
from launcher.controller.collect.folder import PARTS, CannotFetchError, CollectedFolder, restore
from launcher.controller.links import NodeLinks
from launcher.plan.paths import RunPaths
from launcher.report.models import CollectedNode
from launcher.spec.models import ClusterSpec
from launcher.transports.base import LinkClosed, LinkResumed, LinkTakenOver
from launcher.wording import count_of
from worker_entry.protocol.collection import FilePattern, FileRead, FilesFound, FindFiles, FoundFile
from worker_entry.protocol.messages import Saved
from worker_entry.protocol.orders import Offer
from worker_entry.protocol.units import render_size
from worker_entry.protocol.values import FileEntry


class Collector:
    """The collection of one run. `note` handles the nodes' messages.

    Args:
        spec: says which files are collected.
        files: the run's folder.
        links: the links to the nodes.
        started: when the run began, in Unix seconds; older files are not collected.
        warn: shows a warning.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        files: RunPaths,
        links: NodeLinks,
        started: float,
        warn: Callable[[str], None],
    ) -> None:
        self._files = files
        self._started = started
        self._links = links
        links.store = self._write
        self._warn = warn
        self._patterns = compile_patterns(spec.collect) if spec.collect else ()
        self._wanted = self._patterns
        """The patterns of the current fetches."""
        self._limit = int(spec.collect_limit_gib * (1 << 30))
        self._checkpoints = spec.checkpoint_directory or ""
        if self._checkpoints == str(files.checkpoints) or not spec.collect:
            self._checkpoints = ""  # all nodes share it with us, or nothing is collected
        self._of_checkpoints = _leave_out(self._checkpoints, spec.logs or "")
        self._chief = ""
        self._nodes: Sequence[str] = ()
        self._closed: dict[str, str] = {}
        """The nodes of the attempt that are lost, and why."""
        self._numbers = itertools.count(1)
        self._running: dict[int, FolderFetch] = {}
        self._waiting: list[tuple[str, str]] = []
        """Nodes that are asked for their files once the first node has answered, and where their tasks ran."""
        self._round: list[FolderFetch] = []
        """The fetches of files since the last `begin`."""
        self.rounds = 0
        """How often `begin` has begun to fetch files."""
        self._saved_again = False
        """Whether a checkpoint was saved after the current fetch of checkpoints began."""
        self._warned: set[str] = set()
        self.offered: Bundle | None = None
        """The checkpoint that is being sent to nodes."""
        restore(files.checkpoints)

    # --- what is collected ---

    def begin_attempt(self, nodes: Sequence[str], chief: str) -> None:
        """Notes the nodes of an attempt, and the one whose checkpoints count; the chief's node comes first."""
        self._nodes, self._chief = [chief, *(node for node in nodes if node != chief)], chief
        self._closed = {}

    @property
    def is_wanted(self) -> bool:
        """Whether the spec asks for files."""
        return bool(self._patterns)

    def begin(self, directories: Mapping[str, str] | None = None, patterns: Sequence[str] = ()) -> None:
        """Begins to fetch the files of all nodes of the attempt, unless a fetch of files is in progress.

        Args:
            directories: nodes to use instead of the attempt's, and where their tasks ran.
            patterns: patterns to use instead of the spec's.
        """
        self._wanted = compile_patterns(patterns) if patterns else self._patterns
        if not self._wanted or self._waiting or any(not fetch.is_whole for fetch in self._running.values()):
            return
        first, *self._waiting = (directories or dict.fromkeys(self._nodes, "")).items() or [("", "")]
        self._round = []
        self.rounds += 1
        if first[0]:
            self._begin_files(*first)

    def _begin_files(self, node: str, directory: str) -> None:
        since = self._started + self._links.clock_offset_s(node)
        order = FindFiles(next(self._numbers), directory, list(self._wanted), since)
        folder = self._files.collected / urllib.parse.quote(node, safe="@:[]%")
        self._begin(node, order, CollectedFolder(folder, self._parts, f"{node}\0{directory}"))

    @property
    def is_busy(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being fetched."""
        return any(fetch.is_whole for fetch in self._running.values())

    def note(self, node: str, message: object) -> bool:
        """Handles a node's message or a change of its link; returns whether it concerns a collection."""
        match message:
            case FilesFound(number) | FileRead(number):
                fetch = self._running.get(number)
                if fetch is None or fetch.node != node:
                    return False
                self._go_on(fetch, fetch.take(message))
            case Saved() if node == self._chief and self._checkpoints:
                self._fetch_checkpoint()
            case LinkResumed() | LinkTakenOver():
                for fetch in self._of(node):
                    self._go_on(fetch, fetch.resume())
            case LinkClosed(reason):
                self._closed[node] = reason
                for fetch in self._of(node):
                    fetch.end(reason)
                    self._go_on(fetch, ())
            case _:
                return False
        return True

    def _write(self, node: str, part: FileRead, data: bytes) -> None:
        """Writes a piece of a file; called from the thread of the node's link."""
        fetch = self._running.get(part.number)
        if fetch is not None and fetch.node == node:
            fetch.write(part, data)

    def skip(self, reason: str) -> None:
        """Notes why no files are fetched."""
        self._closed |= dict.fromkeys(self._nodes, reason)
        self.begin()

    def stop(self, reason: str) -> None:
        """Ends all fetches; received data stays, and later fetches continue from there."""
        self._waiting, self._saved_again = [], False
        for fetch in [*self._running.values()]:
            fetch.end(reason)
            self._settle(fetch)

    def close(self) -> None:
        """Removes incomplete files, if no fetch is running or has failed."""
        if not any(fetch.problem for fetch in self._round) and not self._running:
            shutil.rmtree(self._parts, ignore_errors=True)

    # --- what has been collected ---

    def make_report(self) -> list[CollectedNode]:
        """What was collected from each node; nodes without such files are left out."""
        return [
            CollectedNode(
                node=fetch.node,
                directory=fetch.directory,
                files=len(fetch.found),
                bytes=sum(file.size for file in fetch.found),
                problem=fetch.problem,
            )
            for fetch in [*self._round]
            if fetch.is_over and (fetch.found or fetch.problem)
        ]

    def render_progress(self) -> str:
        """`gpu-a 120 MiB of 300 MiB`; empty if nothing is being fetched."""
        return ", ".join(
            f"{fetch.node} {render_size(fetch.fetched_bytes)} of {render_size(fetch.fetched_bytes + fetch.left_bytes)}"
            for fetch in [*self._running.values()]
        )

    @property
    def has_checkpoint(self) -> bool:
        """Whether nodes have to continue from a checkpoint that was collected, or is being collected."""
        return bool(self._checkpoints) and (self._files.checkpoints.is_dir() or self.is_saving)

    def offer_checkpoint(self) -> Offer:
        """Offers the last complete checkpoint to nodes that have to continue from it."""
        root = self._files.checkpoints
        entries = [
            FileEntry(str(path.relative_to(root)), facts.st_size, changed=max(facts.st_mtime_ns, 0))
            for path in sorted(root.rglob("*"))
            if path.is_file() and (facts := path.stat())
        ]
        self.offered = Bundle(root, self._checkpoints, tuple(entries), checkpoint=True)
        return self.offered.offer

    # --- fetches ---

    @property
    def _parts(self) -> Path:
        return self._files.collected / PARTS

    @property
    def _staging(self) -> Path:
        return self._files.collected / ".checkpoints"

    def _fetch_checkpoint(self) -> None:
        if self.is_saving:
            self._saved_again = True
            return
        order = FindFiles(next(self._numbers), self._checkpoints, self._of_checkpoints, 0.0)
        origin = f"{self._chief}\0{self._checkpoints}"
        folder = CollectedFolder(self._staging, self._parts, origin, before=self._files.checkpoints)
        self._begin(self._chief, order, folder, is_whole=True)

    def _begin(self, node: str, order: FindFiles, folder: CollectedFolder, *, is_whole: bool = False) -> None:
        fetch = FolderFetch(node, order, folder, self._admit, is_whole=is_whole)
        self._running[fetch.number] = fetch
        if not is_whole:
            self._round.append(fetch)
        if node in self._closed:
            fetch.end(self._closed[node])
            self._go_on(fetch, ())
        else:
            self._go_on(fetch, fetch.begin())

    def _go_on(self, fetch: FolderFetch, orders: Sequence[Order]) -> None:
        for order in orders:
            self._links.send(fetch.node, order)
        if fetch.is_over:
            self._settle(fetch)
        if self._waiting and (fetch.is_over or fetch.directory) and not fetch.is_whole:
            waiting, self._waiting = self._waiting, []
            for node, directory in waiting:
                self._begin_files(node, directory)

    def _settle(self, fetch: FolderFetch) -> None:
        self._running.pop(fetch.number, None)
        if not fetch.is_whole:
            return
        if not fetch.problem and fetch.found:
            try:
                fetch.publish(self._files.checkpoints)
            except OSError as error:
                fetch.problem = f"cannot write {self._files.checkpoints}: {error.strerror}"
        if fetch.problem and fetch.problem not in self._warned:
            self._warned.add(fetch.problem)
            self._warn(f"checkpoints of {fetch.node} are not collected: {fetch.problem}")
        if self._saved_again:
            self._saved_again = False
            self._fetch_checkpoint()

    def _of(self, node: str) -> Iterator[FolderFetch]:
        yield from [fetch for fetch in self._running.values() if fetch.node == node]

    def _admit(self, fetch: FolderFetch, files: Sequence[FoundFile]) -> Sequence[FoundFile]:
        """The files, without those that another node also has, on a disk that both share.

        Raises:
            CannotFetchError: they exceed the limit.
        """
        others = [] if fetch.is_whole else [other for other in self._round if other is not fetch]
        known = {file for other in others for file in other.found}
        files = [file for file in files if file not in known]
        size = sum(file.size for file in files)
        if size + sum(file.size for file in known) > self._limit:
            limit = render_size(self._limit)
            raise CannotFetchError(
                f"{count_of(len(files), 'file')} with {render_size(size)} exceed `collect_limit_gib` ({limit} in all)"
            )
        return files


def _leave_out(folder: str, logs: str) -> list[FilePattern]:
    """Patterns for all files of the folder except logs in it, which grow all the time."""
    if not folder or not Path(logs).is_relative_to(folder):
        return []
    return [
        FilePattern("", included=True),
        FilePattern(f"{re.escape(str(Path(logs).relative_to(folder)))}/", included=False),
    ]
