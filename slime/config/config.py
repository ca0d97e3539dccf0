"""`Config`: the resolved, frozen configuration of a run, with views for hooks and for display."""

from __future__ import annotations

import argparse
import copy
import difflib
import functools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.config.flags import GROUPS, FlagGroups, all_flags, own_flags
from slime.errors import UserError
from slime.files import json_checksum, read_plain, write_atomically
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
    """A mutable namespace of all flags. It is a copy: the `Config` does not change.

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


class SharedArgs(FlatArgs):
    """The ``args`` that all hooks of a process share. Hooks may keep attributes of their own on it;
    changing a flag raises, because the run would not notice. Copies can be changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        for name, value in vars(self).items():
            if name in all_flags() and type(value) in _SEALED:
                vars(self)[name] = _SEALED[type(value)](value)

    def __setattr__(self, name: str, value: Any) -> None:
        known = vars(self)
        if name in known and name in all_flags():
            if type(value) is not type(known[name]) or value != known[name]:
                raise _unchangeable(f"args.{name} = {value!r:.60}", name)
            return
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in all_flags():
            raise _unchangeable(f"del args.{name}", name)
        super().__delattr__(name)

    def __copy__(self) -> FlatArgs:
        twin = FlatArgs()
        vars(twin).update(
            (name, copy.copy(value) if isinstance(value, (_SealedList, _SealedDict)) else value)
            for name, value in vars(self).items()
        )
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatArgs:
        return FlatArgs(copy.deepcopy(dict(vars(self)), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return FlatArgs, (dict(vars(self)),)


def _unchangeable(what: str, name: str = "") -> UserError:
    from slime.user_code.loading import FunctionFailed

    flag = f"--{name.replace('_', '-')}" if name else "the flag"
    return FunctionFailed(
        f"{what} changes a flag of the run, which would have no effect",
        why="args is a copy of the run's flags, which the other processes and slime's own code do "
        "not read",
        fix=f"pass {flag} on the command line; to call a function with other flags, change "
        "copy.copy(args); attributes of your own can be set",
    )


def _refusing(name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _unchangeable(f"{name} of the value of a flag in args ({list(self)!r:.60})")

    return refuse


class _SealedList(list[Any]):
    """The value of a list flag in `SharedArgs`; ``list(value)`` can be changed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(list(self), memo)

    def __copy__(self) -> list[Any]:
        return list(self)


class _SealedDict(dict[Any, Any]):
    """The value of a flag of JSON in `SharedArgs`; ``dict(value)`` can be changed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __copy__(self) -> dict[Any, Any]:
        return dict(self)


for _name in ("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse",
              "__setitem__", "__delitem__", "__iadd__", "__imul__"):  # fmt: skip
    setattr(_SealedList, _name, _refusing(_name))
for _name in ("update", "setdefault", "pop", "popitem", "clear",
              "__setitem__", "__delitem__", "__ior__"):  # fmt: skip
    setattr(_SealedDict, _name, _refusing(_name))
_SEALED: dict[type, type] = {list: _SealedList, dict: _SealedDict}


def _mutable(value: Any) -> Any:
    """Return tuples as lists, which plugins expect, and copies of dicts and lists."""
    if isinstance(value, tuple):
        return [_mutable(item) for item in value]
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


@dataclass(frozen=True)
class Config(FlagGroups):
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

    origins: dict[str, str]
    extra: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    @property
    def can_share_base(self) -> bool:
        """Whether policy and critic may hold one frozen base: both train adapters, on the same
        GPUs with the same layout. They do if both load the same weights."""
        if not (self.lora.lora_rank and self.critic.critic_lora_rank):
            return False
        # another model cannot use the storage of parameters that --fp8-param-gather makes
        on_same_gpus = self.algorithm.needs_critic and not self.critic.has_own_gpus
        same_parts = on_same_gpus and not self.critic_has_own_layout
        return same_parts and not self.megatron.transformer.get("fp8_param")

    @property
    def critic_has_own_layout(self) -> bool:
        """Whether the critic, on the policy's GPUs, is divided over them in another way."""
        if not self.algorithm.needs_critic or self.critic.has_own_gpus:
            return False
        own = self.critic.parallel_sizes
        return any(getattr(self.megatron, name) != size for name, size in own.items())

    # -- views -------------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Return all of slime's flags, and the flags of Megatron and SGLang that the user set, by
        name with underscores."""
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
        """Return ``args`` for hooks: a new mutable namespace of all flags, unset ones at defaults.

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

    @functools.cached_property
    def shared_args(self) -> SharedArgs:
        """``args`` for the hooks of this process: `flat`, whose flags cannot be changed. What one
        hook sets on it, others find."""
        return SharedArgs(vars(self.flat()))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state.pop("shared_args", None)  # users' objects on it belong to this process
        return state

    def for_hiding(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of `slime.redact.remember`: the flags, and ``extra``."""
        return self.values(), self.extra

    def describe(self) -> str:
        """Return one line with value and origin for each flag that is set or derived, by group."""
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
        text = json.dumps(data | {"checksum": json_checksum(data)}, indent=2, ensure_ascii=False)
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
            is_whole = checksum in (None, json_checksum(data))  # an earlier release wrote none
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
