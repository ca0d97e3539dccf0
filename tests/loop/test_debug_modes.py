"""One half of the loop alone: engines that write dumps, trainers that read them; and what a NaN leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import World, start

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("debug"))


@pytest.fixture(scope="module")
def dumps(world: World) -> str:
    """Two rollouts, written by engines alone."""
    pattern = str(world.outputs / "dumps" / "{rollout_id}.pt")
    run = start(
        world.flags("engines", "--debug-rollout-only", "--save-debug-rollout-data", pattern), world.outputs / "engines"
    )
    try:
        assert run.end() == 0, run.stderr
    finally:
        run.clean_up()
    assert logs(run.path, "trainer") == [] and logs(run.path, "engine")
    assert [Path(pattern.format(rollout_id=i)).is_file() for i in range(3)] == [True, True, False]
    assert not any(name.startswith("train/") for row in run.rows() for name in row)
    return pattern


def logs(path: Path, who: str) -> list[str]:
    return [file.name for file in (path / "logs").glob(f"{who}*.log")]


def poisoned(args: Any, rollout_data: dict[str, Any]) -> None:
    """Advantages of NaN for one sample of the second rollout."""
    rollout_data["advantages"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]
    for index, values in zip(rollout_data["sample_indices"], rollout_data["advantages"]):
        if index == 11:
            values.fill_(float("nan"))


def replay(world: World, name: str, dumps: str, *more: object) -> Any:
    return start(
        world.flags(name, "--load-debug-rollout-data", dumps, "--use-tis", "--lr", 1e-4, *more), world.outputs / name
    )


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
    for one, two in zip(*rows, strict=True):
        assert one["train/loss"] == pytest.approx(two["train/loss"], abs=1e-5)
        assert one["train/grad_norm"] == pytest.approx(two["train/grad_norm"], rel=1e-3)
        assert one["perf/forward_backward_peak_memory_gb"] > 0


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
    assert [s["sample_index"] for s in samples if "advantages" in s["not_finite"]] == [11]
    assert samples[0]["prompt"] and len(samples) == 8
    details = json.loads((folder / "step.json").read_text())
    assert details["parameters_not_finite"] and details["micro_batches_not_finite"][0]["loss"] == "nan"
    assert torch.load(folder / "step.pt")["rollout_id"] == 1
