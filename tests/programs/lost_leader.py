"""Gives TASK a wrong address for the leader: TASK."""

import json
import os
import sys

config = json.loads(os.environ["TF_CONFIG"])
if os.environ["DISTLAUNCH_TASK"] == sys.argv[1]:
    config["cluster"]["worker"][0] = "127.0.0.1:9"
    os.environ["TF_CONFIG"] = json.dumps(config)

import tensorflow as tf  # noqa: E402 - it reads TF_CONFIG

tf.distribute.MultiWorkerMirroredStrategy()
