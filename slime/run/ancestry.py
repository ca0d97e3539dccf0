"""The log of a run's weight pushes over all its launches, ``journal/pushes.jsonl``, one line each.

A launch that resumes from a checkpoint finds samples in the journal from weights that were pushed
after that checkpoint. The log says how stale they are, and whether training can reach the same
weights again: not with another learning rate or other initial weights. So each push is logged with
its ancestry, a hash of the ancestry one rollout earlier and of everything that affected the
training step.
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
from slime.user_code.hooks import HOOKS
from slime.user_code.loading import fingerprint

logger = get_logger(__name__)

#: Number of ancestries in a checkpoint; the journal spans fewer rollouts.
_KEPT = 64
#: Group → names or prefixes of flags that affect the trained weights. Flags that only distribute
#: work or memory are left out.
_AFFECTS_TRAINING = {
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
    "critic": (
        "critic_l", "num_critic_only_steps", "lambd", "value_clip", "normalize_values",
    ),
    "distillation": ("",),
    "lora": ("",),
}  # fmt: skip
_WITHOUT_EFFECT = frozenset({"get_mismatch_metrics"})
#: Prefixes of Megatron flags that no group declares and that affect the trained weights.
_TRANSFORMER_PREFIXES = (
    "moe_router", "moe_aux", "moe_z", "moe_input_jitter", "attention_dropout", "hidden_dropout",
    "mtp_",
)  # fmt: skip
#: Words in names of flags that only affect memory and speed.
_MEMORY_WORDS = ("offload", "overlap", "barrier", "fusion")


class Push(NamedTuple):
    """A push of weights to the engines.

    Attributes:
        version: the version number of the weights.
        trained: number of rollouts trained on before the push.
        ancestry: hash of what the weights depend on; "" if an earlier release wrote none.
    """

    version: int
    trained: int
    ancestry: str = ""


class PushLog:
    """The pushes of one run folder (or stage).

    Args:
        folder: folder of the journal, created by the first push.
        config: of this launch; determines the training and the initial weights.
    Attributes:
        earlier: pushes of earlier launches, in order, without damaged lines.
        unreachable: versions that training cannot reach again; their samples are generated again.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self._path = folder / "pushes.jsonl"
        self._training = training_fingerprint(config)
        self._initial = initial_fingerprint(config)
        self.earlier, self._is_damaged = _read(self._path)
        self._by_version = {push.version: push for push in self.earlier}
        self._ancestries: dict[int, str] = {}
        self._is_first_push = True
        self.unreachable: frozenset[int] = frozenset()

    def begin(self, trained: int, ancestries: Mapping[int, str]) -> None:
        """Start from a checkpoint.

        Args:
            trained: number of rollouts that its weights were trained on.
            ancestries: `recent_ancestries` from the checkpoint; {} if there is no checkpoint.
        """
        known = {count: ancestry for count, ancestry in ancestries.items() if count <= trained}
        self._ancestries = {trained: _next(self._initial, str(trained)), **known}
        self.unreachable = frozenset(
            version
            for version, push in self._by_version.items()
            # a push without an ancestry, or too old to have one here, may be reachable
            if push.ancestry and self._ancestry(push.trained) not in (None, push.ancestry)
        )
        if self._is_damaged:  # the damaged line may be that of a missing version
            self.unreachable |= self._unlogged(max(self._by_version, default=0))
        self._is_first_push = True

    def _unlogged(self, end: int) -> set[int]:
        """Return the versions below ``end`` that have no line in the log."""
        return {number for number in range(1, end) if number not in self._by_version}

    def _ancestry(self, trained: int) -> str | None:
        """Return the ancestry of the weights after ``trained`` rollouts; None if they are much
        older than the checkpoint."""
        for count in range(max(self._ancestries) + 1, trained + 1) if self._ancestries else ():
            self._ancestries[count] = _next(self._ancestries[count - 1], self._training)
        return self._ancestries.get(trained)

    def recent_ancestries(self, trained: int) -> dict[int, str]:
        """Return number of rollouts → ancestry, for a checkpoint after ``trained`` rollouts."""
        self._ancestry(trained)
        return {
            count: self._ancestries[count]
            for count in sorted(self._ancestries)
            if trained - _KEPT < count <= trained
        }

    def note(self, version: int, trained: int) -> None:
        """Log a push of weights that were trained on ``trained`` rollouts."""
        push = Push(version, trained, self._ancestry(trained) or "")
        if self.unreachable and self._is_first_push:
            # pushes missing in the log, after a crash or with a full disk, may be unreachable as
            # well
            self.unreachable |= self._unlogged(version)
        self._is_first_push = False
        self._by_version[version] = push
        self.unreachable -= {version}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab") as file:
                # the line break ends a line that a crash truncated
                row = {
                    "version": push.version,
                    "trained": push.trained,
                    "lineage": push.ancestry,
                    "checksum": _checksum(push),
                }
                file.write(b"\n" + orjson.dumps(row))
        except OSError as problem:  # a full disk; the journal reports it
            logger.warning("%s: %s", self._path, problem)


