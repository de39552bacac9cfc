"""Slurm, which gives a run its nodes, and takes them away again.

In: the environment of a job, and what Slurm's own programs print. Out: the job's nodes, why and when they are taken
away, and the script of a job that runs distlaunch. Pure, except that `calls` runs those programs.
"""
