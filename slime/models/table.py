"""One conversion table per model family, read in both directions, and the rules that families
share.

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
`slime.models.rules.Width`. Everything else follows from the table: which slice a rank reads and how
pieces are gathered, the names and shapes of a checkpoint, what the embedded engine builds, how many
parameters a rank holds (`slime.memory`), what a token costs (`slime.models.flops`).

Importing the tables imports no torch: the launch compares a directory with them before anything
heavy starts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from slime.errors import UserError
from slime.models.fused_loading import FusedLoad, LoadGroups
from slime.models.layouts import GATE_UP, REPLICATED, ROW, STACKED_GATE_UP, VOCAB, VocabParallel
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
    "vision hidden": lambda spec: _vision(spec).hidden_size,
    "vision inner": lambda spec: _vision(spec).inner_size,
    "vision qkv": lambda spec: 3 * _vision(spec).hidden_size,
    "vision merged": lambda spec: _vision(spec).merged_size,
    "vision positions": lambda spec: _vision(spec).num_positions,
    "vision channels": lambda spec: _vision(spec).channels,
    "vision frames": lambda spec: _vision(spec).frames,
    "vision patch": lambda spec: _vision(spec).patch_size,
}


def _vision(spec: ModelSpec) -> VisionSpec:
    assert spec.vision is not None
    return spec.vision


def width(spec: ModelSpec, name: Size) -> int:
    """Return the size of an axis, by the name that the rules give it."""
    if isinstance(name, int):
        return name
    if name in _WIDTHS:
        return _WIDTHS[name](spec)
    layers = range(spec.transformer.get("num_layers", 1))
    mixers = (mixer_of(spec.transformer, layer) for layer in layers)
    return next(mixer.widths[name] for mixer in mixers if name in mixer.widths)(spec)


def shapes_of(rule: Rule, spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """Shapes of the Hugging Face tensors of a rule, in their order; of stacks, those of one
    expert."""
    rows = rule.rows if isinstance(rule.rows, tuple) else (rule.rows,) * len(rule.hf_names)
    columns = rule.columns if isinstance(rule.columns, tuple) else (rule.columns,)
    others = [width(spec, name) for name in columns if name is not None]
    return tuple((width(spec, name), *others) for name in rows)


Cut = Literal["none", "tensor", "expert", "experts alone"]
"""What divides a parameter: nothing, tensor parallelism, expert and expert tensor parallelism, or
expert parallelism alone."""


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter that a rule makes in one layer. All experts of a layer count as one,
    and so do all blocks of a tower.

    Attributes:
        name: Megatron's, by its first spelling, with the global layer number.
        shapes: whole, of the Hugging Face tensors; of one expert.
        count: how often: the experts of a layer, the blocks of a tower, else 1.
        padding: entries of the rows that fill a vocabulary up.
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
        """The output layer, which is the embedding where these are tied."""
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
    """A rule with its numbers filled in.

    Attributes:
        sources: Hugging Face names to load from, in the layout's order.
        exports: names to write to; empty for a parameter that is a copy of another one (tied output
            layer).
    """

    rule: Rule
    layer: int
    expert: int
    sources: tuple[str, ...]
    exports: tuple[str, ...]


@dataclass(frozen=True)
class ModelFamily:
    """A conversion table.

    Attributes:
        name: short name, also accepted by ``--model-name``.
        model_types: values of ``model_type`` in config.json.
        architectures: class names accepted when ``model_type`` is something else.
        rules: the table.
        make_spec: plain config dict → ModelSpec; raises UserError for settings that cannot be
            honoured.
        ignored: regular expressions (full match) of Hugging Face tensors that this family does not
            use; counted, not loaded. A group named ``mtp_layer`` must be the number of one of the
            layers for multi-token prediction that follow the decoder's.
        carried: regular expressions of those of them that an export copies from the model that it
            started from, since whoever loads it expects them.
        fused: Linear layers that an engine concatenates as it loads them; a weight push keeps them
            together.
        vision: the tower that sees images, if the table has it.
        modules: how transformers names the modules.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    make_spec: Callable[[dict[str, Any]], ModelSpec]
    ignored: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    fused: tuple[FusedLoad, ...] = ()
    vision: VisionKind | None = None
    modules: ModuleNames = SAME_NAMES

    def describe(self, hf_config: HfConfig) -> ModelSpec:
        """Read the architecture from a config (dict, transformers config, file or directory).

        Raises:
            UserError: a setting that this family cannot honour, a field that is not there, or a
                tower that is to see images and is not implemented.
        """
        config = read_hf_config(hf_config)
        spec = self.make_spec(config)
        if not sees(config):
            return spec
        if self.vision is None:
            raise UserError(
                f"images cannot be trained with models of the family {self.name}",
                why="it has no tower that sees them, or one that is not implemented: such models "
                "are trained on text alone",
                fix="leave --multimodal-keys out, or take Qwen3-VL",
            )
        return replace(spec, vision=read_vision(config, self.vision, spec.hidden_size))

    def model_spec(self, hf_config: HfConfig) -> ModelSpec:
        """Read the architecture of a model that Megatron can train.

        Raises:
            UserError: as `describe`; biases or a router that Megatron has no place for.
        """
        spec = self.describe(hf_config)
        check_trainable(spec)
        return spec

    @property
    def stacks_experts(self) -> bool:
        """Tell whether checkpoints hold all experts of a layer in one tensor."""
        return any(rule.is_stacked for rule in self.rules)

    def load_groups(self, spec: ModelSpec) -> LoadGroups:
        """Return the groups of tensors that an engine must be given in one load call."""
        return LoadGroups(self.fused, spec)

    def parameters(
        self, spec: ModelSpec, layers: Iterable[int], *, first: bool = True, last: bool = True
    ) -> Iterator[Parameter]:
        """Iterate over the parameters of a pipeline stage, uncut, without buffers.

        A tied model has its embedding once, or, in stages, in the last one again as the output
        layer.

        Args:
            layers: of the stage, by global number.
            first: the stage has the embedding.
            last: it has the final norm and the output layer.
        """
        rules = [rule for rule in self.rules if not rule.is_buffer]
        places = [(rule, -1) for rule in rules if not rule.is_of_layer]
        places += [(rule, layer) for layer in layers for rule in rules if rule.is_of_layer]
        for rule, layer in places:
            if not rule.applies(spec, layer):
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
        """The rule for a Megatron parameter name with global numbers; None when the table has none.

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

    def expected_hf_names(self, spec: ModelSpec) -> Iterator[str]:
        """Iterate over the names of every tensor that a complete checkpoint of this model has,
        layer by layer."""
        return (name for name, _ in self.hf_tensors(spec))

    def hf_tensors(self, spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Iterate over (name, shape) of every tensor that a complete checkpoint has."""
        places = [(rule, -1) for rule in self.rules if not rule.is_of_layer]
        places += [
            (rule, layer)
            for layer in range(spec.num_layers)
            for rule in self.rules
            if rule.is_of_layer
        ]
        for rule, layer in places:
            if rule.applies(spec, layer):
                shapes = shapes_of(rule, spec)
                if rule.is_stacked:
                    shapes = tuple((spec.num_experts, *shape) for shape in shapes)
                one_by_one = rule.is_expert and not rule.is_stacked
                for expert in range(spec.num_experts) if one_by_one else [-1]:
                    for block in rule.blocks(spec):
                        numbers = {"layer": layer, "expert": expert, "block": block}
                        yield from zip(_filled(rule, numbers, spec).exports, shapes)

    def match_hf(self, hf_name: str) -> tuple[Rule, dict[str, int]] | None:
        """Find the rule of a Hugging Face name, whether or not its layer has it, and the numbers in
        the name.

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
        """Tell whether a tensor is known to be unused: listed in ``ignored``, or the output layer
        of a tied model."""
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


# -- what decoders share ---------------------------------------------------------------------------

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

#: The same, where a checkpoint has gate and up in one tensor.
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

#: Checkpoints hold one tensor per expert and projection (transformers 5 fuses them in its modules
#: only, and writes them apart); so do the engines' loaders. Router bias and shared experts where
#: the spec says so.
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
    """Return the same rule for a stack of experts, gate rows above up rows."""
    if not rule.is_expert:
        return rule
    if len(rule.hf_names) == 1:
        return replace(rule, hf=HF_MLP + "experts.down_proj")
    return replace(
        rule,
        hf=HF_MLP + "experts.gate_up_proj",
        layout=STACKED_GATE_UP,
        rows="expert gate and up",
    )


#: Rules of a decoder whose layers are all dense.
DENSE_RULES = OUTER_RULES + GROUPED_ATTENTION.rules + MLP_RULES

#: The same, with norms behind attention and MLP, and in front of them where the spec says so.
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

#: Layers for multi-token prediction, numbered on from the decoder's.
MTP_LAYERS = (r"model\.layers\.(?P<mtp_layer>\d+)\..*",)

#: Buffers that old checkpoints carry although they are computed.
COMPUTED_BUFFERS = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
)
