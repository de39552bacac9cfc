"""The controller of distlaunch.

A run goes through the folders in this order: `spec` (what the user asks for), `plan` (what each task gets), `gang` (how
the cluster lives and dies), `verdict` (why it ended), `report` (what remains). `run` does this over `transports` and
shows it on the `console`; `commands` act on nodes and runs outside of a run; `cli` is what the user types.
"""
