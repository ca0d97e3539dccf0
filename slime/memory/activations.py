"""What the forward pass keeps for the backward pass, per token of a rank's micro-batch, layer by
layer.

Each layer type has a formula: the tensors that autograd saves, with their widths
(`saved_by_layer`). A test counts the saved tensors of the real layers and demands agreement. ``T``
is the rank's share of the micro-batch under context parallelism, whole under tensor parallelism;
with sequence parallelism what is not inside attention or MLP is divided.

    dense layer     norm ► qkv ► (norms of q and k) ► rotate ► attention ► projection ► norm ►
    [gate|up] ► product
                             └─ on GPUs one kernel ───────┘
    latent layer    norm ► compressed ► norm ► expanded ► attention ► projection ► …
    expert layer    … ► norm ► router ► rows, k per token ► [gate|up] ► product ► sum
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.config import Config
from slime.models.layout_rules import Layout
from slime.models.spec import ModelSpec

_FLOAT32 = 4
_INT64 = 8


@dataclass(frozen=True)
class Recompute:
    """What is computed again in the backward pass instead of being kept.

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
        parts: by what they are.
        per_row: of them, those that grow with the rows that arrive at this rank's experts: more
            than the average where the router prefers some.
    """

    parts: dict[str, float]
    per_row: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Kernels:
    """What the tensors are kept in, and by which kernels.

    Attributes:
        element: bytes of one activation: 2 in half precision, else 4.
        fused: as on GPUs (`slime.trainer.kernels`): norms keep their input alone, queries, keys and
            values come from one kernel, and expert outputs are weighted where the gate is applied;
            else norms also keep the normalised rows in float32, and queries and keys are copied by
            each part of the way.
        grouped: attention takes keys and values as they are, as flash-attn-4 does; else they are
            repeated for every query head first, as for torch's kernel before 2.13.
    """

    element: int
    fused: bool
    grouped: bool = True

    def norm(self, width: float, rows: float = 1.0) -> float:
        """Bytes that norms of ``width`` entries in ``rows`` rows keep beside their input."""
        return 0.0 if self.fused else rows * _FLOAT32 + width * (2 * _FLOAT32 - self.element)


def saved_by_layer(
    spec: ModelSpec, layout: Layout, layer: int, kernels: Kernels, recompute: Recompute
) -> Saved:
    """What layer ``layer`` keeps per token. Of ``recompute`` only the modules matter here, see
    `saved_by_stage`."""
    drop = set(recompute.modules) if recompute.granularity == "selective" else set()
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    width = spec.hidden_size * share
    parts = {"residual": 2 * width * kernels.element}
    if "layernorm" not in drop:
        parts["norms"] = 2 * (width * kernels.element + kernels.norm(width, share))
    if spec.post_norms:
        parts["norms behind attention and MLP"] = 2 * (
            width * kernels.element + kernels.norm(width, share)
        )
    attention = _latent_attention if spec.is_mla else _attention
    parts |= attention(spec, layout, kernels, drop)
    if spec.is_moe_layer(layer):
        experts, per_row = _experts(spec, layout, kernels, drop)
        return Saved({**parts, **experts}, per_row)
    return Saved({**parts, **_mlp(spec, layout, kernels, drop)})


def _attention(
    spec: ModelSpec, layout: Layout, kernels: Kernels, drop: set[str]
) -> dict[str, float]:
    width = int(spec.transformer["kv_channels"])
    element = kernels.element
    heads = spec.num_heads / layout.tensor
    groups = max(spec.num_query_groups / layout.tensor, 1.0)
    query = heads * width * element
    key_value = 2 * groups * width * element
    has_norms = bool(spec.transformer.get("qk_layernorm"))
    # the kernel reads the mixed product, and keeps it for the norms alone; it wants whole groups on
    # a rank
    one_pass = kernels.fused and spec.num_query_groups >= layout.tensor
    parts = {"mixed product": query + key_value} if has_norms or not one_pass else {}
    if layout.context > 1:
        exchanged = min(max(groups, float(layout.context)), heads) if kernels.grouped else heads
        parts["exchanged over context ranks"] = query + 2 * exchanged * width * element
        parts["exchanged attention output"] = query
        if not has_norms:
            parts.pop("mixed product", None)
    elif not kernels.grouped:
        parts["query, repeated key and value"] = 3 * query
    elif one_pass:
        parts["query, key, value"] = query + key_value
    else:
        parts["rotated query and key"] = (
            query + key_value / 2
        )  # the value is a view of the mixed product
    if has_norms and not one_pass:
        copied = (
            query if groups > 1 else 0.0
        )  # the queries of several groups do not lie side by side
        parts["norms of query and key"] = copied + kernels.norm(
            (heads + groups) * width, heads + groups
        )
    parts["attention output"] = query
    if "core_attn" not in drop:
        parts["attention statistics"] = heads * _FLOAT32
    return parts


def _latent_attention(
    spec: ModelSpec, layout: Layout, kernels: Kernels, drop: set[str]
) -> dict[str, float]:
    facts = spec.transformer
    element = kernels.element
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    heads = spec.num_heads / layout.tensor
    key_width = int(facts["qk_head_dim"]) + int(facts["qk_pos_emb_head_dim"])
    value_width = int(facts["v_head_dim"])
    common = max(key_width, value_width)  # the kernels want one width
    again = common != value_width or layout.context > 1  # cut to its width, or exchanged back
    rank = facts["kv_lora_rank"]
    query_rank = facts["q_lora_rank"] or 0
    position = facts["qk_pos_emb_head_dim"]
    latents = (
        2 * query_rank * share
        + (rank * share if layout.sequence_parallel else rank + position)
        + rank * share
    )
    parts = {
        "latents": latents * element,
        "norms of latents": kernels.norm(
            (rank + query_rank) * share, (2 if query_rank else 1) * share
        ),
        "attention output": heads * (common + (value_width if again else 0)) * element,
    }
    if "mla_up_proj" not in drop:
        parts["query, key, value"] = heads * common * 3 * element
    if "core_attn" not in drop:
        parts["attention statistics"] = heads * _FLOAT32
    return parts


def _mlp(spec: ModelSpec, layout: Layout, kernels: Kernels, drop: set[str]) -> dict[str, float]:
    if "mlp" in drop:
        return {}
    width = int(spec.transformer["ffn_hidden_size"]) / layout.tensor * kernels.element
    halves = 2 if spec.transformer.get("gated_linear_unit") else 1
    return {"gate and up": halves * width, "their product": width}


def rows_per_token(spec: ModelSpec, layout: Layout) -> float:
    """Rows that arrive at a rank's experts per token of its micro-batch, when the router is
    balanced.

    Each tensor-parallel rank sends its part of the tokens to ``k`` experts, each of which may be
    cut over several.
    """
    return int(spec.transformer["moe_router_topk"]) * layout.expert_tensor / layout.tensor


def _experts(
    spec: ModelSpec, layout: Layout, kernels: Kernels, drop: set[str]
) -> tuple[dict[str, float], float]:
    facts = spec.transformer
    element = kernels.element
    if "moe" in drop:
        return {}, 0.0
    topk = int(facts["moe_router_topk"])
    mine = 1 / layout.tensor
    rows = rows_per_token(spec, layout)
    width = int(facts["moe_ffn_hidden_size"]) / layout.expert_tensor * element
    halves = 2 if facts.get("gated_linear_unit") else 1
    per_row = spec.hidden_size * element + halves * width + _FLOAT32
    if "moe_act" not in drop:
        per_row += width if kernels.fused else 2 * width
    sigmoid = facts.get("moe_router_score_function") == "sigmoid"
    chosen = topk * (_INT64 + _FLOAT32) + (_FLOAT32 if sigmoid else 0)
    exchanged = layout.expert * layout.expert_tensor > 1
    parts = {
        "router": mine * (spec.num_experts * _FLOAT32 + chosen),
        "ways of the rows": rows * _INT64 * 3 + (rows * _INT64 * 2 if exchanged else 0),
        "rows at experts": rows * per_row,
    }
    shared = int(facts.get("moe_shared_expert_intermediate_size") or 0) / layout.tensor * element
    if shared and "shared_experts" not in drop:
        parts["shared experts"] = (halves + 1) * shared
    return parts, rows * per_row


@dataclass(frozen=True)
class StageActivations:
    """Bytes per token that a pipeline stage keeps.

    Attributes:
        kept: for every micro-batch that is under way.
        rebuilt: while a block of layers is computed again; once, whatever is under way.
        working: forward and backward temporaries of the widest layer; once.
        uneven: of ``kept`` and ``rebuilt``, what grows with the rows that arrive at experts.
    """

    kept: float
    rebuilt: float
    working: float
    uneven: float


def saved_by_stage(
    spec: ModelSpec, layout: Layout, stage: int, kernels: Kernels, recompute: Recompute
) -> StageActivations:
    """All layers of a stage, for one micro-batch."""
    layers = layout.layers_of(stage, spec.num_layers)
    saved = [saved_by_layer(spec, layout, layer, kernels, recompute) for layer in layers]
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
            kept = len(again) * checkpoint + sum(one.total for one in rest)
            rebuilt = max(one.total for one in again)
            uneven = max(one.per_row for one in again) + sum(one.per_row for one in rest)
    working = max(_working(spec, layout, layer, kernels) * kernels.element for layer in layers)
    return StageActivations(kept, rebuilt, working, uneven)


def _working(spec: ModelSpec, layout: Layout, layer: int, kernels: Kernels) -> float:
    """Entries of one layer's temporaries on the way back: gradients of its widest parts, and what
    they are made of.

    An estimate from above, not a count: what is alive at once depends on kernels. Gradients of
    weights are none of them on GPUs, where the product adds to the buffer.
    """
    facts = spec.transformer
    hidden = spec.hidden_size
    query = spec.num_heads / layout.tensor * spec.head_dim
    # gradients of output, query, key and value, none wider than the query, and on GPUs the query's
    # sum in float32
    attention = (4 + (_FLOAT32 / kernels.element if kernels.fused else 0)) * query
    if spec.is_moe_layer(layer):
        rows = rows_per_token(spec, layout)
        width = int(facts["moe_ffn_hidden_size"]) / layout.expert_tensor
        mlp = rows * (2 * hidden + 4 * width)
    # gradients of the product and of gate and up, and without a kernel the parts that the latter is
    # made of
    else:
        mlp = (3 if kernels.fused else 5) * int(facts["ffn_hidden_size"]) / layout.tensor
    return 4 * hidden + max(attention, mlp)
