"""Converts finished groups to one `TrainBatch` per data-parallel rank.

groups ─► trainable samples ─► columns (rewards, masks, denominators) ─► packing ─► tensor shards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.config.config import Config
from slime.config.estimators import FACTS
from slime.config.teachers import read_teachers, teacher_of
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.models import family_of, vocab_size_of
from slime.models.flops import sequence_cost
from slime.models.spec import read_hf_config
from slime.models.vision import VisionSpec, placeholder_runs, seeing
from slime.samples.batch import TrainBatch, TrainLayout
from slime.samples.columns import Columns, Trainable, columns_from_samples, select_trainable
from slime.samples.converted import CONVERSION, columns_from_hook
from slime.samples.frozen_fields import frozen
from slime.samples.media import Media, media_behind, media_problem
from slime.samples.packing import PackingPlan, PackingRules, plan_steps, with_scored
from slime.samples.preferences import check_preferences, mismatched_positions
from slime.samples.sample_fields import number_problem
from slime.samples.sampling_mask import foreign_token, mask_problem
from slime.samples.token_rewards import token_rewards_problem
from slime.samples.types import Group
from slime.user_code.loading import makers_of_samples, named, user_function

logger = get_logger(__name__)


def to_train_batches(
    groups: list[Group], config: Config, layout: TrainLayout, rollout_id: int
) -> list[TrainBatch]:
    """Convert, pack and shard one rollout.

    Samples that failed, that were aborted without a reward, or that have no response are left out
    and counted in ``global_stats`` (``rollout/dropped_<reason>``). Samples with ``remove_sample``
    stay, with a loss mask of zeros.

    Returns:
        One batch per data-parallel rank of ``layout``; all with the same ``global_stats`` and
        numbers of micro-batches.
    Raises:
        UserError: as `to_batches_of_roles`.
    """
    return to_batches_of_roles(groups, config, layout, rollout_id)[0]


def to_batches_of_roles(
    groups: list[Group], config: Config, layout: TrainLayout, rollout_id: int
) -> tuple[list[TrainBatch], list[TrainBatch]]:
    """Convert a rollout as `to_train_batches`; return the policy's batches, and those of a critic
    with its own layout ([] without one). The critic's have the same samples in each optimizer step,
    without columns that only the policy reads.

    Raises:
        UserError: there is nothing to train on, a finished sample has no reward, only some samples
            have a field, a sample is longer than ``--seq-length``, or a hook returns something
            invalid.
    """
    args = config.shared_args
    vocab_size = vocab_size_of(config.checkpoint.hf_checkpoint, config.checkpoint.model_name)
    trainable = select_trainable(groups, config.algorithm.trains_on_data, rollout_id)
    hook_path = config.reward.custom_convert_samples_to_train_data_path
    if hook_path:
        if any(sample.multimodal_inputs for sample in trainable.samples):
            raise UserError(
                f"{CONVERSION} and samples with images do not go together",
                why="a converter returns tokens without the places of their images",
                fix="leave the flag out, or train on text only",
            )
        origin = named(hook_path, CONVERSION)
        samples = trainable.samples
        with frozen(samples, origin, [samples]):
            returned = user_function(hook_path, CONVERSION)(args, samples)
        columns = columns_from_hook(returned, trainable, origin, vocab_size)
    else:
        columns = columns_from_samples(trainable, config, args)
    if config.distillation.in_trainer:
        columns.teachers = _teachers(columns, trainable, config)
    _check_lengths(columns, config)
    _check_media(columns, config)
    _check_sampling_mask(columns, config)
    _check_teacher_top(columns)
    _check_token_rewards(columns)
    preference = config.algorithm.preference
    if preference is not None:
        check_preferences(columns.trajectory_ids, columns.rewards, preference)
    algorithm = config.algorithm
    mask_sums = columns.rollout_mask_sums()
    if not any(map(any, columns.loss_masks)):
        said = "rollout %d has no trained token: loss_mask or remove_sample leaves out %d samples"
        tell(logger, said, rollout_id, len(columns.tokens), once="no trained token")
    if algorithm.loss_type == "policy_loss" and FACTS[algorithm.advantage_estimator].averages_group:
        mask_sums = columns.group_mask_means()

    def sharded(columns: Columns, layout: TrainLayout) -> list[TrainBatch]:
        schedule = _plan(columns, config, layout)
        stats = _global_stats(columns, trainable, schedule)
        ranks = range(layout.data_parallel_size)
        return [_shard(columns, mask_sums, schedule, rank, rollout_id, stats) for rank in ranks]

    shards = sharded(columns, layout)
    for shard in shards:
        _check_tokens(shard, vocab_size)
        _check_log_probs(shard, args)
    if layout.critic is None:
        return shards, []
    of_critic = replace(columns, rollout_log_probs=None, teacher_log_probs=None, payloads={})
    return shards, sharded(of_critic, layout.critic)


def _teachers(columns: Columns, trainable: Trainable, config: Config) -> list[str]:
    """Return the name of each sample's teacher. If a converter changed the number of samples, their
    metadata are lost, and all get the default teacher.

    Raises:
        UserError: a sample names an unknown teacher, or none although there are several.
    """
    flags = config.distillation
    names = [teacher.name for teacher in read_teachers(flags.opd_teacher_load)]
    same = len(columns.tokens) == len(trainable.samples)
    metadata = [sample.metadata for sample in trainable.samples] if same else [{}]
    found = [
        teacher_of(one, flags.opd_teacher_key, names, f"sample {index}")
        for one, index in zip(metadata, columns.sample_indices)
    ]
    return found if same else found * len(columns.tokens)


def _check_lengths(columns: Columns, config: Config) -> None:
    triples = zip(map(len, columns.tokens), columns.response_lengths, columns.sample_indices)
    bare = next((index for length, own, index in triples if own >= length), None)
    if bare is not None:
        raise UserError(
            f"the sample with index {bare} has no prompt: all its tokens are of the response",
            why="a token's log-prob is computed from the tokens before it, and the first one has "
            "none",
            fix="let response_length leave out at least the first token",
        )
    cap = config.train.seq_length
    if cap is None:
        return
    pairs = zip(map(len, columns.tokens), columns.sample_indices)
    if long := [(length, index) for length, index in pairs if length > cap]:
        length, index = max(long)
        raise UserError(
            f"{len(long)} samples are longer than --seq-length {cap} (longest: index {index}, "
            f"{length} tokens)",
            why="the built-in generation keeps to this limit, so user code made them",
            fix="raise --seq-length, or cut the samples in the generate function",
        )


def _check_media(columns: Columns, config: Config) -> None:
    """
    Raises:
        UserError: the run reads no images, or images do not match their placeholder tokens.
    """
    if not columns.media:
        return
    path = config.checkpoint.hf_checkpoint
    if not config.images.multimodal_keys or path is None:
        raise UserError(
            "samples of this rollout have images, and the model is trained on text only",
            why="--multimodal-keys is not set, so the vision tower is not built",
            fix="""pass --multimodal-keys '{"image": "images"}', or make samples without images""",
        )
    vision = family_of(path, config.checkpoint.model_name).describe(seeing(read_hf_config(path)))
    assert vision.vision is not None
    prompts = columns.payloads.get("teacher_prompts") or [[]] * len(columns.tokens)
    found = zip(columns.media, columns.tokens, columns.response_lengths, prompts)
    for (media, tokens, length, prompt), index in zip(found, columns.sample_indices):
        problem = media_problem(media, tokens, vision.vision.image_token)
        fix = "change sample.tokens only with append_response_tokens and append_message"
        if not problem and len(prompt):
            problem = _teacher_media_problem(media, tokens, length, list(prompt), vision.vision)
            fix = "let teacher_prompt_tokens have the first images of the sample's prompt, or none"
        if problem:
            raise UserError(
                f"the sample with index {index} has {problem}",
                why="the features of an image take the place of its placeholder tokens",
                fix=fix,
            )


def _teacher_media_problem(
    media: Sequence[Media],
    tokens: Sequence[int],
    response_length: int,
    prompt: list[int],
    vision: VisionSpec,
) -> str:
    """Return the problem of the images in a teacher's prompt; "" if there is none."""
    start = len(tokens) - response_length
    wanted = len(placeholder_runs(prompt, vision))
    own = sum(one.span.start < start for one in media)
    if wanted > own:
        return f"a prompt for its teacher with {wanted} images, and {own} images in its own prompt"
    seen = media_behind(media, start, prompt, vision)
    problem = media_problem(seen, [*prompt, *tokens[start:]], vision.image_token)
    return problem and f"in the prompt for its teacher {problem}"


