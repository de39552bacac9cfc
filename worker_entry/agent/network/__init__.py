"""Tasks in a separate network namespace: how they are reached from outside, and how they reach the other nodes.

An agent that enters its own network leaves a process behind in the machine's network (`outer_process`), which makes
the sockets and does the checks that belong there. `relay` forwards TensorBoard's port. `tunnel` starts a process that
carries the tasks' connections to and from the other nodes, encrypted (`tunnel_process`).
"""
