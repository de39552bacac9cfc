"""Makes a run's plans from its spec, so that what is shown ahead is what is started.

`run`, `check`, `plan` and `--dry-run` all use a Planner. `Planner.plan` takes what only the nodes know: cores, GPUs,
free ports, and which of several addresses the others reach.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from pydantic_core import ValidationError

from launcher.errors import UsageError
from launcher.plan.launch_plan import LaunchPlan, TaskPlan, make_plan, plan_node
from launcher.plan.layout import Layout, lay_out
from launcher.plan.paths import RunPaths
from launcher.plan.placement import select_nodes, without_spares
from launcher.plan.resources import NodeFacts
from launcher.spec.models import DEMO_MODULE, ClusterSpec
from launcher.spec.nodes import LOOPBACK, NodeSpec
from launcher.spec.parts import ProgramSpec
from launcher.tasks import TaskId
from worker_entry.protocol.frozen import dataclass, field, replace


@dataclass(frozen=True)
class Planner:
    """A spec, with everything that its plans need besides the nodes' answers.

    `spec`: the result of `place`. `directory`: the working directory, if the spec names none. `environ`: the source of
    the values of `env_from`. `python`: the interpreter of this machine's tasks. `reached`: by host, the addresses at
    which SSH reaches the nodes whose spec names none.
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
        """The plan, given what is known of the nodes so far; see `make_plan`.

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
        """The tasks of one node on the ports that are expected; see `plan`."""
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

    @cached_property
    def _expected(self) -> tuple[dict[str, NodeSpec], Layout]:
        # Asked for by each node: of a thousand, a thousand layouts of a thousand tasks would be a million.
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


def place(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """The spec with the folders that it leaves to distlaunch, below the run's folder; they need not exist yet.

    Raises:
        UsageError: the run's folder is not UTF-8, so that no spec can name it.
    """
    try:
        return _place_checkpoints(_place_logs(_place_demo(_place_inside(spec), files), files), files)
    except ValidationError:  # the path is not UTF-8
        raise UsageError(
            f"the path {str(files.root)!r} is not UTF-8", hint="name another place with --run-dir"
        ) from None


def _place_inside(spec: ClusterSpec) -> ClusterSpec:
    """A network that reaches nothing else has one address."""
    if spec.isolation != "namespace":
        return spec
    return spec.with_nodes([node.changed(address=LOOPBACK, addresses=None) for node in spec.nodes])


def _place_demo(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """On this machine, the demo keeps its model beside its logs; elsewhere it needs no working directory."""
    if spec.program != ProgramSpec(module=DEMO_MODULE):
        return spec
    if spec.shares_files:
        args = ["--model-dir", str(files.model)]
        if any(node.count("evaluator") for node in spec.nodes):
            args += ["--checkpoints", str(files.checkpoints)]
        return spec.changed(program=ProgramSpec(module=DEMO_MODULE, args=args))
    if spec.sync is not None:
        return spec
    return spec.changed(working_directory=spec.working_directory or "~")


def _place_logs(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """If all nodes are this machine, TensorBoard shows a folder of the run."""
    if spec.logs is not None or not spec.shares_files:
        return spec
    return spec.changed(log_directory=str(files.tensorboard))


def _place_checkpoints(spec: ClusterSpec, files: RunPaths) -> ClusterSpec:
    """If all nodes are this machine, all tasks and attempts share a folder of the run."""
    if spec.checkpoint_directory is not None or not spec.shares_files:
        return spec
    return spec.changed(checkpoint_directory=str(files.checkpoints))
