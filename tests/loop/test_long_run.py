"""Two thousand asynchronous steps with a loss every hundred: what lives through them does not
grow."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import psutil
import pytest

from tests.support.processes import Driver, StartHeld, World, wait_until, wait_while_running

pytestmark = pytest.mark.full

_STEPS, _EVERY = 2000, 100
#: From this step on: caches of compiled products, of connections and of modules are full by then.
_SETTLED = 600
_VICTIMS = ("slime.embedded", "sglang::router", "ray::TrainerActor")
_LASTING = {
    "driver": "train_async.py",
    "rollout actor": "ray::RolloutActor",
    "raylet": "raylet/raylet",
}
#: That a thousand steps may bring: rows of metrics that alarms look at, and what an allocator
#: keeps.
_MAX_MB, _MAX_DESCRIPTORS, _MAX_THREADS = 40.0, 12, 8
_STEP_SECONDS = 600.0


def test_nothing_grows(tmp_path: Path, start_held: StartHeld) -> None:
    world = World.create(tmp_path)
    words = world.resumable(
        "long", "--num-rollout", _STEPS, "--save-interval", 50, "--save-retain", 2
    )
    words += [
        "--no-colocate", "--use-fault-tolerance", "--max-restarts", 99, "--rollout-batch-size", 2
    ]  # fmt: skip
    driver = start_held(list(map(str, words)), world.outputs / "long", "train_async.py")
    victims, seen = itertools.cycle(_VICTIMS), dict[int, dict[str, list[float]]]()
    for step in range(_EVERY, _STEPS, _EVERY):
        wait_while_running(
            driver, lambda step=step: steps(driver) >= step, f"step {step}", _STEP_SECONDS
        )
        seen[step] = held(driver)
        print(step, json.dumps(seen[step]), flush=True)
        for process in driver.family(next(victims)):
            process.kill()
    wait_until(lambda: driver.process.poll() is not None, "the end", _STEP_SECONDS)
    assert driver.end() == 0, driver.stderr[-3000:]
    assert driver.steps() == list(range(1, _STEPS + 1)), "each once"
    first, last = seen[_SETTLED], seen[max(seen)]
    thousands = (max(seen) - _SETTLED) / 1000
    for name in _LASTING:
        grown = [(after - before) / thousands for before, after in zip(first[name], last[name])]
        assert grown[0] < _MAX_MB and grown[1] < _MAX_DESCRIPTORS and grown[2] < _MAX_THREADS, (
            name,
            seen,
        )
    assert last["shared memory"][0] <= first["shared memory"][0] + 1, seen
    driver.leaves_nothing()


def steps(driver: Driver) -> int:
    """The last one that was logged, without reading all of them."""
    path = driver.path / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().decode().splitlines()
    return max((json.loads(line)["step"] for line in lines[1:] if line.endswith("}")), default=0)


def held(driver: Driver) -> dict[str, list[float]]:
    """By name: MB of its own, descriptors and threads; blocks in /dev/shm."""
    found: dict[str, list[float]] = {
        "shared memory": [float(len(list(Path("/dev/shm").glob("slime-weights-*"))))]
    }
    for name, words in _LASTING.items():
        process = (
            psutil.Process(driver.process.pid) if name == "driver" else driver.family(words)[0]
        )
        memory = process.memory_info()
        found[name] = [
            (memory.rss - memory.shared) / 1e6,
            float(process.num_fds()),
            float(process.num_threads()),
        ]
    return found
