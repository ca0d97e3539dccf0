"""Chooses the checkpoint to load: the newest whose files are intact.

    --load is --save ─► newest whole by names and sizes ─► fingerprints, each rank its share
                                    ▲                         ├─ equal ─► loaded
                                    └── the one before it ────┘

Nothing on the disk changes before one is found. Then the tracker is set to it, and skipped ones are
renamed, so that neither --save-retain nor the next launch counts them as checkpoints.
"""

from __future__ import annotations

import torch.distributed as dist

from slime.checkpoints.directory import (
    RELEASE,
    Damage,
    check_contents,
    iteration_dir,
    iteration_name,
    set_aside,
    set_latest,
)
from slime.checkpoints.load_plan import LoadPlan, resolve_load
from slime.config.config import Config
from slime.errors import UserError
from slime.files import json_safe
from slime.log import get_logger
from slime.processes.json_collectives import all_gather

logger = get_logger(__name__)


def agreed_plan(config: Config) -> tuple[LoadPlan, list[str]]:
    """Agree on the checkpoint that all ranks load, and verify its contents. Collective.

    Returns:
        The plan, and a line for each skipped iteration.
    Raises:
        UserError: as for `resolve_load`; and on every rank, if any finds a changed file with
            --ckpt-step or in another run's checkpoint.
    """
    corrupt: list[Damage] = []
    while True:
        plan = resolve_load(config, corrupt)
        error = first_corrupt(plan)
        if error is None:
            break
        iteration = plan.iteration
        if not plan.is_resume or config.checkpoint.ckpt_step is not None or iteration is None:
            raise error
        corrupt.append(
            Damage(iteration, f"{error.what.removeprefix(f'{plan.path}/')}: {error.why}")
        )
    return plan, _skip(plan)


def first_corrupt(plan: LoadPlan) -> UserError | None:
    """Return the error of the first of the plan's files, over all ranks, whose content has changed
    since it was written. Collective."""
    if plan.kind != "megatron":
        return None
    own: UserError | None = None
    try:
        check_contents(plan.path, dist.get_rank(), dist.get_world_size())
    except UserError as error:
        own = error
    said = all_gather(None if own is None else json_safe(own.args))  # a path need not be text
    return next((UserError(*words) for words in said if words is not None), None)


def _skip(plan: LoadPlan) -> list[str]:
    """Rename the skipped checkpoints, on rank 0; returns the lines to log."""
    if not plan.damaged:
        return []
    root = plan.path.parent
    lines = []
    for damage in plan.damaged:
        name = iteration_name(damage.iteration)
        line = f"checkpoint {root / name} is skipped, {damage.why}: going on from {plan.path}"
        if iteration_dir(root, damage.iteration).exists():
            line += f"; its files are in {name}.damaged now, which you may remove"
        lines.append(line)
    all_gather(None)  # every rank has looked
    if dist.get_rank() == 0:
        try:
            set_latest(root, RELEASE if plan.iteration is None else plan.iteration)
            for damage in plan.damaged:
                set_aside(root, damage.iteration)
        except OSError as problem:  # the next save fails likewise, with advice
            logger.warning("%s cannot be put in order: %s", root, problem)
    return lines
