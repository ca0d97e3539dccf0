"""Where a run loads from, and what every crash during a save leaves behind. No torch in sight."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.checkpoints import directory as ckpt
from slime.checkpoints.load_plan import (
    LoadPlan,
    check_length,
    resolve_load,
    resolve_reference,
    unused_reference,
    unused_schedule,
)
from slime.config import make_config, parse_args
from slime.errors import UserError
from tests.support.checkpoint_dirs import complete


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def plan_of(**flags: object) -> LoadPlan:
    return resolve_load(
        make_config(**{key: str(v) if isinstance(v, Path) else v for key, v in flags.items()})
    )


# -- what is loaded --------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [False, True])
def test_load_equal_to_save_starts_fresh_when_nothing_is_there(
    hf: Path, root: Path, present: bool
) -> None:
    if present:
        root.mkdir()
        (root / ".iter_0000001.partial").mkdir()  # a first save that died
        (root / "notes.txt").write_text("unrelated")
    plan = plan_of(load=root, save=root, hf_checkpoint=hf)
    assert (plan.kind, plan.path, plan.start_rollout_id, plan.is_resume) == ("hf", hf, 0, False)
    assert "nothing saved yet" in plan.note


def test_load_equal_to_save_resumes(hf: Path, root: Path) -> None:
    complete(root, 3)
    complete(root, 10)
    plan = plan_of(load=root, save=f"{root}/../ckpt", hf_checkpoint=hf)
    assert (plan.kind, plan.path, plan.iteration) == ("megatron", root / "iter_0000010", 10)
    assert plan.start_rollout_id == 11 and plan.is_resume and plan.load_optimizer and plan.load_rng
    earlier = plan_of(load=root, save=root, ckpt_step=3, no_load_optim=True, hf_checkpoint=hf)
    assert (earlier.iteration, earlier.start_rollout_id, earlier.load_optimizer) == (3, 4, False)
    elsewhere = plan_of(load=root, save=root.parent / "other", hf_checkpoint=hf)
    assert elsewhere.start_rollout_id == 11 and not elsewhere.is_resume


def test_weights_without_a_past(hf: Path, root: Path) -> None:
    assert plan_of(hf_checkpoint=hf).note.startswith("no --load: fresh start")
    assert plan_of(load=hf).kind == "hf"
    complete(root, 7)
    tuned = plan_of(load=root, finetune=True, hf_checkpoint=hf)
    assert (tuned.kind, tuned.start_rollout_id, tuned.load_optimizer) == ("megatron", 0, False)
    # a reference checkpoint is the start of a run that loads nothing else
    assert plan_of(ref_load=root, hf_checkpoint=hf).start_rollout_id == 0
    (root / ckpt.TRACKER).write_text("release")
    (root / "iter_0000007").rename(root / "release")
    released = plan_of(load=root, hf_checkpoint=hf)
    assert (released.iteration, released.start_rollout_id, released.load_optimizer) == (
        None,
        0,
        False,
    )


def test_the_reference_model(hf: Path, root: Path) -> None:
    complete(root, 2)
    complete(root, 4)
    assert resolve_reference(make_config(hf_checkpoint=str(hf))).kind == "hf"
    plan = resolve_reference(
        make_config(hf_checkpoint=str(hf), ref_load=str(root), ref_ckpt_step=2)
    )
    assert plan.path == root / "iter_0000002" and plan.start_rollout_id == 0
    with pytest.raises(UserError, match="--ref-load"):
        resolve_reference(make_config(hf_checkpoint=str(hf), ref_load=str(root.parent)))
    with pytest.raises(UserError, match=r"(?s)no config\.json that names.*pass --ref-load with"):
        (root / "config.json").write_text("{}")
        (root / ckpt.TRACKER).unlink()
        resolve_reference(make_config(hf_checkpoint=str(hf), ref_load=str(root)))


@pytest.mark.parametrize(
    "flags, is_unused",
    [
        ({"load": "other", "loss_type": "preference_loss", "preference_loss": "simpo"}, True),
        ({"load": "other"}, True),
        ({"load": "other", "use_kl_loss": True, "kl_loss_coef": 0.1}, False),
        ({"load": "other", "loss_type": "preference_loss"}, False),
        ({"load": "other", "lora_rank": 2, "hf_checkpoint": "base"}, False),
        ({"load": "own", "save": "own"}, False),
        ({}, False),
    ],
)
def test_a_reference_that_nothing_reads_is_warned_of(
    flags: dict[str, object], is_unused: bool
) -> None:
    assert (
        "--ref-load ref has no effect" in unused_reference(make_config(**flags, ref_load="ref"))
    ) is (is_unused)
    assert unused_reference(make_config(**{"hf_checkpoint": "base", **flags})) == ""


def test_settings_of_a_schedule_that_is_not_loaded_are_warned_of(hf: Path, root: Path) -> None:
    def warning_of(**flags: object) -> str:
        given = {"load": str(root), "use_checkpoint_opt_param_scheduler": True, **flags}
        config = make_config(**given, hf_checkpoint=str(hf))
        return unused_schedule(config, resolve_load(config))

    own = {"save": str(root)}
    assert warning_of(**own) == "", "the first launch of a run that will resume"
    complete(root, 3)
    assert warning_of() == warning_of(**own) == ""
    said = "--use-checkpoint-opt-param-scheduler has no effect"
    for flags in ({"finetune": True}, {"no_load_optim": True}, {"load": str(hf)}):
        assert warning_of(**flags).startswith(said), flags
    assert warning_of(finetune=True, use_checkpoint_opt_param_scheduler=False) == ""


def test_weights_that_are_not_there_are_named_by_the_flag_that_was_given(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere")
    for flags, named in [
        ({"hf_checkpoint": nowhere}, "--hf-checkpoint"),
        ({"hf_checkpoint": nowhere, "ref_load": nowhere}, "--ref-load"),
    ]:
        for resolve in (resolve_load, resolve_reference):
            with pytest.raises(UserError, match=f"^{named} .*nowhere does not exist"):
                resolve(make_config(**flags))


def test_an_iteration_of_the_reference_needs_no_tracker(hf: Path, root: Path) -> None:
    complete(root, 3, track=False)
    flags = {"hf_checkpoint": str(hf), "ref_load": str(root), "ref_ckpt_step": 3}
    assert (
        resolve_reference(make_config(**flags)).path
        == plan_of(**flags).path
        == root / "iter_0000003"
    )


def test_an_iteration_of_a_hugging_face_directory_is_refused(hf: Path) -> None:
    with pytest.raises(UserError, match="--ckpt-step 5 cannot be found"):
        plan_of(load=hf, ckpt_step=5, hf_checkpoint=hf)
    flags = {"hf_checkpoint": str(hf), "ref_load": str(hf), "ref_ckpt_step": 5}
    for resolve in (resolve_load, resolve_reference):
        with pytest.raises(UserError, match="--ref-ckpt-step 5 cannot be found"):
            resolve(make_config(**flags))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.write_text(""), "is not a directory"),
        (lambda root: root.mkdir(), "it holds: nothing"),
        (lambda root: (root / "iter_0000004").mkdir(parents=True), "it holds: iter_0000004"),
    ],
)
def test_nothing_to_load_names_the_directory_its_content_and_the_flags(
    hf: Path, root: Path, make, text: str
) -> None:
    make(root)
    with pytest.raises(UserError) as caught:
        plan_of(load=root, hf_checkpoint=hf)
    message = str(caught.value)
    assert text in message and str(root) in message
    assert all(flag in message for flag in ("--load", "--ref-load", "--ckpt-step"))


def test_a_lost_tracker_is_no_fresh_start(hf: Path, root: Path) -> None:
    complete(root, 5, track=False)
    assert plan_of(load=root, save=root, hf_checkpoint=hf).iteration == 5
    assert plan_of(load=root, save=root, ckpt_step=5, hf_checkpoint=hf).iteration == 5
    with pytest.raises(
        UserError, match=r"no latest_checkpointed_iteration\.txt(.|\n)*iter_0000005"
    ):
        plan_of(load=root, save=root.parent / "other", hf_checkpoint=hf)


@settings(max_examples=75, deadline=None)
@given(
    content=st.binary(max_size=12)
    | st.sampled_from([b"\xb2", b"9" * 5000, b"1\x00", b"relea\xf3e", b"-3", b"1_0"])
)
def test_a_resume_goes_on_whatever_the_tracker_says(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("ckpt")
    for iteration in (3, 10):
        complete(root, iteration)
    (root / ckpt.TRACKER).write_bytes(content)
    assert plan_of(load=root, save=root, hf_checkpoint=root).iteration in (3, 10)


def test_a_resume_goes_on_where_a_folder_has_the_name_of_the_tracker(root: Path) -> None:
    complete(root, 3)
    (root / ckpt.TRACKER).unlink()
    (root / ckpt.TRACKER).mkdir()
    assert plan_of(load=root, save=root, hf_checkpoint=root).iteration == 3


def test_an_iteration_that_is_not_there(hf: Path, root: Path) -> None:
    complete(root, 5)
    with pytest.raises(
        UserError, match=r"no checkpoint of iteration 6(.|\n)*--ckpt-step(.|\n)*: 5"
    ):
        plan_of(load=root, ckpt_step=6, hf_checkpoint=hf)
    (root / ckpt.TRACKER).write_text("8")
    with pytest.raises(UserError, match="iteration 8"):
        plan_of(load=root, hf_checkpoint=hf)
    (root / ckpt.TRACKER).write_text("ten")
    with pytest.raises(UserError, match="does not hold an iteration number"):
        plan_of(load=root, hf_checkpoint=hf)


def test_damage_is_named_and_earlier_iterations_are_offered(hf: Path, root: Path) -> None:
    complete(root, 4)
    last = complete(root, 5, content="0123456789")
    (last / "data.distcp").write_text("0123")
    (last / "common.pt").unlink()
    with pytest.raises(UserError) as caught:
        plan_of(load=root, hf_checkpoint=hf)
    message = str(caught.value)
    assert "common.pt is missing" in message and "data.distcp has 4 of 10 bytes" in message
    assert "--ckpt-step with an earlier iteration" in message and message.endswith("4")
    (last / ckpt.MANIFEST).write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        plan_of(load=root, hf_checkpoint=hf)


def test_changed_content_is_found(root: Path) -> None:
    path = complete(root, 5, content="0123456789")
    ckpt.check_contents(path)
    (path / "data.distcp").write_text("0123456780")
    ckpt.check_complete(path)
    with pytest.raises(UserError, match=r"data\.distcp is corrupt"):
        for rank in range(3):  # every file is some rank's share
            ckpt.check_contents(path, rank, 3)


def test_another_runs_checkpoints_are_not_overwritten(hf: Path, root: Path) -> None:
    complete(root, 5)
    with pytest.raises(UserError, match=r"--save .* already holds checkpoints of another run"):
        plan_of(save=root, hf_checkpoint=hf)


def test_a_run_name_that_is_taken_is_told_as_such(hf: Path, tmp_path: Path) -> None:
    complete(tmp_path / "a run" / "checkpoints", 5)
    with pytest.raises(UserError) as caught:
        resolve_load(
            parse_args(
                ["--hf-checkpoint", str(hf), "--output-dir", str(tmp_path), "--run-name", "a run"]
                + ["--num-rollout", "1", "--rm-type", "math", "--prompt-data", "rows.jsonl"]
            )
        )
    assert "another --run-name" in caught.value.fix and "--save" not in str(caught.value)
    assert caught.value.fix.endswith(f"slime resume '{tmp_path}/a run'")


def test_a_load_that_is_not_there_is_named_before_the_runs_own_checkpoints(
    hf: Path, root: Path
) -> None:
    with pytest.raises(UserError, match=r"--load .*none does not exist") as raised:
        plan_of(load=root.parent / "none", save=root, hf_checkpoint=hf)
    assert "set it to the --save directory to resume" in raised.value.fix


def test_no_weights_at_all(root: Path) -> None:
    with pytest.raises(UserError, match="no weights to start from"):
        plan_of(load=root, save=root)


def test_resolving_needs_no_torch() -> None:
    code = "import sys, slime.checkpoints.load_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- crashes ---------------------------------------------------------------------------------------


class CrashRecorder:
    """Copies a directory before every file-system change, as a crash at that moment would leave
    it."""

    CALLS = ("rename", "replace", "fsync", "rmdir", "unlink", "mkdir")

    def __init__(self, watched: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watched, self.copies, self.states = watched, copies, []
        self._busy = False
        for name in self.CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call):
        def recorded(*args, **kwargs):
            if not self._busy and self.watched.exists():
                self._busy = True
                copy = self.copies / str(len(self.states))
                shutil.copytree(self.watched, copy)
                self.states.append(copy)
                self._busy = False
            return call(*args, **kwargs)

        return recorded


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_at_any_point_leaves_a_loadable_checkpoint(
    hf: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    complete(root, 1, "one")
    complete(root, 2, "two")
    with monkeypatch.context() as patched:
        recorder = CrashRecorder(root, tmp_path / "crashes", patched)
        complete(root, 2 if again else 3, "new")
        ckpt.retain(root, 1)
    assert len(recorder.states) > 10
    seen = set()
    for state in recorder.states:
        plan = plan_of(load=state, save=state, hf_checkpoint=hf)
        assert plan.iteration is not None
        ckpt.check_contents(plan.path)
        seen.add((plan.iteration, (plan.path / "data.distcp").read_text()))
        complete(state, 9)  # and the next save succeeds
        assert plan_of(load=state, save=state, hf_checkpoint=hf).iteration == 9
    assert seen == ({(2, "two"), (2, "new")} if again else {(2, "two"), (3, "new")})


def test_what_cannot_be_removed_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in range(1, 5):
        complete(root, iteration)
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path.name == ckpt.iteration_name(1):
            raise PermissionError(1, "Operation not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    assert ckpt.retain(root, 1) == [2, 3]
    assert ckpt.saved_iterations(root) == [1, 4] and "cannot be removed" in caplog.text


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(None, [1, 2, 3, 4]), (10, [1, 2, 3, 4]), (2, [3, 4]), (1, [4]), (0, [4])],
)
def test_retention(root: Path, keep: int | None, expected: list[int]) -> None:
    for iteration in range(1, 5):
        complete(root, iteration)
    (root / ".iter_0000009.partial").mkdir()
    ckpt.retain(root, keep)
    assert ckpt.saved_iterations(root) == expected
    assert [path.name for path in root.glob(".*")] == [".latest"]


def test_an_abandoned_branch_goes_first(root: Path) -> None:
    for iteration in (5, 6, 7, 8, 9):
        complete(root, iteration)
    complete(root, 6)  # resumed from 5 with --ckpt-step
    ckpt.retain(root, 2)
    assert ckpt.saved_iterations(root) == [5, 6] and ckpt.read_tracker(root) == 6


def test_unwritable_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        ckpt.partial_dir(tmp_path / "file" / "iter_0000001")


# -- after a run that failed -----------------------------------------------------------------------


def test_the_newest_whole_checkpoint(root: Path) -> None:
    assert ckpt.newest_whole(root) is None
    complete(root, 3)
    complete(root, 7)
    assert ckpt.newest_whole(root) == root / "iter_0000007"
    complete(root, 9, track=False)
    assert ckpt.newest_whole(root) == root / "iter_0000007", "where a resume would go on"
    (root / "iter_0000007" / "data.distcp").unlink()
    assert ckpt.newest_whole(root) == root / "iter_0000003"
    (root / "iter_0000003" / "data.distcp").unlink()
    assert ckpt.newest_whole(root) == root / "iter_0000009"


def test_a_save_counts_once_it_is_tracked_and_not_under_way_again(root: Path) -> None:
    complete(root, 3, track=False)
    assert not ckpt.is_saved(root, 3)
    ckpt.set_latest(root, 3)
    assert ckpt.is_saved(root, 3)
    partial = ckpt.partial_dir(root / "iter_0000003")
    assert not ckpt.is_saved(root, 3)
    (partial / "data.distcp").write_text("half")
    assert ckpt.discard_partial(root / "iter_0000003") and not ckpt.discard_partial(
        root / "iter_0000003"
    )
    there = sorted(path.name for path in root.iterdir())
    assert ckpt.is_saved(root, 3) and there == [".latest", "iter_0000003", ckpt.TRACKER]


def test_a_discarded_save_cannot_be_published_by_a_writer_that_still_lives(root: Path) -> None:
    final = root / "iter_0000004"
    partial = ckpt.partial_dir(final)
    ckpt.discard_partial(final)
    with pytest.raises(FileNotFoundError):
        ckpt.publish(partial, final)
    assert list(root.iterdir()) == []


def test_the_next_save_removes_what_could_not_be_discarded_whole(root: Path) -> None:
    left = root / ".iter_0000004.discarded"
    left.mkdir(parents=True)
    complete(root, 5)
    ckpt.retain(root, None)
    assert not left.exists()


def test_an_iteration_that_was_being_replaced_is_put_back_not_removed(tmp_path: Path) -> None:
    """Killed between the two renames: the former state of iteration 4 is all there is of it."""
    for name in (
        ".iter_0000004.replaced",
        "iter_0000006",
        ".iter_0000006.replaced",
        ".iter_0000008.partial",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    ckpt.retain(tmp_path, None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000004", "iter_0000006"]
    assert (tmp_path / "iter_0000004" / "data").read_text() == ".iter_0000004.replaced"
    assert (tmp_path / "iter_0000006" / "data").read_text() == "iter_0000006"


def test_a_run_that_ends_before_where_it_stands_is_refused(tmp_path: Path) -> None:
    """Its length is that of the whole run. At its end one stands that was killed as it ended: it
    still has to save."""
    complete(tmp_path, 5)
    for length, wrong in ((0, False), (5, True), (6, False), (9, False)):
        config = make_config(load=str(tmp_path), save=str(tmp_path), num_rollout=length)
        plan = resolve_load(config)
        assert plan.start_rollout_id == 6
        if wrong:
            with pytest.raises(UserError, match="6 rollouts are trained on already") as raised:
                check_length(config, plan)
            assert "--num-rollout 11 for 5 more" in str(raised.value.fix)
        else:
            check_length(config, plan)
