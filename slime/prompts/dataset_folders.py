"""Find the configuration and the split to read in the folder of a Hugging Face data set.

    path[/config][:split]

`datasets` only locates text files (JSON, CSV). `slime.prompts.readers` reads them, so their values
stay as written.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from slime.data_path import split_name, split_slice
from slime.errors import UserError
from slime.hub import shown_path
from slime.prompts.arrow_rows import cache_folder, loading

#: Default splits, in order of preference.
TRAINING = ("train",)
EVALUATION = ("test", "validation")
_TEXT_MODULES = ("json", "csv")


@dataclass(frozen=True)
class FoundSplit:
    """A split of a data set folder.

    Attributes:
        name: folder and configuration, for messages.
        splits: all splits of the data set.
        was_named: the path names the split.
        table: loads the split as a `datasets.Dataset`; None for text files.
        text_files: paths of JSON or CSV files.
    """

    name: str
    split: str
    splits: tuple[str, ...]
    was_named: bool
    table: Callable[[], Any] | None = None
    text_files: tuple[str, ...] = ()


def find(path: str, split: str | None, preferred: Sequence[str]) -> FoundSplit | None:
    """Find the split that a path without slice names; None if there is no such folder or
    configuration.

    Args:
        split: its name; None takes the first of ``preferred`` that exists, or the only one.
    Raises:
        UserError: there is no such split or configuration, the choice is ambiguous, or the folder
            cannot be read.
    """
    import datasets

    folder, config = _folder_and_config(path)
    if folder is None:
        return None
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        with loading(path):
            saved = datasets.load_from_disk(str(folder))
        if not isinstance(saved, datasets.DatasetDict):
            saved = {str(saved.split or "train"): saved}
        found = _chosen(path, list(saved), split, preferred)
        return replace(found, table=partial(saved.__getitem__, found.split))
    with loading(path):
        builder = _builder(folder, config, path)
    files = {str(name): paths for name, paths in (builder.config.data_files or {}).items()}
    names = list(files) or [str(name) for name in builder.info.splits or {}]
    found = _chosen(path, names, split, preferred)
    kind = type(builder).__module__.rpartition(".")[2]
    if kind in _TEXT_MODULES:
        _check_plain(builder.config, kind, path)
        return replace(found, text_files=tuple(files[found.split]))
    return replace(found, table=partial(_load, folder, config, found.split, path))


def split_notice(path: str, preferred: Sequence[str]) -> str | None:
    """Return one line that tells which split is read if the path (``path[:split][@[a:b]]``) names
    none; None if there was no choice.

    Raises:
        UserError: as `find`.
    """
    base, split = split_name(split_slice(path)[0])
    found = None if Path(base).is_file() else find(base, split, preferred)
    if found is None or found.was_named:
        return None
    use = "evaluation" if tuple(preferred) == EVALUATION else "training"
    if len(found.splits) == 1:
        if found.split in preferred or preferred == TRAINING:
            return None
        return f"{found.name}: {use} takes the split {found.split}, as there is no other"
    others = ", ".join(name for name in found.splits if name != found.split)
    return (
        f"{found.name}: {use} takes the split {found.split} (others: {others}; {found.name}:SPLIT "
        "names one)"
    )


def _load(folder: Path, config: str | None, split: str, path: str) -> Any:
    import datasets

    with loading(path):
        return datasets.load_dataset(str(folder), config, split=split, cache_dir=cache_folder())


def _folder_and_config(path: str) -> tuple[Path | None, str | None]:
    """Return a folder, and its configuration if the last part of the path names one.

    A declared configuration takes precedence over a folder of its name, because it may include
    other files.
    """
    folder = Path(path)
    if folder.parent.is_dir() and folder.name in _declared_configs(folder.parent):
        return folder.parent, folder.name
    return (folder, None) if folder.is_dir() else (None, None)


def _declared_configs(folder: Path) -> list[str]:
    """Return the names of the configurations that a folder's README.md declares."""
    from huggingface_hub import DatasetCard

    readme = folder / "README.md"
    if not readme.is_file():
        return []
    try:
        configs = DatasetCard.load(readme).data.to_dict().get("configs") or []
    except ValueError:  # the README is not a data set card
        return []
    return [
        str(one["config_name"]) for one in configs if isinstance(one, dict) and "config_name" in one
    ]


def _builder(folder: Path, config: str | None, path: str) -> Any:
    import datasets

    declared = _declared_configs(folder) if config is None else []
    try:
        return datasets.load_dataset_builder(str(folder), config, cache_dir=cache_folder())
    except ValueError as error:
        if len(declared) > 1 and "Config name is missing" in str(error):
            shown = shown_path(path)
            raise UserError(
                f"'{shown}' has several configurations: {', '.join(declared)}",
                why="they are separate data sets, and none is the default",
                fix=f"name one: {shown}/{declared[0]}",
            ) from error
        raise


def _chosen(path: str, names: list[str], asked: str | None, preferred: Sequence[str]) -> FoundSplit:
    """Choose the split to read, without its rows."""
    shown = shown_path(path)
    if asked is not None and asked not in names:
        near = difflib.get_close_matches(asked, names, n=1) or names
        raise UserError(
            f"'{shown}' has no split '{asked}'",
            why=f"it has: {', '.join(names)}",
            fix=f"name one of them: {shown}:{near[0]}",
        )
    wanted = preferred if asked is None else [asked]
    usable = [name for name in wanted if name in names] or (names if len(names) == 1 else [])
    if not usable:
        raise UserError(
            f"'{shown}' has several splits: {', '.join(names)}",
            why=f"none of them is called {' or '.join(preferred)}",
            fix=f"name one: {shown}:{names[0]}",
        )
    return FoundSplit(shown, usable[0], tuple(names), was_named=asked is not None)


def _check_plain(config: Any, kind: str, path: str) -> None:
    """Refuse settings of a README.md that change how its files are read."""
    other = None
    if kind == "json":
        other = "field" if config.field is not None else None
    elif config.names is not None or config.header != "infer" or config.column_names is not None:
        other = "names, column_names or header"
    elif config.delimiter is not None or config.sep not in (",", "\t"):
        other = "sep or delimiter"
    if other:
        raise UserError(
            f"the README.md of '{shown_path(path)}' sets {other} for its files, which is not "
            "supported",
            fix="convert them to JSONL or Parquet, or name a file",
        )
