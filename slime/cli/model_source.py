"""The model that a path means: a Hugging Face directory, a run folder, a --save directory, or a
name on the hub."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime import deadlines
from slime.checkpoints.run_models import (
    RunModel,
    checkpoint_model,
    has_weights,
    is_run_folder,
    newest_model,
)
from slime.cli.arguments import Arguments
from slime.errors import UserError
from slime.files import entries_of, left_behind
from slime.hub import fetch_model, is_hub_name
from slime.processes.host import python_module

#: Where a Megatron checkpoint keeps what it was converted to: it goes with the checkpoint.
CONVERTED = "hf"
_BESIDE = ".hf-of-"


def add_model_arguments(parser: Arguments) -> None:
    """Declare ``path`` and ``--hf-checkpoint``, the arguments of `model_directory`."""
    parser.add_argument(
        "path",
        help="a run folder, a --save directory, a Hugging Face directory, or org/name on the hub",
    )
    parser.add_argument(
        "--hf-checkpoint",
        help="config and tokenizer, for a --save directory outside of its run folder",
    )


def model_directory(path: str, hf_checkpoint: str | None = None) -> Path:
    """The Hugging Face directory that ``path`` means.

    Of a run folder the newest model; a Megatron checkpoint is converted once, into ``hf/`` inside
    it, which appears there as a whole: the run may go on meanwhile.

    Args:
        path: a Hugging Face directory, outputs/<run>, a --save directory, one iteration of it, or
            org/name on the hub.
        hf_checkpoint: config and tokenizer of a Megatron checkpoint that lies outside of its run
            folder.
    Raises:
        UserError: there is no model; says what is there instead.
    """
    folder = Path(path)
    if is_hub_name(path):
        return fetch_model(path)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"{path} {what}",
            why=f"the working directory is {Path.cwd()}",
            fix="pass a run folder (outputs/<run>), a --save directory, or a Hugging Face "
            "directory",
        )
    if has_weights(folder):
        return folder
    model = newest_model(folder) if is_run_folder(folder) else checkpoint_model(folder)
    if model is None:
        listed = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
        raise UserError(
            f"{path} holds no model",
            why="no *.safetensors with a config.json, no run and no checkpoint; it holds: "
            f"{listed or 'nothing'}",
            fix="pass a run folder (outputs/<run>), a --save directory, or a Hugging Face "
            "directory",
        )
    return model.path if model.is_hf else _converted(model, hf_checkpoint)


def model_name(path: str) -> str:
    """What people call the model: the run's name, or that of its directory."""
    return Path(path).name if is_hub_name(path) else Path(path).resolve().name


def _converted(model: RunModel, hf_checkpoint: str | None) -> Path:
    target = model.path / CONVERTED
    if has_weights(target):
        return target
    base = model_directory(hf_checkpoint) if hf_checkpoint else model.base
    if base is None or not base.is_dir():
        why = (
            f"its run began with {base}, which is not here"
            if base
            else "it does not say which model it is of"
        )
        raise UserError(
            f"{model.path} is a Megatron checkpoint without config.json and tokenizer",
            why=why,
            fix="pass --hf-checkpoint with the Hugging Face directory that the run began with",
        )
    print(f"converting {model.path} to Hugging Face's format, once …", file=sys.stderr)
    with _place_beside(model.path) as folder:
        made = folder / CONVERTED
        command = [
            *python_module("slime"),
            "convert",
            "megatron-to-hf",
            "--load_path",
            str(model.path),
        ]
        command += ["--hf_model_path", str(base), "--save_path", str(made)]
        # in a process of its own, so that the trainer's half of the program is not in the memory of
        # what is to serve
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadlines.MODEL_SOURCE_CONVERT,
        )
        if done.returncode:
            advice = (
                ""
                if model.path.is_dir()
                else "the run has removed this checkpoint meanwhile: try again; or "
            )
            words = f"--load_path {model.path} --hf_model_path {base} --save_path DIR"
            raise UserError(
                f"{model.path} could not be converted",
                why="\n  ".join(done.stdout.strip().splitlines()[-6:]),
                fix=f"{advice}slime convert megatron-to-hf {words}",
            )
        try:
            made.rename(target)
        except OSError:  # the run has removed the checkpoint, or another command was faster
            if has_weights(target):
                return target
            kept = Path(tempfile.mkdtemp(prefix="slime-model-"))
            atexit.register(shutil.rmtree, kept, ignore_errors=True)
            return Path(shutil.move(made, kept / CONVERTED))
    return target


@contextmanager
def _place_beside(checkpoint: Path) -> Iterator[Path]:
    """A folder of this process's own on the file system of a checkpoint, whose run may go on and
    remove it. Those of processes that have died are removed; where it cannot be made, it is a
    temporary one."""
    root = checkpoint.parent
    for path in entries_of(root):
        if path.name.startswith(_BESIDE):
            with left_behind(path) as is_free:
                if is_free:
                    shutil.rmtree(path, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_BESIDE, dir=root))
    except OSError:  # somebody else's run
        folder = Path(tempfile.mkdtemp(prefix="slime-model-"))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
