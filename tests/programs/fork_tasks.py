"""Plays an agent with a nursery: forks a task for each order on stdin, and says how it ended: PRELOAD (as JSON) LOG."""

import json
import os
import selectors
import sys
import time

from worker_entry.agent.forkserver_client import Nursery, NurseryError
from worker_entry.protocol.orders import Preload
from worker_entry.protocol.values import Program, TaskOrder
from worker_entry.system import kernel

kernel.become_subreaper()
selector = selectors.DefaultSelector()
nursery = Nursery(selector)
preload = json.loads(sys.argv[1])
program = Program("script", "program.py")
nursery.begin(Preload(program, preload["env"], [], preload["modules"], keep=True), os.getcwd(), sys.argv[2])


def wait() -> int:
    """Goes on with an agent's loop until nothing is imported any more; returns how many turns that took."""
    turns = 0
    while not nursery.settled(time.monotonic()):
        for key, _ in selector.select(0.1):
            key.data()
        turns += 1
    return turns


wait()
print(json.dumps({"problem": nursery.problem, "pids": sorted(nursery.pids)}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    task = TaskOrder(Program(**order["program"]), mend_keras=False)
    turns = 0
    if order["expected"]:
        nursery.expect(task.program, order["cwd"])
        turns = wait()
    try:
        env = {**os.environ, **preload["env"], **order["env"]}
        pid = nursery.fork(task, env, order["cwd"], order["log"], f"{order['log']}.order")
        said: dict[str, object] = {"status": os.waitpid(pid, 0)[1], "turns": turns}
    except NurseryError as error:
        said = {"problem": str(error)}
    print(json.dumps(said), flush=True)
