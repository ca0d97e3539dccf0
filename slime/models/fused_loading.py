"""Tensors that an engine fuses while it loads them, so that one load call must contain all of them.

SGLang holds some Linear layers of a checkpoint as one parameter. Most of these it fills part by
part, in any number of calls: ``qkv_proj``, ``gate_up_proj``, stacked experts, and ``in_proj_qkvz``
and ``in_proj_ba`` of Qwen3-Next and Qwen3.5. Others it concatenates first: it collects the parts
within one load call and writes the parameter when all have arrived. If the parts arrive in
different calls, it silently drops them. A weight push makes a load call per bucket, so such tensors
must share a bucket.

A family lists its groups in `slime.models.table.ModelFamily.fused`. Weights are concatenated with
weights and scales with scales, by the last part of their names. Imports no torch.
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
        source: the engine, and the place in its code.
        when: (spec, layer) → whether the engine fuses them in this layer; None: in all layers.
    """

    fused: str
    parts: tuple[str, ...]
    source: str
    when: Callable[[ModelSpec, int], bool] | None = None

    def applies(self, spec: ModelSpec, layer: int) -> bool:
        return self.when is None or self.when(spec, layer)

    def find(self, module: str) -> tuple[int, int] | None:
        """Return (layer, index among the parts) of a module; None if it is no part."""
        for place, part in enumerate(self.parts):
            found = _pattern(part).fullmatch(module)
            if found:
                return int(found[1]), place
        return None


class LoadGroups:
    """Groups of tensors that must share a load call, by their names in a push.

    Args:
        fused: of the model's family.
        spec: of the model.
    """

    def __init__(self, fused: Iterable[FusedLoad] = (), spec: ModelSpec | None = None) -> None:
        self._fused = tuple(fused)
        self._spec = spec

    def members(self, name: str) -> tuple[str, ...]:
        """Return the names of all tensors that must be in the same load call as ``name``, including
        ``name``.

        Returns:
            ``()`` for a tensor that an engine can load alone.

        Example:
            >>> LoadGroups(DEEPSEEK_V3.fused, spec).members(
            ...     "model.layers.3.self_attn.q_a_proj.weight")
            ('model.layers.3.self_attn.q_a_proj.weight',
             'model.layers.3.self_attn.kv_a_proj_with_mqa.weight')
        """
        module, _, leaf = name.rpartition(".")
        found = self._find(module)
        if found is None:
            return ()
        return tuple(f"{part.format(layer=found[1])}.{leaf}" for part in found[0].parts)

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
        """List the groups of the given names, each once, in the order of the names."""
        return [group for group in dict.fromkeys(map(self.members, names)) if group]


def fused_place(fused: Sequence[FusedLoad], module: str) -> tuple[str, int, int] | None:
    """Locate a checkpoint module in the engine's fused module.

    Returns:
        (name of the engine's module, index among its parts, number of parts); None for a module in
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
