"""Storm: whole runs from a seed. The controller is the real one; its nodes, their programs and the time are simulated.

A seed makes a scenario: a spec, a program and a script of faults. `world` plays it and checks invariants at each step.
A scenario that breaks one is shrunk to the fewest faults, and written as a history that becomes a test.

`scenarios` (what may happen) < `simulation` (time) < `tasks` < `machines` (nodes and agents) < `links` (connections) <
`controllers` (the real supervisor) < `faults` < `world` (plays a scenario) < `invariants` < `shrinking`.
"""
