"""Two ways to make a `Config`: `parse_args` from a command line, `make_config` from keywords."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

from slime.config.checks import incomplete, unsupported, violations
from slime.config.config import Config, build
from slime.config.draft import Draft, UserFlags
from slime.config.flag import option_of
from slime.config.flags import all_flags, spellings
from slime.config.parse import (
    given_by_name,
    read_argv,
    read_config_file,
    read_custom_config,
    read_role_file,
    report,
)
from slime.config.parts import left_out
from slime.config.resolve import resolve
from slime.errors import UserError, several

logger = logging.getLogger(__name__)


def make_config(*, entry: str = "train", **flags: Any) -> Config:
    """Make a resolved configuration from flag names with underscores; None leaves a flag unset.

    Resolution and checks are those of `parse_args`, except that no flag is required, and defaults
    are those of a part of the system rather than of a run: prompts in the order of the data, one
    per batch, with one sample.

    Raises:
        UserError: a name is unknown, a value has the wrong type or is not supported, or flags
            contradict each other.

    Example:
        >>> make_config(colocate=True, actor_num_gpus_per_node=4).cluster.rollout_num_gpus
        4
    """
    given = _with_files(given_by_name(flags), None)
    for _, error in unsupported(given, all_flags()):
        raise error
    draft = resolve(given, all_flags(), entry)
    for error in violations(draft):
        raise error
    return _finish(draft)


def config_of(args: Any, names: Iterable[str], **flags: Any) -> Config:
    """Call `make_config` with ``flags``, and with those attributes of ``args`` among ``names`` that
    differ from the flags' defaults. ``args`` may lack some of ``names``.

    Raises:
        UserError: as `make_config`.
    """
    specs = all_flags()
    given = {name: getattr(args, name, None) for name in names}
    differing = {
        name: value
        for name, value in given.items()
        if value is not None and value != specs[name].default
    }
    return make_config(**{**differing, **flags})


def parse_args(argv: list[str] | None = None, entry: str = "train") -> Config:
    """Make the configuration of a command line (default: that of this process).

    Precedence: --custom-config-path, --megatron-config-path, flags, --config, defaults.
    ``--help [TOPIC]`` prints and exits.

    Args:
        entry: "train" or "train_async", which some checks depend on.
    Raises:
        UserError: lists all errors, each with the closest name, the constraint, or the reason.
    """
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        from slime.config.help import print_help

        print_help(entry, words)
        raise SystemExit(0)
    config, errors = judge_args(words, entry)
    if errors or config is None:
        raise several(errors)
    for warning in config.warnings:
        logger.warning(warning)
    return config


def flags_given(argv: list[str]) -> frozenset[str]:
    """Return the dests of the flags that a command line and its configuration files set; what
    cannot be read is skipped."""
    errors: list[UserError] = []
    return frozenset(_with_files(read_argv(argv, errors), errors).values)


def judge_args(argv: list[str], entry: str = "train") -> tuple[Config | None, list[UserError]]:
    """Find all errors of a command line.

    After each error, the wrong flag, or one of the contradicting flags, is left out and the rest is
    checked again, so one error hides no other.

    Returns:
        The configuration (None if it cannot be derived) and the errors. If there are errors, the
        configuration lacks the wrong flags and must not be trained with.
    """
    errors: list[UserError] = []
    given = _with_files(read_argv(argv, errors), errors)
    for dests, error in list(unsupported(given, all_flags())):
        errors.append(error)
        for dest in dests:
            given = given.without(dest)
    doubtful = frozenset().union(*(options_in(f"{one.what} {one.fix}") for one in errors))
    draft = _without_contradictions(given, entry, errors)
    if draft is None:
        return None, errors
    files = ("--config ", "--custom-config-path ", "--megatron-config-path ")
    is_complete = not any(one.what.startswith(files) for one in errors)
    if is_complete:  # else an unreadable file may contain the missing flags
        errors += [one for one in incomplete(draft) if not options_in(one.what) & doubtful]
    wrong = {one.what.split()[0] for one in errors if not one.what.endswith(" is required")}
    errors = [one for one in errors if one.what.removesuffix(" is required") not in wrong]
    return _finish(draft), list({str(error): error for error in errors}.values())


def options_in(text: str) -> frozenset[str]:
    """Return the flags that a message names, as ``--options``; field names count too.

    Example:
        >>> sorted(options_in("--bf16 and --fp32 exclude each other; micro_batch_size is 3"))
        ['--bf16', '--fp32', '--micro-batch-size']
    """
    named = (match[1] or match[2] for match in _NAMED.finditer(text))
    specs = (spellings().get(name.replace("_", "-")) for name in named)
    return frozenset(one.spec.option for one in specs if one is not None and one.spec is not None)


#: ``--some-flag`` or ``some_flag``.
_NAMED = re.compile(r"--([a-z][\w-]*)|\b([a-z]\w*_\w+)\b")


def _without_contradictions(given: UserFlags, entry: str, errors: list[UserError]) -> Draft | None:
    """Resolve the flags without those that contradict others or are out of range, and add an error
    to ``errors`` for each of these.

    Returns:
        The draft, or None if it cannot be derived whichever flag is left out.
    """
    while True:
        draft, found = _judged(given, entry)
        if not found:
            return draft
        error = found[0]
        errors.append(error)
        named = [
            dest
            for dest in given.values
            if option_of(dest) in options_in(f"{error.what} {error.why}")
        ]
        rest = [(_judged(given.without(dest), entry)[1], dest) for dest in named or given.values]
        solutions = [
            (len(left), dest) for left, dest in rest if error.what not in (one.what for one in left)
        ]
        if not solutions:
            errors += found[1:]
            return draft
        given = given.without(min(solutions, key=lambda pair: pair[0])[1])


def _judged(given: UserFlags, entry: str) -> tuple[Draft | None, list[UserError]]:
    """Return the draft (None if it cannot be derived) and its errors."""
    try:
        draft = resolve(given, all_flags(), entry, is_run=True)
    except UserError as error:
        return None, [error]
    return draft, list(violations(draft))


def _with_files(flags: UserFlags, errors: list[UserError] | None) -> UserFlags:
    """Add the flags of the configuration files that the flags name.

    Args:
        errors: receives the errors of files; None: raise them.
    """
    given = UserFlags()
    _add_file(given, flags.values.get("config"), read_config_file, errors)
    given.update(flags)
    _add_file(given, given.values.get("megatron_config_path"), read_role_file, errors)
    _add_file(given, given.values.get("custom_config_path"), read_custom_config, errors)
    return given


def _add_file(
    given: UserFlags,
    path: str | None,
    read: Callable[[str, list[UserError] | None], UserFlags],
    errors: list[UserError] | None,
) -> None:
    if path is None:
        return
    try:
        found = read(path, errors)
        for dest, value in found.values.items():
            if given.origins.get(dest) == "flag" and given.values[dest] != value:
                given.warnings.append(
                    f"{option_of(dest)} {given.values[dest]} has no effect: {path} sets it to "
                    f"{value}, and files of this kind win over flags"
                )
        given.update(found)
    except UserError as error:
        report(error, errors)


def _finish(draft: Draft) -> Config:
    warnings = (*draft.given.warnings, *draft.warnings, *left_out(draft))
    return build(draft.values, draft.origins, draft.given.extra, warnings)
