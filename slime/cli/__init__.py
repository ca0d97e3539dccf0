"""The subcommands of `slime`, a module each."""

#: Commands that train → the loop that they enter.
ENTRIES = {"train": "train", "train-async": "train_async"}
