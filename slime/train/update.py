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
from slime.algorithms.reduce import token_weights
from slime.config import Config
from slime.errors import UserError
from slime.hook_loading import load_function
from slime.log import get_logger
from slime.samples.batch import StepPlan, TrainBatch
from slime.train.dumps import Shard, save_train_data, shard_of
from slime.train.hook_view import advantages_of, hook_view
from slime.train.loss import LossHooks
from slime.train.memory import PhaseMemory
from slime.train.non_finite import FailedStep, NonFiniteTraining, failed_step
from slime.train.records import LossInputs, MicroBatchResult, RolloutTensors, StepOutcome
from slime.train.rollout_metrics import (
    collect_log_probs,
    mean_of_steps,
    rollout_metrics,
    sum_metrics,
    worst_mismatch,
)

logger = get_logger(__name__)


class Trainer(Protocol):
    """The verbs that an update uses. Every rank calls each of them equally often."""

    config: Config
    device: torch.device
    hooks: LossHooks
    has_output: bool
    """This rank holds the output layer: it sees log-probs and computes the loss."""
    reference_is_policy: bool
    """The reference weights are the same bits as the policy's (a fresh start, no step taken)."""
    failed_step: FailedStep | None
    """What the last step was, when it ended in `NonFiniteTraining`."""

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def speaks_for_shard(self) -> bool:
        """Of the ranks that share a `TrainBatch`, this is the one whose tensors are written to files."""
        ...

    def log_probs(self, batch: TrainBatch, *, reference: bool = False, store_prefix: str = "") -> list[Tensor] | None:
        """[R_i] per sample, without gradient; None on ranks without output layer."""
        ...

    def forward_backward(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Gradients of ``batch.steps[step_id]``, accumulated; results on ranks with output layer, in micro-batch
        order."""
        ...

    def optim_step(self, step: StepPlan, *, skip: bool) -> StepOutcome: ...

    def sum_over_data_parallel(self, values: Tensor) -> Tensor: ...

    def max_over_data_parallel(self, values: Tensor) -> Tensor: ...

    def max_over_ranks(self, values: Tensor) -> Tensor: ...

    def any_rank(self, flag: bool) -> bool: ...

    def gather(self, values: list[Any]) -> list[Any]:
        """All ranks' values, joined, sorted, without duplicates."""
        ...

    def gather_shards(self, shard: Shard | None) -> list[Shard] | None:
        """The shards of all ranks that have one, on the rank that writes files; None on others."""
        ...

    def nonfinite_gradients(self) -> list[tuple[str, int, int]]:
        """(parameter, entries that are NaN or Inf, entries) on this rank, of the accumulated gradients."""
        ...

    def synchronize(self) -> None: ...

    def learning_rates(self) -> list[float]: ...


def update(trainer: Trainer, batch: TrainBatch) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train on one rollout.

    Returns:
        (metrics of the rollout, ``train/`` values being means over its optimizer steps; the steps' own metrics).
        Equal, but for timings, on every rank that holds the output layer; others lack what is measured there.
    Raises:
        NonFiniteTraining: NaN or Inf, unless ``--no-check-for-nan-in-loss-and-grad``.
        UserError: the loss asks for something that the samples do not have.
    """
    timers, memory = _Timers(trainer), PhaseMemory(trainer.config, trainer.device, batch)
    flags = trainer.config.algorithm
    _check_batch(batch, trainer.config)
    data = _initial_tensors(trainer, batch)

    if flags.needs_reference:
        with timers.measure("ref_log_probs"), memory.phase("ref_log_probs"):
            data.ref_log_probs = trainer.log_probs(batch, reference=True, store_prefix="ref_")
    if not reuses_log_probs(trainer.config, batch):
        with timers.measure("log_probs"), memory.phase("log_probs"):
            data.log_probs = trainer.log_probs(batch)
    if trainer.has_output and flags.loss_type != "sft_loss" and not flags.disable_compute_advantages_and_returns:
        compute_advantages(trainer, batch, data)
    _postprocess(trainer, batch, data)

    steps: list[dict[str, float]] = []
    with timers.measure("actor_train"):
        for step_id in range(len(batch.steps)):
            steps.append(_train_step(trainer, batch, data, memory, step_id))
    _dump(trainer, batch, data)
    metrics = {**batch.global_stats, **rollout_metrics(trainer, batch, data)}
    metrics |= mean_of_steps(steps, first_only=flags.use_rollout_logprobs)
    metrics |= worst_mismatch(trainer, data)
    peaks = torch.tensor(list(memory.peaks.values()), dtype=torch.float64, device=trainer.device)
    metrics |= memory.metrics(trainer.max_over_ranks(peaks).tolist())
    return {**metrics, **timers.metrics(batch)}, steps


def reuses_log_probs(config: Config, batch: TrainBatch) -> bool:
    """May the training pass's own log-probs serve as the old policy's?

    They are the same numbers when one optimizer step follows the rollout; a pass over all samples is saved. Not when
    something needs them before the step (KL in the reward, user functions), nor for GSPO.
    """
    flags = config.algorithm
    if records_routing(config):
        return False
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


def records_routing(config: Config) -> bool:
    """Does training replay the experts of the old-policy pass, which must therefore run?"""
    return config.train.use_routing_replay and not config.train.use_rollout_routing_replay


def compute_advantages(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Fill ``kl``, ``advantages`` and ``returns``; whiten over all ranks if asked to."""
    flags = trainer.config.algorithm
    masks = data.loss_masks
    if flags.kl_coef != 0:
        old = data.rollout_log_probs if flags.use_rollout_logprobs else data.log_probs
        assert old is not None and data.ref_log_probs is not None
        data.kl = [kl_estimate(lp, ref, flags.kl_loss_type) for lp, ref in zip(old, data.ref_log_probs)]
    else:
        data.kl = [torch.zeros_like(mask) for mask in masks]
    if flags.custom_advantage_function_path:
        view = hook_view(batch, data)
        load_function(flags.custom_advantage_function_path)(trainer.hooks.args, view)
        data.advantages, data.returns = advantages_of(view, flags.custom_advantage_function_path, masks)
    else:
        estimate = ADVANTAGE_ESTIMATORS[flags.advantage_estimator]
        data.advantages, data.returns = estimate(
            AdvantageInputs(batch.rewards, data.kl, masks, flags.kl_coef, flags.gamma)
        )
    if flags.normalize_advantages:
        data.advantages = whiten(data.advantages, masks, trainer.sum_over_data_parallel, trainer.device)


def _train_step(
    trainer: Trainer, batch: TrainBatch, data: RolloutTensors, memory: PhaseMemory, step_id: int
) -> dict[str, float]:
    """One optimizer step: gradients of all micro-batches, checked, applied."""
    step = batch.steps[step_id]
    with memory.phase("forward_backward"):
        results = trainer.forward_backward(
            batch, step_id, lambda samples: _loss_inputs(trainer, batch, data, step, samples)
        )
    _note_log_probs(trainer, batch, data, results, step_id)
    sums = sum_metrics(trainer, results)
    bad = [i for result in results if not math.isfinite(result.metrics["loss"].item()) for i in result.samples]
    loss_is_bad = trainer.any_rank(bool(bad))
    if step_id == 0:
        _check_alignment(trainer, batch, data)
    with memory.phase("optimizer"):
        outcome = trainer.optim_step(step, skip=loss_is_bad)
    if not outcome.applied:
        _not_applied(trainer, batch, data, results, step_id, outcome, bad)
    lrs = {f"train/lr-pg_{i}": lr for i, lr in enumerate(trainer.learning_rates())}
    return {
        **{f"train/{name}": value for name, value in sums.items()},
        **{f"train/{name}": value for name, value in outcome.metrics.items()},
        "train/grad_norm": outcome.grad_norm,
        "train/skipped": 0.0 if outcome.applied else 1.0,
        "train/global_batch_size": float(step.global_batch_size),
        **lrs,
    }


def _not_applied(
    trainer: Trainer,
    batch: TrainBatch,
    data: RolloutTensors,
    results: Sequence[MicroBatchResult],
    step_id: int,
    outcome: StepOutcome,
    bad: list[int],
) -> None:
    """A step with NaN or Inf: keep what it was and stop, or say that it is skipped.

    Raises:
        NonFiniteTraining: on every rank.
    """
    megatron = trainer.config.megatron
    indices = trainer.gather([batch.sample_indices[i] for i in bad])
    # a loss scale that is tuned as training goes overflows now and then; that is how it finds its value
    is_routine = megatron.fp16 and not indices and megatron.optimizer.get("loss_scale") is None
    if not megatron.check_for_nan_in_loss_and_grad or is_routine:
        logger.warning("rollout %d, step %d skipped: NaN or Inf (samples %s)", batch.rollout_id, step_id, indices)
        return
    found = trainer.nonfinite_gradients()
    trainer.failed_step = failed_step(trainer, batch, data, results, step_id, outcome, found)
    names = trainer.gather([name for name, _, _ in found])
    raise NonFiniteTraining(batch.rollout_id, step_id, outcome.grad_norm, indices, names)


def _note_log_probs(
    trainer: Trainer, batch: TrainBatch, data: RolloutTensors, results: Sequence[MicroBatchResult], step_id: int
) -> None:
    """The training pass's log-probs as those of the rollout, where no pass of their own computed them.

    To be compared with the engine's they must be those from before training: of the first step's samples only.
    """
    if not (trainer.has_output and reuses_log_probs(trainer.config, batch)):
        return
    if trainer.config.algorithm.use_rollout_logprobs and len(batch.steps) > 1:
        if step_id > 0:
            return
        data.before_training = sorted(i for samples in batch.steps[0].micro_batches for i in samples)
    collect_log_probs(data, results, batch)


def _dump(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """``--save-debug-train-data``: one file for the samples of all ranks. Collective."""
    pattern = trainer.config.debug.save_debug_train_data
    if not pattern:
        return
    shard = shard_of(batch, data, trainer.data_parallel_rank) if trainer.speaks_for_shard else None
    shards = trainer.gather_shards(shard)
    if shards is not None:
        logger.info(
            "training data of rollout %d: %s", batch.rollout_id, save_train_data(pattern, batch.rollout_id, shards)
        )


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
        trained_log_probs=flat(data.log_probs) if flags.use_rollout_logprobs and flags.get_mismatch_metrics else None,
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
    view = hook_view(batch, data)
    load_function(path)(trainer.hooks.args, batch.rollout_id, view)
    if data.advantages is not None:
        data.advantages, data.returns = advantages_of(view, path, data.loss_masks)
    data.loss_masks = [mask.to(trainer.device).float() for mask in view["loss_masks"]]


def _check_alignment(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """With equal weights the policy's and the reference's log-probs must be the same bits, and the KL exactly 0."""
    if not trainer.reference_is_policy or data.log_probs is None or data.ref_log_probs is None:
        return
    if trainer.config.train.use_rollout_routing_replay:  # the reference chooses its experts itself
        return
    pairs = [(data.log_probs[i], data.ref_log_probs[i]) for i in data.samples_before_training()]
    worst = max(((new - ref).abs().max().item() for new, ref in pairs if new.numel()), default=0.0)
    if worst > 0:
        logger.warning(
            "rollout %d: log_probs and ref_log_probs differ by up to %.2e although both come from the same weights, "
            "so the KL of the first step is not 0. Usual causes: kernels that are not deterministic (pass "
            "--deterministic-mode; with Transformer Engine, --attention-backend flash), a dropout that is not 0, or "
            "--ref-load pointing to other weights than --load",
            batch.rollout_id, worst,
        )  # fmt: skip


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
