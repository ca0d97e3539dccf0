"""A run that goes on takes the newest checkpoint whose every byte is what was written, and says
what it skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime.checkpoints import directory as ckpt
from slime.checkpoints.load_plan import LoadPlan, config_for_resume, resolve_load
from slime.config import make_config
from slime.errors import UserError
from tests.support import megatron_jobs as jobs
from tests.support.checkpoint_dirs import as_by_another_program, complete, flip_a_byte
from tests.support.megatron_jobs import parameters, single
from tests.support.trainer_ranks import Pools


def cut_short(directory: Path) -> str:
    (directory / "data.distcp").write_text("0123")
    return "data.distcp has 4 of 10 bytes"


def without_a_file(directory: Path) -> str:
    (directory / "common.pt").unlink()
    return "common.pt is missing"


def without_a_manifest_to_read(directory: Path) -> str:
    (directory / ckpt.MANIFEST).write_text("{")
    return "Expecting property name"


def without_its_manifest(directory: Path) -> str:
    (directory / ckpt.MANIFEST).unlink()
    return "manifest.json is missing"


def without_a_shard_in_the_manifest(directory: Path) -> str:
    path = directory / ckpt.MANIFEST
    path.write_text(path.read_text().replace("data.distcp", "data.distcq"))
    return "its checksum is another"


def of_another_iteration(directory: Path) -> str:
    shutil.copyfile(directory.parent / "iter_0000003" / ckpt.MANIFEST, directory / ckpt.MANIFEST)
    return "was written as iter_0000003"


def gone(directory: Path) -> str:
    directory.rename(directory.parent / "elsewhere")
    return "there is no checkpoint"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "ckpt"
    for iteration in (1, 3, 5):
        complete(root, iteration, content="0123456789")
    return root


def resumed(root: Path) -> LoadPlan:
    """As by `slime resume`, of a run that began elsewhere."""
    return resolve_load(
        config_for_resume(make_config(save=str(root), load="elsewhere", ckpt_step=7, num_rollout=9))
    )


HARMS = [
    *(
        cut_short,
        without_a_file,
        without_a_manifest_to_read,
        without_its_manifest,
        without_a_shard_in_the_manifest,
    ),
    *(of_another_iteration, gone),
]


@pytest.mark.parametrize("harm", HARMS)
def test_the_one_before_a_damaged_one_is_taken(root: Path, harm: Callable[[Path], str]) -> None:
    why = harm(root / "iter_0000005")
    plan = resumed(root)
    assert (plan.iteration, plan.start_rollout_id, plan.is_resume, plan.load_optimizer) == (
        3,
        4,
        True,
        True,
    )
    assert [damage.iteration for damage in plan.damaged] == [5] and why in plan.damaged[0].why
    assert why in plan.note and ckpt.newest_whole(root) == plan.path, (
        "what an error names is where resume goes on"
    )
    assert ckpt.read_tracker(root) == 5, "looking changes nothing"


def test_two_damaged_ones(root: Path) -> None:
    for iteration in (3, 5):
        cut_short(root / f"iter_{iteration:07d}")
    assert [damage.iteration for damage in resumed(root).damaged] == [5, 3] and resumed(
        root
    ).iteration == 1


def test_a_branch_that_was_left_comes_last(root: Path) -> None:
    ckpt.set_latest(root, 3)  # by a run that went on from 1 with --ckpt-step
    cut_short(root / "iter_0000003")
    assert resumed(root).iteration == 1
    cut_short(root / "iter_0000001")
    assert resumed(root).iteration == 5


def test_a_tracker_that_cannot_be_read(root: Path) -> None:
    (root / ckpt.TRACKER).write_text("\x00\x00")
    assert resumed(root).iteration == 5


def test_what_another_program_wrote_is_loaded_as_that(root: Path) -> None:
    as_by_another_program(root / "iter_0000005")
    assert resolve_load(make_config(load=str(root))).is_foreign
    assert not resolve_load(make_config(load=str(root), ckpt_step=3)).is_foreign
    (root / "iter_0000005" / "common.pt").write_bytes(b"PK\x03\x04 layout has_rng_state")
    with pytest.raises(UserError, match="cannot be trusted"):
        resolve_load(make_config(load=str(root)))


def test_a_tracker_that_names_an_earlier_iteration_is_refused(root: Path) -> None:
    (root / ckpt.TRACKER).write_text("3\n")
    with pytest.raises(
        UserError, match=r"says 3, and the run has saved 5 last(.|\n)*--ckpt-step 3"
    ):
        resumed(root)
    assert resolve_load(make_config(save=str(root), load=str(root), ckpt_step=3)).iteration == 3
    ckpt.set_latest(root, 3)
    assert resumed(root).iteration == 3, "the run itself went back"


def test_a_tracker_that_names_what_is_not_there(root: Path) -> None:
    (root / ckpt.TRACKER).write_text("4\n")
    assert resumed(root).iteration == 5


def test_names_that_only_look_like_an_iteration(root: Path) -> None:
    for name in (
        "iter_0000005 - Copy",
        "iter_00000009",
        "iter_٠٠٠٠٠٠9",
        "iter_9",
        f"iter_{'9' * 60}",
        "iter_0000005~",
    ):
        shutil.copytree(root / "iter_0000003", root / name)
    (root / "iter_0000007").write_text("a file")
    assert ckpt.saved_iterations(root) == [1, 3, 5] and resumed(root).damaged == ()


def test_checkpoints_out_of_reach_are_no_fresh_start(root: Path) -> None:
    root.rename(root.with_name("unmounted"))
    root.symlink_to("/nowhere/at/all")
    with pytest.raises(UserError, match="out of reach"):
        resumed(root)


def test_none_that_is_whole_is_no_fresh_start(root: Path) -> None:
    for iteration in (1, 3, 5):
        cut_short(root / f"iter_{iteration:07d}")
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is whole(.|\n)*iter_0000005: data(.|\n)*move .* away"
    ):
        resumed(root)


def test_an_iteration_that_was_asked_for_is_not_replaced_by_another(root: Path) -> None:
    cut_short(root / "iter_0000005")
    with pytest.raises(UserError, match="is damaged"):
        resolve_load(make_config(save=str(root), load=str(root), ckpt_step=5))
    with pytest.raises(UserError, match="is damaged"):
        resolve_load(make_config(load=str(root)))


def test_what_lies_aside_is_in_nobodys_way(root: Path) -> None:
    for _ in range(2):
        assert ckpt.set_aside(root, 5) == root / "iter_0000005.damaged"
        assert ckpt.saved_iterations(root) == [1, 3] and ckpt.set_aside(root, 5) is None
        complete(root, 5, "again")
    ckpt.retain(root, 1)
    assert (
        ckpt.saved_iterations(root) == [5]
        and (root / "iter_0000005" / "common.pt").read_text() == "again"
    )


# -- in the ranks ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.mark.parametrize("name", ["*.distcp", ".metadata"])
def test_a_flipped_byte(model: Path, tmp_path: Path, name: str) -> None:
    flags = {
        "save": str(tmp_path),
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "ref_update_interval": 1,
    }
    with single(model, **flags) as backend:
        backend.save(0, {"rollout": 0})
        before = parameters(backend)
        jobs.fake_step(backend, 1)
        backend.save(1, {"rollout": 1})
    [file] = (tmp_path / "iter_0000001").glob(name)
    flip_a_byte(file)
    with single(model, **flags, load=str(tmp_path)) as backend:
        assert backend.next_rollout_id == 1 and backend.extra_state == {"rollout": 0}
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), before, strict=True))
        [line] = backend.skipped
    assert (
        f"iter_0000001 is skipped, {file.name} is corrupt: its content is not what was written"
        in line
    )
    assert (
        f"going on from {tmp_path / 'iter_0000000'}" in line and "iter_0000001.damaged now" in line
    )
    assert (
        ckpt.read_tracker(tmp_path) == 0
        and (tmp_path / "iter_0000001.damaged" / file.name).is_file()
    )
    with single(model, **flags, load=str(tmp_path)) as backend:
        assert backend.skipped == [], "said once"


def test_a_flipped_byte_without_the_manifest(model: Path, tmp_path: Path) -> None:
    """Nothing would notice it: the checkpoint is not trusted, neither by its own run nor by another
    one."""
    with single(model, save=str(tmp_path)) as backend:
        backend.save(0, {"rollout": 0})
        backend.save(1, {"rollout": 1})
    (tmp_path / "iter_0000001" / ckpt.MANIFEST).unlink()
    [shard] = (tmp_path / "iter_0000001").glob("*.distcp")
    flip_a_byte(shard)
    with pytest.raises(UserError, match="cannot be trusted"):
        resolve_load(make_config(load=str(tmp_path)))
    (tmp_path / "iter_0000001" / ckpt.EXTRA_STATE).unlink()
    with pytest.raises(UserError, match="cannot be trusted"):
        resolve_load(make_config(load=str(tmp_path)))
    with single(model, save=str(tmp_path), load=str(tmp_path)) as backend:
        assert backend.next_rollout_id == 1 and "iter_0000001 is skipped" in backend.skipped[0]


@pytest.mark.slow
def test_all_ranks_skip_what_one_has_found(ranks: Pools, model: Path, tmp_path: Path) -> None:
    """The byte is in the share of the second rank."""
    ranks.run(2, jobs.save_twice, model, tmp_path)
    names = [record.path for record in ckpt.read_manifest(tmp_path / "iter_0000001") or []]
    flip_a_byte(tmp_path / "iter_0000001" / names[1])
    found = ranks.run(2, jobs.next_and_skipped, model, tmp_path)
    assert [(start, len(lines)) for start, lines in found] == [(1, 1), (1, 1)]
    assert f"{names[1]} is corrupt" in found[0][1][0]