def _images_of(media: Sequence[Sequence[Media]]) -> dict[str, bytes]:
    """Return the bytes of each image.

    Raises:
        UserError: a file no longer exists.
    """
    references = {one.reference for own in media for one in own}
    try:
        return {reference: Path(reference).read_bytes() for reference in sorted(references)}
    except OSError as error:
        raise UserError(
            "an image of a sample can no longer be read",
            why=str(error),
            fix="put the file back: samples refer to images, they do not hold them",
        ) from error


def _check_sampling_mask(columns: Columns, config: Config) -> None:
    if config.algorithm.use_sampling_mask and "sampling_mask_offsets" not in columns.payloads:
        raise UserError(
            "--use-sampling-mask needs the tokens that top-k and top-p left to be sampled from",
            why="the samples of this rollout carry none",
            fix="pass the engine's meta_info to sample.append_response_tokens, and ask the engine "
            "for return_sampling_mask (--custom-convert-samples-to-train-data-path returns "
            "rollout_top_p_token_ids and rollout_top_p_token_offsets); or sample without "
            "--rollout-top-k, --rollout-top-p and --rollout-min-p; or pass --no-use-sampling-mask, "
            "for example for samples of an earlier run",
        )
    none: list[Any] = [[] for _ in columns.tokens]
    masks = zip(
        columns.payloads.get("sampling_mask_ids", none),
        columns.payloads.get("sampling_mask_offsets", none),
    )
    for position, (ids, offsets) in enumerate(masks):
        if not len(ids) and not len(offsets):  # the sample trains no token
            continue
        length = columns.response_lengths[position]
        problem = mask_problem(ids, offsets, length)
        if not problem:
            response = columns.tokens[position][-length:]
            place = foreign_token(ids, offsets, response)
            if place is None:
                continue
            problem = (
                f"rollout_top_p_token_ids that lack token {response[place]}, sampled at position "
                f"{place} of the response"
            )
        raise _refused(columns, position, problem, "leave them as the engine gave them")


