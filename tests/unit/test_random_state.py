"""Random numbers of a run that goes on: the saved states where they fit, else a seed from --seed
and the iteration."""

from __future__ import annotations

import doctest
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import slime.checkpoints.random_state
from tests.support import megatron_jobs as jobs
from tests.support.megatron_jobs import single
from tests.support.trainer_ranks import Pools

SAID = "random numbers start anew"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("models") / "qwen3")


def drawn() -> list[float]:
    """The next number of each generator; the tracker's are a tensor-parallel rank's own."""
    from megatron.core import tensor_parallel

    with tensor_parallel.get_cuda_rng_tracker().fork():
        tracked = float(torch.rand(()))
    return [random.random(), float(np.random.rand()), float(torch.rand(())), tracked]


def drawn_by_rank(
    info: Any, model: Path, flags: dict[str, Any], save_as: tuple[int, ...] = ()
) -> tuple[list[float], str]:
    """What a rank draws after its setup, and what it logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("slime")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        backend = jobs.backend_of(info, model, **flags)
        for iteration in save_as:
            backend.save(iteration)
        return drawn(), "\n".join(line for line in lines if SAID in line)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_the_example() -> None:
    assert doctest.testmod(slime.checkpoints.random_state).failed == 0


def test_another_layout_starts_anew_from_seed_and_iteration(
    model: Path, tmp_path: Path, ranks: Pools
) -> None:
    ranks.run(
        2, drawn_by_rank, model, {"tensor_model_parallel_size": 2, "save": str(tmp_path)}, (0, 7)
    )
    [(fresh, _)] = ranks.run(1, drawn_by_rank, model, {})
    flags = {"load": str(tmp_path)}
    resumed = {i: ranks.run(1, drawn_by_rank, model, {**flags, "ckpt_step": i}) for i in (0, 7)}
    for iteration, [(numbers, said)] in resumed.items():
        assert (
            f"from --seed 1234 and iteration {iteration}: the random states were saved at TP 2"
            in said
        )
        assert not set(numbers) & set(fresh), "not those of the start of the run"
    [(numbers, _)] = resumed[7]
    assert not set(numbers) & set(resumed[0][0][0]), "each iteration has its own"
    assert ranks.run(1, drawn_by_rank, model, {**flags, "ckpt_step": 7}) == resumed[7], (
        "the same at each attempt"
    )
    [(other, _)] = ranks.run(1, drawn_by_rank, model, {**flags, "ckpt_step": 7, "seed": 1})
    assert not set(numbers) & set(other)


def test_ranks_of_the_new_layout_share_what_they_must_and_one_says_so(
    model: Path, tmp_path: Path, ranks: Pools
) -> None:
    ranks.run(1, drawn_by_rank, model, {"save": str(tmp_path)}, (0,))
    flags = {"load": str(tmp_path), "tensor_model_parallel_size": 2}
    (first, said), (second, silent) = ranks.run(2, drawn_by_rank, model, flags)
    assert first[:3] == second[:3] and first[3] != second[3], (
        "only the tracker gives tensor-parallel ranks their own"
    )
    assert said.count(SAID) == 1 and "saved at one rank and this is TP 2" in said and not silent


@pytest.mark.parametrize(
    ("saving", "loading", "because"),
    [
        ({}, {"no_load_rng": True}, "--no-load-rng"),
        ({"no_save_rng": True}, {}, "the checkpoint was saved without random states"),
    ],
)
def test_without_the_states_too(
    saving: dict[str, Any], loading: dict[str, Any], because: str, model: Path, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", logger="slime")
    with single(model, save=str(tmp_path), **saving) as backend:
        fresh = drawn()
        backend.save(3)
    with single(model, load=str(tmp_path), **loading):
        assert not set(drawn()) & set(fresh)
    assert caplog.text.count(SAID) == 1 and f"iteration 3: {because}" in caplog.text
    caplog.clear()
    with single(model, load=str(tmp_path), finetune=True):
        assert drawn() == fresh, "a run of its own starts with its own seed"
    assert SAID not in caplog.text


def test_every_generator_is_seeded_at_the_start(model: Path) -> None:
    """NumPy's and Python's too: hooks use them."""
    runs = []
    for seed in (5, 5, 6):
        random.seed(), np.random.seed()
        with single(model, seed=seed):
            runs.append(drawn())
    assert runs[0] == runs[1] and not set(runs[0]) & set(runs[2])
