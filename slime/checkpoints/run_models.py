"""Finds the models of a run: its exports, and those in its checkpoints. Does not import torch.

>>> newest_model(Path("outputs/sums")).path
PosixPath('outputs/sums/model')
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.checkpoints.directory import ADAPTER, newest_whole
from slime.checkpoints.load_plan import is_hf_dir
from slime.data_path import split_slice
from slime.errors import UserError
from slime.files import entries_of, read_object
from slime.models.peft_config import is_adapter_dir
from slime.observe.run_folder import config_files
from slime.paths import fixed_folder, found

#: How deep below a run folder exports are searched for.
_LEVELS = 3


def is_run_folder(path: Path) -> bool:
    return bool(stage_configs(path))


def stage_configs(run_folder: Path) -> dict[str, dict[str, Any]]:
    """Return stage ("": the only one) → contents of its config.json; {} if this is not a run
    folder."""
    found = {stage: read_object(file) for stage, file in config_files(run_folder).items()}
    return {stage: config for stage, config in found.items() if _is_of_stage(stage, config)}


def _setting(config: dict[str, Any], group: str, name: str) -> str:
    """Return the value of a flag that takes text; "" if it is not set or the file is damaged."""
    flags = config.get(group)
    value = flags.get(name) if isinstance(flags, dict) else None
    return value if isinstance(value, str) and "\0" not in value else ""


def _is_of_stage(stage: str, config: dict[str, Any]) -> bool:
    """Tell whether a run wrote the file for this stage; ``config.old.json``, for example, is a
    user's copy."""
    observe = config.get("observe")
    says_so = (
        not (isinstance(observe, dict) and "stage" in observe)
        or _setting(config, "observe", "stage") == stage
    )
    return isinstance(config.get("origins"), dict) and says_so


def has_weights(path: Path) -> bool:
    """Tell whether this is a Hugging Face directory with weights."""
    return is_hf_dir(path) and any(file.is_file() for file in path.glob("*.safetensors"))


@dataclass(frozen=True)
class RunModel:
    """A model of a run.

    Attributes:
        path: a Hugging Face directory, a PEFT directory, or the directory of one iteration of a
            Megatron checkpoint.
        kind: which of the three ``path`` is.
        is_exported: whether it is an export, not (part of) a checkpoint.
        rollout: after which it was written; None if its name does not tell.
        written: time of writing, in seconds since 1970.
        base: the Hugging Face directory from which the run started; None if unknown.
    """

    path: Path
    kind: Literal["model", "adapter", "checkpoint"]
    is_exported: bool
    rollout: int | None
    written: float
    base: Path | None


def newest_model(run_folder: Path) -> RunModel:
    """Return the newest model of a run: an export (--save-hf, or any in its folder), or its newest
    whole checkpoint if no export is as new.

    Raises:
        UserError: this is not a run folder, or the run has saved nothing.
    """
    configs = stage_configs(run_folder)
    if not configs:
        raise UserError(f"{run_folder} is not a run folder", why="it has no config.json of a run")
    models = [
        model
        for stage, config in configs.items()
        if (model := _newest_of_stage(run_folder, stage, config))
    ]
    base = _base(run_folder, list(configs.values())[-1])
    models += [_export(path, None, base) for path in _hf_dirs(run_folder)]
    if not models:
        saves = [_setting(config, "checkpoint", "save") for config in configs.values()]
        where = ", ".join(sorted({str(path) for path in saves if path}))
        raise UserError(
            f"the run {run_folder} has left no model",
            why=f"there is no export in it, and no whole checkpoint in {where}"
            if where
            else "it ran without --save",
            fix="wait for its first checkpoint"
            if where
            else "train with --save DIR, or --save-hf 'DIR/{rollout_id}'",
        )
    return max(models, key=lambda model: model.written)


def first_base(run_folder: Path) -> Path | None:
    """Return the model from which the run's first stage started; None if it is not recorded."""
    return next(iter(bases(run_folder)), None)


def bases(run_folder: Path) -> list[Path]:
    """Return the models from which the stages of a run started, as far as they are recorded."""
    found = (_base(run_folder, config) for config in stage_configs(run_folder).values())
    return [base for base in found if base is not None]


