"""NaN or Inf in a step: the error that stops the run, and what is kept of the step for the crash folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from slime.errors import UserError
from slime.samples.batch import TrainBatch
from slime.train.dumps import Shard, shard_of
from slime.train.records import MicroBatchResult, RolloutTensors, StepOutcome


class NonFiniteTraining(UserError):
    """A loss or gradient is NaN or Inf. Nothing was applied: the weights are those before the step.

    What the step was is kept on every rank (`Trainer.failed_step`), for whoever writes the crash folder.

    Attributes:
        sample_indices: of the samples whose loss is not finite, over all ranks; empty when only gradients are not.
        parameters: names of the gradients that are not finite, over all ranks.
    """

    def __init__(
        self, rollout_id: int, step: int, grad_norm: float, sample_indices: list[int], parameters: list[str]
    ) -> None:
        self.sample_indices, self.parameters = sample_indices, parameters
        if sample_indices:
            shown = ", ".join(map(str, sample_indices[:16])) + (", …" if len(sample_indices) > 16 else "")
            why = f"the loss is not finite in the micro-batches of the samples with index {shown}"
        else:
            why = f"the losses are finite but the gradient norm is {grad_norm}: the overflow is in the backward pass"
            if parameters:
                rest = f" and {len(parameters) - 4} more" if len(parameters) > 4 else ""
                why += f"; not finite: the gradient of {', '.join(parameters[:4])}{rest}"
        super().__init__(
            f"training stopped at rollout {rollout_id}, step {step}: NaN or Inf",
            why=why,
            fix="look at the step's samples and tensors in the run's crash folder; lower --lr, check rewards and "
            "--eps-clip; or skip such steps with --no-check-for-nan-in-loss-and-grad",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_non_finite, (self.args, self.sample_indices, self.parameters)


def _restore_non_finite(args: tuple[Any, ...], sample_indices: list[int], parameters: list[str]) -> NonFiniteTraining:
    error = NonFiniteTraining.__new__(NonFiniteTraining)
    UserError.__init__(error, *args)
    error.sample_indices, error.parameters = sample_indices, parameters
    return error


@dataclass
class FailedStep:
    """What a rank keeps of a step with NaN or Inf until the driver has fetched it.

    Attributes:
        rank: data-parallel.
        shard: the step's samples; None on ranks that another one speaks for (tensor and context parallel peers, inner
            pipeline stages).
        micro_batches: sample indices and metrics of each micro-batch, in order; [] where ``shard`` is None.
        parameters: (name, entries that are NaN or Inf, entries) of each gradient that is not finite on this rank.
    """

    rollout_id: int
    step_id: int
    rank: int
    grad_norm: float
    shard: Shard | None = None
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[tuple[str, int, int]] = field(default_factory=list)


class Peer(Protocol):
    """What of a trainer `failed_step` needs."""

    @property
    def data_parallel_rank(self) -> int: ...

    @property
    def speaks_for_shard(self) -> bool: ...


def failed_step(
    trainer: Peer,
    batch: TrainBatch,
    data: RolloutTensors,
    results: Sequence[MicroBatchResult],
    step_id: int,
    outcome: StepOutcome,
    parameters: list[tuple[str, int, int]],
) -> FailedStep:
    """What explains the step, on the CPU: this rank's samples with every tensor of theirs, losses, bad gradients."""
    rank = trainer.data_parallel_rank
    step = FailedStep(batch.rollout_id, step_id, rank, outcome.grad_norm, parameters=parameters)
    if trainer.speaks_for_shard:
        current: list[Tensor | None] = [None] * len(batch.tokens)
        for result in results:
            for i, values in result.by_sample(batch.response_lengths):
                current[i] = values
        step.shard = shard_of(batch, data, rank, step_id, training_log_probs=current)
        step.micro_batches = [
            {
                "sample_indices": [batch.sample_indices[i] for i in result.samples],
                **{name: value.item() for name, value in result.metrics.items()},
            }
            for result in results
        ]
    return step
