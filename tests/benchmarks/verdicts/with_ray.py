"""`python with_ray.py PROGRAM ARGS…`, with a Python that has Ray: the program as the training function of Ray Train.

The last line that it prints says how it ended, in JSON: `failed`, the ranks that Ray names, in its order, each with
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

WORKERS = 3


def train(config: dict[str, list[str]]) -> None:
    sys.argv = config["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    print(f"rank {ray.train.get_context().get_world_rank()} trains", flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")


def is_gone(error: BaseException) -> bool:
    return isinstance(getattr(error, "health_check_failure", error), RayActorError)


def main(argv: list[str]) -> None:
    # The paths of Ray's sockets may have 107 bytes, so they need a short folder.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        ray.init(num_cpus=WORKERS, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=short)
        print(json.dumps(find_end(argv)), flush=True)
        ray.shutdown()


def find_end(argv: list[str]) -> dict[str, object]:
    """Runs the program; returns how it ended."""
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"argv": argv},
        scaling_config=ScalingConfig(num_workers=WORKERS),
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


main(sys.argv[1:])
