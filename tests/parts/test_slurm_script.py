"""The script of a Slurm job."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launcher.slurm.script import render_script
from launcher.spec.models import ClusterSpec


def test_the_slurm_script_requests_the_resources_of_the_spec(tmp_path: Path) -> None:
    spec = ClusterSpec.model_validate(
        {
            "name": "digits",
            "nodes": "slurm",
            "slurm": {
                "nodes": 2,
                "spares": 1,
                "tasks_per_node": 4,
                "partition": "gpu,long",
                "account": "lab",
                "time": "1-00:00:00",
                "gpus_per_node": "a100:4",
                "extra": ["--constraint=ib&fast", "--exclusive"],
            },
            "restart": {"max_restarts": 1},
        }
    )
    script = render_script(spec, tmp_path, ["distlaunch", "resume", "a b"], "/work")
    assert script.splitlines() == [
        "#!/bin/sh",
        "#SBATCH --job-name=digits",
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --partition=gpu,long",
        "#SBATCH --account=lab",
        "#SBATCH --time=1-00:00:00",
        "#SBATCH --gpus-per-node=a100:4",
        "#SBATCH --chdir=/work",
        f"#SBATCH --output={tmp_path}/slurm-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --no-kill",
        "#SBATCH --constraint=ib&fast",
        "#SBATCH --exclusive",
        "exec distlaunch resume 'a b'",
    ]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
