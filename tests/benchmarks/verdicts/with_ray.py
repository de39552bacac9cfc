"""`python with_ray.py PROGRAM ARGS…`, with a Python that has Ray: the program as the training function of Ray Train.

The last line that it prints says how it ended, in JSON: `failed`, the ranks that Ray names, in its order, each with
Ray's text about it, or null if Ray names none; `gone`, the ranks whose processes are gone.
"""

import atexit
import json
import runpy
import shutil
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
    short = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets may have 107 bytes
    atexit.register(shutil.rmtree, short, ignore_errors=True)
    ray.init(num_cpus=WORKERS, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=short)
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"argv": argv},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(Path.cwd() / "results")),
    )
    end: dict[str, object] = {"failed": {}, "gone": []}
    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        failures = error.worker_failures
        end["failed"] = {rank: str(failure) for rank, failure in failures.items()}
        end["gone"] = [rank for rank, failure in failures.items() if is_gone(failure)]
    except ray.train.TrainingFailedError:
        end["failed"] = None
    print(json.dumps(end), flush=True)


main(sys.argv[1:])
