"""DistributedDataParallel on the CPU, 100 steps: CULPRIT HOW (raise | kill | exit), the failure in the first attempt.

Each attempt continues after the last step that rank 0 has saved.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

culprit, how = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert (rank, world) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
torch.manual_seed(rank)  # DistributedDataParallel starts from rank 0's weights anyway
module = torch.nn.Linear(4, 1)
model = DistributedDataParallel(module)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
saved = Path(os.environ["DISTLAUNCH_CHECKPOINT_DIR"], "saved.pt")
first = 1
if saved.exists():
    state = torch.load(saved)
    module.load_state_dict(state["module"])
    first = state["step"] + 1
print(f"begins with step {first} as {rank} of {world}, {os.environ['LOCAL_RANK']} here", flush=True)
for step in range(first, 101):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step * world + rank))
    optimizer.zero_grad()
    ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
    optimizer.step()
    if step % 20 == 0 and rank == 0:
        torch.save({"module": module.state_dict(), "step": step}, saved.with_suffix(".part"))
        saved.with_suffix(".part").rename(saved)
    if rank == int(culprit) and step == 50 and os.environ["DISTLAUNCH_ATTEMPT"] == "1":
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit("no more")
        raise ValueError("batch 50 has no label")
print("weights", [round(weight, 6) for weight in module.weight.tolist()[0]], flush=True)
dist.destroy_process_group()
