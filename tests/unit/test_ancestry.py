"""Which weights a run has pushed when, and which of them it cannot come to again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.config import Config, make_config
from slime.rollout.journal import Journal, RecordKind, drawn_as
from slime.run.ancestry import PushLog, initial_fingerprint, training_fingerprint
from slime.run.schedule import StalenessTracker
from slime.samples.types import VersionWindow
from tests.support.journals import drawn, generated, note


def config_of(training: str) -> Config:
    return make_config(
        rollout_batch_size=1, num_rollout=9, lr={"a": 1e-6, "b": 1e-5, "c": 1e-4}[training]
    )


@dataclass
class Run:
    """Lives of one run: each is a way of training, where it begins, and the pushes (version,
    rollouts trained on) that it lives to note.

    Attributes:
        saved: rollouts trained on → what the checkpoint there has of lineages; a life that passes
            it writes it anew.
    """

    folder: Path
    saved: dict[int, dict[int, str]] = field(default_factory=dict)

    def live(
        self, training: str, start: int, *pushes: tuple[int, int], notes: bool = True
    ) -> PushLog:
        log = PushLog(self.folder, config_of(training))
        log.begin(start, self.saved.get(start, {}))
        for version, trained in pushes:
            if notes:
                log.note(version, trained)
            if trained > start and trained % 2 == 0:
                self.saved[trained] = log.recent_ancestries(trained)
        return log

    def unreachable(self, training: str, start: int) -> set[int]:
        return set(self.live(training, start).unreachable)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "journal")


FIVE = ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4))


def test_whoever_goes_on_reads_what_was_noted(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """What is no whole line is left out, and does not spoil the one behind it."""
    assert PushLog(run.folder, config_of("a")).earlier == [] and run.unreachable("a", 0) == set()
    run.live("a", 0, (1, 0), (2, 1))
    PushLog(run.folder, config_of("a"))
    assert "damaged" not in caplog.text
    with open(run.folder / "pushes.jsonl", "ab") as file:
        file.write(
            b'\n{}\n{"version": 3}\n[1]\n{"version": "4", "trained": null}\n{"version": 3, "tra'
        )
    run.live("b", 0, (4, 1))
    found = PushLog(run.folder, config_of("b")).earlier
    assert [(push.version, push.trained) for push in found] == [(1, 0), (2, 1), (4, 1)]
    assert "pushes.jsonl has damaged or truncated lines" in caplog.text
    assert found[1].ancestry != found[2].ancestry, "of one step each, in another way"


def test_a_push_that_cannot_be_noted_does_not_end_the_run(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.folder.write_text("a file where the folder should be")
    run.live("a", 0, (1, 0))
    assert "pushes.jsonl" in caplog.text


def test_weights_behind_a_checkpoint_are_gone_when_training_changes(run: Run) -> None:
    """Saved after 2 rollouts; the first life came to 4, and so did the second, which trained in
    another way."""
    run.live("a", 0, *FIVE)
    assert run.unreachable("b", 2) == {4, 5}
    run.live("b", 2, (6, 2), (7, 3), (8, 4))
    assert run.unreachable("b", 2) == {4, 5}
    assert run.unreachable("b", 4) == {4, 5}, (
        "a checkpoint of the second life does not bring them back"
    )
    assert run.unreachable("c", 2) == {4, 5, 7, 8}


def test_who_returns_to_the_first_way_finds_its_weights_again(run: Run) -> None:
    """A launch with a wrong flag that was ended at once costs nothing."""
    run.live("a", 0, *FIVE)
    run.live("b", 2, (6, 2), (7, 3))
    assert run.unreachable("a", 2) == {7}


def test_weights_of_a_branch_that_was_left_behind_a_damaged_checkpoint(run: Run) -> None:
    """A to 4, saved at 2 and 4; B from 4; then 4 is damaged and B goes on from 2: it comes to none
    of 4, 5, 6 and 7."""
    run.live("a", 0, *FIVE)
    run.live("b", 4, (6, 4), (7, 5))
    assert run.unreachable("b", 4) == set()
    assert run.unreachable("b", 2) == {4, 5, 6, 7}
    life = run.live("b", 4, (8, 4))
    life.begin(2, run.saved[2])  # its trainer was started again there
    assert life.unreachable == {4, 5, 6, 7, 8}


def test_a_life_that_noted_nothing(run: Run) -> None:
    """A came to 7; B without a journal went from 2 and saved at 4; A goes on there: its own of old
    are gone."""
    run.live("a", 0, *FIVE, (6, 5), (7, 6), (8, 7))
    run.live("b", 2, (6, 2), (7, 3), (8, 4), notes=False)
    assert run.unreachable("a", 4) == {4, 5, 6, 7, 8}


def test_a_push_that_a_crash_kept_from_being_noted(run: Run) -> None:
    """5 was pushed and is in the journal, and not in the log; where nothing changes it is what it
    seems to be."""
    run.live("a", 0, *FIVE[:4])
    for training, unreachable in (("a", set()), ("b", {4, 5})):
        life = run.live(training, 2)
        life.note(6, 2)
        assert life.unreachable == unreachable
        life.begin(2, run.saved[2])  # its trainer was started again
        life.note(7, 2)
        assert life.unreachable == unreachable


def test_a_number_that_is_given_again_is_not_gone(run: Run) -> None:
    run.live("a", 0, *FIVE)
    life = run.live("b", 2, (5, 2))
    assert life.unreachable == {4}
    life.begin(2, run.saved[2])  # its trainer was started again
    assert life.unreachable == {4}
    run.live("b", 2, (6, 3), (7, 4))
    assert run.unreachable("c", 2) == {4, 6, 7}


def test_the_log_of_an_earlier_release(run: Run) -> None:
    """It does not say how it trained, and gets the benefit of doubt."""
    run.folder.mkdir()
    (run.folder / "pushes.jsonl").write_text(
        '{"version": 1, "trained": 0}\n{"version": 2, "trained": 1}\n'
    )
    assert run.unreachable("b", 0) == set()


def test_other_weights_at_the_beginning(tmp_path: Path) -> None:
    first = PushLog(tmp_path, make_config(rollout_batch_size=1, num_rollout=1, load="one"))
    first.begin(0, {})
    first.note(1, 0)
    for load, unreachable in (("one", set()), ("two", {1})):
        later = PushLog(tmp_path, make_config(rollout_batch_size=1, num_rollout=1, load=load))
        later.begin(0, {})
        assert later.unreachable == unreachable


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=5), st.integers(0, 6))
def test_without_a_change_nothing_is_gone(
    tmp_path_factory: Any, more: list[tuple[int, int]], trained: int
) -> None:
    run, version = Run(tmp_path_factory.mktemp("run")), 0
    run.live("a", 0, *((i + 1, i) for i in range(8)))  # passes all checkpoints once
    for start, count in more:
        run.live(
            "a", start // 2 * 2, *((version + i + 9, start // 2 * 2 + i) for i in range(count))
        )
        version += count
    assert run.unreachable("a", trained // 2 * 2) == set()


def test_of_a_long_run_the_last_lineages_are_kept(run: Run) -> None:
    log = run.live("a", 0, *((i + 1, i) for i in range(200)))
    assert (
        sorted(log.recent_ancestries(198)) == list(range(135, 199))
        and run.unreachable("a", 198) == set()
    )
    assert run.unreachable("b", 196) == {198, 199, 200}


def test_the_journal_leaves_out_what_gone_weights_have_generated(tmp_path: Path) -> None:
    """In the rollout that noted it as well as in others, and what is behind it counts."""
    journal, group = Journal(tmp_path, "flags"), drawn(4)
    note(journal, RecordKind.BEGUN, 1, generated(4, (7,)))
    samples = generated(4)
    for span in (span for sample in samples for span in sample.token_spans):
        span.weight_version = 5
    note(journal, RecordKind.FINISHED, 2, samples)

    def length(unreachable: set[int], newest: int | None, rollout_id: int = 2) -> int:
        versions = VersionWindow(newest=newest, unreachable=frozenset(unreachable))
        return journal.restore(rollout_id, group, drawn_as(group), versions)[0][0].response_length

    unknown = drawn(9)
    text = [dataclasses.replace(sample, tokens=[5, 6, 7], response_length=1) for sample in unknown]
    note(journal, RecordKind.FINISHED, 2, text)
    for unreachable, comes in ((frozenset[int](), True), (frozenset({1}), False)):
        found = journal.restore(
            2, unknown, drawn_as(unknown), VersionWindow(newest=6, unreachable=unreachable)
        )[0]
        assert (found is not unknown) == comes, (
            "nobody knows whose it is: a generate function gave text alone"
        )
    for newest in (None, 6):
        assert [length(unreachable, newest) for unreachable in ({4}, {5}, {3, 5})] == [2, 1, 0]
    assert length({5}, 6, rollout_id=1) == 1


def test_a_rollout_is_told_what_is_gone() -> None:
    for flags in ({}, {"async_buffer_size": 1, "max_staleness": 1}):
        ages = StalenessTracker(make_config(rollout_batch_size=1, **flags))
        ages.remember({1: 0, 2: 1, 3: 2})
        ages.pushed(4, 1)
        ages.unreachable = frozenset({3})
        assert ages.versions(1).unreachable == {3}


# -- what makes other weights ----------------------------------------------------------------------


def training(**flags: Any) -> str:
    return training_fingerprint(
        make_config(rollout_batch_size=4, n_samples_per_prompt=2, **{"num_rollout": 5, **flags})
    )


@pytest.mark.parametrize(
    "flags",
    [
        {"lr": 1e-3},
        {"weight_decay": 0.2},
        {"adam_beta2": 0.9},
        {"clip_grad": 0.5},
        {"optimizer": "sgd"},
        {"lr_decay_style": "cosine"},
        {"eps_clip": 0.1},
        {"advantage_estimator": "gspo"},
        {"use_kl_loss": True},
        {"num_steps_per_rollout": 2},
        {"freeze_params_name_list": ["embed"]},
        {"moe_aux_loss_coeff": 0.1},
        {"moe_router_bias_update_rate": 0.1},
        {"fp32": True},
        {"load": "x", "no_load_optim": True},
        {"use_kl_loss": True, "ref_load": "y"},
        {"use_routing_replay": True},
        {"lora_rank": 8},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_what_changes_the_weights_is_told_apart(flags: dict[str, Any]) -> None:
    assert training(**flags) != training()


def test_adapters_count_with_their_settings_and_with_what_they_begin_from(tmp_path: Path) -> None:
    assert training(lora_rank=8, lora_alpha=16.0) != training(lora_rank=8)
    (tmp_path / "adapter_config.json").write_text("{}")
    begun = [
        initial_fingerprint(make_config(rollout_batch_size=1, lora_rank=8, lora_adapter_path=path))
        for path in (None, str(tmp_path))
    ]
    assert begun[0] != begun[1]
    assert training(lora_rank=8, lora_adapter_path=str(tmp_path))  # it is no function


def test_another_reference_makes_other_weights_where_there_is_one() -> None:
    assert training(use_kl_loss=True, ref_load="y") != training(use_kl_loss=True)


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2},
        {"num_rollout": 9},
        {"micro_batch_size": 2},
        {"max_tokens_per_gpu": 2048, "use_dynamic_batch_size": True},
        {"recompute_activations": True},
        {"save": "x", "save_interval": 7, "max_restarts": 3},
        {"update_weights_interval": 2},
        {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True},
        {"ref_load": "unused"},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_what_divides_the_work_is_not(flags: dict[str, Any]) -> None:
    """Whoever had too little memory, or wants a longer run, keeps what was generated."""
    assert training(**flags) == training()


def test_a_critic_counts_with_what_it_learns_and_not_with_where_it_is() -> None:
    ppo = {"advantage_estimator": "ppo"}
    apart = {"critic_num_gpus_per_node": 2, "critic_tensor_model_parallel_size": 2}
    assert training(**ppo, **apart) == training(**ppo)
    for flags in (
        {"critic_lr": 0.5},
        {"critic_lr_warmup_iters": 3},
        {"lambd": 0.5, "critic_lambd": 1.0},
        {"critic_lambd": 0.5},
        {"value_clip": 0.5},
        {"normalize_values": True},
        {"num_critic_only_steps": 1},
    ):
        assert training(**ppo, **flags) != training(**ppo), flags


def test_the_length_of_the_run_counts_where_a_schedule_goes_by_it() -> None:
    assert training(lr_decay_style="cosine") != training(lr_decay_style="cosine", num_rollout=9)
    grows = {"weight_decay_incr_style": "linear", "end_weight_decay": 0.1}
    assert training(**grows) != training(**grows, num_rollout=9)
    warm = {"lr_warmup_fraction": 0.1}
    assert training(**warm) != training(**warm, num_rollout=9)
    fixed = {"lr_decay_style": "cosine", "lr_decay_iters": 9}
    assert training(**fixed) == training(**fixed, num_rollout=9)


def test_the_text_of_a_function_counts(tmp_path: Path) -> None:
    file = tmp_path / "loss.py"
    found = set()
    for body in ("1.0", "2.0"):
        file.write_text(
            f"def loss(args, batch, logits, sum_of_sample_mean):\n    return {body}, {{}}\n"
        )
        found.add(training(loss_type="custom_loss", custom_loss_function_path=f"{file}:loss"))
    assert len(found) == 2
