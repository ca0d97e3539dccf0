"""Generate, train, save, push weights, evaluate, in lock step. The loop itself: slime/loop.py."""

from slime.__main__ import run

if __name__ == "__main__":
    run("train")
