"""The controller of distlaunch; programs import `distlaunch` (in `public`).

A run goes through the folders in this order: `spec` (the user's request), `plan` (the settings of each task), `gang`
(the life of the cluster), `verdict` (the cause of its end), `report` (the results). `controller` drives these steps
over `transports` and shows them on the `console`; `rundir` reads and writes the files of a run, `sources` finds its
nodes, and `exporters` shows the run to other programs. `commands` acts on nodes and runs outside of a run; `python` is
the interface for Python programs, and `cli` is the command line.
"""
