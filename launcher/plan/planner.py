"""What a run makes of a spec, so that what is shown ahead is what is started. Pure.

`run`, `check`, `plan` and `--dry-run` all make their plans by a Planner. What only the nodes know (cores, GPUs, ports,
which of several addresses is reached) is left to `plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.plan.launch_plan import LaunchPlan, make_plan
from launcher.plan.paths import RunPaths
from launcher.plan.placement import select_nodes, without_spares
from launcher.plan.resources import NodeFacts
from launcher.spec.models import DEMO_MODULE, ClusterSpec
from launcher.spec.parts import ProgramSpec
from launcher.tasks import TaskId


@dataclass(frozen=True)
class Planner:
    """A spec with all that its plans need besides the nodes' answers.

    `spec`: as `place` made it. `directory`: the working directory where it names none. `environ`: where the values of
    `env_from` come from. `python`: the interpreter of this machine's tasks. `reached`: the addresses by which SSH
    reaches the nodes whose spec names none, by host.
    """

    spec: ClusterSpec
    directory: str
    environ: Mapping[str, str] = field(repr=False)
    python: str
    reached: Mapping[str, str] = field(default_factory=dict)

    def plan(
        self,
        facts: Mapping[str, NodeFacts] | None = None,
        ports: Mapping[TaskId, int] | None = None,
        addresses: Mapping[str, str] | None = None,
    ) -> LaunchPlan:
        """The plan for what is known of the nodes so far; see `make_plan`.

        Raises:
            UsageError: the nodes have not what the spec asks of them.
        """
        return make_plan(
            self.spec,
            directory=self.directory,
            environ=self.environ,
            python=self.python,
            facts=facts,
            ports=ports,
            dialled={**self.reached, **(addresses or {})},
        )

    def without_spares(self) -> Planner:
        """That of the first attempt: without the spares."""
        return replace(self, spec=without_spares(self.spec))

    def select_nodes(self, lost: Collection[str] = ()) -> tuple[Planner, list[str]] | None:
        """That of an attempt without the lost nodes, and what the user should know; None if what is left is too few."""
        chosen = select_nodes(self.spec, lost)
        return None if chosen is None else (replace(self, spec=chosen[0]), chosen[1])

    @property
    def candidates(self) -> dict[str, Sequence[str]]:
        """The addresses by which the tasks of each node may be reached."""
        return {
            node.host: [self.reached[node.host]] if node.host in self.reached else node.candidates
            for node in self.spec.nodes
        }


def place(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """The spec with the folders that it leaves to distlaunch, below the run's; they need not be there yet.

    Raises:
        UsageError: no spec can name the run's folder.
    """
    try:
        return _place_checkpoints(_place_logs(_place_demo(spec, files), files), files)
    except ValidationError:  # a path that is not UTF-8, which is no text
        raise UsageError(
            f"the path {str(files.root)!r} is not UTF-8", hint="name another place with --run-dir"
        ) from None


def _place_demo(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """The demo keeps its model beside its logs, on this machine; elsewhere it needs no working directory."""
    if spec.program != ProgramSpec(module=DEMO_MODULE):
        return spec
    if spec.is_local:
        args = ["--model-dir", str(files.model)]
        if any(node.count("evaluator") for node in spec.nodes):
            args += ["--checkpoints", str(files.checkpoints)]
        return spec.changed(program=ProgramSpec(module=DEMO_MODULE, args=args))
    if spec.sync is not None:
        return spec
    return spec.changed(working_directory=spec.working_directory or "~")


def _place_logs(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """What TensorBoard shows, where all of it is on this machine."""
    if spec.logs is not None or not spec.is_local:
        return spec
    return spec.changed(log_directory=str(files.tensorboard))


def _place_checkpoints(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """On this machine all tasks share a folder anyway: one that is the same for all attempts."""
    if spec.checkpoint_directory is not None or not spec.is_local:
        return spec
    return spec.changed(checkpoint_directory=str(files.checkpoints))
