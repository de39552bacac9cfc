"""`python ray_driver.py PROGRAM ARGS…`: the program on three workers of Ray Train, in a Ray cluster of its own."""

import os
import runpy
import sys

import ray
from ray.train import ScalingConfig
from ray.train.tensorflow import TensorflowTrainer

WORKERS = 3


def train(config: dict[str, list[str]]) -> None:
    sys.argv = config["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    ray.init(num_cpus=WORKERS, include_dashboard=False)
    argv = [os.path.abspath(sys.argv[1]), *sys.argv[2:]]
    scaling = ScalingConfig(num_workers=WORKERS)
    TensorflowTrainer(train, train_loop_config={"argv": argv}, scaling_config=scaling).fit()
