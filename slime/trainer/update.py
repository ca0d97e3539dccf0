"""The update on one rollout, in three steps:

    TrainBatch ─► score ─► compute_advantages ─► learn ─► metrics

`score` lets each scorer add its column of log-probs, `compute_advantages` turns rewards into
advantages, and `learn` takes the optimizer steps. With a critic, its values are another column, and
it learns before the policy (`train_critic`). A critic on its own GPUs computes and learns at the
same time, and the driver transfers its values and the returns:

    policy's ranks   Update.score ──────► set_values ─► returns ──► learn
    critic's ranks   CriticUpdate.values ─────┘            └──────► learn

A critic with its own layout on the policy's ranks does the same in turns, and the ranks exchange
the columns (`train_other_layout`).

`slime.trainer.megatron` implements the methods of `Trainer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.advantages import AdvantageInputs, whiten
from slime.algorithms.distillation import distilled_advantages, sampled_reverse_kl
from slime.algorithms.estimators import ESTIMATORS
from slime.algorithms.kl import kl_estimate
from slime.algorithms.reduce import token_weights
from slime.algorithms.values import ReturnScale, return_statistics
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.samples.batch import StepPlan, TrainBatch, TrainedTokens
from slime.trainer.distillation import teacher_columns_of, teacher_inputs
from slime.trainer.dumps import RankDump, save_train_data, shard_of
from slime.trainer.megatron import device
from slime.trainer.memory import LargestMicroBatch, PhaseMemory
from slime.trainer.non_finite import FailedStep, NonFiniteTraining
from slime.trainer.preferences import labels_of, preference_step
from slime.trainer.ranks import Ranks
from slime.trainer.records import (
    LossInputs,
    MicroBatchResult,
    PreferenceStep,
    RolloutTensors,
    StepOutcome,
    TeacherColumns,
)
from slime.trainer.role import POLICY, REFERENCE, policy_loss
from slime.trainer.rollout_metrics import (
    distillation_metrics,
    mean_of_steps,
    old_log_probs,
    quantisation_metrics,
    reference_tokens,
    sum_metrics,
    token_means,
    trained_tokens,
    worst_mismatch,
)
from slime.trainer.user_functions import (
    ADVANTAGES,
    POSTPROCESS,
    UserFunctions,
    change_rollout,
    functions_before_loss,
)
from slime.user_code.loading import FunctionFailed, check_returns_nothing, described, named

logger = get_logger(__name__)


class Learner(Protocol):
    """A model that learns. Every method is collective: all ranks must call it."""

    def forward_backward(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Accumulate the gradients of ``batch.steps[step_id]``. On ranks with the output layer,
        return the result of each micro-batch, in order."""
        ...

    def optim_step(self, step: StepPlan, *, skip: bool) -> StepOutcome: ...

    def nonfinite_gradients(self) -> list[tuple[str, int, int]]:
        """Return (parameter, number of NaN or Inf entries, number of entries) of each of this
        rank's accumulated gradients that is not finite."""
        ...

    def learning_rates(self) -> Sequence[float]: ...


class TrainerRank(Protocol):
    """A rank on which something learns."""

    config: Config
    ranks: Ranks
    failed_step: FailedStep | None
    """The record of the last step, if it raised `NonFiniteTraining`."""


class ValueLearner(Learner, TrainerRank, Protocol):
    """The critic, with the ranks of its own layout."""

    return_scale: ReturnScale
    """Scale of its outputs; on ranks with the output layer."""

    def begin_rollout(self) -> None: ...

    def outputs(self, batch: TrainBatch) -> list[Tensor] | None:
        """Return the normalised value before each response token: [R_i] per sample, without
        gradient; None on ranks without the output layer."""
        ...

    def end_rollout(self) -> None: ...


