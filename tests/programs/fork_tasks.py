"""Plays an agent with a forkserver: forks a task for each order on stdin and prints how it ends: PRELOAD (JSON) LOG."""

import json
import os
import selectors
import sys
import time

from worker_entry.agent.tasks.forkserver import ForkserverClient, ForkserverError
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program, TaskOrder
from worker_entry.system import kernel

kernel.become_subreaper()
selector = selectors.DefaultSelector()
forkserver = ForkserverClient(selector)
preload = json.loads(sys.argv[1])
program = Program("script", "program.py")
forkserver.begin(
    Preload(
        program, preload["env"], [], preload["modules"], keep=True, framework=preload.get("framework", "tensorflow")
    ),
    preload["cwd"],
    os.path.dirname(sys.argv[2]),
)


def wait() -> int:
    """Runs an agent's loop until no import is in progress; returns the number of turns."""
    turns = 0
    while not forkserver.settled(time.monotonic()):
        for key, _ in selector.select(0.1):
            key.data()
        turns += 1
    return turns


wait()
print(json.dumps({"problem": forkserver.problem, "pids": sorted(forkserver.pids)}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    task = TaskOrder(Program(**order["program"]), patch_keras=False)
    turns = 0
    if order["expected"]:
        forkserver.expect(task.program, order["cwd"])
        turns = wait()
    try:
        env = {**os.environ, **preload["env"], **order["env"]}
        pid = forkserver.fork(task, env, order["cwd"], order["log"], f"{order['log']}.order")
        said: dict[str, object] = {"status": os.waitpid(pid, 0)[1], "turns": turns}
    except ForkserverError as error:
        said = {"problem": str(error)}
    print(json.dumps(said), flush=True)
