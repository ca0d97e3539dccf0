"""Quantise and dequantise weights. Trainer and engine must agree to the bit, so both use this
module.

    quantise("…up_proj", weight [rows, columns], scheme)
        ─► {"…up_proj.weight_packed": int32, "…up_proj.weight_scale": …}
    dequantise("…up_proj", those tensors, scheme, dtype) ─► weight

The library compressed-tensors packs INT4 and chooses its scales. FP8 needs no library; its bits
equal compressed-tensors' (`tests/unit/test_quantised.py`). Rows of a weight are independent except
in FP8 blocks, so large weights are processed in pieces of rows, which bounds memory. On a GPU,
`slime.engines.wire.quantised_kernels` computes the same bits for the formats that it supports.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slime.engines.wire.expert_runs import ExpertRun
from slime.errors import UserError
from slime.models.quantised import NIBBLES, Fp8, Int4, Quantisation

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max
#: Elements of a weight that are processed at once, in float32.
_PIECE = 1 << 22

#: Full name → tensor, for the parts of one weight.
Stored = dict[str, torch.Tensor]


def require_library(scheme: Int4 | Fp8) -> None:
    """Check that the library for a format is installed.

    Raises:
        UserError: INT4 needs compressed-tensors, which is not installed.
    """
    if isinstance(scheme, Int4) and importlib.util.find_spec("compressed_tensors") is None:
        raise UserError(
            "INT4 weights need the package compressed-tensors",
            why="it packs and unpacks them",
            fix="pip install 'slime-rl[quantised]'",
        )


def quantise(module: str, weight: torch.Tensor, scheme: Int4 | Fp8) -> Stored:
    """Quantise a Linear layer's weight [rows, columns] into the tensors that a model stores.

    A weight of zeros dequantises to zeros: no scale is 0.

    Raises:
        UserError: its shape does not fit the format, or compressed-tensors is needed and not
            installed.
    """
    _check(module, weight, scheme)
    return {f"{module}.{leaf}": part for leaf, part in _parts(weight, scheme).items()}


def quantise_run(run: ExpertRun, weight: torch.Tensor, scheme: Int4 | Fp8) -> Stored:
    """Quantise stacked experts [experts, rows, columns]; return runs of the stored tensors.

    Raises:
        UserError: as `quantise`.
    """
    _check(run.expert_name(run.first).rpartition(".")[0], weight[0], scheme)
    return {run.name_of(leaf): part for leaf, part in _parts_of_stack(weight, scheme).items()}


def _check(module: str, weight: torch.Tensor, scheme: Int4 | Fp8) -> None:
    rows, columns = weight.shape
    if misfit := scheme.misfit((rows, columns)):
        raise UserError(
            f"{module} cannot be stored as {scheme}",
            why=misfit,
            fix=f"ignore it: --ignore {module}",
        )
    require_library(scheme)


def _parts_of_stack(weight: torch.Tensor, scheme: Int4 | Fp8) -> Stored:
    """Quantise stacked weights in one call if rows share no scale across weights, else one by
    one."""
    count, rows, _ = weight.shape
    together = _rows_together(scheme)
    if together and rows % together == 0:
        parts = _parts(weight.flatten(0, 1), scheme)
        size = parts.pop("weight_shape", None)
        stacked = {leaf: part.unflatten(0, (count, -1)) for leaf, part in parts.items()}
        if size is not None:
            stacked["weight_shape"] = torch.stack([size[0] // count, size[1]]).expand(count, 2)
        return stacked
    kernels = _kernels(weight, scheme)
    if kernels is not None and not together:
        return kernels.quantise(weight, scheme)
    apart = [_parts(one, scheme) for one in weight]
    return {leaf: torch.stack([parts[leaf] for parts in apart]) for leaf in apart[0]}


def _rows_together(scheme: Int4 | Fp8) -> int:
    """Return the number of rows that share a scale, or a word of zero points; 0 for all rows."""
    if isinstance(scheme, Fp8):
        return scheme.block[0]
    return 1 if scheme.symmetric else NIBBLES


def _parts(weight: torch.Tensor, scheme: Int4 | Fp8) -> Stored:
    kernels = _kernels(weight, scheme)
    if kernels is not None:
        return kernels.quantise(weight, scheme)
    return _int4(weight, scheme) if isinstance(scheme, Int4) else _fp8(weight, scheme)


def _kernels(weight: torch.Tensor, scheme: Int4 | Fp8) -> Any:
    """Return the module of GPU kernels; None without a GPU, or if they do not support the
    format."""
    if not weight.is_cuda:
        return None
    # imports triton, which other builds of torch lack
    from slime.engines.wire import quantised_kernels

    return quantised_kernels if quantised_kernels.takes(scheme) else None


def dequantise(
    module: str, stored: Mapping[str, torch.Tensor], scheme: Int4 | Fp8, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [rows, columns] in ``dtype`` that engines compute with.

    Raises:
        KeyError: ``stored`` lacks a part of the weight.
        UserError: compressed-tensors is needed and not installed.
    """
    if isinstance(scheme, Fp8):
        return _from_fp8(
            stored[f"{module}.weight"], stored[f"{module}.{scheme.scale}"], scheme, dtype
        )
    parts = {name: stored[f"{module}.{name}"] for name in scheme.parts((1, 1), "")}
    return _from_int4(parts, scheme, dtype)


