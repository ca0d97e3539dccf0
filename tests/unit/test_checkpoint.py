"""Checkpoints of the real trainer: the run goes on bit for bit, at any layout, and a failed save
changes nothing."""

from __future__ import annotations

import itertools
import random
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.checkpoints.directory import check_contents, saved_iterations
from slime.checkpoints.sharded_store import ShardedWrite
from slime.checkpoints.trainer_state import TrainerState
from slime.errors import UserError
from tests.support import megatron_jobs as jobs
from tests.support.megatron_jobs import everything, parameters, single
from tests.support.trainer_ranks import Pools


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("models") / "qwen3")


# -- one rank --------------------------------------------------------------------------------------


def test_settings_changed_for_a_resume_take_effect(model: Path, tmp_path: Path) -> None:
    saved_with = {
        "lr": 1e-3,
        "min_lr": 1e-4,
        "adam_beta2": 0.98,
        "num_rollout": 4,
        "lr_decay_style": "linear",
        "save": str(tmp_path),
    }
    changed = {
        **saved_with,
        "load": str(tmp_path),
        "lr": 2e-3,
        "adam_beta2": 0.9,
        "num_rollout": 400,
    }
    with single(model, **saved_with) as backend:
        jobs.fake_step(backend, 1)
        backend.save(1)
        rates, moments = backend.learning_rates(), moments_of(backend)
    with single(model, **changed) as backend:
        # hardly decayed yet
        assert backend.learning_rates() == pytest.approx([2e-3] * len(rates), rel=0.01)
        assert {group["betas"][1] for group in backend.optimizer.param_groups} == {0.9}
        assert all(torch.equal(a, b) for a, b in zip(moments, moments_of(backend), strict=True))
    with single(model, **changed, use_checkpoint_opt_param_scheduler=True) as backend:
        assert backend.learning_rates() == rates
        assert {group["betas"][1] for group in backend.optimizer.param_groups} == {0.98}


def moments_of(backend: Any) -> list[torch.Tensor]:
    states = backend.optimizer.chained_optimizers[0].optimizer.state.values()
    return [state["exp_avg"].clone() for state in states]


@pytest.mark.parametrize(
    "flags",
    [
        {"bf16": True},
        {"use_distributed_optimizer": False},
    ],
    ids=["bf16", "fp32-plain-optimizer"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    model: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    flags = {**flags, "save": str(tmp_path), "lr_warmup_iters": 5, "lr_decay_style": "linear"}
    with single(model, **flags) as backend:
        jobs.fake_step(backend, 1)
        jobs.fake_step(backend, 2)
        backend.save(1, {"position": torch.arange(3), "version": 2})
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        rates = backend.learning_rates()
        jobs.fake_step(backend, 3)
        jobs.fake_step(backend, 4)
        expected = parameters(backend)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    with single(model, **flags, load=str(tmp_path)) as backend:
        assert backend.next_rollout_id == 2
        assert (
            backend.extra_state["position"].tolist() == [0, 1, 2]
            and backend.extra_state["version"] == 2
        )
        assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn
        assert backend.learning_rates() == rates
        jobs.fake_step(backend, 3)
        jobs.fake_step(backend, 4)
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), expected, strict=True))


def test_saved_before_the_first_step(model: Path, tmp_path: Path) -> None:
    flags = {"save": str(tmp_path)}
    with single(model, **flags) as backend:
        backend.save(0)
        jobs.fake_step(backend, 1)
        expected = parameters(backend)
    with single(model, **flags, load=str(tmp_path)) as backend:
        jobs.fake_step(backend, 1)
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), expected, strict=True))


def test_without_the_optimizer(model: Path, tmp_path: Path) -> None:
    with single(model, save=str(tmp_path), no_save_optim=True, bf16=True) as backend:
        jobs.fake_step(backend, 1)
        backend.save(0)
        saved = parameters(backend)
    with single(
        model, save=str(tmp_path), load=str(tmp_path), no_load_optim=True, bf16=True
    ) as backend:
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), saved, strict=True))
        jobs.fake_step(backend, 2)  # the master weights follow the loaded ones
        moved = max(
            float((a - b).abs().max()) for a, b in zip(parameters(backend), saved, strict=True)
        )
        assert 0 < moved < 0.05
    with (
        pytest.raises(UserError, match="has no optimizer state"),
        single(model, load=str(tmp_path), bf16=True),
    ):
        pass


def test_what_was_frozen_has_no_optimizer_state(model: Path, tmp_path: Path) -> None:
    with single(model, save=str(tmp_path), freeze_params_name_list=["mlp"]) as backend:
        backend.save(0)
    match = (
        r"no optimizer states for \d+ tensors(.|\n)*\.mlp\.(.|\n)*frozen when it was "
        r"saved(.|\n)*--no-load-optim"
    )
    with pytest.raises(UserError, match=match), single(model, load=str(tmp_path)):
        pass
    with single(model, load=str(tmp_path), freeze_params_name_list=["mlp", "norm"]) as backend:
        assert backend.next_rollout_id == 1


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = jobs.make_model(tmp_path / "other", num_key_value_heads=4)
    root = tmp_path / "ckpt"
    with single(model, save=str(root)) as backend:
        backend.save(0)
    with (
        pytest.raises(UserError, match=r"cannot be loaded into this model"),
        single(other, load=str(root)),
    ):
        pass


