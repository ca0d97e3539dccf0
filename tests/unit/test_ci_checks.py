"""--ci-test: what is asserted of a step, and what is left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config import make_config
from slime.errors import UserError
from slime.trainer.ci_checks import check_grad_norms, check_rollout

GOOD = {"train/train_rollout_logprob_abs_diff": 0.05, "train/ppo_kl": 0.0, "train/kl_loss": 0.0}
ROLLOUT = {"rollout/log_probs": -0.5, "rollout/ref_log_probs": -0.5}


def check(
    step: dict[str, float] | None = None, rollout: dict[str, float] | None = None, **flags: Any
) -> None:
    rollout_id, step_id = flags.pop("rollout_id", 0), flags.pop("step_id", 0)
    config = make_config(**{"ci_test": True, "use_kl_loss": True, "hf_checkpoint": "x", **flags})
    steps = [GOOD] * step_id + [{**GOOD, **(step or {})}]
    check_rollout(config, rollout_id, {**ROLLOUT, **(rollout or {})}, steps)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("train_rollout_logprob_abs_diff", {"step": {"train/train_rollout_logprob_abs_diff": 0.11}}),
    (
        "train_rollout_logprob_abs_diff",
        {"step": {"train/train_rollout_logprob_abs_diff": math.nan}},
    ),
    ("train_rollout_logprob_abs_diff", {"ci_train_rollout_logprob_abs_diff_threshold": 0.04}),
    (
        "train_rollout_logprob_abs_diff",
        {"step_id": 2, "step": {"train/train_rollout_logprob_abs_diff": 0.2}},
    ),
    ("ppo_kl", {"step": {"train/ppo_kl": 1e-6}}),
    ("ppo_kl", {"step": {"train/ppo_kl": -1e-6}}),
    ("ppo_kl", {"rollout_id": 5, "step": {"train/ppo_kl": 1e-6}}),
    ("kl_loss", {"step": {"train/kl_loss": 1e-6}}),
    ("mean log-prob", {"rollout": {"rollout/ref_log_probs": -0.500001}}),
]
RIGHT: list[dict[str, Any]] = [
    {},
    {"step_id": 1, "step": {"train/ppo_kl": 0.3}},
    {"rollout_id": 1, "step": {"train/kl_loss": 0.3}},
    {"rollout_id": 1, "rollout": {"rollout/ref_log_probs": -2.0}},
    {"ci_disable_kl_checker": True, "step": {"train/ppo_kl": 0.3, "train/kl_loss": 0.3}},
    {"use_rollout_logprobs": True, "step": {"train/ppo_kl": 0.3}},
    {"use_rollout_routing_replay": True, "step": {"train/kl_loss": 0.3}},
    {"ci_test": False, "step": {"train/ppo_kl": 0.3, "train/train_rollout_logprob_abs_diff": 9.0}},
]


@pytest.mark.parametrize(("named", "case"), WRONG)
def test_what_does_not_hold_is_refused_by_name(named: str, case: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=named) as caught:
        check(**dict(case))
    assert "--ci-test" in caught.value.what and caught.value.fix


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_not_promised_is_not_checked(case: dict[str, Any]) -> None:
    check(**dict(case))


def test_what_cannot_be_checked_is_named_in_a_warning() -> None:
    plain = make_config(ci_test=True)
    partial = make_config(ci_test=True, use_rollout_logprobs=True, use_fault_tolerance=True)
    assert not any("--ci-test" in warning for warning in plain.warnings)
    (warning,) = [warning for warning in partial.warnings if "--ci-test" in warning]
    assert "the KL to the old policy" in warning and "killed" in warning


@given(norm=st.floats(1e-4, 1e4), factor=st.floats(0.9, 1.1))
def test_gradient_norms_are_compared_to_one_percent(
    tmp_path_factory: pytest.TempPathFactory, norm: float, factor: float
) -> None:
    pattern = str(tmp_path_factory.mktemp("norms") / "{role}-{rollout_id}-{step_id}.pt")
    steps = [{"train/grad_norm": norm}, {"train/grad_norm": 2 * norm}]
    check_grad_norms(make_config(ci_save_grad_norm=pattern), 3, steps, writes=True)
    assert Path(pattern.format(role="actor", rollout_id=3, step_id=1)).is_file()
    reader = make_config(ci_load_grad_norm=pattern)
    check_grad_norms(reader, 3, steps, writes=False)
    other = [steps[0], {"train/grad_norm": 2 * norm * factor}]
    difference, bound = abs(factor - 1) * 2 * norm, max(0.01, 0.01 * 2 * norm * max(1, factor))
    if math.isclose(difference, bound, rel_tol=1e-6):
        return
    if difference < bound:
        check_grad_norms(reader, 3, other, writes=False)
    else:
        with pytest.raises(UserError, match="step 1 of rollout 3"):
            check_grad_norms(reader, 3, other, writes=False)


def test_a_norm_that_was_not_written_is_told(tmp_path: Path) -> None:
    config = make_config(ci_load_grad_norm=str(tmp_path / "norm.pt"))
    with pytest.raises(UserError, match="cannot be read"):
        check_grad_norms(config, 0, [{"train/grad_norm": 1.0}], writes=False)