def as_held(stored: Stored, scheme: Int4 | Fp8, dtype: torch.dtype) -> Stored:
    """Cast the parts of a weight as an engine of ``dtype`` stores them: INT4 scales have the
    model's dtype; other parts have fixed dtypes."""
    own = {leaf for leaf, (fixed, _) in scheme.parts((1, 1), "").items() if fixed}
    return {
        name: tensor if name.rpartition(".")[2] in own else tensor.to(dtype)
        for name, tensor in stored.items()
    }


def as_engines_compute(
    weight: torch.Tensor, scheme: Int4 | Fp8, dtype: torch.dtype
) -> torch.Tensor:
    """Quantise and dequantise a Linear layer's weight [rows, columns], as a push to engines of
    ``dtype`` does; the result has the dtype of ``weight``.

    Raises:
        UserError: its shape does not fit the format, or compressed-tensors is needed and not
            installed.
    """
    stored = quantise("weight", weight.detach().to(dtype), scheme)
    return dequantise("weight", stored, scheme, dtype).to(weight.dtype)


def config_of(quantisation: Quantisation) -> dict[str, Any]:
    """Make ``quantization_config`` for config.json, as engines read it.

    Raises:
        UserError: compressed-tensors is needed and not installed.
    """
    scheme = quantisation.scheme
    ignore = list(quantisation.ignore)
    if isinstance(scheme, Int4):
        require_library(scheme)
        import compressed_tensors
        from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

        config = QuantizationConfig(
            config_groups={"group_0": _scheme(scheme)},
            format="pack-quantized",
            quantization_status=QuantizationStatus.COMPRESSED,
            ignore=ignore,
        )
        return {"version": compressed_tensors.__version__, **config.model_dump(mode="json")}
    assert quantisation.method == "fp8"  # compressed-tensors' FP8 is only read, never written
    told: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    told |= {"weight_block_size": list(scheme.block)} if any(scheme.block) else {}
    return {**told, "modules_to_not_convert": ignore}


