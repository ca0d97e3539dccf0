"""Which weights a run has pushed when, over all its launches: ``journal/pushes.jsonl``, a line for
each push.

A launch goes on from a checkpoint, with samples in the journal of weights that were pushed behind
it. How old these are is only written here, and so is whether training can come to such weights
again: it can where it trains as they were trained, and not with another learning rate, or from
other weights. So each push is noted with its lineage, which is that of the weights one rollout
before together with what the step depended on.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import xxhash

from slime.config.config import Config
from slime.config.flags import all_flags
from slime.files import content_fingerprint, json_safe, parse_json, read_plain
from slime.log import get_logger
from slime.user_code.loading import fingerprint

logger = get_logger(__name__)

#: Lineages in a checkpoint; what the journal has is of fewer rollouts.
_KEPT = 64
#: Names, or how they begin, of flags that say how the weights change. Those of the same groups that
#: divide the work and the memory are not among them.
_WHAT_COUNTS = {
    "megatron": (
        "fp16", "fp32", "lr", "min_lr", "weight_decay", "start_weight_", "end_weight_", "adam_",
        "sgd_", "clip_", "optimizer_name", "use_checkpoint_opt_", "override_opt_",
    ),
    "train": (
        "global_batch_size", "num_steps_per_rollout", "only_train_params", "freeze_",
        "use_routing_replay", "use_rollout_routing_replay", "enable_mtp_training", "custom_",
    ),
    "checkpoint": (
        "ref_update_interval", "reset_optimizer_states", "no_load_optim", "finetune",
        "use_stateless_adam",
    ),
    "quantised": ("fake_quantisation",),
    "reward": ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
    "rollout": ("rollout_data_postprocess_path",),
    "algorithm": ("",),
}  # fmt: skip
_WITHOUT_EFFECT = frozenset({"get_mismatch_metrics"})
#: The same for flags of Megatron's that no group declares.
_OF_TRANSFORMER = (
    "moe_router",
    "moe_aux",
    "moe_z",
    "moe_input_jitter",
    "attention_dropout",
    "hidden_dropout",
    "mtp_",
)
_OF_MEMORY = ("offload", "overlap", "barrier", "fusion")


class Push(NamedTuple):
    """A push of weights to the engines.

    Attributes:
        version: their number.
        trained: rollouts that had been trained on.
        lineage: of the weights; "" where an earlier release did not say.
    """

    version: int
    trained: int
    ancestry: str = ""


class PushLog:
    """The pushes of one run folder (or stage).

    Args:
        folder: of the journal; made when something is written.
        config: says how this launch trains, and what weights a run begins with.
    Attributes:
        earlier: pushes by earlier launches, in their order; what is no whole line is left out.
        gone: versions that training cannot come to again. Whoever has samples of them generates
            these anew.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self._path = folder / "pushes.jsonl"
        self._training = training_fingerprint(config)
        self._initial = initial_fingerprint(config)
        self.earlier, self._is_damaged = _read(self._path)
        self._of = {push.version: push for push in self.earlier}
        self._lineages: dict[int, str] = {}
        self._begins = True
        self.unreachable: frozenset[int] = frozenset()

    def begin(self, trained: int, lineages: Mapping[int, str]) -> None:
        """Training stands at a checkpoint.

        Args:
            trained: rollouts that are trained on.
            lineages: `recent_ancestries` of the checkpoint; {} for weights without a past.
        """
        known = {count: ancestry for count, ancestry in lineages.items() if count <= trained}
        self._lineages = {trained: _next(self._initial, str(trained)), **known}
        self.unreachable = frozenset(
            v for v, push in self._of.items() if not self._is_reachable(push)
        )
        if self._is_damaged:  # what a line that cannot be read said of its version is not known
            self.unreachable |= {
                number
                for number in range(1, max(self._of, default=0) + 1)
                if number not in self._of
            }
        self._begins = True

    def _is_reachable(self, push: Push) -> bool:
        """Also where it is not known: nobody asks of what was long ago."""
        known = self._lineage(push.trained)
        return not push.ancestry or known is None or push.ancestry == known

    def _lineage(self, trained: int) -> str | None:
        """Return the lineage of the weights after so many rollouts; None for those long before the
        checkpoint."""
        for count in range(max(self._lineages) + 1, trained + 1) if self._lineages else ():
            self._lineages[count] = _next(self._lineages[count - 1], self._training)
        return self._lineages.get(trained)

    def recent_ancestries(self, trained: int) -> dict[int, str]:
        """Rollouts trained on → lineage, up to a checkpoint after ``trained`` of them, for that
        checkpoint."""
        self._lineage(trained)
        return {
            count: self._lineages[count]
            for count in sorted(self._lineages)
            if trained - _KEPT < count <= trained
        }

    def note(self, version: int, trained: int) -> None:
        """Weights were pushed after ``trained`` rollouts had been trained on."""
        push = Push(version, trained, self._lineage(trained) or "")
        if self.unreachable and self._begins:
            # what a crash or a full disk has kept from being noted may be of the same lives as what
            # is gone
            self.unreachable |= {number for number in range(1, version) if number not in self._of}
        self._begins = False
        self._of[version] = push
        self.unreachable -= {version}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                # the break ends what a crash has left of the line before
                row = {
                    "version": push.version,
                    "trained": push.trained,
                    "lineage": push.ancestry,
                    "checksum": _checksum(push),
                }
                file.write(b"\n" + orjson.dumps(row))
        except OSError as problem:  # a full disk, of which the journal tells
            logger.warning("%s: %s", self._path, problem)


