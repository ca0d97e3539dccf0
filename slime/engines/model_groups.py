"""``--sglang-config``: a run with servers of different models or settings, for any engine.

sglang:
  - name: policy                 # --hf-checkpoint: serves the rollouts, gets the weight pushes
    num_gpus_per_engine: 2
    server_groups:               # also spelt engine_groups
      - {worker_type: regular, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}
  - name: judge                  # any other model, behind its own router, for custom
    model_path: models/judge     # generate and reward functions
    server_groups:
      - {worker_type: regular, num_gpus: 2}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime.config.engine_flags import ENGINE_OPTIONS
from slime.config.flag import FlagSpec
from slime.config.flags import all_flags
from slime.config.yaml_files import load
from slime.engines.launch import ServedModel, ServerGroup, group_options, only_the_policy
from slime.errors import UserError

if TYPE_CHECKING:
    from slime.config.config import Config

_MODEL_KEYS = (
    "name", "model_path", "num_gpus_per_engine", "update_weights", "server_groups", "engine_groups"
)  # fmt: skip
_MODEL_NAME = re.compile(r"[\w-]+")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclass(frozen=True)
class GroupRules:
    """An engine's rules for server groups.

    Attributes:
        worker_types: supported kinds of servers.
        check_override: called with name (with underscores) and value of each option; raises
            `UserError`, whose message gets the place in the file.
        check_policy: called with config, overrides and place of each group of the policy, which
            gets the weight pushes; raises `UserError`.
    """

    worker_types: tuple[str, ...]
    check_override: Callable[[str, Any], None]
    check_policy: Callable[[Config, Mapping[str, Any], str], None] = (
        lambda config, overrides, where: None
    )


def served_models(config: Config, rules: GroupRules) -> list[ServedModel]:
    """Return the models of ``--sglang-config`` in the order of the file; without the flag, the
    policy with one group of all GPUs.

    Raises:
        UserError: the file cannot be read, or a value is not valid; names file and key.
    """
    if config.engine.sglang_config is None:
        return only_the_policy(config)
    path = Path(config.engine.sglang_config)
    per_engine = config.cluster.rollout_num_gpus_per_engine
    total = config.cluster.rollout_num_gpus
    checkpoint = str(config.checkpoint.hf_checkpoint)
    rows = _models_of(path)
    policy = _policy_of(path, rows, checkpoint)
    models = []
    for number, row in enumerate(rows):
        name = _name(row)
        groups = tuple(_groups_of(path, row, per_engine, rules))
        if number == policy:
            for place, group in enumerate(groups):
                where = f"{path}: server group {place} of {name}"
                rules.check_policy(config, group.overrides, where)
        _check_kinds(path, name, groups)
        directory = str(row.get("model_path") or checkpoint)
        models.append(ServedModel(name, directory, number == policy, groups))
    given = sum(group.num_gpus for model in models for group in model.groups)
    if given != total:
        raise UserError(
            f"the server groups of {path} have {given} GPUs, --rollout-num-gpus is {total}",
            fix=f"pass --rollout-num-gpus {given}, or change num_gpus of a group",
        )
    return models


def _models_of(path: Path) -> list[Mapping[str, Any]]:
    try:
        content = load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--sglang-config {path} cannot be read", why=str(error)) from error
    models = content.get("sglang") if isinstance(content, dict) else None
    if (
        not isinstance(models, list)
        or not models
        or not all(isinstance(model, dict) for model in models)
    ):
        raise UserError(
            f"{path} must have a list of models under the key 'sglang'", fix=__doc__ or ""
        )
    for model in models:
        _check_keys(path, f"model {_name(model)}", model, _MODEL_KEYS)
        if not isinstance(model.get("update_weights", True), bool):
            raise UserError(
                f"{path}: update_weights of model {_name(model)} is {model['update_weights']!r}",
                fix="write true or false, without quotes",
            )
    names = [_name(model) for model in models]
    for name in names:
        if names.count(name) > 1 or not _MODEL_NAME.fullmatch(name):
            raise UserError(
                f"{path} has {names.count(name)} model(s) with the name '{name}'",
                why="custom functions and log files identify models by their names",
                fix="give every model a unique name of letters, digits, '-' and '_'",
            )
    return models


def _name(model: Mapping[str, Any]) -> str:
    return str(model.get("name", "policy"))


def _policy_of(path: Path, models: list[Mapping[str, Any]], checkpoint: str) -> int:
    """Return the index of the model that gets the weight pushes: the one whose ``model_path`` is
    the checkpoint or left out."""
    updated = []
    for number, model in enumerate(models):
        fits = model.get("model_path") is None or str(model["model_path"]) == checkpoint
        if model.get("update_weights") and not fits:
            raise UserError(
                f"{path}: model {_name(model)} has update_weights, but its model_path "
                f"{model['model_path']} is not --hf-checkpoint {checkpoint}",
                why="pushed weights would not fit it",
                fix="leave model_path or update_weights out",
            )
        if model.get("update_weights", fits):
            updated.append(number)
    if len(updated) == 1:
        return updated[0]
    if not updated:
        raise UserError(
            f"{path} has no model that gets the policy's weights",
            why="the model_path of that model is --hf-checkpoint or left out, and its "
            "update_weights is not false",
            fix="add such a model, or leave model_path and update_weights of one model out",
        )
    raise UserError(
        f"{path} has {len(updated)} models of --hf-checkpoint: "
        f"{', '.join(_name(models[n]) for n in updated)}",
        why="only one can be the policy, which serves the rollouts and gets the weight pushes",
        fix="set update_weights: false for those that keep the weights of the checkpoint",
    )


def _check_kinds(path: Path, model: str, groups: Sequence[ServerGroup]) -> None:
    kinds = {group.worker_type for group in groups}
    if ("prefill" in kinds) != ("decode" in kinds):
        there, missing = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
        raise UserError(
            f"{path}: model {model} has a {there} group and no {missing} group",
            why="a request needs one server of each",
        )
    if "regular" in kinds and "prefill" in kinds:
        raise UserError(
            f"{path}: model {model} mixes regular servers with prefill and decode servers",
            why="the router sends every request either to one server or to a pair",
        )
    if not kinds - {"placeholder"}:
        raise UserError(
            f"{path}: model {model} has no servers", fix="add a group with worker_type: regular"
        )


def _groups_of(
    path: Path, model: Mapping[str, Any], per_engine: int, rules: GroupRules
) -> Iterator[ServerGroup]:
    rows = model.get("server_groups") or model.get("engine_groups")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: model {_name(model)} must have a list of server_groups")
    for number, row in enumerate(rows):
        where = f"server group {number} of {_name(model)}"
        _check_keys(path, where, row, _GROUP_KEYS)
        kind = row.get("worker_type", "regular")
        if kind not in rules.worker_types:
            known = ", ".join(rules.worker_types)
            raise UserError(
                f"{path}: {where} has worker_type {kind}", fix=f"choose one of: {known}"
            )
        each = row.get("num_gpus_per_engine", model.get("num_gpus_per_engine", per_engine))
        count = row.get("num_gpus")
        if not _is_count(count) or not _is_count(each) or count % each:
            raise UserError(
                f"{path}: {where} has num_gpus {count} and num_gpus_per_engine {each}",
                why="the first must be a positive multiple of the second",
            )
        yield ServerGroup(
            kind, count, each, _overrides(path, where, row.get("overrides") or {}, rules)
        )


def _overrides(path: Path, where: str, given: Any, rules: GroupRules) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise UserError(f"{path}: overrides of {where} must map option names to values")
    overrides = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name, value in overrides.items():
        try:
            rules.check_override(name, value)
        except UserError as error:
            raise UserError(f"{path}: {where} {error.what}", why=error.why, fix=error.fix) from None
    return overrides


def _check_keys(path: Path, where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise UserError(
                f"{path}: {where} has the unknown key '{key}'",
                fix=f"the keys are: {', '.join(known)}",
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- options without effect ------------------------------------------------------------------------


def idle_options(config: Config, models: Sequence[ServedModel]) -> Iterator[str]:
    """Yield a warning for each option of the command line that has no effect in any group, and for
    each override that has none in its group: an override may make an option act.

    Args:
        models: those of ``--sglang-config``; without that file nothing is yielded.
    """
    file = config.engine.sglang_config
    if file is None:
        return
    section = ENGINE_OPTIONS[config.engine.rollout_engine].section
    if not section:
        return
    given: Mapping[str, Any] = getattr(config.engine, section)
    dests = {f"{section}_{name}" for name in given}
    reasons_by_option: dict[str, list[str]] = {name: [] for name in given}
    for model in models:
        for number, group in enumerate(model.groups):
            if not group.num_engines:
                continue
            options = group_options(given, group.overrides, is_policy=model.is_policy)
            values = {dest: value for dest, value in config.values().items() if dest not in dests}
            values |= {f"{section}_{name}": value for name, value in options.items()}
            values["prefill_num_servers"] = group.worker_type in ("prefill", "decode")
            if not model.is_policy:  # the trained adapters are the policy's
                values["lora_rank"] = 0
            for name in group.overrides:
                if reason := _why_idle(all_flags()[f"{section}_{name}"], values):
                    place = f"server group {number} of {model.name}"
                    yield f"{file}: {name} of {place} has no effect{reason}"
            for name in options.keys() - group.overrides.keys():
                reasons_by_option[name].append(_why_idle(all_flags()[f"{section}_{name}"], values))
    for name, reasons in reasons_by_option.items():
        if reasons and all(reasons):
            yield f"{all_flags()[f'{section}_{name}'].option} has no effect{reasons[0]}"


def _why_idle(spec: FlagSpec, values: Mapping[str, Any]) -> str:
    """Return the end of a sentence that says why a value has no effect; "" if it has one, or is the
    default."""
    if values[spec.dest] == spec.default:
        return ""
    if spec.meta.no_effect:
        return f": {spec.meta.no_effect}"
    missing = (need for need in spec.meta.needs if not need.holds(values))
    return next((f" {need.words(values)}: {need.why}" for need in missing), "")
