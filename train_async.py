"""Like train.py with rollouts generated ahead of training. The loop itself: slime/loop.py."""

from slime.__main__ import run

if __name__ == "__main__":
    run("train-async")
