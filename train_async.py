"""Like train.py with generation one batch ahead of training. The loop itself: slime/cli/train_async.py."""

from slime.__main__ import run

if __name__ == "__main__":
    run("train-async")
