"""One record per token mixer: the part of a decoder layer that lets a token see earlier tokens.

A record holds all facts about a mixer for the tables, the memory plan, FLOPs, the configuration of
Megatron and the embedded engine. `mixer_of` returns the record of a layer.

To add a mixer, add a record here, a class to the embedded engine, and a module to the trainer.
Layers of a model may have different mixers if these share one Megatron configuration class, and if
all mixers with a KV cache have heads of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slime.models.layouts import (
    COLUMN,
    GATED_QKV,
    LATENT,
    QKV,
    REPLICATED,
    ROW,
    STACKED_QKV,
    KeyHeadRows,
    Layout,
)
from slime.models.rules import (
    ATTENTION,
    HF_ATTENTION,
    HF_DELTA_NET,
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
        fused: kernels of GPUs (`slime.trainer.kernels`): norms keep only their input, one kernel
            makes queries, keys and values, and expert outputs are weighted where the gate is
            applied. Otherwise norms also keep the normalised rows in float32, and each operation
            copies queries and keys.
        grouped: attention kernels support grouped queries, like flash-attn-4; otherwise keys and
            values are repeated for every query head, as for torch's kernel before 2.13.
        one_width: attention kernels need keys and values of one width; the narrower are padded.
        score_length: tokens of the longest sequence, if attention keeps the scores of all pairs of
            tokens; 0: it does not.
    """

    element: int
    fused: bool
    grouped: bool = True
    one_width: bool = True
    score_length: int = 0

    def norm(self, width: float, rows: float = 1.0) -> float:
        """Return the bytes that norms of ``width`` entries in ``rows`` rows keep besides their
        input."""
        if self.fused:
            return 0.0
        return rows * FLOAT32_BYTES + width * (2 * FLOAT32_BYTES - self.element)


@dataclass(frozen=True, kw_only=True)
class TokenMixer:
    """Facts about one way of mixing tokens.

    Attributes:
        name: name in messages and docs.
        rules: mappings of the mixer's weights, of the norm before it and of its output projection.
        widths: sizes of the axes that its rules name. If two mixers of a model share a name, its
            sizes are equal.
        divided_rows: (rows, description) that tensor parallelism must divide, besides heads.
        flops: forward FLOPs per layer and pair of tokens, without projections.
        saved: bytes per token that autograd keeps: (spec, layout, kernels, recomputed modules) →
            bytes by description.
        kept: entries that an engine rank caches per token and layer: (spec, ranks that divide the
            attention, whether the engine caches latents).
        kept_heads: (heads, width) of keys and of values in an engine that caches them unsplit;
            None for a mixer with a state instead.
        state: (entries of the convolution's inputs, entries of the float32 state) that an engine
            rank keeps per sequence and layer, at any length: (spec, ranks).
        token_flops: forward FLOPs per layer and token, without products with weights.
        has_query_groups: several query heads may share a key-value head.
        embedded: "module:class" of the embedded engine; its ``build`` reads the layer's weights.
        megatron_module: "module:function" of the trainer: `ModelSpec` → Megatron's ``ModuleSpec``
            that replaces attention in a layer. None: Megatron's attention, as changed by
            `slime.trainer.megatron.model.put_in_parts`.
        megatron_config: "module:class" of Megatron's configuration.
        megatron_overrides: arguments of that class for every model and all flags.
        unread_flags: fields of that class that Megatron ignores → why.
    """

    name: str
    rules: tuple[Rule, ...]
    widths: Mapping[Width, Callable[[ModelSpec], int]]
    divided_rows: Callable[[ModelSpec], list[tuple[int, str]]]
    flops: Callable[[ModelSpec], float]
    saved: Callable[[ModelSpec, Layout, Kernels, set[str]], dict[str, float]]
    kept: Callable[[ModelSpec, int, bool], int]
    kept_heads: Callable[[ModelSpec], tuple[int, int]] | None
    has_query_groups: bool
    embedded: str
    megatron_config: str
    megatron_overrides: dict[str, Any] = field(default_factory=dict)
    unread_flags: Mapping[str, str] = field(default_factory=dict)
    megatron_module: str | None = None
    state: Callable[[ModelSpec, int], tuple[int, int]] | None = None
    token_flops: Callable[[ModelSpec], float] = lambda spec: 0.0


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
    """Return the FLOPs of causal attention: half of 4 · heads · (mean width of keys and values)."""
    return 2.0 * spec.num_heads * (spec.head_dim + spec.value_dim) / 2


