"""Rules of the family tables: a rule maps one kind of Megatron parameter to Hugging Face
tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from slime.models.layouts import ParamMapping
from slime.models.spec import ModelSpec
from slime.models.vision import VisionSpec

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
ATTENTION = MEGATRON_LAYER + "self_attention."
HF_ATTENTION = HF_LAYER + "self_attn."
HF_DELTA_NET = HF_LAYER + "linear_attn."
MLP = MEGATRON_LAYER + "mlp."
HF_MLP = HF_LAYER + "mlp."
#: Prefix of the vision tower and its projector.
VISION_MODEL = "vision_model."

LayerCondition = Callable[[ModelSpec, int], bool]
"""(spec, global layer number) → whether the rule applies; layer is -1 for parameters outside
layers."""

Width = str
"""Name of an axis of a parameter; `slime.models.table.width` returns its size.

Names of a token mixer's axes are the keys of `slime.models.mixers.TokenMixer.widths`; all others
are in `slime.models.table`. "query" is all query heads; "key" is all key heads, or all value heads.
"attended" is the output of attention before the projection. "delta keys, values" are the queries,
keys and values of all heads of a gated delta net; "delta value" is the value of one head.
"""
Size = Width | int
"""An axis by name, or by a size that does not depend on the model (the rank of an adapter)."""


@dataclass(frozen=True)
class Rule:
    """A mapping between one kind of Megatron parameter and Hugging Face tensors.

    Attributes:
        megatron: parameter name, or several spellings of it (Transformer Engine fuses norms into
            the following layer).
        hf: one or several tensor names, in the order of ``layout``. Names of experts without
            ``{expert}`` are stacks: their first axis is the experts of the layer, and layout, rows
            and columns are those of one expert.
        layout: mapping between the parameter and the tensors.
        rows: first axis of the tensors; one name for all, or one for each.
        columns: second axis of the tensors; None for vectors, several for tensors of more axes.
        when: condition of the rule; None: always.
        is_buffer: the parameter is not trained: no gradient and no optimizer state.
        tied_to: for the output layer: the Hugging Face name that replaces ``hf`` if embeddings are
            tied. ``hf`` is then neither expected in checkpoints nor exported.
        repeated: number of blocks, for names with ``{block}``; None: one.
    """

    megatron: str | tuple[str, ...]
    hf: str | tuple[str, ...]
    layout: ParamMapping
    rows: Size | tuple[Size, ...] = "hidden"
    columns: Size | tuple[Size, ...] | None = None
    when: LayerCondition | None = None
    is_buffer: bool = False
    tied_to: str | None = None
    repeated: Callable[[ModelSpec], int] | None = None

    @property
    def megatron_names(self) -> tuple[str, ...]:
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron_names[0]

    @property
    def is_stacked(self) -> bool:
        """Tell whether the tensors are stacks of all experts of a layer."""
        return self.is_expert and "{expert}" not in self.hf_names[0]

    @property
    def is_of_layer(self) -> bool:
        return "{layer}" in self.megatron_names[0]

    @property
    def is_embedding(self) -> bool:
        """Tell whether the rule is of the embedding, or of its adapter."""
        return self.megatron_names[0].startswith("embedding.")

    @property
    def is_output(self) -> bool:
        """Tell whether the rule is of the output layer, or of its adapter."""
        return self.megatron_names[0].startswith("output_layer.")

    @property
    def is_vision(self) -> bool:
        """Tell whether the rule is of the vision tower or its projector."""
        return self.megatron_names[0].startswith(VISION_MODEL)

    def blocks(self, spec: ModelSpec) -> range:
        """Return the values of ``{block}``; one value for names without it."""
        return range(1 if self.repeated is None else self.repeated(spec))

    @property
    def is_linear(self) -> bool:
        """Tell whether the tensors are weights of Linear layers. Embeddings, routers, gates of
        shared experts and stacks of experts are not."""
        no_layer = self.is_embedding or self.is_stacked or self.rows in ("experts", 1)
        is_matrix = self.columns is not None and not isinstance(self.columns, tuple)
        return is_matrix and not no_layer

    def applies(self, spec: ModelSpec, layer: int) -> bool:
        return self.when is None or self.when(spec, layer)


def has_vision(spec: ModelSpec, layer: int) -> bool:
    """Tell whether the model has a vision tower; a `LayerCondition`."""
    return spec.vision is not None


def vision_of(spec: ModelSpec) -> VisionSpec:
    """Return the vision tower of a model that has one."""
    assert spec.vision is not None
    return spec.vision


def renamed(rules: Iterable[Rule], parts: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules for a checkpoint that has other Hugging Face names.

    Args:
        parts: part of a name → what replaces it, one after the other.
    """

    def rename(name: str) -> str:
        for before, after in parts.items():
            name = name.replace(before, after)
        return name

    return tuple(replace(rule, hf=tuple(map(rename, rule.hf_names))) for rule in rules)
