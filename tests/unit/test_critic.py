"""PPO's critic: the model, its steps, checkpoints and layouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.load_plan import resolve_load
from slime.errors import UserError
from slime.run.preflight import check_weights
from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.critic import critic_config
from slime.trainer.megatron.offload import Offloader
from tests.support import parity
from tests.support.critic_flags import TRAINING
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard, trainer_config
from tests.support.trainers import trainer

PPO: dict[str, Any] = {"advantage_estimator": "ppo", "critic_lr": 0.05}


def test_first_values_are_zero_and_the_advantages_those_without_a_critic() -> None:
    backend = trainer(**PPO)
    try:
        metrics = backend.train(make_batch())
        again = backend.train(make_batch())
    finally:
        backend.close()
    assert metrics["rollout/values"] == 0.0
    assert metrics["rollout/advantages"] == metrics["rollout/returns"]
    assert again["rollout/values"] != 0.0


# -- layouts ---------------------------------------------------------------------------------------

TP2, PP2, CP2, SP, VIRTUAL = parity.TP2, parity.PP2, parity.CP2, parity.SP, parity.VIRTUAL
LAYOUTS = [
    (2, 1, TP2 | SP),
    (2, 1, PP2 | VIRTUAL),
    pytest.param(2, 1, CP2, marks=pytest.mark.full),
    (2, 2, {}),
    pytest.param(2, 1, TP2, marks=pytest.mark.full),
    pytest.param(2, 1, PP2, marks=pytest.mark.full),
    pytest.param(4, 1, TP2 | SP | CP2, marks=pytest.mark.full),
    pytest.param(4, 2, PP2, marks=pytest.mark.full),
    pytest.param(4, 1, TP2 | PP2, marks=pytest.mark.full),
]


def critic_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    """Three rollouts: values of each sample before each, and all metrics."""
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(**TRAINING, **flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    assert backend.critic is not None
    batch = batches[backend.data_parallel_rank]
    values = []
    metrics = []
    for _ in range(3):
        metrics.append(backend.train(batch))
        values.append(backend.critic.outputs(batch))
    return {
        "samples": batch.sample_indices,
        "values": values,
        "metrics": [
            {k: v for k, v in m.items() if k.startswith(("train/critic", "rollout/"))}
            for m in metrics
        ],
        "reporting": backend.is_reporting_rank,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("qwen3", directory, layers=2)
    return directory


def batches_for(data_parallel: int) -> list[TrainBatch]:
    whole = make_batch(parity.MICRO_BATCHES)
    return [shard(whole, *plan) for plan in parity.DATA_PARALLEL[data_parallel]]


@pytest.mark.parametrize(("size", "data_parallel", "layout"), LAYOUTS)
def test_any_layout_trains_the_critic_of_one_process(
    size: int, data_parallel: int, layout: dict[str, Any], ranks: Pools, model: Path, deep: Path
) -> None:
    flags = {"hf_checkpoint": str(deep if VIRTUAL.items() <= layout.items() else model)}
    [alone] = ranks.once(1, critic_job, flags, batches_for(1))
    found = ranks.run(size, critic_job, flags | layout, batches_for(data_parallel))
    expected = dict(zip(alone["samples"], zip(*alone["values"])))
    seen = set()
    for rank in found:
        if rank["values"][0] is None:
            continue
        for sample, values in zip(rank["samples"], zip(*rank["values"])):
            seen.add(sample)
            for ours, theirs in zip(values, expected[sample]):
                assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0)
    assert seen == expected.keys()
    [reporting] = [rank for rank in found if rank["reporting"]]
    for ours, theirs in zip(reporting["metrics"], alone["metrics"]):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    last = alone["metrics"][-1]
    assert last["train/critic-explained_variance"] > 0.05 and last["rollout/kl"] != 0.0


# -- checkpoints -----------------------------------------------------------------------------------


def weights(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    assert backend.critic is not None
    return {
        f"{number} {name}": tensor.detach().clone()
        for number, chunks in enumerate((backend.model_chunks, backend.critic.chunks))
        for name, tensor in chunks[0].state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


@pytest.mark.parametrize(
    "more",
    [
        {"bf16": True, "lr_decay_style": "cosine"},
        {"lora_rank": 2, "critic_lora_rank": 0, "async_save": True},
        {"lora_rank": 2, "critic_lora_rank": 3, "bf16": True, "optimizer_cpu_offload": True}
        | {"async_save": True},
    ],
    ids=["bfloat16", "the policy's adapters", "adapters, states on the host"],
)
def test_a_resumed_run_has_the_same_bits(more: dict[str, Any], tmp_path: Path, model: Path) -> None:
    """The critic sleeps while it is saved, as it does beside engines."""
    flags = {
        **PPO,
        **more,
        "hf_checkpoint": str(model),
        "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"),
        "kl_coef": 0.1,
        "normalize_values": True,
    }
    first = trainer(**flags)
    try:
        assert first.critic is not None
        first.train(make_batch(seed=0))
        first.critic.takes_turns = True
        first.critic._offloader = Offloader(
            first.critic.chunks, first.critic.optimizer, pin=False, borrowed=first.critic.shared
        )
        first.critic.sleep()
        held = [p for p in first.critic.chunks[0].parameters() if p.untyped_storage().nbytes()]
        assert all(a is b for a, b in zip(held, first.critic.shared, strict=True))
        assert bool(held) == bool(first.critic.adapters)
        first.save(0)
        first.finish_saving()
        first.critic.wake()
        first.critic.takes_turns = False
        unbroken = first.train(make_batch(seed=1))
        before = weights(first)
    finally:
        first.close()
    second = trainer(**flags)
    try:
        assert second.next_rollout_id == 1
        resumed = second.train(make_batch(seed=1))
        after = weights(second)
    finally:
        second.close()
    assert numbers(resumed) == numbers(unbroken)
    assert resumed["rollout/values"] != 0.0
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def values_of(batch: TrainBatch, **flags: Any) -> tuple[list[torch.Tensor], MegatronBackend]:
    backend = trainer(**flags)
    try:
        assert backend.critic is not None
        found = backend.critic.outputs(batch)
        assert found is not None
        return found, backend
    finally:
        backend.close()


def test_a_new_run_takes_the_critic_of_another_one(tmp_path: Path, model: Path) -> None:
    batch = make_batch(seed=5)
    flags = {**PPO, "hf_checkpoint": str(model)}
    first = trainer(**flags, save=str(tmp_path / "run"), num_critic_only_steps=1)
    try:
        assert first.critic is not None
        policy = [p.detach().clone() for p in first.model_chunks[0].parameters()]
        metrics = first.train(make_batch())
        # on the first rollout the critic alone has learned
        assert all(torch.equal(a, b) for a, b in zip(policy, first.model_chunks[0].parameters()))
        assert "train/critic-value_loss" in metrics and "train/loss" not in metrics
        second = dataclasses.replace(make_batch(), rollout_id=1)
        assert "train/loss" in first.train(second)
        first.save(1)
        expected = first.critic.outputs(batch)
    finally:
        first.close()
    assert expected is not None and expected[0].abs().sum() > 0
    source = str(tmp_path / "run")
    taken, of_new = values_of(batch, **flags, critic_load=source)
    assert of_new.next_rollout_id == 0
    assert all(torch.equal(a, b) for a, b in zip(taken, expected))
    with_policy, continued = values_of(batch, **flags, load=source, finetune=True)
    assert continued.next_rollout_id == 0
    assert all(torch.equal(a, b) for a, b in zip(with_policy, expected))
    # a run without a critic reads the same checkpoint, and its own has none
    plain = trainer(hf_checkpoint=str(model), load=source, save=str(tmp_path / "grpo"))
    try:
        plain.train(make_batch())
        plain.save(2)
    finally:
        plain.close()
    from_policy, continued = values_of(batch, **flags, load=str(tmp_path / "grpo"))
    assert continued.next_rollout_id == 3 and not any(values.any() for values in from_policy)
    with pytest.raises(UserError, match="holds no checkpoint"):
        values_of(batch, **flags, critic_load=str(tmp_path))


def save_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> None:
    backend = opened(info, flags)
    backend.train(batches[backend.data_parallel_rank])
    backend.save(0)


def step_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    backend = opened(info, flags)
    assert backend.next_rollout_id == 1
    first, second = (backend.train(batches[backend.data_parallel_rank]) for _ in range(2))
    return {"reporting": backend.is_reporting_rank, "metrics": [numbers(first), numbers(second)]}


def opened(info: Any, flags: dict[str, Any]) -> Any:
    from slime.trainer.megatron.backend import MegatronBackend

    given = {**TRAINING, "optimizer": "adam", "adam_eps": 1e-3, "lr": 1e-3, "critic_lr": 0.01}
    config = trainer_config(**given, **flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    return backend


@pytest.mark.parametrize(
    ("saved_at", "loaded_at"),
    [
        ((2, 1, TP2 | SP), (2, 2, {})),
        pytest.param((2, 2, {}), (2, 1, PP2 | VIRTUAL), marks=pytest.mark.full),
        pytest.param((2, 1, PP2 | VIRTUAL), (2, 1, CP2), marks=pytest.mark.full),
    ],
)
def test_saved_at_one_layout_and_resumed_at_another(
    saved_at: Any, loaded_at: Any, ranks: Pools, deep: Path, tmp_path: Path
) -> None:
    def run(job: Any, where: Any, name: str) -> list[Any]:
        size, data_parallel, layout = where
        folder = {"load": str(tmp_path / name), "save": str(tmp_path / name)}
        flags = {"hf_checkpoint": str(deep), **folder, **layout}
        return ranks.run(size, job, flags, batches_for(data_parallel))

    alone = (1, 1, {})
    run(save_job, alone, "alone")
    run(save_job, saved_at, "other")
    [expected] = run(step_job, alone, "alone")
    [found] = [rank for rank in run(step_job, loaded_at, "other") if rank["reporting"]]
    for ours, theirs in zip(found["metrics"], expected["metrics"]):
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name


# -- learning and turns ----------------------------------------------------------------------------


def told_by_the_prompt(rollout_id: int) -> TrainBatch:
    """Random answers whose reward follows from the prompt's first token, with some noise."""
    generator = torch.Generator().manual_seed(rollout_id)
    batch = make_batch(num_samples=24, seed=rollout_id)
    first = torch.randint(0, 8, (24,), generator=generator)
    noise = 0.2 * torch.randn(24, generator=generator)
    for tokens, choice in zip(batch.tokens, first):
        tokens[0] = 10 + choice
    rewards = [float(choice % 2) + float(n) for choice, n in zip(first, noise)]
    batch.trajectory_ids = list(range(24))
    batch.rollout_mask_sums = [float(mask.sum()) for mask in batch.loss_masks]
    batch.steps = [StepPlan([list(range(24))], global_batch_size=24, num_loss_tokens=1)]
    return dataclasses.replace(batch, rollout_id=rollout_id, rewards=rewards)


