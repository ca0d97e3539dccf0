"""The update on one rollout, as prose: reference and old log-probs, advantages, then the optimizer steps.

    TrainBatch ─► ref log-probs ─► old log-probs ─► KL, advantages ─► for each step: forward-backward, apply ─► metrics

The verbs are a trainer's (`Trainer`); what they do inside is `slime.train.megatron`'s business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from slime.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, whiten
from slime.algorithms.kl import kl_estimate
from slime.algorithms.reduce import token_weights, weighted_sum
from slime.config import Config
from slime.errors import UserError
from slime.hook_loading import load_function
from slime.observe.log import get_logger
from slime.samples.types import StepPlan, TrainBatch
from slime.train.loss import LossHooks
from slime.train.records import LossInputs, MicroBatchResult, RolloutTensors, StepOutcome

logger = get_logger(__name__)


class NonFiniteTraining(UserError):
    """A loss or gradient is NaN or Inf. Nothing was applied: the weights are those before the step.

    Attributes:
        sample_indices: of the samples whose loss is not finite, over all ranks; empty when only gradients are not.
    """

    def __init__(self, rollout_id: int, step: int, outcome: StepOutcome | None, sample_indices: list[int]) -> None:
        self.sample_indices = sample_indices
        if sample_indices:
            shown = ", ".join(map(str, sample_indices[:16])) + (", …" if len(sample_indices) > 16 else "")
            why = f"the loss is not finite in the micro-batches of the samples with index {shown}"
        else:
            norm = outcome.grad_norm if outcome else math.nan
            why = f"the losses are finite but the gradient norm is {norm}: the overflow is in the backward pass"
        super().__init__(
            f"training stopped at rollout {rollout_id}, step {step}: NaN or Inf",
            why=why,
            fix="look at these samples in the run folder (samples/); lower --lr, check rewards and --eps-clip; or skip "
            "such steps with --no-check-for-nan-in-loss-and-grad",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_non_finite, (self.args, self.sample_indices)


def _restore_non_finite(args: tuple[Any, ...], sample_indices: list[int]) -> NonFiniteTraining:
    error = NonFiniteTraining.__new__(NonFiniteTraining)
    UserError.__init__(error, *args)
    error.sample_indices = sample_indices
    return error


class Trainer(Protocol):
    """The verbs that an update uses. Every rank calls each of them equally often."""

    config: Config
    device: torch.device
    hooks: LossHooks
    has_output: bool
    """This rank holds the output layer: it sees log-probs and computes the loss."""
    reference_is_policy: bool
    """The reference weights are the same bits as the policy's (a fresh start, no step taken)."""

    def log_probs(self, batch: TrainBatch, *, reference: bool = False, store_prefix: str = "") -> list[Tensor] | None:
        """[R_i] per sample, without gradient; None on ranks without output layer."""
        ...

    def forward_backward(
        self, batch: TrainBatch, step: StepPlan, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Gradients of the whole step, accumulated; results on ranks with output layer, in micro-batch order."""
        ...

    def optim_step(self, rollout_id: int, step_id: int, step: StepPlan, *, skip: bool) -> StepOutcome: ...

    def sum_over_data_parallel(self, values: Tensor) -> Tensor: ...

    def max_over_data_parallel(self, values: Tensor) -> Tensor: ...

    def any_rank(self, flag: bool) -> bool: ...

    def gather(self, values: list[int]) -> list[int]:
        """All ranks' values, joined, without duplicates."""
        ...

    def synchronize(self) -> None: ...

    def learning_rates(self) -> list[float]: ...


def update(trainer: Trainer, batch: TrainBatch) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train on one rollout.

    Returns:
        (metrics of the rollout, ``train/`` values being means over its optimizer steps; the steps' own metrics).
        Equal on every rank that holds the output layer; others return timings only.
    Raises:
        NonFiniteTraining: NaN or Inf, unless ``--no-check-for-nan-in-loss-and-grad``.
        UserError: the loss asks for something that the samples do not have.
    """
    timers = _Timers(trainer)
    flags = trainer.config.algorithm
    _check_batch(batch, trainer.config)
    data = _initial_tensors(trainer, batch)

    if flags.loss_type != "sft_loss" and (flags.use_kl_loss or flags.kl_coef != 0):
        with timers.measure("ref_log_probs"):
            data.ref_log_probs = trainer.log_probs(batch, reference=True, store_prefix="ref_")
    if not reuses_log_probs(trainer.config, batch):
        with timers.measure("log_probs"):
            data.log_probs = trainer.log_probs(batch)
    if trainer.has_output and flags.loss_type != "sft_loss" and not flags.disable_compute_advantages_and_returns:
        compute_advantages(trainer, batch, data)
    _postprocess(trainer, batch, data)

    steps: list[dict[str, float]] = []
    with timers.measure("actor_train"):
        for step_id, step in enumerate(batch.steps):
            steps.append(_train_step(trainer, batch, data, step_id, step))
    metrics = {**batch.global_stats, **_rollout_metrics(trainer, batch, data), **_mean_of_steps(steps)}
    metrics |= _worst_mismatch(trainer, data)
    return {**metrics, **timers.metrics(batch)}, steps


def reuses_log_probs(config: Config, batch: TrainBatch) -> bool:
    """May the training pass's own log-probs serve as the old policy's?

    They are the same numbers when one optimizer step follows the rollout; a pass over all samples is saved. Not when
    something needs them before the step (KL in the reward, user functions), nor for GSPO.
    """
    flags = config.algorithm
    if flags.loss_type == "sft_loss" or (flags.use_rollout_logprobs and not flags.get_mismatch_metrics):
        return True
    wanted_before = (
        flags.kl_coef != 0
        or flags.get_mismatch_metrics
        or flags.custom_advantage_function_path
        or config.rollout.rollout_data_postprocess_path
    )
    return (
        len(batch.steps) == 1
        and flags.loss_type == "policy_loss"
        and flags.advantage_estimator != "gspo"
        and not wanted_before
    )


def compute_advantages(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Fill ``kl``, ``advantages`` and ``returns``; whiten over all ranks if asked to."""
    flags = trainer.config.algorithm
    masks = data.loss_masks
    if flags.kl_coef != 0:
        assert data.log_probs is not None and data.ref_log_probs is not None
        data.kl = [kl_estimate(new, ref, flags.kl_loss_type) for new, ref in zip(data.log_probs, data.ref_log_probs)]
    else:
        data.kl = [torch.zeros_like(mask) for mask in masks]
    if flags.custom_advantage_function_path:
        view = _hook_view(batch, data)
        load_function(flags.custom_advantage_function_path)(trainer.hooks.args, view)
        data.advantages, data.returns = _from_hook(view, flags.custom_advantage_function_path, masks)
    else:
        estimate = ADVANTAGE_ESTIMATORS[flags.advantage_estimator]
        data.advantages, data.returns = estimate(
            AdvantageInputs(batch.rewards, data.kl, masks, flags.kl_coef, flags.gamma)
        )
    if flags.normalize_advantages:
        data.advantages = whiten(data.advantages, masks, trainer.sum_over_data_parallel)


def _train_step(
    trainer: Trainer, batch: TrainBatch, data: RolloutTensors, step_id: int, step: StepPlan
) -> dict[str, float]:
    """One optimizer step: gradients of all micro-batches, checked, applied."""
    config = trainer.config
    results = trainer.forward_backward(batch, step, lambda samples: _loss_inputs(trainer, batch, data, step, samples))
    if reuses_log_probs(config, batch) and trainer.has_output:
        _collect_log_probs(data, results, batch)
    sums = _sum_metrics(trainer, results)
    bad = [i for result in results if not math.isfinite(result.metrics["loss"].item()) for i in result.samples]
    loss_is_bad = trainer.any_rank(bool(bad))
    if step_id == 0:
        _check_alignment(trainer, batch, data)
    outcome = trainer.optim_step(batch.rollout_id, step_id, step, skip=loss_is_bad)
    if not outcome.applied:
        indices = trainer.gather([batch.sample_indices[i] for i in bad])
        if config.megatron.check_for_nan_in_loss_and_grad:
            raise NonFiniteTraining(batch.rollout_id, step_id, outcome, indices)
        logger.warning("rollout %d, step %d skipped: NaN or Inf (samples %s)", batch.rollout_id, step_id, indices)
    lrs = {f"train/lr-pg_{i}": lr for i, lr in enumerate(trainer.learning_rates())}
    return {
        **{f"train/{name}": value for name, value in sums.items()},
        "train/grad_norm": outcome.grad_norm,
        "train/skipped": 0.0 if outcome.applied else 1.0,
        "train/global_batch_size": float(step.global_batch_size),
        **lrs,
    }


def _loss_inputs(
    trainer: Trainer, batch: TrainBatch, data: RolloutTensors, step: StepPlan, samples: list[int]
) -> LossInputs:
    """The flat tensors of one micro-batch."""
    flags, device = trainer.config.algorithm, trainer.device

    def flat(values: Sequence[Tensor] | None) -> Tensor | None:
        if values is None:
            return None
        return torch.cat([values[i] for i in samples]) if samples else torch.zeros(0, device=device)

    masks = [data.loss_masks[i] for i in samples]
    per_token = step.num_loss_tokens if flags.calculate_per_token_loss else None
    weights = token_weights(masks, [batch.rollout_mask_sums[i] for i in samples], step.global_batch_size, per_token)
    old = data.rollout_log_probs if flags.use_rollout_logprobs else data.log_probs
    if reuses_log_probs(trainer.config, batch) and not flags.use_rollout_logprobs:
        old = None
    lengths = [batch.response_lengths[i] for i in samples]
    return LossInputs(
        samples=samples,
        lengths=torch.tensor(lengths, dtype=torch.long, device=device),
        masks=torch.cat(masks) if masks else torch.zeros(0, device=device),
        weights=weights.to(device),
        sample_weight=1.0 / max(step.num_loss_tokens if per_token is not None else step.global_batch_size, 1),
        total_lengths=[int(batch.tokens[i].numel()) for i in samples],
        advantages=flat(data.advantages),
        old_log_probs=flat(old),
        ref_log_probs=flat(data.ref_log_probs),
        rollout_log_probs=flat(data.rollout_log_probs),
    )


# -- the small print -------------------------------------------------------------------------------------------------


def _check_batch(batch: TrainBatch, config: Config) -> None:
    if config.algorithm.use_rollout_logprobs and batch.rollout_log_probs is None:
        raise UserError(
            "--use-rollout-logprobs needs the engine's log-probs",
            why="the samples of this rollout carry none",
            fix="let the generate function fill rollout_log_probs (Sample.append_response_tokens does)",
        )


def _initial_tensors(trainer: Trainer, batch: TrainBatch) -> RolloutTensors:
    def on_device(values: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if values is None else [v.to(trainer.device) for v in values]

    return RolloutTensors(
        loss_masks=on_device(batch.loss_masks) or [],
        rollout_log_probs=on_device(batch.rollout_log_probs),
    )


def _postprocess(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    path = trainer.config.rollout.rollout_data_postprocess_path
    if not path:
        return
    view = _hook_view(batch, data)
    load_function(path)(trainer.hooks.args, batch.rollout_id, view)
    if data.advantages is not None:
        data.advantages, data.returns = _from_hook(view, path, data.loss_masks)
    data.loss_masks = [mask.to(trainer.device).float() for mask in view["loss_masks"]]


def _hook_view(batch: TrainBatch, data: RolloutTensors) -> dict[str, Any]:
    """``rollout_data`` as hooks know it: one list entry per sample of this rank."""
    return {
        "tokens": batch.tokens,
        "response_lengths": batch.response_lengths,
        "total_lengths": batch.total_lengths,
        "loss_masks": data.loss_masks,
        "rewards": batch.rewards,
        "raw_reward": batch.raw_rewards,
        "truncated": batch.truncated,
        "sample_indices": batch.sample_indices,
        "group_indices": batch.group_indices,
        "rollout_ids": batch.execution_ids,
        "metadata": batch.metadata,
        "log_probs": data.log_probs,
        "ref_log_probs": data.ref_log_probs,
        "rollout_log_probs": data.rollout_log_probs,
        "teacher_log_probs": batch.teacher_log_probs,
        "kl": data.kl,
        "advantages": data.advantages,
        "returns": data.returns,
    }


def _from_hook(view: dict[str, Any], path: str, masks: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    advantages, returns = view.get("advantages"), view.get("returns")
    if advantages is None:
        raise UserError(f"{path} set no advantages", fix='assign rollout_data["advantages"] and ["returns"]')
    returns = advantages if returns is None else returns
    for name, values in (("advantages", advantages), ("returns", returns)):
        lengths, wanted = [len(v) for v in values], [mask.numel() for mask in masks]
        if lengths != wanted:
            raise UserError(
                f"{path} set {name} of other lengths than the responses",
                why=f"lengths {lengths[:8]}… instead of {wanted[:8]}…",
                fix="give one tensor per sample with one value per response token",
            )
    return list(advantages), list(returns)


def _collect_log_probs(data: RolloutTensors, results: Sequence[MicroBatchResult], batch: TrainBatch) -> None:
    """Keep the training pass's log-probs by sample, for the rollout's metrics."""
    if data.log_probs is None:
        data.log_probs = [torch.zeros_like(mask) for mask in data.loss_masks]
    for result in results:
        lengths = [batch.response_lengths[i] for i in result.samples]
        for i, values in zip(result.samples, result.log_probs.split(lengths) if lengths else []):
            data.log_probs[i] = values


def _check_alignment(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """With equal weights the policy's and the reference's log-probs must be the same bits, and the KL exactly 0."""
    if not trainer.reference_is_policy or data.log_probs is None or data.ref_log_probs is None:
        return
    worst = max(
        ((new - ref).abs().max().item() for new, ref in zip(data.log_probs, data.ref_log_probs) if new.numel()),
        default=0.0,
    )
    if worst > 0:
        logger.warning(
            "rollout %d: log_probs and ref_log_probs differ by up to %.2e although both come from the same weights, "
            "so the KL of the first step is not 0. Usual causes: kernels that are not deterministic (with Transformer "
            "Engine, pass --attention-backend flash; with experts, --moe-permute-fusion), a dropout that is not 0, or "
            "--ref-load pointing to other weights than --load",
            batch.rollout_id, worst,
        )  # fmt: skip


def _sum_metrics(trainer: Trainer, results: Sequence[MicroBatchResult]) -> dict[str, float]:
    """Sums over micro-batches and ranks: the metrics are weighted already."""
    if not trainer.has_output:
        return {}
    names = sorted(results[0].metrics)
    table = torch.stack([torch.stack([result.metrics[name].float() for name in names]) for result in results])
    sums = trainer.sum_over_data_parallel(table.sum(dim=0).to(trainer.device))
    return dict(zip(names, sums.tolist()))


def _rollout_metrics(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> dict[str, float]:
    """Token means of the rollout's tensors, weighted as in the loss."""
    if not trainer.has_output:
        return {}
    executions = sum(step.global_batch_size for step in batch.steps)
    per_token = trainer.config.algorithm.calculate_per_token_loss
    tokens = sum(step.num_loss_tokens for step in batch.steps) if per_token else None
    weights = token_weights(data.loss_masks, batch.rollout_mask_sums, max(executions, 1), tokens).to(trainer.device)
    columns = {
        "log_probs": data.log_probs,
        "ref_log_probs": data.ref_log_probs,
        "rollout_log_probs": data.rollout_log_probs,
        "advantages": data.advantages,
        "returns": data.returns,
        "kl": data.kl if data.ref_log_probs is not None else None,
    }
    present = {name: values for name, values in columns.items() if values is not None}
    if not present:
        return {}
    sums = [weighted_sum(torch.cat(v), weights) if v else weights.new_zeros(()) for v in present.values()]
    totals = trainer.sum_over_data_parallel(torch.stack(sums).float())
    return {f"rollout/{name}": value for name, value in zip(present, totals.tolist())}


def _worst_mismatch(trainer: Trainer, data: RolloutTensors) -> dict[str, float]:
    """The largest difference between trainer's and engine's log-prob of any trained token: the mean hides a few bad
    tokens (a wrong position after a prefix hit, say) among thousands of good ones."""
    if not trainer.has_output or data.log_probs is None or data.rollout_log_probs is None:
        return {}
    worst = torch.zeros(1, device=trainer.device)
    for ours, theirs, mask in zip(data.log_probs, data.rollout_log_probs, data.loss_masks):
        if mask.numel():
            difference = torch.where(mask > 0, (ours - theirs).abs(), 0.0)
            worst = torch.maximum(worst, difference.amax())  # NaN stays NaN
    return {"train/train_rollout_logprob_abs_diff_max": trainer.max_over_data_parallel(worst).item()}


def _mean_of_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the optimizer steps; learning rates are the last step's; skipped steps are counted."""
    if not steps:
        return {}
    means: dict[str, float] = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.startswith("train/lr-"):
            means[name] = values[-1]
        elif name == "train/skipped":
            means["train/skipped_steps"] = sum(values)
        else:
            means[name] = sum(values) / len(values)
    return means


class _Timers:
    """Wall time of the phases of an update."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        self.trainer.synchronize()
        start = time.perf_counter()
        yield
        self.trainer.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        tokens = batch.global_stats.get("rollout/num_tokens", float(sum(batch.total_lengths)))
        metrics = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()}
        metrics["perf/actor_train_tok_per_s"] = tokens / max(self.seconds["actor_train"], 1e-9)
        metrics["perf/train_time"] = time.perf_counter() - self.started
        return metrics
