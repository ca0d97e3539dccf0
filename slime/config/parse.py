"""Parse command lines and YAML files to values by dest, each with its origin. Unknown names are
errors.

--flag value      --flag=value      --list-flag a b c      --switch      --no-switch
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from slime.config.draft import UserFlags
from slime.config.flag import FlagSpec, option_of
from slime.config.flags import Spelling, nearest, spellings, unknown_name
from slime.config.other_systems import other_name
from slime.config.values import convert
from slime.config.yaml_files import is_empty, load, load_as_written, text_of
from slime.errors import UserError

#: A setting of Hydra: actor_rollout_ref.actor.optim.lr=1e-6, +data.x=1
_HYDRA = re.compile(
    r"[+~]{0,2}(?:actor_rollout_ref|data|algorithm|trainer|critic|reward_model|policy|loss_fn|grpo|"
    r"cluster|checkpointing|custom_reward_function|ray_kwargs|global_profiler|env|logger|sft|dpo)"
    r"\.[\w./@]+=.*",
    re.DOTALL,
)
#: A flag behind one dash, or behind those that word processors make of two.
_OTHER_DASHES = re.compile(r"(?:-|-?[\u2010-\u2015\u2212]-?)([A-Za-z][\w-]*)")
#: Flags that name configuration files.
_FILES = ("config", "custom_config_path", "megatron_config_path")
_OPTION = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)


def read_argv(argv: list[str], errors: list[UserError] | None = None) -> UserFlags:
    """Parse a command line.

    Words that begin with two dashes and a letter are flags. A value that looks like a flag is
    written with an equals sign: ``--rollout-stop=--END``. If a scalar flag is given twice, the last
    value wins, because launch scripts append overrides; a list flag that is given several times
    with an equals sign collects its values.

    Args:
        errors: receives the errors, and wrong flags are left out; None: the first error is raised.
    Raises:
        UserError: unknown or abbreviated flag, missing or surplus value, wrong type.
    """
    given = UserFlags()
    position = 0
    collected: dict[str, list[str]] = {}
    while position < len(argv):
        end = position + 1
        while end < len(argv) and _OPTION.fullmatch(argv[end]) is None:
            end += 1
        words = argv[position + 1 : end]
        own = [word for word in words if not _HYDRA.fullmatch(word)]
        for word in words:
            if word not in own:
                report(_stray(word), errors)
        try:
            if own or not words:
                _read_flag(given, argv[position], own, collected)
        except UserError as error:
            report(error, errors)
        position = end
    return given


def _read_flag(
    given: UserFlags, word: str, words: list[str], collected: dict[str, list[str]]
) -> None:
    """Set the flag ``word`` from the ``words`` after it. ``collected`` holds the values that list
    flags were given with an equals sign so far."""
    match = _OPTION.fullmatch(word)
    if match is None:
        raise _stray(word)
    name, inline = match.groups()
    spelling = spellings().get(name)
    if spelling is None:
        raise unknown_name(name, "")
    if inline is not None and not words:
        words = [inline]
        if spelling.spec is not None and spelling.spec.many:
            words = collected.setdefault(spelling.spec.dest, [])
            words.append(inline)
    elif inline is not None:
        raise UserError(
            f"--{name}={inline} is followed by {words[0]!r}, which belongs to no flag",
            fix=f"quote a value that has spaces in it, or remove {words[0]!r}",
        )
    before = dict(given.values)
    _apply(given, f"--{name}", spelling, words, is_inline=inline is not None)
    spec = spelling.spec
    if spec is None or spec.meta.append or before.get(spec.dest) in (None, given.values[spec.dest]):
        return
    if spec.dest in _FILES or (spec.many and inline is None):
        _note_override(given, spec.dest, before[spec.dest])


def _note_override(given: UserFlags, dest: str, before: Any) -> None:
    """Warn that a list was given before, which has no effect.

    Raises:
        UserError: the values are configuration files, whose flags would be lost.
    """
    option = option_of(dest)
    now = given.values[dest]
    if dest in _FILES:
        raise UserError(
            f"{option} is given twice: {before} and {now}",
            why="one file is read",
            fix="put the flags of both into one file, or pass those of one as flags",
        )
    given.warnings.append(
        f"{option} is given more than once: {_words(now)} replaces {_words(before)}; "
        f"{option}=… adds a value"
    )


def _words(values: Any) -> str:
    return " ".join(map(str, values))


def _apply(
    given: UserFlags, option: str, spelling: Spelling, words: list[str], is_inline: bool
) -> None:
    spec = spelling.spec
    if spec is None:
        _no_value(option, words)
        for dest, value in spelling.sets:
            given.set(dest, value, "flag")
    elif spelling.negated and spec.kind != "bool":
        _no_value(option, words)
        given.set(spec.dest, "", "flag")
    elif spec.kind == "bool":
        if not is_inline:
            _no_value(option, words, spec)
        value = convert(spec, words[0]) if words else True
        given.set(spec.dest, value != spelling.negated, "flag")
    elif spec.meta.append:
        given.set(
            spec.dest,
            (*given.values.get(spec.dest, ()), *convert(spec, _wanted(option, words))),
            "flag",
        )
    elif spec.many:
        given.set(
            spec.dest, convert(spec, words if spec.meta.refused else _wanted(option, words)), "flag"
        )
    elif not words and spec.value_optional:
        given.set(spec.dest, None, "flag")
    else:
        _wanted(option, words)
        if len(words) > 1:
            for word in words[1:]:
                if (match := _OTHER_DASHES.match(word)) and match[1] in spellings():
                    raise _stray(word)
            raise UserError(
                f"{option} takes one value, but {len(words)} were given: {' '.join(words)}",
                fix="quote a value that has spaces in it",
            )
        given.set(spec.dest, convert(spec, words[0]), "flag")
        _note_empty(given, spec)


def _note_empty(given: UserFlags, spec: FlagSpec) -> None:
    """Warn of empty text, as of a shell's unset variable."""
    is_off = spec.dest == "save"  # nothing is saved
    if spec.optional and not spec.sections and given.values[spec.dest] == "" and not is_off:
        given.warnings.append(f"{spec.option} is empty, which leaves it unset")


