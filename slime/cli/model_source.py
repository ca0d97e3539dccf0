"""Find the model of a path: a Hugging Face directory, a PEFT adapter, a run folder, a --save
directory, or a name on the hub."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from slime import deadlines
from slime.checkpoints.peft_files import read_config
from slime.checkpoints.run_models import (
    RunModel,
    checkpoint_model,
    has_weights,
    is_run_folder,
    newest_model,
)
from slime.cli.arguments import Arguments
from slime.errors import UserError, contents_of, in_place_of
from slime.files import entries_of, left_behind
from slime.hub import fetch_model, is_hub_name
from slime.models.peft_config import is_adapter_dir
from slime.observe.run_folder import folder_being_written
from slime.processes.host import python_module

#: Subfolder of a Megatron checkpoint for its conversion; it is removed with the checkpoint.
CONVERTED = "hf"
_BESIDE = ".hf-of-"
_TEMPORARY = "slime-model-"
_ADAPTER_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ChosenModel:
    """A model that a path means.

    Attributes:
        directory: Hugging Face directory: the model, or the base of the adapter.
        adapter: PEFT directory; None for a model of whole weights.
    """

    directory: Path
    adapter: Path | None = None


def add_model_arguments(parser: Arguments) -> None:
    """Declare ``path`` and ``--hf-checkpoint``, the arguments of `chosen_model`."""
    parser.add_argument(
        "path",
        help="a run folder, a --save directory, a Hugging Face or PEFT directory, or org/name on "
        "the hub",
    )
    parser.add_argument(
        "--hf-checkpoint",
        help="config and tokenizer, for a --save directory outside of its run folder; the base "
        "model of an adapter, where it names none or one that is elsewhere",
    )


def model_directory(path: str, hf_checkpoint: str | None = None) -> Path:
    """Return the Hugging Face directory that ``path`` means, see `chosen_model`.

    Raises:
        UserError: there is no model, or it is an adapter.
    """
    chosen = chosen_model(path, hf_checkpoint)
    if chosen.adapter is not None:
        raise UserError(
            f"{path} has an adapter, and no whole model",
            why=f"{chosen.adapter} changes {chosen.directory}",
            fix=f"merge it first: slime export {path} --merge --to DIR, and pass DIR",
        )
    return chosen.directory


def chosen_model(path: str, hf_checkpoint: str | None = None) -> ChosenModel:
    """Find the model that ``path`` means; for a run folder, the newest model.

    A Megatron checkpoint is converted once, into its subfolder ``hf/``. The subfolder appears
    only when it is complete, so that the run may continue meanwhile.

    Args:
        path: a Hugging Face directory, a PEFT directory, outputs/<run>, a --save directory, one
            iteration of it, or org/name on the hub.
        hf_checkpoint: config and tokenizer for a Megatron checkpoint outside of its run folder;
            the base model of an adapter.
    Raises:
        UserError: there is no model; the error lists what the directory holds.
    """
    folder = Path(path)
    if is_hub_name(path):
        return ChosenModel(fetch_model(path))
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"{path} {what}",
            why=in_place_of(folder),
            fix="pass a run folder (outputs/<run>), a --save directory, or a Hugging Face "
            "directory",
        )
    if has_weights(folder):
        return ChosenModel(folder)
    if is_adapter_dir(folder):
        return ChosenModel(_base_of(folder, hf_checkpoint, None), folder)
    model = _trained_model(folder)
    if model is None:
        raise UserError(
            f"{path} holds no model",
            why="no *.safetensors with a config.json, no run and no checkpoint; it holds: "
            f"{contents_of(folder)}",
            fix="pass a run folder (outputs/<run>), a --save directory, or a Hugging Face "
            "directory",
        )
    if model.kind == "adapter":
        return ChosenModel(_base_of(model.path, hf_checkpoint, model.base), model.path)
    is_plain = model.kind == "model"
    return ChosenModel(model.path if is_plain else _converted(model, hf_checkpoint))


def _trained_model(folder: Path) -> RunModel | None:
    """Return the newest model of a run folder or a --save directory; None if there is none."""
    return newest_model(folder) if is_run_folder(folder) else checkpoint_model(folder)


def _base_of(adapter: Path, given: str | None, of_run: Path | None) -> Path:
    """Return the base model of an adapter: the given one, else its config's, else its run's.

    Raises:
        UserError: this host has none of them.
    """
    if given is not None:
        return model_directory(given)
    named = str(read_config(adapter).get("base_model_name_or_path") or "")
    if named and has_weights(Path(named)):
        return Path(named)
    if of_run is not None and has_weights(of_run):
        return of_run
    if is_hub_name(named):
        return fetch_model(named)
    raise UserError(
        f"the base model of the adapter {adapter} is not here",
        why=f"it names {named}, which is no Hugging Face directory of this host"
        if named
        else "its config names none",
        fix="pass --hf-checkpoint with the base model",
    )


@dataclass(frozen=True)
class NamedModels:
    """The names under which a server offers a model and its adapters.

    Attributes:
        base: name of the model without adapters.
        adapters: name → PEFT directory.
        own: name of the adapter that the path itself means; "" if the path means a whole model.
    """

    base: str
    adapters: dict[str, Path]
    own: str = ""

    @property
    def requested(self) -> str:
        """The model name in requests for the model that the path means."""
        return f"{self.base}:{self.own}" if self.own else self.base


def named_models(chosen: ChosenModel, name: str, given: Sequence[str]) -> NamedModels:
    """Name a model and adapters for a server.

    Args:
        name: name of the model that the user's path means, or of its adapter if it has one.
        given: values of --adapter: NAME=DIR or DIR, a path of `chosen_model` with an adapter.
    Raises:
        UserError: a name is taken or invalid in requests, or a DIR has no adapter.
    """
    adapters: dict[str, Path] = {}
    own = ""
    if chosen.adapter is not None:
        base = model_name(str(chosen.directory))
        own = name
        adapters[own] = chosen.adapter
        base = f"{base}-base" if base == own else base
    else:
        base = name
    for text in given:
        key, separator, path = text.partition("=")
        if not separator:
            key = model_name(text)
            path = text
        if not _ADAPTER_NAME.fullmatch(key):
            raise UserError(
                f"--adapter {text}: {key!r} is no name for an adapter",
                why="requests name it as MODEL:NAME",
                fix="pass NAME=DIR with a NAME of letters, digits, '.', '_' and '-'",
            )
        if key in adapters or key == base:
            raise UserError(f"--adapter {text}: the name {key} is taken", fix="pass another NAME")
        adapters[key] = _adapter_directory(path)
    return NamedModels(base, adapters, own)


def _adapter_directory(path: str) -> Path:
    folder = Path(path)
    if is_adapter_dir(folder):
        return folder
    model = _trained_model(folder) if folder.is_dir() else None
    if model is None or model.kind != "adapter":
        raise UserError(
            f"--adapter {path}: there is no adapter",
            why="no adapter_config.json, and no run or checkpoint with --lora-rank"
            if folder.is_dir()
            else "there is no such directory",
            fix="pass a PEFT directory, or the folder of a run with --lora-rank",
        )
    return model.path


def model_name(path: str) -> str:
    """Return the model's display name: the name of its run or directory."""
    return Path(path).name if is_hub_name(path) else Path(path).resolve().name