# -- attention: queries, keys and values are projected from the hidden states ----------------------

_WIDE_NORMS: tuple[tuple[str, Width], ...] = (("q", "query"), ("k", "key"))

#: Rules of biases, sinks and norms of queries and keys apply only if the spec has these.
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
#: The same rules for checkpoints with queries, keys and values in one tensor.
STACKED_QKV_RULES = tuple(
    replace(rule, hf=HF_ATTENTION + "qkv_proj.weight", layout=STACKED_QKV, rows="query, key, value")
    if rule.layout is QKV and rule.columns is not None
    else rule
    for rule in _ATTENTION_RULES
)


def _attention_saved(
    spec: ModelSpec,
    layout: Layout,
    kernels: Kernels,
    recomputed: set[str],
    *,
    is_gated: bool = False,
) -> dict[str, float]:
    width = spec.head_dim
    element = kernels.element
    heads = spec.num_heads / layout.tensor
    groups = max(spec.num_query_groups / layout.tensor, 1.0)
    query = heads * width * element
    key_value = 2 * groups * width * element
    has_norms = bool(spec.transformer.get("qk_layernorm")) or spec.wide_qk_norms
    # the fused kernel keeps its input, the mixed product, only for norms; it needs whole groups
    plain = not spec.wide_qk_norms and not spec.rotates_first and not is_gated
    one_pass = kernels.fused and spec.num_query_groups >= layout.tensor and plain
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
        # the queries of several groups are not contiguous
        copied = query if groups > 1 else 0.0
        if spec.rotates_first:
            copied = query + key_value / 2  # rotated
        kept = kernels.norm((heads + groups) * width, heads + groups)
        if spec.wide_qk_norms:
            kept = 2.0 * FLOAT32_BYTES  # a scale for queries and one for keys
        parts["norms of query and key"] = copied + kept
    parts["attention output"] = query
    if "core_attn" not in recomputed:
        parts["attention statistics"] = heads * FLOAT32_BYTES
        parts["attention scores"] = kernels.score_length * heads * FLOAT32_BYTES
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


# -- attention whose output is gated ---------------------------------------------------------------


def _is_delta_net(spec: ModelSpec, layer: int) -> bool:
    return mixer_of(spec.transformer, layer) is GATED_DELTA_NET


def _of_attention(rule: Rule) -> Rule:
    """Restrict a rule to the layers of a hybrid that have attention."""

    def applies(spec: ModelSpec, layer: int) -> bool:
        return rule.applies(spec, layer) and not _is_delta_net(spec, layer)

    if rule.layout is not QKV or rule.columns is None:
        return replace(rule, when=applies)
    return replace(rule, layout=GATED_QKV, rows=("query and gate", "key", "key"), when=applies)


def _gated_saved(
    spec: ModelSpec, layout: Layout, kernels: Kernels, recomputed: set[str]
) -> dict[str, float]:
    """Saved bytes of gated attention, which the fused kernel for norms and rotation does not
    support."""
    parts = _attention_saved(spec, layout, kernels, recomputed, is_gated=True)
    width = spec.num_heads / layout.tensor * spec.head_dim
    # the gate is part of the mixed product; the gated output is kept beside the other
    return parts | {"gate of the attention output": 2 * width * kernels.element}


GATED_ATTENTION = replace(
    GROUPED_ATTENTION,
    name="gated attention",
    rules=tuple(_of_attention(rule) for rule in _ATTENTION_RULES),
    widths={
        **GROUPED_ATTENTION.widths,
        "query and gate": lambda spec: 2 * spec.num_heads * spec.head_dim,
    },
    saved=_gated_saved,
    embedded="slime.embedded.token_mixers:GatedAttention",
)


