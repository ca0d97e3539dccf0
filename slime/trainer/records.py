"""Records that the parts of an update exchange, with tensors on the trainer's device.

TrainBatch ─► RolloutTensors ─ per micro-batch ─► LossInputs ──┐
                   ▲                              TokenScores ─┴─► MicroBatchResult ─► StepOutcome
                   └──────────────── log-probs of the training pass ───┘

The critic has `TokenValues` in place of the policy's `TokenScores`. Teachers' scores of the rollout
are in `TeacherColumns`, those of a micro-batch in `TeacherInputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from slime.algorithms.divergence import DivergenceKind, OutputRows, TopTokens
from slime.samples.batch import TrainBatch


@dataclass
class TeacherColumns:
    """Teachers' scores of the rollout's response tokens, a tensor per sample; None: not requested.

    Attributes:
        log_probs: [R_i], of the tokens.
        top: the most likely tokens at each position, [R_i, k].
        hidden: [R_i, H] in host memory: the hidden states from which the teacher predicts them.
        names: the teacher of each sample.
        heads: the output layer of each teacher [V / tp, H], and the temperature.
    """

    log_probs: list[Tensor] | None = None
    top: list[TopTokens] | None = None
    hidden: list[Tensor] | None = None
    names: list[str] = field(default_factory=list)
    heads: dict[str, tuple[Tensor, float]] = field(default_factory=dict)


@dataclass
class TeacherInputs:
    """The teachers' part of the input of a micro-batch's loss.

    Attributes:
        top: the most likely tokens at all its tokens, [N, k].
        rows: for each teacher, the positions (int64) of its tokens, and its hidden states there
            with its output layer.
    """

    top: TopTokens | None = None
    rows: list[tuple[Tensor, OutputRows]] = field(default_factory=list)


@dataclass
class RolloutTensors:
    """Columns of a whole rollout on one rank, a tensor [R_i] per sample; None: not (yet) known.

    Attributes:
        engine_log_probs: the trainer's before training, computed with the weights of quantised
            engines.
        values: the critic's before training, in the unit of the returns.
        value_outputs, value_targets: the outputs of the critic's head for these, and its targets;
            normalised with ``--normalize-values``.
        before_training: the samples whose ``log_probs`` are those of the policy before the
            rollout's first optimizer step; None: all of them.
    """

    log_probs: list[Tensor] | None = None
    ref_log_probs: list[Tensor] | None = None
    rollout_log_probs: list[Tensor] | None = None
    engine_log_probs: list[Tensor] | None = None
    kl: list[Tensor] | None = None
    advantages: list[Tensor] | None = None
    returns: list[Tensor] | None = None
    values: list[Tensor] | None = None
    value_outputs: list[Tensor] | None = None
    value_targets: list[Tensor] | None = None
    teacher: TeacherColumns | None = None
    loss_masks: list[Tensor] = field(default_factory=list)
    before_training: list[int] | None = None

    def teacher_log_probs(self, batch: TrainBatch) -> list[Tensor] | None:
        """Return the teachers' log-probs of the sampled tokens; before teachers have scored, or
        without distillation, those that the samples carry."""
        return batch.teacher_log_probs if self.teacher is None else self.teacher.log_probs

    def samples_before_training(self) -> list[int]:
        if self.before_training is not None:
            return self.before_training
        return list(range(len(self.loss_masks)))


@dataclass
class LossInputs:
    """Input of a micro-batch's loss besides the scores; flat [N] unless said otherwise.

    Attributes:
        samples: their positions in the rank's `TrainBatch`.
        sample_indices: their indices (``Sample.index``), which users see.
        lengths: int64 [samples], response tokens of each.
        masks: 0 or 1.
        weights: of each token in the loss (`slime.algorithms.reduce.token_weights`).
        sample_weight: the factor of a per-sample mean in ``weights``: 1 / global batch size, or,
            per token, 1 / loss tokens. For user-supplied reducers.
        loss_scale: a factor of the policy loss; its metrics are not scaled.
        old_log_probs: of the policy before the step; None: take this forward pass's own.
        rollout_log_probs: the engine's.
        trained_log_probs: the trainer's before the step, to be compared with the engine's; None:
            ``old_log_probs``.
        value_outputs, value_targets: the critic's outputs before the rollout's first step, and its
            targets.
        preferences: the labels of ``samples``, when training on preferences.
    """

    samples: list[int]
    sample_indices: list[int]
    lengths: Tensor
    masks: Tensor
    weights: Tensor
    sample_weight: float
    total_lengths: list[int]
    loss_scale: float = 1.0
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    trained_log_probs: Tensor | None = None
    value_outputs: Tensor | None = None
    value_targets: Tensor | None = None
    teacher: TeacherInputs | None = None
    preferences: PreferenceLabels | None = None


class Vocabulary(Protocol):
    """The policy's distributions at a micro-batch's response tokens, blockwise. Every method is
    collective where the vocabulary or the tokens are shared."""

    def divergence(
        self, teachers: Sequence[tuple[Tensor, OutputRows]], kind: DivergenceKind, beta: float
    ) -> Tensor:
        """Return the divergence [N] from teachers over the whole vocabulary, with gradient."""
        ...

    def log_probs_at(self, ids: Tensor) -> Tensor:
        """Return the log-probs [N, k], with gradient, of k tokens ``ids`` [N, k] at each place."""
        ...


@dataclass(frozen=True)
class PreferenceStep:
    """Counts of an optimizer step on preferences, known before its first micro-batch.

    Attributes:
        num_chosen, num_rejected: numbers of answers of each kind, over all ranks; for pairs, both
            are the number of pairs.
        kl: KL divergence of the policy from the reference, at least 0; 0 if the loss uses none.
    """

    num_chosen: float
    num_rejected: float
    kl: float = 0.0


@dataclass(frozen=True)
class PreferenceLabels:
    """The labels of a micro-batch's samples.

    Attributes:
        chosen, rejected: int64, positions in the micro-batch; for pairs, entry i of both is pair i.
        step: counts of the whole optimizer step.
    """

    chosen: Tensor
    rejected: Tensor
    step: PreferenceStep


@dataclass
class TokenScores:
    """The output layer's scores of a micro-batch's response tokens, flat [N], float32.

    Attributes:
        log_probs: of the tokens, under the temperature-scaled distribution.
        entropy: of that distribution at each token; None if not requested.
        logits: [N, V / tp] over the real vocabulary, temperature-scaled; only for custom losses.
        vocabulary: for losses that compare distributions.
        top: the most likely tokens, when asked for.
        rows: what the log-probs were computed from, when asked for; ``hidden`` [N, H] is whole.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    logits: Tensor | None = None
    vocabulary: Vocabulary | None = None
    top: TopTokens | None = None
    rows: OutputRows | None = None

    @property
    def per_token(self) -> Tensor:
        """The numbers that an update keeps of each token."""
        return self.log_probs

    @property
    def device(self) -> torch.device:
        """Megatron's schedule asks the output of a model with experts for it."""
        return self.log_probs.device


