"""Texts about flags: ``--help`` and docs/flags.md."""

from __future__ import annotations

import difflib
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from slime.config.data import read_text
from slime.config.engine_flags import (
    SGLANG_ON_GPUS,
    SGLANG_RESERVED,
    sglang_args,
    sglang_args_of,
    sglang_versions,
    with_prefix,
)
from slime.config.flag import FlagSpec, option_of
from slime.config.flags import GROUPS, all_flags
from slime.config.groups_rollout import REWARD_TYPES
from slime.config.megatron_flags import SHORTHANDS, megatron_core
from slime.config.resolve import DEFAULT_PROMPTS, DEFAULT_SAMPLES
from slime.documentation import doc_url, with_doc_urls
from slime.errors import UserError

_INTRO = {
    "train": "Post-train a language model: generate, train, push the weights, in lock step.",
    "train_async": "Post-train a language model: rollouts are generated ahead of training.",
}
_METAVAR = {
    "int": "INT",
    "float": "FLOAT",
    "str": "TEXT",
    "json": "JSON",
    "int_or_list": "INT|LIST",
    "bool": "",
}
#: Flags that ``--help`` without a topic shows: dest → placeholder and a few words. At most twelve.
BASICS = {
    "hf_checkpoint": ("DIR", "the model: a Hugging Face directory"),
    "prompt_data": ("FILE", "the data: JSONL, CSV or Parquet, a prompt a row"),
    "input_key": ("NAME", "its column of the prompt, text or chat messages (default: input)"),
    "label_key": ("NAME", "its column of the answer that the reward compares with"),
    "apply_chat_template": ("", "render prompts with the model's chat template"),
    "rm_type": ("NAME", f"built in: {', '.join(REWARD_TYPES)}"),
    "custom_rm_path": ("FILE.py:NAME", "or your own: a function (args, sample) -> number"),
    "num_rollout": ("N", "how long: steps, or --num-epoch N passes over the data"),
    "rollout_batch_size": (
        "N",
        f"prompts of a step, {DEFAULT_SAMPLES} samples of each (default: {DEFAULT_PROMPTS})",
    ),
    "rollout_max_response_len": ("N", "most new tokens of a sample (default: 1024)"),
    "colocate": ("", "trainer and engines take turns on the same GPUs, else each has its own"),
    "save": (
        "DIR",
        "checkpoints; by default in the run folder, {run}/checkpoints (--no-save: none)",
    ),
}
#: An example command line with some of `BASICS`.
EXAMPLE = (
    "slime train --hf-checkpoint path/to/model --prompt-data train.jsonl --input-key question "
    "--label-key answer \\\n"
    "    --apply-chat-template --rm-type math --num-rollout 200 --rollout-max-response-len 512 "
    "--colocate"
)

#: Topic of flags that are passed on to another program → text that describes the topic.
_PASSED_ON = {
    "megatron": lambda: f"megatron-core {megatron_core()['version']}, with its own meaning",
    "sglang": lambda: f"SGLang's server (sglang {sglang_args()[0]}), behind --sglang-",
    "router": lambda: "the router (sglang-router), behind --router-",
}


def print_help(entry: str, words: Sequence[str] = ()) -> None:
    """Print the flags of `slime.config.parse_args`: `BASICS`, or those of a topic.

    Args:
        words: the command line. The word after ``--help``, if there is one, is a topic, or "all"
            for every supported flag.
    Raises:
        UserError: the topic does not exist.
    """
    width = min(120, max(60, shutil.get_terminal_size((100, 24)).columns))
    topic = _topic(words)
    command = f"slime {entry.replace('_', '-')}"
    print(f"usage: {command} [--flag VALUE ...]      (or python {entry}.py …)\n")
    if topic is None:
        _print_basics(entry, command, width)
        return
    if topic == "all":
        print(
            f"{_INTRO[entry]}\n\nFlags have no abbreviations. --config FILE.yaml sets the same "
            "names; flags win.\n"
            "A switch that a YAML file turned on is turned off by --no-<name>. All flags: "
            f"{doc_url('flags.md')}\n"
        )
    for name in _topics() if topic == "all" else [topic]:
        _print_topic(name, width)


