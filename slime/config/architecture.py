"""Flags that describe the model, against the Hugging Face config: a contradiction is an error, never a silent choice.

The architecture is always that of --hf-checkpoint. Launch scripts written for Megatron-LM repeat it in flags
(``--num-layers 36 --hidden-size 2560 --swiglu …``); those are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.config.flags import all_flags
from slime.errors import UserError

Facts = Mapping[str, Any]


def _key(*names: str) -> Callable[[Facts], Any]:
    """The first of these keys that the config has."""
    return lambda hf: next((hf[name] for name in names if hf.get(name) is not None), None)


def _rope(name: str) -> Callable[[Facts], Any]:
    """A rotary setting, in the spelling of transformers 5 or of earlier ones."""

    def read(hf: Facts) -> Any:
        places = (hf, hf.get("rope_parameters") or {}, hf.get("rope_scaling") or {})
        return next((place[name] for place in places if place.get(name) is not None), None)

    return read


def _rope_kind(hf: Facts) -> str:
    return str(_rope("rope_type")(hf) or _rope("type")(hf) or "default")


def _interpolation(hf: Facts) -> Any:
    return _rope("factor")(hf) if _rope_kind(hf) == "linear" else 1.0


def _has_post_norms(hf: Facts) -> Any:
    return None if hf.get("model_type") is None else hf["model_type"] == "glm4"


def _shared_expert_size(hf: Facts) -> Any:
    if hf.get("shared_expert_intermediate_size") is not None:
        return hf["shared_expert_intermediate_size"]
    count = hf.get("n_shared_experts")
    return count * hf["moe_intermediate_size"] if count else None


def _head_size(hf: Facts) -> Any:
    """None under multi-latent attention: there Megatron's kv_channels has no meaning."""
    return None if hf.get("kv_lora_rank") else hf.get("head_dim")


def _is_grouped(hf: Facts) -> Any:
    groups = hf.get("num_key_value_heads")
    return None if groups is None else groups < hf["num_attention_heads"]


def _is_untied(hf: Facts) -> Any:
    return None if hf.get("tie_word_embeddings") is None else not hf["tie_word_embeddings"]


def _is_swiglu(hf: Facts) -> Any:
    activation = hf.get("hidden_act") or hf.get("hidden_activation")
    return None if activation is None else activation in ("silu", "swiglu", "swish")


#: flag -> (what the config calls it, how to read it); None when the config does not say
_FACTS: dict[str, tuple[str, Callable[[Facts], Any]]] = {
    "num_layers": ("num_hidden_layers", _key("num_hidden_layers")),
    "hidden_size": ("hidden_size", _key("hidden_size")),
    "ffn_hidden_size": ("intermediate_size", _key("intermediate_size")),
    "num_attention_heads": ("num_attention_heads", _key("num_attention_heads")),
    "num_query_groups": ("num_key_value_heads", _key("num_key_value_heads")),
    "kv_channels": ("head_dim", _head_size),
    "norm_epsilon": ("rms_norm_eps", _key("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")),
    "vocab_size": ("vocab_size", _key("vocab_size")),
    "rotary_base": ("rope_theta", _rope("rope_theta")),
    "rotary_percent": ("partial_rotary_factor", _rope("partial_rotary_factor")),
    "rotary_scaling_factor": ("rope_scaling.factor", _rope("factor")),
    "rotary_seq_len_interpolation_factor": ("the factor of linear rope_scaling", _interpolation),
    "use_rope_scaling": ("rope_type is llama3", lambda hf: _rope_kind(hf) == "llama3"),
    "rope_scaling_factor": ("rope_scaling.factor", _rope("factor")),
    "rope_type": ("rope_type", lambda hf: "yarn" if _rope_kind(hf) == "yarn" else "rope"),
    "beta_fast": ("rope_scaling.beta_fast", _rope("beta_fast")),
    "beta_slow": ("rope_scaling.beta_slow", _rope("beta_slow")),
    "mscale": ("rope_scaling.mscale", _rope("mscale")),
    "mscale_all_dim": ("rope_scaling.mscale_all_dim", _rope("mscale_all_dim")),
    "original_max_position_embeddings": (
        "rope_scaling.original_max_position_embeddings",
        _rope("original_max_position_embeddings"),
    ),
    "swiglu": ("hidden_act is silu", _is_swiglu),
    "group_query_attention": ("num_key_value_heads < num_attention_heads", _is_grouped),
    "untie_embeddings_and_output_weights": ("not tie_word_embeddings", _is_untied),
    "post_self_attn_layernorm": ("model_type is glm4", _has_post_norms),
    "post_mlp_layernorm": ("model_type is glm4", _has_post_norms),
    "num_experts": ("num_experts", _key("num_experts", "n_routed_experts", "num_local_experts")),
    "moe_ffn_hidden_size": ("moe_intermediate_size", _key("moe_intermediate_size")),
    "moe_router_topk": ("num_experts_per_tok", _key("num_experts_per_tok")),
    "moe_router_num_groups": ("n_group", _key("n_group")),
    "moe_router_group_topk": ("topk_group", _key("topk_group")),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor", _key("routed_scaling_factor")),
    "moe_shared_expert_intermediate_size": ("size of the shared experts", _shared_expert_size),
    "q_lora_rank": ("q_lora_rank", _key("q_lora_rank")),
    "kv_lora_rank": ("kv_lora_rank", _key("kv_lora_rank")),
    "qk_head_dim": ("qk_nope_head_dim", _key("qk_nope_head_dim")),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim", _key("qk_rope_head_dim")),
    "v_head_dim": ("v_head_dim", _key("v_head_dim")),
}