def test_the_critic_explains_most_of_the_returns() -> None:
    """Of answers that it has not seen yet."""
    backend = trainer(
        advantage_estimator="ppo",
        critic_lr=0.01,
        num_critic_only_steps=99,
        rollout_batch_size=24,
        value_clip=10.0,
    )
    try:
        explained = [
            backend.train(told_by_the_prompt(rollout_id))["train/critic-explained_variance"]
            for rollout_id in range(30)
        ]
    finally:
        backend.close()
    assert explained[0] == 0.0
    assert sum(explained[-5:]) / 5 > 0.5, explained


def test_normalised_values_are_in_the_unit_of_the_returns() -> None:
    """A critic that hardly learns expects the mean of the returns that it has seen."""
    flags = {"critic_lr": 1e-9, "num_critic_only_steps": 9, "rollout_batch_size": 24}
    backend = trainer(advantage_estimator="ppo", normalize_values=True, **flags)
    try:
        batch = told_by_the_prompt(0)
        batch.rewards = [50.0 + 10.0 * reward for reward in batch.rewards]
        first, second = (backend.train(batch) for _ in range(2))
    finally:
        backend.close()
    assert first["rollout/values"] == 0.0
    assert second["rollout/values"] == pytest.approx(second["rollout/returns"], rel=0.1)
    # in variances of the returns; not clipped, as nothing has moved
    assert second["train/critic-value_loss"] == pytest.approx(1.0, abs=0.3)
    assert second["train/critic-value_clipfrac"] == 0.0


