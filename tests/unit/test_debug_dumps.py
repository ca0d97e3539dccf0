"""Dumps of rollouts and of training tensors: the same dump trains alike at every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config, parse_args
from slime.errors import UserError
from slime.rollout.debug_data import load_rollout, save_rollout
from slime.samples.convert import to_train_batches
from slime.samples.types import Sample, SampleStatus, TokenSpan
from slime.trainer.dumps import Shard, save_train_data
from tests.support.megatron_jobs import make_model
from tests.support.trainer_ranks import Pools, trainer_config

FLAGS: dict[str, Any] = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 3,
    "num_steps_per_rollout": 2,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_tis": True,
    "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 48,
    "lr": 0.02,
    "optimizer": "sgd",
    "rollout_temperature": 0.8,
}


def dumped(pattern: str) -> None:
    """Two rollouts of 4 prompts with 3 samples each; masks, log-probs, one removed and one truncated sample."""
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


def replay_job(info: Any, model: Path, pattern: str, layout: dict[str, Any], train_pattern: str | None) -> Any:
    """Train on both dumps, from the file to the weights: load, convert, pack for this layout, update."""
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(
        **FLAGS,
        **layout,
        hf_checkpoint=str(model),
        load_debug_rollout_data=pattern,
        save_debug_train_data=train_pattern,
        actor_num_gpus_per_node=info.world_size,
    )
    backend = MegatronBackend(config, info)
    backend.setup()
    metrics = []
    for rollout_id in range(2):
        batches = to_train_batches(load_rollout(config, rollout_id), config, backend.layout, rollout_id)
        metrics.append(backend.train(batches[backend.data_parallel_rank]))
    return backend.is_reporting_rank, [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics]


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("replay")
    pattern = str(folder / "dumps" / "{rollout_id}.pt")
    dumped(pattern)
    return make_model(folder / "model"), pattern


@pytest.fixture(scope="module")
def alone(
    ranks: Pools, replay: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, float]], str]:
    """One process: metrics of both rollouts, and where its training tensors are."""
    pattern = str(tmp_path_factory.mktemp("alone") / "{rollout_id}.pt")
    return ranks.run(1, replay_job, *replay, {}, pattern)[0][1], pattern


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
        {"context_parallel_size": 2},
        {},
    ],
    ids=["tp2", "tp2+sp", "pp2", "pp2, virtual stages", "cp2", "dp2"],
)
def test_a_dump_trains_alike_at_every_layout(
    ranks: Pools,
    replay: tuple[Path, str],
    alone: tuple[list[dict[str, float]], str],
    layout: dict[str, Any],
    tmp_path: Path,
) -> None:
    pattern = str(tmp_path / "train_{rollout_id}.pt")
    [metrics] = [found for reports, found in ranks.run(2, replay_job, *replay, layout, pattern) if reports]
    for ours, theirs in zip(metrics, alone[0]):
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], abs=1e-5)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for rollout_id in range(2):
        mine, theirs = (torch.load(p.format(rollout_id=rollout_id)) for p in (pattern, alone[1]))
        assert len(mine["dp_shards"]) == (2 if not layout else 1) and len(theirs["dp_shards"]) == 1
        assert mine["raw_reward"] == theirs["raw_reward"]
        for a, b in zip(mine["samples"], theirs["samples"], strict=True):
            assert a.keys() == b.keys()
            for name, value in b.items():
                if isinstance(value, torch.Tensor):
                    assert torch.allclose(a[name].float(), value.float(), atol=1e-5), name
                else:
                    assert a[name] == value, name


def test_what_a_training_dump_holds(alone: tuple[list[dict[str, float]], str]) -> None:
    record = torch.load(alone[1].format(rollout_id=1))
    assert record["format_version"] == 2 and record["rollout_id"] == 1
    indices = [sample["sample_index"] for sample in record["samples"]]
    assert indices == list(range(12, 24)) and len(record["raw_reward"]) == 12
    [shard] = record["dp_shards"]
    assert len(shard["steps"]) == 2
    in_steps = [position for step in shard["steps"] for micro_batch in step for position in micro_batch]
    assert sorted(in_steps) == list(range(12)) and sorted(shard["sample_indices"]) == indices
    sample = record["samples"][0]
    per_token = {"loss_mask", "log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "returns", "kl"}
    assert per_token <= sample.keys()
    assert all(sample[name].shape == (sample["response_length"],) for name in per_token)
    assert sample["tokens"].dtype == torch.int64 and sample["weight_version"] == 1
    removed = [s for s in record["samples"] if s["sample_index"] % 7 == 6]
    assert removed and all(not s["loss_mask"].any() for s in removed)


def test_a_file_of_training_data_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard(0, [{"sample_index": 0, "raw_reward": 1.0}], [[[0]]])
    path = save_train_data(str(tmp_path / "new" / "{rollout_id}.pt"), 4, [shard])
    assert path.name == "4.pt" and torch.load(path)["samples"] == shard.samples

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError):
        save_train_data(str(tmp_path / "new" / "{rollout_id}.pt"), 4, [shard])
    assert torch.load(path)["rollout_id"] == 4
    with pytest.raises(UserError, match="no path pattern"):
        save_train_data(str(tmp_path / "{step}.pt"), 4, [shard])


def test_training_alone_needs_something_to_train_on() -> None:
    flags = ["--rollout-batch-size=2", "--num-rollout=1", "--hf-checkpoint=m", "--debug-train-only"]
    with pytest.raises(UserError, match="--debug-train-only has nothing to train on") as caught:
        parse_args([*flags, "--prompt-data=p"])
    assert "--load-debug-rollout-data" in caught.value.fix
    assert parse_args([*flags, "--load-debug-rollout-data=d/{rollout_id}.pt"]).debug.debug_train_only
    assert parse_args([*flags, "--prompt-data=p", "--loss-type=sft_loss"]).debug.debug_train_only


def test_details_have_a_folder_each() -> None:
    debug = make_config(dump_details="d").debug
    assert debug.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert debug.save_debug_train_data == "d/train_data/{rollout_id}.pt"
