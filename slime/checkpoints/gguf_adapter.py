"""Write an adapter as a GGUF file, which llama.cpp combines with the GGUF file of the base.

    llama-cli -m base.gguf --lora adapter.gguf

Names are those of the base's tensors with the suffixes ``.lora_a`` [rank, in] and ``.lora_b``
[out, rank]; the experts of a layer are one tensor. llama.cpp scales by alpha / rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.checkpoints.gguf_export import (
    ARCHITECTURES,
    GgufTensor,
    check_writable,
    gguf_names,
    gguf_writer,
    in_gguf_order,
    require_gguf,
    write_tensors,
)
from slime.checkpoints.peft_files import PeftAdapter, module_of
from slime.errors import UserError
from slime.models import ModelSpec, family_of
from slime.models.adapters import Side, is_embedding, peft_name

if TYPE_CHECKING:
    import torch


def adapter_to_gguf(
    base: str | Path,
    adapter: PeftAdapter,
    path: str | Path,
    dtype: str | None = None,
    name: str | None = None,
) -> Path:
    """Write an adapter of ``base`` to the file ``path``, which appears only when complete.

    Args:
        base: Hugging Face directory.
        dtype: "bfloat16", "float16" or "float32" for A and B; None keeps the dtype of each.
        name: display name of the adapter.
    Raises:
        UserError: the base is one that llama.cpp does not compute, or of an unsupported family; the
            adapter has modules that the base does not have; the package gguf is missing.
    """
    target = Path(path)
    require_gguf("writing")
    family = family_of(base)
    spec = family.model_spec(base)
    if spec.family not in ARCHITECTURES:
        raise UserError(
            f"{base} is of the family {spec.family}, whose adapters are not written as GGUF",
            why=f"these are: {', '.join(ARCHITECTURES)}",
            fix="serve the adapter with `slime serve`",
        )
    check_writable(base, spec)
    known = dict(family.hf_tensors(spec))
    modules = list(dict.fromkeys(map(module_of, adapter.tensors)))
    stray = [
        module for module in modules if f"{module}.weight" not in known or is_embedding(module)
    ]
    if stray:
        raise UserError(
            f"the adapter {adapter.directory} has {stray[0]}, which GGUF has no place for",
            why=f"{base} has no such Linear layer",
            fix="use the adapter's own base, and no adapters of embeddings",
        )
    tensors = list(_tensors(adapter, modules, spec, dtype))
    with gguf_writer(target, spec) as writer:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(adapter.alpha))
        writer.add_name(name or adapter.directory.resolve().name)
        write_tensors(writer, tensors)
    return target


def _tensors(
    adapter: PeftAdapter, modules: list[str], spec: ModelSpec, dtype: str | None
) -> Iterator[GgufTensor]:
    names = gguf_names([f"{module}.weight" for module in modules], spec)
    for ours, theirs in names.items():
        chosen = [name.removesuffix(".weight") for name in theirs]
        is_stacked = ".experts." in theirs[0]
        sides: tuple[tuple[Side, str], ...] = (("A", "lora_a"), ("B", "lora_b"))
        for side, ending in sides:
            first = adapter[peft_name(chosen[0], side)]
            shape = tuple(first.shape)
            kept = str(first[:1].dtype).removeprefix("torch.")
            yield GgufTensor(
                f"{ours}.{ending}",
                (len(chosen), *shape) if is_stacked else shape,
                dtype or kept,
                partial(_read, adapter, chosen, side, spec, is_stacked),
            )


def _read(
    adapter: PeftAdapter, modules: list[str], side: Side, spec: ModelSpec, is_stacked: bool
) -> torch.Tensor:
    import torch

    pieces = [adapter[peft_name(module, side)][:] for module in modules]
    if side == "B":  # its rows are those of the weight
        pieces = [
            in_gguf_order(piece, f"{module}.weight", spec) for piece, module in zip(pieces, modules)
        ]
    return torch.stack(pieces) if is_stacked else pieces[0]
