"""Pipeline stages of different size: the numbers of one process, and what does not divide is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.errors import UserError
from slime.models.layout_rules import check_layout
from tests.support import megatron_jobs as jobs
from tests.support.parity import MICRO_BATCHES, PIPELINED, PP2, TOLERANCE, parity_job, worst
from tests.support.trainer_ranks import Pools, make_batch, tiny_spec, trainer_config

FIRST = "decoder_first_pipeline_num_layers"
LAST = "decoder_last_pipeline_num_layers"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.make_model(tmp_path_factory.mktemp("models") / "qwen3", num_hidden_layers=5)


@pytest.fixture(scope="module")
def single(model: Path, ranks: Pools) -> dict[str, Any]:
    return ranks.run(1, parity_job, {"hf_checkpoint": str(model)}, [make_batch(MICRO_BATCHES)])[0]


@pytest.mark.parametrize(
    "flags",
    [
        {FIRST: 2},
        pytest.param({LAST: 1}, marks=pytest.mark.full),
        pytest.param({"account_for_loss_in_pipeline_split": True}, marks=pytest.mark.full),
        pytest.param({"pipeline_model_parallel_layout": "Ett|tttL"}, marks=pytest.mark.full),
    ],
    ids=["first", "last", "loss counted", "written out"],
)
def test_stages_of_their_own_size(
    flags: dict[str, Any], model: Path, ranks: Pools, single: dict[str, Any]
) -> None:
    settings = {"hf_checkpoint": str(model), **PP2, **flags}
    for result in ranks.run(2, parity_job, settings, [make_batch(PIPELINED)]):
        for kind in ("gradients", "weights"):
            assert result[kind].keys() == single[kind].keys()
            for name, value in single[kind].items():
                assert worst(result[kind][name], value) <= TOLERANCE, (kind, name)


@pytest.mark.parametrize(
    ("layers", "stages", "flags", "why"),
    [
        (5, 2, {}, "5 layers cannot be divided by 2"),
        (6, 2, {FIRST: 2, LAST: 2}, "4 of its 6 layers"),
        (6, 4, {FIRST: 1}, "5 layers outside the first or last stage cannot be divided by 3"),
        (
            6,
            4,
            {"account_for_embedding_in_pipeline_split": True},
            "7 layers and the embedding cannot be divided by 4",
        ),
        (6, 4, {FIRST: 1, LAST: 1}, ""),
        (6, 2, {FIRST: 2, LAST: 4}, ""),
        (
            6,
            4,
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
            },
            "",
        ),
        (5, 2, {"pipeline_model_parallel_layout": "Et|t*4L"}, ""),
    ],
)
def test_what_divides(layers: int, stages: int, flags: dict[str, Any], why: str) -> None:
    config = trainer_config(
        pipeline_model_parallel_size=stages, actor_num_gpus_per_node=stages, **flags
    )
    spec = tiny_spec(layers=layers)
    if not why:
        check_layout(spec, config)
        return
    with pytest.raises(UserError) as caught:
        check_layout(spec, config)
    assert why in caught.value.why
