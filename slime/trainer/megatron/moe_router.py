"""The router: scores in float32, the top-k or replayed experts of each token, and balance losses.

    hidden [n, H] ─► logits ─► scores ─► choices [n, k] ─► weights [n, k]
                                         ▲                 └─ the current scores at the choices
                                         └─ top-k (of groups; with the expert bias), or replayed

Parameters, buffers and their names are those of Megatron's `TopKRouter`. This module computes with
them, in the compact form [n, k] that the dispatch needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

# Only an import of Transformer Engine defines this function, and Megatron's router would use it.
# Results must not depend on whether Transformer Engine is installed.
moe_utils.te_general_gemm = None


@dataclass
class Routing:
    """Instructions to the routers for a micro-batch, and recorded choices. t: this rank's tokens.

    Attributes:
        copies: float32 [t], number of samples to which each token belongs, 0 for padding. This is
            its weight in counts and balance losses, so that these do not depend on which samples
            share their prompt.
        sequence: int64 [t], index of the sample to which each token belongs; 0 for padding.
        num_sequences: samples in the micro-batch.
        loss_scale: factor of the balance losses: it undoes Megatron's averaging and divides by the
            tokens of the step. 0: no balance losses.
        choices: layer number (from 1) → experts [t, k] to replay, or recorded ones.
        unknown: bool, for each token that this rank routes: it has no experts to replay. None: all
            tokens have some.
        record: store the choices.
        counts_ahead: this is the forward pass before the step that counts tokens per expert for
            ``global_aux_loss``.
    """

    copies: Tensor
    sequence: Tensor
    num_sequences: int
    loss_scale: float = 0.0
    choices: dict[int, Tensor] = field(default_factory=dict)
    unknown: Tensor | None = None
    record: bool = False
    counts_ahead: bool = False


@dataclass
class RouterStatistics:
    """Sums over a step's micro-batches on this rank. A token counts once for each of its samples.

    Attributes:
        tokens_per_expert: float32 [experts].
        step_counts: float32 [experts], with ``global_aux_loss``: number of tokens of the whole
            step, on all ranks, with the expert among their top k by score.
        balance: this rank's part of the balance loss without its coefficient; each token has weight
            1 / tokens of the step.
        z: the same for the z-loss.
    """

    tokens_per_expert: Tensor
    step_counts: Tensor
    balance: Tensor
    z: Tensor

    def clear(self) -> None:
        """Reset all sums before a step, except ``step_counts``, which are computed before."""
        for tensor in (self.tokens_per_expert, self.balance, self.z):
            tensor.zero_()


class Router(TopKRouter):
    """Top-k router of packed micro-batches.

    Args:
        splits_tokens: all tensor-parallel ranks have the same tokens, and the layer gives each rank
            its part.
        normalises: the scores of the chosen experts are divided by their sum.
        bias: the logits have a bias.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        splits_tokens: bool,
        normalises: bool,
        bias: bool = False,
    ) -> None:
        super().__init__(config, pg_collection)
        if bias:
            values = torch.zeros(self.weight.size(0), dtype=config.params_dtype)
            self.bias = torch.nn.Parameter(values)
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.splits_tokens = splits_tokens
        self.normalises = normalises
        where = torch.cuda.current_device()
        assert config.num_moe_experts is not None
        self.statistics = RouterStatistics(
            tokens_per_expert=torch.zeros(config.num_moe_experts, device=where),
            step_counts=torch.zeros(config.num_moe_experts, device=where),
            balance=torch.zeros((), device=where),
            z=torch.zeros((), device=where),
        )
        self.balance_type = "none"
        if self.get_aux_loss_coeff(str(self.routing_type)) > 0:
            self.balance_type = str(self.routing_type)

    def forward(self, hidden: Tensor, routing: Routing | None = None) -> tuple[Tensor, Tensor]:
        """hidden [n, H] → (weights float32 [n, k], experts int64 [n, k]); n is the number of tokens
        that this rank routes."""
        self._maintain_float32_expert_bias()
        logits = self.gating(hidden)
        # true once per micro-batch, even if activations are recomputed
        counts = self.training and torch.is_grad_enabled()
        copies = self._mine(routing.copies) if routing is not None else logits.new_ones(len(logits))
        if routing is not None and routing.counts_ahead:
            best = normalised_scores(logits, self.config).topk(self.topk, dim=1).indices
            self.statistics.step_counts += tokens_per_expert(
                best, copies, self.config.num_moe_experts or 0
            )
        if counts and routing is not None and routing.loss_scale and self.config.moe_z_loss_coeff:
            logits = self._with_z_loss(logits, copies, routing)
        choices = self._choices(logits.detach(), routing)
        weights = router_weights(logits, choices, self.config, normalises=self.normalises)
        if counts and routing is not None and routing.loss_scale and self.balance_type != "none":
            weights = self._with_balance_loss(weights, logits, copies, routing)
        if counts:
            self._count(choices, copies)
        return weights, choices

    def gating(self, hidden: Tensor) -> Tensor:
        """Return logits [n, experts] in ``moe_router_dtype`` (default: float32)."""
        weight = self.weight
        bias = self.bias
        if self.splits_tokens:  # gradients of the ranks' tokens must be summed
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(
                weight, group=self.tp_group
            )
            if bias is not None:
                bias = tensor_parallel.copy_to_tensor_model_parallel_region(
                    bias, group=self.tp_group
                )
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(
            self.config.moe_router_dtype or "", hidden.dtype
        )
        logits = router_gating_linear(hidden, weight, None, dtype)
        return logits if bias is None else logits + bias.to(dtype)

    def _mine(self, values: Tensor) -> Tensor:
        """Return the values of the tokens that this tensor-parallel rank routes."""
        ranks = self.tp_group.size()
        return values if ranks == 1 else values.chunk(ranks)[self.tp_group.rank()]

    def _choices(self, logits: Tensor, routing: Routing | None) -> Tensor:
        if routing is None or self.layer_number is None:
            return choose_experts(logits, self.expert_bias, self.config)
        if not routing.record and self.layer_number in routing.choices:
            given = routing.choices[self.layer_number].long()
            if routing.unknown is None:
                return given
            return torch.where(
                routing.unknown[:, None],
                choose_experts(logits, self.expert_bias, self.config),
                given,
            )
        choices = choose_experts(logits, self.expert_bias, self.config)
        if routing.record:
            routing.choices[self.layer_number] = choices.to(smallest_integer(logits.size(1)))
        return choices

    @torch.no_grad()
    def _count(self, choices: Tensor, copies: Tensor) -> None:
        counts = tokens_per_expert(choices, copies, self.config.num_moe_experts or 0)
        self.statistics.tokens_per_expert += counts
        if self.expert_bias is not None:
            self.local_tokens_per_expert += counts  # Megatron updates the bias from these

    def _with_z_loss(self, logits: Tensor, copies: Tensor, routing: Routing) -> Tensor:
        """Attach the z-loss, the mean over tokens of the squared log-sum-exp of the logits: ST-MoE
        (arXiv:2202.08906), equation 5."""
        loss = (torch.logsumexp(logits, dim=-1).square() * copies).sum() * routing.loss_scale
        self.statistics.z += loss.detach()
        return MoEAuxLossAutoScaler.apply(logits, loss * self.config.moe_z_loss_coeff)

    def _with_balance_loss(
        self, weights: Tensor, logits: Tensor, copies: Tensor, routing: Routing
    ) -> Tensor:
        """Attach E · Σ_e f_e · P_e, where f_e is the share of expert e among the choices and P_e
        its mean score.

        Switch Transformer (arXiv:2101.03961), equations 4 to 6. f_e is counted over the tokens of
        the micro-batch (aux_loss), of each sample (seq_aux_loss: DeepSeek-V3, arXiv:2412.19437,
        equations 17 to 20), or of the whole step (global_aux_loss: Qiu et al., arXiv:2501.11873,
        section 3), for which an extra pass counts before the step. The weight of each micro-batch
        or sample is its number of tokens. Only aux_loss depends on how samples are packed.
        """
        scores = normalised_scores(logits, self.config)
        scale = logits.size(1) * routing.loss_scale
        if self.balance_type == "global_aux_loss":
            counts = self.statistics.step_counts
            share = counts / counts.sum().clamp(min=1.0)
            loss = (share * (scores * copies[:, None]).sum(dim=0)).sum() * scale
        else:
            loss = self._share_times_score(scores, copies, routing) * scale
        self.statistics.balance += loss.detach()
        return MoEAuxLossAutoScaler.apply(
            weights, loss * self.get_aux_loss_coeff(self.balance_type)
        )

    def _share_times_score(self, scores: Tensor, copies: Tensor, routing: Routing) -> Tensor:
        """Return Σ_e f_e · P_e for the micro-batch, or summed over its samples."""
        experts = scores.size(1)
        chosen = scores.detach().topk(self.topk, dim=1).indices
        if self.balance_type == "seq_aux_loss":
            sequence = self._mine(routing.sequence)
            groups = max(routing.num_sequences, 1)
        else:
            sequence = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
            groups = 1
        numbers = (sequence[:, None] * experts + chosen).flatten()
        counts = torch.zeros(groups * experts, device=scores.device)
        counts.index_add_(0, numbers, copies.repeat_interleave(self.topk))
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        counts = counts.view(groups, experts)
        tokens = (counts.sum(dim=1, keepdim=True) / self.topk).clamp(min=1.0)
        share = counts / (tokens * self.topk)
        sums = torch.zeros(groups, experts, device=scores.device, dtype=scores.dtype)
        return (share * sums.index_add(0, sequence, scores * copies[:, None])).sum()


