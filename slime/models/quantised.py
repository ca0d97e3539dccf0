"""Formats of quantised weights, read from config.json, and the tensors that store them.

    method              weights                           stored as
    compressed-tensors  INT4, groups along a row          weight_packed, weight_scale, weight_shape
                                                          and weight_zero_point if asymmetric
    compressed-tensors  FP8 (e4m3), block, row or tensor  weight, weight_scale
    fp8                 FP8 (e4m3), blocks                weight, weight_scale_inv
    fp8                 FP8 (e4m3), whole tensor          weight, weight_scale

`Quantisation.read` is the only reader of ``quantization_config``. `slime.models.ignore_list`
compares its rules with the model's modules, and `slime.engines.wire.quantised` does the arithmetic.
This module imports no torch, because every launch reads it first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.errors import UserError

Method = Literal["compressed-tensors", "fp8"]
Parts = dict[str, tuple[str, tuple[int, ...]]]
"""Last part of a stored tensor's name → (dtype, shape)."""

#: ``quant_method`` of models whose stacks of experts are stored in 4-bit floats.
MXFP4 = "mxfp4"
#: Linear layers that published FP8 models do not quantise, also if config.json has no list.
FOR_FP8 = ("lm_head", r"re:.*eh_proj.*", r"re:.*shared_head\.head.*")
#: Numbers that compressed-tensors packs into an int32, 4 bits each.
NIBBLES = 8


