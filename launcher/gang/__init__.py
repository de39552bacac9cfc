"""The life cycle of a cluster, as the pure function `decide.decide`.

In: the state of an attempt and one event. Out: the next state, and the actions that follow.
"""
