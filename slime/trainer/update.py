"""The update on one rollout, as prose: reference and old log-probs, advantages, then the optimizer
steps.

    TrainBatch ─► ref log-probs ─► old log-probs ─► KL, advantages ─► for each step:
    forward-backward, apply ─► metrics

The verbs are a trainer's (`Trainer`); what they do inside is `slime.trainer.megatron`'s business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from slime.algorithms.advantages import AdvantageInputs, whiten
from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.kl import kl_estimate
from slime.algorithms.reduce import token_weights
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.samples.batch import StepPlan, TrainBatch, TrainedTokens
from slime.trainer.dumps import RankDump, save_train_data, shard_of
from slime.trainer.loss import LOSS_TYPES
from slime.trainer.megatron import device
from slime.trainer.memory import PhaseMemory, held
from slime.trainer.non_finite import FailedStep, NonFiniteTraining, failed_step
from slime.trainer.ranks import Ranks
from slime.trainer.records import LossInputs, MicroBatchResult, RolloutTensors, StepOutcome
from slime.trainer.rollout_metrics import (
    collect_log_probs,
    mean_of_steps,
    quantisation_metrics,
    rollout_metrics,
    sum_metrics,
    worst_mismatch,
)
from slime.trainer.trained_tokens import trained_tokens
from slime.trainer.user_functions import (
    ADVANTAGES,
    POSTPROCESS,
    UserFunctions,
    behind_the_loss,
    change_rollout,
)
from slime.user_code.loading import FunctionFailed, described, named

logger = get_logger(__name__)


class Trainer(Protocol):
    """What an update is made with. Every rank calls each verb equally often."""

    config: Config
    ranks: Ranks
    functions: UserFunctions
    reference_is_policy: bool
    """The reference weights are the same bits as the policy's (a fresh start, no step taken)."""
    failed_step: FailedStep | None
    """What the last step was, when it ended in `NonFiniteTraining`."""
    trained_tokens: list[TrainedTokens]
    """Of the last rollout, where this rank has them: for what is recorded of its samples."""

    def log_probs(
        self,
        batch: TrainBatch,
        *,
        reference: bool = False,
        as_engines: bool = False,
        store_prefix: str = "",
    ) -> list[Tensor] | None:
        """[R_i] per sample, without gradient; None on ranks without output layer."""
        ...

    def forward_backward(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Gradients of ``batch.steps[step_id]``, accumulated; results on ranks with output layer,
        in micro-batch order."""
        ...

    def optim_step(self, step: StepPlan, *, skip: bool) -> StepOutcome: ...

    def nonfinite_gradients(self) -> list[tuple[str, int, int]]:
        """(parameter, entries that are NaN or Inf, entries) on this rank, of the accumulated
        gradients."""
        ...

    def learning_rates(self) -> list[float]: ...


def update(trainer: Trainer, batch: TrainBatch) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train on one rollout.

    Returns:
        (metrics of the rollout, ``train/`` values being means over its optimizer steps; the steps'
        own metrics). Equal, but for timings, on every rank that holds the output layer; others lack
        what is measured there.
    Raises:
        NonFiniteTraining: NaN or Inf, unless ``--no-check-for-nan-in-loss-and-grad``.
        UserError: the loss asks for something that the samples do not have.
    """
    timers = _Timers()
    memory = PhaseMemory(trainer.config, trainer.ranks.device, batch)
    flags = trainer.config.algorithm
    _check_batch(batch, trainer.config)
    data = _initial_tensors(trainer, batch)

    if flags.needs_reference:
        with timers.measure("ref_log_probs"), memory.phase("ref_log_probs"):
            data.ref_log_probs = trainer.log_probs(batch, reference=True, store_prefix="ref_")
    if not reuses_log_probs(trainer.config, batch):
        with timers.measure("log_probs"), memory.phase("log_probs"):
            data.log_probs = trainer.log_probs(batch)
    if trainer.config.quantised.measure_quantisation:
        with timers.measure("engine_log_probs"), memory.phase("log_probs"):
            data.engine_log_probs = trainer.log_probs(
                batch, as_engines=True, store_prefix="engine_"
            )
    if trainer.ranks.has_output:
        compute_advantages(trainer, batch, data)
    _postprocess(trainer, batch, data)
    _check_advantages(trainer, data)

    steps: list[dict[str, float]] = []
    with timers.measure("actor_train"):
        for step_id in range(len(batch.steps)):
            steps.append(_train_step(trainer, batch, data, memory, step_id))
    _dump(trainer, batch, data)
    trainer.trained_tokens = trained_tokens(trainer.ranks, batch, data)
    metrics = {**batch.global_stats, **rollout_metrics(trainer.config, trainer.ranks, batch, data)}
    metrics |= mean_of_steps(steps, first_only=flags.use_rollout_logprobs)
    metrics |= worst_mismatch(trainer.ranks, data) | quantisation_metrics(
        trainer.config, trainer.ranks, batch, data
    )
    kept = held(trainer.ranks.device)
    here = torch.tensor(
        [*kept.values(), *memory.peaks.values()], dtype=torch.float64, device=trainer.ranks.device
    )
    most = trainer.ranks.max_over_all(here).tolist()
    metrics |= dict(zip(kept, most)) | memory.metrics(most[len(kept) :])
    return {**metrics, **timers.metrics(batch)}, steps


def reuses_log_probs(config: Config, batch: TrainBatch) -> bool:
    """May the training pass's own log-probs serve as the old policy's?

    They are the same numbers when one optimizer step follows the rollout; a pass over all samples
    is saved. Not when something needs them before the step (KL in the reward, user functions), nor
    for an estimator that says so.
    """
    flags = config.algorithm
    loss = LOSS_TYPES[config.algorithm.loss_type]
    if records_routing(config):
        return False
    if not loss.takes_old_log_probs or (
        flags.use_rollout_logprobs and not flags.get_mismatch_metrics
    ):
        return True
    wanted_before = (
        flags.kl_coef != 0
        or flags.get_mismatch_metrics
        or flags.custom_advantage_function_path
        or config.rollout.rollout_data_postprocess_path
    )
    facts = ESTIMATORS[flags.advantage_estimator].facts
    return (
        len(batch.steps) == 1
        and loss.reuses_train_logprobs
        and facts.reuses_train_logprobs
        and not wanted_before
    )


def records_routing(config: Config) -> bool:
    """Does training replay the experts of the old-policy pass, which must therefore run?"""
    return config.train.use_routing_replay and not config.train.use_rollout_routing_replay


def compute_advantages(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Fill ``kl``, ``advantages`` and ``returns``; whiten over all replicas if asked to.

    By the user's function where there is one, also with
    ``--disable-compute-advantages-and-returns``, which switches off the estimator alone.

    Raises:
        FunctionFailed: the user's function sets no advantages, or something that cannot be changed.
    """
    flags = trainer.config.algorithm
    functions = trainer.functions
    if not LOSS_TYPES[flags.loss_type].takes_advantages:
        return
    if functions.advantages is None and flags.disable_compute_advantages_and_returns:
        return
    if flags.kl_coef != 0:
        old = data.rollout_log_probs if flags.use_rollout_logprobs else data.log_probs
        assert old is not None and data.ref_log_probs is not None
        data.kl = [
            kl_estimate(lp, ref, flags.kl_loss_type) for lp, ref in zip(old, data.ref_log_probs)
        ]
    else:
        data.kl = [torch.zeros_like(mask) for mask in data.loss_masks]
    if functions.advantages is not None:
        change = functions.advantages
        origin = named(str(flags.custom_advantage_function_path), ADVANTAGES)
        unread = _without_effect(trainer, data)
        returned = change_rollout(
            lambda view: change(functions.args, view), origin, batch, data, unread
        )
        if data.advantages is None:
            raise FunctionFailed(
                f"{origin} set no advantages",
                why=f"it returned {described(returned)}, which nothing reads"
                if returned is not None
                else "",
                fix='assign rollout_data["advantages"], a list with one float32 tensor [R] per '
                "sample, R being its "
                "response tokens",
            )
    else:
        data.advantages, data.returns = ESTIMATORS[flags.advantage_estimator].advantages(
            AdvantageInputs(batch.rewards, data.kl, data.loss_masks, flags.kl_coef, flags.gamma)
        )
    if flags.normalize_advantages:
        ranks = trainer.ranks
        data.advantages = whiten(
            data.advantages, data.loss_masks, ranks.sum_over_replicas, ranks.device
        )


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
    sums = sum_metrics(trainer.config, trainer.ranks, results)
    bad = [
        i
        for result in results
        if not math.isfinite(result.metrics["loss"].item())
        for i in result.samples
    ]
    loss_is_bad = trainer.ranks.any_of_all(bool(bad))
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
    indices = trainer.ranks.union([batch.sample_indices[i] for i in bad])
    # a loss scale that is tuned as training goes overflows now and then; that is how it finds its
    # value
    is_routine = megatron.fp16 and not indices and megatron.optimizer.get("loss_scale") is None
    functions = behind_the_loss(trainer.config)
    if not megatron.check_for_nan_in_loss_and_grad or is_routine:
        said = "rollout %d, step %d skipped: NaN or Inf (samples %s)%s"
        suspects = f"; look first at {', '.join(functions)}" if functions and not is_routine else ""
        logger.warning(said, batch.rollout_id, step_id, indices, suspects)
        return
    found = trainer.nonfinite_gradients()
    trainer.failed_step = failed_step(trainer.ranks, batch, data, results, step_id, outcome, found)
    names = trainer.ranks.union([name for name, _, _ in found])
    raise NonFiniteTraining(batch.rollout_id, step_id, outcome.grad_norm, indices, names, functions)


def _note_log_probs(
    trainer: Trainer,
    batch: TrainBatch,
    data: RolloutTensors,
    results: Sequence[MicroBatchResult],
    step_id: int,
) -> None:
    """The training pass's log-probs as those of the rollout, where no pass of their own computed
    them.

    To be compared with the engine's they must be those from before training: of the first step's
    samples only.
    """
    if not (trainer.ranks.has_output and reuses_log_probs(trainer.config, batch)):
        return
    if trainer.config.algorithm.use_rollout_logprobs and len(batch.steps) > 1:
        if step_id > 0:
            return
        data.before_training = sorted(
            i for samples in batch.steps[0].micro_batches for i in samples
        )
    collect_log_probs(data, results, batch)


def _dump(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """``--save-debug-train-data``: one file for the samples of all ranks. Collective."""
    pattern = trainer.config.debug.save_debug_train_data
    if not pattern:
        return
    ranks = trainer.ranks
    shard = shard_of(batch, data, ranks.replica) if ranks.speaks_for_shard else None
    found = ranks.on_first(None if shard is None else vars(shard))
    if found is not None:
        shards = [RankDump(**fields) for fields in found]
        logger.info(
            "training data of rollout %d: %s",
            batch.rollout_id,
            save_train_data(pattern, batch.rollout_id, shards),
        )


def _loss_inputs(
    trainer: Trainer, batch: TrainBatch, data: RolloutTensors, step: StepPlan, samples: list[int]
) -> LossInputs:
    """The flat tensors of one micro-batch."""
    flags = trainer.config.algorithm
    where = trainer.ranks.device

    def flat(values: Sequence[Tensor] | None) -> Tensor | None:
        if values is None:
            return None
        return torch.cat([values[i] for i in samples]) if samples else torch.zeros(0, device=where)

    masks = [data.loss_masks[i] for i in samples]
    per_token = step.num_loss_tokens if flags.calculate_per_token_loss else None
    weights = token_weights(
        masks, [batch.rollout_mask_sums[i] for i in samples], step.global_batch_size, per_token
    )
    old = data.rollout_log_probs if flags.use_rollout_logprobs else data.log_probs
    if reuses_log_probs(trainer.config, batch) and not flags.use_rollout_logprobs:
        old = None
    lengths = [batch.response_lengths[i] for i in samples]
    return LossInputs(
        samples=samples,
        sample_indices=[batch.sample_indices[i] for i in samples],
        lengths=torch.tensor(lengths, dtype=torch.long, device=where),
        masks=torch.cat(masks) if masks else torch.zeros(0, device=where),
        weights=weights.to(where),
        sample_weight=1.0
        / max(step.num_loss_tokens if per_token is not None else step.global_batch_size, 1),
        total_lengths=[int(batch.tokens[i].numel()) for i in samples],
        advantages=flat(data.advantages),
        old_log_probs=flat(old),
        ref_log_probs=flat(data.ref_log_probs),
        rollout_log_probs=flat(data.rollout_log_probs),
        trained_log_probs=flat(data.log_probs)
        if flags.use_rollout_logprobs and flags.get_mismatch_metrics
        else None,
    )


# -- the small print
# -------------------------------------------------------------------------------------------------


def _check_batch(batch: TrainBatch, config: Config) -> None:
    if config.algorithm.use_rollout_logprobs and batch.rollout_log_probs is None:
        raise UserError(
            "--use-rollout-logprobs needs the engine's log-probs",
            why="the samples of this rollout carry none",
            fix="let the generate function fill rollout_log_probs (Sample.append_response_tokens "
            "does)",
        )


def _initial_tensors(trainer: Trainer, batch: TrainBatch) -> RolloutTensors:
    def on_device(values: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if values is None else [v.to(trainer.ranks.device) for v in values]

    return RolloutTensors(
        loss_masks=on_device(batch.loss_masks) or [],
        rollout_log_probs=on_device(batch.rollout_log_probs),
    )


def _postprocess(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    change = trainer.functions.postprocess
    args = trainer.functions.args
    if change is not None:
        origin = named(str(trainer.config.rollout.rollout_data_postprocess_path), POSTPROCESS)
        unread = _without_effect(trainer, data)
        change_rollout(
            lambda view: change(args, batch.rollout_id, view), origin, batch, data, unread
        )


def _without_effect(trainer: Trainer, data: RolloutTensors) -> dict[str, str]:
    """Tensors of the rollout that nothing will read, with the reason; functions that assign them
    would be ignored."""
    if (
        not trainer.ranks.has_output
    ):  # where none of them is read, and a function need not know that
        return {}
    flags = trainer.config.algorithm
    unread: dict[str, str] = {}
    if not LOSS_TYPES[flags.loss_type].takes_advantages:
        unread |= dict.fromkeys(
            ("advantages", "returns"), f"--loss-type {flags.loss_type} takes none"
        )
    if data.log_probs is None:
        unread["log_probs"] = "the old policy's log-probs are not computed with these flags"
    if data.ref_log_probs is None:
        unread["ref_log_probs"] = "no flag asks for a reference model"
    return unread


def _check_advantages(trainer: Trainer, data: RolloutTensors) -> None:
    flags = trainer.config.algorithm
    if (
        trainer.ranks.has_output
        and LOSS_TYPES[flags.loss_type].needs_advantages
        and data.advantages is None
    ):
        raise UserError(
            f"--loss-type {flags.loss_type} needs advantages, and nothing sets any",
            why="--disable-compute-advantages-and-returns switches the estimator off, and no "
            "function of yours sets "
            'rollout_data["advantages"]',
            fix="leave that flag out, or pass --custom-advantage-function-path",
        )


def _check_alignment(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """With equal weights the policy's and the reference's log-probs must be the same bits, and the
    KL exactly 0."""
    if not trainer.reference_is_policy or data.log_probs is None or data.ref_log_probs is None:
        return
    if trainer.config.train.use_rollout_routing_replay:  # the reference chooses its experts itself
        return
    pairs = [(data.log_probs[i], data.ref_log_probs[i]) for i in data.samples_before_training()]
    worst = max(((new - ref).abs().max().item() for new, ref in pairs if new.numel()), default=0.0)
    if worst > 0:
        logger.warning(
            "rollout %d: log_probs and ref_log_probs differ by up to %.2e although both come from "
            "the same weights, so the KL of the first step is not 0. Usual causes: kernels that "
            "are not deterministic (pass --deterministic-mode; with Transformer Engine, "
            "--attention-backend flash), a dropout that is not 0, or --ref-load pointing to other "
            "weights than --load",
            batch.rollout_id, worst,
        )  # fmt: skip


class _Timers:
    """Wall time of the phases of an update."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        device.synchronize()
        start = time.perf_counter()
        yield
        device.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        tokens = batch.global_stats.get("rollout/num_tokens", float(sum(batch.total_lengths)))
        metrics = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()}
        metrics["perf/actor_train_tok_per_s"] = tokens / max(self.seconds["actor_train"], 1e-9)
        metrics["perf/train_time"] = time.perf_counter() - self.started
        return metrics