def _read(path: Path) -> tuple[list[Push], bool]:
    """Return the pushes of earlier launches, and whether some lines are damaged."""
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
            is_whole &= row.get("checksum") in (None, _checksum(push))  # old lines have none
        except (ValueError, KeyError, TypeError, AttributeError):
            is_whole = False
        if is_whole:
            whole.append(push)
        is_damaged |= not is_whole
    if is_damaged:
        logger.warning("%s has damaged or truncated lines, which are ignored", path)
    return whole, is_damaged


def _checksum(push: Push) -> str:
    return xxhash.xxh3_64_hexdigest(repr(tuple(push)).encode())


@functools.lru_cache(maxsize=1 << 12)
def _next(ancestry: str, step: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{ancestry} {step}".encode())


# -- what weights depend on ------------------------------------------------------------------------


def training_fingerprint(config: Config) -> str:
    """Return a hash of everything that affects the result of a training step on given weights and
    samples, such as flags of the algorithm and the optimizer, and the source files of users'
    functions."""
    values: dict[str, Any] = {}
    is_off = {  # left out, so that runs of earlier releases keep their fingerprints
        "lora": not config.lora.lora_rank,
        "critic": not config.algorithm.needs_critic,
        "distillation": not config.distillation.use_opd,
    }
    for group, prefixes in _AFFECTS_TRAINING.items():
        if is_off.get(group):
            continue
        values |= {
            name: value
            for name, value in vars(getattr(config, group)).items()
            if name.startswith(prefixes)
        }
    megatron = config.megatron
    checkpoint = config.checkpoint
    values |= {f"optimizer.{name}": value for name, value in megatron.optimizer.items()}
    values |= {
        name: value
        for name, value in megatron.transformer.items()
        if name.startswith(_TRANSFORMER_PREFIXES)
    }
    if config.algorithm.needs_reference:
        values |= {
            "ref_load": _content(checkpoint.ref_load),
            "ref_ckpt_step": checkpoint.ref_ckpt_step,
        }
    values |= {
        f"teacher {teacher.name}": _content(teacher.source)
        for teacher in config.distillation.teachers
    }
    if _depends_on_run_length(config):
        values |= {"num_rollout": config.rollout.num_rollout, "num_epoch": config.data.num_epoch}
    values = {
        name: value
        for name, value in values.items()
        if name not in _WITHOUT_EFFECT and not any(word in name for word in _MEMORY_WORDS)
    }
    functions = [
        value
        for name, value in values.items()
        if name in HOOKS and isinstance(value, str) and value
    ]
    return fingerprint(json_safe([values, config.extra]), functions)


def affects_training(flag: str) -> bool:
    """Return whether a change of this flag, or of the function that it names, changes the trained
    weights."""
    spec = all_flags()[flag]
    return (
        spec.attribute.startswith(_AFFECTS_TRAINING.get(spec.group, ()))
        and spec.attribute not in _WITHOUT_EFFECT
    )


def _depends_on_run_length(config: Config) -> bool:
    """Return whether the learning rate or weight decay schedule spans the whole run."""
    megatron = config.megatron
    decays = megatron.lr_decay_style != "constant" or megatron.lr_warmup_fraction is not None
    open_end = megatron.lr_decay_iters is None and megatron.lr_decay_samples is None
    return (decays and open_end) or megatron.weight_decay_incr_style != "constant"


def initial_fingerprint(config: Config) -> str:
    """Return a hash of the weights with which a run begins, before its first checkpoint."""
    flags = config.checkpoint
    load = _absolute(flags.load)
    is_own = load is not None and load == _absolute(flags.save)
    loaded = (None, None) if is_own else (load, flags.ckpt_step)
    start = [*loaded, flags.finetune, flags.ref_ckpt_step]
    if config.lora.lora_adapter_path:
        start += _content(config.lora.lora_adapter_path)
    if config.critic.critic_load:
        start += _content(config.critic.critic_load)
    return fingerprint([_content(flags.hf_checkpoint), _content(flags.ref_load), *start], [])


def _content(path: str | None) -> list[str | None]:
    return [_absolute(path), content_fingerprint(Path(path)) if path else ""]


def _absolute(path: Any) -> str | None:
    """Return the absolute path if ``path`` exists; names on the hub are unchanged."""
    return None if path is None else os.path.abspath(path) if os.path.exists(path) else str(path)
