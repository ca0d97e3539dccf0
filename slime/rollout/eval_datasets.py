"""Data sets to evaluate, and how: ``--eval-prompt-data name path …`` or the YAML file of
``--eval-config``.

    eval:                            # this level may be left out
      defaults: {n_samples_per_eval_prompt: 4}
      datasets:
        - {name: gsm8k, path: gsm8k_test.jsonl, rm_type: math}
        - {name: aime, path: aime.jsonl, max_response_len: 16384, n_samples_per_eval_prompt: 16}

A value comes from the data set, else from ``defaults``, else from the ``--eval-…`` flag, else from
the rollout flag.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import yaml

from slime.config.config import Config
from slime.config.flags import all_flags
from slime.config.values import check_number, convert
from slime.config.yaml_files import load
from slime.data_path import ROW_SUFFIXES, split_name, split_slice
from slime.errors import UserError, a_type
from slime.hub import local_data
from slime.rollout.generate import sampling_params, skips_special_tokens

#: Keys of the reference system's files that are refused → why.
_REFUSED = dict.fromkeys((
    "app_service", "eval_task_timeout", "eval_early_stop_remaining", "eval_early_stop_idle_timeout",
    "message_processor", "reward_model", "remote_environment", "min_eval_samples",
), "it belongs to agent services")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalDataset:
    """One evaluation set with everything resolved; the field names are the keys of the YAML file.

    Attributes:
        metadata_overrides: merged into every sample's metadata, over what the row has.
        custom_rm_path, custom_generate_function_path: for this set instead of the run's.
    """

    name: str
    path: str
    input_key: str
    label_key: str | None
    tool_key: str
    metadata_key: str
    apply_chat_template: bool
    apply_chat_template_kwargs: dict[str, Any]
    n_samples_per_eval_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    skip_special_tokens: bool
    no_stop_trim: bool = True
    repetition_penalty: float = 1.0
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)
    multimodal_keys: dict[str, Any] | None = None

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Values that distinguish this set's prompts from those of other sets; plugins read it."""
        keys = self.input_key, self.label_key, self.tool_key, self.metadata_key
        template = self.apply_chat_template, repr(sorted(self.apply_chat_template_kwargs.items()))
        return (self.name, self.path, *keys, *template, repr(self.multimodal_keys))

    def inject_metadata(self, metadata: dict[str, Any] | None) -> dict[str, Any]:
        """Return a row's metadata, overridden by this set's values."""
        rm_type = {"rm_type": self.rm_type} if self.rm_type else {}
        return {**(metadata or {}), **self.metadata_overrides, **rm_type}

    def sampling_params(self) -> dict[str, Any]:
        """Return a new ``sampling_params`` for the engine."""
        return sampling_params(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_response_len,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            skip_special_tokens=self.skip_special_tokens,
            no_stop_trim=self.no_stop_trim,
            min_new_tokens=self.min_new_tokens,
            repetition_penalty=self.repetition_penalty,
        )


_KEYS = {f.name for f in dataclasses.fields(EvalDataset)}
_OPTIONAL = {
    name for name, kind in get_type_hints(EvalDataset).items() if NoneType in get_args(kind)
}
_PER_SET_ONLY = {"name", "path"}
#: key → the flag that gives its type and range
_FLAGS = {
    "input_key": "eval_input_key",
    "label_key": "eval_label_key",
    "tool_key": "eval_tool_key",
    "metadata_key": "metadata_key",
    "apply_chat_template": "apply_chat_template",
    "apply_chat_template_kwargs": "apply_chat_template_kwargs",
    "n_samples_per_eval_prompt": "n_samples_per_eval_prompt",
    "temperature": "eval_temperature",
    "top_p": "eval_top_p",
    "top_k": "eval_top_k",
    "max_response_len": "eval_max_response_len",
    "min_new_tokens": "eval_min_new_tokens",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
    "skip_special_tokens": "rollout_skip_special_tokens",
    "rm_type": "rm_type",
    "custom_rm_path": "custom_rm_path",
    "custom_generate_function_path": "custom_generate_function_path",
    "multimodal_keys": "multimodal_keys",
}


