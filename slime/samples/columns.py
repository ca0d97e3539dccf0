"""Selects the samples that can be trained on and reads their columns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slime.algorithms.baseline import normalise_rewards
from slime.algorithms.estimators import ESTIMATORS
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.samples.frozen_fields import frozen
from slime.samples.media import Media, media_of
from slime.samples.payloads import PAYLOADS
from slime.samples.reward_shaping import shaped_reward
from slime.samples.sample_fields import PER_TOKEN, as_list, reward_number
from slime.samples.types import Group, Sample, SampleStatus
from slime.user_code.loading import FunctionFailed, described, named, user_function

#: The flag that names a function which shapes rewards, for messages.
POST_PROCESS = "--custom-reward-post-process-path"

logger = get_logger(__name__)


@dataclass
class Trainable:
    """The samples of a rollout that can be trained on, with their groups and trajectories.

    Attributes:
        group_ids, trajectory_ids: one per sample; trajectory ids are unique in the rollout.
        dropped: reason → number of samples that were left out.
    """

    samples: list[Sample] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    trajectory_ids: list[int] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


def select_trainable(groups: list[Group], sft: bool, rollout_id: int) -> Trainable:
    """Select the samples to train on; see `slime.samples.convert.to_train_batches`."""
    found = Trainable()
    unscored: list[int | None] = []
    trajectory_id = -1
    for group in groups:
        for trajectory in group.trajectories:
            trajectory_id += 1
            for sample in trajectory:
                sample.validate("the rollout")
                reason = _why_not(sample, sft)
                if reason:
                    found.dropped[reason] += 1
                    continue
                if sample.reward is None and not sft:
                    unscored.append(sample.index)
                found.samples.append(sample)
                found.group_ids.append(group.index)
                found.trajectory_ids.append(trajectory_id)
    if unscored:
        raise UserError(
            f"{len(unscored)} finished samples of rollout {rollout_id} have no reward (first: "
            f"index {unscored[0]})",
            fix="set sample.reward in the generate function, or pass --rm-type or --custom-rm-path",
        )
    if not found.samples:
        why = (
            ", ".join(f"{count} {reason}" for reason, count in found.dropped.items())
            or "it is empty"
        )
        fix = "; ".join(_REMEDIES[reason] for reason in found.dropped if reason in _REMEDIES)
        raise UserError(f"rollout {rollout_id} has no sample to train on", why=why, fix=fix)
    if found.dropped:
        logger.warning(
            "rollout %d: samples left out of training: %s", rollout_id, dict(found.dropped)
        )
    return found


#: Reason why samples are left out → what to do if no others remain.
_REMEDIES = {
    "empty": (
        "if prompts fill the context, --rollout-max-prompt-len leaves them out; else look at "
        "the generate function (logs/rollout.log tells more)"
    ),
    "failed": "logs/rollout.log tells why samples failed",
}


def _why_not(sample: Sample, sft: bool) -> str:
    if sample.status == SampleStatus.FAILED:
        return "failed"
    if sample.status == SampleStatus.ABORTED and sample.reward is None and not sft:
        return "aborted"
    return "" if sample.response_length > 0 else "empty"


@dataclass
class Columns:
    """One entry per sample in every list; the optional ones are None when no sample has the field.

    ``loss_masks`` are 0/1 per response token, zeros for removed samples. ``teachers`` is empty
    unless the trainer holds them. ``payloads`` has the columns of `slime.samples.payloads.PAYLOADS`
    that samples have. ``media`` has the images of each sample; it is empty if no sample has any.
    """

    tokens: list[list[int]]
    response_lengths: list[int]
    loss_masks: list[list[int]]
    rewards: list[float]
    raw_rewards: list[float]
    sample_indices: list[int]
    group_ids: list[int]
    trajectory_ids: list[int]
    truncated: list[bool]
    rollout_log_probs: list[list[float]] | None = None
    teacher_log_probs: list[list[float]] | None = None
    teachers: list[str] = field(default_factory=list)
    weight_versions: list[tuple[int, ...]] = field(default_factory=list)
    metadata: list[dict[str, Any] | None] = field(default_factory=list)
    payloads: dict[str, list[Any]] = field(default_factory=dict)
    media: list[list[Media]] = field(default_factory=list)

    def rollout_mask_sums(self) -> list[float]:
        """Return per sample the trained tokens of its whole trajectory, at least 1: the denominator
        of the default loss.

        Summed before packing, because the samples of one trajectory may go into different
        micro-batches.
        """
        sums: dict[int, int] = {}
        for trajectory, mask in zip(self.trajectory_ids, self.loss_masks):
            sums[trajectory] = sums.get(trajectory, 0) + sum(mask)
        return [float(max(sums[trajectory], 1)) for trajectory in self.trajectory_ids]

    def group_mask_means(self) -> list[float]:
        """Return per sample the mean of the trained tokens of its group's trajectories; 1 for a
        group without any.

        As the denominator of the loss it weights all tokens of a group equally, and each group by
        its number of trajectories.
        """
        sums: dict[int, int] = {}
        trajectories: dict[int, set[int]] = {}
        for group, trajectory, mask in zip(self.group_ids, self.trajectory_ids, self.loss_masks):
            sums[group] = sums.get(group, 0) + sum(mask)
            trajectories.setdefault(group, set()).add(trajectory)
        return [sums[group] / len(trajectories[group]) or 1.0 for group in self.group_ids]


def columns_from_samples(trainable: Trainable, config: Config, args: Any) -> Columns:
    """Convert samples to columns, as without a converter of the user."""
    samples = trainable.samples
    raw_rewards, rewards = _rewards(trainable, config, args)
    described = described_columns(trainable)
    masks = described["loss_masks"]
    payloads = {
        name: _optional(samples, masks, payload.field) for name, payload in PAYLOADS.items()
    }
    return Columns(
        tokens=[s.tokens for s in samples],
        response_lengths=[s.response_length for s in samples],
        rewards=rewards,
        raw_rewards=raw_rewards,
        rollout_log_probs=_optional(samples, masks, "rollout_log_probs"),
        teacher_log_probs=_optional(samples, masks, "teacher_log_probs"),
        payloads={name: column for name, column in payloads.items() if column is not None},
        media=_media(samples),
        **described,
    )


def _media(samples: list[Sample]) -> list[list[Media]]:
    """Return the images of each sample; [] if none has any.

    Raises:
        UserError: a sample has images without spans for all of them.
    """
    found = []
    for sample in samples:
        try:
            found.append(media_of(sample.multimodal_inputs, sample.multimodal_train_inputs))
        except ValueError as error:
            raise UserError(
                f"the sample with index {sample.index} has images without their places among its "
                "tokens",
                why=str(error),
                fix="let slime.rollout.plugin_api's generate and append_message put images into a "
                "sample; they record the places",
            ) from error
    return found if any(found) else []


def described_columns(trainable: Trainable) -> dict[str, list[Any]]:
    """Return the columns that do not depend on the converter."""
    samples = trainable.samples
    return {
        "loss_masks": [[0] * s.response_length if s.remove_sample else _mask(s) for s in samples],
        "sample_indices": [
            position if s.index is None else s.index for position, s in enumerate(samples)
        ],
        "group_ids": trainable.group_ids,
        "trajectory_ids": trainable.trajectory_ids,
        "truncated": [s.status == SampleStatus.TRUNCATED for s in samples],
        "weight_versions": [s.token_versions() for s in samples],
        "metadata": [s.train_metadata for s in samples],
    }


def _mask(sample: Sample) -> list[int]:
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _optional(samples: list[Sample], masks: list[list[int]], name: str) -> list[Any] | None:
    """Return the field of every sample if any has it. A sample that trains no token may lack it:
    its per-token numbers become zeros, its payload is empty.

    Raises:
        UserError: some samples that are trained on have the field and some do not.
    """
    values = [getattr(sample, name) for sample in samples]
    if all(value is None for value in values):
        return None
    if name == "teacher_prompt_tokens":  # [] stands for the sample's own prompt
        return [[] if value is None else value for value in values]
    if name == "token_rewards":  # other samples have one reward as a whole
        return [
            [0.0] * sample.response_length if value is None else value
            for sample, value in zip(samples, values)
        ]
    for position, (sample, mask) in enumerate(zip(samples, masks)):
        if values[position] is None and not any(mask):
            values[position] = [0.0] * sample.response_length if name in PER_TOKEN else []
    without = [sample.index for sample, value in zip(samples, values) if value is None]
    if without:
        raise UserError(
            f"{len(without)} of {len(samples)} samples have no {name} (first: index "
            f"{without[0]}), the others have",
            why="samples of different origin are in one batch",
            fix=f"let every generate function set {name}, or none",
        )
    return values


def _rewards(trainable: Trainable, config: Config, args: Any) -> tuple[list[float], list[float]]:
    """Return (raw, post-processed) rewards."""
    samples = trainable.samples
    if config.algorithm.loss_type == "sft_loss":
        zeros = [0.0] * len(samples)
        return zeros, list(zeros)
    if config.algorithm.preference is not None:
        labels = [sample.get_reward_value(args) for sample in samples]
        return labels, list(labels)
    path = config.reward.custom_reward_post_process_path
    if path:
        origin = named(path, POST_PROCESS)
        with frozen(samples, origin, [samples]):
            returned = user_function(path, POST_PROCESS)(args, samples)
        for sample in samples:
            sample.validate(origin)  # the hook may have set teacher_log_probs
        return _rewards_from_hook(returned, samples, origin)
    rewards = [sample.get_reward_value(args) for sample in samples]
    estimator = ESTIMATORS[config.algorithm.advantage_estimator]
    keeps_spread = not config.algorithm.grpo_std_normalization and estimator.facts.std_normalized
    normalised = normalise_rewards(
        [shaped_reward(sample, args) for sample in samples],
        trainable.group_ids,
        trainable.trajectory_ids,
        baseline=estimator.baseline if config.algorithm.rewards_normalization else None,
        divisor=None if keeps_spread else estimator.divisor,
    )
    return [_raw_reward(sample, reward) for sample, reward in zip(samples, rewards)], normalised


def _raw_reward(sample: Sample, reward: float) -> float:
    """Return the raw reward to log: ``metadata["raw_reward"]`` if user code has set it."""
    raw = sample.metadata.get("raw_reward")
    role = f'metadata["raw_reward"] of sample {sample.index}'
    return reward if raw is None else reward_number(raw, "a function of yours", role)


def _rewards_from_hook(
    result: Any, samples: list[Sample], origin: str
) -> tuple[list[float], list[float]]:
    fix = (
        "return (raw_rewards, rewards): two lists with one number per sample, in the order of the "
        "samples"
    )
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise FunctionFailed(f"{origin} returned {described(result)}", fix=fix)
    raw, rewards = map(as_list, result)
    if not isinstance(raw, list) or not isinstance(rewards, list):
        raise FunctionFailed(
            f"{origin} returned {described(result[0])} and {described(result[1])}", fix=fix
        )
    if len(raw) != len(samples) or len(rewards) != len(samples):
        raise FunctionFailed(
            f"{origin} returned {len(raw)} raw rewards and {len(rewards)} rewards for "
            f"{len(samples)} samples",
            fix=fix,
        )

    def checked(values: list[Any], kind: str) -> list[float]:
        roles = [f"the {kind} of the sample with index {sample.index}" for sample in samples]
        return [reward_number(value, origin, role) for value, role in zip(values, roles)]

    logged = checked(raw, "raw reward")
    trained = checked(rewards, "reward")
    given = [sample.reward for sample in samples]
    if trained == given != logged:
        tell(
            logger,
            "%s returned the samples' own rewards second, to train on, and others first, to log: "
            "if they are swapped, %s",
            origin,
            fix,
            once="swapped rewards",
        )
    return logged, trained
