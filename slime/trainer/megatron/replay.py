"""Instructions to the routers of experts: which tokens are padding, the scale of balance losses,
and which experts to replay.

If every pass chooses its own experts, engine, old-policy pass and training may choose different
ones for a token whose scores are close. Its log-prob then differs although the weights did not
change. Replay uses the experts of one pass in the others (arXiv:2507.18071, section 5.3, and
arXiv:2510.11370). The experts' weights still come from the current router, so that the router
learns.

    --use-routing-replay           old-policy pass ─ records ─► training (recompute included)
    --use-rollout-routing-replay   engine ─ TrainBatch.payloads ─► old-policy pass, training

The reference pass uses its own router. Every pass routes tokens itself that the engine did not
compute, such as a tool's answer at the end of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from slime.config.config import Config
from slime.errors import UserError
from slime.models.spec import ModelSpec
from slime.samples.batch import TrainBatch
from slime.samples.routed_experts import UNKNOWN
from slime.trainer.megatron.moe_layer import (
    ExpertLayer,
    balance_metrics,
    balance_type,
    expert_layers,
    uses_balance_losses,
)
from slime.trainer.megatron.moe_router import Routing, smallest_integer
from slime.trainer.megatron.packed import PackedMicroBatch

Pass = Literal["score", "reference", "count", "train"]
Source = Literal["none", "policy", "engine"]


@dataclass
class RoutingGuide:
    """Instructs the routers of one rank for each micro-batch. `guide_for` builds it; dense models
    have none.

    Attributes:
        source: the pass whose experts are replayed.
        counts_ahead: before each step, an extra pass counts the tokens per expert of the whole
            step (``global_aux_loss``).
        num_layers, num_experts, topk: counts of the whole model.
        recorded: choices of the old-policy pass; the key is the samples of the micro-batch.
        biases: (bias, its value before the current step) of each router whose bias is updated.
    """

    layers: list[ExpertLayer]
    source: Source
    counts_ahead: bool
    num_layers: int
    num_experts: int
    topk: int
    recorded: dict[tuple[int, ...], dict[int, Tensor]] = field(default_factory=dict)
    biases: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    gradient_scale: float = 1.0

    def prepare(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[PackedMicroBatch],
        which: Pass,
        gradient_scale: float = 0.0,
    ) -> None:
        """Give each micro-batch its `Routing` before a pass. Collective in training when balance
        losses are on.

        Args:
            gradient_scale: undoes Megatron's averaging over micro-batches and ranks (training
                only).
        Raises:
            UserError: the engine's experts should be replayed, but are missing or have the wrong
                shape.
        """
        scale = 0.0
        if which == "count":
            for layer in self.layers:
                layer.router.statistics.step_counts.zero_()
        if which == "train":
            self.gradient_scale = gradient_scale
            for layer in self.layers:
                layer.router.statistics.clear()
            moving = [
                layer.router.expert_bias
                for layer in self.layers
                if layer.config.moe_router_bias_update_rate
            ]
            self.biases = [(bias, bias.clone()) for bias in moving if bias is not None]
            if self.layers and uses_balance_losses(self.layers[0].config):
                scale = gradient_scale / self._tokens_of_step(micro_batches)
        for micro_batch in micro_batches:
            micro_batch.sequences.routing = Routing(
                copies=micro_batch.copies.to(micro_batch.tokens.device),
                sequence=self._sequence(micro_batch, batch).to(micro_batch.tokens.device),
                num_sequences=len(micro_batch.samples),
                loss_scale=scale,
                counts_ahead=which == "count",
            )
            if which != "reference":
                self._set_choices(micro_batch, batch, which)

    def sum_counts(self) -> None:
        """Sum the counts over all ranks after the counting pass. Collective."""
        if not self.layers:
            return
        counts = torch.stack([layer.router.statistics.step_counts for layer in self.layers])
        dist.all_reduce(
            counts,
            group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )
        for layer, total in zip(self.layers, counts):
            layer.router.statistics.step_counts.copy_(total)

    def restore_biases(self) -> None:
        """Restore the routers' biases if the step is not applied: Megatron updates them when it
        finalises gradients, before the gradients are checked."""
        for bias, before in self.biases:
            bias.copy_(before)

    def forget(self) -> None:
        """Drop the recorded choices after training on the rollout."""
        self.recorded.clear()

    def step_metrics(self) -> dict[str, float]:
        """Return the load balance of the step's experts; see `balance_metrics`. Collective."""
        return balance_metrics(self.layers, self.gradient_scale)

    def _tokens_of_step(self, micro_batches: Sequence[PackedMicroBatch]) -> float:
        """Return the number of real tokens over all data-parallel and context-parallel ranks, which
        hold different tokens."""
        mine = sum(micro_batch.copies.sum().item() for micro_batch in micro_batches)
        total = torch.tensor(mine, device=torch.cuda.current_device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if group.size() > 1:
            dist.all_reduce(total, group=group)
        return max(total.item(), 1.0)

    @staticmethod
    def _sequence(micro_batch: PackedMicroBatch, batch: TrainBatch) -> Tensor:
        """Return each token's sample, as its index within the micro-batch."""
        lengths = torch.tensor(
            [batch.tokens[i].numel() for i in micro_batch.samples], dtype=torch.long
        )
        found = torch.searchsorted(lengths.cumsum(0), micro_batch.origins.clamp(min=0), right=True)
        return found.clamp(max=max(len(lengths) - 1, 0))

    def _set_choices(self, micro_batch: PackedMicroBatch, batch: TrainBatch, which: Pass) -> None:
        routing = micro_batch.sequences.routing
        key = tuple(micro_batch.samples)
        assert routing is not None
        if self.source == "engine":
            self._take_from_engine(routing, micro_batch, batch)
        elif self.source == "policy" and which == "score":
            routing.record = True
            self.recorded[key] = routing.choices  # filled while the pass runs
        elif self.source == "policy":
            assert key in self.recorded, "routing is replayed in training but no pass recorded it"
            routing.choices = self.recorded[key]

    def _take_from_engine(
        self, routing: Routing, micro_batch: PackedMicroBatch, batch: TrainBatch
    ) -> None:
        """Set ``choices`` and ``unknown`` for the tokens that this rank routes."""
        rows = micro_batch.origins
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rows = rows.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        # padding has no recorded choices; spread it evenly over the experts
        slots = torch.arange(rows.numel())[:, None] * self.topk + torch.arange(self.topk)
        spread = (slots % self.num_experts)[:, None].expand(-1, self.num_layers, -1)
        if not micro_batch.samples:
            chosen = spread
        else:
            last = spread.new_zeros(1, self.num_layers, self.topk) + torch.arange(self.topk)
            parts = [
                part for i in micro_batch.samples for part in (self._experts_of(batch, i), last)
            ]
            table = torch.cat(parts).index_select(0, rows.clamp(min=0))
            chosen = torch.where((rows < 0)[:, None, None], spread, table.long())
        device = micro_batch.tokens.device
        unknown = (chosen == UNKNOWN).flatten(1).all(dim=1)
        if unknown.any():
            routing.unknown = unknown.to(device, non_blocking=True)
            chosen = torch.where(unknown[:, None, None], spread, chosen)
        chosen = chosen.to(smallest_integer(self.num_experts)).to(device, non_blocking=True)
        numbers = [layer.layer_number for layer in self.layers if layer.layer_number is not None]
        routing.choices = {number: chosen[:, number - 1] for number in numbers}

    def _experts_of(self, batch: TrainBatch, sample: int) -> Tensor:
        """Return the experts of one sample, [L - 1, layers, k]: the engine never computes a
        sample's last token. Other tokens that it did not compute have rows of `UNKNOWN`."""
        name = f"sample {batch.sample_indices[sample]}"
        column = batch.payloads.get("routed_experts")
        if column is None:
            raise UserError(
                "--use-rollout-routing-replay needs the experts that the engine chose",
                why="the samples of this rollout carry none",
                fix="let the generate function set sample.rollout_routed_experts (the built-in "
                "one does where the engine returns them), or use --use-routing-replay",
            )
        given = column[sample]
        expected = batch.tokens[sample].numel() - 1
        experts = given
        is_flat = given.dim() == 2 and given.shape[1] == self.num_layers * self.topk
        if given.numel() == 0 or is_flat:
            experts = given.reshape(-1, self.num_layers, self.topk)
        if tuple(experts.shape[1:]) != (self.num_layers, self.topk) or len(experts) > expected:
            raise UserError(
                f"the routed experts of {name} have shape {list(given.shape)} instead of "
                f"{[expected, self.num_layers, self.topk]}",
                why="one row per token but the last, one entry per layer (dense ones too) and "
                "chosen expert",
                fix="correct the generate function, or the engine's version",
            )
        unknown = (experts == UNKNOWN).flatten(1).all(dim=1)
        known = experts[~unknown]
        if known.numel() and (int(known.min()) < 0 or int(known.max()) >= self.num_experts):
            raise UserError(
                f"the routed experts of {name} are numbers from {int(known.min())} to "
                f"{int(known.max())}",
                why=f"the model has {self.num_experts} experts per layer",
                fix="let the engine serve the model that is trained",
            )
        missing = expected - len(experts)  # tokens appended after the engine's last output
        self._check_trained_tokens(batch, sample, torch.cat([unknown, unknown.new_ones(missing)]))
        return torch.cat(
            [experts, experts.new_full((missing, self.num_layers, self.topk), UNKNOWN)]
        )

    @staticmethod
    def _check_trained_tokens(batch: TrainBatch, sample: int, unknown: Tensor) -> None:
        """Check that every trained token has the experts with which it was sampled: row p of the
        experts belongs to token p + 1.

        Raises:
            UserError: a token with loss mask > 0 has no experts.
        """
        length = batch.response_lengths[sample]
        masks = (batch.loss_masks[sample] > 0).cpu()
        bare = unknown[len(unknown) - length :] & masks
        if bare.any():
            raise UserError(
                f"the routed experts of sample {batch.sample_indices[sample]} lack "
                f"{int(bare.sum())} tokens that are trained on (first: token "
                f"{int(bare.nonzero()[0])} of the response)",
                why="only tokens that the model did not sample may come without, with loss mask 0",
                fix="pass the engine's meta_info to sample.append_response_tokens, and ask the "
                "engine for return_routed_experts with routed_experts_start_len 0",
            )


def guide_for(chunks: Sequence[nn.Module], spec: ModelSpec, config: Config) -> RoutingGuide | None:
    """Return the guide of a model with experts; None for a dense model."""
    if not spec.num_experts:
        return None
    source: Source = "policy" if config.train.use_routing_replay else "none"
    if config.train.use_rollout_routing_replay:
        source = "engine"
    return RoutingGuide(
        layers=list(expert_layers(chunks)),
        source=source,
        counts_ahead=balance_type(chunks[0].config) == "global_aux_loss",
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        topk=int(spec.transformer["moe_router_topk"]),
    )
