"""The decoder's linear layers, with several ways to multiply, and its layers of experts.

On CPU a weight is kept twice: unchanged (Hugging Face names refer to views of it) and in oneDNN's
blocked layout, which is 1.5 to 3 times faster for the few rows of a decode step, in bfloat16 and in
float32. Code that writes to a weight must call `Linear.invalidate`; the blocked copy is made again
before its next use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.embedded.architecture import ExpertLayers
from slime.embedded.low_rank import AdaptedRows, in_fixed_blocks
from slime.models.activations import gated


class Linear:
    """``y = x Wᵀ + b`` for x [rows, in_features].

    Args:
        weight: [out_features, in_features]; may be the transpose of a contiguous matrix.
        bias: [out_features] or None.
        fixed_rows: multiply in blocks of a fixed number of rows (`in_fixed_blocks`), so that a
            row's result does not depend on other rows.

    Attributes:
        packs: whether it multiplies by oneDNN's copy.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, fixed_rows: bool = False
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.fixed_rows = fixed_rows
        self._packed: torch.Tensor | None = None
        self.packs = can_pack(weight)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def invalidate(self) -> None:
        """Drop the blocked copy, after a change of the weight."""
        self._packed = None

    @property
    def packed_nbytes(self) -> int:
        return 0 if self._packed is None else self.weight.nbytes

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        """Return ``y``, or ``residual + y``, with the products of the rows' adapters."""
        if self.fixed_rows:
            y = in_fixed_blocks(x, self._multiply)
            y = y if residual is None else residual + y
        else:
            y = self._multiply(x, residual)
        if adapted is not None:
            adapted.add(y, x, self, self.fixed_rows)
        return y

    def _multiply(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not self.packs:
            y = F.linear(x, self.weight, self.bias)
            return y if residual is None else residual + y
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(
            x, residual, self._packed, self.bias, "add"
        )


class TokenEmbedding:
    """Looks up rows of ``weight`` [vocabulary, hidden]; ``fixed_rows`` as in `Linear`."""

    def __init__(self, weight: torch.Tensor, fixed_rows: bool = False) -> None:
        self.weight = weight
        self.fixed_rows = fixed_rows

    @property
    def out_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, token_ids: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        """Look up int64 [tokens] → [tokens, hidden], and add the adapters' products."""
        y = F.embedding(token_ids, self.weight)
        if adapted is not None:
            adapted.add_looked_up(y, token_ids, self, self.fixed_rows)
        return y


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centred: bool = False
) -> torch.Tensor:
    """Return the norm over the last axis; ``zero_centred``: times 1 + weight, in float32."""
    if zero_centred:
        return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


@dataclass
class Mlp:
    """``down(activation(gate x) · up x)``; gate and up in one matrix.

    Attributes:
        limit, offset: as in `slime.models.activations.gated`.
        interleaved: the matrix has gate at even and up at odd rows, not all gates first.
    """

    gate_up: Linear
    down: Linear
    activation: Callable[[torch.Tensor], torch.Tensor]
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapted: AdaptedRows | None = None,
    ) -> torch.Tensor:
        mixed = self.gate_up(x, adapted=adapted)
        gate, up = (
            mixed.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else mixed.chunk(2, -1)
        )
        inner = gated(gate, up, self.activation, self.limit, self.offset)
        return self.down(inner.contiguous(), residual, adapted)


def can_pack(weight: torch.Tensor) -> bool:
    """Tell whether oneDNN can multiply by a blocked copy of this weight on this machine."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


@dataclass
class ExpertMLP:
    """Router, routed experts, shared experts.

    Attributes:
        gate: [experts, hidden].
        gate_bias: [experts], of the logits; None without.
        bias: [experts], added to the scores for the choice only; None without.
        shared_gate: [1, hidden], weights the shared experts' output; None without.
    """

    facts: ExpertLayers
    gate: torch.Tensor
    bias: torch.Tensor | None
    experts: list[Mlp]
    shared: Mlp | None
    shared_gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapted: AdaptedRows | None = None,
        chosen: list[torch.Tensor] | None = None,
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``y`` [tokens, hidden], or ``residual + y``; append the choices [tokens, k] to
        ``chosen``.

        Args:
            given: choices [tokens, k] to use instead of the router's; a row of -1 keeps the
                router's.
        """
        logits = F.linear(x.float(), self.gate.float())
        if self.gate_bias is not None:
            logits += self.gate_bias.float()
        weights, choices = route(self.facts, logits, self.bias, given)
        if chosen is not None:
            chosen.append(choices)
        output = torch.zeros_like(x) if residual is None else residual.clone()
        if self.shared is not None:
            added = self.shared(x, adapted=adapted)
            if self.shared_gate is not None:
                added *= F.linear(x, self.shared_gate).sigmoid()
            output += added
        routed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # in the order of the experts, so a token's sum does not depend on its batch
        for number in choices.unique().tolist():
            rows, place = (choices == number).nonzero(as_tuple=True)
            own = None if adapted is None else adapted.chosen(rows)
            found = self.experts[number](x[rows], adapted=own)
            routed.index_add_(0, rows, found.float() * weights[rows, place, None])
        return output.add_(routed.to(x.dtype))


def route(
    facts: ExpertLayers,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    given: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route tokens: float32 [tokens, experts] → (weights float32 [tokens, k], experts int64
    [tokens, k]).

    Rows of ``given`` that are not negative replace the choice; their weights are still this
    router's.

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16; a group's score is the sum of its
    two best experts. With softmax it is that of its best: DeepSeek-V2 (arXiv:2405.04434), section
    2.2.2.
    """
    scores = logits.softmax(dim=-1) if facts.score == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias.float()
    if facts.chosen_groups < facts.groups:
        grouped = ranked.view(len(ranked), facts.groups, -1)
        counted = grouped.topk(1 if facts.score == "softmax" else 2, dim=-1).values.sum(dim=-1)
        best = counted.topk(facts.chosen_groups, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        ranked = grouped.masked_fill(outside[..., None], float("-inf")).view_as(ranked)
    choices = ranked.topk(facts.chosen, dim=-1).indices
    if given is not None:
        choices = torch.where(given < 0, choices, given)
    weights = scores.gather(1, choices)
    if facts.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * facts.scale, choices