def _check_teacher_top(columns: Columns) -> None:
    for position, values in enumerate(columns.payloads.get("teacher_top", ())):
        shape = np.shape(values)
        length = columns.response_lengths[position]
        if shape != (0,) and shape[1:2] != (length,):
            raise _refused(
                columns,
                position,
                f"teacher_top_tokens of shape {list(shape)} for {length} response tokens",
                "leave them as the teacher gave them",
            )


def _check_token_rewards(columns: Columns) -> None:
    for position, values in enumerate(columns.payloads.get("token_rewards", ())):
        length = columns.response_lengths[position]
        problem = token_rewards_problem(values, length)
        if not problem and len(values) < length:
            problem = f"for {len(values)} of {length} response tokens"
        if problem:
            fix = "give one number per response token, or let the reward function return the list"
            raise _refused(columns, position, f"token_rewards {problem}", fix)


def _refused(columns: Columns, position: int, what: str, fix: str) -> UserError:
    return UserError(
        f"the sample with index {columns.sample_indices[position]} has {what}",
        why="sampling masks, teacher scores and token rewards belong to one response token each",
        fix=fix,
    )


def _plan(columns: Columns, config: Config, layout: TrainLayout) -> PackingPlan:
    train = config.train
    max_tokens = None
    if train.packed_tokens:
        max_tokens = train.packed_tokens * layout.context_parallel_size
    lengths = [len(tokens) for tokens in columns.tokens]
    costs = None
    path = config.checkpoint.hf_checkpoint
    if train.balance_by_flops and path:
        hf_config = read_hf_config(path)
        if columns.media:
            hf_config = seeing(hf_config)
        cost = sequence_cost(family_of(hf_config, config.checkpoint.model_name), hf_config)
        costs = cost.of(lengths)
        for position, media in enumerate(columns.media):
            costs[position] += cost.of_images(one.span.length for one in media)
    rules = PackingRules(
        global_batch_size=train.global_batch_size,
        data_parallel_size=layout.data_parallel_size,
        micro_batch_multiple=layout.micro_batch_multiple,
        micro_batch_size=train.micro_batch_size,
        max_tokens=max_tokens,
        # the loss does not depend on the order of samples in a step, so dynamic batches are always
        # filled evenly
        balance=train.balance_data or train.use_dynamic_batch_size,
        keeps_trajectories=config.algorithm.preference is not None,
    )
    schedule = _scheduled(columns, config, lengths, rules, costs)
    is_asked = not config.origins.get("max_tokens_per_gpu", "").startswith("derived")
    if schedule.oversize and is_asked:
        longest = max(lengths[i] for i in schedule.oversize)
        logger.warning(
            "%d samples are longer than --max-tokens-per-gpu × context parallel = %d (longest: %d "
            "tokens); each has a micro-batch of its own",
            len(schedule.oversize),
            max_tokens,
            longest,
        )
    return schedule


