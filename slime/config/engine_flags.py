"""``--sglang-…`` and ``--router-…``: the options of SGLang's server and of sglang-router, with a
prefix.

`tools/make_flag_tables.py` generates the tables of options: of the newest supported SGLang, with
the differences of the other supported releases, and of the pinned router.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import re
from dataclasses import dataclass, replace
from typing import Any

from slime.config.data import read_table, record_of
from slime.config.engine_needs import never_acting, requirements
from slime.config.flag import FlagMeta, FlagSpec
from slime.documentation import with_doc_urls


@dataclass(frozen=True)
class EngineFlags:
    """Facts about an engine that flags need without importing the engine.

    Attributes:
        kind: the module with the other facts, its `slime.engines.kinds.EngineKind`, as ``KIND``.
        section: the `FlagSpec.sections` name of the engine's own options; "" if it has none.
        spans_nodes: one engine may have GPUs of several nodes.
        splits_prefill: some engines may prefill for others that decode.
        mask_needs_top_k: the engine reports the tokens that could be sampled only if top-k bounds
            their number.
    """

    kind: str
    section: str = ""
    spans_nodes: bool = False
    splits_prefill: bool = False
    mask_needs_top_k: bool = False


#: Value of ``--rollout-engine`` → its facts.
ENGINE_OPTIONS = {
    "embedded": EngineFlags("slime.embedded.kind"),
    "sglang": EngineFlags(
        "slime.engines.sglang.kind",
        section="sglang",
        spans_nodes=True,
        splits_prefill=True,
        mask_needs_top_k=True,
    ),
}


def _reserved(table: list[dict[str, Any]]) -> dict[str, str]:
    return {option: with_doc_urls(row["reason"]) for row in table for option in row["options"]}


_RESERVED = read_table("reserved_engine_options.toml")
#: Options of SGLang's server that slime sets itself. name → reason
SGLANG_RESERVED: dict[str, str] = _reserved(_RESERVED["sglang"])
#: Options of the router that slime sets itself. name → reason
ROUTER_RESERVED: dict[str, str] = _reserved(_RESERVED["router"])

#: Values of SGLang's options that affect only speed and are replaced. name → value → (replacement,
#: reason)
SGLANG_INSTEAD: dict[str, dict[str, tuple[str, str]]] = {
    "moe_a2a_backend": {
        "deepep": (
            "none",
            "DeepEP's exchange is not in this version; experts give the same results by "
            "collectives",
        )
    },
}


@dataclass(frozen=True)
class ForeignArg:
    """One argument of another program's command line.

    Attributes:
        name: the first long option, without leading dashes, with underscores.
        kind: "bool" (no value), "int", "float", "str" or "json".
        many: takes one or more values.
        value_optional: may be given without a value.
        negatable: has a ``--no-`` form.
        choices: allowed values, empty when open.
    """

    name: str
    kind: str = "str"
    default: Any = None
    many: bool = False
    value_optional: bool = False
    negatable: bool = False
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    help: str = ""


#: The newest release of SGLang with which slime was run on GPUs.
SGLANG_ON_GPUS = "0.5.16"


@functools.cache
def _sglang_table() -> dict[str, Any]:
    return read_table("sglang.json")


def sglang_versions() -> list[str]:
    """Return the supported releases of SGLang, the oldest first."""
    table = _sglang_table()
    return [*table["other_versions"], table["version"]]


@functools.cache
def stored_sglang_args() -> tuple[str, list[ForeignArg]]:
    """Return (version, arguments) of the newest supported SGLang."""
    table = _sglang_table()
    return table["version"], [record_of(ForeignArg, row) for row in table["arguments"]]


@functools.cache
def sglang_args() -> tuple[str, list[ForeignArg]]:
    """Return (version, arguments) of the installed SGLang. A release without a table has the
    arguments of the closest earlier one. Without SGLang: those of `SGLANG_ON_GPUS`."""
    try:
        installed = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        installed = SGLANG_ON_GPUS
    return sglang_args_of(installed)


def sglang_args_of(installed: str) -> tuple[str, list[ForeignArg]]:
    """Return (version, arguments) of a release."""
    newest, arguments = stored_sglang_args()
    others = _sglang_table()["other_versions"]
    versions = sglang_versions()
    older = [version for version in versions if _release(version) <= _release(installed)]
    version = older[-1] if older else versions[0]
    if version == newest:
        return installed, arguments
    changed = {row["name"]: record_of(ForeignArg, row) for row in others[version]["arguments"]}
    kept = [arg for arg in arguments if arg.name not in {*others[version]["without"], *changed}]
    return installed, [*kept, *changed.values()]


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def sglang_that_has(option: str) -> tuple[str, str] | None:
    """Return (installed version, newest supported version) if only the latter has the option, else
    None.

    Args:
        option: for example "sglang-mem-fraction-static".
    """
    version, arguments = sglang_args()
    stored_version, stored = stored_sglang_args()
    name = option.removeprefix("sglang-").replace("-", "_")
    here, there = (
        {x for arg in table for x in (arg.name, *arg.aliases)} for table in (arguments, stored)
    )
    return (version, stored_version) if name in there - here else None


@functools.cache
def sglang_flags() -> dict[str, FlagSpec]:
    """Return ``--sglang-<name>`` for each option of SGLang's server, by dest."""
    version, arguments = sglang_args()
    return with_prefix("sglang", arguments, SGLANG_RESERVED, f"sglang {version}")


