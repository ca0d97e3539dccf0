"""Causes inside the model: positions, rounding of weights and of single operators, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime.diagnosis.align.case import Discrepancy, Tried, Untested
from slime.diagnosis.align.evidence import size
from slime.diagnosis.align.reference import PARTS, ReferenceSettings, Watcher
from slime.engines.wire.quantised import dequantise

#: Common bases of rotary embeddings.
_BASES = (1e4, 5e5, 1e6)
#: Maximum share of a hypothesis that only predicts the size of the difference.
_BY_SIZE = 0.5


# -- positions -------------------------------------------------------------------------------------


def position(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side uses other positions or rotary frequencies."""
    spec = case.model().arch.spec
    growth = case.differences.growth()
    seen: tuple[str, ...] = ()
    if growth is not None:
        seen = (f"the last quarter of positions differs {growth:.1f} times as much as the first",)
    moves: dict[str, Callable[[int, int], Tensor]] = {
        "positions of the response are 1 too high": lambda prompt, length: _moved(
            prompt, length, 1
        ),
        "positions of the response are 1 too low": lambda prompt, length: _moved(
            prompt, length, -1
        ),
        "positions begin anew with the response": lambda prompt, length: _moved(
            prompt, length, -prompt
        ),
        "no position is known: the rotary embedding does nothing": lambda prompt, length: (
            torch.zeros(length).long()
        ),
    }
    remedies = (
        f"compare rope_theta ({spec.rotary_base:g}) and rope_scaling ({spec.rotary_scaling}) of "
        "the engine's config.json with the trainer's; --sglang-json-model-override-args changes "
        "the engine's alone",
    )
    for what, positions in moves.items():
        yield case.with_setting(what, positions=positions, details=seen, remedies=remedies)
    changes: dict[str, dict[str, Any]] = {
        f"the rotary base is {base:g}": {"rotary_base": base}
        for base in _BASES
        if base != spec.rotary_base
    }
    if spec.rotary_scaling:
        kind = spec.rotary_scaling.get("rope_type")
        changes[f"the rotary scaling ({kind}) is left out"] = {"rotary_scaling": None}
        if "factor" in spec.rotary_scaling:
            factor = spec.rotary_scaling["factor"]
            linear = {"rope_type": "linear", "factor": factor}
            changes[f"the rotary scaling is linear by {factor:g}"] = {"rotary_scaling": linear}
    for what, fields in changes.items():
        yield case.with_setting(what, rotary=fields, details=seen, remedies=remedies)


def _moved(prompt: int, length: int, by: int) -> Tensor:
    positions = torch.arange(length)
    positions[prompt:] += by
    return positions.clamp(min=0)


# -- weights of fewer bits -------------------------------------------------------------------------


def quantisation(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one side has its weights or its cache in fewer bits."""
    model = case.model()
    given = case.facts.get("quantization")
    remedies = (
        (f"the engine's quantisation is {given}: " if given else "")
        + "--use-tis corrects for what cannot be taken away; engines in the trainer's dtype "
        "need no correction"
    )
    stored = case.stored
    if stored is not None:  # quantised exactly as in a push
        parts = case.stored_parts
        scheme = stored.scheme
        changed = {
            f"{module}.weight": dequantise(module, held, scheme, model.dtype)
            for module, held in parts.items()
        }
        with model.holding({name: tensor.float() for name, tensor in changed.items()}):
            what = f"weights are as --hf-checkpoint stores them: {stored}"
            yield case.tried(what, model.of_all(case.samples), remedies=(remedies,))
    for what, rounded in _SCHEMES.items():
        if what == _dtype_words(model.dtype):
            continue
        changed = {name: rounded(tensor) for name, tensor in model.matrices().items()}
        with model.holding(changed):
            yield case.tried(what, model.of_all(case.samples), remedies=(remedies,))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        words = f"keys and values are kept in {str(dtype).removeprefix('torch.')}"
        yield case.with_setting(
            words, cache_dtype=dtype, remedies=("--sglang-kv-cache-dtype auto",)
        )


def _dtype_words(dtype: torch.dtype) -> str:
    return f"weights are in {str(dtype).removeprefix('torch.')}"


def _as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda weight: weight.to(dtype).float()


def integers(weight: Tensor, bits: int, group: int | None) -> Tensor:
    """Round a matrix to integers of ``bits`` bits times a scale per ``group`` columns of a row
    (None: per row).

    Example:
        >>> integers(torch.tensor([[7.0, 3.4]]), 4, None).tolist()
        [[7.0, 3.0]]
    """
    rows, columns = weight.shape
    size_of_group = columns if group is None or columns % group else group
    grouped = weight.reshape(rows, -1, size_of_group)
    most = 2 ** (bits - 1) - 1
    scale = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-12) / most
    return ((grouped / scale).round().clamp(-most - 1, most) * scale).reshape(rows, columns)


def _float8(weight: Tensor, block: int | None) -> Tensor:
    """Round to e4m3 with one scale per tensor (None), or per block of ``block`` × ``block``
    entries."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    if block is None:
        scale = weight.abs().amax().clamp(min=1e-12) / largest
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    done = torch.empty_like(weight)
    for row in range(0, weight.shape[0], block):
        for column in range(0, weight.shape[1], block):
            part = slice(row, row + block), slice(column, column + block)
            done[part] = _float8(weight[part], None)
    return done


_SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "weights are in 4-bit integers, groups of 128": lambda weight: integers(weight, 4, 128),
    "weights are in 4-bit integers, groups of 32": lambda weight: integers(weight, 4, 32),
    "weights are in 8-bit integers": lambda weight: integers(weight, 8, None),
    "weights are in 8-bit floats (e4m3), a scale per tensor": lambda weight: _float8(weight, None),
    "weights are in 8-bit floats (e4m3), blocks of 128": lambda weight: _float8(weight, 128),
    _dtype_words(torch.bfloat16): _as(torch.bfloat16),
    _dtype_words(torch.float16): _as(torch.float16),
}


