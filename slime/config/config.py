"""`Config`: the resolved, frozen configuration of a run, with views for hooks and for display."""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from slime.config.flags import GROUPS, all_flags, own_flags
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
from slime.errors import UserError
from slime.files import read_plain, write_atomically
from slime.redact import redacted


class MissingFlag(AttributeError):
    """``args`` has no such attribute. The nearest name is looked up only when the message is shown,
    because plugins probe with ``getattr(args, name, default)`` in their inner loops."""

    def __init__(self, attribute: str, known: dict[str, Any]) -> None:
        super().__init__(attribute)
        self._attribute = attribute
        self._known = known

    def __str__(self) -> str:
        near = difflib.get_close_matches(self._attribute, self._known, n=1)
        hint = f"; the nearest flag is {near[0]!r}" if near else ""
        return f"args has no {self._attribute!r}{hint}"


class FlatArgs(argparse.Namespace):
    """A mutable namespace of all flags. It is a copy: hooks see what other hooks set on it, and
    the `Config` does not change.

    Example:
        >>> args = config.flat()
        >>> args.n_samples_per_prompt
        8
        >>> args.n_sample_per_prompt
        MissingFlag: args has no 'n_sample_per_prompt'; the nearest flag is 'n_samples_per_prompt'
    """

    def __init__(self, values: dict[str, Any] | None = None, **more: Any) -> None:
        for name, value in {**(values or {}), **more}.items():
            setattr(self, name, _mutable(value))

    def __getattr__(self, name: str) -> Any:  # only called when the attribute is not there
        if name.startswith("__"):
            raise AttributeError(name)
        raise MissingFlag(name, vars(self))


def _mutable(value: Any) -> Any:
    """Return tuples as lists, which plugins expect, and copies of dicts and lists."""
    if isinstance(value, tuple):
        return [_mutable(item) for item in value]
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


@dataclass(frozen=True)
class Config:
    """All flags of a run, by group, after `slime.config.resolve`.

    Attributes:
        origins: where each value came from, by flag name with underscores: "flag", "yaml <file>",
            "default", or "derived: <formula>". Flags of Megatron and SGLang are there when the user
            set them.
        extra: names of --custom-config-path that are no flags; hooks find them in `flat()`.
        warnings: messages for the user that are no errors.

    Example:
        >>> config = make_config(
        ...     rollout_batch_size=32, n_samples_per_prompt=8, num_steps_per_rollout=2)
        >>> config.train.global_batch_size
        128
        >>> config.origins["global_batch_size"]
        'derived: rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout = 32 × 8 ÷ 2'
    """

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
    origins: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def can_share_base(self) -> bool:
        """Whether policy and critic may hold one frozen base: both train adapters, on the same
        GPUs. They do if both load the same weights."""
        if not (self.lora.lora_rank and self.critic.critic_lora_rank):
            return False
        # another model cannot use the storage of parameters that --fp8-param-gather makes
        on_same_gpus = self.algorithm.needs_critic and not self.critic.has_own_gpus
        return on_same_gpus and not self.megatron.transformer.get("fp8_param")

    # -- views -------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """All of slime's flags, and the flags of Megatron and SGLang that the user set, by name
        with underscores."""
        specs = all_flags()
        found = {}
        for dest in self.origins:
            spec = specs[dest]
            group = getattr(self, spec.group)
            if spec.sections:
                found[dest] = getattr(group, spec.sections[0])[spec.attribute]
            else:
                found[dest] = getattr(group, spec.attribute) if spec.attribute else spec.default
        return found

    def flat(self) -> FlatArgs:
        """``args`` for hooks: a new mutable namespace of every flag, unset ones at their defaults.

        Tuples become lists. Megatron's, SGLang's and the router's flags have their command-line
        names: ``args.num_layers``, ``args.sglang_mem_fraction_static``, ``args.router_policy``.
        """
        flat: dict[str, Any] = {}
        resolved = self.values()
        for dest, spec in all_flags().items():
            value = resolved.get(dest, spec.default)
            flat[dest] = value
            for alias in spec.meta.aliases:
                flat.setdefault(alias.replace("-", "_"), value)
        return FlatArgs({**flat, **self.extra})

    def for_hiding(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of `slime.redact.remember`: the flags, and ``extra``."""
        return self.values(), self.extra

    def describe(self) -> str:
        """One line with value and origin for each flag that is set or derived, by group."""
        specs = all_flags()
        lines = []
        for group in GROUPS:
            rows = [
                (dest, value)
                for dest, value in self.values().items()
                if specs[dest].group == group
                and self.origins[dest] != "default"
                and value is not None
            ]
            if rows:
                lines.append(group)
                lines += [
                    f"  {dest} = {_shown(dest, value)}   ({self.origins[dest]})"
                    for dest, value in rows
                ]
        return "\n".join(lines)

    # -- storage -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write config.json with secrets hidden: ``{group: {flag: value}, "extra": {…}, "origins":
        {flag: origin}, "checksum": …}``."""
        specs = all_flags()
        data: dict[str, Any] = {group: {} for group in GROUPS}
        for dest, value in self.values().items():
            data[specs[dest].group][dest] = redacted(value, dest)
        data["extra"] = redacted(self.extra)
        data["origins"] = self.origins
        data = json.loads(json.dumps(data, default=str))
        text = json.dumps(data | {"checksum": _checksum(data)}, indent=2, ensure_ascii=False)
        write_atomically(Path(path), f"{text}\n".encode("utf-8", "surrogatepass"))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Config:
        """Read the file that `save` wrote. Values stay as they were resolved; none is derived
        again.

        Raises:
            UserError: the file is not a configuration, has changed since it was written, or comes
                from a version with other flags.
        """
        specs = all_flags()
        try:
            data = json.loads(read_plain(path))
            checksum = data.pop("checksum", None)
            is_whole = checksum in (None, _checksum(data))  # an earlier release wrote none
            origins = dict(data["origins"])
            stored = {dest: value for group in GROUPS for dest, value in data[group].items()}
            extra = dict(data.get("extra", {}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path} is not a configuration of a run", why=f"{type(error).__name__}: {error}"
            ) from error
        if not is_whole:
            raise UserError(
                f"{path} is damaged",
                why=(
                    "its checksum does not match its content; to change a flag, repeat the "
                    "command of the run with that flag, --load and --save"
                ),
            )
        unknown = [dest for dest in origins if dest not in specs]
        missing = [dest for dest in own_flags() if dest not in stored]
        if unknown or missing:
            raise UserError(
                f"{path} was written by another version of slime",
                why=f"not known here: {', '.join(unknown) or 'none'}; missing: "
                f"{', '.join(missing) or 'none'}",
            )
        values = {
            dest: tuple(v) if specs[dest].many and isinstance(v, list) else v
            for dest, v in stored.items()
        }
        return build(values, origins, extra)


def _checksum(data: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())


def _shown(dest: str, value: Any) -> str:
    value = redacted(value, dest)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def build(
    values: dict[str, Any],
    origins: dict[str, str],
    extra: dict[str, Any],
    warnings: tuple[str, ...] = (),
) -> Config:
    """Build the `Config` from resolved values by dest. Flags of Megatron and SGLang go into the
    dicts of their groups."""
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    specs = all_flags()
    for dest, value in values.items():
        spec = specs[dest]
        if spec.attribute and not spec.sections:
            groups[spec.group][spec.attribute] = value
        for section in spec.sections:
            groups[spec.group].setdefault(section, {})[spec.attribute] = value
    built = {group: cls(**groups[group]) for group, cls in GROUPS.items()}
    return Config(**built, origins=origins, extra=extra, warnings=warnings)
