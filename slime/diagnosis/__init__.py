"""Find what is wrong with a machine, a set of flags or a run, and say what to do about it.

The commands are `slime doctor`, `slime align`, `slime explain` and `slime bundle`.
"""
