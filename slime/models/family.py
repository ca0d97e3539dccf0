"""The rule language: one table per model family, read in both directions.

    RULES = (
        Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", VOCAB),
        Rule("decoder.layers.{layer}.mlp.linear_fc1.weight",
             ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"), GATE_UP),
        Rule("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight",
             "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", ROW, when=is_moe_layer),
        …
    )

``{layer}`` and ``{expert}`` are global numbers on both sides; `slime.checkpoints.megatron_names` turns a rank's local
numbers into global ones. Everything else (which slice a rank reads, how pieces are gathered, which names must be in
a checkpoint) follows from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slime.models.layouts import Layout
from slime.models.spec import HfConfig, ModelSpec, read_hf_config

_PLACEHOLDERS = {"layer": r"(?P<layer>\d+)", "expert": r"(?P<expert>\d+)"}

LayerCondition = Callable[[ModelSpec, int], bool]
"""(spec, global layer number) → does the rule apply; layer is -1 for parameters outside the layers."""


@lru_cache(maxsize=4096)
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for name, group in _PLACEHOLDERS.items():
        escaped = escaped.replace(re.escape("{" + name + "}"), group)
    return re.compile(escaped)


@dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter and the Hugging Face tensors it is made of.

    Attributes:
        megatron: parameter name, or several spellings of it (Transformer Engine fuses norms into the layer behind).
        hf: one or several tensor names, in the order that ``layout`` wants them.
        layout: how the one is made of the others.
        when: where the rule applies; None means always.
        tied_to: for the output layer: the Hugging Face name that takes the place of ``hf`` when embeddings are tied.
            Then ``hf`` is not expected in checkpoints and not exported.
    """

    megatron: str | tuple[str, ...]
    hf: str | tuple[str, ...]
    layout: Layout
    when: LayerCondition | None = None
    tied_to: str | None = None

    @property
    def megatron_names(self) -> tuple[str, ...]:
        return (self.megatron,) if isinstance(self.megatron, str) else self.megatron

    @property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @property
    def is_expert(self) -> bool:
        return "{expert}" in self.megatron_names[0]


@dataclass(frozen=True)
class Match:
    """A rule with its numbers filled in.

    Attributes:
        sources: Hugging Face names to load from, in the layout's order.
        exports: names to write to; empty for a parameter that is a copy of another one (tied output layer).
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
        make_spec: plain config dict → ModelSpec; raises UserError for settings that cannot be honoured.
        ignored: regular expressions (full match) of Hugging Face tensors that this family does not use; counted,
            not loaded. A group named ``mtp_layer`` must be the number of one of the layers for multi-token prediction
            that follow the decoder's.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    make_spec: Callable[[dict[str, Any]], ModelSpec]
    ignored: tuple[str, ...] = ()

    def model_spec(self, hf_config: HfConfig) -> ModelSpec:
        """Architecture facts from a config (dict, transformers config, file or directory).

        Raises:
            UserError: a setting that this family cannot honour, or a field that is not there.
        """
        return self.make_spec(read_hf_config(hf_config))

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
                    if rule.when is None or rule.when(spec, layer):
                        return _filled(rule, numbers, spec)
        return None

    def expected_hf_names(self, spec: ModelSpec) -> Iterator[str]:
        """Every tensor that a complete checkpoint of this model has, layer by layer."""
        outer = [rule for rule in self.rules if "{layer}" not in rule.megatron_names[0]]
        for rule in outer:
            if rule.when is None or rule.when(spec, -1):
                yield from _filled(rule, {}, spec).exports
        for layer in range(spec.num_layers):
            for rule in self.rules:
                if "{layer}" not in rule.megatron_names[0] or (rule.when and not rule.when(spec, layer)):
                    continue
                for expert in range(spec.num_experts) if rule.is_expert else [-1]:
                    yield from _filled(rule, {"layer": layer, "expert": expert}, spec).exports

    def is_ignored(self, hf_name: str, spec: ModelSpec) -> bool:
        """Is this tensor known to be unused: listed in ``ignored``, or the output layer of a tied model?"""
        if spec.tie_embeddings and any(rule.tied_to and hf_name in rule.hf_names for rule in self.rules):
            return True
        for pattern in self.ignored:
            found = re.fullmatch(pattern, hf_name)
            if found is None:
                continue
            layer = found.groupdict().get("mtp_layer")
            if layer is None or 0 <= int(layer) - spec.num_layers < spec.num_mtp_layers:
                return True
        return False


def _filled(rule: Rule, numbers: dict[str, int], spec: ModelSpec) -> Match:
    names = tuple(template.format(**numbers) for template in rule.hf_names)
    layer, expert = numbers.get("layer", -1), numbers.get("expert", -1)
    if rule.tied_to is not None and spec.tie_embeddings:
        return Match(rule, layer, expert, sources=(rule.tied_to,), exports=())
    return Match(rule, layer, expert, sources=names, exports=names)
