"""The journal: what was written is there again, whatever became of the file's end, and takes the
place of what is drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.checkpoints.directory import retain, set_latest
from slime.cluster.rollout_actor import oldest_needed_rollout
from slime.config import make_config
from slime.rollout import journal as module
from slime.rollout.journal import Journal, RecordKind, drawn_as, open_journal
from slime.samples.types import SampleStatus, VersionWindow
from tests.support.checkpoint_dirs import complete
from tests.support.journals import drawn, generated, note, restored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_samples_come_back_as_they_were(folder: Path) -> None:
    first = Journal(folder, "flags")
    samples = generated(
        4, metadata={"path": Path("/x"), "score": [0.1]}, reward={"total": 0.5}, rollout_id=9
    )
    note(first, RecordKind.FINISHED, 1, samples)
    samples[0].tokens.append(99)  # what happens to them afterwards is not what was judged
    first.close()
    again = Journal(folder, "flags")
    found = restored(again, 1, 4)
    assert found == generated(
        4, metadata={"path": Path("/x"), "score": [0.1]}, reward={"total": 0.5}, rollout_id=9
    )
    assert found[0].status is SampleStatus.COMPLETED and found[0].token_spans[0].weight_version == 3
    assert again.metrics() == {"rollout/num_restored_groups": 1} and again.metrics() == {}


def test_what_a_group_became_later_does_not_count_yet(folder: Path) -> None:
    """Rollout 1 put it back as far as it was, rollout 3 ended it; whoever goes on with rollout 1
    lives through both."""
    journal = Journal(folder, "flags")
    note(journal, RecordKind.BEGUN, 1, generated(4, (7,)))
    note(journal, RecordKind.FINISHED, 3, generated(4))
    for each in (journal, Journal(folder, "flags")):
        assert [len(restored(each, rollout_id, 4)[0].tokens) for rollout_id in range(5)] == [
            2,
            3,
            3,
            4,
            4,
        ]


def test_what_nobody_knows_the_weights_of_counts_for_its_own_rollout_alone(folder: Path) -> None:
    """A generate function gave text without versions: an earlier rollout cannot know that its
    weights were there."""
    journal = Journal(folder, "flags")
    unknown = generated(4)
    for sample in unknown:
        sample.token_spans = []
    note(journal, RecordKind.FINISHED, 3, unknown)
    note(journal, RecordKind.FINISHED, 3, generated(5))  # by weights 3

    def comes(group: int, rollout_id: int, **versions: Any) -> bool:
        group_drawn = drawn(group)
        found, _ = journal.restore(
            rollout_id, group_drawn, drawn_as(group_drawn), VersionWindow(**versions)
        )
        return found != group_drawn

    assert [comes(4, rollout_id, newest=9) for rollout_id in (2, 3)] == [False, True]
    assert [comes(5, rollout_id, newest=9) for rollout_id in (2, 3)] == [True, True]
    assert [comes(5, 2, newest=newest) for newest in (None, 2, 3)] == [False, False, True]
    assert [
        comes(4, 3, newest=9, unreachable=frozenset(unreachable)) for unreachable in ([], [7])
    ] == [True, False]
    journal.forget_newer(3, 9)
    assert [comes(group, 3, newest=9) for group in (4, 5)] == [False, True]


def test_what_is_forgotten_is_generated_again(folder: Path) -> None:
    journal = Journal(folder, "flags")
    note(journal, RecordKind.FINISHED, 1, generated(4))
    note(journal, RecordKind.FINISHED, 1, generated(5))
    journal.forget(1, [4, 77])
    for each in (journal, Journal(folder, "flags")):
        assert restored(each, 1, 4) == drawn(4) and restored(each, 1, 5) == generated(5)
    note(journal, RecordKind.FINISHED, 2, generated(6))
    journal.forget(1, None)
    for each in (journal, Journal(folder, "flags")):
        assert restored(each, 1, 5) == drawn(5) and restored(each, 2, 6) == generated(6)


def test_other_data_and_other_flags_are_not_mixed_up(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(folder, "flags")
    note(journal, RecordKind.FINISHED, 1, generated(4))
    assert restored(journal, 1, 4, prompt="2+2=") == drawn(4, "2+2=")
    assert restored(Journal(folder, "other flags"), 1, 4) == drawn(4)
    assert "1 groups of the journal were made with another model" in caplog.text
    assert not list(folder.iterdir())


@settings(max_examples=75)
@given(
    records=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=8),
    cut=st.integers(0, 10**6),
    flip=st.one_of(st.none(), st.integers(0, 10**6)),
    then=st.integers(0, 3),
)
def test_any_end_of_the_file_leaves_what_was_whole(
    tmp_path_factory: pytest.TempPathFactory,
    records: list[tuple[int, int]],
    cut: int,
    flip: int | None,
    then: int,
) -> None:
    """Cut off anywhere and a bit flipped anywhere, the records before that are found, and more can
    be written."""
    folder = tmp_path_factory.mktemp("journal")
    journal, ends = Journal(folder, "flags"), []
    path = folder / "rollout_000002.log"
    for group, length in records:
        note(journal, RecordKind.FINISHED, 2, generated(group, tuple(range(length))))
        ends.append(path.stat().st_size)
    journal.close()
    content = bytearray(path.read_bytes())
    whole = cut % (len(content) + 1)
    del content[whole:]
    if flip is not None and content:
        at = flip % len(content)
        content[at] ^= 1 << (flip % 8)
        whole = min(whole, at)
    path.write_bytes(content)
    expected = {group: length for (group, length), end in zip(records, ends) if end <= whole}
    again = Journal(folder, "flags")
    note(again, RecordKind.FINISHED, 2, generated(then, (1, 2, 3)))
    again.close()
    expected[then] = 3
    last = Journal(folder, "flags")
    assert {g: restored(last, 2, g)[0].response_length for g in range(4)} == {
        g: expected.get(g, 0) for g in range(4)
    }


def test_files_go_when_two_checkpoints_have_passed_them(tmp_path: Path, folder: Path) -> None:
    journal, root = Journal(folder, "flags"), tmp_path / "checkpoints"
    config = make_config(save=str(root), rollout_batch_size=1)
    for rollout_id in range(8):
        note(journal, RecordKind.FINISHED, rollout_id, generated(rollout_id))
        if rollout_id in (2, 4, 6):
            complete(root, rollout_id)
            journal.drop(oldest_needed_rollout(config))
    assert sorted(path.name for path in folder.iterdir()) == [
        f"rollout_{k:06d}.log" for k in (4, 5, 6, 7)
    ]
    assert restored(journal, 9, 3) == drawn(3) and restored(journal, 9, 4) == generated(4)


def test_the_one_checkpoint_that_is_kept_is_enough(tmp_path: Path, folder: Path) -> None:
    journal, root = Journal(folder, "flags"), tmp_path / "checkpoints"
    config = make_config(save=str(root), save_retain=1, rollout_batch_size=1)
    for rollout_id in range(6):
        note(journal, RecordKind.FINISHED, rollout_id, generated(rollout_id))
        journal.drop(oldest_needed_rollout(config))
        complete(root, rollout_id)
        retain(root, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "rollout_000004.log",
        "rollout_000005.log",
    ]


def test_what_cannot_be_revoked_is_not_found(small_disk: Path) -> None:
    journal = Journal(small_disk / "journal", "flags")
    note(journal, RecordKind.FINISHED, 1, generated(1))
    group = 2
    while not journal._unwritable:
        note(journal, RecordKind.FINISHED, 2, generated(group, tuple(range(500))))
        group += 1
    journal.forget(2, [2])
    for each in (journal, Journal(small_disk / "journal", "flags")):
        assert restored(each, 2, 2) == drawn(2) and restored(each, 2, 1) == generated(1)


def test_what_is_cut_off_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(folder, "flags")
    note(journal, RecordKind.FINISHED, 1, generated(1))
    [path] = folder.iterdir()
    whole = path.stat().st_size
    note(journal, RecordKind.FINISHED, 1, generated(2))
    journal.close()
    os.truncate(path, whole + 10)
    assert restored(Journal(folder, "flags"), 1, 1) == generated(1)
    assert f"{path} was damaged or cut short: its last 10 bytes are left out" in caplog.text
    os.truncate(path, 5)
    Journal(folder, "flags")
    assert f"{path} was damaged from its beginning" in caplog.text and not path.exists()


def test_a_new_files_name_is_on_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forced: list[Path] = []
    monkeypatch.setattr(module, "bring_to_disk", forced.append)
    journal = Journal(folder, "flags")
    for group in range(3):
        note(journal, RecordKind.FINISHED, 1, generated(group))
    assert forced == [folder]


def test_what_was_written_is_on_the_disk_when_the_journal_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.deadlines.JOURNAL_SYNC", 1000.0)
    journal = Journal(folder, "flags")
    for rollout_id in (1, 2):
        note(journal, RecordKind.FINISHED, rollout_id, generated(rollout_id))
    journal.drop(2)
    forced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: forced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    journal.close()
    assert [Path(name).name for name in forced] == ["rollout_000002.log"]


def test_the_newest_version_is_known_after_a_crash(folder: Path) -> None:
    journal = Journal(folder, "flags")
    assert journal.newest_version == 0
    note(journal, RecordKind.FINISHED, 1, generated(4))  # of version 3
    journal.forget(1, [4])
    assert journal.newest_version == Journal(folder, "flags").newest_version == 3


def test_a_branch_that_was_left_drops_nothing_of_this_one(tmp_path: Path) -> None:
    """The run has gone back from 8 to 4: what it generates for rollout 5 is needed."""
    for iteration in (2, 4, 6, 8):
        complete(tmp_path, iteration)
    set_latest(tmp_path, 4)
    assert oldest_needed_rollout(make_config(save=str(tmp_path), rollout_batch_size=1)) == 2


def test_what_cannot_be_written_does_not_end_the_run(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(folder, "flags")
    note(journal, RecordKind.FINISHED, 1, generated(4))
    note(journal, RecordKind.FINISHED, 1, generated(5, metadata={"stream": (x for x in ())}))
    note(journal, RecordKind.FINISHED, 1, generated(6))
    assert caplog.text.count("the journal ends here") == 1
    assert restored(Journal(folder, "flags"), 1, 4) == generated(4)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k none {folder}"):
        pytest.skip("needs root to mount a small disk")
    yield folder
    os.system(f"umount -l {folder}")


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(small_disk / "journal", "flags")
    for group in range(100):
        note(journal, RecordKind.FINISHED, 1, generated(group, tuple(range(500))))
    said = "the journal of rollout 1 ends here"
    assert "No space left on device" in caplog.text and caplog.text.count(said) == 1
    for group in range(200, 300):
        note(journal, RecordKind.FINISHED, 2, generated(group, tuple(range(500))))
    assert caplog.text.count("the journal of rollout 2 ends here") == 1, "it is full, still"
    journal.drop(2)
    note(journal, RecordKind.FINISHED, 3, generated(300))
    assert restored(Journal(small_disk / "journal", "flags"), 3, 300) == generated(300), (
        "there is room again"
    )
    journal.close()


def test_a_full_disk_keeps_what_was_whole(small_disk: Path) -> None:
    journal = Journal(small_disk / "journal", "flags")
    for group in range(100):
        note(journal, RecordKind.FINISHED, 1, generated(group, tuple(range(500))))
    journal.close()
    again = Journal(small_disk / "journal", "flags")
    count = sum(restored(again, 1, group) != drawn(group) for group in range(100))
    assert 1 <= count < 100 and restored(again, 1, count - 1) == generated(
        count - 1, tuple(range(500))
    )


def test_which_runs_have_one(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rollout_batch_size": 1}
    assert open_journal(make_config(**given), tmp_path) is None
    assert open_journal(make_config(**given, save="x", journal=False), tmp_path) is None
    kept = open_journal(make_config(**given, save="x"), tmp_path / "a")
    assert kept is not None and not (tmp_path / "a").exists(), (
        "nothing is written before there is something"
    )


def test_what_samples_are_made_with(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def score(args, sample): return 1.0\n")
    flags: dict[str, Any] = {"rollout_batch_size": 1, "custom_rm_path": f"{reward}:score"}
    base = module._made_with(make_config(**flags))
    assert module._made_with(make_config(**flags, num_rollout=7, lr=1e-3)) == base
    assert module._made_with(make_config(**flags, rollout_temperature=0.7)) != base
    assert module._made_with(make_config(**flags, prompt_data="other.jsonl")) != base
    reward.write_text("def score(args, sample): return 2.0\n")
    assert module._made_with(make_config(**flags)) != base


def test_samples_with_other_fields_are_not_put_beside_each_other() -> None:
    """A batch in which only some have a teacher's scores is refused, in every launch."""
    teachers = {"use_opd": True, "opd_teacher_urls": ["http://teacher"]}
    top = {**teachers, "opd_loss": "jsd", "opd_top_k": 4}
    truncated = {"rollout_top_k": 8}
    launches: list[dict[str, Any]] = [
        {},
        teachers,
        top,
        {**top, "opd_top_k": 8},
        {**teachers, "opd_teacher_prompt_key": "hint"},
        truncated,
        {**truncated, "use_sampling_mask": False},
    ]
    made_with = [module._made_with(make_config(rollout_batch_size=1, **one)) for one in launches]
    assert len(set(made_with)) == len(launches)
    more = make_config(rollout_batch_size=1, opd_kl_coef=0.5, **teachers)
    assert module._made_with(more) == made_with[1]


def test_what_cannot_be_read_is_generated_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A class that has gone, and a file that is a folder."""
    journal = Journal(folder, "flags")
    note(journal, RecordKind.FINISHED, 1, generated(4, metadata={"x": Gone()}))
    note(journal, RecordKind.FINISHED, 1, generated(5))
    (folder / "rollout_000009.log").mkdir()
    kept = globals().pop("Gone")
    try:
        again = Journal(folder, "flags")
        assert restored(again, 1, 4) == drawn(4) and restored(again, 1, 5) == generated(5)
    finally:
        globals()["Gone"] = kept
    assert (
        "cannot be read, it is generated again" in caplog.text
        and "the journal of rollout 9 is lost" in caplog.text
    )


class Gone:
    """Of the user's, and not there any more when the journal is read."""
