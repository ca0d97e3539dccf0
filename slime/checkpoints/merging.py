"""Merge an adapter into its base: W + alpha / rank · B·A.

The sum is computed in float32 from the original base and rounded once, as PEFT's `merge_and_unload`
does with a float32 base. A merged model cannot be unmerged exactly, so runs never merge: they train
and push only adapters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoints.hf_files import HfReader, HfWriter
from slime.checkpoints.peft_files import PeftAdapter, module_of
from slime.errors import UserError
from slime.models import family_of, table_of
from slime.models.adapters import is_embedding, peft_name
from slime.models.layouts import ParamMapping, Shard
from slime.models.quantised import format_of
from slime.models.spec import ModelSpec, read_hf_config
from slime.models.table import single_experts

if TYPE_CHECKING:
    import torch


def merge_adapter(
    base: str | Path, adapter: PeftAdapter, directory: str | Path, *, model_name: str | None = None
) -> Path:
    """Write a Hugging Face directory of the base with the adapter merged. Memory holds one tensor
    and one shard at a time.

    Args:
        base: Hugging Face directory of unquantised weights, also the source of config and
            tokenizer.
        directory: the merged model's directory, which appears only when complete.
    Raises:
        UserError: the base is incomplete or quantised, the adapter belongs to another model, or as
            `HfWriter`.
    """
    form = format_of(read_hf_config(base))
    if form:
        raise UserError(
            f"an adapter cannot be merged into {base}, which is quantised: {form}",
            why="the sums would have to be rounded to that format again, which gives another model "
            "than the trained one",
            fix="pass --hf-checkpoint with unquantised weights: slime convert quantised-to-hf "
            "makes those that the adapter was trained with. The original unquantised model works "
            "too, but the merged model then differs by the quantisation error",
        )
    reader = HfReader(base)
    family = family_of(base, model_name)
    spec = family.model_spec(base)
    left_out = {name for name in reader.verify(family, spec) if not family.is_carried(name, spec)}
    names = [name for name in sorted(reader.names()) if name not in left_out]
    with HfWriter(directory, base) as writer:
        for name, tensor in merged(reader, names, adapter, spec):
            writer.add(name, tensor)
    return Path(directory)


def trained_beside(adapter: PeftAdapter, base: Path) -> str:
    """Describe the quantised weights that an adapter was trained with; "" if there are none, or if
    ``base`` is their directory."""
    named = Path(adapter.base)
    if not (named / "config.json").is_file() or named.resolve() == base.resolve():
        return ""
    form = format_of(read_hf_config(named))
    return f"{named} ({form})" if form else ""


def merged(
    reader: HfReader, names: list[str], adapter: PeftAdapter, spec: ModelSpec
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of a base with the adapter merged.

    Args:
        spec: of the base.
    Raises:
        UserError: the adapter has modules or shapes that the base does not have.
    """
    modules = {module_of(name) for name in adapter.names()}
    stacks = dict(_stacks(names, spec))
    known = {one for layers in stacks.values() for expert in layers.experts for one in expert}
    stray = sorted(modules - known - {name.removesuffix(".weight") for name in names})
    if stray:
        raise UserError(
            f"the adapter {adapter.directory} does not belong to {reader.directory}",
            why=f"the base has no {stray[0]}"
            + (f" (nor {len(stray) - 1} more)" if len(stray) > 1 else ""),
            fix=f"use its own base: {adapter.base or 'its config names none'}",
        )
    for name in names:
        module = name.removesuffix(".weight")
        tensor = reader[name][:]
        if name in stacks and modules & {one for row in stacks[name].experts for one in row}:
            yield name, _stack_with_adapter(tensor, stacks[name], adapter, spec)
        else:
            yield name, with_adapter(tensor, module, adapter) if module in modules else tensor


@dataclass(frozen=True)
class _Stack:
    """The layers that a stack of experts consists of.

    Attributes:
        layout: of one expert's part of the stack.
        experts: for each expert, its layers in the order of the trainer's rows.
    """

    layout: ParamMapping
    experts: tuple[tuple[str, ...], ...]


def _stacks(names: list[str], spec: ModelSpec) -> Iterator[tuple[str, _Stack]]:
    """Yield (name, layers) for the stacks of experts' weights among the names of a base."""
    family = table_of(spec)
    for name in names:
        found = family.match_hf(name)
        if found is None or not found[0].is_stacked or found[0].columns is None:
            continue
        rule, numbers = found
        templates = [hf.removesuffix(".weight") for hf in single_experts(rule).hf_names]
        experts = tuple(
            tuple(one.format(**numbers, expert=expert) for one in templates)
            for expert in range(spec.num_experts)
        )
        yield name, _Stack(rule.layout, experts)


def _stack_with_adapter(
    tensor: torch.Tensor, stack: _Stack, adapter: PeftAdapter, spec: ModelSpec
) -> torch.Tensor:
    """Return a stack of experts with their adapters, in its own layout and dtype."""
    import torch

    whole = tensor.clone()
    for expert, modules in zip(whole, stack.experts, strict=True):
        rows = stack.layout.load([expert], Shard(), spec)
        parts = [
            with_adapter(part, module, adapter)
            if peft_name(module, "A") in adapter.tensors
            else part
            for part, module in zip(rows.chunk(len(modules)), modules, strict=True)
        ]
        (own,) = stack.layout.export([torch.cat(parts)], spec)
        expert.copy_(own)
    return whole


def with_adapter(weight: torch.Tensor, module: str, adapter: PeftAdapter) -> torch.Tensor:
    """Return a module's weight [out, in] with its adapter, in the dtype of the weight.

    Raises:
        UserError: the adapter's shapes do not fit the weight.
    """
    down, up = _factors(module, adapter)
    if (up.shape[0], down.shape[1]) != tuple(weight.shape):
        raise UserError(
            f"the adapter {adapter.directory} does not fit {module}",
            why=f"the weight is {list(weight.shape)}, the adapter makes "
            f"{[up.shape[0], down.shape[1]]}",
            fix=f"use its own base: {adapter.base or 'its config names none'}",
        )
    delta = (up.float() @ down.float()) * adapter.scaling
    return (weight.float() + delta).to(weight.dtype)


def _factors(module: str, adapter: PeftAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B such that B·A has the shape of the weight; both are transposed and swapped for
    an embedding [vocabulary, hidden]."""
    down = adapter[peft_name(module, "A")][:]
    up = adapter[peft_name(module, "B")][:]
    return (up.T, down.T) if is_embedding(module) else (down, up)
