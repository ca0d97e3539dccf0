"""One record per token mixer: the part of a decoder layer that lets a token see earlier tokens.

A record holds what the tables, the memory plan, the FLOPs, the configuration of Megatron and the
embedded engine have to know of a mixer. `mixer_of` gives the record of a layer.

A further kind of attention is a new record here, its axes in `slime.models.rules.Width`, a class
for the embedded engine, and a class for packed sequences in `slime.trainer.megatron.model` where
Megatron's takes none. A mixer that keeps a state per sequence (gated delta net) needs more:
``kept`` and ``kept_heads`` count entries per token, and so does the embedded engine's cache;
``flops`` count pairs of tokens. The configuration of Megatron and the shape of that cache are those
of layer 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slime.models.layouts import COLUMN, LATENT, QKV, REPLICATED, ROW, STACKED_QKV, Layout
from slime.models.rules import (
    ATTENTION,
    HF_ATTENTION,
    HF_LAYER,
    MEGATRON_LAYER,
    LayerCondition,
    Rule,
    Width,
)
from slime.models.spec import ModelSpec

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Kernels:
    """Bytes of an activation, and properties of the kernels that decide what autograd saves.

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
        if self.fused:
            return 0.0
        return rows * FLOAT32_BYTES + width * (2 * FLOAT32_BYTES - self.element)


@dataclass(frozen=True, kw_only=True)
class TokenMixer:
    """Everything that depends on how a layer mixes tokens.

    Attributes:
        name: as messages and docs call it.
        rules: how its weights map between Hugging Face and Megatron names and shards, with the norm
            before it and the projection behind it.
        widths: sizes of the axes that its rules name; two mixers of one model share no name of
            different size.
        divided_rows: (rows, what they are) that tensor parallelism must divide besides the heads.
        flops: forward FLOPs per layer and pair of tokens, the projections left out.
        saved: bytes per token that autograd keeps: (spec, layout, kernels, modules that are
            recomputed) → bytes by what they are.
        kept: entries that an engine rank keeps per token and layer: (spec, ranks that divide the
            attention, whether the engine keeps latents).
        kept_heads: (heads, width) of keys and of values in an engine that keeps them whole.
        has_query_groups: several query heads may share a head of keys and values.
        embedded: "module:class" of the embedded engine; its ``build`` reads the layer's weights.
        megatron_config: "module:class" of Megatron's configuration.
        megatron_overrides: arguments of that class whatever the model and the flags say.
        unread_flags: fields of that class that Megatron does not read, and why.
    """

    name: str
    rules: tuple[Rule, ...]
    widths: Mapping[Width, Callable[[ModelSpec], int]]
    divided_rows: Callable[[ModelSpec], list[tuple[int, str]]]
    flops: Callable[[ModelSpec], float]
    saved: Callable[[ModelSpec, Layout, Kernels, set[str]], dict[str, float]]
    kept: Callable[[ModelSpec, int, bool], int]
    kept_heads: Callable[[ModelSpec], tuple[int, int]]
    has_query_groups: bool
    embedded: str
    megatron_config: str
    megatron_overrides: dict[str, Any] = field(default_factory=dict)
    unread_flags: Mapping[str, str] = field(default_factory=dict)


_INPUT_NORM = Rule(
    MEGATRON_LAYER + "input_layernorm.weight",
    HF_LAYER + "input_layernorm.weight",
    REPLICATED,
    when=lambda spec, layer: spec.pre_norms,
)
_OUTPUT = Rule(
    ATTENTION + "linear_proj.weight", HF_ATTENTION + "o_proj.weight", ROW, "hidden", "attended"
)


def _attention_flops(spec: ModelSpec) -> float:
    """Causal attention: half of 4 · heads · width, the mean of the widths of keys and values."""
    return 2.0 * spec.num_heads * (spec.head_dim + spec.value_dim) / 2


# -- attention: queries, keys and values straight from the hidden states ---------------------------

_WIDE_NORMS: tuple[tuple[str, Width], ...] = (("q", "query"), ("k", "key"))

