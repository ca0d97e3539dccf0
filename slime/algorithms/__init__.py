"""Algorithms as pure functions of numbers and tensors. No flags, no process groups, no model.

rewards ─► `baseline` ─► `advantages` ─► `losses` ─► `reduce` ─► one number to differentiate
                          `kl` ──┴──────────┘

`estimators` has a row per ``--advantage-estimator``, which names its functions. `logprobs` computes
log-probs without holding the logits of all tokens.

Token tensors are either lists with one tensor per sample (whole rollout: `advantages`) or flat: the
response tokens of a micro-batch, concatenated over samples (`losses`, `reduce`).
"""
