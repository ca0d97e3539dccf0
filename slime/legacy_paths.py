"""Import paths of existing slime plugins → where the same things live here.

    from slime.utils.types import Sample                      is  slime.samples.types.Sample
    from slime.rollout.sglang_rollout import GenerateState    is  slime.rollout.generate.current_state

What such a plugin reads is what it was written for: where a hook of a run imports an old path (`old_plugin`), responses
keep their special tokens and labels their type, unless a flag says otherwise.

The old modules do not exist as files. `install`, called when `slime` is imported, adds a finder to `sys.meta_path`
that makes them up from the table below, one name at a time: importing an old path costs nothing until a name of it is
used, and a name that has no counterpart here is an ImportError that lists those that have one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime.config.config import Config

_HOOKS = "slime.hooks"
_GENERATE = "slime.rollout.generate"
_LOOP = "slime.rollout.loop"
_PLUGIN = "slime.rollout.plugin_api"
_FILTERS = "slime.rollout.filters"
_REWARDS = "slime.rollout.rewards"
_TYPES = "slime.samples.types"

#: Old module → name in it → "module:name" here. Packages stand for themselves with an empty table.
OLD_MODULES: dict[str, dict[str, str]] = {
    "slime.utils": {},
    "slime.utils.types": {
        "Sample": f"{_TYPES}:Sample",
    },
    "slime.utils.http_utils": {
        "post": f"{_PLUGIN}:post",
        "get": f"{_PLUGIN}:get",
    },
    "slime.utils.async_utils": {
        "run": f"{_LOOP}:run",
    },
    "slime.utils.misc": {
        "load_function": "slime.hook_loading:load_function",
    },
    "slime.rollout.base_types": {
        "RolloutFnTrainOutput": f"{_HOOKS}:RolloutFnTrainOutput",
        "RolloutFnEvalOutput": f"{_HOOKS}:RolloutFnEvalOutput",
        "call_rollout_fn": "slime.rollout.user_rollouts:call_rollout_fn",
    },
    "slime.rollout.data_source": {
        "DataSource": f"{_HOOKS}:DataSource",
        "RolloutDataSource": "slime.prompts.source:RolloutDataSource",
        "RolloutDataSourceWithBuffer": "slime.prompts.source:RolloutDataSource",
        "pop_first": "slime.samples.buffer:pop_first",
    },
    "slime.rollout.sglang_rollout": {
        "GenerateState": f"{_GENERATE}:current_state",
        "generate": f"{_GENERATE}:generate",
        "generate_and_rm": f"{_PLUGIN}:generate_and_rm",
        "generate_and_rm_group": f"{_PLUGIN}:generate_and_rm_group",
        "get_model_url": f"{_PLUGIN}:get_model_url",
        "generate_rollout": f"{_LOOP}:generate_rollout",
        "generate_rollout_async": f"{_LOOP}:generate_rollout_async",
    },
    "slime.rollout.sft_rollout": {
        "generate_rollout": f"{_PLUGIN}:generate_sft_rollout",
    },
    "slime.rollout.rm_hub": {
        "async_rm": f"{_PLUGIN}:async_rm",
        "batched_async_rm": f"{_PLUGIN}:batched_async_rm",
    },
    "slime.rollout.rm_hub.deepscaler": {
        "get_deepscaler_rule_based_reward": f"{_REWARDS}.math_grading:grade_deepscaler",
    },
    "slime.rollout.rm_hub.gpqa": {
        "compute_gpqa_reward": f"{_REWARDS}.text:grade_gpqa",
    },
    "slime.rollout.rm_hub.math_dapo_utils": {
        "compute_score": f"{_REWARDS}.text:grade_dapo",
    },
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": f"{_HOOKS}:DynamicFilterOutput",
        "MetricGatherer": f"{_FILTERS}:MetricGatherer",
        "call_dynamic_filter": f"{_FILTERS}:call_dynamic_filter",
        "should_drop_dynamic_filter_output": f"{_FILTERS}:should_drop_dynamic_filter_output",
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": f"{_FILTERS}:check_reward_nonzero_std",
        "check_reward_nonzero_std_with_fallback": f"{_FILTERS}:check_reward_nonzero_std_with_fallback",
    },
}


class _OldModule(ModuleType):
    """A module whose names are looked up in the table when they are first used."""

    def __getattr__(self, name: str) -> Any:
        names = OLD_MODULES[self.__name__]
        if name not in names:
            raise AttributeError(
                f"{self.__name__} is a path of earlier slime versions; of its names these live on: "
                f"{', '.join(sorted(names)) or 'none'}; {name!r} has no counterpart",
                name=name,
                obj=self,
            )
        module, _, attribute = names[name].partition(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted([*OLD_MODULES[self.__name__], *super().__dir__()])


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in OLD_MODULES:
            return None
        is_package = any(name.startswith(fullname + ".") for name in OLD_MODULES)
        return importlib.machinery.ModuleSpec(fullname, self, origin="slime.legacy_paths", is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _OldModule(spec.name, f"Names of earlier slime versions; see {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make the old paths importable. Calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


# -- what such plugins expect ----------------------------------------------------------------------------------------


def old_plugin(config: Config) -> str | None:
    """The path of the first hook whose file imports a path of earlier versions; None where there is none. A hook that
    cannot be loaded is refused elsewhere."""
    from slime.errors import UserError
    from slime.hook_loading import load_function
    from slime.hooks import HOOKS

    given = config.flat()
    for flag in (*HOOKS, "data_source_path"):
        value = getattr(given, flag)
        for path in value if isinstance(value, list) else [value]:
            with contextlib.suppress(UserError):
                if path and _imports_old_path(load_function(path)):
                    return str(path)
    return None


def follows_old_plugin(config: Config, flag: str) -> bool:
    """Whether ``flag`` was left at its default, in a run with a plugin that was written for another one."""
    return config.origins.get(flag, "default") == "default" and old_plugin(config) is not None


def _imports_old_path(hook: Any) -> bool:
    try:
        file = inspect.getsourcefile(inspect.unwrap(hook))
    except TypeError:  # an object that can be called: where it was made, nobody knows
        return False
    return file is not None and Path(file).is_file() and _file_imports_old_path(file)


@functools.cache
def _file_imports_old_path(file: str) -> bool:
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module in OLD_MODULES:
            return True
        if isinstance(node, ast.Import) and any(alias.name in OLD_MODULES for alias in node.names):
            return True
    return False