def _topic(words: Sequence[str]) -> str | None:
    """Return the topic after --help, or None."""
    position = next((i for i, word in enumerate(words) if word in ("--help", "-h")), len(words))
    word = next(iter(words[position + 1 : position + 2]), "--")
    if word.startswith("-"):
        return None
    topic = word.replace("-", "_")
    topics = ["all", *_topics()]
    if topic not in topics:
        near = difflib.get_close_matches(topic, topics, n=1)
        raise UserError(
            f"--help has no topic {word!r}",
            why=f"the topics are: {', '.join(topics)}",
            fix=f"did you mean --help {near[0]}?"
            if near
            else f"`slime flags {word}` finds flags by a word in their name",
        )
    return topic


def _topics() -> list[str]:
    return [*GROUPS, *(name for name in _PASSED_ON if name not in GROUPS)]


def _print_basics(entry: str, command: str, width: int) -> None:
    print(f"{_INTRO[entry]}\n\nWhat a run is made of:\n")
    for dest, (placeholder, text) in BASICS.items():
        if dest == "colocate" and entry != "train":
            continue  # train_async refuses it
        print(f"  {f'{option_of(dest)} {placeholder}':<32}  {text}")
    example = EXAMPLE.replace("slime train", command)
    example = example if entry == "train" else example.replace(" --colocate", "")
    topics = textwrap.fill(
        ", ".join(_topics()), width, initial_indent="    ", subsequent_indent="    "
    )
    print(
        f"\nFor example:\n\n{textwrap.indent(example, '  ')}\n\n"
        f"  {command} --help all      every flag, by topic\n"
        f"  {command} --help TOPIC    those of one:\n{topics}\n"
        "  slime flags WORD           those with a word in their name"
    )


def _print_topic(name: str, width: int) -> None:
    """Print the flags of a group, and the flags of another program in the same topic."""
    flags = [spec for spec in all_flags().values() if not spec.meta.refused]
    if name in GROUPS:
        introduction = with_doc_urls((GROUPS[name].__doc__ or "").splitlines()[0])
        print(f"{name}: {introduction}")
        for spec in flags:
            if spec.group == name and not spec.sections:
                print(_entry(spec, with_doc_urls(spec.help), width))
        print()
    if name in _PASSED_ON:
        print(f"{name}: {_PASSED_ON[name]()}")
    if name == "megatron":
        for spec in flags:
            if spec.group == "megatron" and spec.sections:
                print(_entry(spec, _first_sentence(spec.help), width))
        print()
    elif name in _PASSED_ON:
        print(_names([spec for spec in flags if name in spec.sections], width) + "\n")


def default_text(spec: FlagSpec) -> str:
    """Return the default as documentation shows it: a constant, a formula, or ""."""
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
    """Return the allowed numbers, as in "more than 0 and at most 1"; "" if there is no limit."""
    return spec.meta.range.words if spec.meta.range else ""


