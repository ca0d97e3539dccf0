"""Judge the set-up of a run by the metrics of its first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Nats per token; a trained model's samples seldom have so low a mean log-prob.
_LARGE = 1.0
#: Nats per token; above this, the likely cause is a wrong tokenizer, configuration or checkpoint
#: and not unusual prompts.
_EXTREME = 5.0
#: Global gradient norm; runs from a trained model start between 0.05 and 5.
_LARGE_NORM = 50.0
#: Rewards usually have a magnitude of about 1. Gradients grow with it, unless advantages are
#: normalised.
_LARGE_REWARD = 10.0

_WHO = {
    "rollout/log_probs": "the trainer",
    "rollout/rollout_log_probs": "the engine",
    "rollout/ref_log_probs": "the reference",
}


def first_step_lines(metrics: Mapping[str, float], *, templated: bool = False) -> list[str]:
    """Describe the mean log-probs and the gradient norm of the first step, and what low log-probs
    mean. Returns [] if the step has no log-probs.

    Args:
        metrics: the metrics of the first step.
        templated: whether prompts use the model's chat template.

    Example:
        >>> metrics = {"rollout/log_probs": -0.4, "rollout/rollout_log_probs": -0.4}
        >>> first_step_lines(metrics)
        ['first step: mean log-prob -0.400 by the trainer, -0.400 by the engine']
    """
    scored = {who: metrics[name] for name, who in _WHO.items() if name in metrics}
    if not scored:
        return []
    said = ", ".join(f"{value:.3f} by {who}" for who, value in scored.items())
    norm = (
        f"; gradient norm {metrics['train/grad_norm']:.2f}" if "train/grad_norm" in metrics else ""
    )
    lines = [f"first step: mean log-prob {said}{norm}"]
    most = max(-value for value in scored.values())
    if most > _EXTREME:
        lines.append(
            f"  {most:.1f} nats per token is extreme: for a trained model it means wrong weights, "
            "a wrong tokenizer or a wrong model configuration (slime doctor; slime align; "
            "--check-weight-update-equal)"
        )
    elif most > _LARGE and not templated:
        lines.append(
            f"  {most:.1f} nats per token is much: usual for an untrained model, or a base model "
            "at a high --rollout-temperature; for an instruct model it means that prompts do not "
            "follow its chat template (--apply-chat-template)"
        )
    return lines


def large_gradient(
    rows: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Describe a gradient that is large from the first step on, and what to try.

    Judges only models that give their own samples a high probability. For others, any norm is
    possible, and `first_step_lines` says what may be wrong.

    Args:
        rows: metrics of each step, in order.
        flags: the run's flags; the advice leaves out options that are already on.
    Returns:
        (detail, advice); None if the norm is not or no longer large, or without rewards or scores.

    Example:
        >>> step = {"step": 1, "rollout/raw_reward": 0.5, "rollout/log_probs": -0.4,
        ...         "train/grad_norm": 0.3}
        >>> large_gradient([step], {}), large_gradient([{**step, "train/grad_norm": 900.0}], {})[0]
        (None, 'grad norm 900 in step 1, at a mean log-prob of -0.400: below 5 is usual')
    """
    trained = [row for row in rows if row.get("train/grad_norm") is not None]
    if not trained or trained[0].get("rollout/raw_reward") is None:
        return None
    first = trained[0]
    norm = first["train/grad_norm"]
    smallest = min(norm, trained[-1]["train/grad_norm"])
    scored = first.get("rollout/log_probs")
    if scored is None or -scored > _LARGE or smallest <= _LARGE_NORM:
        return None
    detail = (
        f"grad norm {norm:.0f} in step {first['step']:.0f}, at a mean log-prob of {scored:.3f}: "
        "below 5 is usual"
    )
    ends = [first.get(f"rollout/reward/{end}") or 0.0 for end in ("min", "max")]
    tries = []
    if max(map(abs, ends)) > _LARGE_REWARD:
        normalise = "" if flags.get("normalize_advantages") else ", or --normalize-advantages"
        tries.append(f"rewards go from {ends[0]:g} to {ends[1]:g}: scale them{normalise}")
    if first.get("train/moe_max_load") is not None:
        tries.append(
            "with experts, slime align: it names the first layer that trainer and engine compute "
            "differently"
        )
    tries.append(
        "look for prompts that carry the chat template twice (slime doctor), a loss of your own "
        "that sums over tokens"
    )
    kernels = ["--attention-backend flash"] if flags.get("attention_backend") != "flash" else []
    kernels += [] if flags.get("deterministic_mode") else ["--deterministic-mode"]
    tries += [f"try other kernels: {', '.join(kernels)}"] if kernels else []
    return detail, "; ".join(tries)
