"""Compare flags that describe the model with the model; a contradiction is an error.

The architecture is always that of --hf-checkpoint. Launch scripts written for Megatron-LM repeat it
in flags (``--num-layers 36 --hidden-size 2560 --swiglu …``). These are compared with the spec that
the model's family reads from config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.config.flags import all_flags
from slime.config.groups_megatron import MegatronConfig
from slime.errors import UserError
from slime.log import get_logger
from slime.models.mixers import mixers_of
from slime.models.spec import ModelSpec

logger = get_logger(__name__)


def check_model_flags(flags: MegatronConfig, spec: ModelSpec) -> None:
    """Refuse flags that contradict the model.

    Raises:
        UserError: lists all contradictions, with both values.
    """
    described = _outside_transformer(spec)
    idle = _without_effect(flags, described, spec)
    for dest, why in idle.items():
        logger.warning("%s has no effect: %s", all_flags()[dest].option, why)
    given = {
        dest: value
        for dest, value in flags.model.items()
        if dest in described and dest not in idle and value is not None
    }
    wrong = list(_of_transformer(spec.transformer, _acting(spec.transformer, flags.transformer)))
    wrong += [
        _contradiction(dest, value, described[dest])
        for dest, value in given.items()
        if not _equal(value, described[dest])
    ]
    longest = flags.model.get("max_position_embeddings")
    if longest is not None and longest > spec.max_position_embeddings:
        wrong.append(
            f"--max-position-embeddings {longest}, but the model supports "
            f"{spec.max_position_embeddings}"
        )
    _refuse(wrong)


def _without_effect(
    flags: MegatronConfig, described: Mapping[str, Any], spec: ModelSpec
) -> dict[str, str]:
    """Find flags that Megatron ignores for this model: dest → why the flag has no effect."""
    idle = {
        dest: why
        for mixer in mixers_of(spec.transformer)
        for dest, why in mixer.unread_flags.items()
        if flags.transformer.get(dest)
    }
    if described["mscale"] is None and flags.model.get("rotary_scaling_factor", 1) == 1:
        for dest in ("mscale", "mscale_all_dim"):
            if flags.model.get(dest) == 1.0:
                idle[dest] = "positions are not scaled, so attention is not scaled either"
    return idle


def merge_transformer(described: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `TransformerConfig`: those of the checkpoint, and further fields
    that the user set.

    Args:
        described: fields from the Hugging Face config, by the model's family; a value of None means
            that the model does not have the feature.
        given: ``config.megatron.transformer``.
    Raises:
        UserError: the user's fields contradict the checkpoint, or set up experts for a dense model.

    Example:
        >>> merge_transformer({"qk_layernorm": True}, {"moe_z_loss_coeff": 0.001})
        {'qk_layernorm': True, 'moe_z_loss_coeff': 0.001}
        >>> merge_transformer({"num_layers": 28}, {"num_layers": 36})
        Traceback (most recent call last):
        slime.errors.UserError: 1 flag contradicts the model's config.json
          why: --num-layers 36, but it is 28
          fix: leave the flags that describe the model out (they are read from --hf-checkpoint), or
              correct them
    """
    acting = _acting(described, given)
    _refuse(list(_of_transformer(described, acting)))
    return {**described, **acting}


