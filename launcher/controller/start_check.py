"""What would refuse a run's first start on this machine, found before the run has a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.errors import StartError
from launcher.plan.launch_plan import make_plan, program_of, runs_in
from launcher.plan.resources import NodeFacts
from launcher.spec.models import ClusterSpec
from launcher.spec.nodes import NodeSpec
from worker_entry.program.finding import find_problem
from worker_entry.system import hardware

OF_FILES = ("no-working-directory", "no-program", "not-executable")
"""Problems that do not depend on the interpreter."""


def check_start(spec: ClusterSpec, cwd: Path) -> None:
    """Checks the program and the GPUs on this machine, as its agent does later.

    Args:
        spec: what to run.
        cwd: the current folder.

    Raises:
        StartError: the program cannot be started here.
        TooFewGpusError: this machine lacks GPUs that the spec asks for.
    """
    here = [node for node in spec.nodes if node.is_local and any(node.tasks.values())]
    for node in here:
        _check_program(spec, node, cwd)
    if any(node.gpus_per_worker for node in here):
        facts = {node.host: NodeFacts(hardware.cores(), tuple(hardware.gpus())) for node in here}
        make_plan(spec, directory=str(cwd), environ={}, python="", facts=facts)


def _check_program(spec: ClusterSpec, node: NodeSpec, cwd: Path) -> None:
    types = {task_type for task_type, count in node.tasks.items() if count}
    if types <= {*spec.rules.serves}:  # they run our own server
        return
    problem = find_problem(program_of(spec), runs_in(spec, node, str(cwd)))
    # Another interpreter may have another syntax, and other packages.
    if problem is not None and (problem.reference in OF_FILES or spec.find_python(node) == sys.executable):
        raise StartError(problem.reference, problem.message, hint=problem.hint)
