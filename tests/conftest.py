"""What tests of several folders share: toy models, one local Ray, and ``run(*flags)``, a driver in
this process."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch counts the cores: threads of processes that share the cores wait for each other in
# busy loops.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# also the threads of tests that ask for several
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Doctor warns of it, and every launch of a test would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from benchmarks.toy_models import FAMILIES
from slime.processes.garbage import freeze_gc
from tests.support import toy
from tests.support.forks import servers_as_forks
from tests.support.processes import Driver, StartHeld, start
from tests.support.runs import GRPO, Run, RunResult

#: What is imported stays. Until all tests are collected, each search for garbage would look through
#: ever more of it.
gc.disable()

#: How long an example takes says more of the machine than of the code. The same examples in each
#: `make test`: a change fails by what it does. `make test-full` draws others.
#: One failure is enough: the search for others took ten minutes in a process with all tests.
_COMMON = {"deadline": None, "report_multiple_bugs": False}
_PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
hypothesis.settings.register_profile("same", derandomize=True, **_COMMON)
hypothesis.settings.register_profile("random", **_COMMON)
hypothesis.settings.load_profile(_PROFILE)

#: It draws constants of all imported modules of ours, too: examples would depend on which tests ran
#: before, and in a new clone it parses every module for ten CPU seconds.
if _PROFILE == "same" and {"_get_local_constants", "_local_constants"} <= vars(providers).keys():
    providers._get_local_constants = lambda: providers._local_constants


#: Nothing here loses its power, and a disk takes 14 ms to make a file last.
os.fsync = lambda file: None


def pytest_collection_finish() -> None:
    """Thousands of tests stay to the end, and a collection that visits them takes half a second. A
    tenth of the time of all tests went into collections after every 700 new objects."""
    freeze_gc(many_samples=True)
    gc.enable()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """Folder that `tests.support.hold` looks at."""
    return tmp_path


@pytest.fixture
def start_held(hold: Path) -> Iterator[StartHeld]:
    """``start_held(flags, run folder, script)``: a driver that obeys ``hold``, killed at the end if
    need be."""
    drivers: list[Driver] = []

    def begin(
        flags: list[str],
        path: Path,
        script: str = "train.py",
        streams: tuple[int, int] | None = None,
        **environment: str,
    ) -> Driver:
        environment["SLIME_TEST_HOLD"] = str(hold)
        drivers.append(start(flags, path, script, streams=streams, **environment))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.clean_up()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of toy models by family."""
    folder = tmp_path_factory.mktemp("models")
    return {family: toy.write_model(folder / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_data(tmp_path_factory.mktemp("data") / "sums.jsonl")


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """One local Ray for all runs of this process: drivers find it and leave it as it is."""
    import ray

    from slime.cluster.ray_session import start_ray
    from slime.config import make_config

    assert start_ray(make_config(), num_local_slots=4)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def run(
    ray_here: None, models: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """``run(name, *flags, driver=…, model=…)``: run a driver to its end on the toy world; flags
    override its own.

    Runs of one name share a run folder, so that a second one may resume the first.
    """
    outputs = tmp_path_factory.mktemp("outputs")

    def run_driver(
        name: str, *flags: object, driver: str = "train", model: str = "qwen3"
    ) -> RunResult:
        from slime.cli import train

        precision = [] if "--bf16" in flags else ["--fp32"]
        path = outputs / name
        base = ["--hf-checkpoint", models[model], "--prompt-data", data, "--input-key", "prompt"]
        base += [
            "--label-key",
            "label",
            *precision,
            "--seed",
            1,
            "--rollout-seed",
            1,
            "--lr",
            "1e-2",
        ]
        base += [
            "--lr-decay-style", "constant", "--weight-decay", 0, "--rollout-max-context-len", 32
        ]  # fmt: skip
        base += [
            "--use-dynamic-batch-size",
            "--max-tokens-per-gpu",
            1024,
            "--output-dir",
            outputs,
            "--run-name",
            name,
        ]
        main = {"train": train.main, "train_async": train.main_async}[driver]
        main([str(word) for word in (*base, *flags)])
        lines = (path / "metrics.jsonl").read_text().splitlines()
        return RunResult(path, [json.loads(line) for line in lines])

    run_driver.outputs = outputs  # type: ignore[attr-defined]
    return run_driver


@pytest.fixture(scope="session")
def outputs(run: Any) -> Path:
    """Where run folders are."""
    return run.outputs


@pytest.fixture(scope="session")
def deterministic(outputs: Path) -> Callable[[str], list[object]]:
    """``deterministic(name)``: flags of a run whose samples can be compared with another run's, bit
    for bit."""

    def flags(name: str) -> list[object]:
        dumps = outputs / name / "dumps" / "{rollout_id}.pt"
        return [
            *GRPO,
            "--deterministic-rollout",
            "--rollout-shuffle",
            "--save-debug-rollout-data",
            dumps,
        ]

    return flags


@pytest.fixture(scope="session")
def resumable(outputs: Path) -> Callable[[str], list[object]]:
    """``resumable(name)``: --load and --save with the same directory, in the run folder."""
    return lambda name: [
        "--load",
        outputs / name / "checkpoints",
        "--save",
        outputs / name / "checkpoints",
    ]


@pytest.fixture(scope="session")
def unbroken(run: Run, deterministic: Any, resumable: Any) -> RunResult:
    """Six rollouts in one go, colocated, every second one saved: what other runs are compared
    with."""
    flags = ["--colocate", "--num-rollout", 6, "--save-interval", 2]
    return run("unbroken", *deterministic("unbroken"), *resumable("unbroken"), *flags)


@pytest.fixture(scope="session")
def first_half(run: Run, deterministic: Any, resumable: Any) -> RunResult:
    """The same with three rollouts, in another folder; only the newest checkpoint is kept, and
    copied aside."""
    flags = ["--colocate", "--num-rollout", 3, "--save-interval", 1, "--save-retain", 1]
    result = run("resumed", *deterministic("resumed"), *resumable("resumed"), *flags)
    shutil.copytree(result.path / "checkpoints", result.path.parent / "checkpoints-of-first-half")
    return result


@pytest.fixture(scope="module")
def sglang_stand_in() -> Iterator[None]:
    """For each test of a module that names it in its ``pytestmark``, SGLang is "installed" in this
    process."""
    from tests.support.sglang_servers import sglang_installed

    with sglang_installed():
        yield


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """Servers that a module's tests start in this process are forks."""
    with servers_as_forks():
        yield
