"""What is told of flags: ``--help``, docs/flags.md, and the words that both have in common."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable
from typing import TextIO

from slime.config.engine_flags import SGLANG_RESERVED, sglang_args, stored_sglang_args, with_prefix
from slime.config.flag import FlagSpec
from slime.config.flags import GROUPS, all_flags
from slime.config.megatron_flags import SHORTHANDS
from slime.config.native import megatron_version

_INTRO = {
    "train": "Post-train a language model: generate, train, push the weights, in lock step.",
    "train_async": "Post-train a language model: rollouts are generated ahead of training.",
}
_METAVAR = {"int": "INT", "float": "FLOAT", "str": "TEXT", "json": "JSON", "int_or_list": "INT|LIST", "bool": ""}


def print_help(entry: str, stream: TextIO | None = None) -> None:
    """Print everything that `slime.config.parse_args` accepts and this version supports."""
    out = stream or sys.stdout
    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    script = entry.replace("_", "-")
    print(f"usage: slime {script} [--flag VALUE ...]      (or python {entry}.py …)\n", file=out)
    print(_INTRO[entry], file=out)
    print(
        "\nFlags have no abbreviations. --config FILE.yaml sets the same names; flags win. A switch that a YAML file\n"
        "turned on is turned off by --no-<name>. docs/flags.md has all flags, refused ones too.",
        file=out,
    )
    flags = [spec for spec in all_flags().values() if not spec.meta.refused]
    for group, cls in GROUPS.items():
        print(f"\n{group}: {(cls.__doc__ or '').splitlines()[0]}", file=out)
        for spec in flags:
            if spec.group == group and not spec.sections:
                print(_entry(spec, spec.help, width), file=out)
    print(f"\nMegatron (megatron-core {megatron_version()}; with Megatron's own meaning):", file=out)
    for spec in flags:
        if spec.group == "megatron" and spec.sections:
            print(_entry(spec, _first_sentence(spec.help), width), file=out)
    version = sglang_args()[0]
    _names(flags, "sglang", f"SGLang's server (sglang {version}), behind --sglang-:", width, out)
    _names(flags, "router", "The router (sglang-router), behind --router-:", width, out)


def default_text(spec: FlagSpec) -> str:
    """The default as documentation shows it: a constant, a formula, or nothing."""
    if spec.meta.derived:
        return spec.meta.derived
    if spec.default in (None, (), {}, "") or (spec.kind == "bool" and spec.default is False):
        return ""
    if spec.kind == "bool":
        return "on"
    if isinstance(spec.default, (tuple, list)):
        return " ".join(map(str, spec.default))
    return f"{spec.default:g}" if isinstance(spec.default, float) else str(spec.default)


def range_text(spec: FlagSpec) -> str:
    """Which numbers the flag takes: "more than 0 and at most 1"; empty when any."""
    return spec.meta.range.words if spec.meta.range else ""


def needs_text(spec: FlagSpec) -> str:
    """In which combinations the flag is refused, or only warned of, because it would do nothing.

    Example:
        >>> needs_text(all_flags()["opsm_delta"])
        'refused without --use-opsm'
    """
    refused = [need.words() for need in spec.meta.needs if not need.warns]
    warned = [need.words() for need in spec.meta.needs if need.warns]
    parts = [f"refused {', or '.join(refused)}"] if refused else []
    parts += [f"a warning {', or '.join(warned)}"] if warned else []
    return "; ".join(parts)


def status_text(spec: FlagSpec) -> str:
    """works, "refused: reason", or "no effect: reason", with single values that are refused and `needs_text`."""
    if spec.meta.refused:
        return f"refused: {spec.meta.refused}"
    if spec.meta.no_effect:
        return f"no effect: {spec.meta.no_effect}"
    values = [f"`{value}` refused: {reason}" for value, reason in spec.meta.refused_values.items()]
    return "; ".join(["works", *values, *filter(None, [needs_text(spec)])])


def metavar(spec: FlagSpec) -> str:
    """What stands behind the flag: INT, {a,b}, TEXT …, or nothing for a switch."""
    shown = "{" + ",".join(map(str, spec.choices)) + "}" if spec.choices else _METAVAR[spec.kind]
    return f"{shown} …" if spec.many and shown else shown


def _entry(spec: FlagSpec, text: str, width: int) -> str:
    option = f"{spec.option}, {spec.off}" if spec.kind == "bool" and spec.default is True else spec.option
    head = f"  {option} {metavar(spec)}".rstrip()
    default = default_text(spec)
    notes = [f"also {', '.join(spec.options[1:])}"] if len(spec.options) > 1 else []
    notes += [range_text(spec)] if spec.meta.range else []
    notes += [needs_text(spec)] if spec.meta.needs else []
    notes += [f"no effect: {spec.meta.no_effect}"] if spec.meta.no_effect else []
    notes += [f"default: {default}"] if default else []
    body = text + (f" [{'; '.join(notes)}]" if notes else "")
    if len(head) > 34:
        wrapped = textwrap.wrap(body, width, initial_indent=" " * 36, subsequent_indent=" " * 36)
        return "\n".join([head, *wrapped])
    return textwrap.fill(body, width, initial_indent=head.ljust(36), subsequent_indent=" " * 36) if body else head


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "." if text else ""


def _names(flags: list[FlagSpec], section: str, title: str, width: int, out: TextIO) -> None:
    names = [spec.option for spec in flags if section in spec.sections]
    names += [option for spec in flags if section in spec.sections for option in spec.options[1:]]
    print(f"\n{title}", file=out)
    text = textwrap.fill(
        " ".join(names),
        width,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    print(text, file=out)


# -- docs/flags.md ---------------------------------------------------------------------------------------

_HEAD = """# Flags