def check_model_flags(given: Mapping[str, Any], hf_config: Facts) -> None:
    """Compare the flags that the user set with the model's config.

    Args:
        given: values by flag name with underscores.
        hf_config: the parsed config.json; of a multi-modal model, its ``text_config`` counts.
    Raises:
        UserError: lists every flag that disagrees, with both values.

    Example:
        >>> check_model_flags({"num_layers": 36}, {"num_hidden_layers": 28})
        Traceback (most recent call last):
        slime.errors.UserError: 1 flag contradicts the model's config.json
          why: --num-layers 36, but num_hidden_layers is 28
    """
    facts = {**hf_config, **(hf_config.get("text_config") or {})}
    wrong = []
    for dest, (name, read) in _FACTS.items():
        if dest not in given:
            continue
        fact = read(facts)
        if fact is not None and not _equal(given[dest], fact):
            wrong.append(f"{_spelled(dest, given[dest])}, but {name} is {fact}")
    longest = facts.get("max_position_embeddings")
    asked = given.get("max_position_embeddings")
    if longest is not None and asked is not None and asked > longest:
        wrong.append(f"--max-position-embeddings {asked}, but max_position_embeddings is {longest}")
    if wrong:
        raise UserError(
            f"{len(wrong)} flag{'s contradict' if len(wrong) > 1 else ' contradicts'} the model's config.json",
            why="; ".join(wrong),
            fix="leave the flags that describe the model out (they are read from --hf-checkpoint), or correct them",
        )


def _pattern(freq: Any, described: Mapping[str, Any]) -> list[int]:
    """``moe_layer_freq`` layer by layer: an integer n means every n-th layer, from the first on."""
    return list(freq) if not isinstance(freq, int) else [int(i % freq == 0) for i in range(described["num_layers"])]


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if isinstance(one, float) or isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


def _spelled(dest: str, value: Any) -> str:
    spec = all_flags()[dest]
    if spec.kind == "bool":
        return spec.option if value else spec.off
    return f"{spec.option} {value}"


def check_checkpoint(hf_checkpoint: str | None, given: Mapping[str, Any]) -> None:
    """`check_model_flags` with the config.json of a local directory; nothing where there is none (a missing or broken
    directory is reported by whoever loads it).

    Raises:
        UserError: also for a model of quantised weights.
    """
    path = Path(hf_checkpoint or "") / "config.json"
    if hf_checkpoint is None or not path.is_file():
        return
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return
    if not isinstance(facts, dict):
        return
    if facts.get("quantization_config"):
        method = facts["quantization_config"].get("quant_method", "unnamed")
        raise UserError(
            f"--hf-checkpoint {hf_checkpoint} asks for quantised weights ({method})",
            why="config.json has a quantization_config, and quantised rollouts are not in this version: engines would"
            " quantise what the trainer pushes, which is plain weights",
            fix="take the model with plain weights, whose config.json has no quantization_config",
        )
    check_model_flags(given, facts)


def check_described(given: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Compare the flags that the user set with the model as it will be computed, where config.json may be silent.

    Args:
        given: ``config.megatron.model``.
        described: what is computed, by flag; None or not there: the model has no such thing.
    Raises:
        UserError: names the first flag that says otherwise.

    Example:
        >>> check_described({"rotary_percent": 0.5}, {"rotary_percent": 1.0})
        Traceback (most recent call last):
        slime.errors.UserError: --rotary-percent 0.5 contradicts the model
    """
    for dest, value in given.items():
        fact = described.get(dest)
        if dest in _FACTS and value and not _equal(value, fact):
            raise _contradiction(dest, value, "it has none" if fact is None else f"it is {fact}")


def _contradiction(dest: str, value: Any, fact: str) -> UserError:
    return UserError(
        f"{_spelled(dest, value)} contradicts the model",
        why=f"for this checkpoint {fact}",
        fix="leave the flag out: the architecture is read from --hf-checkpoint",
    )


def merge_transformer(described: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `TransformerConfig`: what the checkpoint says, and what the user set beside it.

    Args:
        described: by the model's family table, from the Hugging Face config; None: the model has no such thing.
        given: ``config.megatron.transformer``.
    Raises:
        UserError: the user set a field that the checkpoint says otherwise, or one of experts for a dense model.

    Example:
        >>> merge_transformer({"qk_layernorm": True}, {"moe_z_loss_coeff": 0.001})
        {'qk_layernorm': True, 'moe_z_loss_coeff': 0.001}
    """
    by_field = {spec.attribute: spec for spec in all_flags().values() if "transformer" in spec.sections}
    is_dense = described.get("num_moe_experts", 1) is None
    for name, value in given.items():
        spec = by_field[name]
        if is_dense and name.startswith("moe_") and value != spec.default and not spec.meta.no_effect:
            raise _contradiction(spec.dest, value, "there are no experts")
        if name not in described:
            continue
        if name == "moe_layer_freq":
            agrees = _pattern(value, described) == _pattern(described[name], described)
        else:
            agrees = _equal(value, described[name])
        if not agrees:
            fact = described[name]
            raise _contradiction(spec.dest, value, f"Megatron's {name} is {'not set' if fact is None else fact}")
    return {**described, **given}
