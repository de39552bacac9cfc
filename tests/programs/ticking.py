"""Opens its port, prints numbered lines, and ends once a file exists."""

import json
import os
import socket
import sys
import time
from pathlib import Path

config = json.loads(os.environ["TF_CONFIG"])
port = config["cluster"][config["task"]["type"]][config["task"]["index"]].rpartition(":")[2]
server = socket.create_server(("", int(port)), reuse_port=True)  # as TensorFlow does, because distlaunch holds the port
number = 0
while not Path(sys.argv[1]).exists():
    number += 1
    print(f"line {number} {'x' * (number % 97)}", flush=True)
    time.sleep(0.01)
print(f"end after {number}", flush=True)
