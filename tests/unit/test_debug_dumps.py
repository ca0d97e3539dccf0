"""Dumps of rollouts and of training tensors: the same dump trains alike at every layout."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config, parse_args
from slime.errors import UserError
from slime.paths import fill
from slime.prompts.source import PromptSource
from slime.rollout.debug_data import check_dumps, load_rollout, save_rollout
from slime.rollout.sft import data_rollout, generate_sft
from slime.samples.convert import to_train_batches
from slime.samples.types import Sample, SampleStatus, TokenSpan
from slime.trainer.dumps import RankDump, save_train_data
from tests.support.megatron_jobs import FOUR_LAYERS, make_model
from tests.support.prompt_fixtures import make_tokenizer, write_jsonl
from tests.support.tiny_models import save_moe
from tests.support.trainer_ranks import Pools, trainer_config

#: Metrics that tell of the layout itself: seconds; tokens of experts, as samples in one micro-batch
#: share their prompt.
BY_LAYOUT = ("perf/", "train/moe_")
COMMON: dict[str, Any] = {
    "num_steps_per_rollout": 2,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 48,
    "lr": 0.02,
    "optimizer": "sgd",
    "rollout_temperature": 0.8,
}
POLICY: dict[str, Any] = {
    **COMMON,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 3,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_tis": True,
}
SUPERVISED: dict[str, Any] = {
    **COMMON,
    "rollout_batch_size": 6,
    "n_samples_per_prompt": 1,
    "loss_type": "sft_loss",
    "max_tokens_per_gpu": 160,
}


def dumped(pattern: str) -> None:
    """Two rollouts of 4 prompts with 3 samples each; masks, log-probs, one removed and one
    truncated sample."""
    generator = torch.Generator().manual_seed(3)

    def numbers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    index = 0
    for rollout_id in range(2):
        samples = []
        for group in range(4):
            prompt = numbers(2, 90, 4 + 3 * group)
            for _ in range(3):
                [length] = numbers(3, 14, 1)
                mask = [1, *numbers(0, 2, length - 1)]
                samples.append(
                    Sample(
                        group_index=group,
                        index=index,
                        tokens=prompt + numbers(2, 90, length),
                        response_length=length,
                        reward=float(index % 3),
                        loss_mask=mask,
                        rollout_log_probs=[-x / 20 for x in numbers(1, 80, length)],
                        status=SampleStatus.TRUNCATED if index % 5 == 4 else SampleStatus.COMPLETED,
                        token_spans=[TokenSpan(0, length, rollout_id)],
                        remove_sample=index % 7 == 6,
                    )
                )
                index += 1
        save_rollout(pattern, rollout_id, samples)


def dumped_answers(pattern: str, folder: Path) -> None:
    """Two supervised rollouts as a run dumps them: conversations of several turns, of which the
    answers are trained."""
    rows = [
        {
            "prompt": [
                {"role": "user", "content": f"{i} and {'more of it ' * (i % 4)}?"},
                {"role": "assistant", "content": "yes" * (1 + i % 3)},
                {"role": "user", "content": "sure?"},
                {"role": "assistant", "content": f"as sure as {i}"},
            ]
        }
        for i in range(12)
    ]
    data = write_jsonl(folder / "sft.jsonl", rows)
    config = make_config(
        **SUPERVISED,
        num_rollout=2,
        prompt_data=data,
        input_key="prompt",
        apply_chat_template=True,
        save_debug_rollout_data=pattern,
        eval_prompt_data=("held-out", data),
    )
    tokenizer = make_tokenizer()
    source = PromptSource(config, tokenizer)
    for rollout_id in range(2):
        asyncio.run(data_rollout(generate_sft, config, source, tokenizer, rollout_id))


@dataclass(frozen=True)
class Kind:
    """What is replayed: a model, flags, the pattern of its dumps."""

    model: Path
    flags: dict[str, Any]
    pattern: str


def replay_job(info: Any, kind: Kind, layout: dict[str, Any], train_pattern: str | None) -> Any:
    """Train on both dumps, from the file to the weights: load, convert, pack for this layout,
    update."""
    from slime.trainer.megatron.backend import MegatronBackend

    flags = {
        **kind.flags,
        "hf_checkpoint": str(kind.model),
        "load_debug_rollout_data": kind.pattern,
        "save_debug_train_data": train_pattern,
        "actor_num_gpus_per_node": info.world_size,
        **layout,
    }
    config = trainer_config(**flags)
    backend = MegatronBackend(config, info)
    backend.setup()
    metrics, tokens = [], []
    for rollout_id in range(2):
        batches = to_train_batches(
            load_rollout(config, rollout_id), config, backend.layout, rollout_id
        )
        batch = batches[backend.data_parallel_rank]
        batch.recorded = frozenset(
            key for other in batches for key in map(other.key, range(other.num_samples))
        )
        metrics.append(backend.train(batch))
        tokens.append(backend.trained_tokens)
    shown = [{k: v for k, v in m.items() if not k.startswith(BY_LAYOUT)} for m in metrics]
    return backend.is_reporting_rank, shown, tokens


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    folder = tmp_path_factory.mktemp("replay")
    policy, answers = (str(folder / name / "{rollout_id:03d}.pt") for name in ("dumps", "answers"))
    dumped(policy)
    dumped_answers(answers, folder)
    dense = make_model(folder / "model", **FOUR_LAYERS)
    return {
        "policy": Kind(dense, POLICY, policy),
        "experts": Kind(save_moe(folder / "experts"), POLICY, policy),
        "supervised": Kind(
            make_model(folder / "chat", vocab_size=len(make_tokenizer())), SUPERVISED, answers
        ),
    }


Alone = Callable[[str], tuple[list[dict[str, float]], str]]


@pytest.fixture(scope="module")
def alone(ranks: Pools, kinds: dict[str, Kind], tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Kind → one process's metrics of both rollouts, and where its training tensors are."""

    @cache
    def result(name: str) -> tuple[list[dict[str, float]], str]:
        pattern = str(tmp_path_factory.mktemp("alone") / "{rollout_id}_{rank:02d}.pt")
        return ranks.run(1, replay_job, kinds[name], {}, pattern)[0][1], pattern

    return result


