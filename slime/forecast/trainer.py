"""Model of the trainer's time for the samples of a rollout."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

from slime.forecast.rates import Rates
from slime.memory.trainer import TrainerSettings
from slime.models.flops import SequenceCost
from slime.models.spec import ModelSpec

#: Fraction of a large product's rate that the products of a layer reach, and bytes of memory
#: traffic of all other operations in a layer (norms, activations, rotations) per token and entry of
#: the hidden state, forward and backward. Both are solved from two measurements on an H200 in
#: docs/performance.md: a step of 16,384 tokens takes 0.873 s with 4B and 0.180 s with 0.6B.
_PRODUCTS_SHARE = 0.947
_MOVED = 530.0
#: Memory traffic per copy of a token that goes to an expert, from 39,100 tokens/s of the
#: mixture-of-experts model with 4B parameters.
_MOVED_PER_EXPERT = 85.0
#: Cost of a pass without gradients, as a fraction of a training pass.
_FORWARD = 1 / 3
#: Bytes that the optimizer reads and writes per parameter.
_OPTIMIZER_BYTES = 30.0


@dataclass(frozen=True)
class TrainerSeconds:
    """Seconds of one rollout's training, by activity.

    Attributes:
        compute: products and other operations of layers, including pipeline bubbles.
        exchange: exchange of activations in tensor, context and expert parallel groups.
        gradients: exchange of gradients and of new weights between replicas.
        optimizer: updates, including transfers of states from the host.
        scoring: log-probs without gradients.
    """

    compute: float
    exchange: float
    gradients: float
    optimizer: float
    scoring: float

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.gradients + self.optimizer + self.scoring


def train_seconds(
    settings: TrainerSettings,
    cost: SequenceCost,
    rates: Rates,
    lengths: Sequence[int],
    *,
    updates: int = 1,
    scorings: int = 0,
) -> TrainerSeconds:
    """Return the seconds to train on the samples of a rollout. A critic on the same GPUs takes as
    long as the policy, unless it has its own layout.

    Args:
        cost: forward FLOPs of a sequence.
        lengths: tokens of each sample, including its prompt.
        updates: optimizer steps.
        scorings: passes without gradients over all samples (old policy, reference), without those
            of teachers.
    """
    if settings.critic_layout is not None:
        critic = train_seconds(settings.as_critic(), cost, rates, lengths, updates=updates)
        alone = replace(settings, has_critic=False, critic_layout=None)
        policy = train_seconds(alone, cost, rates, lengths, updates=updates, scorings=scorings)
        both = zip(astuple(policy), astuple(critic), strict=True)
        return TrainerSeconds(*(ours + theirs for ours, theirs in both))
    layout = settings.layout
    spec = settings.spec
    model = layout.tensor * layout.context * layout.pipeline
    flops, tokens = _busiest(cost, tuple(lengths), layout.data)
    layer_tokens = tokens * spec.num_layers / model
    # the last pipeline stage also has the output layer
    output = 2.0 * spec.hidden_size * spec.padded_vocab_size * tokens
    stage_flops = (flops - output) / layout.pipeline + output
    width = layout.tensor * layout.context
    products = 3 * stage_flops / width / (rates.products * _PRODUCTS_SHARE)
    moved = layer_tokens * spec.hidden_size * (_MOVED + _MOVED_PER_EXPERT * experts_per_token(spec))
    passes = 4 / 3 if settings.recompute.granularity == "full" else 1.0
    busy = passes * (products + moved / rates.memory)
    micro_batches = max(1, math.ceil(tokens / layout.context / settings.tokens))
    launched = micro_batches * spec.num_layers / layout.pipeline * rates.launch
    bubble = 1 + (layout.pipeline - 1) / (micro_batches * layout.virtual)
    compute = max(busy, launched) * bubble
    exchange = _exchange(settings, rates, layer_tokens) * bubble
    stage = settings.stages[0]
    on_host = stage.moments * settings.moments_on_host + stage.master * settings.master_on_host
    optimizer = stage.owned * _OPTIMIZER_BYTES / rates.memory + 2 * on_host / rates.host_link
    models = 2 if settings.has_critic else 1
    return TrainerSeconds(
        compute=models * compute,
        exchange=models * exchange,
        gradients=models * updates * _gradients(settings, rates),
        optimizer=models * updates * optimizer,
        scoring=(scorings + settings.teachers) * _FORWARD * (compute + exchange),
    )


@lru_cache(maxsize=256)
def _busiest(cost: SequenceCost, lengths: tuple[int, ...], ranks: int) -> tuple[float, int]:
    """Return the FLOPs and tokens of the busiest replica, if each sample, longest first, goes to
    the replica with the least work."""
    loads = [(0.0, number, 0) for number in range(ranks)]
    for length in sorted(lengths, reverse=True):
        flops, number, tokens = loads[0]
        heapq.heapreplace(loads, (flops + cost(length), number, tokens + length))
    flops, _, tokens = max(loads)
    return flops, tokens


def experts_per_token(spec: ModelSpec) -> int:
    return int(spec.transformer["moe_router_topk"]) if spec.num_experts else 0


def _exchange(settings: TrainerSettings, rates: Rates, layer_tokens: float) -> float:
    """Return the seconds of the collectives between layers, forward and backward.

    Tensor and context parallelism exchange the hidden state eight times per layer (gather and
    scatter, or heads for tokens, of two blocks, forward and backward), experts four times per copy
    of a token.
    """
    layout = settings.layout
    row = settings.spec.hidden_size * settings.element
    seconds = 0.0
    for size, times in (
        (layout.tensor, 8 * layout.tensor),  # each rank gathers the tokens of all ranks
        (layout.context, 8),
        (layout.expert, 4 * experts_per_token(settings.spec)),
    ):
        others = times * (size - 1) / size
        seconds += others * layer_tokens * row / _speed(rates, size * layout.tensor)
    return seconds


def _gradients(settings: TrainerSettings, rates: Rates) -> float:
    """Return the seconds to reduce the gradients of all replicas and to gather the new weights."""
    stage = settings.stages[0]
    layout = settings.layout
    seconds = 0.0
    for is_expert, replicas in ((False, layout.shards), (True, layout.expert_shards)):
        held = [one for one in stage.parameters if one.is_expert is is_expert]
        trained = sum(one.numel for one in held if settings.is_trained(one.parameter))
        nbytes = trained * (settings.gradient + settings.element) * (replicas - 1) / replicas
        seconds += nbytes / _speed(rates, layout.world)
    return seconds


def _speed(rates: Rates, gpus: int) -> float:
    """Return the bytes per second and GPU in a group that spans ``gpus`` neighbouring GPUs."""
    return rates.link if gpus <= rates.gpus_per_host else rates.network
