"""Rollouts on disk, to debug training without engines: ``--save-debug-rollout-data`` and
``--load-debug-rollout-data``.

The format is the reference system's: a `torch.save` of ``{"rollout_id", "samples":
[Sample.to_dict()]}`` at the path that the pattern gives (`slime.paths`), e.g.
``dumps/{rollout_id}.pt``; evaluations are written under the id ``eval_<rollout_id>``.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.files import replacing
from slime.paths import Evaluation, fill, found, literal
from slime.samples.sample_fields import unpicklable
from slime.samples.types import Group, Sample, groups_from_nested


def save_rollout(pattern: str, rollout_id: int | Evaluation, samples: list[Sample]) -> Path:
    """Write samples; an existing file is replaced only once the new one is complete. Returns the
    path."""
    import torch

    path = fill(pattern, rollout_id)
    name = rollout_id if isinstance(rollout_id, int) else str(rollout_id)
    with replacing(path) as unfinished:
        try:
            torch.save(
                {"rollout_id": name, "samples": [sample.to_dict() for sample in samples]},
                unfinished,
            )
        except Exception as error:
            if not (place := unpicklable(samples)):
                raise
            raise UserError(
                f"the samples of rollout {name} cannot be dumped",
                why=f"a function of yours has set {place}",
                fix="keep objects that cannot be pickled out of samples, or leave "
                "--save-debug-rollout-data out",
            ) from error
    return path


def load_rollout(config: Config, rollout_id: int) -> list[Group]:
    """Return the groups of ``--load-debug-rollout-data`` for this rollout, each with its
    trajectories.

    With ``--load-debug-rollout-data-subsample f`` a fraction f of the groups is kept (the same ones
    on every call).

    Raises:
        UserError: no pattern, no such file, or not a dump.
    """
    pattern = config.debug.load_debug_rollout_data
    if not pattern:
        raise UserError("there is no dump to load", fix="pass --load-debug-rollout-data PATTERN")
    by_index: dict[Any, list[Sample]] = {}
    for position, sample in enumerate(load_samples(fill(pattern, rollout_id), pattern)):
        key = ("position", position) if sample.group_index is None else sample.group_index
        by_index.setdefault(key, []).append(sample)
    groups = groups_from_nested(list(by_index.values()), "the rollout dump")
    fraction = config.debug.load_debug_rollout_data_subsample
    if fraction is not None:
        kept = max(1, round(fraction * len(groups)))
        chosen = random.Random(rollout_id).sample(range(len(groups)), min(kept, len(groups)))
        groups = [groups[i] for i in sorted(chosen)]
    return groups


def load_samples(path: Path, pattern: str = "") -> list[Sample]:
    """Return the samples of one dump file, in its order.

    Args:
        pattern: the pattern that gave ``path``; if the file is missing, the error lists its
            matches.
    """
    import torch

    if not path.is_file():
        raise _no_dump(pattern or literal(str(path)), path)
    try:
        # dumps hold whatever users put into metadata, so they are pickles; load only files you
        # trust
        data: Any = torch.load(path, map_location="cpu", weights_only=False)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(
            f"{path} cannot be read as a rollout dump", why=str(error), fix="write it again"
        ) from error
    if not isinstance(data, dict) or "samples" not in data:
        keys = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise UserError(
            f"{path} is not a rollout dump",
            why=f"it holds: {keys}",
            fix="it needs the key 'samples'",
        )
    return [Sample.from_dict(item) for item in data["samples"]]


def check_dumps(config: Config) -> None:
    """Check that the dumps of the first and the last rollout exist, as far as the flags name them.

    Raises:
        UserError: names what is missing, and what is there.
    """
    pattern = config.debug.load_debug_rollout_data
    if not pattern:
        return
    wanted = [config.rollout.start_rollout_id or 0] if config.checkpoint.load is None else []
    if config.rollout.num_rollout:
        wanted += [config.rollout.num_rollout - 1]
    for path in [fill(pattern, rollout_id) for rollout_id in wanted]:
        if not path.is_file():
            raise _no_dump(pattern, path)


def _no_dump(pattern: str, path: Path) -> UserError:
    there = [path.name for path, _ in found(pattern)]
    here = sorted(entry.name for entry in path.parent.iterdir())[:5] if path.parent.is_dir() else []
    if len(there) > 1:
        why = f"{len(there)} files match the pattern: {there[0]} to {there[-1]}"
    elif there:
        why = f"only {there[0]} matches the pattern"
    elif here:
        why = f"its directory holds: {', '.join(here)}"
    else:
        why = "its directory is empty or missing"
    return UserError(
        f"there is no rollout dump {path}",
        why=why,
        fix="check the pattern of --load-debug-rollout-data, --start-rollout-id (the first "
        "rollout) and --num-rollout (the last rollout's number plus one)",
    )
