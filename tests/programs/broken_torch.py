"""The loop of `broken_loop` with PyTorch and gloo, for torchrun, and the fault of `broken` in it."""

import broken

broken.at("start")

import os  # noqa: E402 - a failure before the import is one of the faults

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import record  # noqa: E402


class Model(torch.nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    def forward(self, batch: torch.Tensor, step: int) -> torch.Tensor:
        broken.at("layer", step)
        if step == 0:
            broken.at("layer-trace")
        size = 7 if broken.due("layer-shape", "layer-trace", step) else 4
        return torch.eye(size) @ batch  # fault: layer-shape


def train_step(model: Model, step: int) -> None:
    broken.at("data", step)
    broken.at("train-step", step)
    if broken.due("skipped-step", "train-step", step):
        return
    gradient = model(torch.ones(4), step)
    if broken.due("other-shape", "train-step", step):
        gradient = torch.ones(5)
    if broken.due("evaluate-alone", broken.PLACE, step):
        dist.all_reduce(torch.ones(1))  # fault: evaluate-alone
    dist.all_reduce(gradient)  # fault: other-shape


@record  # type: ignore[untyped-decorator]  # PyTorch has no types here
def main() -> None:
    if broken.due("wrong-port", "cluster"):
        os.environ["MASTER_PORT"] = "9"
    if broken.due("bad-port", "cluster"):
        os.environ["MASTER_PORT"] = "http"
    dist.init_process_group("gloo")  # fault: bad-port
    broken.at("ready")
    model = Model()
    steps = broken.STEPS
    if broken.due("fewer-batches", "data"):
        steps -= 10
    if broken.due("more-batches", "data"):
        steps += 10
    if broken.due("other-model", "ready"):
        dist.broadcast(torch.ones(4), 0)
    for step in range(steps):
        try:
            train_step(model, step)
        except Exception as error:
            if broken.WRAPS:
                raise RuntimeError(f"step {step} failed") from error
            raise
        broken.at("step", step)
        if broken.due("checkpoint-on-full-disk", "step", step):
            torch.save(torch.ones(1 << 20), "/dev/full")  # fault: checkpoint-on-full-disk
    broken.at("end")


if __name__ == "__main__":
    main()
