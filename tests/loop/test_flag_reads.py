"""Who reads a flag, as recorded in toy runs: the process that it serves, and where its syntax tree
says so."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime.config.flag import FlagSpec
from tests.support.declarations import (
    ALL_WORKING,
    WORKING,
    files_that_read,
    names_of,
    worked_into_others,
)
from tests.support.flag_reads import (
    LAUNCHES,
    RECORDER,
    Read,
    is_warned_of,
    left_out,
    must_serve,
    recorded,
    rows_of,
    served,
    unclaimed,
)
from tests.support.processes import PATIENCE, ROOT, World

#: "flag: part" of what no toy run, or not each, can be seen to read, and why.
EXCEPTIONS = {
    "trust_remote_code: training": "the tokenizer is loaded where a step has failed",
    "fp32: trainer": "without GPUs attention is packed in one way, whatever the precision",
    "multimodal_keys: samples": "of samples that have images",
    "memory_plan: driver": "a plan is refused for GPUs alone, and where it does not fit",
    "offload_train: trainer": "without GPUs nobody takes turns",
    "update_weight_transport: engine": "SGLang is told of it where it holds quantised weights",
}


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("reads"))


@pytest.fixture(scope="module")
def reads_of_launch(world: World) -> Callable[[str], list[Read]]:
    """Each launch once, after the one whose files it goes on with."""
    known: dict[str, list[Read]] = {}

    def reads(name: str) -> list[Read]:
        if LAUNCHES[name].after:
            reads(LAUNCHES[name].after)
        if name not in known:
            known[name] = recorded(world, name)
        return known[name]

    return reads


def how(spec: FlagSpec, pairs: set[tuple[str, str]]) -> str:
    """By what it is shown that a flag is read.

    recorded: here. passed on: on the command line of engine or router, as
    `test_config_declarations` shows of each. handed on: in a dict that each trainer rank reads for
    Megatron, or that the driver compares with the model. one value: there is nothing to choose.
    worked in: the configuration itself reads it. code: what it needs is in none of these runs, and
    only the syntax tree tells.
    """
    if spec.sections:
        return "passed on" if {"sglang", "router"} & set(spec.sections) else "handed on"
    if spec.dest not in WORKING:
        return "one value"
    if spec.dest in {dest for dest, _ in pairs}:
        return "recorded"
    return "worked in" if "config" in spec.meta.read_by else "code"


def missed(world: World, reads: dict[str, list[Read]]) -> set[str]:
    """ "flag: part" of what these launches must read, and none does."""
    wanted = {
        (pair, name) for name in reads for pair in must_serve(LAUNCHES[name].config(world, name))
    }
    seen = set().union(*map(served, reads.values()))
    return {
        f"{pair[0]}: {pair[1]}"
        for pair, name in wanted
        if pair not in seen and not is_warned_of(world, name, pair[0])
    }


def test_a_flag_is_read_in_the_process_that_it_serves(
    world: World, reads_of_launch: Callable[[str], list[Read]]
) -> None:
    reads = reads_of_launch("sync")
    assert missed(world, {"sync": reads}) - set(EXCEPTIONS) == set()
    assert unclaimed(reads) == set()
    dicts = {(read.name, read.process) for read in reads if read.owner == "megatron"}
    handed_on = {
        section
        for spec in ALL_WORKING.values()
        if how(spec, set()) == "handed on"
        for section in spec.sections
    }
    assert {
        (name, "driver" if name == "model" else "ray::TrainerActor") for name in handed_on
    } <= dicts


def test_looking_ahead_and_other_processes_serve_no_part() -> None:
    trainer = "ray::TrainerActor"
    read = Read(trainer, "trainer/megatron/optimizer.py", "megatron", "lr", by_name=False)
    assert served([read]) == {("lr", "training")} and unclaimed([read]) == set()
    assert (
        served(
            [
                replace(read, process="driver"),
                replace(read, process="driver", file="memory/plan.py"),
            ]
        )
        == set()
    )
    strange = replace(read, file="weights/sync.py")
    assert unclaimed([strange]) == {"lr: weights/sync.py"}
    loop = replace(strange, by_name=True)
    assert served([loop]) == unclaimed([loop]) == set()
    assert served(
        [Read("driver", "placement.py", "cluster", "actor_num_nodes", by_name=False)]
    ) == {("actor_num_nodes", "trainer")}


def test_what_copies_all_flags_is_no_read(tmp_path: Path) -> None:
    code = """
import copy, dataclasses, pickle
from slime.config import make_config
config = pickle.loads(pickle.dumps(make_config()))
args = pickle.loads(pickle.dumps(config.flat()))
dict(vars(args)), copy.deepcopy(config), copy.copy(args), repr(config), \
dataclasses.asdict(config), config.values()
config.save("config.json")
for name in ("lr", "seed"):
    getattr(args, name)
config.train.seed, config.sync.staleness, args.min_lr
"""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{RECORDER}:{ROOT}",
        "SLIME_TEST_READS": str(tmp_path / "reads"),
    }
    (tmp_path / "reads").mkdir()
    command = [sys.executable, "-c", f"exec({code!r}, {{'__name__': 'slime.loop'}})"]
    subprocess.run(command, env=environment, cwd=tmp_path, check=True, timeout=PATIENCE)
    reads = rows_of(tmp_path / "reads")
    assert {row["name"] for row in reads if row["by_name"]} == {"lr", "seed"}
    assert {row["name"] for row in reads if not row["by_name"]} == {
        "seed", "min_lr", "max_staleness", "async_buffer_size", "update_weights_interval",
    }  # fmt: skip


def test_how_each_flag_is_shown_to_be_read() -> None:
    world = World(Path("inputs"), Path("outputs"))
    pairs = set().union(
        *(must_serve(launch.config(world, name)) for name, launch in LAUNCHES.items())
    )
    shown = {dest: how(spec, pairs) for dest, spec in ALL_WORKING.items()}
    for dest, means in shown.items():
        if means == "worked in":
            assert names_of(WORKING[dest]) & worked_into_others(), dest
        elif means == "code":
            assert files_that_read(WORKING[dest]), dest
    assert len(EXCEPTIONS) <= 10
    count = Counter(shown.values())
    # six are flags of trackers whose packages are not installed where tests run, five of images,
    # one of critics with adapters, one of workers of rewards
    assert count["recorded"] >= 250 and count["code"] <= 25, count


@pytest.mark.full
def test_in_other_runs_too(world: World, reads_of_launch: Callable[[str], list[Read]]) -> None:
    reads = {name: reads_of_launch(name) for name in LAUNCHES}
    assert missed(world, reads) - set(EXCEPTIONS) == set()
    assert set().union(*map(unclaimed, reads.values())) == set()
    for name in LAUNCHES:
        config = LAUNCHES[name].config(world, name)
        acting = served(reads[name]) & set(must_serve(config))
        assert {dest for dest, _ in acting} & left_out(config) == set(), f"{name}: they are read"
    each = [missed(world, {name: reads[name]}) for name in LAUNCHES]
    assert set(EXCEPTIONS) <= set().union(*each), "these are read wherever they must be"
