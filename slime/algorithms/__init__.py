"""Algorithms as pure functions of tensors. No flags, no process groups, no model: a new algorithm is one function here
and one row in its table.

log-probs ─► `kl` ─► `advantages` ─► `losses` ─► `corrections` ─► `reduce` ─► one number to differentiate

Token tensors are either a list with one entry per sample (whole rollout: `advantages`) or flat, the response tokens of
a micro-batch one sample after the other (`losses`, `corrections`, `reduce`).
"""
