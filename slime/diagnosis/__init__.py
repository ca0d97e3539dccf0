"""What may be wrong with a machine, a set of flags or a run, and what to do.

`slime doctor`, `slime align`, `slime explain`.
"""