# -- experts ---------------------------------------------------------------------------------------


def routing(case: Discrepancy) -> Iterator[Tried]:
    """Test whether the engine routed tokens to other experts."""
    model = case.model()
    if model.arch.experts is None:
        raise Untested("the model has no experts")
    if model.setting.experts:
        raise Untested("the trainer takes the engine's experts (--use-rollout-routing-replay)")
    if not any(sample.experts is not None for sample in case.samples):
        raise Untested(
            "no sample says which experts the engine chose: generate with "
            "--use-rollout-routing-replay"
        )
    elsewhere = pairs = 0
    for sample in case.samples:
        if sample.experts is None:
            continue
        watcher = Watcher()
        model.hidden(
            sample.tokens, sample.prompt_length, model.setting, watcher=watcher, media=sample.media
        )
        mine = torch.stack(watcher.chosen, dim=1).cpu().sort(-1).values
        layers = [layer for layer, has in enumerate(model.arch.experts.in_layer) if has]
        theirs = sample.experts.reshape(-1, model.arch.spec.num_layers, model.arch.experts.chosen)[
            : len(mine), layers
        ]
        known = (theirs >= 0).all(-1)
        elsewhere += int(((theirs.sort(-1).values != mine[: len(theirs)]).any(-1) & known).sum())
        pairs += int(known.sum())
    what = (
        f"{elsewhere} of {pairs} choices of experts are others than the same weights make in "
        "float32"
    )
    remedies = ("--use-rollout-routing-replay lets the trainer take the engine's experts",)
    replaying = replace(model.setting, experts=True)
    variant = [
        base if sample.experts is None else model.log_probs(sample, replaying)
        for sample, base in zip(case.samples, case.base, strict=True)
    ]
    change = case.flat(case.base) - case.flat(variant)
    yield case.tried_change(what, {"engine": change}, remedies=remedies)


# -- precision -------------------------------------------------------------------------------------


def precision(case: Discrepancy) -> Iterator[Tried]:
    """Test whether one operator, or all of them, computes in fewer bits on one side."""
    model = case.model()
    low = str(model.low_dtype).removeprefix("torch.")
    for part, words in PARTS.items():
        if part == "router" and model.arch.experts is None:
            continue
        remedies = (
            f"compute {words} in float32 on both sides; --attention-backend chooses attention's "
            "kernels",
        )
        yield case.with_setting(
            f"{words} are rounded to {low}",
            rounded=frozenset({part}),
            dtype=model.low_dtype,
            remedies=remedies,
        )
    whole = ReferenceSettings(frozenset(PARTS), model.low_dtype, model.setting.sampling)
    makes = size(case.flat(model.of_all(case.samples, whole)) - case.flat(case.base))
    seen = case.differences.mean
    fits = min(makes / seen, seen / makes) if makes and seen else 0.0
    yield Tried(
        f"all is computed in {low}, and in float32 on the other side",
        "",
        _BY_SIZE * fits,
        seen * (1 - _BY_SIZE * fits),
        details=(
            f"by its size alone: such rounding changes log-probs by {makes:.3g} on average, at "
            "other tokens",
            *filter(None, [case.facts.get("dtypes")]),
        ),
        remedies=(
            "--fp32 or --bf16 for the trainer, --sglang-dtype for the engine: the same on both "
            "sides",
        ),
    )
