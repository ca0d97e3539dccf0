"""Secrets of a run that resumes.

config.json has `HIDDEN` in place of each secret (`slime.redact`). `slime resume` reads the secrets
from the environment, or from flags that the user passes again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from slime.config.config import Config, build
from slime.config.draft import UserFlags
from slime.config.flag import option_of
from slime.config.flags import all_flags
from slime.config.parse import read_argv, read_custom_config
from slime.errors import UserError
from slime.redact import HIDDEN

_VARIABLES = {"wandb_key": "WANDB_API_KEY"}
_Path = tuple[Any, ...]


def with_secrets(
    config: Config, words: list[str], environ: Mapping[str, str], command: str
) -> Config:
    """Return the configuration with every secret that `Config.save` has hidden.

    Args:
        config: as `Config.load` returns it.
        words: flags with their values; each must be hidden in config.json.
        command: the command line to repeat, for the message.
    Raises:
        UserError: environment variables are missing, or a flag in ``words`` is not hidden.
    """
    given = read_argv(words)
    values = config.values()
    extra = config.extra
    hidden = {dest: list(_hidden(value)) for dest, value in values.items()}
    hidden = {dest: paths for dest, paths in hidden.items() if paths}
    keys = list(_hidden(extra))
    _check_given(given, hidden, keys, config.checkpoint.save)
    if not config.observe.use_wandb and hidden.pop("wandb_key", []):
        values["wandb_key"] = None
    missing: dict[str, str] = {}
    if "custom_config_path" in given.values:
        custom = read_custom_config(given.values["custom_config_path"])
    else:
        custom = UserFlags()
    for dest, paths in hidden.items():
        if dest in given.values or dest in custom.values:
            values[dest] = given.values.get(dest, custom.values.get(dest))
            continue
        for path in paths:
            variable = _variable((dest, *path))
            if variable in environ:
                values[dest] = _with(values[dest], path, environ[variable])
            else:
                missing[variable] = option_of(dest)
    for path in keys:
        variable = _variable(path)
        found = _at(custom.extra, path)
        if found is None and variable not in environ:
            missing[variable] = f"{'.'.join(map(str, path))} of --custom-config-path"
        else:
            extra = _with(extra, path, environ[variable] if found is None else found)
    if missing:
        raise UserError(
            "the run cannot resume without its secrets, which its folder does not hold",
            why="not in the environment: "
            + ", ".join(f"{name} ({of})" for name, of in missing.items()),
            fix=f"{' '.join(f'{name}=…' for name in missing)} {command}; or add these flags to the "
            "command",
        )
    return build(values, config.origins, extra, config.warnings)


def _check_given(
    given: UserFlags, hidden: dict[str, list[_Path]], keys: list[_Path], save: str | None
) -> None:
    known = {*hidden, *(["custom_config_path"] if keys else [])}
    for dest in given.values:
        if dest not in known:
            raise UserError(
                f"slime resume takes no {option_of(dest)} of this run",
                why="it takes only flags that config.json hides: "
                f"{', '.join(map(option_of, sorted(known))) or 'none'}",
                fix="to change a flag, repeat the command of the run with that flag, and with "
                f"--load {save or 'set to its --save'}",
            )


def _hidden(value: Any, path: _Path = ()) -> Iterator[_Path]:
    """Yield the paths of hidden texts in a value of dicts and lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _hidden(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _hidden(inner, (*path, index))
    elif isinstance(value, str) and HIDDEN in value:
        yield path


def _variable(path: _Path) -> str:
    """Return the environment variable for a hidden value: the last key if that is a variable's
    name, else a name made of the path.

    Example:
        >>> paths = ("train_env_vars", "MY_TOKEN"), ("judge", "api_key"), ("wandb_key",)
        >>> tuple(map(_variable, paths))
        ('MY_TOKEN', 'JUDGE_API_KEY', 'WANDB_API_KEY')
        >>> _variable(("rm_url",)), _variable(("judges", 1, "url"))
        ('SLIME_RM_URL', 'JUDGES_1_URL')
    """
    if path[0] in _VARIABLES:
        return _VARIABLES[path[0]]
    if len(path) > 1 and str(path[-1]).isupper():
        return str(path[-1])
    name = re.sub(r"\W", "_", "_".join(map(str, path))).upper()
    return f"SLIME_{name}" if path[0] in all_flags() else name


def _with(value: Any, path: _Path, secret: str) -> Any:
    """Return a copy of ``value`` with ``secret`` at ``path``."""
    if not path:
        return secret
    first, *rest = path
    if isinstance(value, Mapping):
        return {**value, first: _with(value[first], tuple(rest), secret)}
    items = [
        _with(item, tuple(rest), secret) if index == first else item
        for index, item in enumerate(value)
    ]
    return tuple(items) if isinstance(value, tuple) else items


def _at(value: Any, path: _Path) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value
