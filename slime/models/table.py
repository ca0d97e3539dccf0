"""Conversion tables of model families, used in both directions, and rules that families share.

    RULES = (
        Rule(
            "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
            "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
            ROW,
            rows="hidden",
            columns="expert inner",
            when=is_moe_layer,
        ),
        …
    )

``{layer}`` and ``{expert}`` are global numbers on both sides; `slime.checkpoints.megatron_names`
turns a rank's local numbers into global ones. Rows and columns are names of
`slime.models.rules.Width`. From the table follow the slices that a rank reads, how pieces are
gathered, the names and shapes of a checkpoint, the embedded engine's model, the parameters of a
rank (`slime.memory`), and FLOPs (`slime.models.flops`).

Importing the tables imports no torch, as the launch compares a directory with them early.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from slime.errors import UserError
from slime.models.fused_loading import FusedLoad, LoadGroups
from slime.models.layouts import (
    GATE_UP,
    INTERLEAVED_GATE_UP,
    REPLICATED,
    ROW,
    STACKED_GATE_UP,
    VOCAB,
    Transposed,
    VocabParallel,
)
from slime.models.mixers import GROUPED_ATTENTION, mixer_of
from slime.models.nested import SAME_NAMES, ModuleNames, read_vision
from slime.models.rules import (
    HF_LAYER,
    HF_MLP,
    MEGATRON_LAYER,
    MLP,
    LayerCondition,
    Rule,
    Size,
    Width,
    vision_of,
)
from slime.models.spec import HfConfig, ModelSpec, check_trainable, read_hf_config
from slime.models.vision import VisionKind, VisionSpec, sees

_PLACEHOLDERS = {name: rf"(?P<{name}>\d+)" for name in ("layer", "expert", "block")}


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for name, group in _PLACEHOLDERS.items():
        escaped = escaped.replace(re.escape("{" + name + "}"), group)
    return re.compile(escaped)


_WIDTHS: dict[Width, Callable[[ModelSpec], int]] = {
    "vocab": lambda spec: spec.vocab_size,
    "hidden": lambda spec: spec.hidden_size,
    "inner": lambda spec: int(spec.transformer["ffn_hidden_size"]),
    "gate and up": lambda spec: 2 * int(spec.transformer["ffn_hidden_size"]),
    "experts": lambda spec: spec.num_experts,
    "expert inner": lambda spec: int(spec.transformer["moe_ffn_hidden_size"]),
    "expert gate and up": lambda spec: 2 * int(spec.transformer["moe_ffn_hidden_size"]),
    "shared inner": lambda spec: int(
        spec.transformer.get("moe_shared_expert_intermediate_size") or 0
    ),
    "vision hidden": lambda spec: vision_of(spec).hidden_size,
    "vision inner": lambda spec: vision_of(spec).inner_size,
    "vision qkv": lambda spec: 3 * vision_of(spec).hidden_size,
    "vision merged": lambda spec: vision_of(spec).merged_size,
    "vision positions": lambda spec: vision_of(spec).num_positions,
    "vision channels": lambda spec: vision_of(spec).channels,
    "vision frames": lambda spec: vision_of(spec).frames,
    "vision patch": lambda spec: vision_of(spec).patch_size,
}


def width(spec: ModelSpec, name: Size) -> int:
    """Return the size of an axis by its name in rules."""
    if isinstance(name, int):
        return name
    if name in _WIDTHS:
        return _WIDTHS[name](spec)
    layers = range(spec.transformer.get("num_layers", 1))
    mixers = (mixer_of(spec.transformer, layer) for layer in layers)
    return next(mixer.widths[name] for mixer in mixers if name in mixer.widths)(spec)


def shapes_of(rule: Rule, spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a rule's Hugging Face tensors in order; for stacks, of one expert."""
    rows = rule.rows if isinstance(rule.rows, tuple) else (rule.rows,) * len(rule.hf_names)
    columns = rule.columns if isinstance(rule.columns, tuple) else (rule.columns,)
    others = [width(spec, name) for name in columns if name is not None]
    return tuple((width(spec, name), *others) for name in rows)


