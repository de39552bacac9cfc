"""Captures what the workers of a cluster do, by the profiler that each of their servers has; asked over stdin."""

import importlib
import json
import sys


def main() -> None:
    """Reads `{"addresses": [HOST:PORT], "directory": …, "duration_s": …}`."""
    order = json.load(sys.stdin)
    tensorflow = importlib.import_module("tensorflow")

    addresses = ",".join(f"grpc://{address}" for address in order["addresses"])
    tensorflow.profiler.experimental.client.trace(addresses, order["directory"], int(order["duration_s"] * 1000))
