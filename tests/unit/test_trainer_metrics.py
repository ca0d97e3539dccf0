"""Metrics of an update: token means weighted as the loss is, counted out by hand on two samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.samples.batch import StepPlan, TrainBatch, TrainedTokens
from slime.trainer.records import MicroBatchResult, RolloutTensors, TeacherColumns
from slime.trainer.rollout_metrics import (
    distillation_metrics,
    mean_of_steps,
    quantisation_metrics,
    reference_tokens,
    sum_metrics,
    token_means,
    trained_tokens,
    worst_mismatch,
)
from tests.support.trainer_ranks import trainer_config

#: Two trajectories of two and three tokens; the first of the second one is not trained.
MASKS = [[1.0, 1.0], [0.0, 1.0, 1.0]]


def tensors(*rows: list[float]) -> list[Tensor]:
    return [torch.tensor(row) for row in rows]


def batch(masks: list[list[float]] = MASKS) -> TrainBatch:
    return TrainBatch(
        rollout_id=0,
        tokens=[torch.zeros(1 + len(mask)) for mask in masks],
        response_lengths=[len(mask) for mask in masks],
        loss_masks=tensors(*masks),
        rewards=[0.0, 0.0],
        raw_rewards=[0.0, 0.0],
        sample_indices=[0, 1],
        group_indices=[0, 0],
        trajectory_ids=[0, 1],
        rollout_mask_sums=[sum(mask) for mask in masks],
        truncated=[False, False],
        steps=[StepPlan([[0], [1]], 2, 4)],
    )


def ranks(has_output: bool = True) -> Any:
    return SimpleNamespace(
        device=torch.device("cpu"),
        has_output=has_output,
        speaks_for_shard=True,
        sum_over_replicas=lambda values: values,
        max_over_replicas=lambda values: values,
    )


def data(masks: list[list[float]] = MASKS, /, **columns: Any) -> RolloutTensors:
    return RolloutTensors(loss_masks=tensors(*masks), **columns)


def test_a_rank_without_samples_asks_what_a_users_function_measures() -> None:
    def union(names: list[str]) -> list[str]:
        assert config.algorithm.custom_loss_function_path or config.algorithm.use_tis
        return sorted({*names, "theirs"})

    results = [
        MicroBatchResult([], {"loss": torch.tensor(0.5)}, torch.zeros(0)),
        MicroBatchResult([], {"loss": torch.tensor(0.25), "kl": torch.ones(())}, torch.zeros(0)),
    ]
    own = {"kl": 1.0, "loss": 0.75}
    for flags, expected in (
        ({}, own),
        ({"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}, own | {"theirs": 0.0}),
        ({"use_tis": True, "custom_tis_function_path": "a.b"}, own | {"theirs": 0.0}),
    ):
        config = trainer_config(**flags)
        place = ranks()
        place.union = union
        assert sum_metrics(config, place, results) == expected
        place.has_output = False
        assert sum_metrics(config, place, results) == {}


def test_means_are_over_trained_tokens_and_each_execution_counts_alike() -> None:
    columns = {
        "log_probs": tensors([-1.0, -3.0], [-9.0, -2.0, -4.0]),
        "advantages": tensors([1.0, 3.0], [9.0, 0.0, 2.0]),
    }
    assert token_means(trainer_config(), ranks(), batch(), data(**columns)) == pytest.approx(
        {"rollout/log_probs": (-2.0 - 3.0) / 2, "rollout/advantages": (2.0 + 1.0) / 2}
    )
    assert token_means(trainer_config(), ranks(has_output=False), batch(), data(**columns)) == {}
    assert token_means(trainer_config(), ranks(), batch(), data()) == {}


def test_the_kl_is_shown_where_there_is_a_reference() -> None:
    """Also if only the loss has a penalty, so that none is in the reward."""
    columns = {"log_probs": tensors([-1.0, -1.0], [-9.0, -1.0, -1.0])}
    flags = {"use_kl_loss": True, "kl_loss_type": "k2"}
    assert "rollout/kl" not in token_means(trainer_config(), ranks(), batch(), data(**columns))
    columns["ref_log_probs"] = tensors([-2.0, -1.0], [0.0, -1.0, -3.0])
    found = token_means(trainer_config(**flags), ranks(), batch(), data(**columns))
    assert found["rollout/kl"] == pytest.approx((0.5 / 2 + 2.0 / 2) / 2)


def test_the_worst_mismatch_is_of_a_trained_token() -> None:
    columns = {
        "log_probs": tensors([-1.0, -1.0], [-9.0, -1.0, -1.0]),
        "rollout_log_probs": tensors([-1.5, -1.0], [0.0, -1.0, -0.25]),
    }
    found = worst_mismatch(ranks(), data(**columns))
    assert found == {"train/train_rollout_logprob_abs_diff_max": 0.75}


def test_what_the_format_moves_and_what_trainer_and_engine_differ_by() -> None:
    columns = {
        "engine_log_probs": tensors([-1.0, -2.0], [0.0, -1.0, -1.0]),
        "log_probs": tensors([-1.5, -2.5], [-9.0, -1.0, -2.0]),
    }
    config = trainer_config()
    assert quantisation_metrics(config, ranks(), batch(), data(**columns)) == pytest.approx(
        {"train/quantisation_logprob_abs_diff": (0.5 + 0.5) / 2}
    )
    columns["rollout_log_probs"] = tensors([-1.0, -2.25], [-5.0, -1.0, -1.5])
    assert quantisation_metrics(config, ranks(), batch(), data(**columns)) == pytest.approx(
        {
            "train/quantisation_logprob_abs_diff": 0.5,
            "train/quantised_rollout_logprob_abs_diff": (0.125 + 0.25) / 2,
        }
    )
    assert quantisation_metrics(config, ranks(has_output=False), batch(), data(**columns)) == {}


def test_a_teacher_is_compared_with_the_policy_in_all_and_at_both_ends_of_an_answer() -> None:
    """Quarters of five tokens are 2, 1, 1, 1 long, those of eight 2 each."""
    masks = [[1.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0]]
    apart = [[0.5, 9.0, -0.5, 0.0, 9.0], [1.0, -0.25, 2.0, 9.0, -1.0, 9.0, 3.0, 4.0]]
    teacher = TeacherColumns(log_probs=tensors(*([-2.0 - d for d in row] for row in apart)))
    own = tensors(*([-2.0] * len(row) for row in apart))
    engine = tensors(*([-1.0] * len(row) for row in apart))
    flags = {"use_opd": True, "opd_teacher_load": ["elsewhere"]}
    config = trainer_config(**flags)
    # each trained token has the weight 1/2 · 1/3 or 1/2 · 1/6
    expected = {
        "rollout/opd_reverse_kl": 0.0 / 6 + 8.75 / 12,
        "rollout/opd_prefers_ratio": 1 / 6 + 2 / 12,
        "rollout/opd_first_quarter_reverse_kl": (0.5 / 6 + 0.75 / 12) / (1 / 6 + 2 / 12),
        "rollout/opd_last_quarter_reverse_kl": (7.0 / 12) / (2 / 12),
    }
    given = data(masks, log_probs=own, rollout_log_probs=engine, teacher=teacher)
    assert distillation_metrics(config, ranks(), batch(masks), given) == pytest.approx(expected)
    of_first = data(masks, log_probs=own, teacher=teacher, before_training=[0])
    found = distillation_metrics(config, ranks(), batch(masks), of_first)
    assert found["rollout/opd_prefers_ratio"] == pytest.approx(1 / 6)
    assert found["rollout/opd_last_quarter_reverse_kl"] == 0.0  # no token of it is trained

    by_engine = trainer_config(**flags, use_rollout_logprobs=True)
    found = distillation_metrics(by_engine, ranks(), batch(masks), given)
    assert found["rollout/opd_reverse_kl"] == pytest.approx(1.0 + 8.75 / 12)

    no_token = tensors([], [])
    empty = data([[], []], log_probs=no_token, teacher=TeacherColumns(log_probs=no_token))
    found = distillation_metrics(config, ranks(), batch([[], []]), empty)
    assert found == dict.fromkeys(expected, 0.0)

    nobody = [
        (ranks(has_output=False), given),
        (ranks(), data(masks, log_probs=own)),
        (ranks(), data(masks, log_probs=own, teacher=TeacherColumns())),
        (ranks(), data(masks, rollout_log_probs=engine, teacher=teacher)),
    ]
    for place, without in nobody:
        assert distillation_metrics(config, place, batch(masks), without) == {}


def test_steps_are_averaged_and_counted() -> None:
    steps = [
        {
            "train/loss": 1.0,
            "train/lr-pg_0": 0.1,
            "train/skipped": 1.0,
            "train/train_rollout_logprob_abs_diff": 0.25,
        },
        {
            "train/loss": 2.0,
            "train/lr-pg_0": 0.2,
            "train/skipped": 1.0,
            "train/train_rollout_logprob_abs_diff": 0.75,
            "train/chosen_rewards": 3.0,  # the first step had no such answer
        },
    ]
    expected = {
        "train/loss": 1.5,
        "train/lr-pg_0": 0.2,
        "train/skipped_steps": 2.0,
        "train/chosen_rewards": 3.0,
    }
    assert mean_of_steps(steps) == {**expected, "train/train_rollout_logprob_abs_diff": 0.5}
    assert mean_of_steps(steps, first_only=True) == {
        **expected,
        "train/train_rollout_logprob_abs_diff": 0.25,
    }
    assert mean_of_steps([]) == {}


# -- single tokens ---------------------------------------------------------------------------------


def told(tokens: list[TrainedTokens]) -> list[list[Any]]:
    return [
        [
            one.key,
            *(
                None if values is None else values.tolist()
                for values in (one.advantages, one.log_prob_diffs, one.ref_log_probs)
            ),
        ]
        for one in tokens
    ]


def test_recorded_samples_get_their_advantages_and_differences() -> None:
    columns = {
        "advantages": tensors([0.5, 1.0], [2.0, 2.5, 3.0]),
        "log_probs": tensors([-1.0, -2.0], [-3.0, -1.0, -4.0]),
        "rollout_log_probs": tensors([-1.5, -1.0], [-3.0, -2.0, -3.5]),
    }
    given = data(**columns)
    recorded = batch()
    assert trained_tokens(ranks(), recorded, given) == []
    first, second = (recorded.key(i) for i in (0, 1))
    recorded.recorded = frozenset({first, second})
    both = [
        [first, [0.5, 1.0], [0.5, -1.0], None],
        [second, [2.0, 2.5, 3.0], [0.0, 1.0, -0.5], None],
    ]
    assert told(trained_tokens(ranks(), recorded, given)) == both
    given.before_training = [1]
    later = [[first, [0.5, 1.0], None, None], both[1]]
    assert told(trained_tokens(ranks(), recorded, given)) == later
    given.advantages = None
    alone = [[second, None, [0.0, 1.0, -0.5], None]]
    assert told(trained_tokens(ranks(), recorded, given)) == alone
    recorded.recorded = frozenset({first})
    assert trained_tokens(ranks(), recorded, given) == []
    recorded.recorded = frozenset({second})
    assert told(trained_tokens(ranks(), recorded, given)) == alone
    assert trained_tokens(ranks(has_output=False), recorded, given) == []
    silent = ranks()
    silent.speaks_for_shard = False
    assert trained_tokens(silent, recorded, given) == []


def test_log_probs_of_the_reference_are_remembered_where_preferences_ask_again() -> None:
    config = trainer_config(loss_type="preference_loss", n_samples_per_prompt=1)
    rows = [[-1.0, -2.0], [-3.0, -1.0, -4.0]]
    given = data(ref_log_probs=tensors(*rows))
    wanted = [[batch().key(i), None, None, rows[i]] for i in (0, 1)]
    assert told(reference_tokens(config, ranks(), batch(), given)) == wanted
    assert reference_tokens(trainer_config(), ranks(), batch(), given) == []
    assert reference_tokens(config, ranks(has_output=False), batch(), given) == []
    assert reference_tokens(config, ranks(), batch(), data()) == []
    remembered = batch()
    remembered.ref_log_probs = tensors(*rows)
    assert reference_tokens(config, ranks(), remembered, given) == []
    silent = ranks()
    silent.speaks_for_shard = False
    assert reference_tokens(config, silent, batch(), given) == []