Cut = Literal["none", "tensor", "expert", "experts alone"]
"""What shards a parameter: nothing, tensor parallelism, expert and expert tensor parallelism, or
only expert parallelism."""


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of a rule in one layer. It stands for all experts of the layer, or for
    all blocks of a tower.

    Attributes:
        name: Megatron's name, in its first spelling, with the global layer number.
        shapes: full shapes of the Hugging Face tensors, of one expert or block.
        count: number of experts of the layer, or of blocks of the tower, else 1.
        padding: entries of the rows that pad the vocabulary.
    """

    rule: Rule
    name: str
    shapes: tuple[tuple[int, ...], ...]
    count: int
    padding: int = 0

    @property
    def numel(self) -> int:
        """Entries of the whole parameter."""
        return self.count * sum(map(prod, self.shapes)) + self.padding

    @property
    def is_expert(self) -> bool:
        return self.rule.is_expert

    @property
    def is_output(self) -> bool:
        """Whether it is the output layer, which may share the embedding's weight."""
        return self.rule.is_output

    @property
    def is_embedding(self) -> bool:
        return self.rule.is_embedding

    @property
    def cut(self) -> Cut:
        is_whole = self.rule.layout.tp_axis is None
        if self.is_expert:
            return "experts alone" if is_whole else "expert"
        return "none" if is_whole else "tensor"


@dataclass(frozen=True)
class Match:
    """A rule for a layer and an expert.

    Attributes:
        sources: Hugging Face names to load from, in the layout's order.
        exports: names to write to; empty for a tied output layer.
    """

    rule: Rule
    layer: int
    expert: int
    sources: tuple[str, ...]
    exports: tuple[str, ...]


#: Buffers in old checkpoints, which are computed instead of loaded.
COMPUTED_BUFFERS = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
)


