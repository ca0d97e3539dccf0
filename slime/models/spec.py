"""Architecture facts of a model, read once from its Hugging Face config.

config.json ─► read_hf_config ─► family.model_spec ─► ModelSpec ─► arguments of Megatron's model
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from slime.errors import UserError, a_type, in_place_of
from slime.models.layouts import DeltaNetSizes
from slime.models.vision import VisionSpec

#: Types of rotary scaling that `slime.models.rotary` supports.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")


class HasToDict(Protocol):
    """The method of a transformers ``PretrainedConfig`` that this module calls."""

    def to_dict(self) -> dict[str, Any]: ...


HfConfig = Mapping[str, Any] | HasToDict | str | Path
"""A parsed config.json, a transformers config object, a config.json or the directory that holds
one."""


class _HeadShape(NamedTuple):
    """Dimensions of one attention head: of a query or key without and with position, and of a
    value."""

    plain: int
    position: int
    value: int


@dataclass(frozen=True)
class Rotary:
    """One rotary embedding.

    Attributes:
        base: theta.
        scaling: transformers' scaling dict, always with the key "rope_type" ("linear", "llama3",
            "yarn", …); None for plain rope.
    """

    base: float
    scaling: dict[str, Any] | None = None


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta · ln(1 + ⌊p / length⌋), which is 1 before
    ``length``.

    Source: Llama 4's attention temperature, as in Ministral 3 (transformers,
    ``modeling_ministral3.py``).
    """

    beta: float
    length: int


RotaryKind = Literal["main", "local", "none"]
"""Rotary embedding of a layer: the model's, that of layers with a window, or none."""


