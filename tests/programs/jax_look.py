"""A bare `jax.distributed.initialize()`: prints what the process has become, and the addresses at which it listens."""

import json
import os

import jax
from jax.experimental import multihost_utils


def find_listening() -> list[str]:
    """The addresses of this process's listening sockets; hexadecimal, as the kernel shows them."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if os.path.islink(link)}
    found = set()
    for table in ("tcp", "tcp6"):
        with open(f"/proc/net/{table}", encoding="ascii") as rows:
            for row in [line.split() for line in rows][1:]:
                if row[3] == "0A" and f"socket:[{row[9]}]" in own:
                    found.add(row[1].partition(":")[0])
    return sorted(found)


jax.distributed.initialize()
found = {
    "ranks": multihost_utils.process_allgather(jax.numpy.array([jax.process_index()])).ravel().tolist(),
    "index": jax.process_index(),
    "local": jax.local_device_count(),
    "all": jax.device_count(),
    "listening": find_listening(),
}
print("look", json.dumps(found), flush=True)