def _converted(model: RunModel, hf_checkpoint: str | None) -> Path:
    target = model.path / CONVERTED
    if has_weights(target):
        return target
    base = model_directory(hf_checkpoint) if hf_checkpoint else model.base
    if base is None or not base.is_dir():
        why = "it does not say which model it is of"
        if base:
            why = f"its run began with {base}, which is not here"
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
        # a separate process keeps the trainer's modules out of the memory of the serving process
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadlines.MODEL_SOURCE_CONVERT,
        )
        if done.returncode:
            advice = "the run has removed this checkpoint meanwhile: try again; or "
            if model.path.is_dir():
                advice = ""
            words = f"--load_path {model.path} --hf_model_path {base} --save_path DIR"
            raise UserError(
                f"{model.path} could not be converted",
                why="\n  ".join(done.stdout.strip().splitlines()[-6:]),
                fix=f"{advice}slime convert megatron-to-hf {words}",
            )
        if folder_being_written(model.path) is None:
            with suppress(OSError):  # the checkpoint was removed, or another command was faster
                made.rename(target)
            if has_weights(target):
                return target
        kept = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        return Path(shutil.move(made, kept / CONVERTED))


@contextmanager
def _place_beside(checkpoint: Path) -> Iterator[Path]:
    """Create a folder for this process beside a checkpoint, on the same file system, and remove
    such folders of dead processes. The folder is in the system's temporary directory if a run
    still writes beside the checkpoint, or if the folder cannot be created there."""
    root = checkpoint.parent
    if folder_being_written(root) is not None:
        root = Path(tempfile.gettempdir())
    for path in entries_of(root):
        if path.name.startswith(_BESIDE):
            with left_behind(path) as is_free:
                if is_free:
                    shutil.rmtree(path, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=_BESIDE, dir=root))
    except OSError:  # this user may not write there
        folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