def checkpoint_model(directory: Path) -> RunModel | None:
    """Return the newest whole checkpoint of a --save directory, or ``directory`` itself if it is an
    iteration; None if it is neither. The base is known if the checkpoint is in its run's folder."""
    whole = directory if (directory / ".metadata").is_file() else newest_whole(directory)
    if whole is None:
        return None
    above = [*whole.resolve().parents][:3]
    run = next((folder for folder in above if is_run_folder(folder)), None)
    config = list(stage_configs(run).values())[-1] if run is not None else {}
    return _checkpoint(whole, _base(run, config) if run is not None else None)


def _newest_of_stage(run_folder: Path, stage: str, config: dict[str, Any]) -> RunModel | None:
    base = _base(run_folder, config)
    save, save_hf = (_setting(config, "checkpoint", name) for name in ("save", "save_hf"))
    roots = [run_folder / "checkpoints" / stage]
    if save:
        roots.append(_resolve(run_folder, config, save))
    wholes = [
        _checkpoint(whole, base)
        for root in roots
        if root.is_dir() and (whole := newest_whole(root))
    ]
    checkpoint = max(wholes, key=lambda model: model.written, default=None)
    named = found(str(_resolve(run_folder, config, save_hf, fixed_folder))) if save_hf else ()
    exports = [_export(path, rollout, base) for path, rollout in named if _is_export(path)]
    export = max(exports, key=lambda model: (model.rollout or 0, model.written), default=None)
    if export is None or checkpoint is None:
        return export or checkpoint
    if export.rollout is not None and checkpoint.rollout is not None:
        return checkpoint if checkpoint.rollout > export.rollout else export
    return checkpoint if checkpoint.written > export.written else export


def _hf_dirs(folder: Path, levels: int = _LEVELS) -> Iterator[Path]:
    for entry in entries_of(folder):
        if entry.is_dir() and not entry.name.startswith("."):
            if _is_export(entry):
                yield entry
            # a model within a checkpoint is not newer than the checkpoint
            elif levels > 1 and not (entry / ".metadata").is_file():
                yield from _hf_dirs(entry, levels - 1)


def _is_export(path: Path) -> bool:
    return has_weights(path) or is_adapter_dir(path)


def _export(path: Path, rollout: int | None, base: Path | None) -> RunModel:
    files = [file for file in path.glob("*.safetensors") if file.is_file()]
    written = max((file.stat().st_mtime for file in files), default=path.stat().st_mtime)
    kind: Literal["model", "adapter"] = "adapter" if is_adapter_dir(path) else "model"
    return RunModel(path, kind, True, rollout, written, base)


def _checkpoint(path: Path, base: Path | None) -> RunModel:
    number = re.fullmatch(r"iter_(\d+)", path.name)
    written = (path / ".metadata").stat().st_mtime
    rollout = int(number.group(1)) if number else None
    adapter = path / ADAPTER
    if is_adapter_dir(adapter):
        return RunModel(adapter, "adapter", False, rollout, written, base)
    return RunModel(path, "checkpoint", False, rollout, written, base)


def _base(run_folder: Path, config: dict[str, Any]) -> Path | None:
    named = _setting(config, "checkpoint", "hf_checkpoint")
    return _resolve(run_folder, config, named) if named else None


def _resolve(
    run_folder: Path, config: dict[str, Any], path: str, folder_of: Callable[[str], Path] = Path
) -> Path:
    """Resolve a path from the run's flags. Relative ones start from the directory where the run was
    started, as does a relative --output-dir.

    Args:
        folder_of: the part of the path that must exist.
    """
    output_dir = Path(_setting(config, "observe", "output_dir") or "outputs")
    if Path(path).is_absolute() or output_dir.is_absolute():
        return Path(path)
    try:
        started = started_from(run_folder, output_dir)
    except IndexError:  # it was moved
        return Path(path)
    return started / path if started.joinpath(folder_of(path)).exists() else Path(path)


def data_path(run_folder: Path, config: dict[str, Any]) -> str | None:
    """Return the run's --prompt-data, resolved from here; None if the configuration names none."""
    named = config.get("data", {}).get("prompt_data")
    if named:
        return str(_resolve(run_folder, config, named, lambda path: Path(split_slice(path)[0])))
    return None


def started_from(run_folder: Path, output_dir: Path) -> Path:
    """Return the directory in which a run with a relative --output-dir was started."""
    return run_folder.resolve().parents[len(output_dir.parts)]