def _scheduled(
    columns: Columns,
    config: Config,
    lengths: Sequence[int],
    rules: PackingRules,
    costs: Sequence[float] | None,
) -> PackingPlan:
    def plan(positions: Sequence[int]) -> PackingPlan:
        return plan_steps(
            [lengths[i] for i in positions],
            [columns.trajectory_ids[i] for i in positions],
            [sum(columns.loss_masks[i]) for i in positions],
            rules,
            None if costs is None else [costs[i] for i in positions],
            [tuple(one.reference for one in columns.media[i]) for i in positions]
            if columns.media
            else None,
        )

    everything = range(len(lengths))
    preference = config.algorithm.preference
    if preference is None or preference.takes_pairs:
        return plan(everything)
    scored = mismatched_positions(columns.rewards)
    trained = sorted(set(everything) - set(scored))
    own = plan(trained)
    placed = PackingPlan(
        [[trained[i] for i in shard] for shard in own.shards],
        own.steps,
        [trained[i] for i in own.oversize],
    )
    return with_scored(placed, plan(scored), scored)


def _global_stats(
    columns: Columns, trainable: Trainable, schedule: PackingPlan
) -> dict[str, float]:
    count = len(columns.tokens)
    num_tokens = sum(map(len, columns.tokens))
    stats = {
        "rollout/raw_reward": sum(columns.raw_rewards) / count,
        "rollout/rewards": sum(columns.rewards) / count,
        "rollout/response_lengths": sum(columns.response_lengths) / count,
        "rollout/total_lengths": num_tokens / count,
        "rollout/truncated": sum(columns.truncated) / count,
        "rollout/num_samples": float(count),
        "rollout/num_trajectories": float(len(set(columns.trajectory_ids))),
        "rollout/num_tokens": float(num_tokens),
        "rollout/num_loss_tokens": float(sum(sum(mask) for mask in columns.loss_masks)),
        "rollout/num_oversize": float(len(schedule.oversize)),
        "rollout/num_steps": float(len(schedule.steps[0])),
    }
    if columns.media:
        stats["rollout/num_images"] = float(sum(map(len, columns.media)))
    for reason, dropped in trainable.dropped.items():
        stats[f"rollout/dropped_{reason}"] = float(dropped)
    return stats


