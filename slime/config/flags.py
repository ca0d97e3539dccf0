"""All flags in one table, slime's own and those of other programs, and their spellings.

>>> spec = own_flags()["rollout_stop"]
>>> spec.option, spec.group, spec.kind, spec.many
('--rollout-stop', 'rollout', 'str', True)
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from slime.config.data import read_table, record_of
from slime.config.engine_flags import router_flags, sglang_flags, sglang_that_has
from slime.config.flag import FlagSpec, RefusedFlag, refused_spec, specs_of
from slime.config.groups_algorithm import AlgorithmConfig
from slime.config.groups_critic import CriticConfig
from slime.config.groups_distillation import DistillationConfig
from slime.config.groups_images import ImagesConfig
from slime.config.groups_lora import LoraConfig
from slime.config.groups_megatron import MegatronConfig
from slime.config.groups_preference import PreferenceConfig
from slime.config.groups_quantised import QuantisedConfig
from slime.config.groups_rollout import (
    DataConfig,
    EngineConfig,
    EvalConfig,
    RewardConfig,
    RolloutConfig,
)
from slime.config.groups_run import ClusterConfig, DebugConfig, FaultToleranceConfig, ObserveConfig
from slime.config.groups_train import CheckpointConfig, SyncConfig, TrainConfig
from slime.config.megatron_flags import SHORTHANDS, lm_flags, native_flags
from slime.config.other_systems import other_name
from slime.errors import UserError


@dataclass(frozen=True)
class FlagGroups:
    """The groups of flags, in the order of ``--help all``; `slime.config.config.Config` adds where
    their values came from."""

    cluster: ClusterConfig
    data: DataConfig
    images: ImagesConfig
    rollout: RolloutConfig
    reward: RewardConfig
    eval: EvalConfig
    algorithm: AlgorithmConfig
    critic: CriticConfig
    distillation: DistillationConfig
    preference: PreferenceConfig
    train: TrainConfig
    megatron: MegatronConfig
    lora: LoraConfig
    checkpoint: CheckpointConfig
    sync: SyncConfig
    engine: EngineConfig
    quantised: QuantisedConfig
    fault_tolerance: FaultToleranceConfig
    observe: ObserveConfig
    debug: DebugConfig


#: Name of each group → its class.
GROUPS: dict[str, type] = typing.get_type_hints(FlagGroups)


@functools.lru_cache(maxsize=1)
def own_flags() -> dict[str, FlagSpec]:
    """Return every flag of the groups by its dest, in the order of the groups."""
    refused = read_table("refused_flags.toml")
    assert refused.keys() <= GROUPS.keys(), refused.keys() - GROUPS.keys()
    specs: dict[str, FlagSpec] = {}
    for group, cls in GROUPS.items():
        rows = [record_of(RefusedFlag, row) for row in refused.get(group, ())]
        for spec in (*specs_of(group, cls), *(refused_spec(group, cls, row) for row in rows)):
            assert spec.dest not in specs, spec.dest
            specs[spec.dest] = spec
    return specs


@functools.lru_cache(maxsize=1)
def all_flags() -> dict[str, FlagSpec]:
    """Return every flag by dest: slime's, Megatron's, SGLang's and the router's. If two have the
    same name, the first in this order wins."""
    own = own_flags()
    flags = dict(own)
    for more in (native_flags(own), lm_flags(), router_flags(), sglang_flags()):
        for dest, spec in more.items():
            flags.setdefault(dest, spec)
    return flags


@dataclass(frozen=True)
class Spelling:
    """What one word of a command line or one key of a YAML file sets.

    Attributes:
        spec: the flag that takes the value; None for a shorthand.
        negated: the spelling inverts the value: ``--no-…`` sets False, and ``no-…: false`` True.
        sets: for a shorthand, the values that it sets, by dest.
    """

    spec: FlagSpec | None
    negated: bool = False
    sets: tuple[tuple[str, Any], ...] = ()


@functools.lru_cache(maxsize=1)
def spellings() -> dict[str, Spelling]:
    """Return every accepted name, with dashes (``rollout-stop``, ``no-rope-fusion``) → what it
    sets."""
    table: dict[str, Spelling] = {}
    for spec in all_flags().values():
        for option in spec.options:
            table.setdefault(option[2:], Spelling(spec))
    for name, shorthand in SHORTHANDS.items():
        sets = tuple(shorthand["sets"].items())
        table.setdefault(name.replace("_", "-"), Spelling(None, sets=sets))
    for spec in all_flags().values():
        if spec.off:
            table.setdefault(spec.off[2:], Spelling(spec, negated=True))
    return table


def unknown_name(name: str, where: str) -> UserError:
    """Return the error for a name that is not a flag. It has the equivalent if the name belongs to
    another system, else the closest flags."""
    known = spellings()
    dashed = name.replace("_", "-")
    if dashed in known:
        return UserError(f"{where}there is no flag --{name}", fix=f"write --{dashed}, with dashes")
    if dashed.lower() in known:
        return UserError(f"{where}there is no flag --{name}", fix=f"write --{dashed.lower()}")
    other = sglang_that_has(dashed) if dashed.startswith("sglang-") else None
    if other is not None:
        here, there = other
        return UserError(
            f"{where}SGLang {here} does not have --{dashed}",
            why=f"SGLang {there} has it",
            fix="install that version",
        )
    meant = other_name(name)
    if meant is not None:
        return UserError(
            f"{where}there is no flag --{name}", why="it is another system's name", fix=meant.text
        )
    starts = [n for n in known if n.startswith(dashed)]
    near = starts if 0 < len(starts) <= 4 else nearest(dashed, known)
    shown = " or ".join(f"--{n}" for n in near)
    why = "abbreviations are not accepted" if starts else ""
    if not near and starts:
        why += f"; {len(starts)} names start so"
        shown = ", ".join(f"--{n}" for n in starts[:4])
    fix = f"did you mean {shown}?" if shown else "`slime train --help all` lists all flags"
    return UserError(f"{where}there is no flag --{name}", why=why, fix=fix)


def nearest(name: str, names: Iterable[str], count: int = 2) -> list[str]:
    """Return the closest spellings, best first; only the best if it is clearly closer than the
    next."""
    found = difflib.get_close_matches(name, list(names), n=count, cutoff=0.8)
    if len(found) > 1:
        ratios = [difflib.SequenceMatcher(None, name, other).ratio() for other in found]
        if ratios[0] - ratios[1] > 0.03:
            return found[:1]
    return found
