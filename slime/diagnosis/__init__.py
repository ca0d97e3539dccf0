"""Find what is wrong with a machine, a set of flags or a run, and say what to do.

`slime doctor`, `slime align`, `slime explain`.
"""
