"""Tensors that an engine fuses while it loads them, so that one load call must bring all of them.

SGLang holds some Linear layers of a checkpoint as one parameter. Most of those it fills part by
part, in any number of calls: ``qkv_proj``, ``gate_up_proj``, stacked experts, and ``in_proj_qkvz``
and ``in_proj_ba`` of Qwen3-Next and Qwen3.5. Others it concatenates first: it keeps the parts that
have come in a table of the load call and writes the parameter once all are there. A part whose
partners come in another call is dropped without a word. A weight push is many load calls, one for
each bucket, so such tensors must share a bucket.

A family declares its own in `slime.models.table.ModelFamily.fused`. Parts are concatenated by the
last part of their names: weights with weights, scales with scales. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.models.spec import ModelSpec


@dataclass(frozen=True)
class FusedLoad:
    """Linear layers that an engine concatenates, along their rows, within one load call.

    Attributes:
        fused: name of the engine's module, with ``{layer}``.
        parts: names of the checkpoint's modules, in the order of their rows.
        source: which engine does so, and where.
        when: (spec, layer) → the engine fuses them there; None means everywhere.
    """

    fused: str
    parts: tuple[str, ...]
    source: str
    when: Callable[[ModelSpec, int], bool] | None = None

    def applies(self, spec: ModelSpec, layer: int) -> bool:
        return self.when is None or self.when(spec, layer)

    def find(self, module: str) -> tuple[int, int] | None:
        """(layer, place among the parts) of a module; None when it is none of the parts."""
        for place, part in enumerate(self.parts):
            found = _pattern(part).fullmatch(module)
            if found:
                return int(found[1]), place
        return None


class LoadGroups:
    """The groups of a model, by the names under which tensors are pushed.

    Args:
        fused: of the model's family.
        spec: of the model.
    """

    def __init__(self, fused: Iterable[FusedLoad] = (), spec: ModelSpec | None = None) -> None:
        self._fused = tuple(fused)
        self._spec = spec

    def members(self, name: str) -> tuple[str, ...]:
        """Return the names of all tensors that must come in the same load call as ``name``, itself
        included.

        Returns:
            ``()`` for a tensor that an engine loads by itself.

        Example:
            >>> LoadGroups(DEEPSEEK_V3.fused, spec).members(
            ...     "model.layers.3.self_attn.q_a_proj.weight")
            ('model.layers.3.self_attn.q_a_proj.weight',
             'model.layers.3.self_attn.kv_a_proj_with_mqa.weight')
        """
        module, _, leaf = name.rpartition(".")
        found = self._find(module)
        return (
            ()
            if found is None
            else tuple(f"{part.format(layer=found[1])}.{leaf}" for part in found[0].parts)
        )

    def fused_module(self, module: str) -> str | None:
        """Return the name of the engine's module that a checkpoint module becomes a part of, or
        None if it belongs to no group."""
        found = self._find(module)
        return None if found is None else found[0].fused.format(layer=found[1])

    def _find(self, module: str) -> tuple[FusedLoad, int] | None:
        for one in self._fused:
            found = one.find(module)
            if found is not None and self._spec is not None and one.applies(self._spec, found[0]):
                return one, found[0]
        return None

    def among(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """List each group that some of the names belong to, once, in the order of the names."""
        return [group for group in dict.fromkeys(map(self.members, names)) if group]


def fused_place(fused: Sequence[FusedLoad], module: str) -> tuple[str, int, int] | None:
    """Locate a checkpoint module inside the engine's fused module.

    Returns:
        (name of the engine's module, place among its parts, number of parts); None for a module of
        no group.
    """
    for one in fused:
        found = one.find(module)
        if found is not None:
            return one.fused.format(layer=found[0]), found[1], len(one.parts)
    return None


@lru_cache(maxsize=256)
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(re.escape("{layer}"), r"(\d+)"))
