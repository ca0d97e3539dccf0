"""Teachers of on-policy distillation: their names, and which one scores a sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError

#: Name of a teacher that the flag does not name; samples that name no teacher use it.
DEFAULT = "default"
#: Sources that are not directories: the policy itself, and the model without adapters.
SELF = "self"
BASE = "base"


@dataclass(frozen=True)
class Teacher:
    """One teacher.

    Attributes:
        source: a directory, a URL, `SELF` or `BASE`.
    """

    name: str
    source: str


def read_teachers(values: Sequence[str]) -> tuple[Teacher, ...]:
    """Return the teachers of a flag whose values are ``SOURCE`` or ``NAME=SOURCE``.

    Raises:
        UserError: two teachers have the same name.

    Example:
        >>> read_teachers(["math=models/math", "models/chat"])[1]
        Teacher(name='default', source='models/chat')
    """
    found: dict[str, Teacher] = {}
    for value in values:
        name, equals, source = value.partition("=")
        if not equals or "/" in name:
            name = DEFAULT
            source = value
        if name in found:
            raise UserError(
                f"two teachers have the name '{name}': {found[name].source} and {source}",
                fix="pass NAME=… for each of several teachers",
            )
        found[name] = Teacher(name, source)
    return tuple(found.values())


def engine_teachers(values: Sequence[str], models: Collection[str]) -> tuple[Teacher, ...]:
    """Return the teachers in engines: those of the flag, or all ``models`` if it is empty.

    Args:
        values: of --opd-teacher-urls: URLs, and names of models.
        models: the models of --sglang-config other than the policy.
    Raises:
        UserError: a value is neither a URL nor the name of a model.

    Example:
        >>> engine_teachers(["judge=http://10.0.0.2:30000", "big"], ["big", "other"])[1]
        Teacher(name='default', source='big')
    """
    if not values:
        return tuple(Teacher(model, model) for model in models)
    found = read_teachers(values)
    for teacher in found:
        if "://" not in teacher.source and teacher.source not in models:
            raise UserError(
                f"--opd-teacher-urls: '{teacher.source}' is neither a URL nor a model",
                why=f"models of --sglang-config other than the policy: {', '.join(models) or '-'}",
                fix="write http://host:port, or the name of such a model",
            )
    return found


def teacher_of(metadata: Mapping[str, Any], key: str, names: Collection[str], where: str) -> str:
    """Return the name of a sample's teacher.

    Args:
        key: key of ``metadata`` that holds the teacher's name (--opd-teacher-key).
        names: names of all teachers.
        where: the sample, for messages.
    Raises:
        UserError: the sample names an unknown teacher, or none although there are several.

    Example:
        >>> teacher_of({"opd_teacher": "math"}, "opd_teacher", ["math", "code"], "sample 3")
        'math'
    """
    wanted = metadata.get(key)
    if wanted is None and len(names) == 1:
        return next(iter(names))
    name = DEFAULT if wanted is None else str(wanted)
    if name in names:
        return name
    there = ", ".join(sorted(names))
    if wanted is None:
        raise UserError(
            f"{where} names no teacher, and there are several: {there}",
            why=f"its metadata has no '{key}', and no teacher is called {DEFAULT}",
            fix=f"give the row metadata {{'{key}': NAME}}, or call one teacher {DEFAULT}",
        )
    raise UserError(
        f"{where} names the teacher '{name}', but the teachers are: {there}",
        why=f"its metadata['{key}'] says so",
        fix="correct the row, or add the teacher",
    )
