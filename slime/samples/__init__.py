"""Samples: the records between rollout and training, the buffer, conversion to tensors and
packing."""
