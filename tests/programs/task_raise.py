"""Fails with an exception that has a message."""


def step(batch: int) -> None:
    raise ValueError(f"no batch of {batch}")


print("about to fail", flush=True)
step(32)
