"""Metrics of a rollout or an evaluation, from its samples only. Names are those of the reference
system."""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime.config.estimators import estimators_where
from slime.samples.reward_shaping import shaped_reward
from slime.samples.sample_fields import is_finite, is_number
from slime.samples.types import Group, Sample, SampleStatus

_REPETITION_WINDOW = 10_000
_REPETITION_RATIO = 10.0


def distribution(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return ``{name}/mean``, ``/median``, ``/max`` and ``/min`` of ``values``; {} if there are
    none.

    Example:
        >>> distribution("len", [1, 2, 6])
        {'len/mean': 3.0, 'len/median': 2, 'len/max': 6, 'len/min': 1}
    """
    numbers = list(values)
    if not numbers:
        return {}
    return {
        f"{name}/mean": statistics.fmean(numbers),
        f"{name}/median": statistics.median(numbers),
        f"{name}/max": max(numbers),
        f"{name}/min": min(numbers),
    }


def sample_metrics(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Return lengths, truncation, repetition, prefix caching and speculative decoding of
    samples.

    Args:
        prefix: "rollout" or "eval/<name>".
    """
    if not samples:
        return {}
    count = len(samples)
    metrics = distribution(f"{prefix}/response_len", [sample.response_length for sample in samples])
    metrics[f"{prefix}/truncated_ratio"] = (
        sum(s.status is SampleStatus.TRUNCATED for s in samples) / count
    )
    metrics[f"{prefix}/repetition_frac"] = (
        sum(is_repetitive(sample.response) for sample in samples) / count
    )
    cached = sum(sample.prefix_cache_info.cached_tokens for sample in samples)
    prompt_tokens = sum(sample.prefix_cache_info.total_prompt_tokens for sample in samples)
    if prompt_tokens:
        metrics[f"{prefix}/prefix_cache_hit_rate"] = cached / prompt_tokens
        metrics[f"{prefix}/avg_cached_tokens_per_sample"] = cached / count
    drafted = sum(sample.spec_info.spec_draft_token_num for sample in samples)
    verified = sum(sample.spec_info.spec_verify_ct for sample in samples)
    if drafted and verified:
        accepted = sum(sample.spec_info.spec_accept_token_num for sample in samples)
        metrics[f"{prefix}/spec_accept_rate"] = accepted / drafted
        metrics[f"{prefix}/spec_accept_length"] = (
            sum(sample.spec_info.completion_token_num for sample in samples) / verified
        )
    return metrics


def reward_parts(samples: Iterable[Sample], prefix: str, args: Any) -> dict[str, float]:
    """Return the mean of each finite number in dict rewards except the reward itself, over the
    samples that have it. True counts as 1.

    Args:
        prefix: "rollout" or "eval/<name>".

    Example:
        >>> samples = [Sample(reward={"score": 1, "right": True, "said": "4"}),
        ...            Sample(reward={"score": 0})]
        >>> reward_parts(samples, "rollout", args)  # with --reward-key score
        {'rollout/reward_part/right': 1.0}
    """
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for key, value in sample.reward.items() if isinstance(sample.reward, dict) else ():
            if key != getattr(args, "reward_key", None) and is_number(value) and is_finite(value):
                parts[str(key)].append(float(value))
    return {
        f"{prefix}/reward_part/{name}": statistics.fmean(values)
        for name, values in sorted(parts.items())
    }


def _compares_samples(args: Any) -> bool:
    """Tell whether a group with equal rewards has no training signal."""
    own = ("custom_reward_post_process_path", "custom_advantage_function_path")
    return (
        getattr(args, "advantage_estimator", "grpo") in estimators_where("group_relative")
        and getattr(args, "rewards_normalization", True)
        and not any(getattr(args, dest, None) for dest in own)
    )


def rollout_metrics(groups: Sequence[Group], args: Any) -> dict[str, float]:
    """Return ``rollout/…`` of a training batch: `sample_metrics`, rewards, groups without a signal,
    weight versions."""
    samples = [sample for group in groups for sample in group.samples]
    metrics = sample_metrics(samples, "rollout")
    rewards = [sample.get_reward_value(args) for sample in samples if sample.reward is not None]
    metrics |= distribution("rollout/reward", rewards) | reward_parts(samples, "rollout", args)
    flat: Counter[str] = Counter()
    for group in groups:
        scored = [sample for sample in group.samples if sample.reward is not None]
        values = {shaped_reward(sample, args) for sample in scored}
        if len(values) == 1 and len(group.samples) > 1:
            flat[f"rollout/zero_std/count_{round(values.pop(), 1)}"] += 1
    metrics |= flat
    if rewards and _compares_samples(args):
        metrics["rollout/zero_std/ratio"] = sum(flat.values()) / len(groups)
    versions = [version for sample in samples for version in sample.token_versions()]
    if versions:
        metrics["rollout/weight_version/min"] = min(versions)
        metrics["rollout/weight_version/max"] = max(versions)
        metrics["rollout/unsampled_trained_ratio"] = unsampled_trained_ratio(samples)
    return metrics | _optional_metrics(groups, samples, args)


def unsampled_trained_ratio(samples: Iterable[Sample]) -> float:
    """Return the share of trained tokens that no engine sampled, such as a tool's output, among
    samples with known token spans."""
    trained = sampled = 0
    for sample in samples:
        own = [span for span in sample.token_spans if span.weight_version is not None]
        if own:
            mask = sample.loss_mask
            trained += sample.effective_response_length
            sampled += sum(
                (sum(mask[s.start : s.end]) if mask is not None else s.end - s.start) for s in own
            )
    return 1 - sampled / trained if trained else 0.0


def _optional_metrics(
    groups: Sequence[Group], samples: Sequence[Sample], args: Any
) -> dict[str, float]:
    """Return the metrics of --log-multi-turn, --log-passrate, --log-reward-category and
    --log-correct-samples."""
    metrics: dict[str, float] = {}
    if args.log_multi_turn:
        told = [sample.metadata.get("round_number") for sample in samples]
        rounds = [
            float(number)
            for number in told
            if number is not None and is_number(number) and is_finite(number)
        ]
        metrics |= distribution("multi_turn/round_number", rounds)
        metrics |= distribution(
            "multi_turn/trained_len", [s.effective_response_length for s in samples]
        )
    if args.log_passrate:
        scores = [trajectory_scores(group.trajectories, args) for group in groups]
        metrics |= {f"passrate/{name}": value for name, value in pass_at_k_metrics(scores).items()}
    if args.log_reward_category:
        found = Counter(
            str(s.reward[args.log_reward_category])
            for s in samples
            if isinstance(s.reward, dict) and args.log_reward_category in s.reward
        )
        metrics |= {
            f"rollout/error_cat/{name}": count / len(samples) for name, count in found.items()
        }
    if args.log_correct_samples:
        correct = [s for s in samples if s.reward is not None and s.get_reward_value(args) >= 1]
        metrics["rollout/correct_ratio"] = len(correct) / max(1, len(samples))
        metrics |= distribution(
            "rollout/correct_response_len", [s.response_length for s in correct]
        )
    return metrics


def throughput_metrics(
    samples: Sequence[Sample], seconds: float, num_gpus: int, from_journal: Mapping[int | None, int]
) -> dict[str, float]:
    """Return ``perf/…`` of a rollout that took ``seconds`` on engines with ``num_gpus`` GPUs (CPU
    slots) in total.

    Args:
        from_journal: number of response tokens restored from the journal, by sample index.
    """
    if not samples or seconds <= 0:
        return {}
    tokens: Counter[int | None] = Counter()
    effective: Counter[int | None] = Counter()
    for sample in samples:
        tokens[sample.index] += sample.response_length
        effective[sample.index] += sample.effective_response_length
    made = {index: max(0, count - from_journal.get(index, 0)) for index, count in tokens.items()}
    trained = sum(min(made[index], count) for index, count in effective.items())
    metrics: dict[str, float] = {
        "perf/rollout_time": seconds,
        "perf/tokens_per_gpu_per_sec": sum(made.values()) / seconds / max(1, num_gpus),
        "perf/effective_tokens_per_gpu_per_sec": trained / seconds / max(1, num_gpus),
    }
    whole = [sample for sample in samples if not from_journal.get(sample.index)]
    longest = max(whole, key=lambda sample: sample.response_length, default=None)
    if longest is not None:
        metrics["perf/longest_sample_tokens_per_sec"] = longest.response_length / seconds
    outside = [sample.non_generation_time for sample in samples]
    if any(outside):
        metrics |= distribution("perf/non_generation_time", outside)
    if any(outside) and longest is not None:
        inside = max(1e-9, seconds - longest.non_generation_time)
        metrics["perf/longest_sample_tokens_per_sec_without_non_generation"] = (
            longest.response_length / inside
        )
    return metrics


def load_metrics(loads: Sequence[dict[str, int]]) -> dict[str, float]:
    """Return how evenly the router spread requests, and how often an engine had none, from
    snapshots of each engine's requests in flight.

    Example:
        >>> loads = load_metrics([{"http://a": 6, "http://b": 2}, {"http://a": 6, "http://b": 0}])
        >>> loads["rollout/engine_load/max_over_mean"], loads["rollout/engine_load/idle_ratio"]
        (1.7142857142857142, 0.25)
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for snapshot in loads:
        for url, load in snapshot.items():
            sums[url] += load
    if not sums or not sum(sums.values()):
        return {}
    means = {url: total / len(loads) for url, total in sums.items()}
    metrics = {f"rollout/engine_load/{i}": means[url] for i, url in enumerate(sorted(means))}
    idle = [load == 0 for snapshot in loads for load in snapshot.values()]
    metrics["rollout/engine_load/idle_ratio"] = statistics.fmean(idle)
    metrics["rollout/engine_load/max_over_mean"] = max(means.values()) / statistics.fmean(
        means.values()
    )
    return metrics


def is_repetitive(text: str) -> bool:
    """Tell whether the end of a response repeats itself so much that it compresses more than
    tenfold.

    Example:
        >>> is_repetitive("no no no " * 500), is_repetitive("It is 4, because 2 + 2 = 4.")
        (True, False)
    """
    tail = text[-_REPETITION_WINDOW:].encode()
    return len(tail) > 200 and len(tail) > _REPETITION_RATIO * len(zlib.compress(tail))


# -- pass@k ----------------------------------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased probability that one of k samples is correct: 1 − C(n−c, k) / C(n, k).

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1.

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def powers_of_two(largest: int) -> list[int]:
    return [1 << i for i in range(largest.bit_length())] if largest else []


def trajectory_scores(trajectories: Iterable[Sequence[Sample]], args: Any) -> list[float]:
    """Return one reward per trajectory: the best of the samples that it fanned out into, which are
    not separate attempts.

    Example:
        >>> trajectory_scores([[Sample(reward=0), Sample(reward=1)], [Sample(reward=0)]], args=None)
        [1.0, 0.0]
    """
    return [
        max(sample.get_reward_value(args) for sample in trajectory) for trajectory in trajectories
    ]


def pass_at_k_metrics(
    scores: Iterable[Sequence[float]], ks: Sequence[int] = ()
) -> dict[str, float]:
    """Return ``pass@k`` averaged over prompts; an attempt is correct if its reward is at least 1.

    Args:
        scores: rewards of the attempts (`trajectory_scores`) by prompt. Prompts with fewer than k
            attempts do not count for that k.
        ks: values of k; default: powers of two up to the most attempts of a prompt.

    Example:
        >>> pass_at_k_metrics([[1, 0], [0, 0]])
        {'pass@1': 0.25, 'pass@2': 0.5}
    """
    by_prompt = [list(rewards) for rewards in scores]
    metrics = {}
    for k in ks or powers_of_two(max(map(len, by_prompt), default=0)):
        rates = [pass_at_k(len(r), sum(x >= 1 for x in r), k) for r in by_prompt if len(r) >= k]
        if rates:
            metrics[f"pass@{k}"] = statistics.fmean(rates)
    return metrics
