"""Activations that the forward pass keeps for the backward pass, per token of a rank's micro-batch.

Each layer type has a formula: the tensors that autograd saves, with their widths. `saved_by_layer`
adds the token mixer's formula (`slime.models.mixers`) and those of the MLP and the experts. A test
compares it with the saved tensors of the real layers. Tokens are those of the rank's share under
context parallelism; tensor parallelism does not divide them. With sequence parallelism, tensors
outside attention and MLP are divided too.

The gradient of a frozen weight is not computed, so its input is not kept: with adapters a layer
keeps only the inputs of matrices that have an adapter, and the products A·x.

    dense layer     norm ► token mixer ► norm ► [gate|up] ► product
    expert layer    … ► norm ► router ► rows, k per token ► [gate|up] ► product ► sum
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.config import Config
from slime.models import table_of
from slime.models.adapters import AdapterConfig, adapted_layers
from slime.models.layouts import Layout
from slime.models.mixers import FLOAT32_BYTES, Kernels, mixer_of
from slime.models.spec import ModelSpec
from slime.models.table import shapes_of

_INT64 = 8


@dataclass(frozen=True)
class Recompute:
    """Activations that the backward pass computes again instead of keeping.

    Attributes:
        granularity: "full": whole layers; "selective": ``modules`` of each layer; None: nothing.
        method: with "full": "uniform" keeps the input of every block of ``num_layers`` layers,
            "block" recomputes the first ``num_layers`` layers of each stage one by one and keeps
            the rest.
    """

    granularity: str | None = None
    method: str | None = None
    num_layers: int = 1
    modules: tuple[str, ...] = ()

    @staticmethod
    def of(config: Config) -> Recompute:
        flags = config.megatron
        modules = flags.recompute_modules or ("core_attn",)
        return Recompute(
            flags.recompute_granularity,
            flags.recompute_method,
            flags.recompute_num_layers or 1,
            modules,
        )


@dataclass(frozen=True)
class Saved:
    """Bytes per token that one layer keeps.

    Attributes:
        parts: bytes by description.
        per_row: the part that is proportional to the rows that this rank's experts receive; an
            unbalanced router makes them more than the average.
    """

    parts: dict[str, float]
    per_row: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def saved_by_layer(
    spec: ModelSpec,
    layout: Layout,
    layer: int,
    kernels: Kernels,
    recompute: Recompute,
    adapters: AdapterConfig | None = None,
) -> Saved:
    """Return what layer ``layer`` keeps per token. Only recomputed modules are subtracted here;
    `saved_by_stage` handles recomputed layers."""
    has_input = _Inputs(adapters)
    drop = set(recompute.modules) if recompute.granularity == "selective" else set()
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    width = spec.hidden_size * share
    parts = {"residual": 2 * width * kernels.element}
    if spec.pre_norms and "layernorm" not in drop:
        outputs = has_input.of_attention + has_input.of_gate_and_up
        parts["norms"] = outputs * width * kernels.element + 2 * kernels.norm(width, share)
    if spec.post_norms:
        parts["norms after attention and MLP"] = 2 * (
            width * kernels.element + kernels.norm(width, share)
        )
    parts |= mixer_of(spec.transformer, layer).saved(spec, layout, kernels, drop)
    per_row = 0.0
    if spec.is_moe_layer(layer):
        experts, per_row = _experts(spec, layout, kernels, drop, has_input)
        parts |= experts
    else:
        parts |= _mlp(spec, layout, kernels, drop, has_input)
    if adapters is not None:
        hidden, hidden_rows = _adapter_products(spec, layout, layer, kernels, adapters)
        parts["products of adapters"] = hidden + hidden_rows
        per_row += hidden_rows
    return Saved(parts, per_row)


@dataclass(frozen=True)
class _Inputs:
    """Decides which inputs of Linear layers are kept, for the gradient of a weight or of A."""

    adapters: AdapterConfig | None

    def _any(self, leaves: tuple[str, ...]) -> bool:
        return self.adapters is None or not self.adapters.targets.isdisjoint(leaves)

    @property
    def of_attention(self) -> bool:
        return self._any(
            ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa")
        )

    @property
    def of_gate_and_up(self) -> bool:
        return self._any(("gate_proj", "up_proj", "gate_up_proj"))

    @property
    def of_down(self) -> bool:
        return self._any(("down_proj",))


def _adapter_products(
    spec: ModelSpec, layout: Layout, layer: int, kernels: Kernels, adapters: AdapterConfig
) -> tuple[float, float]:
    """Return the bytes per token of A·x: (layers outside routed experts, routed experts)."""
    widths = {True: 0, False: 0}
    for one in adapted_layers(table_of(spec), spec, adapters):
        if one.base.is_of_layer and one.base.applies(spec, layer):
            widths[one.base.is_expert] += sum(one.present) * one.rank
    rows = rows_per_token(spec, layout) if widths[True] else 0.0
    return widths[False] * kernels.element, widths[True] * rows * kernels.element


def spread_entries(spec: ModelSpec, layout: Layout, layer: int, adapters: AdapterConfig) -> float:
    """Return the entries of block-diagonal B matrices: a fused layer whose parts have a B each
    combines them, for each micro-batch, and keeps the result for the backward pass."""
    total = 0.0
    for one in adapted_layers(table_of(spec), spec, adapters):
        parts = sum(one.present)
        if parts > 1 and one.base.applies(spec, layer):
            rows = sum(shape[0] for shape in shapes_of(one.base, spec))
            cut = layout.expert * layout.expert_tensor if one.base.is_expert else layout.tensor
            count = spec.num_experts if one.base.is_expert else 1
            total += count * rows * parts * one.rank / cut
    return total


def _mlp(
    spec: ModelSpec, layout: Layout, kernels: Kernels, drop: set[str], has_input: _Inputs
) -> dict[str, float]:
    if "mlp" in drop:
        return {}
    width = int(spec.transformer["ffn_hidden_size"]) / layout.tensor * kernels.element
    halves = 2 if spec.transformer.get("gated_linear_unit") else 1
    keeps_product = has_input.of_down and "mlp_act" not in drop
    return {"gate and up": halves * width, "their product": width * keeps_product}


def rows_per_token(spec: ModelSpec, layout: Layout) -> float:
    """Return the rows that a rank's experts receive per token of its micro-batch, with a balanced
    router.

    Each tensor-parallel rank sends its part of the tokens to ``k`` experts each, and an expert may
    be split over several ranks.
    """
    return int(spec.transformer["moe_router_topk"]) * layout.expert_tensor / layout.tensor


def _experts(
    spec: ModelSpec, layout: Layout, kernels: Kernels, drop: set[str], has_input: _Inputs
) -> tuple[dict[str, float], float]:
    facts = spec.transformer
    element = kernels.element
    if "moe" in drop:
        return {}, 0.0
    topk = int(facts["moe_router_topk"])
    own_tokens = 1 / layout.tensor
    rows = rows_per_token(spec, layout)
    width = int(facts["moe_ffn_hidden_size"]) / layout.expert_tensor * element
    halves = 2 if facts.get("gated_linear_unit") else 1
    per_row: float = spec.hidden_size * element * has_input.of_gate_and_up
    per_row += halves * width + FLOAT32_BYTES
    if "moe_act" not in drop:
        per_row += width * has_input.of_down + (0 if kernels.fused else width)
    sigmoid = facts.get("moe_router_score_function") == "sigmoid"
    chosen = topk * (_INT64 + FLOAT32_BYTES) + (FLOAT32_BYTES if sigmoid else 0)
    exchanged = layout.expert * layout.expert_tensor > 1
    parts = {
        "router": own_tokens * (spec.num_experts * FLOAT32_BYTES + chosen),
        "indices of the rows": rows * _INT64 * 3 + (rows * _INT64 * 2 if exchanged else 0),
        "rows at experts": rows * per_row,
    }
    shared = int(facts.get("moe_shared_expert_intermediate_size") or 0) / layout.tensor * element
    if shared and "shared_experts" not in drop:
        parts["shared experts"] = (halves + has_input.of_down) * shared
        if facts.get("moe_shared_expert_gate"):
            share = 1 / layout.tensor if layout.sequence_parallel else 1.0
            parts["gate of shared experts"] = (spec.hidden_size + 1) * share * element
    return parts, rows * per_row


@dataclass(frozen=True)
class StageActivations:
    """Bytes per token that a pipeline stage keeps.

    Attributes:
        kept: for every micro-batch in flight.
        rebuilt: while a block of layers is recomputed; once, for all micro-batches in flight.
        working: forward and backward temporaries of the widest layer; once.
        uneven: the part of ``kept`` and ``rebuilt`` that is proportional to the rows of experts.
    """

    kept: float
    rebuilt: float
    working: float
    uneven: float


def saved_by_stage(
    spec: ModelSpec,
    layout: Layout,
    stage: int,
    kernels: Kernels,
    recompute: Recompute,
    adapters: AdapterConfig | None = None,
) -> StageActivations:
    """Sum over all layers of a stage, for one micro-batch."""
    layers = layout.layers_of(stage, spec.num_layers)
    saved = [saved_by_layer(spec, layout, layer, kernels, recompute, adapters) for layer in layers]
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    checkpoint = spec.hidden_size * kernels.element * share
    rebuilt = 0.0
    uneven = sum(one.per_row for one in saved)
    kept = sum(one.total for one in saved)
    if recompute.granularity == "full":
        block = recompute.num_layers
        if recompute.method == "uniform":
            kept = -(-len(layers) // block) * checkpoint
            rebuilt = max(
                sum(one.total for one in saved[i : i + block]) for i in range(0, len(saved), block)
            )
            uneven = max(
                sum(one.per_row for one in saved[i : i + block])
                for i in range(0, len(saved), block)
            )
        else:
            again = saved[:block]
            rest = saved[block:]
            of_rest = sum(one.total for one in rest)
            kept = len(again) * checkpoint + of_rest
            # the others are freed by then: their backward passes come first
            widest = max(again, key=lambda one: one.total)
            rebuilt = max(0.0, widest.total - of_rest)
            uneven = widest.per_row if rebuilt else sum(one.per_row for one in rest)
    working = max(_working(spec, layout, layer, kernels) * kernels.element for layer in layers)
    return StageActivations(kept, rebuilt, working, uneven)


def _working(spec: ModelSpec, layout: Layout, layer: int, kernels: Kernels) -> float:
    """Return an upper estimate of the entries of a layer's temporaries in the backward pass:
    gradients of its widest activations, and tensors that these are computed from.

    Which of them exist at the same time depends on kernels. On GPUs, gradients of weights need no
    temporaries, as their products accumulate into the gradient buffer.
    """
    facts = spec.transformer
    hidden = spec.hidden_size
    query = spec.num_heads / layout.tensor * spec.head_dim
    # gradients of output, query, key and value, none wider than the query; on GPUs also the query's
    # gradient accumulated in float32
    attention = (4 + (FLOAT32_BYTES / kernels.element if kernels.fused else 0)) * query
    # two of: scores, the softmax, their gradients
    heads = spec.num_heads / layout.tensor
    attention += 2 * heads * kernels.score_length * FLOAT32_BYTES / kernels.element
    if spec.is_moe_layer(layer):
        rows = rows_per_token(spec, layout)
        width = int(facts["moe_ffn_hidden_size"]) / layout.expert_tensor
        mlp = rows * (2 * hidden + 4 * width)
    else:
        # gradients of the product, of gate and of up; without a fused kernel, two more temporaries
        mlp = (3 if kernels.fused else 5) * int(facts["ffn_hidden_size"]) / layout.tensor
    return 4 * hidden + max(attention, mlp)