def needs_text(spec: FlagSpec) -> str:
    """Return the combinations in which the flag would have no effect, and is refused or warned of.

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
    """Return "refused: reason", "no effect: reason", or "works" with the exceptions: refused or
    replaced values and `needs_text`."""
    if spec.meta.refused:
        return f"refused: {spec.meta.refused}"
    if spec.meta.no_effect:
        return f"no effect: {spec.meta.no_effect}"
    values = [f"`{value}` refused: {reason}" for value, reason in spec.meta.refused_values.items()]
    values += [
        f"`{value}` becomes `{taken}`: {why}" for value, (taken, why) in spec.meta.instead.items()
    ]
    return "; ".join(["works", *values, *filter(None, [needs_text(spec)])])


def metavar(spec: FlagSpec) -> str:
    """Return the placeholder of the value: INT, {a,b}, TEXT …, or "" for a switch."""
    shown = "{" + ",".join(map(str, spec.choices)) + "}" if spec.choices else _METAVAR[spec.kind]
    return f"{shown} …" if spec.many and shown else shown


def _entry(spec: FlagSpec, text: str, width: int) -> str:
    if spec.kind == "bool" and spec.default is True:
        option = f"{spec.option}, {spec.off}"
    else:
        option = spec.option
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
    if body:
        return textwrap.fill(body, width, initial_indent=head.ljust(36), subsequent_indent=" " * 36)
    return head


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].rstrip(".") + "." if text else ""


def _names(flags: list[FlagSpec], width: int) -> str:
    names = [spec.option for spec in flags] + [
        option for spec in flags for option in spec.options[1:]
    ]
    return textwrap.fill(
        " ".join(names),
        width,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


# -- docs/flags.md ---------------------------------------------------------------------------------

_TABLE_HEAD = "| flag | value | range | default | status | meaning |\n|---|---|---|---|---|---|"


def flags_page() -> str:
    """Return the text of docs/flags.md. Does not depend on the host (SGLang's table is the stored
    one)."""
    flags = all_flags().values()
    parts = [read_text("flags_page.md")]
    for group, cls in GROUPS.items():
        own = [spec for spec in flags if spec.group == group and not spec.sections]
        parts.append(
            f"## {group}\n\n{(cls.__doc__ or '').splitlines()[0]}\n\n{_TABLE_HEAD}\n{_rows(own)}\n"
        )
    native = [
        spec
        for spec in flags
        if spec.group == "megatron" and spec.sections and spec.origin != "Megatron-LM"
    ]
    parts.append(
        f"## Megatron\n\nFields of megatron-core {megatron_core()['version']}, with Megatron's own "
        "meaning.\n\n"
        f"{_TABLE_HEAD}\n{_rows(native)}\n"
    )
    extra = [spec for spec in flags if spec.origin == "Megatron-LM"]
    shorthands = "\n".join(
        f"| `--{name.replace('_', '-')}` |  |  |  | works | {shorthand['help']} |"
        for name, shorthand in SHORTHANDS.items()
    )
    parts.append(
        "## Megatron-LM's other names\n\nArguments of Megatron-LM's launch scripts that are no "
        "field of megatron-core. "
        "What they say of the model is checked against the Hugging Face config.\n\n"
        f"{_TABLE_HEAD}\n{_rows(extra)}\n{shorthands}\n"
    )
    version, arguments = sglang_args_of(SGLANG_ON_GPUS)
    oldest, *_, newest = sglang_versions()
    by_name = sorted(arguments, key=lambda arg: arg.name)
    sglang = with_prefix("sglang", by_name, SGLANG_RESERVED, version).values()
    parts.append(
        f"## SGLang\n\nOptions of SGLang's server behind `--sglang-` (table of sglang {version}; "
        f"an installed release from {oldest} to {newest} has a table of its own). Its "
        f"documentation has their meaning.\n\n{_TABLE_HEAD}\n{_rows(sglang)}\n"
    )
    router = [spec for spec in flags if "router" in spec.sections]
    parts.append(
        f"## Router\n\nOptions of {router[0].origin} behind "
        f"`--router-`.\n\n{_TABLE_HEAD}\n{_rows(router)}\n"
    )
    return "\n".join(parts)


def _rows(specs: Iterable[FlagSpec]) -> str:
    return "\n".join(_row(spec) for spec in specs)


def _row(spec: FlagSpec) -> str:
    names = ", ".join(f"`{option}`" for option in (*spec.options, *_off_of(spec)))
    default = default_text(spec)
    default = f"*{default}*" if spec.meta.derived else f"`{default}`" if default else ""
    value = f"`{metavar(spec)}`" if metavar(spec) else ""
    cells = (names, value, range_text(spec), default, status_text(spec), with_doc_urls(spec.help))
    return "| " + " | ".join(cell.replace("\n", " ").replace("|", "\\|") for cell in cells) + " |"


def _off_of(spec: FlagSpec) -> tuple[str, ...]:
    """Return the off spelling; () for ``--no-<name>`` of a switch that is off by default."""
    if spec.off and (spec.default is not False or not spec.off.startswith("--no-")):
        return (spec.off,)
    return ()
