"""The table of our own flags, made from the groups: name, type, default, where the value goes.

>>> spec = own_flags()["rollout_stop"]
>>> spec.option, spec.group, spec.kind, spec.many
('--rollout-stop', 'rollout', 'str', True)
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from slime.config import groups_megatron, groups_rollout, groups_run, groups_train
from slime.config.field import NO_META, FlagMeta, meta_of

GROUPS: dict[str, type] = {
    "cluster": groups_run.ClusterConfig,
    "data": groups_rollout.DataConfig,
    "rollout": groups_rollout.RolloutConfig,
    "reward": groups_rollout.RewardConfig,
    "eval": groups_rollout.EvalConfig,
    "algorithm": groups_train.AlgorithmConfig,
    "train": groups_train.TrainConfig,
    "megatron": groups_megatron.MegatronConfig,
    "checkpoint": groups_train.CheckpointConfig,
    "sync": groups_train.SyncConfig,
    "engine": groups_rollout.EngineConfig,
    "fault_tolerance": groups_run.FaultToleranceConfig,
    "observe": groups_run.ObserveConfig,
    "debug": groups_run.DebugConfig,
}

Kind = Literal["bool", "int", "float", "str", "json", "int_or_list"]


def option_of(dest: str) -> str:
    """``--lr-decay-style`` of ``lr_decay_style``."""
    return "--" + dest.replace("_", "-")


@dataclass(frozen=True)
class FlagSpec:
    """One flag, whoever defined it.

    Attributes:
        dest: name in YAML files, `make_config` and `args`: the flag with underscores.
        group, attribute: where `Config` keeps the value: ``config.<group>.<attribute>``.
        sections: for flags of Megatron and SGLang, the dicts of the group that get the value, if the user set it,
            under the key ``attribute``: ``config.megatron.transformer["moe_permute_fusion"]``.
        kind: type of one value; ``many`` says that the flag takes a list of them (a tuple in `Config`).
        scalar_or_list: a list of one is kept as that one value.
        value_optional: may be given without a value.
        optional: None is a value (unset).
        off: spelling that sets a boolean to False; empty when there is none.
        meta: what the field said of itself.
        origin: "slime", "megatron-core <version>", "sglang <version>", ….
    """

    dest: str
    group: str
    attribute: str
    kind: Kind
    default: Any
    sections: tuple[str, ...] = ()
    many: bool = False
    scalar_or_list: bool = False
    value_optional: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()
    help: str = ""
    meta: FlagMeta = NO_META
    origin: str = "slime"

    @property
    def option(self) -> str:
        return option_of(self.dest)

    @property
    def options(self) -> tuple[str, ...]:
        return (self.option, *("--" + alias for alias in self.meta.aliases))

    @property
    def off(self) -> str:
        if self.kind != "bool":
            return ""
        if self.meta.off:
            return "--" + self.meta.off if self.meta.off != "-" else ""
        return "" if self.dest.startswith(("no_", "disable_")) else "--no-" + self.dest.replace("_", "-")


def _kind_of(annotation: Any) -> tuple[Kind, bool, bool, tuple[Any, ...]]:
    """(kind, many, optional, choices) of a resolved annotation."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in args if arg is not type(None)]
        assert len(inner) == 1, annotation
        kind, many, _, choices = _kind_of(inner[0])
        return kind, many, True, choices
    if origin is tuple:
        kind, _, _, choices = _kind_of(args[0])
        return kind, True, False, choices
    if origin is Literal:
        return "str", False, False, args
    if origin is dict:
        return "json", False, False, ()
    return annotation.__name__, False, False, ()


def _group_flags(group: str, cls: Any) -> list[FlagSpec]:
    hints = typing.get_type_hints(cls)
    specs = []
    for field in dataclasses.fields(cls):
        meta = meta_of(field)
        if meta is None:
            continue
        kind, many, optional, choices = _kind_of(hints[field.name])
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        dest = (meta.name or field.name).replace("-", "_")
        specs.append(
            FlagSpec(dest, group, field.name, kind, default, many=many, optional=optional, choices=choices, meta=meta)
        )
    return specs


@functools.lru_cache(maxsize=1)
def own_flags() -> dict[str, FlagSpec]:
    """Every flag of the groups by its dest, in the order of the groups."""
    specs: dict[str, FlagSpec] = {}
    for group, cls in GROUPS.items():
        for spec in _group_flags(group, cls):
            assert spec.dest not in specs, spec.dest
            specs[spec.dest] = spec
    return specs


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, by field name, as one line.

    Example:
        >>> field_docs(groups_run.ClusterConfig)["actor_num_nodes"]
        'Nodes of the trainer.'
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return docs_of_class(tree.body[0])


def docs_of_class(node: ast.AST) -> dict[str, str]:
    """The same from a class definition that was only parsed."""
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