Generated by `python tools/make_docs.py` from the tables in `slime/config/`; do not edit.

Every flag either **works** or is **refused** by name with the reason, also where only the combination makes it do
nothing ("refused without …"). What is about speed alone and has **no effect** here is accepted with a warning.
`slime flags NAME` shows one flag with what it needs and who reads it, `slime flags NAME outputs/RUN` also its value in
that run and where it came from. Flags have no abbreviations, an unknown one is an error that names the nearest.
`--config file.yaml` sets the same names (with dashes or underscores); flags win over it. `--custom-config-path` wins
over both, and may carry names of your own for hooks. A switch that a YAML file turned on is turned off by
`--no-<name>`. A value that begins with two dashes is written `--flag=--value`.

An empty default means unset, or off for a switch. *Italics* are defaults that follow from other values; the run
folder's `config.json` says for each value where it came from.
"""

_TABLE_HEAD = "| flag | value | range | default | status | meaning |\n|---|---|---|---|---|---|"


def flags_page() -> str:
    """The text of docs/flags.md. Does not depend on the host (SGLang's table is the stored one)."""
    flags = all_flags().values()
    parts = [_HEAD]
    for group, cls in GROUPS.items():
        own = [spec for spec in flags if spec.group == group and not spec.sections]
        parts.append(f"## {group}\n\n{(cls.__doc__ or '').splitlines()[0]}\n\n{_TABLE_HEAD}\n{_rows(own)}\n")
    native = [spec for spec in flags if spec.group == "megatron" and spec.sections and spec.origin != "Megatron-LM"]
    parts.append(
        f"## Megatron\n\nFields of megatron-core {megatron_version()}, with Megatron's own meaning.\n\n"
        f"{_TABLE_HEAD}\n{_rows(native)}\n"
    )
    extra = [spec for spec in flags if spec.origin == "Megatron-LM"]
    shorthands = "\n".join(
        f"| `--{name.replace('_', '-')}` |  |  |  | works | {shorthand.help} |"
        for name, shorthand in SHORTHANDS.items()
    )
    parts.append(
        "## Megatron-LM's other names\n\nArguments of Megatron-LM's launch scripts that are no field of megatron-core. "
        "What they say of the model is checked against the Hugging Face config.\n\n"
        f"{_TABLE_HEAD}\n{_rows(extra)}\n{shorthands}\n"
    )
    version, arguments = stored_sglang_args()
    sglang = with_prefix("sglang", arguments, SGLANG_RESERVED, version).values()
    parts.append(
        f"## SGLang\n\nOptions of SGLang's server behind `--sglang-` (table of sglang {version}; an installed SGLang's "
        f"own options are taken instead). Its documentation has their meaning.\n\n{_TABLE_HEAD}\n{_rows(sglang)}\n"
    )
    router = [spec for spec in flags if "router" in spec.sections]
    parts.append(f"## Router\n\nOptions of {router[0].origin} behind `--router-`.\n\n{_TABLE_HEAD}\n{_rows(router)}\n")
    return "\n".join(parts)


def _rows(specs: Iterable[FlagSpec]) -> str:
    return "\n".join(_row(spec) for spec in specs)


def _row(spec: FlagSpec) -> str:
    names = ", ".join(f"`{option}`" for option in (*spec.options, *_off_of(spec)))
    default = default_text(spec)
    default = f"*{default}*" if spec.meta.derived else f"`{default}`" if default else ""
    value = f"`{metavar(spec)}`" if metavar(spec) else ""
    cells = (names, value, range_text(spec), default, status_text(spec), spec.help)
    return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"


def _off_of(spec: FlagSpec) -> tuple[str, ...]:
    """The off spelling, where it is not the plain ``--no-<name>`` of a switch that is off anyway."""
    return (spec.off,) if spec.off and (spec.default is not False or not spec.off.startswith("--no-")) else ()
