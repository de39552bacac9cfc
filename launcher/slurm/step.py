"""A step of a job on one of its nodes: takes no resources from other steps, and may use all of the job's there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.slurm.calls import version

_EXTERNAL = (23, 11)
"""The first version with `--external-launcher`."""
_OF_REQUEST = re.compile(
    r"(SLURM_(MEM_PER_.*|CPU_BIND.*|MEM_BIND.*|CPUS_PER_.*|TRES_PER_.*|NTASKS.*|NPROCS|NNODES|JOB_NUM_NODES|"
    r"TASKS_PER_NODE|DISTRIBUTION|GPUS.*|GPU_BIND.*|GPU_FREQ|EXACT|EXCLUSIVE|OVERCOMMIT|THREADS_PER_CORE|HINT|"
    r"UNBUFFEREDIO|LABELIO|STDINMODE|STDOUTMODE|STDERRMODE|EXPORT_ENV|WORKING_DIR|REMOTE_CWD|WAIT|KILL_BAD_EXIT|"
    r"STEP_.*|RESV_PORTS|SPREAD_JOB|CORE_SPEC|THREAD_SPEC|OPEN_MODE|COMPRESS|MULTI_PROG|RELATIVE|TIMELIMIT))|"
    r"SRUN_CPUS_PER_TASK|SLURM_JOB_NAME"
)


def make_step(job: str, *hosts: str, group: int | None = None) -> list[str]:
    """The beginning of a command line, which runs the command that follows on each of the nodes.

    Args:
        job: the id of the job.
        hosts: the nodes.
        group: the component of a heterogeneous job that the nodes belong to.

    Raises:
        SlurmError: srun is missing.
    """
    return [
        "srun",
        f"--jobid={job}",
        "--external-launcher" if version() >= _EXTERNAL else "--overlap",
        f"--nodes={len(hosts)}",
        f"--ntasks={len(hosts)}",
        f"--nodelist={','.join(hosts)}",
        "--no-kill",  # the failure of one node does not end the others
        "--mpi=none",
        "--export=ALL",
        "--job-name=distlaunch",
        *([] if group is None else [f"--het-group={group}"]),
    ]


def make_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a step, without the variables that come from the job's own request.

    Those variables stand for options: a step of one task would contradict them, or take a share of the job's memory.
    SLURM_CPU_BIND keeps the step from being bound to one core.
    """
    kept = {name: value for name, value in environ.items() if not _OF_REQUEST.fullmatch(name)}
    return {**kept, "SLURM_CPU_BIND": "none"}