TP2, PP2, CP2 = (
    {f"{kind}_size": 2}
    for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
)
SP, EP2 = (
    {"sequence_parallel": True},
    {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
)
STATIC = {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None}
#: (kind, processes, flags, data-parallel ranks that come out).
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "tp2": ("policy", 2, TP2, 1),
    "tp2+sp": ("policy", 2, TP2 | SP, 1),
    "pp2": ("policy", 2, PP2, 1),
    "pp2, virtual stages": ("policy", 2, PP2 | {"num_layers_per_virtual_pipeline_stage": 1}, 1),
    "cp2": ("policy", 2, CP2, 1),
    "dp2": ("policy", 2, {}, 2),
    "one sample at a time": ("policy", 1, STATIC | {"micro_batch_size": 1}, 1),
    "two at a time, dp3": ("policy", 3, STATIC | {"micro_batch_size": 2}, 3),
    "all at once": ("policy", 1, {"max_tokens_per_gpu": 4096}, 1),
    "tp2 x pp2": ("policy", 4, TP2 | PP2, 1),
    "cp2 x dp2": ("policy", 4, CP2, 2),
    "experts, ep2": ("experts", 2, EP2, 2),
    "experts, tp2+sp x ep2": ("experts", 4, TP2 | SP | EP2, 2),
    "supervised, tp2+sp": ("supervised", 2, TP2 | SP, 1),
    "supervised, pp2": ("supervised", 2, PP2, 1),
    "supervised, cp2": ("supervised", 2, CP2, 1),
    "supervised, dp3, one at a time": ("supervised", 3, STATIC | {"micro_batch_size": 1}, 3),
}
#: Whose parts are among the others.
RARE = {
    *("tp2", "pp2", "dp2", "tp2 x pp2", "cp2 x dp2", "experts, tp2+sp x ep2", "all at once"),
    *("one sample at a time", "supervised, tp2+sp", "supervised, cp2"),
}
assert LAYOUTS.keys() > RARE


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.full] * (name in RARE)) for name in LAYOUTS]
)
def test_a_dump_trains_alike_at_every_layout(
    ranks: Pools, kinds: dict[str, Kind], alone: Alone, layout: str, tmp_path: Path
) -> None:
    kind, processes, flags, shards = LAYOUTS[layout]
    expected, expected_pattern = alone(kind)
    pattern = str(tmp_path / "train_{rollout_id:x}.pt")
    results = ranks.run(processes, replay_job, kinds[kind], flags, pattern)
    [metrics] = [found for reports, found, _ in results if reports]
    for ours, theirs in zip(metrics, expected, strict=True):
        assert abs(theirs["train/loss"]) > 1e-3, "of nothing any layout makes nothing"
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert metrics[0]["train/loss"] != pytest.approx(metrics[1]["train/loss"], abs=1e-3), (
        "another dump, other samples"
    )
    for rollout_id in range(2):
        mine, theirs = (torch.load(fill(p, rollout_id)) for p in (pattern, expected_pattern))
        assert len(mine["dp_shards"]) == shards and len(theirs["dp_shards"]) == 1
        assert mine["raw_reward"] == theirs["raw_reward"]
        for a, b in zip(mine["samples"], theirs["samples"], strict=True):
            assert a.keys() == b.keys()
            for name, value in b.items():
                if isinstance(value, torch.Tensor):
                    assert torch.allclose(a[name].float(), value.float(), atol=1e-5), name
                else:
                    assert a[name] == value, name
        trained = {one.key: one for _, _, tokens in results for one in tokens[rollout_id]}
        assert len(trained) == sum(len(tokens[rollout_id]) for _, _, tokens in results), (
            "each from one rank"
        )
        known = [sample for sample in mine["samples"] if "rollout_log_probs" in sample]
        assert len(trained) == len(known) == (0 if kind == "supervised" else 12)
        for sample in known:
            one = trained[sample["sample_index"], sample["total_length"], sample["response_length"]]
            assert one.advantages == pytest.approx(sample["advantages"].numpy())
            assert one.log_prob_diffs == pytest.approx(
                (sample["log_probs"] - sample["rollout_log_probs"]).numpy()
            )