def choose_experts(logits: Tensor, bias: Tensor | None, config: TransformerConfig) -> Tensor:
    """Return the top-k experts by score plus bias, int64 [n, k], with group limits only from the
    best groups.

    A group's score is the sum of its two best experts (DeepSeek-V3, arXiv:2412.19437, section
    2.1.2), for any ``num_experts_per_tok``; with softmax it is that of its best expert
    (DeepSeek-V2, arXiv:2405.04434, section 2.2.2). Without a bias, softmax has the order of the
    logits and is not computed.
    """
    scores = torch.sigmoid(logits) if config.moe_router_score_function == "sigmoid" else logits
    if config.moe_router_score_function == "softmax" and bias is not None:
        scores = logits.softmax(dim=-1)
    if bias is not None:
        scores = scores + bias
    if not config.moe_router_group_topk:
        return scores.topk(config.moe_router_topk, dim=1).indices
    tokens, experts = scores.shape
    assert config.moe_router_num_groups is not None
    grouped = scores.view(tokens, config.moe_router_num_groups, -1)
    counted = 1 if config.moe_router_score_function == "softmax" else 2
    best = (
        grouped.topk(counted, dim=-1)
        .values.sum(dim=-1)
        .topk(config.moe_router_group_topk, dim=-1)
        .indices
    )
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
    limited = grouped.masked_fill(outside[..., None], float("-inf")).view(tokens, experts)
    return limited.topk(config.moe_router_topk, dim=1).indices