@dataclass
class TokenValues:
    """The critic's outputs before a micro-batch's response tokens, flat [N], float32."""

    values: Tensor

    @property
    def per_token(self) -> Tensor:
        return self.values

    @property
    def device(self) -> torch.device:
        return self.values.device


@dataclass
class MicroBatchResult:
    """One micro-batch's forward pass in training.

    Attributes:
        samples: their places in the rank's `TrainBatch`.
        metrics: 0-dimensional, already weighted: their sum over micro-batches and ranks is the
            step's value.
        per_token: log-probs, or a critic's outputs; detached, flat [N].
    """

    samples: list[int]
    metrics: dict[str, Tensor]
    per_token: Tensor

    def by_sample(self, response_lengths: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Return (sample, its numbers [R_i]); ``response_lengths`` are those of all samples of the
        rank."""
        return zip(self.samples, self.per_token.split([response_lengths[i] for i in self.samples]))


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of applying the gradients.

    Attributes:
        grad_norm: global L2 norm before clipping; NaN or Inf if gradients are; NaN if the loss was
            not finite, in which case gradients are not examined.
        applied: whether the weights changed; False if the step was skipped because of NaN or Inf.
        metrics: the trainer's own metrics of the whole step ("moe_max_load", …).
    """

    grad_norm: float
    applied: bool
    metrics: dict[str, float] = field(default_factory=dict)
