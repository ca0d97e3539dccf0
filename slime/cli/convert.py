"""`slime convert`: checkpoints between Hugging Face and Megatron, from GGUF, and quantised ones.

    slime convert hf-to-megatron --hf_model_path Qwen3-0.6B --save_path ckpt
    slime convert megatron-to-hf --load_path ckpt --hf_model_path Qwen3-0.6B --save_path exported
    slime convert gguf-to-hf --gguf_path model.gguf --save_path model
    slime convert hf-to-int4 --hf_model_path GLM-4.5-Air --save_path GLM-INT4 --group_size 32
    slime convert hf-to-fp8 --hf_model_path Qwen3-4B --save_path Qwen3-FP8 --block_size 128 128
    slime convert quantised-to-hf --hf_model_path DeepSeek-V3 --save_path DeepSeek-V3-bf16

Training needs none of these: it reads Hugging Face directories itself. One process, on the GPU if
there is one; under torchrun a large model is spread over the ranks. A written checkpoint loads at
any parallel layout.

Flags that describe the model (the MODEL_ARGS of launch scripts: --swiglu --num-layers 36 …) are
accepted too. As in training, config.json defines the model, and a flag that contradicts it is an
error.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.cli import quantise
from slime.cli.arguments import Arguments
from slime.cli.quantise import refuse_existing, require_directory
from slime.errors import UserError, contents_of
from slime.observe.run_folder import check_no_run_writes, lock_folder

if TYPE_CHECKING:
    from slime.checkpoints.load_plan import LoadPlan
    from slime.trainer.megatron.parallel import RankInfo

#: dtype → the trainer's precision flag.
PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
#: Other spellings, which the tools of slime and Megatron-LM use.
_ALIASES = {
    "hf_model_path": ("--hf-checkpoint", "--origin-hf-dir"),
    "load_path": ("--load", "--input-dir"),
    "save_path": ("--save", "--output-dir"),
    "force": ("-f",),
}
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)


def main(argv: list[str]) -> None:
    options, rest = _parser().parse_known_args(argv)
    options.described = _described(options, rest)
    command: Callable[[argparse.Namespace], str] = options.command
    if command is not hf_to_megatron:  # hf_to_megatron takes the lock itself
        check_no_run_writes(options.save_path, "--save_path")
    message = command(options)
    if int(os.environ.get("RANK", "0")) == 0:
        print(message)


def _parser() -> Arguments:
    parser = Arguments("slime convert", __doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, summary: str, command: Callable[[argparse.Namespace], str]
    ) -> Callable[..., None]:
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(command=command)

        def flag(dest: str, meaning: str, **options: Any) -> None:
            spellings = dict.fromkeys(
                (f"--{dest}", f"--{dest.replace('_', '-')}", *_ALIASES.get(dest, ()))
            )
            if dest.endswith("_path"):
                options = {"required": True, "type": Path}
            sub.add_argument(*spellings, dest=dest, help=meaning, **options)

        return flag

    def layout(flag: Callable[..., None]) -> None:
        flag("model_name", "model family, when config.json does not tell")
        flag("force", "write over what is there", action="store_true")
        for size in _SIZES:
            flag(size, "under torchrun; default: one pipeline stage per rank", type=int)

    flag = add(
        "hf-to-megatron",
        "a Megatron checkpoint (torch_dist) from a Hugging Face directory",
        hf_to_megatron,
    )
    flag("hf_model_path", "Hugging Face directory")
    flag("save_path", "where the checkpoint goes")
    flag("dtype", "of the saved weights; default: as in config.json", choices=tuple(PRECISIONS))
    layout(flag)

    flag = add(
        "megatron-to-hf", "a Hugging Face directory from a Megatron checkpoint", megatron_to_hf
    )
    flag("load_path", "directory with latest_checkpointed_iteration.txt, or of one iteration")
    flag("hf_model_path", "Hugging Face directory of the same model: config and tokenizer")
    flag("save_path", "where the export goes")
    flag("ckpt_step", "iteration; default: the latest", type=int)
    flag("dtype", "of the exported weights; default: as in config.json", choices=tuple(PRECISIONS))
    layout(flag)

    flag = add("gguf-to-hf", "a plain Hugging Face directory from a GGUF file", gguf_to_hf)
    flag("gguf_path", "the file")
    flag("save_path", "where the model goes")
    flag("dtype", "of the weights", choices=tuple(PRECISIONS), default="bfloat16")
    quantise.add_commands(add)
    return parser


def _described(options: argparse.Namespace, words: list[str]) -> dict[str, Any]:
    """Parse the flags that describe the model and check them against its config.json. Returns
    their values by name with underscores.

    Raises:
        UserError: a flag is unknown, does not describe the model, or contradicts
            config.json.
    """
    from slime.config import make_config
    from slime.config.flags import all_flags
    from slime.config.parse import read_argv
    from slime.models import family_of
    from slime.models.model_flags import check_model_flags

    given = read_argv(words).values
    specs = all_flags()
    takes_them = options.command in (hf_to_megatron, megatron_to_hf)
    given.pop("spec", None)  # no layer spec changes the tensors of a family
    foreign = [
        specs[dest].option
        for dest in given
        if not {*specs[dest].sections} & {"model", "transformer"}
    ]
    if foreign or (given and not takes_them):
        raise UserError(
            "slime convert does not know "
            f"{', '.join(foreign or [specs[dest].option for dest in given])}",
            why="beside its own flags (--help) it takes those that describe a model, such as "
            "--num-layers, and only where Megatron is at one end",
            fix="leave it out",
        )
    if given:
        require_directory("--hf_model_path", options.hf_model_path)
        spec = family_of(options.hf_model_path, options.model_name).model_spec(
            options.hf_model_path
        )
        check_model_flags(make_config(**given).megatron, spec)
    return given


def hf_to_megatron(options: argparse.Namespace) -> str:
    """Verify the shards, load them into a model, save its weights as iteration "release".

    Raises:
        UserError: a shard is missing or damaged, the index names a missing tensor, or
            ``save_path`` holds checkpoints.
    """
    from slime.checkpoints.directory import saved_iterations
    from slime.checkpoints.hf_files import HfReader
    from slime.models import family_of

    require_directory("--hf_model_path", options.hf_model_path)
    family = family_of(options.hf_model_path, options.model_name)
    # before the slow imports and the model
    HfReader(options.hf_model_path).verify(family, family.model_spec(options.hf_model_path))
    there = saved_iterations(options.save_path)
    if there and not options.force:
        raise UserError(
            f"{options.save_path} holds checkpoints of a run: {', '.join(map(str, there[-8:]))}",
            why="the run would start again from the converted weights when it is resumed",
            fix="pass another --save_path, or --force",
        )
    with _sole_writer(options.save_path), _model(options) as chunks:
        from slime.checkpoints.hf_io import load_hf
        from slime.checkpoints.saving import CheckpointWriter
        from slime.checkpoints.trainer_state import TrainerState

        report = load_hf(chunks, options.hf_model_path, model_name=options.model_name)
        path = CheckpointWriter().save(
            options.save_path, "release", TrainerState(chunks), save_rng=False
        )
    return f"{report}\nwrote {path}; train from it with --load {options.save_path}"


def megatron_to_hf(options: argparse.Namespace) -> str:
    """Load a checkpoint's weights and write them in Hugging Face's format.

    Raises:
        UserError: there is no checkpoint, one of its files is missing or damaged, the config is
            another model's, or ``save_path`` exists.
    """
    require_directory("--hf_model_path", options.hf_model_path)
    plan = _source(options)
    refuse_existing(options.save_path, options.force)
    with _model(options) as chunks:
        from slime.checkpoints.loading import load
        from slime.checkpoints.trainer_state import TrainerState
        from slime.weights.source import save_hf

        loaded = load(plan, TrainerState(chunks))
        # the model has the requested dtype, except for tensors that the family keeps in float32
        source = options.hf_model_path
        path = save_hf(
            chunks, source, options.save_path, assets_from=source, model_name=options.model_name
        )
    return f"{loaded.report}\nwrote {path}"


def gguf_to_hf(options: argparse.Namespace) -> str:
    from slime.checkpoints import gguf

    return f"wrote {gguf.gguf_to_hf(options.gguf_path, options.save_path, options.dtype)}"


def _source(options: argparse.Namespace) -> LoadPlan:
    """Choose the checkpoint to export and check that it is complete: the directory itself, or
    iteration --ckpt-step (default: the latest) of a run."""
    from slime.checkpoints.directory import check_complete, read_tracker, saved_iterations
    from slime.checkpoints.load_plan import LoadPlan, is_hf_dir, resolve_load
    from slime.config import make_config

    path: Path = options.load_path
    require_directory("--load_path", path)
    if (path / ".metadata").is_file():
        check_complete(path)
        return LoadPlan(kind="megatron", path=path, note=f"weights from {path}")
    if read_tracker(path) is None and not saved_iterations(path):
        if is_hf_dir(path):
            raise UserError(
                f"{path} is a Hugging Face directory already", fix="pass a Megatron checkpoint"
            )
        raise UserError(
            f"--load_path {path} holds no Megatron checkpoint",
            why="neither latest_checkpointed_iteration.txt nor .metadata; it holds: "
            f"{contents_of(path)}",
            fix="pass the --save directory of a run, or the directory of one iteration",
        )
    step = {"ckpt_step": options.ckpt_step} if options.ckpt_step is not None else {}
    return resolve_load(make_config(load=str(path), finetune=True, **step))


@contextmanager
def _sole_writer(save_path: Path) -> Iterator[None]:
    """Lock a --save directory, on rank 0, so that no running job writes there meanwhile.

    Raises:
        UserError: a live process holds the lock.
    """
    with lock_folder(save_path) if os.environ.get("RANK", "0") == "0" else nullcontext():
        yield


def _dtype(options: argparse.Namespace) -> str:
    """Return the requested dtype, else that of config.json, else bfloat16."""
    from slime.models import read_hf_config
    from slime.models.spec import named_dtype

    name = options.dtype or named_dtype(read_hf_config(options.hf_model_path))
    return name if name in PRECISIONS else "bfloat16"


# -- ranks -----------------------------------------------------------------------------------------


@contextmanager
def _model(options: argparse.Namespace) -> Iterator[list[Any]]:
    """Build the model without weights, sharded over torchrun's ranks or in a process group of
    one rank."""
    from slime.config import make_config
    from slime.models import family_of
    from slime.models.layout_rules import check_layout
    from slime.trainer.megatron import device

    device.install()  # before anything imports megatron
    from slime.trainer.megatron.model import build_model_chunks
    from slime.trainer.megatron.parallel import initialise, shut_down

    spec = family_of(options.hf_model_path, options.model_name).model_spec(options.hf_model_path)
    with _place() as info:
        flags = _layout(options, info.world_size, spec.num_layers)
        flags[PRECISIONS[_dtype(options)]] = True
        config = make_config(hf_checkpoint=str(options.hf_model_path), **flags, **options.described)
        spec = spec.padded(config.megatron.tensor_model_parallel_size)
        check_layout(spec, config)
        try:
            initialise(info, config)
            yield list(build_model_chunks(spec, config))
        finally:
            shut_down()


@contextmanager
def _place() -> Iterator[RankInfo]:
    from slime.processes.host import reserve_port
    from slime.trainer.megatron.parallel import RankInfo

    given = os.environ
    if "WORLD_SIZE" in given:
        rank = int(given["RANK"])
        local = int(given.get("LOCAL_RANK", given["RANK"]))
        yield RankInfo(
            rank, int(given["WORLD_SIZE"]), local, given["MASTER_ADDR"], int(given["MASTER_PORT"])
        )
        return
    reservation = reserve_port("127.0.0.1")
    try:
        yield RankInfo(0, 1, 0, "127.0.0.1", reservation.port)
    finally:
        reservation.release()


def _layout(options: argparse.Namespace, world_size: int, num_layers: int) -> dict[str, Any]:
    """Return the given parallel sizes, else one pipeline stage per rank.

    Raises:
        UserError: the number of layers is not divisible by the number of ranks.
    """
    given = {size: vars(options)[size] for size in _SIZES if vars(options)[size] is not None}
    if not given and num_layers % world_size:
        raise UserError(
            f"{num_layers} layers cannot be spread over {world_size} ranks",
            why="without further flags each rank takes an equal number of layers",
            fix=f"start a divisor of {num_layers} ranks, or pass --tensor-model-parallel-size",
        )
    return {
        "actor_num_gpus_per_node": world_size,
        "pipeline_model_parallel_size": world_size if not given else 1,
    } | given
