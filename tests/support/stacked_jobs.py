"""A Qwen3-MoE whose checkpoints hold all experts of a layer in one tensor, and what a trainer rank
does with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime import models
from slime.models.layouts import INTERLEAVED_GATE_UP, ROW, STACKED_GATE_UP, ParamMapping, Transposed
from slime.models.qwen3_moe import QWEN3_MOE
from slime.models.rules import HF_MLP, Rule, Size
from tests.support.megatron_jobs import backend_of, exported

#: Form of a checkpoint → layouts of one expert's (gate and up, down).
FORMS: dict[str, tuple[ParamMapping, ParamMapping]] = {
    "gate above up": (STACKED_GATE_UP, ROW),
    "transposed": (Transposed(STACKED_GATE_UP), Transposed(ROW)),
    "transposed, interleaved": (Transposed(INTERLEAVED_GATE_UP), Transposed(ROW)),
}


@contextmanager
def stacked_family(form: str) -> Iterator[None]:
    """Within the block, models of type qwen3_moe have stacks of this form."""
    up, down = FORMS[form]
    rules = [_stacked(rule, up, down) for rule in QWEN3_MOE.rules]
    before = models.FAMILIES
    family = replace(QWEN3_MOE, rules=tuple(rules))
    models.FAMILIES = tuple(family if one is QWEN3_MOE else one for one in before)
    try:
        yield
    finally:
        models.FAMILIES = before


def _stacked(rule: Rule, up: ParamMapping, down: ParamMapping) -> Rule:
    if not rule.is_expert:
        return rule
    layout = down if rule.layout is ROW else up
    name = "down_proj" if rule.layout is ROW else "gate_up_proj"
    sizes: tuple[Size, Size] = (
        ("hidden", "expert inner") if rule.layout is ROW else ("expert gate and up", "hidden")
    )
    rows, columns = reversed(sizes) if isinstance(layout, Transposed) else sizes
    return replace(rule, hf=f"{HF_MLP}experts.{name}", layout=layout, rows=rows, columns=columns)


def stack(tensors: dict[str, Tensor], form: str) -> dict[str, Tensor]:
    """The tensors of a checkpoint with one tensor per expert, in a form with stacks."""
    found: dict[str, Tensor] = {}
    layers: dict[str, list[dict[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        prefix, is_expert, rest = name.partition("experts.")
        if not is_expert:
            found[name] = tensor
            continue
        number, projection, _ = rest.split(".")
        experts = layers.setdefault(prefix, [])
        while len(experts) <= int(number):
            experts.append({})
        experts[int(number)][projection] = tensor
    for prefix, experts in layers.items():
        pairs = [(one["gate_proj"], one["up_proj"]) for one in experts]
        if "interleaved" in form:
            up = torch.stack([torch.stack(pair, dim=1).flatten(0, 1) for pair in pairs])
        else:
            up = torch.stack([torch.cat(pair) for pair in pairs])
        down = torch.stack([one["down_proj"] for one in experts])
        if "transposed" in form:
            up = up.transpose(1, 2)
            down = down.transpose(1, 2)
        found[f"{prefix}experts.gate_up_proj"] = up.contiguous()
        found[f"{prefix}experts.down_proj"] = down.contiguous()
    return found


def save_stacked(directory: Path, plain: Path, form: str) -> Path:
    """A directory like ``plain`` with stacks of experts."""
    directory.mkdir()
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(stack(load_file(plain / "model.safetensors"), form), directory / "model.safetensors")
    return directory


def load_and_export(info: Any, model: Path, form: str, layout: dict[str, Any]) -> dict[str, Tensor]:
    """What a rank of this layout yields of the weights that it loaded."""
    with stacked_family(form):
        return exported(backend_of(info, model, **layout))
