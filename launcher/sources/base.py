"""The source of a run's nodes, which may also take them away."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from launcher.gang.checks.findings import Finding
from launcher.gang.events import EndAnnounced
from launcher.sources.node_list import find_nodes
from launcher.spec.models import ClusterSpec


class NodeSource:
    """The nodes that the spec lists or that its command names; they are never taken away.

    A Slurm job and the pods of Kubernetes may be; their classes override the methods.
    """

    is_lazy = False
    """Whether the real nodes exist only after the first call of `find`."""

    def find(self, spec: ClusterSpec, is_wanted: Callable[[], bool], tell: Callable[[str], None]) -> ClusterSpec:
        """Returns the spec with the current nodes; the same spec if they are no longer wanted. May take minutes.

        Args:
            spec: the spec with the nodes of the last attempt.
            is_wanted: whether the answer is still wanted.
            tell: gets messages for the user during a long wait.

        Raises:
            DistlaunchError: the source provides no valid nodes.
        """
        del tell
        return find_nodes(spec, is_wanted)

    def keep(self, nodes: Sequence[str]) -> None:
        """Continues to use these nodes, on which an attempt of an earlier controller runs."""

    def find_problems(self, spec: ClusterSpec, cwd: str) -> Iterator[Finding]:
        """Yields warnings about a program, which runs in `cwd` by default, on nodes of this source."""
        yield from ()

    # --- nodes that are taken away ---

    def watch(self, put: Callable[[EndAnnounced], None]) -> None:
        """Starts to announce nodes that are taken away."""

    def close(self) -> None:
        """Stops the announcements."""

    def ask(self, answer: Callable[[EndAnnounced | None], None]) -> None:
        """Finds out why this process or a node got a signal; the answer may come on another thread."""
        answer(None)

    def forget(self) -> None:
        """Forgets the state of earlier attempts."""

    def find_end(self, lost: Collection[str] = ()) -> EndAnnounced | None:
        """Why nodes of the last attempt were taken away; None if none were. `lost`: the nodes that it lost."""
        del lost
        return None

    def release(self) -> int | None:
        """Removes what was made for the run; returns how many pods are left, None if unknown or none were made."""
        return None

    # --- a run that continues when its nodes are back ---

    def will_return(self, tell: Callable[[str], None]) -> bool:
        """Whether this source starts the run again when it has nodes; tells the user."""
        del tell
        return False

    def requeue(self) -> None:
        """Asks for the nodes again, if `will_return`. Called last: it may end this process."""
