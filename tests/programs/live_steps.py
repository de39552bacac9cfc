"""Opens its port, prints a line for each step and reports it, until a file exists: `live_steps.py FILE [STEP_S]`."""

import json
import os
import socket
import sys
import time
from pathlib import Path

from worker_entry import progress

config = json.loads(os.environ["TF_CONFIG"])
port = config["cluster"][config["task"]["type"]][config["task"]["index"]].rpartition(":")[2]
# With reuse_port, as TensorFlow does, because distlaunch holds and guards the port.
server = socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=True)
task = os.environ["DISTLAUNCH_TASK"]
step_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.1
step = 0
while not Path(sys.argv[1]).exists():
    step += 1
    sys.stdout.write(f"{task} does step {step}\n")  # `print` writes the line break separately, perhaps late
    progress.report(step=step, epoch=1, total_steps=10_000, loss=1 / step)
    time.sleep(step_s)
sys.stdout.write(f"{task} ends after {step}\n")