def router_weights(
    logits: Tensor, choices: Tensor, config: TransformerConfig, *, normalises: bool
) -> Tensor:
    """Return the weights of the chosen experts' outputs, float32 [n, k].

    softmax: over the chosen logits, or (``moe_router_pre_softmax``) over all, not normalised again.
    sigmoid: the chosen scores, divided by their sum if the router ``normalises``. Both are
    multiplied by ``moe_router_topk_scaling_factor``.
    """
    if config.moe_router_score_function == "sigmoid":
        weights = torch.sigmoid(logits).gather(1, choices)
        if normalises:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    elif config.moe_router_pre_softmax:
        weights = logits.softmax(dim=-1).gather(1, choices)
    else:
        weights = logits.gather(1, choices).softmax(dim=-1)
    scale = config.moe_router_topk_scaling_factor
    return weights.float() * scale if scale else weights.float()


def normalised_scores(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Return scores [n, experts] with sum 1 per token, for balance losses."""
    if config.moe_router_score_function == "softmax":
        return logits.softmax(dim=-1)
    scores = torch.sigmoid(logits)
    return scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)


def tokens_per_expert(choices: Tensor, copies: Tensor, experts: int) -> Tensor:
    """Return how often each expert was chosen, float32 [experts]; ``copies`` [n] are the tokens'
    weights.

    Example (the first token is of a prompt that three samples share, the second is padding):
        >>> tokens_per_expert(torch.tensor([[0, 2], [2, 1]]), torch.tensor([3.0, 0.0]), 3).tolist()
        [3.0, 0.0, 3.0]
    """
    counts = torch.zeros(experts, device=choices.device)
    return counts.index_add_(0, choices.flatten(), copies.repeat_interleave(choices.size(1)))


def smallest_integer(limit: int) -> torch.dtype:
    """Return the smallest integer dtype for numbers below ``limit``."""
    return torch.uint8 if limit <= 1 << 8 else torch.int16 if limit <= 1 << 15 else torch.int32
