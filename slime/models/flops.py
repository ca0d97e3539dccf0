"""Estimate the FLOPs of a sample from the model's config.json, for ``--balance-by-flops`` and
forecasts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slime.models.mixers import mixer_of
from slime.models.spec import HfConfig, ModelSpec
from slime.models.table import ModelFamily
from slime.models.vision import is_projector


@dataclass(frozen=True)
class SequenceCost:
    """Forward FLOPs of one sequence of L tokens: ``linear`` · L + ``quadratic`` · L², plus those of
    layers with a window.

    Attributes:
        image: FLOPs of the vision tower per image token, without attention.
        image_pair: FLOPs of the vision tower's attention per pair of patches of one image.
        merge: patches per image token.
        windowed: (W, q) per window length W. Its layers need q · L² FLOPs up to L = W, and
            q · (2·W·L − W²) beyond.

    Example (attention outweighs the matrix products beyond linear / quadratic tokens):
        >>> cost = SequenceCost(linear=100.0, quadratic=1.0)
        >>> cost(10), cost(1000)
        (1100.0, 1100000.0)
    """

    linear: float
    quadratic: float
    windowed: tuple[tuple[int, float], ...] = ()
    image: float = 0.0
    image_pair: float = 0.0
    merge: int = 1

    def of_images(self, sizes: Iterable[int]) -> float:
        """Forward FLOPs of the vision tower for images with ``sizes`` tokens each."""
        return sum(self.image * size + self.image_pair * (size * self.merge) ** 2 for size in sizes)

    def __call__(self, length: int) -> float:
        total = self.linear * length + self.quadratic * length * length
        for window, quadratic in self.windowed:
            seen = min(window, length)
            total += quadratic * (2 * seen * length - seen * seen)
        return total

    def of(self, lengths: Sequence[int]) -> list[float]:
        return [self(length) for length in lengths]


def sequence_cost(family: ModelFamily, hf_config: HfConfig) -> SequenceCost:
    """Count 2 FLOPs per weight and token in the layers and the output layer, plus FLOPs of token
    mixers per pair of tokens, or per token if they keep a state.

    Only the experts that a token is routed to are counted. Norms and biases are left out.
    """
    spec = family.model_spec(hf_config)
    weights = 0.0
    for parameter in family.parameters(spec, range(spec.num_layers)):
        is_matrix = parameter.rule.columns is not None and not parameter.rule.is_buffer
        if parameter.rule.is_vision:
            continue
        if is_matrix and (spec.tie_embeddings or not parameter.is_embedding):
            share = 1.0
            if parameter.is_expert:
                share = int(spec.transformer["moe_router_topk"]) / spec.num_experts
            weights += parameter.numel * share
    token_flops = 0.0
    by_window: dict[int | None, float] = {}
    for layer in range(spec.num_layers):
        window = spec.window(layer)
        mixer = mixer_of(spec.transformer, layer)
        by_window[window] = by_window.get(window, 0.0) + mixer.flops(spec)
        token_flops += mixer.token_flops(spec)
    quadratic = by_window.pop(None, 0.0)
    windowed = tuple((window, cost) for window, cost in by_window.items() if window is not None)
    return SequenceCost(2.0 * weights + token_flops, quadratic, windowed, *_tower(family, spec))


def _tower(family: ModelFamily, spec: ModelSpec) -> tuple[float, float, int]:
    """Return ``image``, ``image_pair`` and ``merge`` of `SequenceCost`. The position embedding is
    left out."""
    if spec.vision is None:
        return 0.0, 0.0, 1
    merge = spec.vision.merge_size**2
    weights = 0.0
    for parameter in family.parameters(spec, ()):
        rule = parameter.rule
        is_matrix = rule.is_vision and rule.columns is not None
        if is_matrix and not re.search("pos_embed|position_embedding", parameter.name):
            weights += parameter.numel * (1 if is_projector(parameter.name) else merge)
    pair = 4.0 * spec.vision.hidden_size * spec.vision.depth
    return 2.0 * weights, pair, merge