@functools.cache
def router_flags() -> dict[str, FlagSpec]:
    """Return ``--router-<name>`` for each option of sglang-router, by dest."""
    table = read_table("sglang_router.json")
    arguments = {row["name"]: record_of(ForeignArg, row) for row in table["arguments"]}
    # launch scripts of the reference system use other names of the policy and of a value
    policy = arguments["policy"]
    arguments["policy"] = replace(policy, choices=(*policy.choices, "consistent_hashing"))
    origin = f"sglang-router {table['version']}"
    flags = with_prefix("router", list(arguments.values()), ROUTER_RESERVED, origin)
    spec = flags["router_policy"]
    aliases = ("sglang-router-strategy", "sglang-router-policy")
    flags["router_policy"] = replace(spec, meta=replace(spec.meta, aliases=aliases))
    return flags


def with_prefix(
    prefix: str, arguments: list[ForeignArg], reserved: dict[str, str], origin: str
) -> dict[str, FlagSpec]:
    """Return the flags for another program's arguments: ``--<prefix>-<name>``, into
    ``config.engine.<prefix>``."""
    specs = {}
    needs = requirements(prefix, {arg.name: arg.choices for arg in arguments})
    idle = never_acting(prefix)
    for arg in arguments:
        reason = reserved.get(arg.name, "")
        dest = f"{prefix}_{arg.name}"
        meta = FlagMeta(
            aliases=tuple(f"{prefix}-{alias}".replace("_", "-") for alias in arg.aliases),
            off="" if arg.negatable else "-",
            refused=reason,
            is_reserved=bool(reason),
            instead=SGLANG_INSTEAD.get(arg.name, {}) if prefix == "sglang" else {},
            needs=needs.get(arg.name, ()),
            no_effect=idle.get(arg.name, ""),
            read_by=("engine",) if prefix == "sglang" else ("router",),
        )
        specs[dest] = FlagSpec(
            dest=dest,
            group="engine",
            attribute=arg.name,
            kind=arg.kind,  # type: ignore[arg-type]
            default=arg.default,
            sections=(prefix,),
            many=arg.many,
            value_optional=arg.value_optional,
            optional=True,
            choices=arg.choices,
            help=arg.help,
            meta=meta,
            origin=origin,
        )
    return specs


def to_argv(settings: dict[str, Any]) -> list[str]:
    """Return settings, as `Config.engine.sglang` and `.router` hold them, as command-line words.

    Example:
        >>> to_argv({
        ...     "mem_fraction_static": 0.8, "disable_cuda_graph": True, "cuda_graph_bs": (1, 2)})
        ['--mem-fraction-static', '0.8', '--disable-cuda-graph', '--cuda-graph-bs', '1', '2']
    """
    argv: list[str] = []
    for name, value in settings.items():
        option = "--" + name.replace("_", "-")
        if value is True or value is None:  # a switch, or an option without its optional value
            argv.append(option)
        elif value is False:
            argv.append("--no-" + option[2:])
        elif isinstance(value, (tuple, list)):
            argv += [
                option,
                *(json.dumps(item) if isinstance(item, dict) else str(item) for item in value),
            ]
        elif isinstance(value, dict):
            argv += [option, json.dumps(value)]
        elif str(value).startswith("-"):
            argv.append(f"{option}={value}")
        else:
            argv += [option, str(value)]
    return argv
