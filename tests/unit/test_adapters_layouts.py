"""Adapters train to the same numbers at every parallel layout: log-probs, gradients, and the
adapters after two steps, in float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.parity import (
    CP2,
    DATA_PARALLEL,
    EP2,
    ETP1,
    MICRO_BATCHES,
    PP2,
    RECOMPUTE,
    SP,
    TOLERANCE,
    TP2,
    VIRTUAL,
    parity_job,
    worst,
)
from tests.support.peft_directories import random_adapter
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard

#: layout → processes, data-parallel size, flags
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "TP2": (2, 1, TP2),
    "TP2+SP": (2, 1, TP2 | SP),
    "PP2 virtual": (2, 1, PP2 | VIRTUAL),
    "DP2": (2, 2, {}),
    "CP2": (2, 1, CP2),
    "EP2": (2, 2, EP2 | ETP1),
    "TP2+SP x PP2": (4, 1, TP2 | SP | PP2),
    "TP2+SP x EP2": (4, 2, TP2 | SP | EP2 | ETP1),
    "TP2 x EP2, expert tensor": (4, 2, TP2 | EP2),
    "recompute": (1, 1, RECOMPUTE),
}
SOME = {"lora_target_modules": ("q_proj", "v_proj", "up_proj", "down_proj")}
SHARED = {"lora_experts": "shared-outer", "lora_rank_by_topk": True}
#: name → family, flags
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "some targets": ("qwen3", SOME),
    "vocabulary": ("mistral", {"lora_target_modules": ("down_proj", "embed_tokens", "lm_head")}),
    "head": ("mistral", {"lora_target_modules": ("lm_head",)}),
    "glm4": ("glm4", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "shared outer sides": ("qwen3_moe", SHARED),
    # checkpoints with stacks of experts
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, shared outer sides": ("gpt_oss", SHARED),
}
STACKS = ("qwen3_5_moe", "qwen3_vl_moe", "gpt_oss", "gpt_oss, shared outer sides")
EXPERTS = ("deepseek_v3", "qwen3_moe", "shared outer sides", *STACKS)


ALWAYS = {
    "qwen3": ("recompute",),
    "some targets": ("TP2+SP",),
    "vocabulary": ("TP2", "TP2+SP x PP2"),
    "head": ("PP2 virtual",),
    "glm4": ("TP2+SP",),
    "deepseek_v3": ("TP2+SP",),
    "shared outer sides": ("CP2", "TP2+SP x EP2", "TP2 x EP2, expert tensor"),
    "qwen3_vl_moe": ("EP2",),
    "gpt_oss": ("TP2",),
}


def cases() -> Iterator[Any]:
    for model in MODELS:
        for layout in LAYOUTS:
            if "EP2" in layout and model not in EXPERTS:
                continue
            always = layout in ALWAYS.get(model, ())
            yield pytest.param(model, layout, marks=[] if always else [pytest.mark.full])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, ranks: Pools) -> Callable[[str, int], Any]:
    """By model and number of layers: flags with an adapter whose B is not zero, and what one
    process computes."""

    @functools.cache
    def of(name: str, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
        family, more = MODELS[name]
        directory = tmp_path_factory.mktemp("model")
        save_tiny(family, directory, layers)
        lora = {"lora_rank": 4, "lora_alpha": 8.0, **more}
        random_adapter(directory, directory / "adapter", **lora)
        path = {"hf_checkpoint": str(directory), "lora_adapter_path": str(directory / "adapter")}
        [found] = ranks.run(1, parity_job, path | lora, [make_batch(MICRO_BATCHES)])
        return path | lora, found

    return of


@pytest.mark.parametrize(("model", "layout"), list(cases()))
def test_a_layout_trains_adapters_to_the_numbers_of_one_process(
    model: str, layout: str, ranks: Pools, alone: Callable[[str, int], Any]
) -> None:
    batch = make_batch(MICRO_BATCHES)
    common, single = alone(model, 4 if "virtual" in layout else 2)
    size, data_parallel, flags = LAYOUTS[layout]
    plans: Any = DATA_PARALLEL[data_parallel]
    batches = [shard(batch, members, plan) for members, plan in plans]
    by_sample = dict(zip(single["samples"], single["log_probs"]))
    for result in ranks.run(size, parity_job, {**common, **flags}, batches):
        for kind in ("gradients", "weights"):
            assert result[kind].keys() == single[kind].keys()
            for name, value in single[kind].items():
                assert worst(result[kind][name], value) <= TOLERANCE, (kind, name)
        for index, log_probs in zip(result["samples"], result["log_probs"]):
            assert (log_probs - by_sample[index]).abs().max() <= TOLERANCE
        for ours, theirs in zip(result["metrics"], single["metrics"]):
            if result["log_probs"]:
                for key in theirs:
                    assert ours[key] == pytest.approx(theirs[key], rel=2e-5, abs=2e-5), key
