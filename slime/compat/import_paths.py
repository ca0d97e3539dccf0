"""Import paths of plugins of earlier versions → the paths of the same objects here.

    slime.utils.types.Sample                     is  slime.samples.types.Sample
    slime.rollout.sglang_rollout.GenerateState   is  slime.compat.generating.PluginGenerateState

If a hook of a run imports an old path (`slime.user_code.overrides.old_plugin`), responses keep
their special tokens and labels keep their type, unless a flag says otherwise.

The old modules do not exist as files. `install`, called when `slime` is imported, adds a finder to
`sys.meta_path` that creates them from `import_paths.toml`. A name is imported when it is first
used, so importing an old module is cheap. Functions with another signature are in `slime.compat`.

A plugin may replace a function of `REPLACEABLE` in an old module: the run then calls the plugin's
function (`slime.user_code.overrides`). A name without a counterpart raises an ImportError that says
what to use instead (`NO_COUNTERPART`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from slime.documentation import doc_url, with_doc_urls
from slime.user_code.overrides import Part, register_old_modules, set_override

_TABLE = tomllib.loads(Path(__file__).with_name("import_paths.toml").read_text(encoding="utf-8"))
#: Old module → name in it → "module:name" here. Old packages have an empty table.
OLD_MODULES: dict[str, dict[str, str]] = _TABLE["modules"]
#: "Module:name", or a whole module, that has no counterpart → what to use instead.
NO_COUNTERPART: dict[str, str] = {
    path: with_doc_urls(row["use"]) for row in _TABLE["no_counterpart"] for path in row["imports"]
}

#: Other name of one of slime's modules or packages → the module; submodules are included.
ALIASES: dict[str, str] = _TABLE["aliases"]

_HUB = "slime.rollout.rm_hub"
_ROLLOUT = "slime.rollout.sglang_rollout"
#: Old name that a plugin may replace for the whole run → the part of the run that it replaces.
#: A replacement of any other name affects only code that imports it from the old module.
REPLACEABLE: dict[str, Part] = {
    f"{_ROLLOUT}:generate": "generate",
    f"{_ROLLOUT}:generate_and_rm": "generate_and_reward",
    f"{_ROLLOUT}:generate_and_rm_group": "generate_and_reward_group",
    f"{_ROLLOUT}:generate_rollout": "rollout",
    f"{_ROLLOUT}:eval_rollout": "evaluation",
    f"{_ROLLOUT}:post": "post",
    f"{_HUB}:async_rm": "reward",
    f"{_HUB}:batched_async_rm": "batched_reward",
    f"{_HUB}:remote_rm": "remote_reward",
    f"{_HUB}:grade_answer_verl": "grade_math",
    f"{_HUB}:get_deepscaler_rule_based_reward": "grade_deepscaler",
    f"{_HUB}:f1_score": "grade_f1",
    f"{_HUB}:compute_gpqa_reward": "grade_gpqa",
    f"{_HUB}:compute_score_dapo": "grade_dapo",
    f"{_HUB}.ifbench:compute_ifbench_reward": "grade_ifbench",
    "slime.rollout.data_source:pop_first": "pop_first",
}


def _target(old: str) -> str:
    module, _, name = old.partition(":")
    return OLD_MODULES[module][name]


#: The same by the target of the old name, so that it may be replaced in any old module that has
#: it.
_PART_OF: dict[str, Part] = {_target(old): part for old, part in REPLACEABLE.items()}


class _OldModule(ModuleType):
    """An old module: names are imported from `OLD_MODULES` when they are first used."""

    def __getattr__(self, name: str) -> Any:
        names = OLD_MODULES[self.__name__]
        if reason := NO_COUNTERPART.get(f"{self.__name__}:{name}"):
            raise ImportError(
                f"{self.__name__}.{name} has no counterpart in this version; use: {reason}"
            )
        if name not in names:
            raise AttributeError(
                f"{self.__name__} is a path of earlier slime versions; of its names these live on: "
                f"{', '.join(sorted(names)) or 'none'}; {name!r} has no counterpart",
                name=name,
                obj=self,
            )
        value = _own(names[name])
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        target = OLD_MODULES.get(self.__name__, {}).get(name)
        if target is not None:
            _note_replacement(f"{self.__name__}.{name}", target, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if (part := _PART_OF.get(OLD_MODULES[self.__name__].get(name, ""))) is not None:
            set_override(part, None)

    def __dir__(self) -> list[str]:
        return sorted([*OLD_MODULES[self.__name__], *super().__dir__()])


def _own(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _note_replacement(path: str, target: str, value: Any) -> None:
    is_ours = value is _own(target)
    if (part := _PART_OF.get(target)) is not None:
        set_override(part, None if is_ours else value)
    elif not is_ours:
        logging.getLogger("slime").warning(
            "%s was replaced, and no part of the run looks it up there: what imports it from there "
            "gets the new one",
            path,
        )


def _alias_of(fullname: str) -> str | None:
    """Return the module that an alias means; None if the name is not an alias."""
    for alias, module in ALIASES.items():
        if fullname == alias or fullname.startswith(alias + "."):
            return module + fullname.removeprefix(alias)
    return None


#: Packages that exist only as old paths, so that an unknown module in them is an old path,
#: too.
_OLD_PACKAGES = ("slime.utils.", "slime.observability.", "slime.backends.", "slime.rollout.rm_hub.")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("slime."):
            return None
        if reason := NO_COUNTERPART.get(fullname):
            # without ``name=``: with it, "from package import module" would replace the message by
            # "cannot import name"
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in this version; use: {reason}"
            )
        if module := _alias_of(fullname):
            found = importlib.util.find_spec(module)
            if found is None:
                return None
            is_package = found.submodule_search_locations is not None
            return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)
        if fullname not in OLD_MODULES:
            if fullname.startswith(_OLD_PACKAGES):
                raise ModuleNotFoundError(
                    f"{fullname} has no counterpart in this version; see "
                    f"{doc_url('import-paths.md')}"
                )
            return None
        is_package = any(name.startswith(fullname + ".") for name in OLD_MODULES)
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="slime.compat.import_paths", is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        if spec.name not in OLD_MODULES:
            return None  # an alias: `exec_module` replaces it by the module itself
        return _OldModule(spec.name, f"Names of earlier slime versions; see {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        if target := _alias_of(module.__name__):
            sys.modules[module.__name__] = importlib.import_module(target)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that ``python -m`` runs for an alias."""
        target = _alias_of(fullname)
        source = f"import runpy; runpy.run_module({target!r}, run_name='__main__')"
        return compile(source, fullname, "exec")


def install() -> None:
    """Make the old paths importable. A second call has no effect."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # first: in an alias of a package, the file finder would load its modules a second time
        sys.meta_path.insert(0, _Finder())
        register_old_modules(OLD_MODULES)