class Trainer(Learner, TrainerRank, Protocol):
    """The methods that an update calls; the `Learner` methods are those of the policy."""

    functions: UserFunctions
    reference_is_policy: bool
    """Whether the reference's weights are bit-identical to the policy's (before a first step)."""
    trained_tokens: list[TrainedTokens]
    """The recorded tokens of the last rollout that this rank has."""

    @property
    def critic(self) -> ValueLearner | None: ...

    def losses(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Do as `forward_backward`, without gradients."""
        ...

    def critic_turn(self) -> AbstractContextManager[None]:
        """Return a context in which the critic can compute, and the policy may be offloaded."""
        ...

    def log_probs(
        self,
        batch: TrainBatch,
        role: str,
        *,
        as_engines: bool = False,
        store_prefix: str = "",
        micro_batches: list[list[int]] | None = None,
    ) -> list[Tensor] | None:
        """Return the log-probs of the response tokens under the model of this
        `slime.trainer.role.Role`: [R_i] per sample, without gradient; None on ranks without the
        output layer.

        Args:
            micro_batches: the samples to score, others get zeros; None for all.
        """
        ...

    def score_by_teacher(self, batch: TrainBatch, name: str, found: TeacherColumns) -> None:
        """Let the teacher of this name score its samples; ranks with the output layer store the
        scores in ``found``."""
        ...


def update(
    trainer: Trainer, batch: TrainBatch, critic_batch: TrainBatch | None = None
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Train on one rollout.

    Args:
        critic_batch: the critic's shard, if it has its own layout on the policy's ranks.
    Returns:
        The metrics of the rollout, in which ``train/`` values are means over its optimizer steps,
        and the metrics of each step. Apart from timings, they are equal on all ranks that hold the
        output layer; other ranks lack those that are measured there.
    Raises:
        NonFiniteTraining: NaN or Inf, unless ``--no-check-for-nan-in-loss-and-grad``.
        UserError: the samples lack an input of the loss.
    """
    current = Update(trainer, batch)
    current.score()
    if trainer.critic is None:
        current.compute_advantages()
    else:
        with trainer.critic_turn():
            if critic_batch is None:
                current.train_critic(trainer.critic)
            else:
                current.train_other_layout(trainer.critic, critic_batch)
    return current.learn()


#: An array [R] for each sample, by its position in the rollout (`TrainBatch.positions`).
ByPosition = dict[int, np.ndarray]


def by_position(batch: TrainBatch, column: Sequence[Tensor] | None, ranks: Ranks) -> ByPosition:
    """Key a column of the shard's samples by position, for ranks of another layout; {} if this rank
    does not speak for the shard."""
    if column is None or not ranks.speaks_for_shard:
        return {}
    return {place: values.cpu().numpy() for place, values in zip(batch.positions, column)}


def in_shard(batch: TrainBatch, found: ByPosition, ranks: Ranks) -> list[Tensor] | None:
    """Invert `by_position`: return the column of the shard's samples; None on ranks without the
    output layer."""
    if not ranks.has_output:
        return None
    # a copy: arrays from Ray are read-only
    return [torch.tensor(found[place], device=ranks.device) for place in batch.positions]


class RolloutUpdate:
    """An update on one rollout: its tensors, the wall time and peak memory of its phases, and the
    steps that policy and critic have in common. Every method is collective."""

    def __init__(self, rank: TrainerRank, batch: TrainBatch, *, of_critic: bool = False) -> None:
        self.rank = rank
        self.batch = batch
        self.timers = _Timers()
        largest = LargestMicroBatch.of(batch.steps, batch.total_lengths, batch.sample_indices)
        self.memory = PhaseMemory(rank.config, rank.ranks.device, largest, of_critic=of_critic)
        self.data = _initial_tensors(rank, batch)

    def compute_values(self, critic: ValueLearner) -> None:
        """Fill ``value_outputs`` and ``values``."""
        critic.begin_rollout()
        with self.timers.measure("values"), self.memory.phase("values"):
            self.data.value_outputs = critic.outputs(self.batch)
        if self.data.value_outputs is not None:
            scale = critic.return_scale
            self.data.values = [scale.restored(outputs) for outputs in self.data.value_outputs]

    def learn_returns(self, critic: ValueLearner) -> list[dict[str, float]]:
        """Take the critic's optimizer steps on ``returns``; return the metrics of each step.

        Raises:
            NonFiniteTraining: as for `update`.
        """
        explained = _set_value_targets(self.rank, critic, self.data)
        with self.timers.measure("critic_train"):
            steps = [
                self._train_step(critic, step_id) | explained
                for step_id in range(len(self.batch.steps))
            ]
        critic.end_rollout()
        return steps

    def _train_step(
        self, learner: Learner, step_id: int, policy: Trainer | None = None
    ) -> dict[str, float]:
        """Compute the gradients of all micro-batches, check them, and apply them.

        Args:
            policy: the trainer, if the policy learns; None for a critic.
        """
        batch = self.batch
        data = self.data
        ranks = self.rank.ranks
        step = batch.steps[step_id]
        if policy is not None and policy.config.algorithm.preference is not None:
            preferences = preference_step(policy, batch, data, step)
        else:
            preferences = None
        prefix = "train/critic-" if policy is None else "train/"
        phase = "critic_forward_backward" if policy is None else "forward_backward"
        with self.memory.phase(phase):
            results = learner.forward_backward(
                batch,
                step_id,
                lambda samples: _loss_inputs(self.rank, batch, data, step, samples, preferences),
            )
        if policy is not None:
            _note_log_probs(policy, batch, data, results, step_id)
        sums = sum_metrics(self.rank.config, ranks, results)
        bad = [
            i
            for result in results
            if not math.isfinite(result.metrics["loss"].item())
            for i in result.samples
        ]
        loss_is_bad = ranks.any_of_all(bool(bad))
        if step_id == 0 and policy is not None:
            _check_alignment(policy, batch, data)
        with self.memory.phase("optimizer"):
            outcome = learner.optim_step(step, skip=loss_is_bad)
        if not outcome.applied:
            self._skip_or_stop(learner, results, step_id, outcome, bad, of_critic=policy is None)
        if policy is not None:
            sums["global_batch_size"] = float(step.global_batch_size)
        else:
            sums.pop("loss", None)  # it is the value loss
        return {
            **{f"{prefix}{name}": value for name, value in (sums | outcome.metrics).items()},
            f"{prefix}grad_norm": outcome.grad_norm,
            f"{prefix}skipped": 0.0 if outcome.applied else 1.0,
            **{f"{prefix}lr-pg_{i}": lr for i, lr in enumerate(learner.learning_rates())},
        }

    def _skip_or_stop(
        self,
        learner: Learner,
        results: Sequence[MicroBatchResult],
        step_id: int,
        outcome: StepOutcome,
        bad: list[int],
        *,
        of_critic: bool,
    ) -> None:
        """Log that a step with NaN or Inf is skipped, or stop at it and record its data.

        Args:
            bad: the shard's samples in micro-batches whose loss is NaN or Inf.
        Raises:
            NonFiniteTraining: on every rank.
        """
        batch = self.batch
        megatron = self.rank.config.megatron
        ranks = self.rank.ranks
        indices = ranks.union([batch.sample_indices[i] for i in bad])
        # a dynamic loss scale adjusts itself by overflowing now and then
        is_routine = megatron.fp16 and not indices and megatron.optimizer.get("loss_scale") is None
        functions = functions_before_loss(self.rank.config)
        if not megatron.check_for_nan_in_loss_and_grad or is_routine:
            names = ", ".join(functions)
            suspects = f"; look first at {names}" if functions and not is_routine else ""
            logger.warning(
                "rollout %d, step %d%s skipped: NaN or Inf (samples %s)%s",
                batch.rollout_id,
                step_id,
                " of the critic" if of_critic else "",
                indices,
                suspects,
            )
            return
        failed = FailedStep(batch.rollout_id, step_id, ranks.replica, outcome.grad_norm)
        failed.parameters = learner.nonfinite_gradients()
        if ranks.speaks_for_shard:
            current: list[Tensor | None] = [None] * batch.num_samples
            for result in results:
                for i, values in result.by_sample(batch.response_lengths):
                    current[i] = values
            column = "training_values" if of_critic else "training_log_probs"
            failed.shard = shard_of(batch, self.data, ranks.replica, step_id, **{column: current})
            failed.micro_batches = [
                {"sample_indices": [batch.sample_indices[i] for i in result.samples]}
                | {name: value.item() for name, value in result.metrics.items()}
                for result in results
            ]
        self.rank.failed_step = failed
        raise NonFiniteTraining(
            batch.rollout_id,
            step_id,
            outcome.grad_norm,
            indices,
            ranks.union([name for name, _, _ in failed.parameters]),
            functions,
            of_critic=of_critic,
        )


class Update(RolloutUpdate):
    """The update of the policy, stage by stage."""

    def __init__(self, trainer: Trainer, batch: TrainBatch) -> None:
        _check_batch(batch, trainer.config)
        super().__init__(trainer, batch)
        self.trainer = trainer
        self.critic_steps: list[dict[str, float]] = []

    def score(self) -> None:
        """Fill the columns of log-probs that something reads: of policy, reference and teachers.

        Raises:
            UserError: samples carry no log-probs of a teacher in an engine; a teacher in the
                trainer computes something else than when it was loaded.
        """
        for scorer in SCORERS:
            if scorer.is_wanted(self.trainer.config, self.batch):
                with self.timers.measure(scorer.column), self.memory.phase(scorer.phase):
                    column = self.trainer.log_probs(
                        self.batch,
                        scorer.role,
                        as_engines=scorer.as_engines,
                        store_prefix=scorer.column.removesuffix("log_probs"),
                    )
                setattr(self.data, scorer.column, column)
        distillation = self.trainer.config.distillation
        if distillation.in_trainer:
            self._score_by_teachers()
        elif distillation.use_opd:  # engines have scored the samples
            device = self.trainer.ranks.device
            self.data.teacher = teacher_columns_of(self.batch, self.trainer.config, device)

    def _score_by_teachers(self) -> None:
        ranks = self.trainer.ranks
        found = TeacherColumns(names=self.batch.teachers)
        with self.timers.measure("teacher_log_probs"), self.memory.phase("teacher_log_probs"):
            for name in ranks.union(sorted(set(self.batch.teachers))):
                self.trainer.score_by_teacher(self.batch, name, found)
        self.data.teacher = found if ranks.has_output else None

    def set_values(self, values: ByPosition) -> None:
        """Set the values, which a critic on other ranks has computed."""
        self.data.values = in_shard(self.batch, values, self.trainer.ranks)

    def compute_advantages(self) -> None:
        """Fill ``kl``, ``advantages`` and ``returns``; see `compute_advantages`."""
        compute_advantages(self.trainer, self.batch, self.data)

    def returns(self) -> tuple[ByPosition, ByPosition]:
        """Return the returns and loss masks, with which a critic on other ranks is trained."""
        ranks = self.trainer.ranks
        return (
            by_position(self.batch, self.data.returns, ranks),
            by_position(self.batch, self.data.loss_masks, ranks),
        )

    def train_critic(self, critic: ValueLearner) -> None:
        """Compute values, and advantages with them; train a critic on the same ranks.

        Values and returns, also those for the policy, are from before the critic's first step.
        """
        self.compute_values(critic)
        self.compute_advantages()
        self.critic_steps = self.learn_returns(critic)

    def train_other_layout(self, critic: ValueLearner, batch: TrainBatch) -> None:
        """Do as `train_critic` for a critic that is divided in another way over the same ranks.

        Args:
            batch: this rank's shard of the critic's.
        """
        ranks = self.trainer.ranks
        theirs = CriticUpdate(critic, critic, batch)
        theirs.timers = self.timers
        theirs.memory.peaks = self.memory.peaks
        self.set_values(ranks.merged(theirs.values()))
        self.compute_advantages()
        returns, loss_masks = (ranks.merged(column) for column in self.returns())
        steps = theirs.steps(returns, loss_masks)
        self.critic_steps = critic.ranks.of_reporting(steps)

    def learn(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Take the policy's steps, unless only the critic learns; returns the same as `update`."""
        trainer = self.trainer
        batch = self.batch
        data = self.data
        config = trainer.config
        ranks = trainer.ranks
        steps: list[dict[str, float]] = []
        critic_only = config.critic.num_critic_only_steps if config.algorithm.needs_critic else 0
        if batch.rollout_id >= critic_only:
            with self.timers.measure("actor_train"):
                steps = [
                    self._train_step(trainer, step_id, policy=trainer)
                    for step_id in range(len(batch.steps))
                ]

        _dump(trainer, batch, data)
        trainer.trained_tokens = trained_tokens(ranks, batch, data)
        trainer.trained_tokens += reference_tokens(config, ranks, batch, data)
        metrics = {**batch.global_stats, **token_means(config, ranks, batch, data)}
        metrics |= mean_of_steps(steps, first_only=config.algorithm.use_rollout_logprobs)
        metrics |= mean_of_steps(self.critic_steps)
        metrics |= worst_mismatch(ranks, data)
        metrics |= quantisation_metrics(config, ranks, batch, data)
        metrics |= distillation_metrics(config, ranks, batch, data)
        metrics |= self.memory.metrics(ranks)
        return {**metrics, **self.timers.metrics(batch)}, steps


class CriticUpdate(RolloutUpdate):
    """The update of a critic with its own layout."""

    def __init__(self, rank: TrainerRank, critic: ValueLearner, batch: TrainBatch) -> None:
        super().__init__(rank, batch, of_critic=True)
        self.critic = critic

    def values(self) -> ByPosition:
        """Return the values from before training."""
        self.compute_values(self.critic)
        return by_position(self.batch, self.data.values, self.rank.ranks)

    def steps(self, returns: ByPosition, loss_masks: ByPosition) -> list[dict[str, float]]:
        """Take the optimizer steps; return the metrics of each.

        Raises:
            NonFiniteTraining: as for `update`.
        """
        ranks = self.rank.ranks
        self.data.returns = in_shard(self.batch, returns, ranks)
        self.data.loss_masks = in_shard(self.batch, loss_masks, ranks) or self.data.loss_masks
        return self.learn_returns(self.critic)

    def learn(self, returns: ByPosition, loss_masks: ByPosition) -> dict[str, float]:
        """Do as `steps`; return metrics."""
        steps = self.steps(returns, loss_masks)
        return {
            **mean_of_steps(steps),
            **self.memory.metrics(self.rank.ranks),
            **self.timers.seconds_of_phases(),
            "perf/train_time": time.perf_counter() - self.timers.started,
        }


def evaluate(trainer: Trainer, batch: TrainBatch) -> dict[str, float]:
    """Score held-out preferences without training on them. Collective.

    Returns:
        Metrics ``eval/preferences/…`` by the names of training, means over all pairs; equal on
        every rank that holds the output layer, {} on others.
    """
    # one step for all, so that every mean and KTO's KL are over the whole data
    step = StepPlan(
        [samples for step in batch.steps for samples in step.micro_batches],
        sum(step.global_batch_size for step in batch.steps),
        sum(step.num_loss_tokens for step in batch.steps),
        [samples for step in batch.steps for samples in step.scored],
    )
    batch = replace(batch, steps=[step])
    config = trainer.config
    ranks = trainer.ranks
    current = Update(trainer, batch)
    current.score()
    data = current.data
    known = preference_step(trainer, batch, data, step)
    results = trainer.losses(
        batch, 0, lambda samples: _loss_inputs(trainer, batch, data, step, samples, known)
    )
    found = sum_metrics(config, ranks, results)
    found.pop("loss", None)  # with --preference-sft-coef it has terms that are not compared
    trainer.trained_tokens = reference_tokens(config, ranks, batch, data)
    return {f"eval/preferences/{name}": value for name, value in found.items()}


# -- score -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Adds a column of log-probs to the rollout.

    Attributes:
        column: the field of `RolloutTensors` that it fills.
        role: name of the `slime.trainer.role.Role` whose model scores.
        is_wanted: tells whether something reads the column.
        as_engines: whether to score with the weights of quantised engines.
        phase: the name under which its peak memory is recorded.
    """

    column: str
    role: str
    is_wanted: Callable[[Config, TrainBatch], bool]
    as_engines: bool = False
    phase: str = "log_probs"


def reuses_log_probs(config: Config, batch: TrainBatch) -> bool:
    """Tell whether the training pass's own log-probs can serve as the old policy's.

    They are the same numbers if one optimizer step follows the rollout, and reuse saves a pass over
    all samples. A separate pass is needed if something reads them before the step (KL in the
    reward, user functions), or if the estimator requires it.
    """
    flags = config.algorithm
    loss = policy_loss(config)
    if config.train.use_routing_replay and not config.train.use_rollout_routing_replay:
        return False  # training replays the experts that the old-policy pass records
    if not loss.takes_old_log_probs or (
        flags.use_rollout_logprobs and not flags.get_mismatch_metrics
    ):
        return True
    wanted_before = (
        flags.kl_coef != 0
        or flags.get_mismatch_metrics
        or flags.custom_advantage_function_path
        or config.rollout.rollout_data_postprocess_path
        or config.train.custom_megatron_before_log_prob_hook_path
        or config.distillation.in_advantage
    )
    facts = ESTIMATORS[flags.advantage_estimator].facts
    return (
        len(batch.steps) == 1
        and loss.reuses_train_logprobs
        and facts.reuses_train_logprobs
        and not wanted_before
    )


SCORERS = (
    Scorer(
        column="ref_log_probs",
        role=REFERENCE,
        is_wanted=lambda config, batch: (
            config.algorithm.needs_reference and batch.ref_log_probs is None
        ),
        phase="ref_log_probs",
    ),
    Scorer(
        column="log_probs",
        role=POLICY,
        is_wanted=lambda config, batch: not reuses_log_probs(config, batch),
    ),
    Scorer(
        column="engine_log_probs",
        role=POLICY,
        is_wanted=lambda config, batch: config.quantised.measure_quantisation,
        as_engines=True,
    ),
)


# -- advantages ------------------------------------------------------------------------------------


def compute_advantages(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Fill ``kl``, ``advantages`` and ``returns``, then let the user's function postprocess them.

    A user's advantage function replaces the estimator, also with
    ``--disable-compute-advantages-and-returns``, which disables only the estimator.

    Raises:
        FunctionFailed: the user's function sets no advantages, or a key that cannot be changed.
        UserError: the loss needs advantages, and nothing sets any.
    """
    flags = trainer.config.algorithm
    loss = policy_loss(trainer.config)
    functions = trainer.functions
    ranks = trainer.ranks
    is_off = functions.advantages is None and flags.disable_compute_advantages_and_returns
    if ranks.has_output and loss.takes_advantages and not is_off:
        data.kl = _kl_in_the_reward(trainer.config, data)
        if functions.advantages is not None:
            _call_advantage_function(trainer, batch, data)
        else:
            data.advantages, data.returns = ESTIMATORS[flags.advantage_estimator].advantages(
                AdvantageInputs(
                    batch.rewards,
                    data.kl,
                    data.loss_masks,
                    flags.kl_coef,
                    flags.gamma,
                    values=data.values,
                    lambd=trainer.config.critic.lambd,
                    critic_lambd=trainer.config.critic.critic_lambd,
                    token_rewards=batch.payloads.get("token_rewards"),
                )
            )
        if flags.normalize_advantages:
            assert data.advantages is not None
            data.advantages = whiten(
                data.advantages, data.loss_masks, ranks.sum_over_replicas, ranks.device
            )
        if trainer.config.distillation.in_advantage:
            _distil_advantages(trainer.config, data)
    change = functions.postprocess
    if change is not None:
        origin = named(str(trainer.config.rollout.rollout_data_postprocess_path), POSTPROCESS)
        returned = change_rollout(
            lambda view: change(functions.args, batch.rollout_id, view),
            origin,
            batch,
            data,
            _without_effect(trainer, data),
        )
        check_returns_nothing(returned, (), origin, _ASSIGN)
    if ranks.has_output and loss.needs_advantages and data.advantages is None:
        raise UserError(
            f"--loss-type {flags.loss_type} needs advantages, and nothing sets any",
            why="--disable-compute-advantages-and-returns switches the estimator off, and no "
            'function of yours sets rollout_data["advantages"]',
            fix="leave that flag out, or pass --custom-advantage-function-path",
        )


#: What a function that returned something should do.
_ASSIGN = "assign rollout_data[…], and return nothing"


def _kl_in_the_reward(config: Config, data: RolloutTensors) -> list[Tensor]:
    flags = config.algorithm
    if flags.kl_coef == 0:
        return [torch.zeros_like(mask) for mask in data.loss_masks]
    old = old_log_probs(config, data)
    assert old is not None and data.ref_log_probs is not None
    return [kl_estimate(lp, ref, flags.kl_loss_type) for lp, ref in zip(old, data.ref_log_probs)]


def _distil_advantages(config: Config, data: RolloutTensors) -> None:
    """Subtract the sampled reverse KL from the teacher. This follows whitening, so that its weight
    does not depend on the rewards."""
    old = old_log_probs(config, data)
    assert data.advantages is not None and old is not None
    assert data.teacher is not None and data.teacher.log_probs is not None
    data.advantages = distilled_advantages(
        data.advantages,
        sampled_reverse_kl(old, data.teacher.log_probs),
        data.loss_masks,
        config.distillation.opd_kl_coef,
    )


def _call_advantage_function(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Let the user's function set the advantages.

    Raises:
        FunctionFailed: it set none.
    """
    functions = trainer.functions
    change = functions.advantages
    assert change is not None
    origin = named(str(trainer.config.algorithm.custom_advantage_function_path), ADVANTAGES)
    unread = _without_effect(trainer, data)
    returned = change_rollout(
        lambda view: change(functions.args, view), origin, batch, data, unread
    )
    if data.advantages is None:
        why = "" if returned is None else f"it returned {described(returned)}, which nothing reads"
        raise FunctionFailed(
            f"{origin} set no advantages",
            why=why,
            fix='assign rollout_data["advantages"], a list with one float32 tensor [R] per '
            "sample, R being its response tokens",
        )
    check_returns_nothing(returned, (), origin, _ASSIGN)


def _without_effect(trainer: Trainer, data: RolloutTensors) -> dict[str, str]:
    """Return the tensors of the rollout that nothing will read, with the reason; assigning one
    would have no effect."""
    if not trainer.ranks.has_output:  # nothing is read here, which is no error of the function
        return {}
    flags = trainer.config.algorithm
    unread: dict[str, str] = {}
    if not policy_loss(trainer.config).takes_advantages:
        unread |= dict.fromkeys(
            ("advantages", "returns"), f"--loss-type {flags.loss_type} takes none"
        )
    if data.log_probs is None:
        unread["log_probs"] = "the old policy's log-probs are not computed with these flags"
    if data.ref_log_probs is None:
        unread["ref_log_probs"] = "no flag asks for a reference model"
    return unread


# -- the inputs of a step --------------------------------------------------------------------------


def _set_value_targets(
    rank: TrainerRank, critic: ValueLearner, data: RolloutTensors
) -> dict[str, float]:
    """Fill ``value_targets``; return the explained variance of the returns. Collective."""
    if data.values is None:
        return {}
    assert data.returns is not None, "an estimator with a critic computes returns"
    ranks = rank.ranks
    found = return_statistics(
        data.values, data.returns, data.loss_masks, ranks.sum_over_replicas, ranks.device
    )
    if rank.config.critic.normalize_values and found["tokens"] > 0:
        critic.return_scale = critic.return_scale.updated(found["mean"], found["square"])
    scale = critic.return_scale
    data.value_targets = [scale.normalised(returns) for returns in data.returns]
    return {"train/critic-explained_variance": found["explained_variance"]}


def _loss_inputs(
    rank: TrainerRank,
    batch: TrainBatch,
    data: RolloutTensors,
    step: StepPlan,
    samples: list[int],
    preferences: PreferenceStep | None = None,
) -> LossInputs:
    """Return the flat tensors of one micro-batch."""
    flags = rank.config.algorithm
    where = rank.ranks.device

    def flat(values: Sequence[Tensor] | None) -> Tensor | None:
        if values is None:
            return None
        return torch.cat([values[i] for i in samples]) if samples else torch.zeros(0, device=where)

    old = old_log_probs(rank.config, data)
    if reuses_log_probs(rank.config, batch) and not flags.use_rollout_logprobs:
        old = None
    compares = flags.use_rollout_logprobs and flags.get_mismatch_metrics
    masks = [data.loss_masks[i] for i in samples]
    per_token = step.num_loss_tokens if flags.averages_tokens else None
    denominator = step.global_batch_size if per_token is None else per_token
    weights = token_weights(
        masks, [batch.rollout_mask_sums[i] for i in samples], step.global_batch_size, per_token
    )
    lengths = [batch.response_lengths[i] for i in samples]
    return LossInputs(
        samples=samples,
        sample_indices=[batch.sample_indices[i] for i in samples],
        lengths=torch.tensor(lengths, dtype=torch.long, device=where),
        masks=torch.cat(masks) if masks else torch.zeros(0, device=where),
        weights=weights.to(where),
        sample_weight=1.0 / max(denominator, 1),
        loss_scale=_loss_scale(rank.config, step),
        total_lengths=[int(batch.tokens[i].numel()) for i in samples],
        advantages=flat(data.advantages),
        old_log_probs=flat(old),
        ref_log_probs=flat(data.ref_log_probs),
        rollout_log_probs=flat(data.rollout_log_probs),
        trained_log_probs=flat(data.log_probs) if compares else None,
        value_outputs=flat(data.value_outputs),
        value_targets=flat(data.value_targets),
        teacher=teacher_inputs(data.teacher, samples, lengths, where)
        if rank.config.distillation.in_loss and data.teacher is not None
        else None,
        preferences=None if preferences is None else labels_of(batch, samples, preferences, where),
    )


def _loss_scale(config: Config, step: StepPlan) -> float:
    """Return the factor that turns the mean over a step's tokens into the mean over trajectories of
    sums divided by a constant length (Liu et al., arXiv:2503.20783, section 3.2)."""
    if not config.algorithm.sums_tokens:
        return 1.0
    longest = config.rollout.rollout_max_response_len
    return step.num_loss_tokens / (max(step.global_batch_size, 1) * longest)


def _note_log_probs(
    trainer: Trainer,
    batch: TrainBatch,
    data: RolloutTensors,
    results: Sequence[MicroBatchResult],
    step_id: int,
) -> None:
    """Keep the training pass's log-probs as the rollout's if no scorer computed them.

    Only those from before training, of the first step's samples, can be compared with the engine's.
    """
    flags = trainer.config.algorithm
    has_none = flags.trains_reward_model or not trainer.ranks.has_output
    if has_none or not reuses_log_probs(trainer.config, batch):
        return
    if flags.preference is not None or (flags.use_rollout_logprobs and len(batch.steps) > 1):
        if step_id > 0:
            return
        data.before_training = sorted(
            i for samples in batch.steps[0].micro_batches for i in samples
        )
    if data.log_probs is None:
        data.log_probs = [torch.zeros_like(mask) for mask in data.loss_masks]
    for result in results:
        for i, values in result.by_sample(batch.response_lengths):
            data.log_probs[i] = values


def _check_alignment(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Warn if policy and reference differ despite equal weights: the KL must be exactly 0."""
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
            batch.rollout_id,
            worst,
        )


# -- before and after ------------------------------------------------------------------------------


def _check_batch(batch: TrainBatch, config: Config) -> None:
    if config.algorithm.use_rollout_logprobs and batch.rollout_log_probs is None:
        raise UserError(
            "--use-rollout-logprobs needs the engine's log-probs",
            why="the samples of this rollout carry none",
            fix="let the generate function fill rollout_log_probs (Sample.append_response_tokens "
            "does)",
        )


def _initial_tensors(rank: TrainerRank, batch: TrainBatch) -> RolloutTensors:
    def on_device(values: Sequence[Tensor] | None) -> list[Tensor] | None:
        return None if values is None else [v.to(rank.ranks.device) for v in values]

    return RolloutTensors(
        loss_masks=on_device(batch.loss_masks) or [],
        rollout_log_probs=on_device(batch.rollout_log_probs),
        ref_log_probs=on_device(batch.ref_log_probs),
    )


def _dump(trainer: Trainer, batch: TrainBatch, data: RolloutTensors) -> None:
    """Write the file of ``--save-debug-train-data``, with the samples of all ranks. Collective."""
    pattern = trainer.config.debug.save_debug_train_data
    if not pattern:
        return
    ranks = trainer.ranks
    shard = shard_of(batch, data, ranks.replica) if ranks.speaks_for_shard else None
    found = ranks.on_first(None if shard is None else vars(shard))
    if found is not None:
        shards = [RankDump(**fields) for fields in found]
        path = save_train_data(pattern, batch.rollout_id, shards)
        logger.info("training data of rollout %d: %s", batch.rollout_id, path)


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

    def seconds_of_phases(self) -> dict[str, float]:
        return {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()}

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        tokens = batch.global_stats.get("rollout/num_tokens", float(sum(batch.total_lengths)))
        metrics = self.seconds_of_phases()
        if "actor_train" in self.seconds:
            seconds = max(self.seconds["actor_train"], 1e-9)
            metrics["perf/actor_train_tok_per_s"] = tokens / seconds
            if "rollout/num_images" in batch.global_stats:
                images = batch.global_stats["rollout/num_images"]
                metrics["perf/actor_train_images_per_s"] = images / seconds
        metrics["perf/train_time"] = time.perf_counter() - self.started
        return metrics
