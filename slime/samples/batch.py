"""``TrainBatch``: the training data of a rollout, one per data-parallel rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.samples.media import Media

if TYPE_CHECKING:
    import torch


#: Rewards that label samples in preference learning: the better and the worse answer, and a prompt
#: with the answer to another prompt, which estimates a KL.
CHOSEN = 1.0
REJECTED = -1.0
MISMATCHED = 0.0


@dataclass
class StepPlan:
    """One optimizer step of a `TrainBatch`: which samples of this shard go into which micro-batch.

    Attributes:
        micro_batches: indices into the shard's sample lists; every data-parallel rank has the same
            number of micro-batches in a step (a rank with nothing left has empty lists).
        global_batch_size: trajectories in this step over all data-parallel ranks (the loss
            denominator).
        num_loss_tokens: trained tokens in this step over all data-parallel ranks (per-token loss
            denominator).
        scored: micro-batches of samples that are only scored, before the step; the same number on
            each rank.
    """

    micro_batches: list[list[int]]
    global_batch_size: int
    num_loss_tokens: int
    scored: list[list[int]] = field(default_factory=list)


#: Identifies a sample within its rollout: index, number of tokens, number of response tokens.
SampleKey = tuple[int, int, int]


@dataclass(frozen=True)
class TrainedTokens:
    """Values that training computes for each response token of a sample.

    Attributes:
        advantages: float32 [R], as used in the loss.
        log_prob_diffs: float32 [R], the trainer's log-prob before training minus the engine's.
        ref_log_probs: float32 [R] of the reference model, for samples whose values are cached.
    """

    key: SampleKey
    advantages: np.ndarray | None = None
    log_prob_diffs: np.ndarray | None = None
    ref_log_probs: np.ndarray | None = None


@dataclass
class TrainBatch:
    """All training data of one rollout for one data-parallel rank. CPU tensors; entry i belongs to
    sample i.

    L_i is the length of sample i in tokens (prompt + response), R_i its response length.

    Attributes:
        rollout_id: the step of the run.
        tokens: int64 [L_i].
        response_lengths: R_i.
        loss_masks: float32 [R_i], 0 or 1.
        rewards: after post-processing (group-normalised for GRPO): the scalar advantage of sample
            i.
        raw_rewards: the values of the reward function.
        rollout_log_probs, teacher_log_probs: float32 [R_i] from the engine and the teacher; None if
            there are none.
        trajectory_ids: shared by samples that one trajectory fanned out into.
        rollout_mask_sums: trained tokens of sample i's whole trajectory, >= 1, or their mean over
            its group's trajectories (CISPO): its denominator in the default loss.
        steps: the optimizer steps, in order.
        teachers: the name of each sample's teacher, if the trainer holds the teachers.
        media: images of each sample; [] if no sample has any.
        images: reference → bytes of each image.
        payloads: those columns of `slime.samples.payloads.PAYLOADS` that the samples have.
        global_stats: statistics over all ranks, the same on every rank (reward mean, ...).
        positions: position of each sample in the rollout, which does not depend on the layout.
        recorded: samples of all ranks for which training returns `TrainedTokens`.
        ref_log_probs: float32 [R_i] of the reference model, if they are cached for all samples of
            all ranks.
    """

    rollout_id: int
    tokens: list[torch.Tensor]
    response_lengths: list[int]
    loss_masks: list[torch.Tensor]
    rewards: list[float]
    raw_rewards: list[float]
    sample_indices: list[int]
    group_indices: list[int]
    trajectory_ids: list[int]
    rollout_mask_sums: list[float]
    truncated: list[bool]
    steps: list[StepPlan]
    rollout_log_probs: list[torch.Tensor] | None = None
    teacher_log_probs: list[torch.Tensor] | None = None
    teachers: list[str] = field(default_factory=list)
    weight_versions: list[tuple[int, ...]] = field(default_factory=list)
    metadata: list[dict[str, Any] | None] = field(default_factory=list)
    media: list[list[Media]] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)
    payloads: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_stats: dict[str, float] = field(default_factory=dict)
    positions: list[int] = field(default_factory=list)
    recorded: frozenset[SampleKey] = frozenset()
    ref_log_probs: list[torch.Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle each list of tensors as one array: ten thousand tensors cost a second."""
        return _joined(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_split(state))

    @property
    def routed_experts(self) -> list[torch.Tensor] | None:
        """``payloads["routed_experts"]``, for users' functions that read it."""
        return self.payloads.get("routed_experts")

    @property
    def num_samples(self) -> int:
        return len(self.tokens)

    def key(self, i: int) -> SampleKey:
        return self.sample_indices[i], int(self.tokens[i].numel()), self.response_lengths[i]

    @property
    def total_lengths(self) -> list[int]:
        return [int(t.numel()) for t in self.tokens]

    @property
    def all_micro_batches(self) -> list[list[int]]:
        """The micro-batches of all steps: for each step its trained ones, then its scored ones."""
        return [samples for step in self.steps for samples in (*step.micro_batches, *step.scored)]


@dataclass(frozen=True)
class _Joined:
    """Concatenated tensors of one dtype."""

    values: np.ndarray
    shapes: list[tuple[int, ...]]

    def parts(self) -> list[torch.Tensor]:
        """Return the original tensors, as views of one copy, because arrays from Ray are
        read-only."""
        import torch

        sizes = [math.prod(shape) for shape in self.shapes]
        return [
            part.view(shape)
            for part, shape in zip(torch.from_numpy(self.values.copy()).split(sizes), self.shapes)
        ]


def _joined(value: Any) -> Any:
    import torch

    if isinstance(value, dict):
        return {name: _joined(part) for name, part in value.items()}
    if not isinstance(value, list) or not value:
        return value
    if not all(isinstance(item, torch.Tensor) for item in value):
        return value
    # one array has one dtype, and NumPy has no bfloat16
    if len({item.dtype for item in value}) > 1 or value[0].dtype is torch.bfloat16:
        return value
    return _Joined(
        torch.cat([item.reshape(-1) for item in value]).numpy(),
        [tuple(item.shape) for item in value],
    )


def _split(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _split(part) for name, part in value.items()}
    return value.parts() if isinstance(value, _Joined) else value


@dataclass(frozen=True)
class TrainLayout:
    """The trainer's parallel layout, as far as packing needs it.

    Attributes:
        data_parallel_size: shards to make.
        context_parallel_size: ranks that share one micro-batch; the token cap of a micro-batch
            scales with it.
        micro_batch_multiple: the micro-batch count of a step is a multiple of it (virtual pipeline
            stages), else 1.
        critic: the layout of a critic that has its own; None without one.
    """

    data_parallel_size: int = 1
    context_parallel_size: int = 1
    micro_batch_multiple: int = 1
    critic: TrainLayout | None = None