def test_taking_turns_changes_no_number() -> None:
    def three_rollouts(takes_turns: bool) -> tuple[list[dict[str, float]], Any]:
        backend = trainer(**PPO, kl_coef=0.1, bf16=True)
        try:
            assert backend.critic is not None
            if takes_turns:
                pair = (backend.model_chunks, backend.optimizer)
                backend.offloader = Offloader(*pair, pin=False)
                backend.critic._offloader = Offloader(
                    backend.critic.chunks, backend.critic.optimizer, pin=False
                )
                backend.critic.takes_turns = True
                backend.critic.sleep()
            metrics = [numbers(backend.train(make_batch(seed=seed))) for seed in range(3)]
            if takes_turns:
                chunks = backend.critic.chunks
                assert all(p.untyped_storage().nbytes() == 0 for p in chunks[0].parameters())
                backend.critic.wake()
            return metrics, weights(backend)
        finally:
            backend.close()

    together, apart = three_rollouts(False), three_rollouts(True)
    assert together[0] == apart[0] and together[0][2]["rollout/values"] != 0.0
    assert all(torch.equal(together[1][name], apart[1][name]) for name in together[1])


def test_a_critic_of_experts_routes_and_balances_by_itself(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, layers=2)
    backend = trainer(
        **PPO,
        hf_checkpoint=str(tmp_path),
        use_routing_replay=True,
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=0.01,
    )
    try:
        metrics = [backend.train(make_batch(seed=seed)) for seed in range(2)]
    finally:
        backend.close()
    balance = [row["train/critic-load_balancing_loss"] for row in metrics]
    assert balance[0] == pytest.approx(metrics[0]["train/load_balancing_loss"])
    assert balance[1] != pytest.approx(metrics[1]["train/load_balancing_loss"])
    assert metrics[1]["rollout/values"] != 0.0


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"custom_advantage_function_path": "a.b"}, "--custom-advantage-function-path"),
        ({"custom_model_provider_path": "a.b"}, "--custom-model-provider-path"),
        ({"spec": ("a", "b")}, "--spec"),
        ({"critic_save": "there"}, "--critic-load takes the critic from there"),
        ({"advantage_estimator": "grpo", "critic_lr": 1e-5}, "--advantage-estimator ppo"),
        ({"advantage_estimator": "grpo", "lambd": 0.9}, "--advantage-estimator ppo"),
        ({"lambd": 1.5}, "at most 1"),
        ({"value_clip": 0.0}, "more than 0"),
        ({"critic_lora_rank": 4}, "without --lora-rank"),
        ({"advantage_estimator": "grpo", "lora_rank": 4, "critic_lora_rank": 8}, "estimator ppo"),
    ],
)
def test_what_a_critic_cannot_be_used_with_is_refused(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer_config(**{"advantage_estimator": "ppo", **flags})
    assert told in str(caught.value)


def test_the_critic_has_the_learning_rate_of_its_flags() -> None:
    flags = {"lr_warmup_iters": 4, "min_lr": 1e-3, "lr_decay_style": "cosine"}
    own = critic_config(trainer_config(**PPO, **flags, lr=1e-2))
    assert (own.megatron.lr, own.megatron.lr_warmup_iters) == (0.05, 4)
    small = trainer_config(
        advantage_estimator="ppo", critic_lr=1e-4, critic_lr_warmup_iters=2, **flags
    )
    # the end of the decay is never above its start
    assert (critic_config(small).megatron.min_lr, small.critic.critic_lambd) == (1e-4, 1.0)
    assert critic_config(small).megatron.lr_warmup_iters == 2
    alone = trainer_config(**PPO, num_critic_only_steps=10, num_rollout=10)
    assert any("the policy is not trained" in warning for warning in alone.warnings)
    # the critic learns in all rollouts, and its schedule counts them
    assert critic_config(alone).critic.num_critic_only_steps == 0


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"], ids=["tied", "not tied"])
def test_a_critic_starts_from_a_reward_model(kind: str, tmp_path: Path) -> None:
    """Its values are the rewards of what has been written so far."""
    from transformers import AutoModelForSequenceClassification

    (tmp_path / "policy").mkdir()
    save_tiny(kind, tmp_path / "policy", layers=2)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "policy", num_labels=1, dtype=torch.float32
    )
    with torch.no_grad():
        classifier.score.weight.normal_()
    classifier.save_pretrained(tmp_path / "judge")
    batch = make_batch(seed=5)
    flags = {**PPO, "hf_checkpoint": str(tmp_path / "policy")}
    values, backend = values_of(batch, **flags, critic_load=str(tmp_path / "judge"))
    for tokens, found in zip(batch.tokens, values):
        with torch.no_grad():
            states = classifier.model(tokens[None]).last_hidden_state[0]
            expected = (states @ classifier.score.weight[0])[-1 - found.numel() : -1]
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max().clamp(min=1.0)
    check_weights(backend.config, resolve_load(backend.config))
    # it is no policy
    wrong = trainer_config(**PPO, hf_checkpoint=str(tmp_path / "judge"))
    with pytest.raises(UserError, match="is not a complete qwen"):
        check_weights(wrong, resolve_load(wrong))
