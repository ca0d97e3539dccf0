"""``--ci-test``, ``--ci-save-grad-norm`` and ``--ci-load-grad-norm``: the checks of a step that the
reference system's CI makes.

A metric that must be 0 may reach 1e-8; gradient norms may differ by 1 % or 0.01, whichever is
larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from slime import paths as path_patterns
from slime.config.config import Config
from slime.errors import UserError, name_and_text
from slime.files import replacing

_ZERO = 1e-8
_NORM = 0.01


@dataclass(frozen=True)
class _Bound:
    """A metric, its largest value, and the flag that moves or removes the bound."""

    metric: str
    most: float
    what: str
    fix: str


def check_rollout(
    config: Config,
    rollout_id: int,
    metrics: Mapping[str, float],
    steps: Sequence[Mapping[str, float]],
) -> None:
    """Check the metrics of a rollout and of its optimizer steps.

    Args:
        metrics: of the rollout (``rollout/…``).
        steps: of each optimizer step (``train/…``), in their order.
    Raises:
        UserError: a metric exceeds its bound; names the metric, its value and the flag.
    """
    if not config.debug.ci_test:
        return
    for step_id, step in enumerate(steps):
        for bound in _bounds(config, rollout_id, step_id):
            value = step.get(bound.metric)
            if value is not None and not abs(value) <= bound.most:
                raise UserError(
                    f"--ci-test: {bound.metric} is {value:g} in step {step_id} of rollout "
                    f"{rollout_id}",
                    why=f"{bound.what}, so that it is at most {bound.most:g}",
                    fix=bound.fix,
                )
    old = metrics.get("rollout/log_probs")
    reference = metrics.get("rollout/ref_log_probs")
    if old is None or reference is None or not _starts_as_reference(config, rollout_id):
        return
    if not abs(old - reference) <= _ZERO:
        raise UserError(
            f"--ci-test: the mean log-prob is {old:.9g} of the policy and {reference:.9g} of the "
            "reference",
            why="before the first step of a run both have the same weights",
            fix="pass --ci-disable-kl-checker if --load and --ref-load name different weights",
        )


def _starts_as_reference(config: Config, rollout_id: int) -> bool:
    return (
        rollout_id == 0
        and not config.debug.ci_disable_kl_checker
        and not config.train.use_rollout_routing_replay
    )


def _bounds(config: Config, rollout_id: int, step_id: int) -> Iterator[_Bound]:
    flag = "--ci-train-rollout-logprob-abs-diff-threshold"
    yield _Bound(
        "train/train_rollout_logprob_abs_diff",
        config.debug.ci_train_rollout_logprob_abs_diff_threshold,
        "trainer and engine compute with the same weights",
        f"`slime align` finds where they differ; {flag} sets the bound",
    )
    off = "--ci-disable-kl-checker leaves this check out"
    if config.debug.ci_disable_kl_checker:
        return
    if step_id == 0 and not config.algorithm.use_rollout_logprobs:
        yield _Bound(
            "train/ppo_kl",
            _ZERO,
            "the first step of a rollout starts from the old policy itself",
            off,
        )
    if step_id == 0 and _starts_as_reference(config, rollout_id):
        yield _Bound("train/kl_loss", _ZERO, "the run starts from the reference policy", off)


def check_grad_norms(
    config: Config, rollout_id: int, steps: Sequence[Mapping[str, float]], *, writes: bool
) -> None:
    """Write the gradient norm of each step, or compare it with the recorded one.

    Args:
        writes: whether this rank writes; all ranks compare.
    Raises:
        UserError: a norm differs, or its file cannot be read.
    """
    save = config.debug.ci_save_grad_norm
    load = config.debug.ci_load_grad_norm
    for step_id, step in enumerate(steps):
        norm = step["train/grad_norm"]
        if save is not None and writes:
            path = path_patterns.fill(save, rollout_id, step_id)
            with replacing(path) as new:
                torch.save(norm, new)
        if load is None:
            continue
        path = path_patterns.fill(load, rollout_id, step_id)
        try:
            expected = float(torch.load(path, weights_only=True))
        except (OSError, RuntimeError, ValueError, TypeError, EOFError) as error:
            raise UserError(
                f"--ci-load-grad-norm {path} cannot be read",
                why=name_and_text(error),
                fix="write it with --ci-save-grad-norm first",
            ) from error
        if not math.isclose(norm, expected, rel_tol=_NORM, abs_tol=_NORM):
            raise UserError(
                f"--ci-load-grad-norm: the gradient norm of step {step_id} of rollout "
                f"{rollout_id} is {norm:.6g}",
                why=f"{path} has {expected:.6g}, and they may differ by {_NORM:.0%} or {_NORM}",
                fix="compare the two runs' samples, layout and precision",
            )
