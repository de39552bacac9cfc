"""Whether a launcher names the task that broke a cluster, the cause and the line: faults with a known truth.

`faults` is the table of them; `tools` has the launchers, and how the verdict of each is read; `play` runs one fault
under one launcher; `score` compares the verdict with the truth; `tables` has the rows of the documents; `benchmark`
is `python -m tests.benchmarks verdicts`.
"""
