"""What the user asks for: the cluster spec.

In: a YAML file, or a command line. Out: a frozen `ClusterSpec`, or every mistake with its file, line, column and field.
Pure, except that `loading` reads the file.
"""
