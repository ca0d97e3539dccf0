"""One half of the loop alone: engines that write dumps, trainers that read them; and what a NaN
leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.files import read_lines
from tests.support.processes import ROOT, World, start

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("debug"))


def without(world: World, *libraries: str) -> dict[str, str]:
    """An environment in which these cannot be imported."""
    folder = world.inputs / "-".join(["without", *libraries])
    for name in libraries:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} was imported')")
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.fixture(scope="module")
def dumps(world: World) -> str:
    """Two rollouts and three evaluations, written by engines alone, with the flags of a whole run
    and without Megatron."""
    pattern = str(world.outputs / "dumps" / "{rollout_id:04d}.pt")
    whole = ("--save", world.outputs / "engines" / "checkpoints", "--lr", 1e-4, "--use-tis")
    evaluation = ("--eval-prompt-data", "held", world.inputs / "test.jsonl", "--eval-interval", 1)
    alone = ("--debug-rollout-only", "--save-debug-rollout-data", pattern)
    flags = world.flags("engines", *alone, *whole, *evaluation)
    run = start(flags, world.outputs / "engines", **without(world, "megatron"))
    try:
        assert run.end() == 0, run.stderr
    finally:
        run.clean_up()
    assert logs(run.path, "trainer") == [] and logs(run.path, "engine")
    written = sorted(path.name for path in (world.outputs / "dumps").iterdir())
    assert written == ["0000.pt", "0001.pt", "eval_0000.pt", "eval_0001.pt", "eval_start.pt"]
    assert not any(name.startswith("train/") for row in run.rows() for name in row)
    assert run.rows()[-1]["perf/engine_memory_gb"] > 0
    return pattern


def logs(path: Path, who: str) -> list[str]:
    return [file.name for file in (path / "logs").glob(f"{who}*.log")]


def poisoned(args: Any, rollout_data: dict[str, Any]) -> None:
    """Advantages of one sample of the second rollout whose products float32 cannot hold."""
    rollout_data["advantages"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]
    for index, values in zip(rollout_data["sample_indices"], rollout_data["advantages"]):
        if index == 11:
            values.fill_(3e38)


def replay(world: World, name: str, dumps: str, *more: object) -> Any:
    flags = world.flags(name, "--load-debug-rollout-data", dumps, "--use-tis", "--lr", 1e-4, *more)
    return start(flags, world.outputs / name, **without(world, "sglang", "sglang_router"))


def test_trainers_alone_repeat_a_dump_at_any_layout(world: World, dumps: str) -> None:
    rows = []
    for name, layout in {
        "alone": (),
        "tensor": ("--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2),
    }.items():
        run = replay(world, name, dumps, *layout)
        try:
            assert run.end() == 0, run.stderr
        finally:
            run.clean_up()
        assert logs(run.path, "engine") == [] and logs(run.path, "trainer")
        rows.append([row for row in run.rows() if "train/loss" in row])
        assert len(list((run.path / "samples").glob("rollout_*.jsonl"))) == 2
        for path in (run.path / "samples").glob("rollout_*.jsonl"):
            lengths = {row["index"]: row["response_length"] for row in read_lines(path)}
            trained = read_lines(path.with_name(path.name.replace("rollout", "trained")))
            assert {row["index"]: len(row["log_prob_diffs"]) for row in trained} == lengths
            assert max(abs(diff) for row in trained for diff in row["log_prob_diffs"]) < 1e-3
    for one, two in zip(*rows, strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)
        assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-3)
        for name in ("forward_backward_peak", "trainer", "rollout", "driver", "host_free"):
            assert one[f"perf/{name}_memory_gb"] > 0


def test_nan_leaves_the_step_in_the_crash_folder(world: World, dumps: str) -> None:
    hook = "tests.loop.test_debug_modes.poisoned"
    run = replay(world, "nan", dumps, "--custom-advantage-function-path", hook)
    try:
        assert run.end() == 2, run.stderr
    finally:
        run.clean_up()
    said = "\n".join(run.error())
    assert "training stopped at rollout 1, step 0: NaN or Inf" in said
    [folder] = (run.path / "crash").iterdir()
    for name in ("samples.jsonl", "step.json", "step.pt"):
        assert str(folder / name) in said
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples[0]["prompt"] and len(samples) == 8
    details = json.loads((folder / "step.json").read_text())
    assert details["parameters_not_finite"] or details["micro_batches_not_finite"]
    assert torch.load(folder / "step.pt")["rollout_id"] == 1
