"""Plays an agent whose guardian kills nothing: FOLDER WHO LINE. The agent, or both, die at a line of a task's start.

The folder is on the forkserver's sys.path: its `sitecustomize` kills when the new process, or the one between it and
the forkserver, comes to that line, and writes `reached` before.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from worker_entry.system import kernel

SITE = """
import os, signal, sys, time

def _parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])

def _is_gone(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True

if sys.argv[-1:] == ["forkserver"] or "forkserver" in sys.orig_argv:
    me, agent = os.getpid(), os.getppid()
    victims = [agent, _parent(agent)] if os.environ["WHO"] == "both" else [agent]
    left, reached = [int(os.environ["LINE"])], os.environ["REACHED"]

    def local(frame, event, _):
        if event == "line" and os.getpid() != me:
            left[0] -= 1
            if left[0] == 0:
                open(reached, "w").close()
                for victim in reversed(victims):
                    os.kill(victim, signal.SIGKILL)
                while not all(map(_is_gone, victims)):
                    time.sleep(0.001)
        return local

    def trace(frame, event, _):
        return local if frame.f_code.co_filename.endswith("task/forkserver.py") else None

    def begin():
        sys.settrace(trace)
        frame = sys._getframe()
        while frame is not None:
            frame.f_trace = trace(frame, "call", None)
            frame = frame.f_back

    os.register_at_fork(after_in_child=begin)
"""

folder, who, line = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(folder / "tensorflow.py").write_text("")
(folder / "sitecustomize.py").write_text(SITE)
(folder / "program.py").write_text("import tensorflow, time\nopen('runs', 'w').close()\ntime.sleep(600)\n")
kernel.become_subreaper()  # a guardian, except that it kills nothing
env = {"PYTHONPATH": str(folder), "WHO": who, "LINE": line, "REACHED": str(folder / "reached")}
preload = json.dumps({"env": env, "modules": [], "cwd": str(folder)})
agent = subprocess.Popen(
    [sys.executable, str(Path(__file__).with_name("fork_tasks.py")), preload, str(folder / "forkserver.log")],
    cwd=folder,
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    text=True,
)
assert agent.stdin is not None
program = {"kind": "script", "target": "program.py", "args": []}
order = {"program": program, "env": {}, "cwd": str(folder), "log": str(folder / "task.log"), "expected": False}
print(json.dumps(order), file=agent.stdin)
agent.stdin.flush()
time.sleep(600)
