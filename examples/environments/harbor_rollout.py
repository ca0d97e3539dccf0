"""The generate function for Harbor's tasks, and tasks for a small model: each asks for a letter in
a file."""

import random
from pathlib import Path

from slime.environments.harbor import HarborTasks
from slime.sandbox.sandbox import Limits, Sandbox

LIMITS = Limits(seconds=10, memory=256 << 20, file_bytes=1 << 20)
TASKS = HarborTasks(runner=Sandbox(LIMITS, walls="namespaces"), max_turns=3)
generate = TASKS.generate

_TOML = (
    '[task]\nname = "letters/write-{n}"\n\n[agent]\ntimeout_sec = '
    "120.0\n\n[verifier]\ntimeout_sec = 30.0\n"
)
_TEST = (
    'test "$(cat answer)" = {letter} && echo 1 > /logs/verifier/reward.txt || echo 0 > '
    "/logs/verifier/reward.txt\n"
)


def write_tasks(folder: Path, num_tasks: int) -> None:
    letters = random.Random(0).choices("wxyz", k=num_tasks)
    for n, letter in enumerate(letters):
        task = folder / f"write-{n}"
        for name in ("environment", "tests"):
            (task / name).mkdir(parents=True, exist_ok=True)
        (task / "task.toml").write_text(_TOML.format(n=n))
        (task / "instruction.md").write_text(f"Write {letter} to the file answer.\n")
        (task / "environment" / "Dockerfile").write_text("FROM debian:stable-slim\nWORKDIR /app\n")
        (task / "tests" / "test.sh").write_text(_TEST.format(letter=letter))