def eval_datasets(config: Config) -> list[EvalDataset]:
    """Return the resolved evaluation sets, in the order in which they are given; empty when there
    are none.

    Raises:
        UserError: the file is missing or malformed, a key is unknown, a name or path is missing, a
            name is given twice, or a value is invalid.
    """
    if config.eval.eval_config:
        entries = list(_entries_of_yaml(Path(config.eval.eval_config)))
    else:
        entries = [
            {"name": name, "path": path} for name, path in _pairs(config.eval.eval_prompt_data)
        ]
    datasets = [EvalDataset(**resolved(entry, config)) for entry in entries]
    for dataset in datasets:
        _check_sampling(dataset)
        if dataset.multimodal_keys and not config.images.multimodal_keys:
            raise UserError(
                f"evaluation set {dataset.name!r} has multimodal_keys, and the run reads no images",
                why="the vision tower is built and served only with --multimodal-keys",
                fix="pass --multimodal-keys too",
            )
    largest = max(config.eval.eval_pass_k or (0,))
    tries = max((dataset.n_samples_per_eval_prompt for dataset in datasets), default=largest)
    if largest > tries:
        raise UserError(
            f"--eval-pass-k {largest} needs as many samples of each prompt of a set",
            why=f"no evaluation set has more than n_samples_per_eval_prompt {tries}",
            fix="give a set more, or leave this k out",
        )
    names = [dataset.name for dataset in datasets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"evaluation set {twice[0]!r} is given twice", fix="give each set its own name"
        )
    return datasets


def _check_sampling(dataset: EvalDataset) -> None:
    """Check the sampling parameters of an evaluation set.

    Raises:
        UserError: engines would refuse the parameters of its requests.
    """
    try:
        dataset.sampling_params()
    except UserError as error:
        what = f"evaluation set {dataset.name}: {error.what}"
        raise UserError(what, error.why, error.fix) from error


