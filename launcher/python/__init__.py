"""The Python interface: the names that `from launcher import …` provides.

In: a spec or its path, or a program. Out: a `RunReport` and, during the run, its events, logs and stacks.

Each run has its own controller process, like a run in the background; the user's process follows the run's files and
sends requests to the run's control socket. So the user's process keeps its signal handlers, environment, stdout and
children: a controller stops all leftover descendants, which would include processes that the user has started. Runs
also work in a thread, next to an event loop, after `import tensorflow`, and several at once. The controller stops the
run when the user's process is gone.

Comes after `commands`, which send requests to a run's controller, and before `cli`, which it does not need.
"""