@dataclass(frozen=True)
class ModelSpec:
    """Description of a model's architecture, from which trainer and engine build it.

    Attributes:
        family: name of the conversion table ("llama", "qwen2", "qwen3", …).
        transformer: keyword arguments of Megatron's ``TransformerConfig``, plain values.
            `transformer_kwargs` adds the activation function.
        activation: name of the MLP's activation in `slime.models.activations`.
        vocab_size: rows of the embedding in the Hugging Face checkpoint.
        padded_vocab_size: rows of the embedding in Megatron, over all tensor-parallel ranks. The
            extra rows are zero and belong to no token: the log-softmax must leave these columns
            out.
        rotary_base: theta of the rotary embedding.
        rotary_percent: rotated fraction of each head's dimensions (in multi-latent attention: of
            the dimensions with position).
        rotary_scaling: transformers' scaling dict, always with the key "rope_type" ("linear",
            "llama3", "yarn", …); None: not scaled.
        layer_rotary: kind of rotary embedding per layer; empty: all layers have the model's.
        local_rotary: rotary embedding of the layers of kind "local".
        query_scaling: factor of queries by position; None: no factor.
        tie_embeddings: the output layer shares the embedding's weight.
        max_position_embeddings: longest sequence that the model supports.
        pre_norms: each layer normalises the inputs of its attention and of its MLP.
        post_norms: each layer normalises the outputs of its attention and of its MLP before they
            are added to the residual stream (GLM-4).
        wide_qk_norms: a norm of queries or keys spans all heads instead of one.
        rotates_first: queries and keys are rotated before their norms, not after them (Hunyuan).
        embedding_scale: factor on the embeddings, rounded to their dtype.
        residual_scale: factor on the outputs of attention and MLP before they are added.
        logits_scale: factor on the logits.
        output_bias, mlp_bias: the output projection of attention, and the matrices of dense MLPs,
            have biases.
        expert_biases: routers and the matrices of routed experts have biases.
        normalised_scores: a router divides the scores of the chosen experts by their sum.
        num_mtp_layers: multi-token-prediction layers of a checkpoint, numbered after the decoder's
            layers; not trained.
        vision: the vision tower; None if the run reads only text.
    """

    family: str
    transformer: dict[str, Any]
    activation: str
    vocab_size: int
    rotary_base: float
    rotary_percent: float = 1.0
    rotary_scaling: dict[str, Any] | None = None
    layer_rotary: tuple[RotaryKind, ...] = ()
    local_rotary: Rotary | None = None
    query_scaling: QueryScaling | None = None
    tie_embeddings: bool = False
    max_position_embeddings: int = 2048
    pre_norms: bool = True
    post_norms: bool = False
    wide_qk_norms: bool = False
    rotates_first: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    output_bias: bool = False
    mlp_bias: bool = False
    expert_biases: bool = False
    normalised_scores: bool = True
    num_mtp_layers: int = 0
    vision: VisionSpec | None = None
    padded_vocab_size: int = 0

    def __post_init__(self) -> None:
        if not self.padded_vocab_size:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)

    def padded(self, tensor_parallel_size: int, divisible_by: int = 1) -> ModelSpec:
        """Return the model with the vocabulary padded to a multiple of ``tensor_parallel_size`` ×
        ``divisible_by``.

        Example:
            >>> spec.vocab_size, spec.padded(4).padded_vocab_size
            (49153, 49156)
        """
        unit = tensor_parallel_size * divisible_by
        return dataclasses.replace(self, padded_vocab_size=-(-self.vocab_size // unit) * unit)

    def transformer_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``TransformerConfig`` that describe the architecture. Imports
        torch."""
        from slime.models.activations import ACTIVATIONS

        return {**self.transformer, "activation_func": ACTIVATIONS[self.activation]}

    # -- shortcuts ---------------------------------------------------------------------------------

    @property
    def has_plain_gate(self) -> bool:
        """MLPs without biases multiply the activation of one half of their first product by the
        other half, and the activation is SiLU or the tanh approximation of GELU."""
        is_gated = bool(self.transformer.get("gated_linear_unit"))
        has_bias = self.transformer.get("add_bias_linear", False)
        return is_gated and not has_bias and self.activation in ("silu", "gelu_tanh")

    @property
    def num_layers(self) -> int:
        return int(self.transformer["num_layers"])

    @property
    def hidden_size(self) -> int:
        return int(self.transformer["hidden_size"])

    @property
    def num_heads(self) -> int:
        return int(self.transformer["num_attention_heads"])

    @property
    def num_query_groups(self) -> int:
        return int(self.transformer["num_query_groups"])

    @property
    def has_bidirectional_images(self) -> bool:
        """Whether the tokens of an image attend to each other in both directions."""
        return self.vision is not None and self.vision.kind.bidirectional

    @property
    def is_mla(self) -> bool:
        """Multi-latent attention: queries, keys and values come from low-rank projections."""
        return bool(self.transformer.get("multi_latent_attention"))

    @property
    def _head(self) -> _HeadShape:
        facts = self.transformer
        if self.is_mla:
            return _HeadShape(
                facts["qk_head_dim"], facts["qk_pos_emb_head_dim"], facts["v_head_dim"]
            )
        return _HeadShape(0, facts["kv_channels"], facts["kv_channels"])

    @property
    def head_dim(self) -> int:
        """Dimensions of a query or key of one head."""
        return self._head.plain + self._head.position

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a query or key that are rotated."""
        return int(self._head.position * self.rotary_percent)

    @property
    def rotary_interleaved(self) -> bool:
        """Tell whether neighbouring dimensions are rotated as pairs, instead of the first against
        the second half."""
        return self.is_mla or bool(self.transformer.get("rotary_interleaved"))

    @property
    def value_dim(self) -> int:
        """Dimensions of a value of one head."""
        return self._head.value

    @property
    def score_scale(self) -> float:
        """Factor on the scores of attention."""
        given = self.transformer.get("softmax_scale")
        return self.head_dim**-0.5 if given is None else float(given)

    def rotary_kind(self, layer: int) -> RotaryKind:
        """Return the kind of rotary embedding of a layer (global, from 0)."""
        return self.layer_rotary[layer] if self.layer_rotary else "main"

    @property
    def rotary_kinds(self) -> tuple[RotaryKind, ...]:
        """Kinds of rotary embedding in the model, each once."""
        return tuple(dict.fromkeys(self.layer_rotary)) or ("main",)

    def window(self, layer: int) -> int | None:
        """Return the attention window of a layer (global, from 0) in tokens, including the token
        itself; None: no window.

        Megatron's ``window_size`` does not count the token itself; its ``window_attn_skip_freq``
        has 1 for each layer with the window.
        """
        size = self.transformer.get("window_size")
        if size is None or not self.transformer["window_attn_skip_freq"][layer]:
            return None
        return int(size[0]) + 1

    @property
    def longest_sequence(self) -> int | None:
        """Longest sequence that the rotary embedding supports; None: any. With longrope, longer
        sequences would need other frequencies.
        """
        scaling = self.rotary_scaling or {}
        if scaling.get("rope_type") != "longrope":
            return None
        return int(scaling["original_max_position_embeddings"])

    @property
    def delta_net(self) -> DeltaNetSizes:
        """The heads of the layers that are gated delta nets."""
        facts = self.transformer
        key_heads = int(facts["linear_num_key_heads"])
        return DeltaNetSizes(
            key_heads,
            int(facts["linear_num_value_heads"]) // key_heads,
            int(facts["linear_key_head_dim"]),
            int(facts["linear_value_head_dim"]),
            int(facts["linear_conv_kernel_dim"]),
        )

    @property
    def has_sinks(self) -> bool:
        """Tell whether each head has a learned score besides those of tokens (attention sink)."""
        return self.transformer.get("softmax_type") == "learnable"

    @property
    def num_experts(self) -> int:
        return int(self.transformer.get("num_moe_experts") or 0)

    def is_moe_layer(self, layer: int) -> bool:
        """Tell whether a layer (global, from 0) has experts, by Megatron's ``moe_layer_freq``: 0 or
        1 per layer, or an interval.

        Example (one dense layer first, as in DeepSeek-V3-like models):
            >>> spec.transformer["moe_layer_freq"], spec.is_moe_layer(0), spec.is_moe_layer(1)
            ([0, 1, 1, 1], False, True)
        """
        if not self.num_experts:
            return False
        pattern = self.transformer.get("moe_layer_freq", 1)
        return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0


def check_trainable(spec: ModelSpec) -> None:
    """Refuse models that engines can run but the trainer cannot train.

    Raises:
        UserError: the router's weights would have no gradient.
    """
    if (
        spec.num_experts
        and spec.normalised_scores
        and int(spec.transformer["moe_router_topk"]) == 1
    ):
        raise UserError(
            "the model's router sends each token to one expert and normalises its probability to 1",
            why="num_experts_per_tok is 1 and norm_topk_prob is true: such a router gets no "
            "gradient",
            fix="choose another model",
        )


#: Fields of `ModelSpec` in which weights of the same model may differ. ``transformer`` is compared
#: setting by setting, without those that affect neither weights nor outputs in evaluation.
_MAY_DIFFER = frozenset([
    "transformer", "padded_vocab_size", "max_position_embeddings", "num_mtp_layers", "vision"
])  # fmt: skip
_WITHOUT_EFFECT = ("attention_dropout", "hidden_dropout")


def check_same_model(spec: ModelSpec, other: ModelSpec, directory: Path) -> None:
    """Refuse weights of another architecture than --hf-checkpoint, which may fit by name and shape
    but would give wrong results.

    Args:
        spec: of --hf-checkpoint.
        other: of ``directory``, whose weights are loaded into the model.
    Raises:
        UserError: names the differing settings, e.g. the rotary base, with both values.
    """
    facts = [one.name for one in dataclasses.fields(ModelSpec) if one.name not in _MAY_DIFFER]
    pairs = [(name, getattr(spec, name), getattr(other, name)) for name in facts]
    names = sorted((spec.transformer.keys() | other.transformer.keys()) - {*_WITHOUT_EFFECT})
    pairs += [(name, spec.transformer.get(name), other.transformer.get(name)) for name in names]
    differing = [
        f"its {name} is {there}, of --hf-checkpoint {here}"
        for name, here, there in pairs
        if here != there
    ]
    if differing:
        raise UserError(
            f"{directory} is another model than --hf-checkpoint",
            why="; ".join(differing),
            fix="pass a directory of the same architecture, or --hf-checkpoint with the "
            "architecture of these weights",
        )


def read_hf_config(source: HfConfig) -> dict[str, Any]:
    """Return the config as a dict.

    Raises:
        UserError: config.json is missing or is not valid JSON.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, Path)):
        return source.to_dict()
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(
            f"no model config at {path}",
            why=in_place_of(path),
            fix="pass --hf-checkpoint with a Hugging Face model directory (config.json, "
            "*.safetensors, tokenizer), or org/name for a Hub model; no local path of that name "
            "may exist",
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read", why=error.strerror or str(error), fix="copy the file again"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not valid JSON", why=str(error), fix="copy the file again"
        ) from error
    if not isinstance(data, dict):
        raise UserError(
            f"{path} is not the config of a model",
            why=f"it holds {a_type(data)}, not an object",
            fix="copy the file again",
        )
    for key, value in data.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise UserError(
                f"{path}: {key} is the text {value!r}",
                why="text is true wherever a yes or no is asked",
                fix=f"write {value.lower()} without quotes",
            )
    return data


def named_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of weights that config.json names, under the key of transformers 5 or of
    earlier versions; "" if it names none.

    Example:
        >>> named_dtype({"torch_dtype": "torch.bfloat16"})
        'bfloat16'
    """
    return str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")


def require(config: dict[str, Any], key: str) -> Any:
    """Return a required field.

    Raises:
        UserError: the field is missing.
    """
    if config.get(key) is None:
        raise UserError(
            f"the model's config.json has no field {key!r}",
            why=f"model_type is {config.get('model_type')!r}",
            fix="use the config.json that belongs to the weights",
        )
    return config[key]


def refuse(config: Mapping[str, Any], key: str, reason: str, *, supported: Any = None) -> None:
    """Refuse a setting that is not supported, because ignoring it would train another model.

    Args:
        supported: the only supported value of a setting that is there; None: only off.
    Raises:
        UserError: the setting has another value.
    """
    value = config.get(key)
    if value in (None, supported) or (supported is None and not value):
        return
    raise UserError(
        f"the model's config.json sets {key} to {value!r}, which cannot be trained faithfully",
        why=reason,
        fix="choose a model without it" if supported is None else f"choose one with {supported!r}",
    )


def rotary_settings(
    config: Mapping[str, Any], default_base: float = 10000.0, default_percent: float = 1.0
) -> tuple[float, float, dict[str, Any] | None]:
    """Return (base, percent, scaling) of the rotary embedding.

    transformers ≤ 4 writes ``rope_theta`` and ``rope_scaling`` (with "type" or "rope_type"),
    transformers 5 writes ``rope_parameters``. A value in several places must be the same in all of
    them: if a user adds ``rope_scaling`` to a config of transformers 5, transformers uses it.

    Raises:
        UserError: two places contradict each other, the scaling is not supported or lacks a field,
            or there is a rotary embedding per kind of layer.

    Example:
        >>> rotary_settings({"rope_theta": 1e6, "rope_scaling": None})
        (1000000.0, 1.0, None)
        >>> rotary_settings({
        ...     "rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}})
        (500000.0, 1.0, {'rope_type': 'linear', 'factor': 2.0})
    """
    new = config.get("rope_parameters") or {}
    old = config.get("rope_scaling") or {}
    for settings in (new, old):
        if settings and all(isinstance(value, Mapping) for value in settings.values()):
            raise UserError(
                "this model has a different rotary embedding per kind of layer",
                why=f"its rotary settings have the entries {', '.join(settings)}",
                fix="such models are not supported yet",
            )
    base = _agreed(config, new, old, "rope_theta", "the rotary base")
    percent = _agreed(config, new, old, "partial_rotary_factor", "the rotated share of a head")
    scaling = _scaling(new or old, config)
    if new and old and _scaling(old, config) != scaling:
        raise UserError(
            "the model config contradicts itself on rotary scaling",
            why=f"rope_scaling is {old}, rope_parameters is {new}",
            fix="keep one of the two; rope_parameters holds rope_theta and the fields of "
            "rope_scaling",
        )
    return (
        base if base is not None else default_base,
        percent if percent is not None else default_percent,
        scaling,
    )


def _agreed(
    config: Mapping[str, Any],
    new: Mapping[str, Any],
    old: Mapping[str, Any],
    key: str,
    meaning: str,
) -> float | None:
    """Return the value of a field that may be at the top level, in ``rope_parameters`` or in
    ``rope_scaling``.

    Raises:
        UserError: the places have different values.
    """
    places = {key: config, f"rope_parameters.{key}": new, f"rope_scaling.{key}": old}
    found = {
        place: float(values[key]) for place, values in places.items() if values.get(key) is not None
    }
    if len(set(found.values())) > 1:
        raise UserError(
            f"the model config contradicts itself on {meaning}",
            why=", ".join(f"{place} is {value:g}" for place, value in found.items()),
            fix="correct config.json; see the model card for the right value",
        )
    return next(iter(found.values()), None)


#: Type of rotary scaling → required fields.
_NEEDED_TO_SCALE = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}


def _scaling(settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return only the fields of scaling, with the names of transformers 5; None without scaling.

    llama3, yarn and longrope need the model's original length:
    ``original_max_position_embeddings``, in the settings or at the top level, else
    ``max_position_embeddings``. The default factor of longrope is the ratio of the two lengths.

    Raises:
        UserError: the type of scaling is not supported, or a field is missing.
    """
    scaling = {
        key: value
        for key, value in settings.items()
        if key not in ("rope_theta", "partial_rotary_factor")
    }
    kind = scaling.pop("type", None)
    if kind is not None:
        scaling.setdefault("rope_type", kind)
    kind = scaling.get("rope_type") or "default"
    if kind not in ROPE_TYPES:
        raise UserError(
            f"rotary scaling of type {kind!r} is not supported",
            why="the model's config.json asks for it",
            fix=f"supported are: {', '.join(ROPE_TYPES)}",
        )
    if kind == "default":
        return None
    missing = [key for key in _NEEDED_TO_SCALE[kind] if scaling.get(key) is None]
    if missing:
        raise UserError(
            f"rotary scaling of type {kind!r} lacks {', '.join(missing)}",
            why=f"the model's config.json has {dict(settings)}",
            fix="use the config.json that belongs to the weights",
        )
    if kind in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        original = _agreed(config, settings, {}, key, "the length it was made for")
        if original is None:
            original = config.get("max_position_embeddings")
        if original is not None:
            scaling[key] = int(original)
    if kind == "longrope":
        longest = require(dict(config), "max_position_embeddings")
        scaling["factor"] = float(scaling.get("factor") or longest / scaling[key])
    return scaling
