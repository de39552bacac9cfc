"""Reports the steps of a program that has its own training loop, with one line:

    from worker_entry import progress

    for step, batch in enumerate(data, 1):
        loss = train_step(batch)
        progress.report(step=step, loss=loss)

With `total_steps`, distlaunch also shows how long training will take.

A program that calls `model.fit` does not need this module: distlaunch counts its steps.
"""

from worker_entry.task.meter import report

__all__ = ["report"]
