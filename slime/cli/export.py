"""`slime export`: a trained model as a directory, or as one GGUF file for llama.cpp, Ollama and LM
Studio.

slime export outputs/sums --gguf sums.gguf
ollama create sums -f <(echo FROM ./sums.gguf)          # or: llama-cli -m sums.gguf
slime export outputs/lora --to adapter                  of a run with --lora-rank: for PEFT
slime export outputs/lora --merge --to merged           base and adapter as one model
slime export outputs/lora --gguf adapter.gguf           the adapter for llama.cpp: llama-cli --lora
slime export outputs/lora --merge --gguf merged.gguf    both as one file
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import get_args

from slime.checkpoints.directory import partial_dir, publish
from slime.checkpoints.gguf_adapter import adapter_to_gguf
from slime.checkpoints.gguf_export import check_writable, hf_to_gguf
from slime.checkpoints.hf_files import check_export, copy_named_templates
from slime.checkpoints.merging import merge_adapter, trained_beside
from slime.checkpoints.peft_files import ExpertLayout, read_adapter, rewrite_adapter
from slime.checkpoints.run_models import bases
from slime.cli.arguments import Arguments
from slime.cli.model_source import ChosenModel, add_model_arguments, chosen_model, model_name
from slime.cli.push import card_of
from slime.errors import UserError
from slime.files import write_atomically
from slime.models import family_of
from slime.observe.run_folder import check_no_run_writes


def main(argv: list[str]) -> int:
    """Write the directory, the GGUF file or both. Returns the exit status."""
    flags = _parser().parse_args(argv)
    given = [flag for flag in ("to", "gguf") if getattr(flags, flag)]
    if not given:
        raise UserError(
            "slime export needs to know what to write", fix="pass --to DIR or --gguf FILE"
        )
    for flag in given:
        check_no_run_writes(Path(getattr(flags, flag)), f"--{flag}")
    chosen = chosen_model(flags.path, flags.hf_checkpoint)
    if flags.merge and chosen.adapter is None:
        raise UserError(
            f"--merge: {flags.path} is a whole model",
            why=f"{chosen.directory} has no adapter",
            fix="leave --merge out",
        )
    _refuse_idle(flags, is_adapter=chosen.adapter is not None and not flags.merge)
    if flags.to:
        _to_directory(chosen, flags)
    if flags.gguf:
        _to_gguf(chosen, flags)
    return 0


def _refuse_idle(flags: argparse.Namespace, *, is_adapter: bool) -> None:
    """Refuse flags that have no effect on the output."""
    for flag, acts, what in (
        ("experts", flags.to and is_adapter, "--to with an adapter"),
        ("dtype", flags.gguf, "--gguf"),
        ("pre_tokenizer", flags.gguf and not is_adapter, "--gguf with a whole model"),
    ):
        if getattr(flags, flag) is not None and not acts:
            option = flag.replace("_", "-")
            raise UserError(f"--{option} has an effect only on {what}", fix=f"leave --{option} out")


def _parser() -> Arguments:
    parser = Arguments("slime export", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--to", metavar="DIR", help="the directory to write: Hugging Face's form, or PEFT's")
    add("--gguf", metavar="FILE", help="the file to write")
    add(
        "--merge",
        action="store_true",
        help="of a run with --lora-rank: the base with the adapter merged into it, computed in "
        "float32 and rounded once",
    )
    add(
        "--experts",
        choices=get_args(ExpertLayout),
        help="adapters of routed experts: one tensor each, as engines load them, or as PEFT saves "
        "them itself (default: per-expert; peft-3d if the model's checkpoints have stacks)",
    )
    add(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the matrices in a GGUF file (default: the model's)",
    )
    add(
        "--pre-tokenizer",
        help="llama.cpp's name of how text is cut into words, where it is not known here",
    )
    return parser


def _to_directory(chosen: ChosenModel, flags: argparse.Namespace) -> None:
    target = Path(flags.to)
    kept = {"model": chosen.directory} | ({"adapter": chosen.adapter} if chosen.adapter else {})
    for base in bases(Path(flags.path)):
        check_export(target, {**kept, "run's --hf-checkpoint": base})
    check_export(target, kept)
    card = card_of(flags.path, chosen)
    if chosen.adapter is None:
        _copy(chosen.directory, target)
    elif flags.merge:
        _merge(chosen, chosen.adapter, target)
    else:
        base = chosen.directory
        spec = family_of(base).describe(base)
        rewrite_adapter(target, chosen.adapter, flags.experts, spec, base=str(base))
    write_atomically(target / "README.md", card.encode())
    print(f"wrote {target} from {chosen.adapter or chosen.directory}")


def _merge(chosen: ChosenModel, adapter: Path, target: Path) -> Path:
    given = read_adapter(adapter, family_of(chosen.directory))
    whole = merge_adapter(chosen.directory, given, target)
    quantised = trained_beside(given, chosen.directory)
    if quantised:
        print(
            f"merged into {chosen.directory}, whose weights are not rounded: the adapter was "
            f"trained beside {quantised}. Beside what slime convert quantised-to-hf makes of that "
            "it computes as in training"
        )
    return whole


def _copy(source: Path, target: Path) -> None:
    unfinished = partial_dir(target)
    for entry in sorted(source.iterdir()):
        if entry.is_file():
            shutil.copyfile(entry, unfinished / entry.name)
    copy_named_templates(source, unfinished)
    publish(unfinished, target)


def _to_gguf(chosen: ChosenModel, flags: argparse.Namespace) -> None:
    name = model_name(flags.path)
    target = Path(flags.gguf)
    if chosen.adapter is None:
        source = chosen.directory
        hf_to_gguf(source, target, flags.dtype, flags.pre_tokenizer, name)
    elif flags.merge:
        source = chosen.adapter
        check_writable(chosen.directory, family_of(chosen.directory).model_spec(chosen.directory))
        beside = target.resolve().parent
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=beside, prefix=".merged-") as folder:
            whole = _merge(chosen, source, Path(folder) / "model")
            hf_to_gguf(whole, target, flags.dtype, flags.pre_tokenizer, name)
    else:
        source = chosen.adapter
        adapter = read_adapter(source, family_of(chosen.directory))
        adapter_to_gguf(chosen.directory, adapter, target, flags.dtype, name)
    print(f"wrote {target} ({target.stat().st_size / 1e6:.3g} MB) from {source}")
