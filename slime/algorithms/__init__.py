"""Algorithms as pure functions of numbers and tensors. No flags, no process groups, no model.

rewards ─► `baseline` ─► `advantages` ─► `losses` ─► `reduce` ─► one number to differentiate
                          `kl` ──┴──────────┘

Which functions an ``--advantage-estimator`` is made of is its row in `estimators`; a new one is a
row, and a function for what is new about it. `logprobs` computes log-probs without logits.

Token tensors are either a list with one entry per sample (whole rollout: `advantages`) or flat, the
response tokens of a micro-batch one sample after the other (`losses`, `reduce`).
"""