# -- gated delta net (arXiv:2412.06464): a state per head in place of keys and values --------------

#: Indices into `slime.models.layouts.DeltaNetSizes.of_key_head`.
_QUERY, _KEY, _VALUES, _GATES, _WRITES, _DECAYS = range(6)


def _delta(
    megatron: str, hf: str | tuple[str, ...], layout: Any, rows: Any, columns: Any = None
) -> Rule:
    names = (hf,) if isinstance(hf, str) else hf
    return Rule(
        ATTENTION + megatron,
        tuple(HF_DELTA_NET + name for name in names),
        layout,
        rows,
        columns,
        _is_delta_net,
    )


_DELTA_RULES = (
    replace(_INPUT_NORM, when=_is_delta_net),
    _delta(
        "conv_weight",
        "conv1d.weight",
        KeyHeadRows((((_QUERY,), (_KEY,), (_VALUES,)),)),
        "delta keys, values",
        (1, "convolved"),
    ),
    _delta("A_log", "A_log", COLUMN, "delta value heads"),
    _delta("dt_bias", "dt_bias", COLUMN, "delta value heads"),
    _delta("norm_weight", "norm.weight", REPLICATED, "delta value"),
    _delta("linear_proj.weight", "out_proj.weight", ROW, "hidden", "delta values"),
)
#: Qwen3-Next: two matrices, with rows grouped by key heads.
_BY_HEAD = _delta(
    "in_proj.weight",
    ("in_proj_qkvz.weight", "in_proj_ba.weight"),
    KeyHeadRows((((_QUERY, _KEY, _VALUES, _GATES),), ((_WRITES, _DECAYS),))),
    ("delta keys, values, gates", "delta writes, decays"),
    "hidden",
)
#: Qwen3.5: four matrices, with rows grouped by kind.
_BY_KIND = _delta(
    "in_proj.weight",
    tuple(f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    KeyHeadRows((((_QUERY,), (_KEY,), (_VALUES,)), ((_GATES,),), ((_WRITES,),), ((_DECAYS,),))),
    ("delta keys, values", "delta values", "delta value heads", "delta value heads"),
    "hidden",
)
SPLIT_DELTA_RULES = (_BY_KIND, *_DELTA_RULES)

#: Last parts of the names of the Linear layers of gated delta nets.
DELTA_PROJECTIONS = frozenset(
    name.removesuffix(".weight").rpartition(".")[2]
    for rule in (_BY_HEAD, *SPLIT_DELTA_RULES)
    if rule.is_linear
    for name in rule.hf_names
)

#: Tokens per chunk of the kernels.
_CHUNK = 64


def _delta_saved(
    spec: ModelSpec, layout: Layout, kernels: Kernels, recomputed: set[str]
) -> dict[str, float]:
    sizes = spec.delta_net
    element = kernels.element
    mixed = sizes.mixed / layout.tensor
    heads = sizes.value_heads / layout.tensor
    values = heads * sizes.value
    by_kernels = kernels.fused and element < FLOAT32_BYTES
    # with kernels only a copy of the gate is kept
    projected = values if by_kernels else mixed + values + 2 * heads
    parts = {
        "projections": projected * element,
        "output of the delta rule": values * (element if by_kernels else FLOAT32_BYTES),
        "gated norm": values * element,
    }
    if layout.context > 1:
        parts["exchanged over context ranks"] = (mixed + 2 * heads) * element
    if by_kernels:
        # inputs of the convolution (if not counted above) and of the rule, and the chunks'
        # triangular systems
        inputs = mixed if layout.context > 1 else 2 * mixed
        parts["kernels"] = (inputs + _CHUNK * heads) * element + 5 * heads * FLOAT32_BYTES
    return parts


def _delta_state(spec: ModelSpec, ranks: int) -> tuple[int, int]:
    sizes = spec.delta_net
    heads = sizes.value_heads // ranks
    return sizes.mixed // ranks * (sizes.conv - 1), heads * sizes.key * sizes.value


def _delta_flops(spec: ModelSpec) -> float:
    """Return the FLOPs of reading and writing the state, and of the products within a chunk."""
    sizes = spec.delta_net
    within = 4 * _CHUNK * (sizes.key + sizes.value)
    return float(sizes.value_heads * (6 * sizes.key * sizes.value + within))


GATED_DELTA_NET = TokenMixer(
    name="gated delta net",
    rules=(_BY_HEAD, *_DELTA_RULES),
    widths={
        "delta keys, values": lambda spec: spec.delta_net.mixed,
        "delta values": lambda spec: spec.delta_net.value_heads * spec.delta_net.value,
        "delta value heads": lambda spec: spec.delta_net.value_heads,
        "delta value": lambda spec: spec.delta_net.value,
        "delta keys, values, gates": lambda spec: (
            spec.delta_net.key_heads * sum(spec.delta_net.of_key_head[:4])
        ),
        "delta writes, decays": lambda spec: 2 * spec.delta_net.value_heads,
        "convolved": lambda spec: spec.delta_net.conv,
    },
    divided_rows=lambda spec: [(spec.delta_net.key_heads, "key heads of gated delta nets")],
    flops=lambda spec: 0.0,
    saved=_delta_saved,
    kept=lambda spec, ranks, latents: 0,
    kept_heads=None,
    has_query_groups=False,
    embedded="slime.embedded.token_mixers:GatedDeltaNet",
    megatron_config="megatron.core.transformer.transformer_config:TransformerConfig",
    megatron_module="slime.trainer.megatron.delta_net:delta_net_spec",
    state=_delta_state,
    token_flops=_delta_flops,
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
    key = spec.head_dim
    value = spec.value_dim
    if kernels.one_width:
        key = value = max(key, value)
    # the output is copied when it is cut to its width, or exchanged back
    is_copied = value != spec.value_dim or layout.context > 1
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
        "attention output": heads * (value + (spec.value_dim if is_copied else 0)) * element,
    }
    if "mla_up_proj" not in recomputed:
        parts["query, key, value"] = heads * (2 * key + value) * element
    if "core_attn" not in recomputed:
        parts["attention statistics"] = heads * FLOAT32_BYTES
    return parts


def _latent_kept(spec: ModelSpec, ranks: int, latents: bool) -> int:
    """Count one latent and one rotated key for all heads, or keys and values of each head."""
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
    # Every tensor-parallel rank normalises whole latents. With qk_layernorm, Megatron would treat
    # these as norms of each rank's own heads, and sum their gradients over the ranks.
    megatron_overrides={"qk_layernorm": False},
    unread_flags={"add_qkv_bias": "multi-latent attention has no biases"},
)

MIXERS = (GROUPED_ATTENTION, GATED_ATTENTION, GATED_DELTA_NET, LATENT_ATTENTION)


def mixer_of(transformer: Mapping[str, Any], layer: int) -> TokenMixer:
    """Return the token mixer of layer ``layer`` (global, from 0).

    Args:
        transformer: `ModelSpec.transformer`. Its ``linear_attention_freq`` has a 1 for each gated
            delta net.
    """
    if transformer.get("multi_latent_attention"):
        return LATENT_ATTENTION
    delta_nets = transformer.get("linear_attention_freq")
    if delta_nets and delta_nets[layer]:
        return GATED_DELTA_NET
    return GATED_ATTENTION if transformer.get("attention_output_gate") else GROUPED_ATTENTION


def mixers_of(transformer: Mapping[str, Any]) -> list[TokenMixer]:
    """Return the token mixers of a model, each once."""
    layers = range(transformer.get("num_layers", 1))
    found = [mixer_of(transformer, layer) for layer in layers]
    return list({mixer.name: mixer for mixer in found}.values())
