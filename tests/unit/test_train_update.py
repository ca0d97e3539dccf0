"""The update on one rollout: which passes run, what is logged, what stops it, what hooks may do."""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slime.errors import UserError
from slime.samples.batch import TrainBatch
from slime.trainer import update as update_module
from slime.trainer.megatron import backend as backend_module
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.role import Role, roles_of
from slime.trainer.update import NonFiniteTraining, Scorer, reuses_log_probs
from slime.user_code.loading import FunctionFailed
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import poisoned, trainer


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[MegatronBackend]:
    made = trainer(**getattr(request, "param", {}))
    yield made
    made.close()


def with_flags(**flags: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", [flags], indirect=True, ids=["+".join(flags)])


def weights(backend: MegatronBackend) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in backend.model_chunks for p in chunk.parameters()]


def hook_path(name: str) -> str:
    return f"{__name__}.{name}"


# -- which passes ----------------------------------------------------------------------------------


@with_flags(use_kl_loss=True, kl_loss_coef=0.1)
def test_first_step_is_aligned_bit_for_bit(
    backend: MegatronBackend, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = backend.train(make_batch())
    assert metrics["train/kl_loss"] == 0.0 and metrics["train/ppo_kl"] == 0.0
    assert metrics["rollout/log_probs"] == metrics["rollout/ref_log_probs"]
    assert not caplog.records
    assert "perf/log_probs_time" not in metrics and "perf/ref_log_probs_time" in metrics
    assert backend.train(make_batch())["train/kl_loss"] != 0.0


def test_a_teacher_is_a_role_and_a_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row each: the backend holds its weights, and its column joins the rollout."""
    teacher = Role(name="teacher", loss=None, is_pushed=False, is_saved=False)
    monkeypatch.setattr(
        backend_module, "roles_of", lambda config: {**roles_of(config), "teacher": teacher}
    )
    scorer = Scorer(column="ref_log_probs", role="teacher", is_wanted=lambda config, batch: True)
    monkeypatch.setattr(update_module, "SCORERS", (scorer,))
    backend = trainer()
    try:
        for copy in backend.copies["teacher"].tensors:
            copy.mul_(0.5)
        batch = make_batch()
        metrics = backend.train(batch)
        assert metrics["rollout/ref_log_probs"] != metrics["rollout/log_probs"]
    finally:
        backend.close()


@with_flags(use_kl_loss=True, kl_loss_coef=0.1)
def test_misalignment_is_told_with_its_causes(
    backend: MegatronBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.copies["reference"].tensors[0].add_(0.01)
    with caplog.at_level(logging.WARNING):
        backend.train(make_batch())
    assert "--deterministic-mode" in caplog.text and "--attention-backend flash" in caplog.text


def test_reused_log_probs_are_those_of_a_pass_of_their_own(backend: MegatronBackend) -> None:
    batch = make_batch()
    before = backend.log_probs(batch)
    assert before is not None and reuses_log_probs(backend.config, batch)
    metrics = backend.train(batch)
    trajectories = batch.steps[0].global_batch_size
    expected = sum(
        float((lp * mask).sum()) / total / trajectories
        for lp, mask, total in zip(before, batch.loss_masks, batch.rollout_mask_sums)
    )
    assert metrics["rollout/log_probs"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "num_steps", "expected"),
    [
        ({}, 1, True),
        ({}, 3, False),
        ({"advantage_estimator": "gspo"}, 1, False),
        (
            {
                "kl_coef": 0.1,
                "advantage_estimator": "reinforce_plus_plus",
                "normalize_advantages": True,
            },
            1,
            False,
        ),
        ({"custom_megatron_before_log_prob_hook_path": "a.b"}, 1, False),
        ({"use_rollout_logprobs": True}, 3, True),
        ({"loss_type": "sft_loss"}, 3, True),
    ],
)
def test_when_log_probs_are_reused(flags: dict[str, Any], num_steps: int, expected: bool) -> None:
    from tests.support.trainer_ranks import trainer_config

    assert (
        reuses_log_probs(
            trainer_config(hf_checkpoint="/nowhere", **flags), make_batch(num_steps=num_steps)
        )
        is expected
    )


@with_flags(
    use_rollout_logprobs=True,
    advantage_estimator="reinforce_plus_plus",
    normalize_advantages=True,
    kl_coef=0.1,
    kl_loss_type="k1",
)
def test_kl_in_the_reward_is_that_of_the_old_policy(backend: MegatronBackend) -> None:
    batch = make_batch()
    assert batch.rollout_log_probs is not None
    metrics = backend.train(batch)
    assert "perf/log_probs_time" not in metrics, "the engine's log-probs are the old policy's"
    engine, reference = metrics["rollout/rollout_log_probs"], metrics["rollout/ref_log_probs"]
    assert metrics["rollout/kl"] == pytest.approx(engine - reference, abs=1e-5)


@pytest.mark.parametrize(
    "backend",
    [
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "cispo"},
        {"use_opsm": True},
        {"use_tis": True},
        {"loss_type": "custom_loss", "custom_loss_function_path": f"{__name__}.my_loss"},
        {"loss_type": "sft_loss"},
    ],
    indirect=True,
    ids=lambda flags: "+".join(map(str, flags.values())),
)
def test_an_empty_micro_batch_changes_nothing(backend: MegatronBackend) -> None:
    """What a data-parallel rank has that runs out of samples before the others."""
    before = [p.detach().clone() for chunk in backend.model_chunks for p in chunk.parameters()]
    results = []
    for micro_batches in ([[0, 1], [2, 3], [4, 5]], [[0, 1], [], [2, 3], [4, 5], []]):
        with torch.no_grad():
            for parameter, value in zip(
                (p for chunk in backend.model_chunks for p in chunk.parameters()), before
            ):
                parameter.copy_(value)
        results.append(backend.train(make_batch(micro_batches)))
    for name in ("train/loss", "train/grad_norm"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5)


@with_flags(advantage_estimator="grpo", lr=0.05)
def test_three_steps_leave_the_policy_behind(backend: MegatronBackend) -> None:
    """With several steps the old log-probs come from before the first, so later ratios are not
    1."""
    metrics = backend.train(make_batch(num_steps=3))
    kls = [step["train/ppo_kl"] for step in backend.step_metrics]
    assert len(kls) == 3 and kls[0] == 0.0 and kls[1] != 0.0 and kls[2] != 0.0
    assert metrics["train/ppo_kl"] == pytest.approx(sum(kls) / 3)
    assert "perf/log_probs_time" in metrics


@with_flags(loss_type="sft_loss", lr=0.01)
def test_sft_lowers_its_loss(backend: MegatronBackend) -> None:
    losses = [backend.train(make_batch())["train/loss"] for _ in range(6)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.8 * losses[0]


@with_flags(lr=0.01)
def test_policy_gradient_raises_what_was_rewarded(backend: MegatronBackend) -> None:
    batch = make_batch()
    good = [i for i, reward in enumerate(batch.rewards) if reward > 0]
    before = backend.log_probs(batch)
    for _ in range(4):
        backend.train(batch)
    after = backend.log_probs(batch)
    assert before is not None and after is not None

    def gain(samples: list[int]) -> float:
        return sum(float(((after[i] - before[i]) * batch.loss_masks[i]).sum()) for i in samples)

    assert gain(good) > 0 > gain([i for i in range(6) if i not in good])


@pytest.mark.parametrize("per_token", [False, True])
def test_loss_is_the_mean_it_claims_to_be(per_token: bool) -> None:
    backend = trainer(loss_type="sft_loss", calculate_per_token_loss=per_token)
    try:
        batch = make_batch()
        scores = backend.log_probs(batch)
        loss = backend.train(batch)["train/loss"]
    finally:
        backend.close()
    assert scores is not None
    sums = [float((-lp * mask).sum()) for lp, mask in zip(scores, batch.loss_masks)]
    if per_token:
        expected = sum(sums) / batch.steps[0].num_loss_tokens
    else:
        expected = (
            sum(s / total for s, total in zip(sums, batch.rollout_mask_sums))
            / batch.steps[0].global_batch_size
        )
    # the temperature of sampling does not apply to supervised training
    assert backend.config.rollout.rollout_temperature != 1.0
    assert loss == pytest.approx(expected, rel=1e-5)


@with_flags(advantage_estimator="dr_grpo", rollout_max_response_len=7)
def test_dr_grpo_divides_sums_of_token_losses_by_one_length(backend: MegatronBackend) -> None:
    batch = make_batch()
    step = batch.steps[0]
    metrics = backend.train(batch)
    total = -sum(a * float(mask.sum()) for a, mask in zip(batch.rewards, batch.loss_masks))
    assert metrics["train/loss"] == pytest.approx(total / step.global_batch_size / 7, rel=1e-5)
    assert metrics["train/pg_loss"] == pytest.approx(total / step.num_loss_tokens, rel=1e-5)


@with_flags(use_tis=True, tis_clip=1.5)
def test_truncated_importance_sampling_is_logged(backend: MegatronBackend) -> None:
    metrics = backend.train(make_batch())
    assert {"train/tis", "train/tis_clipfrac", "train/tis_abs", "train/ois"} <= metrics.keys()
    assert metrics["train/ois"] == pytest.approx(1.0)


# -- what stops it ---------------------------------------------------------------------------------


def test_nan_stops_with_the_samples_and_changes_nothing(backend: MegatronBackend) -> None:
    before = weights(backend)
    with pytest.raises(NonFiniteTraining) as caught:
        backend.train(poisoned(make_batch(), sample=3))
    assert caught.value.sample_indices == [102, 103]  # the micro-batch of sample 3
    assert "rollout 0, step 0" in caught.value.what and "--no-check-for-nan" in caught.value.fix
    assert all(torch.equal(a, b) for a, b in zip(before, weights(backend)))
    restored = pickle.loads(pickle.dumps(caught.value))  # it has to travel through Ray
    assert str(restored) == str(caught.value) and restored.sample_indices == [102, 103]


@with_flags(check_for_nan_in_loss_and_grad=False)
def test_nan_is_skipped_and_counted_when_asked_to(backend: MegatronBackend) -> None:
    before = weights(backend)
    metrics = backend.train(poisoned(make_batch(), sample=0))
    assert metrics["train/skipped_steps"] == 1.0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(backend)))
    metrics = backend.train(make_batch())  # nothing of the bad step is left behind
    assert metrics["train/skipped_steps"] == 0.0 and metrics["train/grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(backend)))


def test_overflow_in_the_backward_pass_is_told_apart(backend: MegatronBackend) -> None:
    batch = make_batch()
    # finite losses, infinite gradient norm
    batch.rewards = [3e38 * r for r in (1, -1, 1, -1, 1, -1)]
    with pytest.raises(NonFiniteTraining, match="losses are finite"):
        backend.train(batch)


@with_flags(use_rollout_logprobs=True)
def test_missing_engine_log_probs_are_named(backend: MegatronBackend) -> None:
    batch = make_batch()
    batch.rollout_log_probs = None
    with pytest.raises(UserError, match="--use-rollout-logprobs"):
        backend.train(batch)


# -- precision and optimizer -----------------------------------------------------------------------


@with_flags(bf16=True, lr=1e-5, weight_decay=0.0)
def test_bfloat16_keeps_float32_master_weights(backend: MegatronBackend) -> None:
    """Steps too small for bfloat16 add up in the master weights until the model moves."""
    before = weights(backend)
    assert all(p.dtype == torch.bfloat16 for p in before)
    changed = []
    for _ in range(12):
        backend.train(make_batch())
        changed.append(sum(int((a != b).sum()) for a, b in zip(before, weights(backend))))
    masters = [p for inner in backend.optimizer.chained_optimizers for p in inner.get_parameters()]
    assert masters and all(p.dtype == torch.float32 for p in masters)
    assert changed[-1] > changed[0]


@with_flags(lr=1e-3, clip_grad=1e-3, weight_decay=0.1)
def test_clipped_adam_step_equals_the_formula(backend: MegatronBackend) -> None:
    """The first Adam step by hand: m̂ = g, v̂ = g², so every weight moves by lr · sign-like g /
    (|g| + eps)."""
    before = weights(backend)
    metrics = backend.train(make_batch())
    assert metrics["train/grad_norm"] > 1e-3
    named = dict(backend.model_chunks[0].named_parameters())
    # clipped in place or not
    norm = torch.stack([p.main_grad.norm() for p in named.values()]).norm()
    for (name, parameter), old in zip(named.items(), before, strict=True):
        gradient = parameter.main_grad * (1e-3 / norm)
        decay = 0.1 if old.dim() > 1 else 0.0
        expected = old * (1 - 1e-3 * decay) - 1e-3 * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(parameter, expected, atol=2e-6), name


@with_flags(lr=1e-2, lr_warmup_iters=2, lr_decay_style="linear", lr_decay_iters=6, min_lr=1e-3)
def test_schedule_warms_up_and_decays(backend: MegatronBackend) -> None:
    # it counts samples: 12 of warm-up, 36 in all, 5 a step
    seen = [backend.train(make_batch())["train/lr-pg_0"] for _ in range(8)]
    assert seen[:2] == pytest.approx([1e-2 * 5 / 12, 1e-2 * 10 / 12])
    assert seen[2:] == sorted(seen[2:], reverse=True) and seen[2] > seen[1]
    assert seen[-1] == pytest.approx(1e-3)


@with_flags(num_epoch=2, lr=1e-2, lr_decay_style="linear", min_lr=0.0)
def test_schedule_waits_for_the_length_of_the_run(backend: MegatronBackend) -> None:
    """With --num-epoch the trainer is built before the prompts are counted; the rate must not decay
    meanwhile."""
    assert backend.learning_rates() == pytest.approx([1e-2] * len(backend.learning_rates()))
    backend.set_run_length(4)
    seen = [backend.train(make_batch())["train/lr-pg_0"] for _ in range(4)]
    # 24 samples in all, 5 a step
    assert seen == pytest.approx([1e-2 * (1 - 5 * k / 24) for k in range(1, 5)])


@with_flags(freeze_params_name_list=["mlp", "embedding"], lr=0.01)
def test_frozen_parameters_stay(backend: MegatronBackend) -> None:
    before = weights(backend)
    backend.train(make_batch())
    names = [name for chunk in backend.model_chunks for name, _ in chunk.named_parameters()]
    for name, old, new in zip(names, before, weights(backend)):
        assert torch.equal(old, new) is ("mlp" in name or "embedding" in name), name


def test_an_expression_that_freezes_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="no_such_layer"):
        trainer(freeze_params_name_list=["no_such_layer"])


# -- hooks -----------------------------------------------------------------------------------------

calls: list[Any] = []


def my_advantages(args: Any, rollout_data: Any) -> None:
    rollout_data["advantages"] = [torch.full_like(mask, 2.0) for mask in rollout_data["loss_masks"]]
    rollout_data["returns"] = rollout_data["advantages"]


def too_short(args: Any, rollout_data: Any) -> None:
    rollout_data["advantages"] = [torch.zeros(1) for _ in rollout_data["loss_masks"]]


def my_loss(
    args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any
) -> tuple[Any, dict[str, Any]]:
    flat = torch.cat(batch["current_log_probs"])
    assert set(batch["sample_indices"]) <= set(make_batch().sample_indices)
    assert logits.shape[0] == flat.numel()
    loss = -sum_of_sample_mean(flat)
    return loss, {"my_metric": loss.detach()}


def before_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any
) -> None:
    calls.append(("step", rollout_id, step_id, args.lr))


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    calls.append(("log_prob", store_prefix))


def postprocess(args: Any, rollout_id: int, rollout_data: Any) -> None:
    rollout_data["loss_masks"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]


def reinforce(
    args: Any, batch: dict[str, Any], logits: Any, sum_of_sample_mean: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    log_probs, advantages = map(torch.cat, (batch["current_log_probs"], batch["advantages"]))
    return -sum_of_sample_mean(log_probs * advantages), {}


def poison_what_it_masks(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    masks = [mask * (torch.arange(mask.numel()) % 2) for mask in rollout_data["loss_masks"]]
    for key in ("advantages", "returns", "log_probs", "ref_log_probs", "rollout_log_probs"):
        rollout_data[key] = [
            values.where(mask > 0, math.nan) for values, mask in zip(rollout_data[key], masks)
        ]
    rollout_data["loss_masks"] = masks


def shift_everything(args: Any, rollout_id: int, rollout_data: Any) -> None:
    """Assigns each key that may be, in a way that shows in the metrics; some as plain lists."""
    masks = rollout_data["loss_masks"]
    for key, value in (
        ("advantages", 3.0),
        ("returns", 4.0),
        ("log_probs", -1.0),
        ("ref_log_probs", -2.0),
    ):
        rollout_data[key] = [[value] * len(mask) for mask in masks]
    rollout_data["rollout_log_probs"] = [torch.full_like(mask, -1.5) for mask in masks]


def scale_rewards(args: Any, rollout_id: int, rollout_data: Any) -> None:
    rollout_data["rewards"] = [2 * reward for reward in rollout_data["rewards"]]


def own_key(args: Any, rollout_id: int, rollout_data: Any) -> None:
    rollout_data["temperatures"] = rollout_data["rewards"]


def set_advantages(args: Any, rollout_id: int, rollout_data: Any) -> None:
    my_advantages(args, rollout_data)


def set_reference(args: Any, rollout_id: int, rollout_data: Any) -> None:
    rollout_data["ref_log_probs"] = rollout_data["loss_masks"]


def returned_advantages(args: Any, rollout_data: Any) -> Any:
    return rollout_data["loss_masks"]


def forget_advantages(args: Any, rollout_data: Any) -> None:
    del rollout_data["loss_masks"]


def first_token_only(args: Any, pg_loss: Any, loss_masks: Any, **rest: Any) -> Any:
    return pg_loss, [(torch.arange(len(mask)) == 0).to(mask) for mask in loss_masks], {}


def one_mask_for_all(args: Any, pg_loss: Any, loss_masks: Any, **rest: Any) -> Any:
    return pg_loss, [torch.cat(loss_masks)], {}


def masked_sum(total: Any, responses: Any, masks: Any, per_token: bool) -> Any:
    return lambda values: (values * torch.cat(masks)).sum()


def half_of_it(
    args: Any, *, pg_loss: Any, train_log_probs: Any, loss_masks: Any, **rest: Any
) -> tuple[Any, Any, Any]:
    assert len(train_log_probs) == len(loss_masks) == len(rest["response_lengths"])
    return pg_loss * 0.5, loss_masks, {"mis_half": torch.full_like(pg_loss, 0.5)}


def gap_to_engine(
    args: Any, pg_loss: Any, train_log_probs: Any, rollout_log_probs: Any, **rest: Any
) -> Any:
    return (
        pg_loss,
        rest["loss_masks"],
        {"gap": torch.cat(train_log_probs) - torch.cat(rollout_log_probs)},
    )


def constant_divisor(total: Any, responses: Any, masks: Any, per_token: bool) -> Any:
    return lambda values: values.sum() / 100.0


@with_flags(custom_advantage_function_path=hook_path("my_advantages"))
def test_custom_advantages(backend: MegatronBackend) -> None:
    assert backend.train(make_batch())["rollout/advantages"] == pytest.approx(2.0)


@with_flags(custom_advantage_function_path=hook_path("too_short"))
def test_custom_advantages_of_the_wrong_length_are_refused(backend: MegatronBackend) -> None:
    with pytest.raises(UserError, match="too_short"):
        backend.train(make_batch())


@with_flags(custom_advantage_function_path=hook_path("returned_advantages"))
def test_advantages_that_are_returned_and_not_set_are_refused(backend: MegatronBackend) -> None:
    with pytest.raises(
        FunctionFailed, match=r"set no advantages\n.*it returned a list of 6, which nothing reads"
    ):
        backend.train(make_batch())


@with_flags(
    loss_type="custom_loss", custom_loss_function_path=hook_path("my_loss"), rollout_temperature=1.0
)
def test_custom_loss_gets_logits_and_the_reducer(backend: MegatronBackend) -> None:
    metrics = backend.train(make_batch())
    assert metrics["train/my_metric"] == pytest.approx(metrics["train/loss"])
    assert metrics["train/loss"] > 0


def test_a_custom_loss_weighs_trajectories_as_the_policy_loss_does() -> None:
    """Two samples of the batch are one trajectory. On policy, its gradient is that of the log-probs
    times the advantages."""
    norms = []
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": hook_path("reinforce")}
    for flags in ({}, custom):
        made = trainer(**flags)
        norms.append(made.train(make_batch())["train/grad_norm"])
        made.close()
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@with_flags(
    use_kl_loss=True,
    custom_megatron_before_train_step_hook_path=hook_path("before_step"),
    custom_megatron_before_log_prob_hook_path=hook_path("before_log_prob"),
)
def test_hooks_around_passes_and_steps(backend: MegatronBackend) -> None:
    calls.clear()
    backend.train(make_batch(num_steps=3))
    assert calls == [
        ("log_prob", "ref_"),
        ("log_prob", ""),
        *(("step", 0, i, 1e-2) for i in range(3)),
    ]


@with_flags(rollout_data_postprocess_path=hook_path("postprocess"))
def test_postprocess_may_change_masks(backend: MegatronBackend) -> None:
    batch = make_batch()
    assert any((mask == 0).any() for mask in batch.loss_masks)
    first = backend.train(batch)["train/entropy_loss"]
    assert first > 0


@with_flags(
    rollout_data_postprocess_path=hook_path("shift_everything"),
    use_kl_loss=True,
    kl_loss_coef=0.5,
    use_tis=True,
)
def test_postprocess_may_assign_every_tensor_of_the_rollout(backend: MegatronBackend) -> None:
    metrics = backend.train(make_batch())
    weight = trained_weight(make_batch())
    for name, value in (
        ("advantages", 3),
        ("returns", 4),
        ("ref_log_probs", -2),
        ("rollout_log_probs", -1.5),
    ):
        assert metrics[f"rollout/{name}"] == pytest.approx(value * weight), name
    # the old policy's log-probs are those that it assigned
    assert metrics["rollout/log_probs"] == pytest.approx(-weight)
    assert metrics["train/tis"] == pytest.approx(math.exp(0.5) * weight)


@with_flags(
    rollout_data_postprocess_path=hook_path("poison_what_it_masks"),
    use_kl_loss=True,
    kl_loss_coef=0.5,
    kl_loss_type="k2",
    use_tis=True,
)
def test_nan_of_a_token_that_is_masked_does_no_harm(backend: MegatronBackend) -> None:
    metrics = backend.train(make_batch(num_steps=3))
    assert math.isfinite(metrics["train/grad_norm"]) and metrics["train/skipped_steps"] == 0


@pytest.mark.parametrize(
    ("backend", "key", "why"),
    [
        (
            {"rollout_data_postprocess_path": hook_path("scale_rewards")},
            "rewards",
            "it may assign advantages",
        ),
        (
            {"rollout_data_postprocess_path": hook_path("own_key")},
            "temperatures",
            "it may assign advantages",
        ),
        (
            {"rollout_data_postprocess_path": hook_path("set_reference")},
            "ref_log_probs",
            "no flag asks for",
        ),
        (
            {"rollout_data_postprocess_path": hook_path("set_advantages"), "loss_type": "sft_loss"},
            "advantages",
            "sft_loss takes none",
        ),
        (
            {"custom_advantage_function_path": hook_path("forget_advantages")},
            "loss_masks",
            "as None",
        ),
    ],
    indirect=["backend"],
    ids=lambda value: (
        next(iter(value.values())).rpartition(".")[2] if isinstance(value, dict) else ""
    ),
)
def test_what_would_be_dropped_is_refused_by_name(
    backend: MegatronBackend, key: str, why: str
) -> None:
    with pytest.raises(UserError, match=why) as caught:
        backend.train(make_batch())
    assert f"assigned rollout_data[{key!r}]" in caught.value.what


@pytest.mark.parametrize(
    "backend",
    [
        {"custom_advantage_function_path": hook_path("my_advantages")},
        {"rollout_data_postprocess_path": hook_path("set_advantages")},
    ],
    indirect=True,
    ids=["advantage function", "postprocess"],
)
def test_without_the_estimator_the_users_advantages_are_trained_on(
    backend: MegatronBackend,
) -> None:
    flags = dataclasses.replace(
        backend.config.algorithm, disable_compute_advantages_and_returns=True
    )
    backend.config = dataclasses.replace(backend.config, algorithm=flags)
    metrics = backend.train(make_batch())
    weight = trained_weight(make_batch())
    assert metrics["rollout/advantages"] == pytest.approx(2.0 * weight)
    assert metrics["train/pg_loss"] == pytest.approx(-2.0 * weight)


@with_flags(lr=0.01)
def test_a_policy_loss_without_advantages_is_refused_before_the_first_step(
    backend: MegatronBackend,
) -> None:
    flags = dataclasses.replace(
        backend.config.algorithm, disable_compute_advantages_and_returns=True
    )
    backend.config = dataclasses.replace(backend.config, algorithm=flags)
    before = weights(backend)
    with pytest.raises(UserError, match="nothing sets any") as caught:
        backend.train(make_batch())
    assert "--disable-compute-advantages-and-returns" in caught.value.why
    assert all(torch.equal(a, b) for a, b in zip(before, weights(backend)))


@with_flags(
    use_tis=True,
    custom_tis_function_path=hook_path("first_token_only"),
    custom_pg_loss_reducer_function_path=hook_path("masked_sum"),
)
def test_a_reducer_gets_the_masks_that_the_correction_returned(backend: MegatronBackend) -> None:
    batch = make_batch()
    metrics = backend.train(batch)
    # at ratio 1 a token's loss is -advantage: one token of each sample is left
    assert metrics["train/pg_loss"] == pytest.approx(
        -sum(batch.rewards) / batch.steps[0].global_batch_size, abs=1e-5
    )


@with_flags(use_tis=True, custom_tis_function_path=hook_path("one_mask_for_all"))
def test_a_correction_of_other_shapes_is_refused(backend: MegatronBackend) -> None:
    with pytest.raises(
        UserError, match=r"--custom-tis-function-path\) returned the loss masks as a list of 1"
    ):
        backend.train(make_batch())


def test_custom_correction_scales_the_loss() -> None:
    results = []
    for flags in ({}, {"use_tis": True, "custom_tis_function_path": hook_path("half_of_it")}):
        backend = trainer(**flags)
        try:
            results.append(backend.train(make_batch()))
        finally:
            backend.close()
    assert results[1]["train/pg_loss"] == pytest.approx(results[0]["train/pg_loss"] / 2, rel=1e-5)
    assert results[1]["train/mis_half"] == pytest.approx(0.5 * trained_weight(make_batch()))


@with_flags(
    use_rollout_logprobs=True,
    get_mismatch_metrics=True,
    custom_tis_function_path=hook_path("gap_to_engine"),
)
def test_the_mismatch_is_that_of_the_trainer_whatever_the_ratio_is_taken_against(
    backend: MegatronBackend,
) -> None:
    metrics = backend.train(make_batch(num_steps=3))
    steps = [step["train/gap"] for step in backend.step_metrics]
    gap = metrics["rollout/log_probs"] - metrics["rollout/rollout_log_probs"]
    assert sum(steps) / 3 == pytest.approx(gap, rel=1e-4) and gap != 0


def trained_weight(batch: TrainBatch) -> float:
    """What the weights of all tokens add up to: 1, unless a trajectory trains no token."""
    return sum(float(m.sum()) / t for m, t in zip(batch.loss_masks, batch.rollout_mask_sums)) / 5


@with_flags(custom_pg_loss_reducer_function_path=hook_path("constant_divisor"))
def test_custom_reducer(backend: MegatronBackend) -> None:
    batch = make_batch()
    metrics = backend.train(batch)
    total = -sum(reward * r for reward, r in zip(batch.rewards, batch.response_lengths))
    assert metrics["train/pg_loss"] == pytest.approx(
        total / 100 / batch.steps[0].global_batch_size, rel=1e-4
    )


# -- state -----------------------------------------------------------------------------------------


@with_flags(use_kl_loss=True, kl_loss_coef=0.1, ref_update_interval=1)
def test_reference_follows_when_asked_to(backend: MegatronBackend) -> None:
    backend.train(make_batch())
    assert backend.copies["reference"].equals(backend.model_chunks)


@with_flags(use_kl_loss=True, kl_loss_coef=0.1)
def test_reference_pass_gives_the_policy_back(backend: MegatronBackend) -> None:
    backend.train(make_batch())
    before = weights(backend)
    backend.log_probs(make_batch(), "reference")
    assert all(torch.equal(a, b) for a, b in zip(before, weights(backend)))
    assert not backend.copies["reference"].equals(backend.model_chunks)