def _in_rows(weight: torch.Tensor, unit: int, compute: Callable[[torch.Tensor], Stored]) -> Stored:
    """Apply ``compute`` to pieces of rows, in multiples of ``unit``, and concatenate the
    results."""
    rows = max(1, _PIECE // (weight.shape[1] * unit)) * unit
    pieces = [compute(weight[first : first + rows]) for first in range(0, weight.shape[0], rows)]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


# -- INT4 ------------------------------------------------------------------------------------------


def _scheme(scheme: Int4) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def _int4(weight: torch.Tensor, scheme: Int4) -> Stored:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    library = _scheme(scheme)

    def compute(piece: torch.Tensor) -> Stored:
        wide = piece.float()
        low, high = wide.unflatten(-1, (-1, scheme.group_size)).aminmax(dim=-1)
        scale, zero = calculate_qparams(low, high, library.weights)
        zero = zero.masked_fill((low == 0) & (high == 0), 0)  # the library divides 0 by 0 there
        scale = scale.to(weight.dtype)  # divide by the stored, rounded scale
        # it may underflow in float16
        scale = scale.masked_fill(scale == 0, torch.finfo(scale.dtype).tiny)
        state = {"weight": wide, "weight_scale": scale.float(), "weight_zero_point": zero}
        packed = PackedQuantizationCompressor.compress(state, library)
        del packed["weight_shape"]
        return {**packed, "weight_scale": scale}

    parts = _in_rows(weight, NIBBLES, compute)  # zero points are packed by rows
    return {**parts, "weight_shape": torch.tensor(weight.shape)}


def _from_int4(parts: Stored, scheme: Int4, dtype: torch.dtype) -> torch.Tensor:
    require_library(scheme)
    from compressed_tensors.compressors import PackedQuantizationCompressor

    zero = parts.get("weight_zero_point")
    # the library views its transpose as bytes, which needs a last stride of 1
    if zero is not None and len(zero) == 1:
        parts["weight_zero_point"] = zero.as_strided(zero.shape, (1, 1))
    weight: torch.Tensor = PackedQuantizationCompressor.decompress(parts, _scheme(scheme))["weight"]
    return weight.to(dtype)


# -- FP8 -------------------------------------------------------------------------------------------


def _fp8(weight: torch.Tensor, scheme: Fp8) -> Stored:
    height = scheme.block[0] or len(weight)
    width = scheme.block[1] or weight.shape[1]

    def scales(piece: torch.Tensor) -> torch.Tensor:
        most = _tiles(piece.float(), min(height, len(piece)), width).abs().amax(dim=(1, 3))
        # a tensor: for a Python number, GPUs multiply by its inverse
        return most / torch.full_like(most, _LARGEST_FP8)

    def rounded(piece: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        tiles = _tiles(piece.float(), min(height, len(piece)), width) / scale[:, None, :, None]
        tiles = tiles.clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn)
        return tiles.flatten(2).flatten(0, 1)[: len(piece), : piece.shape[1]]

    def compute(piece: torch.Tensor) -> Stored:
        scale = _never_zero(scales(piece))
        return {"weight": rounded(piece, scale), scheme.scale: scale}

    if scheme.block[0]:
        return _in_rows(weight, height, compute)
    pieces = _in_rows(weight, 1, lambda piece: {"scale": scales(piece)})["scale"]
    scale = _never_zero(pieces.amax(dim=0, keepdim=True))
    stored = _in_rows(weight, 1, lambda piece: {"weight": rounded(piece, scale)})
    return {**stored, scheme.scale: scale if scheme.block[1] else scale.reshape(1)}


def _tiles(weight: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Split a weight into [row blocks, height, column blocks, width], padded with zeros."""
    rows, columns = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    return filled.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def _never_zero(scale: torch.Tensor) -> torch.Tensor:
    """Give a block of zeros compressed-tensors' smallest scale: division by 0 would give NaN."""
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def _from_fp8(
    weight: torch.Tensor, scale: torch.Tensor, scheme: Fp8, dtype: torch.dtype
) -> torch.Tensor:
    height = scheme.block[0] or len(weight)
    width = scheme.block[1] or weight.shape[1]
    scale = scale.float().reshape(scheme.blocks((len(weight), weight.shape[1])))
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for number, row in enumerate(scale):
        rows = slice(number * height, (number + 1) * height)
        result[rows] = weight[rows].float() * row.repeat_interleave(width)[: weight.shape[1]]
    return result