def _read(path: Path) -> tuple[list[Push], bool]:
    """The pushes of earlier launches, and whether there are lines that are not what was written."""
    try:
        lines = read_plain(path).split(b"\n")
    except FileNotFoundError:
        return [], False
    except OSError as problem:
        logger.warning("%s: %s", path, problem)
        return [], True
    whole = []
    is_damaged = False
    for line in filter(None, lines):
        try:
            row = parse_json(line)
            push = Push(row["version"], row["trained"], row.get("lineage", ""))
            is_whole = [type(value) for value in push] == [int, int, str]
            is_whole &= row.get("checksum") in (
                None,
                _checksum(push),
            )  # an earlier release wrote none
        except (ValueError, KeyError, TypeError, AttributeError):
            is_whole = False
        if is_whole:
            whole.append(push)
        is_damaged |= not is_whole
    if is_damaged:
        logger.warning("%s has lines that are damaged or cut short: they are left out", path)
    return whole, is_damaged


def _checksum(push: Push) -> str:
    return xxhash.xxh3_64_hexdigest(repr(tuple(push)).encode())


@functools.lru_cache(maxsize=1 << 12)
def _next(ancestry: str, step: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{ancestry} {step}".encode())


# -- what weights depend on
# --------------------------------------------------------------------------------------------


def training_fingerprint(config: Config) -> str:
    """A text that tells apart what makes other weights out of the same weights and samples: flags
    of the algorithm and of the optimizer, and the files of the user's own functions in them."""
    values: dict[str, Any] = {}
    for group, beginnings in _WHAT_COUNTS.items():
        values |= {
            name: value
            for name, value in vars(getattr(config, group)).items()
            if name.startswith(beginnings)
        }
    megatron = config.megatron
    checkpoint = config.checkpoint
    values |= {f"optimizer.{name}": value for name, value in megatron.optimizer.items()}
    values |= {
        name: value
        for name, value in megatron.transformer.items()
        if name.startswith(_OF_TRANSFORMER)
    }
    if config.algorithm.needs_reference:
        values |= {
            "ref_load": _content(checkpoint.ref_load),
            "ref_ckpt_step": checkpoint.ref_ckpt_step,
        }
    if _goes_by_length(config):
        values |= {"num_rollout": config.rollout.num_rollout, "num_epoch": config.data.num_epoch}
    values = {
        name: value
        for name, value in values.items()
        if name not in _WITHOUT_EFFECT and not any(word in name for word in _OF_MEMORY)
    }
    functions = [
        value
        for name, value in values.items()
        if name.endswith("_path") and isinstance(value, str) and value
    ]
    return fingerprint(json_safe([values, config.extra]), functions)


def affects_training(flag: str) -> bool:
    """Whether other weights come out of training where this flag, or the function that it names, is
    another."""
    spec = all_flags()[flag]
    return (
        spec.attribute.startswith(_WHAT_COUNTS.get(spec.group, ()))
        and spec.attribute not in _WITHOUT_EFFECT
    )


def _goes_by_length(config: Config) -> bool:
    """A schedule is stretched over the whole run."""
    megatron = config.megatron
    decays = megatron.lr_decay_style != "constant" or megatron.lr_warmup_fraction is not None
    open_end = megatron.lr_decay_iters is None and megatron.lr_decay_samples is None
    return (decays and open_end) or megatron.weight_decay_incr_style != "constant"


def initial_fingerprint(config: Config) -> str:
    """A text that tells apart the weights with which a run begins, before its first checkpoint."""
    flags = config.checkpoint
    load = _place(flags.load)
    own = load is not None and load == _place(flags.save)
    begun = [
        None if own else load,
        None if own else flags.ckpt_step,
        flags.finetune,
        flags.ref_ckpt_step,
    ]
    return fingerprint([_content(flags.hf_checkpoint), _content(flags.ref_load), *begun], [])


def _content(path: str | None) -> list[str | None]:
    return [_place(path), content_fingerprint(Path(path)) if path else ""]


def _place(path: Any) -> str | None:
    """The same for all ways to write it."""
    return None if path is None else os.path.abspath(path) if os.path.exists(path) else str(path)
