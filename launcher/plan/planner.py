"""Makes a run's plans from its spec, so that the plan shown in advance is the plan that is started.

`run`, `check`, `plan` and `--dry-run` all use a Planner. `Planner.plan` takes facts that only the nodes know: cores,
GPUs, free ports, and which of a node's addresses the other nodes reach.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.plan.launch_plan import LaunchPlan, TaskPlan
from launcher.plan.layout import Layout, lay_out
from launcher.plan.making import make_plan, plan_node
from launcher.plan.paths import RunPaths
from launcher.plan.resources import NodeFacts, find_needed_gpus
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import LOOPBACK, NodeSpec
from launcher.tasks import TaskId
from launcher.wording import count_of
from worker_entry.protocol.frozen import dataclass, field, replace


@dataclass(frozen=True)
class Planner:
    """A spec, with everything that its plans need except the nodes' answers.

    `spec`: the result of `place`. `directory`: the working directory, if the spec names none. `environ`: the source of
    the values of `env_from`. `python`: the interpreter of local and Slurm nodes whose spec names none. `reached`: by
    host, the addresses at which SSH reaches the nodes whose spec names no address.
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
        """Returns the plan with the facts that are known so far; see `make_plan`.

        Raises:
            UsageError: a node lacks what the spec asks for.
        """
        return make_plan(
            self.spec,
            directory=self.directory,
            environ=self.environ,
            python=self.python,
            facts=facts,
            ports=ports,
            chosen_addresses={**self.reached, **(addresses or {})},
        )

    def plan_node(self, node: str, facts: NodeFacts) -> list[TaskPlan]:
        """The tasks of one node on their expected ports; see `plan`."""
        found, layout = self._expected
        directory, environ, python, chosen = self.directory, self.environ, self.python, self.reached
        return [
            *plan_node(
                self.spec,
                found[node],
                layout,
                directory=directory,
                environ=environ,
                python=python,
                facts=facts,
                warnings=[],
                chosen=chosen,
            )
        ]

    def find_needed_gpus(self, node: str, facts: NodeFacts) -> tuple[list[str], int]:
        """The GPUs that the tasks of a node may get, and how many of them they need."""
        found, layout = self._expected
        return find_needed_gpus(found[node], layout.tasks[node], self.spec.rules, facts)

    @cached_property
    def _expected(self) -> tuple[dict[str, NodeSpec], Layout]:
        # Cached because every node needs it: a thousand layouts of a thousand tasks would be a million entries.
        return {node.host: node for node in self.spec.nodes}, lay_out(self.spec, None, self.reached)

    def without_spares(self) -> Planner:
        """The planner of the first attempt, without the spares."""
        return replace(self, spec=without_spares(self.spec))

    def select_nodes(self, lost: Collection[str] = ()) -> tuple[Planner, list[str]] | None:
        """The planner of an attempt without the lost nodes, and notes for the user; None if too few nodes are left."""
        chosen = select_nodes(self.spec, lost)
        return None if chosen is None else (replace(self, spec=chosen[0]), chosen[1])

    @property
    def candidates(self) -> dict[str, Sequence[str]]:
        """By host, the addresses at which the tasks of each node may be reached."""
        return {
            node.host: [self.reached[node.host]] if node.host in self.reached else node.candidates
            for node in self.spec.nodes
        }


def fill_in_folders(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """Adds the folders that the spec leaves to distlaunch, below the run's folder; they need not exist yet.

    Raises:
        UsageError: the path of the run's folder is not UTF-8, so no spec can name it.
    """
    try:
        return _place_checkpoints(_place_logs(_place_demo(_place_inside(spec), files), files), files)
    except ValidationError:  # the path is not UTF-8
        raise UsageError(
            f"the path {str(files.root)!r} is not UTF-8", hint="choose another folder with --run-dir"
        ) from None


def _place_inside(spec: ClusterSpec) -> ClusterSpec:
    """Uses the loopback address in an isolated network, which has no other."""
    if spec.isolation != "namespace":
        return spec
    return spec.with_nodes([node.changed(address=LOOPBACK, addresses=None) for node in spec.nodes])


def _place_demo(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """If all nodes share the run's files, lets the demo save its model there; else any working directory will do."""
    if not spec.runs_demo or spec.program.args:
        return spec
    if spec.shares_files:
        args = ["--model-dir", str(files.model)]
        if any(node.count("evaluator") for node in spec.nodes):
            args += ["--checkpoints", str(files.checkpoints)]
        return spec.changed(program=spec.program.changed(args=args))
    if spec.sync is not None:
        return spec
    return spec.changed(working_directory=spec.working_directory or "~")


def _place_logs(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """If all nodes share the run's files, lets TensorBoard show a folder of the run."""
    if spec.logs is not None or not spec.shares_files:
        return spec
    return spec.changed(log_directory=str(files.tensorboard))


def _place_checkpoints(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """If all nodes share the run's files, lets all tasks and attempts use a folder of the run for checkpoints."""
    if spec.checkpoint_directory is not None or not spec.shares_files:
        return spec
    return spec.changed(checkpoint_directory=str(files.checkpoints))


def without_spares(spec: ClusterSpec) -> ClusterSpec:
    """The spec without its spares."""
    return spec.changed(nodes=[node for node in spec.nodes if not node.spare])


def select_nodes(spec: ClusterSpec, lost: Collection[str] = ()) -> tuple[ClusterSpec, list[str]] | None:
    """Returns the spec without spares and lost nodes, and notes about the change for the user.

    A spare gets the tasks of the node that it replaces, so that all tasks keep their indices. The result is a
    valid spec: it has every role that its strategy needs.

    Args:
        spec: the spec as the user wrote it.
        lost: the hosts that can no longer be used.

    Returns:
        None if too few nodes are left, or a role is missing.
    """
    spares = [node for node in spec.nodes if node.spare and node.host not in lost]
    nodes: list[NodeSpec] = []
    notes = []
    for node in spec.nodes:
        if node.spare:
            continue
        if node.host not in lost:
            nodes.append(node)
        elif (spare := _find_spare(spec, node, spares)) is not None:
            spares = [other for other in spares if other.host != spare.host]
            nodes.append(spare)
            notes.append(f"{spare.host} takes the place of {node.host}")
        elif not spec.restart.min_workers:
            return None
        else:
            notes.append(f"continuing without {node.host}")
    workers = _count_workers(spec, nodes)
    if workers < max(spec.restart.min_workers, 1):
        return None
    try:
        chosen = spec.changed(nodes=nodes)
    except ValidationError:
        return None
    if any(note.startswith("continuing") for note in notes):
        before = count_of(_count_workers(spec, spec.nodes), "worker")
        notes.append(f"{workers} of {before} {'is' if workers == 1 else 'are'} left")
    return chosen, notes


def _find_spare(spec: ClusterSpec, lost: NodeSpec, spares: Sequence[NodeSpec]) -> NodeSpec | None:
    """The first spare whose ports and GPUs suffice for the lost node's tasks, as a node with these tasks."""
    for spare in spares:
        instead = spare.changed(spare=False, tasks=lost.tasks)
        others = [node for node in spec.nodes if node.host != spare.host]
        try:
            spec.changed(nodes=[instead if node is lost else node for node in others])
        except ValidationError:
            continue
        return instead
    return None


def _count_workers(spec: ClusterSpec, nodes: Sequence[NodeSpec]) -> int:
    return sum(node.count(task_type) for node in nodes for task_type in spec.rules.computes)