def _acting(described: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Drop fields whose flags have no effect, or that Megatron ignores for the model's mixers."""
    idle = {
        spec.attribute
        for spec in all_flags().values()
        if "transformer" in spec.sections and spec.meta.no_effect
    }
    for mixer in mixers_of(described):
        idle.update(mixer.unread_flags)
    return {name: value for name, value in given.items() if name not in idle}


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise UserError(
            f"{len(wrong)} flag{'s contradict' if len(wrong) > 1 else ' contradicts'} the model's "
            "config.json",
            why="; ".join(wrong),
            fix="leave the flags that describe the model out (they are read from "
            "--hf-checkpoint), or correct them",
        )


#: Fields of features that only some families have.
_OF_SOME_FAMILIES = {
    "attention_output_gate", "layernorm_zero_centered_gamma", "moe_shared_expert_gate",
    "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"
}  # fmt: skip


def _of_transformer(described: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    by_field = {
        spec.attribute: spec for spec in all_flags().values() if "transformer" in spec.sections
    }
    is_dense = described.get("num_moe_experts", 1) is None
    for name, value in given.items():
        flag = by_field[name]
        if name in described:
            if name == "linear_attention_freq" and isinstance(value, int):
                freq = range(1, described["num_layers"] + 1)
                agrees = [int(layer % value != 0) for layer in freq] == described[name]
            elif name == "moe_layer_freq":
                agrees = _pattern(value, described) == _pattern(described[name], described)
            elif name == "window_attn_skip_freq" and described[name] is not None:
                agrees = _windows(value, described) == list(described[name])
            else:
                agrees = _equal(value, described[name])
            if not agrees:
                yield _contradiction(flag.dest, value, described[name])
        elif name in _OF_SOME_FAMILIES and value != flag.default:
            yield _contradiction(flag.dest, value, None)
        elif (
            is_dense
            and name.startswith("moe_")
            and value != flag.default
            and not flag.meta.no_effect
        ):
            yield f"{_spelled(flag.dest, value)}, but there are no experts"


def _outside_transformer(spec: ModelSpec) -> dict[str, Any]:
    """Describe the model in flags of Megatron-LM without a field in `TransformerConfig`; None means
    that the model does not have the feature."""
    scaling = spec.rotary_scaling or {}
    shape = spec.transformer
    kind = scaling.get("rope_type", "default")
    factor = scaling.get("factor")
    is_yarn = kind == "yarn"
    of_yarn = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    of_latents = (
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
    )
    return {
        **{name: scaling.get(name) if is_yarn else None for name in of_yarn},
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings"),
        **{name: shape.get(name) for name in of_latents},
        "vocab_size": spec.vocab_size,
        "rotary_base": spec.rotary_base,
        "rotary_percent": spec.rotary_percent,
        "rotary_scaling_factor": factor or 1.0,
        "rotary_seq_len_interpolation_factor": factor if kind == "linear" else 1.0,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": factor if kind == "llama3" else None,
        "rope_type": "yarn" if is_yarn else "rope",
        "swiglu": spec.activation == "silu" and shape["gated_linear_unit"],
        "group_query_attention": shape["num_query_groups"] < shape["num_attention_heads"],
        "untie_embeddings_and_output_weights": not spec.tie_embeddings,
        "use_gated_attention": bool(shape.get("attention_output_gate")),
        "post_self_attn_layernorm": spec.post_norms,
        "post_mlp_layernorm": spec.post_norms,
    }


def _pattern(freq: Any, described: Mapping[str, Any]) -> list[int]:
    """Return ``moe_layer_freq`` per layer; an integer n is every n-th layer from the first."""
    if not isinstance(freq, int):
        return list(freq)
    return [int(i % freq == 0) for i in range(described["num_layers"])]


def _windows(freq: Any, described: Mapping[str, Any]) -> list[int]:
    """Return ``window_attn_skip_freq`` per layer; with an integer n, each n-th layer has no
    window."""
    if not isinstance(freq, int):
        return list(freq)
    return [int((layer + 1) % freq != 0) for layer in range(described["num_layers"])]


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    if isinstance(one, float) or isinstance(other, float):
        return abs(one - other) <= 1e-9 * max(abs(one), abs(other))
    return bool(one == other)


def _contradiction(dest: str, value: Any, fact: Any) -> str:
    return f"{_spelled(dest, value)}, but " + ("it has none" if fact is None else f"it is {fact}")


def _spelled(dest: str, value: Any) -> str:
    spec = all_flags()[dest]
    if spec.kind == "bool":
        return spec.option if value else spec.off
    return f"{spec.option} {value}"