#: Biases, sinks, and norms of queries and keys apply where the spec has them.
_ATTENTION_RULES = (
    replace(
        _INPUT_NORM,
        megatron=(_INPUT_NORM.megatron_names[0], ATTENTION + "linear_qkv.layer_norm_weight"),
    ),
    Rule(
        ATTENTION + "linear_qkv.weight",
        tuple(HF_ATTENTION + f"{x}_proj.weight" for x in "qkv"),
        QKV,
        ("query", "key", "key"),
        "hidden",
    ),
    Rule(
        ATTENTION + "linear_qkv.bias",
        tuple(HF_ATTENTION + f"{x}_proj.bias" for x in "qkv"),
        QKV,
        ("query", "key", "key"),
        when=lambda spec, layer: bool(spec.transformer["add_qkv_bias"]),
    ),
    _OUTPUT,
    Rule(
        ATTENTION + "linear_proj.bias",
        HF_ATTENTION + "o_proj.bias",
        REPLICATED,
        when=lambda spec, layer: spec.output_bias,
    ),
    Rule(
        ATTENTION + "core_attention.softmax_offset",
        HF_ATTENTION + "sinks",
        COLUMN,
        "heads",
        when=lambda spec, layer: spec.has_sinks,
    ),
    *(
        Rule(
            ATTENTION + f"{x}_layernorm.weight",
            HF_ATTENTION + f"{x}_norm.weight",
            REPLICATED,
            "head",
            when=lambda spec, layer: bool(spec.transformer["qk_layernorm"]),
        )
        for x in "qk"
    ),
    *(
        Rule(
            ATTENTION + f"{x}_layernorm.weight",
            HF_ATTENTION + f"{x}_norm.weight",
            COLUMN,
            rows,
            when=lambda spec, layer: spec.wide_qk_norms,
        )
        for x, rows in _WIDE_NORMS
    ),
)
#: The same, where a checkpoint has queries, keys and values in one tensor.
STACKED_QKV_RULES = tuple(
    replace(
        rule,
        hf=HF_ATTENTION + "qkv_proj.weight",
        layout=STACKED_QKV,
        rows="query, key, value",
    )
    if rule.layout is QKV and rule.columns is not None
    else rule
    for rule in _ATTENTION_RULES
)


def _attention_saved(
    spec: ModelSpec, layout: Layout, kernels: Kernels, recomputed: set[str]
) -> dict[str, float]:
    width = spec.head_dim
    element = kernels.element
    heads = spec.num_heads / layout.tensor
    groups = max(spec.num_query_groups / layout.tensor, 1.0)
    query = heads * width * element
    key_value = 2 * groups * width * element
    has_norms = bool(spec.transformer.get("qk_layernorm")) or spec.wide_qk_norms
    # The kernel reads the mixed product, and keeps it for the norms only. It needs whole groups on
    # a rank.
    one_pass = kernels.fused and spec.num_query_groups >= layout.tensor and not spec.wide_qk_norms
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
        # the value is a view of the mixed product
        parts["rotated query and key"] = query + key_value / 2
    if has_norms and not one_pass:
        # the queries of several groups do not lie side by side
        copied = query if groups > 1 else 0.0
        parts["norms of query and key"] = copied + kernels.norm(
            (heads + groups) * width, heads + groups
        )
    parts["attention output"] = query
    if "core_attn" not in recomputed:
        parts["attention statistics"] = heads * FLOAT32_BYTES
    return parts


