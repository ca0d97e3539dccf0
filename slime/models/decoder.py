"""What the decoder families share: the common part of the table and of the config.

Llama, Qwen2 and Qwen3 differ in biases and in norms on queries and keys; everything else is here once. What layers of
experts add is in `experts.py`.
"""

from __future__ import annotations

from typing import Any

from slime.errors import UserError
from slime.models.family import Rule
from slime.models.layouts import GATE_UP, QKV, REPLICATED, ROW, VOCAB
from slime.models.spec import ModelSpec, rotary_settings

MEGATRON_LAYER, HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
ATTENTION, HF_ATTENTION = MEGATRON_LAYER + "self_attention.", HF_LAYER + "self_attn."

OUTER_RULES = (
    Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", VOCAB),
    Rule("decoder.final_layernorm.weight", "model.norm.weight", REPLICATED),
    Rule("output_layer.weight", "lm_head.weight", VOCAB, tied_to="model.embed_tokens.weight"),
)

ATTENTION_RULES = (
    Rule(
        (MEGATRON_LAYER + "input_layernorm.weight", ATTENTION + "linear_qkv.layer_norm_weight"),
        HF_LAYER + "input_layernorm.weight",
        REPLICATED,
    ),
    Rule(ATTENTION + "linear_qkv.weight", tuple(HF_ATTENTION + f"{x}_proj.weight" for x in "qkv"), QKV),
    Rule(ATTENTION + "linear_proj.weight", HF_ATTENTION + "o_proj.weight", ROW),
)

QKV_BIAS_RULES = (
    Rule(
        ATTENTION + "linear_qkv.bias",
        tuple(HF_ATTENTION + f"{x}_proj.bias" for x in "qkv"),
        QKV,
        when=lambda spec, layer: bool(spec.transformer["add_qkv_bias"]),
    ),
)

QK_NORM_RULES = tuple(
    Rule(
        ATTENTION + f"{x}_layernorm.weight",
        HF_ATTENTION + f"{x}_norm.weight",
        REPLICATED,
        when=lambda spec, layer: bool(spec.transformer["qk_layernorm"]),
    )
    for x in "qk"
)

MLP_NORM_RULES = (
    Rule(
        (MEGATRON_LAYER + "pre_mlp_layernorm.weight", MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight"),
        HF_LAYER + "post_attention_layernorm.weight",
        REPLICATED,
    ),
)


def _is_dense_layer(spec: ModelSpec, layer: int) -> bool:
    return not spec.is_moe_layer(layer)


MLP_RULES = (
    *MLP_NORM_RULES,
    Rule(
        MEGATRON_LAYER + "mlp.linear_fc1.weight",
        (HF_LAYER + "mlp.gate_proj.weight", HF_LAYER + "mlp.up_proj.weight"),
        GATE_UP,
        when=_is_dense_layer,
    ),
    Rule(MEGATRON_LAYER + "mlp.linear_fc2.weight", HF_LAYER + "mlp.down_proj.weight", ROW, when=_is_dense_layer),
)

#: Layers for multi-token prediction, numbered on from the decoder's.
MTP_LAYERS = (r"model\.layers\.(?P<mtp_layer>\d+)\..*",)

#: Buffers that old checkpoints carry although they are computed.
COMPUTED_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


def require(config: dict[str, Any], key: str) -> Any:
    """A field that has no sensible default.

    Raises:
        UserError: it is not there.
    """
    if config.get(key) is None:
        raise UserError(
            f"the model's config.json has no field {key!r}",
            why=f"model_type is {config.get('model_type')!r}",
            fix="use the config.json that belongs to the weights",
        )
    return config[key]


def refuse(config: dict[str, Any], key: str, reason: str) -> None:
    """Raise for a setting that is on and cannot be honoured; a silent miss would train a different model."""
    if config.get(key):
        raise UserError(
            f"the model's config.json sets {key} to {config[key]!r}, which cannot be trained faithfully",
            why=reason,
            fix="choose a model without it",
        )


def mtp_layers(config: dict[str, Any]) -> int:
    """How many layers for multi-token prediction follow the decoder's, by either name; transformers' default is 1."""
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        if config.get(name) is not None:
            return int(config[name])
    return 1


def decoder_spec(
    config: dict[str, Any],
    family: str,
    *,
    add_qkv_bias: bool = False,
    qk_layernorm: bool = False,
    default_tie: bool = False,
    default_rotary_percent: float = 1.0,
    rotary_interleaved: bool = False,
    **extra: Any,
) -> ModelSpec:
    """The spec of a decoder with RMS norms, rotary embedding and gated MLPs.

    Absent fields take the defaults of transformers' config classes; ``extra`` goes into the transformer arguments.
    """
    hidden, heads = int(require(config, "hidden_size")), int(require(config, "num_attention_heads"))
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "gelu", "relu"):
        raise UserError(f"activation {activation!r} of the model is not supported", fix="silu, gelu and relu are")
    base, percent, scaling = rotary_settings(config, default_percent=default_rotary_percent)
    transformer: dict[str, Any] = {
        "num_layers": int(require(config, "num_hidden_layers")),
        "hidden_size": hidden,
        "ffn_hidden_size": int(require(config, "intermediate_size")),
        "num_attention_heads": heads,
        "num_query_groups": int(config.get("num_key_value_heads") or heads),
        "kv_channels": int(config.get("head_dim") or hidden // heads),
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": add_qkv_bias,
        "qk_layernorm": qk_layernorm,
        "rotary_interleaved": rotary_interleaved,
        "num_moe_experts": None,
        "multi_latent_attention": False,
        "hidden_dropout": 0.0,
        "attention_dropout": float(config.get("attention_dropout") or 0.0),
        **extra,
    }
    return ModelSpec(
        family=family,
        transformer=transformer,
        activation=activation,
        vocab_size=int(require(config, "vocab_size")),
        rotary_base=base,
        rotary_percent=percent,
        rotary_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", default_tie)),
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)),
    )
