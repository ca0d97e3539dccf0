"""The rule language of the family tables: one kind of Megatron parameter and the Hugging Face
tensors that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime.models.layouts import ParamMapping
from slime.models.spec import ModelSpec

MEGATRON_LAYER = "decoder.layers.{layer}."
HF_LAYER = "model.layers.{layer}."
ATTENTION = MEGATRON_LAYER + "self_attention."
HF_ATTENTION = HF_LAYER + "self_attn."
HF_DELTA_NET = HF_LAYER + "linear_attn."
MLP = MEGATRON_LAYER + "mlp."
HF_MLP = HF_LAYER + "mlp."
#: The tower that sees images, with its projector.
VISION_MODEL = "vision_model."

LayerCondition = Callable[[ModelSpec, int], bool]
"""(spec, global layer number) → does the rule apply; layer is -1 for parameters outside the
layers."""

Width = str
"""Name of an axis of a parameter; `slime.models.table.width` gives its size.

Names of a token mixer's axes are the keys of `slime.models.mixers.TokenMixer.widths`, all others
stand in `slime.models.table`. "query" and "key" are all heads together, "key" also of values;
"attended" is the output of attention, before the projection. "delta keys, values" are the queries,
keys and values of all heads of a gated delta net, "delta value" is one head's.
"""
Size = Width | int
"""An axis by its name, or its size where the model does not decide it (the rank of an adapter)."""


@dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        megatron: parameter name, or several spellings of it (Transformer Engine fuses norms into
            the layer behind).
        hf: one or several tensor names, in the order that ``layout`` wants them. Of experts, names
            without ``{expert}`` are stacks: their first axis is the experts of the layer, and
            layout, rows and columns are those of one expert.
        layout: how the one is made of the others.
        rows: their first axis; one name for all of them, or one for each.
        columns: their second axis; None for vectors, several for tensors of more axes.
        when: where the rule applies; None means always.
        is_buffer: it is not trained: it has no gradient and no optimizer state.
        tied_to: for the output layer: the Hugging Face name that takes the place of ``hf`` when
            embeddings are tied. Then ``hf`` is not expected in checkpoints and not exported.
        repeated: how many there are, for names with ``{block}``; None: one.
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
        """Tell whether its tensors are stacks of all experts of a layer."""
        return self.is_expert and "{expert}" not in self.hf_names[0]

    @property
    def is_of_layer(self) -> bool:
        return "{layer}" in self.megatron_names[0]

    @property
    def is_embedding(self) -> bool:
        """Tell whether it is the embedding's, or its adapter's."""
        return self.megatron_names[0].startswith("embedding.")

    @property
    def is_output(self) -> bool:
        """Tell whether it is the output layer's, or its adapter's."""
        return self.megatron_names[0].startswith("output_layer.")

    @property
    def is_vision(self) -> bool:
        """Tell whether it belongs to the tower that sees images, or to its projector."""
        return self.megatron_names[0].startswith(VISION_MODEL)

    def blocks(self, spec: ModelSpec) -> range:
        """Return the values of ``{block}``; one value for names without it."""
        return range(1 if self.repeated is None else self.repeated(spec))

    @property
    def is_linear(self) -> bool:
        """Tell whether its tensors are weights of Linear layers; embeddings, routers and the gates
        of shared experts, which also have two axes, are not, nor are stacks of experts."""
        no_layer = self.is_embedding or self.is_stacked or self.rows in ("experts", 1)
        is_matrix = self.columns is not None and not isinstance(self.columns, tuple)
        return is_matrix and not no_layer

    def applies(self, spec: ModelSpec, layer: int) -> bool:
        return self.when is None or self.when(spec, layer)
