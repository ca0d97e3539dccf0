"""A run that goes on after a crash: what its first life has finished is neither generated again nor
lost, whichever rollout takes it in the second one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.prompts.source import PromptSource
from slime.rollout.dynamic_sampling import Collected, DynamicSampler
from slime.rollout.journal import Journal, RecordKind, drawn_as
from slime.rollout.trajectory import GroupRunner
from slime.run.schedule import StalenessTracker
from slime.samples.types import Sample, VersionWindow
from tests.support.fake_rollout import FakeClient, FakeRewards, FakeSource, make_state
from tests.support.journals import drawn, generated, note, restored
from tests.support.prompt_fixtures import make_tokenizer, write_jsonl


class Life:
    """Rollouts on fakes, with a journal in ``folder``.

    Args:
        turns: of the event loop that each request takes.
        dropped: groups that the filter drops.
    """

    def __init__(
        self, folder: Path, turns: list[int], dropped: set[int], *, deterministic: bool = False
    ) -> None:
        self.journal, self.dropped, self.deterministic = (
            Journal(folder, "flags"),
            dropped,
            deterministic,
        )
        self.client, self.group_size, self.tokenizer = FakeClient(turns), 1, make_tokenizer()
        self.source: Any = FakeSource(1)

    async def collect(
        self, rollout_id: int, newest: int | None = 1, target: int = 2, draw_size: int = 2
    ) -> Collected:
        with self.client.fork() as client:
            self.state = make_state(client, tokenizer=self.tokenizer)
            collector = DynamicSampler(
                GroupRunner(self.state, FakeRewards(), rollout_id=rollout_id),
                self.source,
                target=target,
                draw_size=draw_size,
                group_size=self.group_size,
                dynamic_filter=lambda args, samples, **_: (
                    samples[0].group_index not in self.dropped
                ),
                deterministic=self.deterministic,
                journal=self.journal,
                versions=VersionWindow(newest=newest),
            )
            return await collector.collect()

    def indices(self, found: Collected) -> list[int]:
        return [run.index for run in found.chosen]


def test_only_what_comes_out_of_the_journal_was_there_before(tmp_path: Path) -> None:
    """What an earlier rollout of this life has put back is in the journal, too, but was drawn with
    all that it has: its tokens count when it is trained on."""

    async def main() -> None:
        life = Life(tmp_path, [0], set())
        await life.collect(0, target=1, draw_size=3)
        assert not life.state.from_journal and life.journal.metrics() == {}
        surplus = await life.collect(1, target=1, draw_size=1)
        assert (
            life.indices(surplus) == [1]
            and not life.state.from_journal
            and life.journal.metrics() == {}
        )

        second = Life(tmp_path, [0], set())
        found = await second.collect(0, target=2, draw_size=2)
        assert not second.client.calls and second.journal.metrics() == {
            "rollout/num_restored_groups": 2
        }
        assert second.state.from_journal == {
            s.index: s.response_length for run in found.chosen for s in run.samples
        }
        assert all(second.state.from_journal.values())

    asyncio.run(main())


async def two_at_once(life: Life) -> tuple[Collected, Collected]:
    first = asyncio.create_task(life.collect(1))
    await asyncio.sleep(0)  # it has drawn 0 and 1
    return await asyncio.gather(first, life.collect(2))


def test_what_a_later_rollout_has_finished_is_not_generated_again(tmp_path: Path) -> None:
    """Rollout 2 draws 2 and 3 while 1 is under way, which then redraws 4 and 5 for what its filter
    drops. In the second life rollout 1 begins alone, and draws 2 and 3 itself."""
    before = Life(tmp_path, [1], dropped={0, 1})
    first, second = asyncio.run(two_at_once(before))
    assert [before.indices(found) for found in (first, second)] == [[4, 5], [2, 3]]
    assert len(before.client.calls) == 6
    before.journal.close()

    async def go_on(life: Life) -> None:
        assert life.indices(await life.collect(1)) == [2, 3]
        assert life.indices(await life.collect(2)) == [4, 5]

    after = Life(tmp_path, [1], dropped={0, 1})
    asyncio.run(go_on(after))
    assert after.client.calls == [] and after.source.drawn == 6
    assert after.journal.num_restored == 6


@pytest.mark.parametrize(
    ("newest", "deterministic", "asked"), [(0, False, 2), (None, False, 2), (1, True, 2)]
)
def test_what_is_of_weights_that_training_has_not_reached_is_generated_again(
    tmp_path: Path, newest: int | None, deterministic: bool, asked: int
) -> None:
    """So is all that later rollouts did in deterministic runs, where the order of events must not
    matter."""
    asyncio.run(two_at_once(Life(tmp_path, [1], dropped={0, 1})))
    after = Life(tmp_path, [1], dropped={0, 1}, deterministic=deterministic)
    assert after.indices(asyncio.run(after.collect(1, newest))) == [2, 3]
    assert len(after.client.calls) == asked


def test_weights_of_a_future_that_was_given_up_are_not_reached() -> None:
    """Versions 1, 2 and 3 were pushed, then ranks were lost, and rollout 1 is done again with 4."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, entry="train_async"))
    for version, trained in ((1, 0), (2, 1), (3, 2)):
        ages.pushed(version, trained)
    assert ages.versions(2)[1:4] == (3, set(), set())
    ages.pushed(4, 1)
    assert ages.versions(1)[1:4] == (4, set(), {3}), "it has learnt from what is generated anew"
    ages.pushed(5, 2)
    assert ages.versions(2)[:4] == (0, 5, set(), set())


