"""The two ways to a `Config`: `parse_args` from a command line, `make_config` from flag names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from slime.config.checks import check, check_complete, refuse_unsupported, violations
from slime.config.config import Config, build
from slime.config.draft import Draft, Given
from slime.config.flags import all_flags
from slime.config.parse import given_by_name, read_argv, read_config_file, read_custom_config
from slime.config.parts import left_out
from slime.config.resolve import resolve
from slime.errors import UserError

logger = logging.getLogger(__name__)


def make_config(*, entry: str = "train", **flags: Any) -> Config:
    """A resolved configuration from flag names with underscores; None leaves a flag unset.

    The same resolution and checks as `parse_args`, except that nothing is required: a part of the system can be
    configured without the rest. Nor has a part the defaults of a run: prompts come in the order of the data, one at a
    time with one sample, unless flags say more.

    Raises:
        UserError: unknown name, wrong type, contradiction, or something this version does not support.

    Example:
        >>> make_config(colocate=True, actor_num_gpus_per_node=4).cluster.rollout_num_gpus
        4
    """
    return _finish(_resolved(given_by_name(flags), entry))


def config_of(args: Any, names: Iterable[str], **flags: Any) -> Config:
    """`make_config` from what ``args``, a namespace that may have a few attributes only, has of the flags ``names``
    beside their defaults; ``flags`` over it.

    Raises:
        UserError: as `make_config`.
    """
    specs = all_flags()
    given = {name: getattr(args, name, None) for name in names}
    said = {name: value for name, value in given.items() if value is not None and value != specs[name].default}
    return make_config(**{**said, **flags})


def parse_args(argv: list[str] | None = None, entry: str = "train") -> Config:
    """The configuration of a command line (default: that of this process).

    Precedence: --custom-config-path, then flags, then --config, then defaults. ``--help [TOPIC]`` prints and exits.

    Args:
        entry: "train" or "train_async", which some checks depend on.
    Raises:
        UserError: in a few lines, with the nearest name, the equation, or the reason.
    """
    words = sys.argv[1:] if argv is None else argv
    if "--help" in words or "-h" in words:
        from slime.config.help import print_help

        print_help(entry, words)
        raise SystemExit(0)
    draft = _resolved(read_argv(words), entry, is_run=True)
    check_complete(draft)
    config = _finish(draft)
    for warning in config.warnings:
        logger.warning(warning)
    return config


def judge_args(argv: list[str], entry: str = "train") -> tuple[Config | None, list[UserError]]:
    """All that `parse_args` would refuse of a command line.

    Returns:
        The configuration, None where the flags cannot be read or derived; with errors, one that must not be planned
        with. And the errors.
    """
    errors: list[UserError] = []
    given = read_argv(argv, errors)
    if errors:  # what follows from the others would be told of flags that nobody meant
        return None, errors
    try:
        draft = _draft(given, entry, is_run=True)
    except UserError as error:
        return None, [error]
    errors += violations(draft)
    try:
        check_complete(draft)
    except UserError as error:
        errors.append(error)
    return _finish(draft), errors


def _resolved(flags: Given, entry: str, is_run: bool = False) -> Draft:
    draft = _draft(flags, entry, is_run)
    check(draft)
    return draft


def _draft(flags: Given, entry: str, is_run: bool) -> Draft:
    given = Given()
    path = flags.values.get("config")
    if path is not None:
        given.update(read_config_file(path))
    given.update(flags)
    custom = given.values.get("custom_config_path")
    if custom is not None:
        given.update(read_custom_config(custom))
    refuse_unsupported(given, all_flags())
    return resolve(given, all_flags(), entry, is_run)


def _finish(draft: Draft) -> Config:
    return build(draft.values, draft.origins, draft.given.extra, (*draft.warnings, *left_out(draft)))