def resolved(entry: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return all values of a set; flags give those that ``entry`` leaves out.

    Raises:
        UserError: a value of another type than its flag has, or a number that makes no sense.
    """
    values = {**_values_of_flags(config), **entry}
    where = f"evaluation set {values['name']}: "
    for name in ("stop", "stop_token_ids"):
        value = values[name]
        values[name] = (value,) if isinstance(value, (str, int)) else tuple(value or ())
    for key, dest in _FLAGS.items():
        if values.get(key) is None:
            if key in _OPTIONAL:
                continue
            raise UserError(f"{where}{key} is null", fix="give it a value, or leave it out")
        values[key] = convert(all_flags()[dest], values[key], where)
        check_number(all_flags()[dest], values[key], where + key)
    added = values.get("metadata_overrides", {})
    if not isinstance(added, dict):
        raise UserError(
            f"{where}metadata_overrides is {a_type(added)}",
            fix="write an object, {key: value}, or leave it out",
        )
    return values


def _values_of_flags(config: Config) -> dict[str, Any]:
    evaluation = config.eval
    data = config.data
    rollout = config.rollout
    return {
        "input_key": evaluation.eval_input_key,
        "label_key": evaluation.eval_label_key,
        "tool_key": evaluation.eval_tool_key,
        "metadata_key": data.metadata_key,
        "apply_chat_template": data.apply_chat_template,
        "apply_chat_template_kwargs": dict(data.apply_chat_template_kwargs),
        "n_samples_per_eval_prompt": evaluation.n_samples_per_eval_prompt,
        "temperature": evaluation.eval_temperature,
        "top_p": evaluation.eval_top_p,
        "top_k": evaluation.eval_top_k,
        "max_response_len": evaluation.eval_max_response_len,
        "min_new_tokens": evaluation.eval_min_new_tokens,
        "stop": rollout.rollout_stop,
        "stop_token_ids": rollout.rollout_stop_token_ids,
        "skip_special_tokens": skips_special_tokens(config),
        "multimodal_keys": config.images.multimodal_keys,
    }


def _pairs(values: tuple[str, ...]) -> list[tuple[str, str]]:
    """Split ``name path name path …`` into pairs. A single value is a path; its file names the
    set."""
    if len(values) == 1:
        path = split_name(split_slice(values[0])[0])[0]
        name = Path(path).name
        suffix = next(
            (suffix for suffix in ROW_SUFFIXES if name.endswith(suffix)), Path(name).suffix
        )
        return [(name.removesuffix(suffix) or values[0], values[0])]
    for name in values[::2]:
        if "/" in name or split_slice(name)[0].endswith(ROW_SUFFIXES):
            raise UserError(
                f"--eval-prompt-data has the file '{name}' where the name of an evaluation set is "
                "expected",
                why="it takes pairs of a name and a path",
                fix="write it like: --eval-prompt-data "
                f"{Path(split_slice(name)[0]).stem or 'test'} {name}",
            )
    if len(values) % 2:
        raise UserError(
            f"--eval-prompt-data has {len(values)} values",
            why="it takes pairs of a name and a path",
            fix="write it like: --eval-prompt-data gsm8k gsm8k_test.jsonl aime aime.jsonl",
        )
    return list(zip(values[::2], values[1::2]))


def _entries_of_yaml(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"--eval-config {path}: there is no such file", fix="check the path")
    try:
        root = load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"--eval-config {path} is not valid YAML", why=str(error), fix="correct the file"
        ) from error
    root = root.get("eval", root) if isinstance(root, dict) else root
    entries = root.get("datasets") if isinstance(root, dict) else None
    if isinstance(entries, dict):  # by name
        entries = [
            {"name": name, **row} if isinstance(row, dict) else row for name, row in entries.items()
        ]
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(row, dict) for row in entries)
    ):
        raise UserError(
            f"--eval-config {path} has no datasets",
            fix="see slime/rollout/eval_datasets.py for the form",
        )
    check_keys(root, f"{path}", {"defaults", "datasets"})
    defaults = root.get("defaults") or {}
    if not isinstance(defaults, dict):
        raise UserError(
            f"{path}: its defaults are {a_type(defaults)}",
            fix="write an object, {key: value}, or leave them out",
        )
    check_keys(defaults, f"{path}, defaults", _KEYS - _PER_SET_ONLY)
    for number, entry in enumerate(entries):
        where = f"{path}, data set {entry.get('name', number)}"
        check_keys(entry, where)
        for key in sorted(_PER_SET_ONLY):
            if not entry.get(key):
                raise UserError(f"{where}: it has no {key}", fix=f"add '{key}: …'")
            if isinstance(entry[key], bool) or not isinstance(entry[key], (str, int)):
                raise UserError(
                    f"{where}: its {key} is read as {entry[key]!r}", fix="write it in quotes"
                )
        data = local_data(str(entry["path"]), download=False)
        yield {**defaults, **entry, "name": str(entry["name"]), "path": data}


def check_keys(given: dict[str, Any], where: str, known: Collection[str] = _KEYS) -> None:
    """Check that every key is one of ``known``, by default those of an evaluation set.

    Raises:
        UserError: a key is unknown; the message suggests the closest one.
    """
    for key in given:
        if key in known:
            continue
        if key in _REFUSED:
            raise UserError(
                f"{where}: the key {key!r} is not supported", why=_REFUSED[key], fix="leave it out"
            )
        near = difflib.get_close_matches(str(key), known, n=1)
        raise UserError(
            f"{where}: unknown key {key!r}",
            why=f"the keys are: {', '.join(sorted(known))}",
            fix=f"did you mean {near[0]!r}?" if near else "remove it",
        )
