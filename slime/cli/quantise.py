"""The commands of `slime convert` that quantise Hugging Face directories, and the way back.

slime convert hf-to-int4 --hf_model_path GLM-4.5-Air --save_path GLM-4.5-Air-INT4 --group_size 32
slime convert hf-to-fp8 --hf_model_path Qwen3-4B --save_path Qwen3-4B-FP8 --block_size 128 128
slime convert hf-to-mxfp4 --hf_model_path exports/30 --save_path gpt-oss-tuned
slime convert quantised-to-hf --hf_model_path DeepSeek-V3 --save_path DeepSeek-V3-bf16
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.arguments import at_least_one
from slime.errors import UserError

if TYPE_CHECKING:
    from slime.models.quantised import Fp8, Int4, Method

_DTYPES = ("bfloat16", "float16", "float32")


def add_commands(
    add: Callable[[str, str, Callable[[argparse.Namespace], str]], Callable[..., None]],
) -> None:
    """Declare the commands with `slime convert`'s function ``add``."""
    flag = add(
        "hf-to-int4",
        "INT4 weights (W4A16, compressed-tensors) from a Hugging Face directory",
        hf_to_int4,
    )
    flag("group_size", "neighbours in a row that share a scale", type=at_least_one, default=32)
    flag("asymmetric", "with a zero point for each group", action="store_true")
    _shared(flag)
    flag = add("hf-to-fp8", "FP8 weights (e4m3) from a Hugging Face directory", hf_to_fp8)
    kind = {"type": at_least_one, "nargs": 2, "metavar": ("ROWS", "COLUMNS"), "default": [128, 128]}
    flag("block_size", "entries of a weight that share a scale; default: 128 128", **kind)
    flag("per_tensor", "one scale for each weight instead", action="store_true")
    _shared(flag)
    flag = add(
        "hf-to-mxfp4",
        "gpt-oss with its experts in MXFP4, as it is published, from a Hugging Face directory",
        hf_to_mxfp4,
    )
    _shared(flag, has_rules=False)
    flag = add(
        "quantised-to-hf",
        "plain weights from a Hugging Face directory in FP8, INT4 or MXFP4",
        quantised_to_hf,
    )
    flag("dtype", "of the weights", choices=_DTYPES, default="bfloat16")
    _shared(flag, has_rules=False)


def _shared(flag: Callable[..., None], has_rules: bool = True) -> None:
    flag("hf_model_path", "Hugging Face directory")
    flag("save_path", "where the model goes; a conversion that was cut short goes on there")
    if has_rules:
        rules = (
            "Linear layers that stay as they are: names of modules, or 're:EXPRESSION'; default: "
            "the recommended list"
        )
        flag("ignore", rules, nargs="+", metavar="RULE")
    flag("model_name", "model family, when config.json does not tell")
    flag("force", "write over what is there", action="store_true")


def hf_to_int4(options: argparse.Namespace) -> str:
    """Quantise to INT4 in compressed-tensors' format.

    Raises:
        UserError: as `slime.checkpoints.quantised_files.quantise_directory`; compressed-tensors is
            not installed.
    """
    from slime.engines.wire.quantised import require_library
    from slime.models.quantised import Int4

    scheme = Int4(options.group_size, not options.asymmetric)
    require_library(scheme)
    return _quantised(options, "compressed-tensors", scheme)


def hf_to_fp8(options: argparse.Namespace) -> str:
    """Quantise to FP8 in the format of published models (``quant_method`` fp8).

    Raises:
        UserError: as `slime.checkpoints.quantised_files.quantise_directory`.
    """
    from slime.models.quantised import Fp8

    rows, columns = options.block_size
    return _quantised(
        options, "fp8", Fp8((0, 0), "weight_scale") if options.per_tensor else Fp8((rows, columns))
    )


def hf_to_mxfp4(options: argparse.Namespace) -> str:
    """Store stacked expert weights in MXFP4.

    Raises:
        UserError: as `slime.checkpoints.quantised_files.store_in_mxfp4`.
    """
    from slime.checkpoints.quantised_files import store_in_mxfp4

    _check_paths(options)
    return str(store_in_mxfp4(options.hf_model_path, options.save_path, options.model_name))


def quantised_to_hf(options: argparse.Namespace) -> str:
    """Dequantise the weights to the values that engines compute with.

    Raises:
        UserError: as `slime.checkpoints.quantised_files.dequantise_directory`.
    """
    from slime.checkpoints.quantised_files import dequantise_directory
    from slime.engines.wire.buckets import dtype_of

    _check_paths(options)
    done = dequantise_directory(
        options.hf_model_path, options.save_path, dtype_of(options.dtype), options.model_name
    )
    return str(done)


def _quantised(options: argparse.Namespace, method: Method, scheme: Int4 | Fp8) -> str:
    from slime.checkpoints.quantised_files import plain_weights, quantise_directory
    from slime.models.ignore_list import recommended
    from slime.models.quantised import Quantisation

    _check_paths(options)
    rules = tuple(options.ignore or ())
    if options.ignore is None:
        _, weights = plain_weights(options.hf_model_path, options.model_name)
        rules = recommended(weights, fp8=method == "fp8")
    quantisation = Quantisation(method, scheme, rules)
    done = quantise_directory(
        options.hf_model_path, options.save_path, quantisation, options.model_name
    )
    return f"ignored: {' '.join(rules)}\n{done}"


def _check_paths(options: argparse.Namespace) -> None:
    require_directory("--hf_model_path", options.hf_model_path)
    refuse_existing(options.save_path, options.force)


def require_directory(flag: str, path: Path) -> None:
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise UserError(
            f"{flag} {path} {what}",
            why=f"the working directory is {Path.cwd()}",
            fix="correct the path",
        )


def refuse_existing(path: Path, force: bool) -> None:
    if path.exists() and not force and (path.is_file() or any(path.iterdir())):
        raise UserError(
            f"{path} exists",
            why="what is written replaces it as a whole",
            fix="pass another --save_path, or --force",
        )
