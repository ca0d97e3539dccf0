"""The model that a path means: a Hugging Face directory, a run folder, a --save directory, or a name on the hub."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slime.checkpoints.run_models import RunModel, checkpoint_model, has_weights, is_run_folder, newest_model
from slime.errors import UserError
from slime.host import python_module
from slime.hub import fetch_model, is_hub_name

#: Where a Megatron checkpoint keeps what it was converted to: it goes with the checkpoint.
CONVERTED = "hf"
#: Hundreds of gigabytes on a network file system take an hour.
_CONVERT_SECONDS = 7200.0


def model_directory(path: str, hf_checkpoint: str | None = None) -> Path:
    """The Hugging Face directory that ``path`` means.

    Of a run folder the newest model; a Megatron checkpoint is converted once, into ``hf/`` inside it.

    Args:
        path: a Hugging Face directory, outputs/<run>, a --save directory, one iteration of it, or org/name on the hub.
        hf_checkpoint: config and tokenizer of a Megatron checkpoint that lies outside of its run folder.
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
            fix="pass a run folder (outputs/<run>), a --save directory, or a Hugging Face directory",
        )
    if has_weights(folder):
        return folder
    model = newest_model(folder) if is_run_folder(folder) else checkpoint_model(folder)
    if model is None:
        listed = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10])
        raise UserError(
            f"{path} holds no model",
            why=f"no *.safetensors with a config.json, no run and no checkpoint; it holds: {listed or 'nothing'}",
            fix="pass a run folder (outputs/<run>), a --save directory, or a Hugging Face directory",
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
        why = f"its run began with {base}, which is not here" if base else "it does not say which model it is of"
        raise UserError(
            f"{model.path} is a Megatron checkpoint without config.json and tokenizer",
            why=why,
            fix="pass --hf-checkpoint with the Hugging Face directory that the run began with",
        )
    print(f"converting {model.path} to Hugging Face's format, once …", file=sys.stderr)
    command = [*python_module("slime"), "convert", "megatron-to-hf", "--load_path", str(model.path)]
    command += ["--hf_model_path", str(base), "--save_path", str(target), "--force"]  # what is there is no whole model
    # of its own, so that the trainer's half of the program is not in the memory of what is to serve
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_CONVERT_SECONDS
    )
    if done.returncode:
        raise UserError(
            f"{model.path} could not be converted",
            why="\n  ".join(done.stdout.strip().splitlines()[-6:]),
            fix=f"slime convert megatron-to-hf --load_path {model.path} --hf_model_path {base} --save_path {target}",
        )
    return target