def _shard(
    columns: Columns,
    mask_sums: list[float],
    schedule: PackingPlan,
    rank: int,
    rollout_id: int,
    stats: dict[str, float],
) -> TrainBatch:
    rows = schedule.shards[rank]

    def pick(column: list[Any]) -> list[Any]:
        return [column[i] for i in rows]

    def floats(column: list[Any] | None) -> list[torch.Tensor] | None:
        return None if column is None else [_tensor(column[i], np.float32) for i in rows]

    media = pick(columns.media) if columns.media else []
    return TrainBatch(
        rollout_id=rollout_id,
        tokens=[_tensor(columns.tokens[i], np.int64) for i in rows],
        response_lengths=pick(columns.response_lengths),
        loss_masks=floats(columns.loss_masks) or [],
        rewards=pick(columns.rewards),
        raw_rewards=pick(columns.raw_rewards),
        sample_indices=pick(columns.sample_indices),
        group_indices=pick(columns.group_ids),
        trajectory_ids=pick(columns.trajectory_ids),
        rollout_mask_sums=pick(mask_sums),
        truncated=pick(columns.truncated),
        steps=schedule.steps[rank],
        rollout_log_probs=floats(columns.rollout_log_probs),
        teacher_log_probs=floats(columns.teacher_log_probs),
        teachers=pick(columns.teachers) if columns.teachers else [],
        weight_versions=pick(columns.weight_versions),
        metadata=pick(columns.metadata),
        media=media,
        images=_images_of(media),
        payloads={
            name: [torch.as_tensor(column[i]) for i in rows]
            for name, column in columns.payloads.items()
        },
        global_stats=dict(stats),
        positions=list(rows),
    )


def _check_tokens(shard: TrainBatch, vocab_size: int | None) -> None:
    """Check that the model's embedding has a row for each token; with tensor parallelism, others
    would count as zeros.

    Args:
        vocab_size: the model's; None if unknown.
    Raises:
        UserError: names the sample and the token.
    """
    for index, tokens in zip(shard.sample_indices, shard.tokens):
        least, largest = map(int, tokens.aminmax())
        if least < 0:
            raise UserError(
                f"the sample with index {index} has the token {least}",
                why="ids of tokens count from 0",
                fix="encode with the model's tokenizer; masks go into loss_mask, not into tokens",
            )
        if vocab_size is not None and largest >= vocab_size:
            raise UserError(
                f"the sample with index {index} has the token {largest}, and the model has "
                f"{vocab_size} tokens, from 0",
                why="the tokenizer has more tokens than the model's embedding has rows (vocab_size "
                "in config.json)",
                fix="use the tokenizer of this model, or give the model a row for each token "
                "(resize_token_embeddings of transformers)",
            )


def _check_log_probs(shard: TrainBatch, args: Any) -> None:
    """
    Raises:
        UserError: a log-prob is invalid; names the functions that make samples, the sample and the
            problem.
    """
    for name in ("rollout_log_probs", "teacher_log_probs"):
        for index, values in zip(shard.sample_indices, getattr(shard, name) or ()):
            if problem := number_problem(name, values):
                makers = " or ".join(makers_of_samples(vars(args))) or "the rollout"
                raise UserError(
                    f"{makers} returned a sample (index {index}) with {problem}",
                    fix="give every response token the log-prob of the engine's answer: 0.0 (and "
                    "loss mask 0) where the model did not sample it",
                )


def _tensor(values: Any, dtype: Any) -> torch.Tensor:
    """Return a tensor with its own memory. NumPy reads Python lists several times faster than
    torch."""
    return torch.from_numpy(np.array(values, dtype=dtype))