def _no_value(option: str, words: list[str], spec: FlagSpec | None = None) -> None:
    if not words:
        return
    fix = f"remove {words[0]!r}"
    if spec is not None and words[0].lower() in ("false", "no", "0", "off"):
        fix = f"write {option}=false"
    raise UserError(f"{option} takes no value, but {words[0]!r} follows it", fix=fix)


def _wanted(option: str, words: list[str]) -> list[str]:
    if not words:
        raise UserError(
            f"{option} needs a value",
            fix=f"a value that begins with -- is written {option}=--value",
        )
    return words


def _stray(word: str) -> UserError:
    if match := _OTHER_DASHES.match(word):
        is_flag = match[1] in spellings() or match[1] in ("help", "h")
        flag = "help" if match[1] == "h" else match[1]
        return UserError(
            f"{word!r} is not a flag",
            why="flags have two dashes (--), and no short forms",
            fix=f"write --{flag}" if is_flag else "`slime train --help all` lists all flags",
        )
    name, equals, value = word.partition("=")
    own = name.lstrip("+~").replace("_", "-")
    is_hydra = _HYDRA.fullmatch(word) is not None
    if is_hydra:
        own = own.rpartition(".")[2]
        if name.lstrip("+~").startswith("critic.") and f"critic-{own}" in spellings():
            own = f"critic-{own}"
    meant = other_name(name.lstrip("+~"), by_last_part=own not in spellings()) if equals else None
    fix = ""
    if meant is not None:
        fix = meant.text
    elif equals and own in spellings():
        spec = spellings()[own].spec
        fix = f"write --{own}" if value.lower() == "true" else f"write --{own} {value}"
        fix = spec.meta.refused if spec is not None and spec.meta.refused else fix
    elif is_hydra:
        fix = f"`slime flags {name.rpartition('.')[2]}` searches the flags"
    if fix:
        is_other = meant is not None or is_hydra
        why = "it is another system's setting" if is_other else ""
        return UserError(f"{word!r} is not a flag", why=why, fix=fix)
    return UserError(
        f"{word!r} belongs to no flag",
        why="it is the first word of the command line",
        fix=f"remove it, or write the flag before it: --prompt-data {word}",
    )


