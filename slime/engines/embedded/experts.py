"""Layers of experts: each token passes the experts that the router chooses for it, and the shared ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.engines.embedded.architecture_parts import Experts
from slime.engines.embedded.linear import Mlp


@dataclass
class ExpertMLP:
    """Router, routed experts, shared experts.

    Attributes:
        gate: [experts, hidden].
        bias: [experts], added to the scores for the choice only; None without.
    """

    facts: Experts
    gate: torch.Tensor
    bias: torch.Tensor | None
    experts: list[Mlp]
    shared: Mlp | None

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, chosen: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden] → ``y``, or ``residual + y``; the choices [tokens, k] are appended to ``chosen``."""
        weights, choices = route(self.facts, F.linear(x.float(), self.gate.float()), self.bias)
        if chosen is not None:
            chosen.append(choices)
        output = torch.zeros_like(x) if residual is None else residual.clone()
        if self.shared is not None:
            output += self.shared(x)
        routed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        # by the experts' numbers: a token's sum has one order, whatever is batched with it
        for number in choices.unique().tolist():
            rows, place = (choices == number).nonzero(as_tuple=True)
            routed.index_add_(0, rows, self.experts[number](x[rows]).float() * weights[rows, place, None])
        return output.add_(routed.to(x.dtype))


def route(facts: Experts, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [tokens, experts] → (weights float32 [tokens, k], experts int64 [tokens, k]).

    Source: DeepSeek-V3 (arXiv:2412.19437), equations 12 to 16; a group's score is the sum of its two best experts.
    """
    scores = logits.softmax(dim=-1) if facts.score == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias.float()
    if facts.chosen_groups < facts.groups:
        grouped = ranked.view(len(ranked), facts.groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(facts.chosen_groups, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        ranked = grouped.masked_fill(outside[..., None], float("-inf")).view_as(ranked)
    choices = ranked.topk(facts.chosen, dim=-1).indices
    weights = scores.gather(1, choices)
    if facts.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * facts.scale, choices
