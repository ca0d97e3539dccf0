"""Model families that the reference system trains and this version cannot.

A launch script describes such a model in a dozen flags. One error refuses them all and names the
family.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.data import read_table, record_of
from slime.config.draft import UserFlags
from slime.config.flag import option_of
from slime.documentation import doc_url
from slime.errors import UserError

_PLUGINS = "slime_plugins.models."


@dataclass(frozen=True)
class MissingFamily:
    """A family without a table in `slime.models`.

    Attributes:
        name: its usual name.
        lacks: the part of the family that is not implemented.
        modules: the reference system's modules with its layers, below ``slime_plugins.models``.
        flags: dests that only models of this family, or of families listed before it, set.
    """

    name: str
    lacks: str
    modules: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


#: If a command line fits several families, the error names the first.
MISSING_FAMILIES = tuple(
    record_of(MissingFamily, row) for row in read_table("missing_families.toml")["family"]
)

#: Modules of the reference system → the built-in family that replaces them.
BUILT_IN: dict[str, str] = {
    _PLUGINS + "gemma3": "Gemma 3",
    _PLUGINS + "glm4": "GLM-4",
    _PLUGINS + "qwen3_5": "Qwen3.5",
    _PLUGINS + "qwen3_next": "Qwen3-Next",
    _PLUGINS + "gptoss": "gpt-oss",
    _PLUGINS + "gpt_oss": "gpt-oss",
    _PLUGINS + "minimax_m2": "MiniMax-M2",
}


def missing_family(given: UserFlags, set_flags: frozenset[str]) -> UserError | None:
    """Return the error for the model family of a command line, or None if it is not missing.

    Args:
        set_flags: dests whose value differs from the default.
    """
    module = next(iter(given.values.get("spec", ())), "")
    plugin = module.removeprefix(_PLUGINS).split(".")[0] if module.startswith(_PLUGINS) else ""
    if (
        plugin
        and module not in BUILT_IN
        and not any(plugin in family.modules for family in MISSING_FAMILIES)
    ):
        return _refusal(f"the family of {module}", "its layers", [f"--spec {module}"])
    for family in MISSING_FAMILIES:
        named = sorted(map(option_of, set_flags.intersection(family.flags)))
        if plugin and plugin in family.modules:
            named = [f"--spec {' '.join(given.values['spec'])}"]
        if named:
            return _refusal(family.name, family.lacks, named)
    return None


def described_by(family_error: UserError | None, dest: str) -> bool:
    """Tell whether ``family_error`` covers the flag, because the flag describes a missing
    family."""
    return family_error is not None and (
        dest == "spec" or any(dest in family.flags for family in MISSING_FAMILIES)
    )


def _refusal(name: str, lacks: str, named: list[str]) -> UserError:
    plural = "are" if " and " in name else "is"
    return UserError(
        f"{name} {plural} not in this version",
        why=f"{lacks} {'are' if lacks.endswith('s') else 'is'} missing; asked for by "
        f"{', '.join(named)}",
        fix=f"see the families that can be trained: {doc_url('model-families.md')}",
    )
