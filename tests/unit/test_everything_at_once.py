"""Several mistakes at once: `slime doctor` and `slime train` report all of them, in the same
words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.cli import train as train_command
from slime.diagnosis.doctor import as_error, examine
from slime.errors import UserError
from tests.support.processes import World
from tests.support.prompt_fixtures import write_jsonl


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("at-once"))


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "RAY_", "WANDB_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


class Mistakes:
    """Flags on top of those of a run, and those that are left out."""

    def __init__(self, world: World) -> None:
        self.world, self.added, self.left_out = world, list[object](), set[str]()

    def add(self, *flags: object) -> None:
        self.added += flags

    def leave_out(self, *flags: str) -> None:
        self.left_out |= {*flags}

    def rows(self, *rows: object) -> None:
        self.add("--prompt-data", write_jsonl(self.world.inputs / "rows.jsonl", list(rows)))

    def config(self, **changes: object) -> None:
        path = self.world.inputs / "model" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    @property
    def argv(self) -> list[str]:
        kept, skipping = [], False
        for word in self.world.flags("examined"):
            skipping = word in self.left_out if word.startswith("--") else skipping
            kept += [] if skipping else [word]
        return [*kept, *map(str, self.added)]


def always_raises(args: object, sample: object, **_: object) -> float:
    raise ValueError("a bug in the reward")


#: What is done → what is said of it. No two of them are about the same flag.
KNOWN: dict[str, tuple[Callable[[Mistakes], object], str]] = {
    "length": (lambda m: m.leave_out("--num-rollout"), "--num-rollout is required"),
    "unknown flag": (lambda m: m.add("--temperature", "0.7"), "there is no flag --temperature"),
    "misspelt flag": (lambda m: m.add("--weight-deccay", "0"), "there is no flag --weight-deccay"),
    "bad value": (lambda m: m.add("--lr", "fast"), "--lr must be a number"),
    "batch sizes": (
        lambda m: m.add("--num-steps-per-rollout", "3"),
        "the batch sizes do not divide",
    ),
    "precision": (lambda m: m.add("--fp16"), "--fp16 and --fp32 cannot be chosen"),
    "no effect": (lambda m: m.add("--opsm-delta", "0.3"), "--opsm-delta has no effect"),
    "range": (lambda m: m.add("--gamma", "2"), "--gamma is 2"),
    "layout": (lambda m: m.add("--tensor-model-parallel-size", "2"), "cannot be divided by 2"),
    "not supported": (
        lambda m: m.add("--teacher-port", "1"),
        "the Megatron teacher server is not in this version",
    ),
    "data": (lambda m: m.add("--prompt-data", "nowhere.jsonl"), "nowhere.jsonl"),
    "evaluation": (
        lambda m: m.add("--eval-prompt-data", "held-out", "nothing.jsonl"),
        "nothing.jsonl",
    ),
    "hook": (lambda m: m.add("--custom-generate-function-path", "nowhere.generate"), "nowhere"),
    "checkpoint": (lambda m: m.add("--load", "no-checkpoint"), "no-checkpoint"),
    "folder": (lambda m: m.add("--save", "/dev/null/checkpoints"), "/dev/null/checkpoints"),
    "weights": (
        lambda m: (m.world.inputs / "model" / "model.safetensors").unlink(),
        "no weights in",
    ),
    "context": (lambda m: m.config(max_position_embeddings=4), "the model's context of 4 tokens"),
    "ray": (lambda m: m.add("--ray-address", "127.0.0.1:9"), "no Ray cluster answers"),
}
#: A reward is tried on the data alone, without a generate function.
REWARD = {
    "reward": (
        lambda m: m.add("--custom-rm-path", f"{__file__}:always_raises"),
        "a bug in the reward",
    )
}


@given(names=st.sets(st.sampled_from([*KNOWN, *REWARD]), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
def test_all_mistakes_are_told_by_both_and_alike(
    names: set[str], original: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # needs rows, and is not tried where a generate function makes the samples
    if "reward" in names:
        names -= {"data", "hook"}
    folder = tmp_path_factory.mktemp("world")
    world = World(Path(shutil.copytree(original.inputs, folder / "inputs")), folder / "outputs")
    mistakes, said = Mistakes(world), []
    for name in sorted(names):
        plant, words = (KNOWN | REWARD)[name]
        plant(mistakes)
        said.append(words)
    by_doctor = [str(as_error(one)) for one in examine(mistakes.argv).findings if one.is_fatal]
    with pytest.raises(UserError) as caught:
        train_command.main(mistakes.argv) if _is_refused_by_flags(mistakes) else _launch(mistakes)
    by_train = [str(error) for error in caught.value.errors or (caught.value,)]
    for words in said:
        assert any(words in one for one in by_doctor), (words, by_doctor)
        assert any(words in one for one in by_train), (words, by_train)
    assert sorted(by_train) == sorted(by_doctor)
    assert not (folder / "outputs").exists(), "nothing is begun"


def _is_refused_by_flags(mistakes: Mistakes) -> bool:
    from slime.config.make import judge_args

    return bool(judge_args(mistakes.argv)[1])


def _launch(mistakes: Mistakes) -> None:
    """What a launch does first, without the imports of Ray."""
    from slime.config import parse_args
    from slime.diagnosis.doctor import preflight

    preflight(parse_args(mistakes.argv))
