"""Pure deciders: what to send, read or run, in which order. Standard library and numpy only.

They take numbers and return numbers; the doers act on them, and the planner predicts with the same code.
"""
