"""Which weights a run has pushed when, and which of them it cannot come to again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config import make_config
from slime.pushes import Push, PushLog, training_of
from slime.rollout.journal import Journal, Kind, drawn_as
from slime.samples.types import Versions
from slime.schedule import Ages
from tests.support.journals import drawn, generated, note


def test_whoever_goes_on_reads_what_was_noted(tmp_path: Path) -> None:
    """A line that a crash has cut is left out, and does not spoil the one behind it."""
    log = PushLog(tmp_path / "journal", "a")
    assert log.earlier == [] and log.gone(0) == frozenset()
    for version, trained in ((1, 0), (2, 1)):
        log.note(version, trained)
    with open(tmp_path / "journal" / "pushes.jsonl", "ab") as file:
        file.write(b'\n{"version": 3, "tra')
    PushLog(tmp_path / "journal", "b").note(4, 1)
    assert PushLog(tmp_path / "journal", "b").earlier == [Push(1, 0, "a"), Push(2, 1, "a"), Push(4, 1, "b")]


def test_a_push_that_cannot_be_noted_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "journal").write_text("a file where the folder should be")
    PushLog(tmp_path / "journal", "a").note(1, 0)
    assert "pushes.jsonl" in caplog.text


def lives(folder: Path, *pushed: tuple[str, list[tuple[int, int]]]) -> None:
    for training, pushes in pushed:
        log = PushLog(folder, training)
        for version, trained in pushes:
            log.note(version, trained)


def test_weights_behind_a_checkpoint_are_gone_when_training_changes(tmp_path: Path) -> None:
    """Saved after 2 rollouts; the first life came to 4, and so did the second, which trained in another way."""
    lives(tmp_path, ("a", [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]), ("b", [(6, 2), (7, 3), (8, 4)]))
    assert PushLog(tmp_path, "b").gone(2) == {4, 5}
    assert PushLog(tmp_path, "b").gone(4) == {4, 5}, "a checkpoint of the second life does not bring them back"
    assert PushLog(tmp_path, "a").gone(2) == {4, 5, 7, 8}, "nor does the first way of training: it was left at 2"
    assert PushLog(tmp_path, "c").gone(3) == {4, 5, 8}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5), st.integers(0, 6))
def test_without_a_change_nothing_is_gone(tmp_path_factory: Any, more: list[tuple[int, int]], trained: int) -> None:
    folder, version = tmp_path_factory.mktemp("run"), 0
    for start, count in more:
        lives(folder, ("a", [(version + i + 1, start + i) for i in range(count)]))
        version += count
    assert PushLog(folder, "a").gone(trained) == frozenset()


def test_the_journal_leaves_out_what_gone_weights_have_generated(tmp_path: Path) -> None:
    """In the rollout that noted it as well as in others, and what is behind it counts."""
    journal, group = Journal(tmp_path, "flags"), drawn(4)
    note(journal, Kind.BEGUN, 1, generated(4, (7,)))
    samples = generated(4)
    for span in (span for sample in samples for span in sample.token_spans):
        span.weight_version = 5
    note(journal, Kind.FINISHED, 2, samples)

    def length(gone: set[int], newest: int | None, rollout_id: int = 2) -> int:
        versions = Versions(newest=newest, gone=frozenset(gone))
        return journal.restore(rollout_id, group, drawn_as(group), versions)[0][0].response_length

    for newest in (None, 6):
        assert [length(gone, newest) for gone in ({4}, {5}, {3, 5})] == [2, 1, 0]
    assert length({5}, 6, rollout_id=1) == 1


def test_a_rollout_is_told_what_is_gone() -> None:
    for flags in ({}, {"async_buffer_size": 1, "max_staleness": 1}):
        ages = Ages(make_config(rollout_batch_size=1, **flags))
        ages.remember({1: 0, 2: 1, 3: 2}, frozenset({3}))
        ages.pushed(4, 1)
        assert ages.versions(1).gone == {3}


# -- what makes other weights ----------------------------------------------------------------------------------


def training(**flags: Any) -> str:
    return training_of(make_config(rollout_batch_size=4, n_samples_per_prompt=2, **{"num_rollout": 5, **flags}))


@pytest.mark.parametrize(
    "flags",
    [
        {"lr": 1e-3}, {"weight_decay": 0.2}, {"adam_beta2": 0.9}, {"clip_grad": 0.5}, {"optimizer": "sgd"},
        {"lr_decay_style": "cosine"}, {"eps_clip": 0.1}, {"advantage_estimator": "gspo"}, {"use_kl_loss": True},
        {"num_steps_per_rollout": 2}, {"freeze_params_name_list": ["embed"]},
    ],
    ids=lambda flags: next(iter(flags)),
)  # fmt: skip
def test_what_changes_the_weights_is_told_apart(flags: dict[str, Any]) -> None:
    assert training(**flags) != training()


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2}, {"num_rollout": 9}, {"micro_batch_size": 2},
        {"max_tokens_per_gpu": 2048, "use_dynamic_batch_size": True}, {"recompute_activations": True},
        {"save": "x", "save_interval": 7, "max_restarts": 3}, {"update_weights_interval": 2},
    ],
    ids=lambda flags: next(iter(flags)),
)  # fmt: skip
def test_what_divides_the_work_is_not(flags: dict[str, Any]) -> None:
    """Whoever had too little memory, or wants a longer run, keeps what was generated."""
    assert training(**flags) == training()


def test_the_length_of_the_run_counts_where_a_schedule_goes_by_it() -> None:
    assert training(lr_decay_style="cosine") != training(lr_decay_style="cosine", num_rollout=9)
    grows = {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}
    assert training(**grows) != training(**grows, num_rollout=9)
    fixed = {"lr_decay_style": "cosine", "lr_decay_iters": 9}
    assert training(**fixed) == training(**fixed, num_rollout=9)


def test_the_text_of_a_function_counts(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    found = set()
    for body in ("1.0", "2.0"):
        file.write_text(f"def loss(args, batch, logits, sum_of_sample_mean):\n    return {body}, {{}}\n")
        found.add(training(loss_type="custom_loss", custom_loss_function_path=f"{file}:loss"))
    assert len(found) == 2
