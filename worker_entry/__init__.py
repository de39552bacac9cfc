"""The node side: standard library only, Python 3.9 or newer; it never imports `launcher`.

`agent` owns a node's processes, `task` runs the user's program; both use `protocol` and `system`. Users' programs may
import `progress` and `strategies`.
"""