def test_a_checkpoint_as_megatron_lm_writes_it_is_read(model: Path, tmp_path: Path) -> None:
    """Its optimizer gathered and laid out by megatron-core itself, `args` beside it, none of our
    own files."""
    import argparse

    from megatron.core.dist_checkpointing.mapping import ShardedObject

    flags = {"save": str(tmp_path), "bf16": True, "adam_eps": 1e-3}
    with single(model, **flags) as backend:
        jobs.fake_step(backend, 1)
        path = tmp_path / "iter_0000010"
        path.mkdir()
        state = TrainerState(backend.model_chunks).everything(10, save_rng=False)
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        state["optimizer"] = backend.optimizer.sharded_state_dict(state, metadata=metadata)
        state["opt_param_scheduler"] = backend.scheduler.state_dict()
        state["args"] = argparse.Namespace(num_layers=4)
        state["decoder._extra_state"] = ShardedObject(
            "decoder.layers.linear._extra_state", None, (1,), (0,)
        )
        del state["layout"]
        write = ShardedWrite(state)
        write.finish(path, [write.write(path)[0]])
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
        jobs.fake_step(backend, 2)
        expected = parameters(backend)
    with single(model, **flags, load=str(tmp_path)) as backend:
        assert backend.next_rollout_id == 11
        jobs.fake_step(backend, 2)
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), expected, strict=True))


def test_what_was_loaded_is_counted(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="slime")
    with single(model, save=str(tmp_path)) as backend:
        backend.save(0)
        count = len(parameters(backend))
        millions = sum(parameter.numel() for parameter in parameters(backend)) / 1e6
    with single(model, save=str(tmp_path), load=str(tmp_path)):
        pass
    text = (
        rf"loaded {count} parameters \({millions:.1f} M numbers\), optimizer at step 0, schedule, "
        r"random states from"
    )
    assert re.search(rf"{text} 1 file\(s\) of {tmp_path}", caplog.text), caplog.text


def test_corruption_is_named_and_not_loaded(model: Path, tmp_path: Path) -> None:
    with single(model, save=str(tmp_path)) as backend:
        backend.save(0)
    [shard] = (tmp_path / "iter_0000000").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with (
        pytest.raises(UserError, match=rf"{shard.name} is corrupt"),
        single(model, load=str(tmp_path)),
    ):
        pass


def test_a_full_disk_at_any_byte_leaves_the_previous_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    flags = {"save": str(tmp_path)}
    with single(model, **flags) as backend:
        backend.save(0)
        sizes = sorted({path.stat().st_size for path in (tmp_path / "iter_0000000").iterdir()})
        before = parameters(backend)
        jobs.fake_step(backend, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        for limit in [0, *(size - 1 for size in sizes if size > 200), sizes[-1] // 2]:
            try:
                # a write beyond it fails, in C++ too
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
                with pytest.raises(UserError, match="previous"):
                    backend.save(1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            there = sorted(p.name for p in tmp_path.iterdir())
            assert there == [".latest", "iter_0000000", "latest_checkpointed_iteration.txt"]
            check_contents(tmp_path / "iter_0000000")
        backend.save(1)
    with single(model, **flags, load=str(tmp_path), ckpt_step=0) as backend:
        assert all(torch.equal(a, b) for a, b in zip(parameters(backend), before, strict=True))
        assert backend.next_rollout_id == 1


def test_retention(model: Path, tmp_path: Path) -> None:
    with single(model, save=str(tmp_path), save_retain=2) as backend:
        for rollout_id in range(4):
            backend.save(rollout_id)
    assert saved_iterations(tmp_path) == [2, 3]


# -- two ranks -------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_layout_leaves_no_trace_in_a_checkpoint(ranks: Pools, tmp_path: Path) -> None:
    model = jobs.make_model(tmp_path / "qwen3", **jobs.FOUR_LAYERS)
    contents = {}
    for layout in jobs.LAYOUTS:
        ranks.run(2, jobs.step_and_save, model, layout, tmp_path / layout)
        contents[layout] = everything(tmp_path / layout / "iter_0000003", tmp_path)
    reference = contents["dp2"]
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key in reference)
    for layout, content in contents.items():
        assert content.keys() == reference.keys(), layout
        for key in reference:
            assert torch.allclose(content[key], reference[key], atol=1e-6), (layout, key)
    ring = [*jobs.LAYOUTS, "dp2"]
    for source, target in itertools.pairwise(ring):
        root = tmp_path / f"{source} to {target}"
        arguments = (model, jobs.LAYOUTS[target], tmp_path / source, root)
        [(next_id, extra), _] = ranks.run(2, jobs.load_and_save, *arguments)
        assert next_id == 4 and extra == {"rank_0_said": source}
        again = everything(root / "iter_0000004", tmp_path)
        assert all(torch.equal(again[key], contents[source][key]) for key in reference), (
            source,
            target,
        )


@pytest.mark.slow
def test_one_ranks_full_disk_is_every_ranks_error(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    said = ranks.run(2, jobs.full_disk, model, tmp_path, 100)
    assert all("failed" in text and "rank 1" in text for text in said), said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_tracker_moves_when_every_rank_has_written(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    said = ranks.run(2, jobs.save_behind_training, model, tmp_path)
    assert said == [[], []], "seen while rank 1 was held back"
    assert saved_iterations(tmp_path) == [0, 1]
