"""Records that the parts of an update hand to each other, with tensors on the trainer's device.

TrainBatch ─► RolloutTensors ─ per micro-batch ─► LossInputs ──┐
                   ▲                              TokenScores ─┴─► MicroBatchResult ─► StepOutcome
                   └──────────────── log-probs of the training pass ───┘

The critic has `TokenValues` where the policy has `TokenScores`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class RolloutTensors:
    """Columns of a whole rollout on one rank, a tensor [R_i] per sample; None: not (yet) known.

    Attributes:
        engine_log_probs: the trainer's before training, with the weights that quantised engines
            compute with.
        values: the critic's before training, in the unit of the returns.
        value_outputs, value_targets: the same as the critic's head gives them, and what it learns;
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
    loss_masks: list[Tensor] = field(default_factory=list)
    before_training: list[int] | None = None

    def samples_before_training(self) -> list[int]:
        if self.before_training is not None:
            return self.before_training
        return list(range(len(self.loss_masks)))


@dataclass
class LossInputs:
    """Input of a micro-batch's loss besides the scores; flat [N] unless said otherwise.

    Attributes:
        samples: their places in the rank's `TrainBatch`.
        sample_indices: their indices, by which the user knows them.
        lengths: int64 [samples], response tokens of each.
        masks: 0 or 1.
        weights: of each token in the loss (`slime.algorithms.reduce.token_weights`).
        sample_weight: what ``weights`` multiplies a per-sample mean with: 1 / global batch size,
            or, per token, 1 / loss tokens. For reducers that users bring.
        loss_scale: what the policy loss is multiplied with; its metrics are not.
        old_log_probs: of the policy before the step; None: take this forward pass's own.
        rollout_log_probs: the engine's.
        trained_log_probs: the trainer's before the step, to be compared with the engine's; None:
            ``old_log_probs``.
        value_outputs, value_targets: of the critic before the rollout's first step, and what it
            learns.
        preferences: which of ``samples`` are preferred, where they are learned from by preference.
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
    preferences: PreferenceLabels | None = None


@dataclass(frozen=True)
class PreferenceStep:
    """What an optimizer step on preferences knows before its first micro-batch.

    Attributes:
        num_chosen, num_rejected: answers of each kind, over all ranks; of pairs, their number.
        kl: of the policy to the reference, at least 0; 0 where the loss takes none.
    """

    num_chosen: float
    num_rejected: float
    kl: float = 0.0


@dataclass(frozen=True)
class PreferenceLabels:
    """The labels of a micro-batch's samples.

    Attributes:
        chosen, rejected: int64, places in the micro-batch; entry i of both is pair i, where samples
            are pairs.
        step: of the whole optimizer step.
    """

    chosen: Tensor
    rejected: Tensor
    step: PreferenceStep


@dataclass
class TokenScores:
    """The output layer's scores of a micro-batch's response tokens, flat [N], float32.

    Attributes:
        log_probs: of the tokens, under the temperature-scaled distribution.
        entropy: of that distribution at each token; None when not asked for.
        logits: [N, V / tp] over the real vocabulary, temperature-scaled; only for custom losses.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    logits: Tensor | None = None

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
        """(sample, its numbers [R_i]); ``response_lengths`` are those of all samples of the
        rank."""
        return zip(self.samples, self.per_token.split([response_lengths[i] for i in self.samples]))


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of applying the gradients.

    Attributes:
        grad_norm: global L2 norm before clipping; NaN or Inf when gradients are, NaN when nobody
            looked at them as the loss was not finite.
        applied: the weights changed; False when the step was skipped because of NaN or Inf.
        metrics: of the trainer's own, for the whole step ("moe_max_load", …).
    """

    grad_norm: float
    applied: bool
    metrics: dict[str, float] = field(default_factory=dict)
