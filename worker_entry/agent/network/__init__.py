"""Tasks in a network of their own: what reaches them from outside, and how they reach the other nodes.

An agent that enters its own network leaves a process behind in the machine's network (`outer_process`), which makes
the sockets and does the checks that belong there. `relay` brings TensorBoard's port out. `tunnel` starts a process that
carries the tasks' connections to and from the other nodes, encrypted (`tunnel_process`).
"""
