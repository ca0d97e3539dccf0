"""The two loops as prose: `train` (lock step) and `train_async` (generation one batch ahead)."""