def test_what_a_training_dump_holds(alone: Alone) -> None:
    record = torch.load(fill(alone("policy")[1], 1))
    assert record["format_version"] == 2 and record["rollout_id"] == 1
    indices = [sample["sample_index"] for sample in record["samples"]]
    assert indices == list(range(12, 24)) and len(record["raw_reward"]) == 12
    [shard] = record["dp_shards"]
    assert len(shard["steps"]) == 2
    in_steps = [
        position for step in shard["steps"] for micro_batch in step for position in micro_batch
    ]
    assert sorted(in_steps) == list(range(12)) and sorted(shard["sample_indices"]) == indices
    sample = record["samples"][0]
    per_token = {
        "loss_mask", "log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns",
        "kl"
    }  # fmt: skip
    assert per_token <= sample.keys()
    assert all(sample[name].shape == (sample["response_length"],) for name in per_token)
    assert sample["tokens"].dtype == torch.int64 and sample["weight_version"] == 1
    removed = [s for s in record["samples"] if s["sample_index"] % 7 == 6]
    assert removed and all(not s["loss_mask"].any() for s in removed)


def test_a_file_of_training_data_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = RankDump(0, [{"sample_index": 0, "raw_reward": 1.0}], [[[0]]])
    path = save_train_data(str(tmp_path / "new" / "{rollout_id}.pt"), 4, [shard])
    assert path.name == "4.pt" and torch.load(path)["samples"] == shard.samples

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError):
        save_train_data(str(tmp_path / "new" / "{rollout_id}.pt"), 4, [shard])
    assert torch.load(path)["rollout_id"] == 4


def test_training_alone_needs_something_to_train_on() -> None:
    flags = ["--rollout-batch-size=2", "--num-rollout=1", "--hf-checkpoint=m", "--debug-train-only"]
    with pytest.raises(UserError, match="--debug-train-only has nothing to train on") as caught:
        parse_args([*flags, "--prompt-data=p"])
    assert "--load-debug-rollout-data" in caught.value.fix
    assert parse_args(
        [*flags, "--load-debug-rollout-data=d/{rollout_id}.pt"]
    ).debug.debug_train_only
    assert parse_args([*flags, "--prompt-data=p", "--loss-type=sft_loss"]).debug.debug_train_only


def test_dumps_that_are_missing_are_named_before_anything_starts(tmp_path: Path) -> None:
    pattern = str(tmp_path / "data_{rollout_id:04d}.pt")
    for rollout_id in (3, 4, 5):
        save_rollout(pattern, rollout_id, [])

    def check(**flags: Any) -> None:
        check_dumps(make_config(**{"load_debug_rollout_data": pattern, **flags}))

    check(start_rollout_id=3, num_rollout=6)
    check(load="elsewhere", num_rollout=5)
    for flags in ({"num_rollout": 6}, {"num_rollout": 7, "start_rollout_id": 3}):
        with pytest.raises(
            UserError, match=r"there is no rollout dump .*data_000[06].pt"
        ) as caught:
            check(**flags)
        assert (
            "3 files match the pattern: data_0003.pt to data_0005.pt" in caught.value.why
            and "--start-rollout-id" in caught.value.fix
        )
    with pytest.raises(UserError, match="no rollout dump") as caught:
        check(load_debug_rollout_data=str(tmp_path / "dump_{rollout_id:04d}.pt"), num_rollout=6)
    assert "its directory holds: data_0003.pt, data_0004.pt" in caught.value.why