GROUPED_ATTENTION = TokenMixer(
    name="grouped-query attention",
    rules=_ATTENTION_RULES,
    widths={
        "head": lambda spec: spec.head_dim,
        "heads": lambda spec: spec.num_heads,
        "query": lambda spec: spec.num_heads * spec.head_dim,
        "key": lambda spec: spec.num_query_groups * spec.head_dim,
        "query, key, value": lambda spec: (
            (spec.num_heads + 2 * spec.num_query_groups) * spec.head_dim
        ),
        "attended": lambda spec: spec.num_heads * spec.value_dim,
    },
    divided_rows=lambda spec: [],
    flops=_attention_flops,
    saved=_attention_saved,
    kept=lambda spec, ranks, latents: 2 * max(1, spec.num_query_groups // ranks) * spec.head_dim,
    kept_heads=lambda spec: (spec.num_query_groups, spec.head_dim),
    has_query_groups=True,
    embedded="slime.embedded.token_mixers:GroupedAttention",
    megatron_config="megatron.core.transformer.transformer_config:TransformerConfig",
)


# -- multi-latent attention (DeepSeek-V2, arXiv:2405.04434): low-rank queries, keys and values -----


def has_query_rank(spec: ModelSpec, layer: int) -> bool:
    return spec.transformer["q_lora_rank"] is not None


def _has_whole_query(spec: ModelSpec, layer: int) -> bool:
    return spec.transformer["q_lora_rank"] is None


def _down(megatron: str, hf: str, rows: Width, when: LayerCondition | None = None) -> Rule:
    return Rule(ATTENTION + megatron, HF_ATTENTION + hf, LATENT, rows, "hidden", when)


def _norm(name: str, hf: str, rows: Width, when: LayerCondition | None = None) -> Rule:
    spellings = (
        ATTENTION + f"{name}_layernorm.weight",
        ATTENTION + f"linear_{name}_up_proj.layer_norm_weight",
    )
    return Rule(spellings, HF_ATTENTION + hf, REPLICATED, rows, when=when)


def _up(
    megatron: str, hf: str, rows: Width, columns: Width, when: LayerCondition | None = None
) -> Rule:
    return Rule(ATTENTION + megatron, HF_ATTENTION + hf, COLUMN, rows, columns, when)


_LATENT_RULES = (
    _INPUT_NORM,
    _up("linear_q_proj.weight", "q_proj.weight", "query", "hidden", _has_whole_query),
    _down("linear_q_down_proj.weight", "q_a_proj.weight", "query rank", has_query_rank),
    _norm("q", "q_a_layernorm.weight", "query rank", has_query_rank),
    _up("linear_q_up_proj.weight", "q_b_proj.weight", "query", "query rank", has_query_rank),
    _down("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", "key rank, position"),
    _norm("kv", "kv_a_layernorm.weight", "key rank"),
    _up("linear_kv_up_proj.weight", "kv_b_proj.weight", "keys, values", "key rank"),
    _OUTPUT,
)


def _query_rank(spec: ModelSpec) -> int:
    return int(spec.transformer["q_lora_rank"] or 0)


def _key_rank(spec: ModelSpec) -> int:
    return int(spec.transformer["kv_lora_rank"])


def _latent_saved(
    spec: ModelSpec, layout: Layout, kernels: Kernels, recomputed: set[str]
) -> dict[str, float]:
    element = kernels.element
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    heads = spec.num_heads / layout.tensor
    common = max(spec.head_dim, spec.value_dim)  # the kernels want one width
    # the output is cut to its width, or exchanged back
    again = common != spec.value_dim or layout.context > 1
    rank = _key_rank(spec)
    query_rank = _query_rank(spec)
    latents = (
        2 * query_rank * share
        + (rank * share if layout.sequence_parallel else rank + spec.rotary_dim)
        + rank * share
    )
    parts = {
        "latents": latents * element,
        "norms of latents": kernels.norm(
            (rank + query_rank) * share, (2 if query_rank else 1) * share
        ),
        "attention output": heads * (common + (spec.value_dim if again else 0)) * element,
    }
    if "mla_up_proj" not in recomputed:
        parts["query, key, value"] = heads * common * 3 * element
    if "core_attn" not in recomputed:
        parts["attention statistics"] = heads * FLOAT32_BYTES
    return parts


def _latent_kept(spec: ModelSpec, ranks: int, latents: bool) -> int:
    """One latent and one rotated key for all heads, or the keys and values of every head."""
    if latents:
        return _key_rank(spec) + spec.rotary_dim
    return spec.num_heads * (spec.head_dim + spec.value_dim)


LATENT_ATTENTION = TokenMixer(
    name="multi-latent attention",
    rules=_LATENT_RULES,
    widths={
        "query": lambda spec: spec.num_heads * spec.head_dim,
        "attended": lambda spec: spec.num_heads * spec.value_dim,
        "query rank": _query_rank,
        "key rank": _key_rank,
        "key rank, position": lambda spec: _key_rank(spec) + spec.rotary_dim,
        "keys, values": lambda spec: (
            spec.num_heads * (int(spec.transformer["qk_head_dim"]) + spec.value_dim)
        ),
    },
    divided_rows=lambda spec: [
        (_query_rank(spec), "of q_lora_rank"),
        (_key_rank(spec) + spec.rotary_dim, "of kv_lora_rank + qk_rope_head_dim"),
    ],
    flops=_attention_flops,
    saved=_latent_saved,
    kept=_latent_kept,
    # heads of one size: the shorter of key and value is padded with zeros
    kept_heads=lambda spec: (spec.num_heads, max(spec.head_dim, spec.value_dim)),
    has_query_groups=False,
    embedded="slime.embedded.token_mixers:LatentAttention",
    megatron_config="megatron.core.transformer.transformer_config:MLATransformerConfig",
    # The norms see whole latents on every tensor-parallel rank. With this mark Megatron takes them
    # for norms of each rank's own heads, and sums their gradients over the ranks.
    megatron_overrides={"qk_layernorm": False},
    unread_flags={"add_qkv_bias": "multi-latent attention has no biases"},
)

MIXERS = (GROUPED_ATTENTION, LATENT_ATTENTION)


def mixer_of(transformer: Mapping[str, Any], layer: int) -> TokenMixer:
    """Return the token mixer of layer ``layer`` (global, from 0). All layers of the models in the
    tables have the same.

    Args:
        transformer: `ModelSpec.transformer`.
    """
    return LATENT_ATTENTION if transformer.get("multi_latent_attention") else GROUPED_ATTENTION


def mixers_of(transformer: Mapping[str, Any]) -> list[TokenMixer]:
    """Return the token mixers of a model, each once."""
    layers = range(transformer.get("num_layers", 1))
    found = [mixer_of(transformer, layer) for layer in layers]
    return list({mixer.name: mixer for mixer in found}.values())
