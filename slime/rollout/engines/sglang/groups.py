"""``--sglang-config``: which SGLang servers a run has, when they are not all alike. Imports no SGLang.

sglang:
  - name: policy                 # gets the pushes: its model is --hf-checkpoint
    num_gpus_per_engine: 2
    server_groups:               # also spelt engine_groups
      - {worker_type: regular, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime.config.engine_flags import SGLANG_RESERVED, sglang_args
from slime.errors import UserError

if TYPE_CHECKING:
    from slime.config import Config

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder")
_MODEL_KEYS = ("name", "model_path", "num_gpus_per_engine", "update_weights", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclass(frozen=True)
class ServerGroup:
    """Servers that are alike.

    Attributes:
        worker_type: "regular", "prefill", "decode", or "placeholder" (GPUs left alone).
        num_gpus: of the whole group.
        num_gpus_per_engine: of each of its servers.
        overrides: SGLang options (names with underscores) over those of the command line.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


def server_groups(config: Config) -> list[ServerGroup]:
    """The groups of ``--sglang-config``; one group of all GPUs without it.

    Raises:
        UserError: the file cannot be read, or asks for what is not there; names file and key.
    """
    cluster, path = config.cluster, config.engine.sglang_config
    per_engine, total = cluster.rollout_num_gpus_per_engine, cluster.rollout_num_gpus
    if path is None:
        return [ServerGroup("regular", total, per_engine)] if total else []
    groups = list(_groups_of(Path(path), _the_model(Path(path), config), per_engine))
    given = sum(group.num_gpus for group in groups)
    if given != total:
        raise UserError(
            f"the server groups of {path} have {given} GPUs, --rollout-num-gpus is {total}",
            fix=f"pass --rollout-num-gpus {given}, or change num_gpus of a group",
        )
    kinds = {group.worker_type for group in groups}
    if ("prefill" in kinds) != ("decode" in kinds):
        there, missing = ("prefill", "decode") if "prefill" in kinds else ("decode", "prefill")
        raise UserError(f"{path} has a {there} group and no {missing} group", why="one is of no use without the other")
    if "regular" in kinds and "prefill" in kinds:
        raise UserError(
            f"{path} mixes regular servers with prefill and decode servers",
            why="the router sends every request either to one server or to a pair",
        )
    if not kinds - {"placeholder"}:
        raise UserError(f"{path} has no servers", fix="add a group with worker_type: regular")
    return groups


def _the_model(path: Path, config: Config) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"--sglang-config {path} cannot be read", why=str(error)) from error
    models = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise UserError(f"{path} must have a list of models under the key 'sglang'", fix=__doc__ or "")
    if len(models) > 1:
        names = ", ".join(str(model.get("name", "?")) for model in models)
        raise UserError(
            f"{path} has {len(models)} models ({names})",
            why="one router serves the policy's engines only, in this version",
            fix="start the others with python -m sglang.launch_server, and ask them from a custom generate or reward"
            " function",
        )
    [model] = models
    _check_keys(path, f"model {model.get('name', '?')}", model, _MODEL_KEYS)
    other = model.get("model_path")
    if other is not None and str(other) != str(config.checkpoint.hf_checkpoint):
        raise UserError(
            f"{path}: model_path {other} is not --hf-checkpoint {config.checkpoint.hf_checkpoint}",
            why="pushed weights would not fit it",
            fix="leave model_path out",
        )
    if model.get("update_weights") is False:
        raise UserError(f"{path}: update_weights: false would leave the policy's engines without its weights")
    return model


def _groups_of(path: Path, model: Mapping[str, Any], per_engine: int) -> Iterator[ServerGroup]:
    rows = model.get("server_groups") or model.get("engine_groups")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path}: model {model.get('name', '?')} must have a list of server_groups")
    for number, row in enumerate(rows):
        where = f"server group {number}"
        _check_keys(path, where, row, _GROUP_KEYS)
        kind = row.get("worker_type", "regular")
        if kind not in WORKER_TYPES:
            raise UserError(f"{path}: {where} has worker_type {kind}", fix=f"choose one of: {', '.join(WORKER_TYPES)}")
        each = row.get("num_gpus_per_engine", model.get("num_gpus_per_engine", per_engine))
        count = row.get("num_gpus")
        if not _is_count(count) or not _is_count(each) or count % each:
            raise UserError(f"{path}: {where} has num_gpus {count} in servers of {each}", why="it must be a multiple")
        yield ServerGroup(kind, count, each, _overrides(path, where, row.get("overrides") or {}))


def _overrides(path: Path, where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise UserError(f"{path}: overrides of {where} must be SGLang options by name")
    version, arguments = sglang_args()
    known = {argument.name for argument in arguments}
    overrides = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name in overrides:
        if name in SGLANG_RESERVED:
            raise UserError(f"{path}: {where} cannot override {name}", why=SGLANG_RESERVED[name])
        if name not in known:
            raise UserError(f"{path}: {where} overrides {name}, which SGLang {version} does not have")
    return overrides


def _check_keys(path: Path, where: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise UserError(f"{path}: {where} has the unknown key '{key}'", fix=f"the keys are: {', '.join(known)}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
