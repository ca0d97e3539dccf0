"""Which weights a run has pushed when, over all its launches: ``journal/pushes.jsonl``, a line for each push.

A launch goes on from a checkpoint, with samples in the journal of weights that were pushed behind it. How old these are
is only written here, and so is whether training can come to such weights again: with other flags it cannot.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from slime.config.config import Config
from slime.files import json_safe, read_lines
from slime.hook_loading import fingerprint
from slime.log import get_logger

logger = get_logger(__name__)

#: Of the group "megatron", what says how the weights change; the others divide the work and the memory.
_OPTIMIZER = ("lr", "min_lr", "weight_decay", "start_", "end_weight_", "adam_", "sgd_", "clip_", "optimizer")
_TRAINING = (
    ("train", ("global_batch_size", "num_steps_per_rollout", "only_train_params_name_list", "freeze_params_name_list",
               "custom_megatron_before_train_step_hook_path")),
    ("checkpoint", ("ref_load", "ref_ckpt_step", "ref_update_interval", "reset_optimizer_states")),
    ("quantised", ("fake_quantisation",)),
)  # fmt: skip


class Push(NamedTuple):
    """Of weights to the engines.

    Attributes:
        version: their number.
        trained: rollouts that had been trained on.
        training: `training_of` the launch; "" where an earlier release did not say.
    """

    version: int
    trained: int
    training: str = ""


class PushLog:
    """Of one run folder (or stage).

    Args:
        folder: of the journal; made when something is written.
        training: `training_of` this launch.
    Attributes:
        earlier: pushes by earlier launches, in their order; a line that a crash has cut is left out.
    """

    def __init__(self, folder: Path, training: str) -> None:
        self._path, self._training = folder / "pushes.jsonl", training
        rows = read_lines(self._path)
        self.earlier: list[Push] = [Push(row["version"], row["trained"], row.get("training", "")) for row in rows]

    def note(self, version: int, trained: int) -> None:
        """Weights were pushed after ``trained`` rollouts had been trained on."""
        line = orjson.dumps(Push(version, trained, self._training)._asdict())
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                file.write(b"\n" + line)  # which ends what a crash has left of the line before
        except OSError as problem:  # a full disk, of which the journal tells
            logger.warning("%s: %s", self._path, problem)

    def gone(self, trained: int) -> frozenset[int]:
        """Versions that training cannot come to again, from a checkpoint after ``trained`` rollouts on."""
        found = set[int]()
        pushes: Sequence[Push] = [*self.earlier, Push(0, trained, self._training)]
        for index, (before, push) in enumerate(itertools.pairwise(pushes)):
            if before.training != push.training:
                found |= {old.version for old in pushes[: index + 1] if old.trained > push.trained}
            found.discard(push.version)
        if found:
            logger.warning(
                "%d of the weights that this run has pushed came of other flags of training, behind the checkpoint "
                "from which it goes on: what the journal has of them is generated again", len(found),
            )  # fmt: skip
        return frozenset(found)


def training_of(config: Config) -> str:
    """A text that tells apart what makes other weights out of the same samples: flags of the algorithm and of the
    optimizer, and the files of the user's own functions in them."""
    megatron, algorithm = config.megatron, vars(config.algorithm)
    values = {name: value for name, value in vars(megatron).items() if name.startswith(_OPTIMIZER)} | algorithm
    for group, names in _TRAINING:
        values |= {name: getattr(getattr(config, group), name) for name in names}
    lasts = megatron.lr_decay_iters or megatron.lr_decay_samples or megatron.lr_decay_style == "constant"
    if not lasts or megatron.weight_decay_incr_style != "constant":
        values |= {"num_rollout": config.rollout.num_rollout, "num_epoch": config.data.num_epoch}
    functions = [value for name, value in values.items() if name.startswith("custom_") and value]
    return fingerprint(json_safe(values), functions)
