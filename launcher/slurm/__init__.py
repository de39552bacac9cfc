"""Slurm, which allocates the nodes of a run and may take them away.

In: the environment of a job, and the output of Slurm's programs. Out: the job's nodes, why and when they are taken
away, and the script of a job that runs distlaunch. Pure, except that `calls` runs those programs.
"""
