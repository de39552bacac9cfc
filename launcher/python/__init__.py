"""The Python interface: what `from launcher import …` gives.

In: a spec or its path, or a program. Out: a `RunReport` and, while the run goes on, its events, logs and stacks.

Each run has a controller process of its own, as a run in the background has; this process follows the run's files and
asks at its control socket. So the user's process keeps its signal handlers, environment, stdout and children: a
controller stops all of its descendants that a run leaves, which would include what the user has started meanwhile. It
also works in a thread, beside an event loop and after `import tensorflow`, and several times at once. The controller
stops the run when this process is gone.

Comes after `commands`, which ask a run's controller, and before `cli`, which it does not need.
"""
