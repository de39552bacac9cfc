"""Storm: whole runs from a seed. The controller is the real one; nodes, programs and time are simulated.

In a whole scenario, agents and links are the real ones too, and what is simulated is below them: kernels and bytes.

A seed makes a scenario: a spec, a program and a script of faults. `world` plays it and checks invariants at each step.
A scenario that breaks one is shrunk to the fewest faults, and written as a history that becomes a test.

`scenarios` (what may happen) < `simulation` (time and threads) < `tasks` < `machines` (with model agents) < `links`
(model connections) or `kernels` < `agents` < `streams` (below the real ones) < `controllers` (the real supervisor) <
`faults` < `world` (plays a scenario) < `invariants` < `shrinking` < `many` (what a large run costs).
"""