@dataclass(frozen=True)
class ModelFamily:
    """A conversion table.

    Attributes:
        name: its ``model_type`` in config.json, also accepted by ``--model-name``.
        architectures: class names accepted if no family has the ``model_type``.
        rules: the table.
        make_spec: config dict → ModelSpec, whose ``family`` is still empty; raises UserError for
            unsupported settings.
        other_model_types: further values of ``model_type``.
        ignored: regular expressions (full match) of Hugging Face tensors that are not loaded. A
            group named ``mtp_layer`` must match the number of a multi-token-prediction layer after
            the decoder's layers.
        carried: regular expressions of ignored tensors that an export copies from the initial
            model, because other software expects them.
        fused: Linear layers that an engine concatenates while loading; a weight push keeps them
            together.
        vision: the vision tower, if the table includes it.
        read_vision: config dict, ``vision``, hidden size → VisionSpec; raises UserError.
        other_names: (regular expression, replacement) of the beginning of other names of the
            tower's tensors, which are read as those of the table.
        modules: how transformers names the modules.
    """

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    make_spec: Callable[[dict[str, Any]], ModelSpec]
    other_model_types: tuple[str, ...] = ()
    ignored: tuple[str, ...] = COMPUTED_BUFFERS
    carried: tuple[str, ...] = ()
    fused: tuple[FusedLoad, ...] = ()
    vision: VisionKind | None = None
    read_vision: Callable[[Mapping[str, Any], VisionKind, int], VisionSpec] = read_vision
    other_names: tuple[str, str] | None = None
    modules: ModuleNames = SAME_NAMES

    @property
    def model_types(self) -> tuple[str, ...]:
        """Return the values of ``model_type`` in config.json."""
        return (self.name, *self.other_model_types)

    def describe(self, hf_config: HfConfig) -> ModelSpec:
        """Read the architecture from a config (dict, transformers config, file or directory).

        Raises:
            UserError: a setting is not supported, a field is missing, or the run has images and the
                family has no implemented vision tower.
        """
        config = read_hf_config(hf_config)
        try:
            spec = replace(self.make_spec(config), family=self.name)
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
            raise UserError(
                "the model's config.json has a value of the wrong type",
                why=f"{type(error).__name__}: {error}; model_type is {config.get('model_type')!r}",
                fix="use the config.json that belongs to the weights",
            ) from error
        if not sees(config):
            return spec
        if self.vision is None:
            raise UserError(
                f"images cannot be trained with models of the family {self.name}",
                why="the family has no vision tower, or one that is not implemented: its models "
                "are trained only on text",
                fix="leave --multimodal-keys out, or use Qwen3-VL",
            )
        return replace(spec, vision=self.read_vision(config, self.vision, spec.hidden_size))

    def model_spec(self, hf_config: HfConfig) -> ModelSpec:
        """Read the architecture of a model that Megatron can train.

        Raises:
            UserError: as `describe`, or the router cannot be trained.
        """
        spec = self.describe(hf_config)
        check_trainable(spec)
        return spec

    @property
    def stacks_experts(self) -> bool:
        """Tell whether checkpoints hold all experts of a layer in one tensor."""
        return any(rule.is_stacked for rule in self.rules)

    @property
    def interleaves_experts(self) -> bool:
        """Tell whether rows of gate and up alternate in stacks of experts."""
        return any(rule.layout == Transposed(INTERLEAVED_GATE_UP) for rule in self.rules)

    def load_groups(self, spec: ModelSpec) -> LoadGroups:
        """Return the groups of tensors that an engine must receive in one load call."""
        return LoadGroups(self.fused, spec)

    def parameters(
        self, spec: ModelSpec, layers: Iterable[int], *, first: bool = True, last: bool = True
    ) -> Iterator[Parameter]:
        """Iterate over the parameters of a pipeline stage, unsharded, without buffers.

        A tied embedding is listed once, and again as the output layer if that is in another stage.

        Args:
            layers: global numbers of the stage's layers.
            first: the stage has the embedding.
            last: the stage has the final norm and the output layer.
        """
        for rule, layer in self._applying(spec, layers):
            if rule.is_buffer:
                continue
            name = rule.megatron_names[0].format(layer=layer, expert="", block="")
            count = spec.num_experts if rule.is_expert else len(rule.blocks(spec))
            shapes = shapes_of(rule, spec)
            padding = 0
            if isinstance(rule.layout, VocabParallel):
                per_token = prod(shapes[0]) // spec.vocab_size
                padding = (spec.padded_vocab_size - spec.vocab_size) * per_token
            found = Parameter(rule, name, shapes, count, padding)
            if found.is_embedding or rule.is_vision:
                here = first
            elif found.is_output:
                here = last and not (first and spec.tie_embeddings)
            else:
                here = rule.is_of_layer or last
            if here:
                yield found

    def match_megatron(self, name: str, spec: ModelSpec) -> Match | None:
        """Find the rule for a Megatron parameter name with global numbers; None if there is none.

        Example:
            >>> LLAMA.match_megatron("decoder.layers.3.mlp.linear_fc2.weight", spec).sources
            ('model.layers.3.mlp.down_proj.weight',)
        """
        for rule in self.rules:
            for template in rule.megatron_names:
                found = _pattern(template).fullmatch(name)
                if found:
                    numbers = {key: int(value) for key, value in found.groupdict().items()}
                    layer = numbers.get("layer", -1)
                    if rule.applies(spec, layer):
                        return _filled(rule, numbers, spec)
        return None

    def hf_tensors(self, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Iterate over (name, shape) of all tensors of a complete checkpoint, layer by layer."""
        for rule, layer in self._applying(spec, range(spec.num_layers)):
            shapes = shapes_of(rule, spec)
            if rule.is_stacked:
                shapes = tuple((spec.num_experts, *shape) for shape in shapes)
            one_by_one = rule.is_expert and not rule.is_stacked
            for expert in range(spec.num_experts) if one_by_one else [-1]:
                for block in rule.blocks(spec):
                    numbers = {"layer": layer, "expert": expert, "block": block}
                    yield from zip(_filled(rule, numbers, spec).exports, shapes)

    def _applying(self, spec: ModelSpec, layers: Iterable[int]) -> Iterator[tuple[Rule, int]]:
        """Yield (rule, layer): the rules outside layers, with -1, then layer by layer."""
        for layer in (-1, *layers):
            for rule in self.rules:
                if rule.is_of_layer == (layer >= 0) and rule.applies(spec, layer):
                    yield rule, layer

    def match_hf(self, hf_name: str) -> tuple[Rule, dict[str, int]] | None:
        """Find the rule of a Hugging Face name, even if it does not apply to the layer, and the
        numbers in the name.

        Example:
            >>> LLAMA.match_hf("model.layers.3.mlp.down_proj.weight")[1]
            {'layer': 3}
        """
        for rule in self.rules:
            for template in rule.hf_names:
                found = _pattern(template).fullmatch(hf_name)
                if found:
                    return rule, {key: int(value) for key, value in found.groupdict().items()}
        return None

    def is_carried(self, hf_name: str, spec: ModelSpec) -> bool:
        """Tell whether an export copies a tensor that is not trained."""
        return not _is_of_tower(hf_name, spec) and any(
            re.fullmatch(pattern, hf_name) for pattern in self.carried
        )

    def is_ignored(self, hf_name: str, spec: ModelSpec) -> bool:
        """Tell whether a tensor is known and not loaded: it matches ``ignored``, or is the output
        layer of a tied model."""
        if spec.tie_embeddings and any(
            rule.tied_to and hf_name in rule.hf_names for rule in self.rules
        ):
            return True
        if _is_of_tower(hf_name, spec):
            return False
        for pattern in self.ignored:
            found = re.fullmatch(pattern, hf_name)
            if found is None:
                continue
            layer = found.groupdict().get("mtp_layer")
            if layer is None or 0 <= int(layer) - spec.num_layers < spec.num_mtp_layers:
                return True
        return False


def _is_of_tower(hf_name: str, spec: ModelSpec) -> bool:
    """Tell whether a tensor belongs to a tower that is built."""
    return spec.vision is not None and bool(re.fullmatch(spec.vision.kind.names, hf_name))


def _filled(rule: Rule, numbers: dict[str, int], spec: ModelSpec) -> Match:
    names = tuple(template.format(**numbers) for template in rule.hf_names)
    layer = numbers.get("layer", -1)
    expert = numbers.get("expert", -1)
    if rule.tied_to is not None and spec.tie_embeddings:
        return Match(rule, layer, expert, sources=(rule.tied_to,), exports=())
    return Match(rule, layer, expert, sources=names, exports=names)


# -- shared rules of decoders ----------------------------------------------------------------------

OUTER_RULES = (
    Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", VOCAB, "vocab", "hidden"),
    Rule("decoder.final_layernorm.weight", "model.norm.weight", REPLICATED),
    Rule(
        "output_layer.weight",
        "lm_head.weight",
        VOCAB,
        "vocab",
        "hidden",
        tied_to="model.embed_tokens.weight",
    ),
)

MLP_NORM = Rule(
    (MEGATRON_LAYER + "pre_mlp_layernorm.weight", MLP + "linear_fc1.layer_norm_weight"),
    HF_LAYER + "post_attention_layernorm.weight",
    REPLICATED,
    when=lambda spec, layer: spec.pre_norms,
)


def _is_dense_layer(spec: ModelSpec, layer: int) -> bool:
    return not spec.is_moe_layer(layer)


def _has_mlp_bias(spec: ModelSpec, layer: int) -> bool:
    return spec.mlp_bias and not spec.is_moe_layer(layer)


def _gate_up(megatron: str | tuple[str, ...], hf: str, rows: Width, when: LayerCondition) -> Rule:
    return Rule(
        megatron, (f"{hf}gate_proj.weight", f"{hf}up_proj.weight"), GATE_UP, rows, "hidden", when
    )


def _down(megatron: str | tuple[str, ...], hf: str, columns: Width, when: LayerCondition) -> Rule:
    return Rule(megatron, f"{hf}down_proj.weight", ROW, "hidden", columns, when)


_MLP_MATRICES = (
    _gate_up(MLP + "linear_fc1.weight", HF_MLP, "inner", _is_dense_layer),
    Rule(
        MLP + "linear_fc1.bias",
        (HF_MLP + "gate_proj.bias", HF_MLP + "up_proj.bias"),
        GATE_UP,
        "inner",
        when=_has_mlp_bias,
    ),
    _down(MLP + "linear_fc2.weight", HF_MLP, "inner", _is_dense_layer),
    Rule(MLP + "linear_fc2.bias", HF_MLP + "down_proj.bias", REPLICATED, when=_has_mlp_bias),
)
MLP_RULES = (MLP_NORM, *_MLP_MATRICES)

#: `MLP_RULES` for checkpoints with gate and up in one tensor.
STACKED_MLP_RULES = (
    MLP_NORM,
    Rule(
        MLP + "linear_fc1.weight",
        HF_MLP + "gate_up_proj.weight",
        STACKED_GATE_UP,
        "gate and up",
        "hidden",
    ),
    Rule(MLP + "linear_fc2.weight", HF_MLP + "down_proj.weight", ROW, "hidden", "inner"),
)


def is_moe_layer(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe_layer(layer)


def _has_expert_bias(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe_layer(layer) and bool(spec.transformer.get("moe_router_enable_expert_bias"))


def _has_shared_experts(spec: ModelSpec, layer: int) -> bool:
    return spec.is_moe_layer(layer) and bool(width(spec, "shared inner"))


_EXPERTS = MLP + "experts."
_HF_EXPERTS = HF_MLP + "experts.{expert}."
_SHARED = HF_MLP + "shared_experts."

#: Checkpoints and engines' loaders have one tensor per expert and projection (transformers 5 fuses
#: them only in memory). Rules of router bias and shared experts apply if the spec has them.
MOE_RULES = (
    Rule(
        MLP + "router.weight", HF_MLP + "gate.weight", REPLICATED, "experts", "hidden", is_moe_layer
    ),
    Rule(
        MLP + "router.expert_bias",
        HF_MLP + "gate.e_score_correction_bias",
        REPLICATED,
        "experts",
        when=_has_expert_bias,
        is_buffer=True,
    ),
    _gate_up(
        (
            _EXPERTS + "linear_fc1.weight{expert}",
            _EXPERTS + "local_experts.{expert}.linear_fc1.weight",
        ),
        _HF_EXPERTS,
        "expert inner",
        is_moe_layer,
    ),
    _down(
        (
            _EXPERTS + "linear_fc2.weight{expert}",
            _EXPERTS + "local_experts.{expert}.linear_fc2.weight",
        ),
        _HF_EXPERTS,
        "expert inner",
        is_moe_layer,
    ),
    _gate_up(
        MLP + "shared_experts.linear_fc1.weight", _SHARED, "shared inner", _has_shared_experts
    ),
    _down(MLP + "shared_experts.linear_fc2.weight", _SHARED, "shared inner", _has_shared_experts),
)


def stacked(rule: Rule) -> Rule:
    """Return the rule for stacked experts, with gate rows before up rows."""
    if not rule.is_expert:
        return rule
    if len(rule.hf_names) == 1:
        return replace(rule, hf=HF_MLP + "experts.down_proj")
    return replace(
        rule, hf=HF_MLP + "experts.gate_up_proj", layout=STACKED_GATE_UP, rows="expert gate and up"
    )


def single_experts(rule: Rule) -> Rule:
    """Return the rule of the Linear layers that stacked weights consist of, under the names of
    single experts: ``….mlp.experts.{expert}.gate_proj.weight`` [out, in]. Other rules, and those
    of stacked biases, stay."""
    if not rule.is_stacked or rule.columns is None:
        return rule
    experts, _, leaf = rule.hf_names[0].rpartition(".")
    if leaf == "down_proj":
        hf = f"{experts}.{{expert}}.down_proj.weight"
        return replace(rule, hf=hf, layout=ROW, rows="hidden", columns="expert inner")
    pair = tuple(f"{experts}.{{expert}}.{part}.weight" for part in ("gate_proj", "up_proj"))
    return replace(rule, hf=pair, layout=GATE_UP, rows="expert inner", columns="hidden")


#: Rules of a decoder whose layers are all dense.
DENSE_RULES = OUTER_RULES + GROUPED_ATTENTION.rules + MLP_RULES

#: `DENSE_RULES` with norms after attention and MLP, and before them if the spec has these.
POST_NORM_RULES = (
    *OUTER_RULES,
    *GROUPED_ATTENTION.rules,
    *_MLP_MATRICES,
    replace(MLP_NORM, hf=HF_LAYER + "pre_feedforward_layernorm.weight"),
    Rule(
        MEGATRON_LAYER + "post_self_attn_layernorm.weight",
        HF_LAYER + "post_attention_layernorm.weight",
        REPLICATED,
    ),
    Rule(
        MEGATRON_LAYER + "post_mlp_layernorm.weight",
        HF_LAYER + "post_feedforward_layernorm.weight",
        REPLICATED,
    ),
)

#: Multi-token-prediction layers, numbered after the decoder's layers.
MTP_LAYERS = (r"model\.layers\.(?P<mtp_layer>\d+)\..*",)
