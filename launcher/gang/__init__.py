"""How a cluster lives and dies, as a pure function.

In: the state of an attempt and one event. Out: the next state, and the actions that follow: `decide.decide`.
"""
