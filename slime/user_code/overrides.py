"""Parts of a rollout that a plugin may replace, and how to recognise a plugin of the reference
system.

A run looks up a part each time it calls it: `override_of("generate")` is the plugin's function, or
None for the built-in one. `slime.compat` fills the tables when it is imported; no other package
knows the old import paths.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from slime.errors import UserError

if TYPE_CHECKING:
    from slime.config.config import Config

Part = Literal[
    "generate",
    "generate_and_reward",
    "generate_and_reward_group",
    "rollout",
    "evaluation",
    "post",
    "pop_first",
    "reward",
    "batched_reward",
    "remote_reward",
    "grade_math",
    "grade_deepscaler",
    "grade_dapo",
    "grade_f1",
    "grade_gpqa",
    "grade_ifbench",
]
_PARTS = frozenset(get_args(Part))
_overrides: dict[str, Any] = {}
_old_modules: set[str] = set()


def override_of(part: Part) -> Any:
    """Return the plugin's function for ``part``; None for the built-in function.

    Example:
        >>> override_of("generate") is None
        True
    """
    assert part in _PARTS, part
    return _overrides.get(part)


def set_override(part: Part, function: Any) -> None:
    """Use ``function`` for ``part`` from now on; None restores the built-in function."""
    assert part in _PARTS, part
    if function is None:
        _overrides.pop(part, None)
    else:
        _overrides[part] = function


def register_old_modules(names: Mapping[str, Any]) -> None:
    """Register import paths that only plugins of the reference system use."""
    _old_modules.update(names)


def old_plugin(config: Config) -> str | None:
    """Return the path of the first hook whose file imports a module of the reference system; None
    if there is none. Hooks that cannot be loaded are skipped: another check refuses them."""
    from slime.user_code.hooks import HOOKS
    from slime.user_code.loading import load_function  # needs installed packages

    given = config.flat()
    for flag in (*HOOKS, "data_source_path"):
        value = getattr(given, flag)
        for path in value if isinstance(value, list) else [value]:
            with contextlib.suppress(UserError):
                if path and _imports_old_path(load_function(path)):
                    return str(path)
    return None


def follows_old_plugin(config: Config, flag: str) -> bool:
    """Tell whether ``flag`` has its default value in a run with a plugin of the reference
    system."""
    return config.origins.get(flag, "default") == "default" and old_plugin(config) is not None


def _imports_old_path(hook: Any) -> bool:
    try:
        file = inspect.getsourcefile(inspect.unwrap(hook))
    except TypeError:  # a callable object has no source file
        return False
    return file is not None and Path(file).is_file() and _file_imports_old_path(file)


@functools.cache
def _file_imports_old_path(file: str) -> bool:
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        if not _old_modules.isdisjoint(names):
            return True
    return False
