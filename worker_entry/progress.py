"""For programs whose training loop is their own: one line that reports each step.

    from worker_entry import progress

    for step, batch in enumerate(data, 1):
        loss = train_step(batch)
        progress.report(step=step, loss=loss)

`model.fit` needs none of this: its steps are counted by distlaunch.
"""

from worker_entry.task.meter import report

__all__ = ["report"]
