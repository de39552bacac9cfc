"""`python with_ray.py WORKERS PROGRAM ARGS…`: the program as the training function of Ray Train, with Ray's Python.

A line of its output says how the training ended, in JSON: `failed`, the ranks that Ray names, in Ray's order, each with
Ray's text about it, or null if Ray names none; `gone`, the ranks whose processes are gone.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import RunConfig, ScalingConfig
from ray.train.tensorflow import TensorflowTrainer


def train(config: dict[str, list[str]]) -> None:
    sys.argv = config["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    print(f"rank {ray.train.get_context().get_world_rank()} trains", flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")


def is_gone(error: BaseException) -> bool:
    return isinstance(getattr(error, "health_check_failure", error), RayActorError)


def main(workers: int, argv: list[str]) -> None:
    # The paths of Ray's sockets may have 107 bytes, so they need a short folder.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        ray.init(num_cpus=workers, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=short)
        print(json.dumps(find_end(workers, argv)), flush=True)
        ray.shutdown()


def find_end(workers: int, argv: list[str]) -> dict[str, object]:
    """Runs the program; returns how it ended."""
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"argv": argv},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=str(Path.cwd() / "results")),
    )
    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        failures = error.worker_failures
        gone = [rank for rank, failure in failures.items() if is_gone(failure)]
        return {"failed": {rank: str(failure) for rank, failure in failures.items()}, "gone": gone}
    except ray.train.TrainingFailedError:
        return {"failed": None, "gone": []}
    return {"failed": {}, "gone": []}


main(int(sys.argv[1]), sys.argv[2:])
