"""The cluster spec, in which users describe a cluster.

In: a YAML file, or a command line. Out: a frozen `ClusterSpec`, or every error with its file, line, column and field.
Pure, except that `loading`, `command_line` and `writing` read or write files.
"""