@dataclass(frozen=True)
class Int4:
    """4-bit integers with a scale per group of neighbouring columns in a row.

    Attributes:
        group_size: columns that share a scale.
        symmetric: zero is in the middle of the range; otherwise each group has a zero point.
    """

    group_size: int
    symmetric: bool = True

    def parts(self, shape: tuple[int, int], dtype: str) -> Parts:
        """Return the tensors that store a weight [rows, columns] of ``dtype``."""
        rows, columns = shape
        groups = columns // self.group_size
        parts: Parts = {
            "weight_packed": ("int32", (rows, -(-columns // NIBBLES))),
            "weight_scale": (dtype, (rows, groups)),
            "weight_shape": ("int64", (2,)),
        }
        if not self.symmetric:
            parts["weight_zero_point"] = ("int32", (-(-rows // NIBBLES), groups))
        return parts

    def is_of_rows(self, columns: int) -> bool:
        """Tell whether any rows of ``columns`` neighbouring columns, starting at a multiple of
        ``columns``, are quantised independently of the rest of the weight."""
        return columns % self.group_size == 0

    def misfit(self, shape: tuple[int, int]) -> str:
        """Explain why a weight of this shape cannot be stored in this format; "" if it can."""
        return f"{shape[1]} columns are no multiple of the group size {self.group_size}" * bool(
            shape[1] % self.group_size
        )

    def __str__(self) -> str:
        return f"INT4 in groups of {self.group_size}, {'' if self.symmetric else 'a'}symmetric"


@dataclass(frozen=True)
class Fp8:
    """8-bit floats (e4m3) with a float32 scale per block.

    Attributes:
        block: rows and columns that share a scale; 0 stands for all of them, so (0, 0) is one scale
            per tensor and (1, 0) one per row.
        scale: last part of the scale's name. Under both names, a weight is the stored number times
            the scale. Some published models store scales in bfloat16.
    """

    block: tuple[int, int] = (128, 128)
    scale: Literal["weight_scale_inv", "weight_scale"] = "weight_scale_inv"

    def blocks(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Count the blocks of a weight [rows, columns] along each axis."""
        rows, columns = (
            (-(-size // block)) if block else 1 for size, block in zip(shape, self.block)
        )
        return rows, columns

    def parts(self, shape: tuple[int, int], dtype: str) -> Parts:
        scales = self.blocks(shape) if any(self.block) else (1,)
        return {"weight": ("float8_e4m3fn", shape), self.scale: ("float32", scales)}

    def is_of_rows(self, columns: int) -> bool:
        return False  # rows may share a scale with rows outside the piece

    def misfit(self, shape: tuple[int, int]) -> str:
        return ""  # a block at the border may be smaller

    def __str__(self) -> str:
        rows, columns = self.block
        return (
            f"FP8 in blocks of {rows}×{columns}"
            if rows and columns
            else "FP8 by row"
            if rows
            else "FP8 by tensor"
        )


@dataclass(frozen=True)
class Quantisation:
    """A model's ``quantization_config``.

    Attributes:
        method: ``quant_method``, the library or convention that defines the format.
        scheme: how weights of Linear layers are stored.
        ignore: rules for Linear layers that are not quantised (`slime.models.ignore_list`).
    """

    method: Method
    scheme: Int4 | Fp8
    ignore: tuple[str, ...] = ()

    @staticmethod
    def read(config: Mapping[str, Any]) -> Quantisation | None:
        """Read a parsed config.json. None if engines hold unquantised weights: the model is not
        quantised, or it is stored in MXFP4 (`is_mxfp4`).

        Raises:
            UserError: the method or scheme is not supported.
        """
        settings = config.get("quantization_config")
        if not settings or is_mxfp4(config):
            return None
        if not isinstance(settings, Mapping):
            raise UserError(
                f"quantization_config in config.json is {settings!r}, not an object",
                fix="correct config.json",
            )
        readers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}
        method = settings.get("quant_method")
        if not isinstance(method, str) or method not in readers:
            raise UserError(
                f"quantization_config in config.json has the quant_method {method!r}",
                why=f"supported methods: {', '.join(readers)}",
                fix="use the model with unquantised weights, or one that was quantised by a "
                "supported method",
            )
        return readers[method](settings)

    def module(self, name: str) -> str | None:
        """Return the module of a stored tensor; None if ``name`` is no part of a quantised weight.

        Example:
            >>> Quantisation("fp8", Fp8()).module("model.layers.0.mlp.up_proj.weight_scale_inv")
            'model.layers.0.mlp.up_proj'
        """
        module, _, last = name.rpartition(".")
        return module if last in self.scheme.parts((1, 1), "") else None

    def __str__(self) -> str:
        return f"{self.scheme} ({self.method})"


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Tell whether a directory stores its experts in MXFP4 (gpt-oss). Only files have this format:
    `slime.checkpoints.hf_files` reads them as unquantised weights for trainer and embedded
    engine."""
    settings = config.get("quantization_config")
    return isinstance(settings, Mapping) and settings.get("quant_method") == MXFP4


def format_of(config: Mapping[str, Any]) -> str:
    """Describe the quantisation in a config.json, also by an unsupported method; "" if there is
    none.

    Example:
        >>> format_of({"quantization_config": {"quant_method": "awq"}})
        'awq'
    """
    settings = config.get("quantization_config")
    if is_mxfp4(config):
        return "MXFP4"
    try:
        return str(Quantisation.read(config) or "")
    except UserError:
        return str(settings.get("quant_method")) if isinstance(settings, Mapping) else "quantised"


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantisation:
    method = "compressed-tensors"
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise _unknown(
            method, f"the config_groups {groups!r}", "an object with one group of weights"
        )
    if len(groups) != 1:
        raise _unknown(method, f"{len(groups)} config_groups", "one group of weights")
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _unknown(method, f"the group {group!r}", "a group with weights")
    if list(group.get("targets") or ["Linear"]) != ["Linear"]:
        raise _unknown(
            method, f"the targets {group['targets']!r}", "the target Linear, with rules to ignore"
        )
    _refuse_beyond_weights(settings, group)
    scheme = _scheme(weights)
    formats = (
        (None, "pack-quantized")
        if isinstance(scheme, Int4)
        else (None, "float-quantized", "naive-quantized")
    )
    for key, where, known in (
        ("format", settings, formats),
        ("format", group, formats),
        ("dynamic", weights, (None, False)),
        # other values reorder the columns
        ("actorder", weights, (None, False, "weight", "static")),
        ("symmetric", weights, (None, True, False) if isinstance(scheme, Int4) else (None, True)),
    ):
        if where.get(key) not in known:
            words = " or ".join(repr(value) for value in known if value is not None)
            raise _unknown(method, f"{key} {where[key]!r}", f"{key} {words}, or none")
    return Quantisation("compressed-tensors", scheme, _rules(settings.get("ignore"), method))


def _scheme(weights: Mapping[str, Any]) -> Int4 | Fp8:
    kind = weights.get("type", "int")
    bits = weights.get("num_bits")
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    if (
        (kind, bits) == ("int", 4)
        and strategy in ("group", None)
        and isinstance(size, int)
        and size > 0
    ):
        return Int4(size, bool(weights.get("symmetric", True)))
    if (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block"):
        whole = {"tensor": (0, 0), "channel": (1, 0)}
        return Fp8(
            whole.get(strategy) or _block(weights.get("block_structure"), "compressed-tensors"),
            "weight_scale",
        )
    raise _unknown(
        "compressed-tensors",
        f"weights of type {kind}, {bits} bits, strategy {strategy}",
        "int with 4 bits in groups, float with 8 bits by block, channel or tensor",
    )


def _block(value: object, method: str) -> tuple[int, int]:
    if (
        isinstance(value, list)
        and len(value) == 2
        and all(type(size) is int and size > 0 for size in value)
    ):
        return value[0], value[1]
    raise _unknown(method, f"blocks of {value!r}", "a list of two sizes, like [128, 128]")


def _rules(value: object, method: str) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(rule, str) for rule in value):
        return tuple(value)
    if value is None:
        return ()
    raise _unknown(method, f"the rules {value!r} of modules to ignore", "a list of strings")


def _refuse_beyond_weights(settings: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Refuse settings that affect more than stored weights: static activation scales, a quantised
    cache, rotations, sparsity."""
    activations = group.get("input_activations")
    is_int = group["weights"].get("type", "int") == "int"
    if activations and (
        not isinstance(activations, Mapping) or activations.get("dynamic") is not True or is_int
    ):
        raise _unknown(
            "compressed-tensors",
            "input_activations",
            "FP8 activations whose scales are dynamic, or none",
        )
    for key, where in (
        ("output_activations", group),
        ("kv_cache_scheme", settings),
        ("transform_config", settings),
    ):
        if where.get(key):
            raise _unknown("compressed-tensors", key, "weights alone, and FP8 activations")
    sparsity = settings.get("sparsity_config")
    if sparsity and sparsity != {"format": "dense"}:
        raise _unknown("compressed-tensors", f"sparsity_config {sparsity!r}", "dense weights")


def _fp8(settings: Mapping[str, Any]) -> Quantisation:
    for key, known in (
        ("fmt", "e4m3"),
        ("activation_scheme", "dynamic"),
        ("scale_fmt", "float"),
        ("kv_cache_scheme", None),
    ):
        if settings.get(key, known) != known:
            raise _unknown("fp8", f"{key} {settings[key]!r}", f"{key} {known!r}")
    block = settings.get("weight_block_size")
    scheme = Fp8((0, 0), "weight_scale") if block is None else Fp8(_block(block, "fp8"))
    ignore = settings.get("modules_to_not_convert") or settings.get("ignored_layers") or FOR_FP8
    return Quantisation("fp8", scheme, _rules(ignore, "fp8"))


def _unknown(method: str, found: str, supported: str) -> UserError:
    return UserError(
        f"quantization_config of the method {method} has {found}",
        why=f"supported: {supported}",
        fix="use a model in a supported format: slime convert hf-to-int4 and hf-to-fp8 make them",
    )
