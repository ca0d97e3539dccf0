"""The subcommands of `slime`, one module each."""

#: Training command → the loop that it runs.
ENTRIES = {"train": "train", "train-async": "train_async"}