def test_weights_of_now_count_however_often_a_run_has_begun_again(tmp_path: Path) -> None:
    """Begun again twice at the same checkpoint: 5 and 6 are of step 1, as 2 is; 3 and 4 are of
    steps that are open."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, entry="train_async"))
    for version, trained in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 1), (6, 1)):
        ages.pushed(version, trained)
    _, newest, _, ahead, _ = ages.versions(1)
    assert (newest, ahead) == (6, {3, 4})
    journal, group = Journal(tmp_path, "flags"), drawn(4)
    for version, counts in ((4, False), (5, True)):
        samples = generated(4)
        for span in (span for sample in samples for span in sample.token_spans):
            span.weight_version = version
        note(journal, RecordKind.FINISHED, 2, samples)
        versions = VersionWindow(newest=newest, ahead=ahead)
        assert (journal.restore(1, group, drawn_as(group), versions)[0] is not group) == counts


def test_a_resumed_run_knows_when_lost_lives_have_pushed() -> None:
    """Saved at step 5; the first life pushed up to step 7, the second one begins at 5 again, and so
    does the third."""
    ages = StalenessTracker(make_config(rollout_batch_size=1, async_buffer_size=1, max_staleness=1))
    first_life = {version: version - 1 for version in range(1, 9)}
    ages.remember({**first_life, 9: 5, 10: 6, 11: 7})
    ages.pushed(12, 5)
    assert [ages.trained_when(version) for version in (5, 8, 9, 11, 12)] == [4, 7, 5, 7, 5]
    assert ages.metrics({(9,): 8}, 5)["rollout/staleness/max"] == 0
    assert ages.versions(5)[:4] == (5, 12, {8, 11}, {7, 8, 10, 11})


def test_a_later_record_does_not_hide_an_earlier_one(tmp_path: Path) -> None:
    journal, group = Journal(tmp_path, "flags"), drawn(4)
    note(journal, RecordKind.FINISHED, 1, generated(4, (7,)))
    # of weights 3, as all in that module
    note(journal, RecordKind.FINISHED, 3, generated(4, (7, 8)))

    def found(newest: int | None) -> tuple[int, bool]:
        samples, is_kept = journal.restore(2, group, drawn_as(group), VersionWindow(newest=newest))
        return samples[0].response_length, is_kept

    assert found(None) == (1, False) and found(2) == (1, False) and found(3) == (2, True)
    journal.forget(3, [4])
    assert found(3) == (0, False) and found(None) == (1, False)


# -- what is noted where ---------------------------------------------------------------------------


def test_a_finished_group_is_noted_by_the_rollout_that_takes_it_out_of_the_buffer(
    tmp_path: Path,
) -> None:
    """It came there with a checkpoint, and the file of the rollout that finished it is gone: with
    the next checkpoint it will be in no buffer any more."""

    async def lives() -> None:
        life = Life(tmp_path, [1], dropped=set())
        await life.collect(1, draw_size=4)
        surplus = [group[0].group_index for group in life.source.buffer]
        assert surplus == [2, 3]
        life.journal.drop(before=2)
        assert life.indices(await life.collect(5)) == [2, 3]
        after = Life(tmp_path, [1], dropped=set())
        after.source.drawn = 2
        assert after.indices(await after.collect(5)) == [2, 3]
        assert after.client.calls == []

    asyncio.run(lives())


def test_its_own_record_is_not_written_twice(tmp_path: Path) -> None:
    asyncio.run(Life(tmp_path, [1], dropped=set()).collect(1))
    size = (tmp_path / "rollout_000001.log").stat().st_size
    asyncio.run(Life(tmp_path, [1], dropped=set()).collect(1))
    assert (tmp_path / "rollout_000001.log").stat().st_size == size


def test_a_group_that_finishes_when_there_are_enough_is_noted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends while others are stopped: nobody judges it, and it goes back as it is."""
    life = Life(tmp_path, [1, 1, 3, 30], dropped=set())

    async def answers(
        client: Any, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> Any:
        # it is faster than the order to abort
        client_aborts, client._aborting = (client._aborting, asyncio.Event())
        try:
            return await answered(client, number, input_ids, params)
        finally:
            client._aborting = client_aborts

    answered = FakeClient._answer

    async def main() -> list[Sample]:
        monkeypatch.setattr(FakeClient, "_answer", answers)
        await life.collect(1, draw_size=3)
        return [group[0] for group in life.source.buffer]

    [left] = asyncio.run(main())
    assert left.group_index == 2 and left.response_length
    life.journal.close()
    again = Journal(tmp_path, "flags")
    [place] = again._places[2]
    assert place.kind is (RecordKind.BEGUN if left.reward is None else RecordKind.FINISHED)


# -- a push that broke -----------------------------------------------------------------------------


def test_what_was_finished_before_a_push_that_broke_is_kept(tmp_path: Path) -> None:
    """Engines went on with weights 3 in part: what is called so is forgotten, and what has no
    version."""
    journal = Journal(tmp_path, "flags")
    for group in (4, 5, 6):
        samples = generated(group)
        for sample in samples:
            for span in sample.token_spans:
                span.weight_version = {4: 2, 5: 3, 6: None}[group]
        note(journal, RecordKind.FINISHED, 1, samples)
    note(journal, RecordKind.FINISHED, 2, generated(7))
    journal.forget_newer(1, 2)
    for each in (journal, Journal(tmp_path, "flags")):
        assert [restored(each, 2, group)[0].response_length for group in (4, 5, 6, 7)] == [
            2,
            0,
            0,
            2,
        ]


@pytest.mark.parametrize("row", ["text", "ids"])
def test_what_was_put_back_is_found_under_the_name_that_it_was_drawn_by(
    tmp_path: Path, row: str
) -> None:
    """Rollout 1 has finished more than it takes, and a checkpoint is written while rollout 2 has
    taken the rest out of the buffer: the second life draws it afresh, of text without the tokens
    that it has had since."""
    rows = [
        {"input": f"p{i}" if row == "text" else [5, 6, 7 + i], "answer": str(i)} for i in range(30)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags: dict[str, Any] = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 9}

    def begin() -> Life:
        life = Life(tmp_path / "journal", [1], set())
        config = make_config(**flags, prompt_data=data, label_key="answer", rollout_shuffle=False)
        life.source, life.group_size = PromptSource(config, life.tokenizer), 2
        return life

    async def first_life() -> dict[str, Any]:
        life = begin()
        one = await life.collect(1, draw_size=4)
        two = asyncio.create_task(life.collect(2))
        await asyncio.sleep(0)  # it has drawn
        life.source.mark_consumed(life.indices(one))
        state = life.source.state_dict()
        assert (
            life.indices(one) == [0, 1]
            and life.indices(await two) == [2, 3]
            and not state["buffer"]
        )
        return state

    state = asyncio.run(first_life())
    life = begin()
    life.source.load_state_dict(state)
    two = asyncio.run(life.collect(2))
    assert (
        life.indices(two) == [2, 3] and life.client.calls == [] and life.journal.num_restored == 2
    )
    assert not any(
        sample.drawn_as or sample.as_drawn for run in two.chosen for sample in run.samples
    )
