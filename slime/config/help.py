"""``--help``: our flags by group with their meaning, Megatron's, and the names of SGLang's and the router's."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TextIO

from slime.config.engine_flags import sglang_args
from slime.config.native import megatron_version
from slime.config.registry import all_flags
from slime.config.specs import GROUPS, FlagSpec, field_docs

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
                print(_entry(spec, help_of(spec), width), file=out)
    print(f"\nMegatron (megatron-core {megatron_version()}; with Megatron's own meaning):", file=out)
    for spec in flags:
        if spec.group == "megatron" and spec.sections:
            print(_entry(spec, _first_sentence(spec.help), width), file=out)
    version = sglang_args()[0]
    _names(flags, "sglang", f"SGLang's server (sglang {version}), behind --sglang-:", width, out)
    _names(flags, "router", "The router (sglang-router), behind --router-:", width, out)


def help_of(spec: FlagSpec) -> str:
    """The docstring under the field, or what the foreign source says."""
    return spec.help if spec.sections else field_docs(GROUPS[spec.group])[spec.attribute]


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


def metavar(spec: FlagSpec) -> str:
    """What stands behind the flag: INT, {a,b}, TEXT …, or nothing for a switch."""
    shown = "{" + ",".join(map(str, spec.choices)) + "}" if spec.choices else _METAVAR[spec.kind]
    return f"{shown} …" if spec.many and shown else shown


def _entry(spec: FlagSpec, text: str, width: int) -> str:
    option = f"{spec.option}, {spec.off}" if spec.kind == "bool" and spec.default is True else spec.option
    head = f"  {option} {metavar(spec)}".rstrip()
    default = default_text(spec)
    notes = [f"also {', '.join(spec.options[1:])}"] if len(spec.options) > 1 else []
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