def read_yaml(path: str, flag: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the top-level mapping of a YAML file: as it is read, and with all scalars as text.

    Raises:
        UserError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        data = load(text)
        written = load_as_written(text)
    except OSError as error:
        raise UserError(
            f"{flag} {path}: cannot be read", why=error.strerror or str(error), fix="check the path"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{flag} {path}: is not valid YAML",
            why=str(error),
            fix="write one 'name: value' per line, in UTF-8, with spaces instead of tabs",
        ) from error
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise UserError(
            f"{flag} {path}: must be a mapping of flag names to values, not a "
            f"{type(data).__name__}",
            fix="write one 'name: value' per line, such as lr: 1e-6",
        )
    return (
        {str(key): value for key, value in data.items()},
        {str(key): value for key, value in zip(data, written.values())},
    )


def _settings(name: str, value: Any) -> Iterator[str]:
    """Yield the settings of a section as Hydra writes them: ``data.train_files=train.parquet``."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _settings(f"{name}.{key}", inner)
    else:
        yield f"{name}={value}"


def read_config_file(path: str, errors: list[UserError] | None = None) -> UserFlags:
    """Read the flags of a ``--config`` file. Names may have dashes or underscores.

    Args:
        errors: receives the errors of single keys, which are left out; None: the first is raised.
    Raises:
        UserError: a key is not a flag (names the closest), or sets another configuration file.
    """
    given = UserFlags()
    content, written = read_yaml(path, "--config")
    for key, value in content.items():
        settings = list(_settings(key, value))
        if settings and all(map(_HYDRA.fullmatch, settings)):
            for setting in settings:
                error = _stray(setting)
                report(UserError(f"{path}: {error.what}", why=error.why, fix=error.fix), errors)
            continue
        if isinstance(value, dict) and key.replace("_", "-") not in spellings():
            example = f": {next(iter(value))}: …" if value else ""
            refused = UserError(
                f"{path}: '{key}' is a section",
                why="the file is flat: names of flags and their values, without groups",
                fix=f"move the keys below '{key}:' to the left edge{example}",
            )
            report(refused, errors)
            continue
        try:
            _set_key(given, key, value, f"yaml {path}", f"{path}: ", written[key])
        except UserError as error:
            report(error, errors)
    _refuse_files(given, path, "config")
    return given


def report(error: UserError, errors: list[UserError] | None) -> None:
    """Append an error to ``errors``; raise it if that is None."""
    if errors is None:
        raise error
    errors.append(error)


def read_custom_config(path: str, errors: list[UserError] | None = None) -> UserFlags:
    """Read a ``--custom-config-path`` file: flags, and further attributes of ``args`` for hooks.

    Args:
        errors: as in `read_config_file`.
    Raises:
        UserError: a key is a misspelt flag, or sets another configuration file.
    """
    given = UserFlags()
    content, written = read_yaml(path, "--custom-config-path")
    for key, value in content.items():
        dashed = key.replace("_", "-")
        if dashed in spellings():
            try:
                _set_key(given, key, value, f"yaml {path}", f"{path}: ", written[key])
            except UserError as error:
                report(error, errors)
            continue
        near = nearest(dashed, spellings(), count=1)
        if near and abs(len(near[0]) - len(dashed)) <= 1 and _differ_by_little(dashed, near[0]):
            report(
                UserError(
                    f"{path}: {key} looks like a misspelt flag", fix=f"did you mean {near[0]}?"
                ),
                errors,
            )
            continue
        given.extra[key] = value
    _refuse_files(given, path, *_FILES)
    return given


#: Setting that may differ between policy and critic → the critic's flag.
_CRITIC_FLAGS = {
    name: f"critic_{name}"
    for name in (
        "lr",
        "lr_warmup_iters",
        "load",
        "lora_rank",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
    )
}
_SAVED = "the critic is saved in the policy's checkpoints, below --save"
#: Keys of a role that place it on GPUs.
_PLACES = ("num_nodes", "num_gpus_per_node")


def read_role_file(path: str, errors: list[UserError] | None = None) -> UserFlags:
    """Read a ``--megatron-config-path`` file, whose values win over flags.

    .. code-block:: yaml

        megatron:
          - {name: default, role: actor, overrides: {lr: 1.0e-6}}
          - {name: default, role: critic, overrides: {lr: 1.0e-5, load: critic}}

    Args:
        errors: as in `read_config_file`.
    Raises:
        UserError: the file has another form, a role is unknown or comes twice, or an override is no
            flag or must not differ between policy and critic.
    """
    given = UserFlags()
    content, as_written = read_yaml(path, "--megatron-config-path")
    entries = content.get("megatron")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise UserError(
            f"{path}: the key 'megatron' must hold a list of roles",
            fix="write `megatron: [{name: default, role: actor, overrides: {lr: 1.0e-6}}]`",
        )
    roles = [str(entry.get("role")) for entry in entries]
    if not set(roles) <= {"actor", "critic"} or len(set(roles)) < len(roles):
        raise UserError(
            f"{path}: the roles are {', '.join(roles)}",
            fix="write at most one entry with `role: actor` and one with `role: critic`",
        )
    for role, entry, texts in zip(roles, entries, as_written["megatron"], strict=True):
        for key, value in entry.items():
            if key in _PLACES:
                _set_key(given, f"{role}_{key}", value, f"yaml {path}", f"{path}: ", texts[key])
            elif key in ("overrides", "args"):
                _read_role(given, path, role, value or {}, texts[key], errors)
            elif key not in ("name", "role"):
                report(UserError(f"{path}: '{key}' of the {role} is unknown"), errors)
    _refuse_files(given, path, *_FILES)
    return given


def _read_role(
    given: UserFlags,
    path: str,
    role: str,
    overrides: dict[str, Any],
    written: Any,
    errors: list[UserError] | None,
) -> None:
    if not isinstance(overrides, dict):
        fix = "write `overrides: {lr: 1.0e-6}`"
        report(UserError(f"{path}: overrides of the {role} are {overrides!r:.80}", fix=fix), errors)
        return
    for key, value in overrides.items():
        dest = str(key).replace("-", "_")
        if role == "critic" and dest == "save":
            given.warnings.append(f"{path}: save of the critic has no effect: {_SAVED}")
            continue
        try:
            if role == "critic" and dest not in _CRITIC_FLAGS:
                raise UserError(
                    f"{path}: the critic cannot have a {dest} of its own",
                    fix=f"remove it: the critic uses the policy's. {', '.join(_CRITIC_FLAGS)} can "
                    "differ",
                )
            dest = _CRITIC_FLAGS[dest] if role == "critic" else dest
            _set_key(given, dest, value, f"yaml {path}", f"{path}: ", written[key])
        except UserError as error:
            report(error, errors)


def _refuse_files(given: UserFlags, path: str, *dests: str) -> None:
    """Refuse a file that names other configuration files, because those were already read."""
    for dest in dests:
        if dest in given.values:
            option = option_of(dest)
            raise UserError(
                f"{path}: {dest} cannot be set in this file",
                why="configuration files do not include each other",
                fix=f"pass {option} {given.values[dest]} on the command line",
            )


def _differ_by_little(one: str, other: str) -> bool:
    """Tell whether one letter was inserted, deleted or replaced, or two adjacent ones swapped."""
    prefix = 0
    while prefix < min(len(one), len(other)) and one[prefix] == other[prefix]:
        prefix += 1
    return any(one[prefix + i :] == other[prefix + j :] for i, j in ((1, 0), (0, 1), (1, 1))) or (
        sorted(one[prefix : prefix + 2]) == sorted(other[prefix : prefix + 2])
        and one[prefix + 2 :] == other[prefix + 2 :]
    )


#: Default of `_set_key`: the value does not come from a file, so there is no text beside it.
_SAME = object()


def _set_key(
    given: UserFlags, key: str, value: Any, origin: str, where: str, written: Any = _SAME
) -> None:
    """Set a flag by any of its spellings; None leaves it unset.

    Args:
        written: the value as a file has it (`slime.config.yaml_files.load_as_written`).
    Raises:
        UserError: there is no such flag, the value is wrong or missing, or another spelling has set
            the flag to something else.
    """
    spelling = spellings().get(key.replace("_", "-"))
    if spelling is None:
        raise unknown_name(key.replace("_", "-").lstrip("-"), where)
    spec = spelling.spec
    if written is not _SAME and is_empty(value, written):
        if spec is None or not spec.value_optional:
            is_switch = spec is None or spec.kind == "bool"
            fix = f"write {key}: true" if is_switch else "give it one, or leave the line out"
            raise UserError(f"{where}{key} has no value", fix=fix)
        given.set(spec.dest, None, origin)
        return
    if value is None:
        return
    if spec is None:
        if value is not True:
            raise UserError(f"{where}{key} takes no value but true")
        sets = dict(spelling.sets)
    elif spelling.negated and spec.kind != "bool":
        if not isinstance(value, bool):
            fix = f"write {key}: true, or leave the line out"
            raise UserError(f"{where}{key} takes true or false", fix=fix)
        if not value:
            return
        sets = {spec.dest: ""}
    else:
        if spec.kind == "str" and written is not _SAME:
            value = text_of(value, written)
        typed = convert(spec, value, where)
        sets = {spec.dest: (not typed) if spelling.negated else typed}
    for dest, typed in sets.items():
        if dest in given.values and given.values[dest] != typed:
            raise UserError(
                f"{where}{key} contradicts another line, which sets {option_of(dest)} to "
                f"{given.values[dest]}",
                why="two names of one flag are given",
                fix="remove one of them",
            )
        given.set(dest, typed, origin)
    if spec is not None:
        _note_empty(given, spec)


def given_by_name(flags: dict[str, Any]) -> UserFlags:
    """Read values from Python keywords: any spelling of a flag, with underscores."""
    given = UserFlags()
    for key, value in flags.items():
        _set_key(given, key, value, "flag", "")
    return given
