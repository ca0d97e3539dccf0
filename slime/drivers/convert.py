"""`slime convert`: checkpoints between Hugging Face and Megatron, and GGUF to Hugging Face.

    slime convert hf-to-megatron --hf_model_path Qwen3-0.6B --save_path ckpt
    slime convert megatron-to-hf --load_path ckpt --hf_model_path Qwen3-0.6B --save_path exported
    slime convert gguf-to-hf --gguf_path model.gguf --save_path model

Training needs none of these: it reads Hugging Face directories itself. One process, on the GPU if there is one; the
checkpoints load at any parallel layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime.errors import UserError

DTYPES = ("bfloat16", "float16", "float32")


def main(argv: list[str]) -> None:
    options = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], str] = options.command
    print(command(options), file=sys.stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="slime convert", description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="{hf-to-megatron,megatron-to-hf,gguf-to-hf}")

    def add(name: str, summary: str, command: Callable[[argparse.Namespace], str]) -> Callable[..., None]:
        sub = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(command=command)

        def flag(dest: str, meaning: str, **options: Any) -> None:
            sub.add_argument(f"--{dest}", f"--{dest.replace('_', '-')}", dest=dest, help=meaning, **options)

        return flag

    flag = add("hf-to-megatron", "a Megatron checkpoint (torch_dist) from a Hugging Face directory", hf_to_megatron)
    flag("hf_model_path", "Hugging Face directory", required=True, type=Path)
    flag("save_path", "where the checkpoint goes", required=True, type=Path)
    flag("model_name", "model family, when config.json does not tell")
    flag("dtype", "of the saved weights; default: as in config.json", choices=DTYPES)

    flag = add("megatron-to-hf", "a Hugging Face directory from a Megatron checkpoint", megatron_to_hf)
    flag("load_path", "directory with latest_checkpointed_iteration.txt", required=True, type=Path)
    flag("hf_model_path", "Hugging Face directory of the same model: config and tokenizer", required=True, type=Path)
    flag("save_path", "where the export goes", required=True, type=Path)
    flag("ckpt_step", "iteration; default: the latest", type=int)
    flag("model_name", "model family, when config.json does not tell")
    flag("dtype", "of the exported weights; default: as in config.json", choices=DTYPES)

    flag = add("gguf-to-hf", "a plain Hugging Face directory from a GGUF file", gguf_to_hf)
    flag("gguf_path", "the file", required=True, type=Path)
    flag("save_path", "where the model goes", required=True, type=Path)
    flag("dtype", "of the weights", choices=DTYPES, default="bfloat16")
    return parser


def hf_to_megatron(options: argparse.Namespace) -> str:
    """Verify the shards, load them into a model, save its weights as iteration "release"."""
    from slime.weights.hf_files import HfReader

    HfReader(options.hf_model_path)  # says what is wrong with the directory before anything heavy starts
    with _model(options) as chunks:
        from slime.weights import checkpoint
        from slime.weights.hf_io import load_hf

        report = load_hf(chunks, options.hf_model_path, model_name=options.model_name)
        state = checkpoint.TrainerState(chunks)
        path = checkpoint.save(options.save_path, "release", state, save_rng=False)
    return f"{report}\nwrote {path}; train from it with --load {options.save_path}"


def megatron_to_hf(options: argparse.Namespace) -> str:
    from slime.config import make_config
    from slime.weights.load_plan import resolve_load

    step = {"ckpt_step": options.ckpt_step} if options.ckpt_step is not None else {}
    plan = resolve_load(make_config(load=str(options.load_path), finetune=True, **step))
    if plan.kind != "megatron":
        raise UserError(f"{options.load_path} is a Hugging Face directory already", fix="pass a Megatron checkpoint")
    with _model(options) as chunks:
        import torch

        from slime.weights import checkpoint
        from slime.weights.hf_io import save_hf

        checkpoint.load(plan, checkpoint.TrainerState(chunks))
        dtype = getattr(torch, _dtype(options))
        source = options.hf_model_path
        path = save_hf(
            chunks, source, options.save_path, assets_from=source, dtype=dtype, model_name=options.model_name
        )
    return f"wrote {path} from {plan.path}"


def gguf_to_hf(options: argparse.Namespace) -> str:
    from slime.weights import gguf

    return f"wrote {gguf.gguf_to_hf(options.gguf_path, options.save_path, options.dtype)}"


def _dtype(options: argparse.Namespace) -> str:
    """The wanted dtype, or the one that config.json gives; bfloat16 when it gives none."""
    from slime.weights.convert import read_hf_config

    config = read_hf_config(options.hf_model_path)
    said = str(options.dtype or config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return said if said in DTYPES else "bfloat16"


@contextmanager
def _model(options: argparse.Namespace) -> Iterator[list[Any]]:
    """The model, without weights, in a process group of one."""
    from slime.cluster.ports import reserve_port
    from slime.config import make_config
    from slime.train.megatron import device
    from slime.weights.convert import family_of

    device.install()  # before anything imports megatron
    from slime.train.megatron.model import build_model_chunks
    from slime.train.megatron.parallel import RankInfo, initialise, shut_down

    precision = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[_dtype(options)]
    flags: dict[str, Any] = {"hf_checkpoint": str(options.hf_model_path), precision: True}
    config = make_config(**flags)
    spec = family_of(options.hf_model_path, options.model_name).model_spec(options.hf_model_path)
    reservation = reserve_port("127.0.0.1")
    try:
        initialise(RankInfo(0, 1, 0, "127.0.0.1", reservation.port), config)
        yield list(build_model_chunks(spec, config))
    finally:
        shut_down()
        reservation.release()
