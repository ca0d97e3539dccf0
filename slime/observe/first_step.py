"""What the first step of a run tells of its set-up: the numbers that an experienced eye looks at first."""

from __future__ import annotations

from collections.abc import Mapping

#: Nats per token; what a trained model samples is seldom that unlikely to it.
_LARGE = 1.0
#: Above this a tokenizer, a configuration or weights that are not the model's are likelier than odd prompts.
_EXTREME = 5.0

_WHO = {
    "rollout/log_probs": "the trainer",
    "rollout/rollout_log_probs": "the engine",
    "rollout/ref_log_probs": "the reference",
}


def first_step_lines(metrics: Mapping[str, float]) -> list[str]:
    """Mean log-probs of the first samples, by whoever scored them, and the gradient's norm; and what large ones mean.

    Args:
        metrics: of the first step; [] where nothing was scored in it.

    Example:
        >>> first_step_lines({"rollout/log_probs": -0.4, "rollout/rollout_log_probs": -0.4, "train/grad_norm": 0.25})
        ['first step: mean log-prob -0.400 by the trainer, -0.400 by the engine; gradient norm 0.25']
    """
    scored = {who: metrics[name] for name, who in _WHO.items() if name in metrics}
    if not scored:
        return []
    said = ", ".join(f"{value:.3f} by {who}" for who, value in scored.items())
    norm = f"; gradient norm {metrics['train/grad_norm']:.2f}" if "train/grad_norm" in metrics else ""
    lines = [f"first step: mean log-prob {said}{norm}"]
    most = max(-value for value in scored.values())
    if most > _EXTREME:
        lines.append(
            f"  {most:.1f} nats per token is extreme: of a trained model it means wrong weights, a wrong tokenizer or a"
            " wrong model configuration (slime doctor; slime align; --check-weight-update-equal)"
        )
    elif most > _LARGE:
        lines.append(
            f"  {most:.1f} nats per token is much: usual of an untrained model, or of a base model at a high"
            " --rollout-temperature; of an instruct model it means that prompts do not follow its chat template"
            " (--apply-chat-template)"
        )
    return lines
