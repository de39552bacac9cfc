"""What runs on a node: standard library only, Python 3.9 or newer; never imports `launcher`.

`agent` owns the processes of a node, `task` runs the user's program; both speak `protocol` and use `system`. Programs
may import `progress` and `strategies`.
"""
