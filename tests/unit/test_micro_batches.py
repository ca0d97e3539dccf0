"""--max-tokens-per-gpu by the memory plan: it fits, it is stable, and what the user says wins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config, parse_args
from slime.errors import UserError
from slime.memory.hardware import DeviceMemory
from slime.memory.micro_batches import (
    LARGEST_ON_CPU,
    LARGEST_ON_GPU,
    SMALLEST,
    packing_line,
    with_token_limit,
)
from slime.memory.plan import MemoryPlan
from tests.support.hf_configs import PUBLISHED


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-4B"):
        found[name] = tmp_path_factory.mktemp("model")
        (found[name] / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    return found


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def config_of(folder: Path, *words: str) -> Config:
    flags = [
        "--prompt-data", "p.jsonl", "--num-rollout", "1", "--rollout-batch-size", "4",
        "--rollout-max-prompt-len"
    ]  # fmt: skip
    return parse_args(
        ["--hf-checkpoint", str(folder), *flags, "256", "--rollout-max-response-len", "512", *words]
    )


@given(
    name=st.sampled_from(["HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-4B"]),
    gigabytes=st.floats(2, 200),
    on_gpu=st.booleans(),
)
@settings(max_examples=25)
def test_the_limit_fits_and_grows_with_memory(
    folders: dict[str, Path], name: str, gigabytes: float, on_gpu: bool
) -> None:
    config = config_of(folders[name])
    device = DeviceMemory(gigabytes * 1e9, "a test", on_gpu=on_gpu)
    chosen = with_token_limit(config, device)
    tokens = chosen.train.max_tokens_per_gpu
    assert tokens is not None and SMALLEST <= tokens <= (
        LARGEST_ON_GPU if on_gpu else LARGEST_ON_CPU
    )
    assert tokens & (tokens - 1) == 0, "a power of two"
    phases = [
        one
        for one in MemoryPlan.of(chosen, device).phases
        if one.name in ("train", "log-probs", "all")
    ]
    assert tokens == SMALLEST or all(one.total <= device.nbytes for one in phases)
    more = DeviceMemory(2 * device.nbytes, "a test", on_gpu=on_gpu)
    assert (with_token_limit(config, more).train.max_tokens_per_gpu or 0) >= tokens
    assert with_token_limit(chosen, more) == chosen, "a run that goes on keeps its micro-batches"
    assert f"packed up to {tokens:,} tokens" in packing_line(chosen)
    assert chosen.origins["max_tokens_per_gpu"].startswith("derived: the memory plan")


@pytest.mark.parametrize(
    ("words", "dynamic", "tokens"),
    [
        ("", True, LARGEST_ON_CPU),
        ("--max-tokens-per-gpu 777", True, 777),
        ("--use-dynamic-batch-size", True, LARGEST_ON_CPU),
        ("--micro-batch-size 1", False, None),
        ("--micro-batch-size 2", False, None),
        ("--no-use-dynamic-batch-size", False, None),
        ("--micro-batch-size 1 --use-dynamic-batch-size", True, LARGEST_ON_CPU),
    ],
)
def test_what_turns_packing_off(
    folders: dict[str, Path], words: str, dynamic: bool, tokens: int | None
) -> None:
    config = with_token_limit(
        config_of(folders["HuggingFaceTB/SmolLM2-135M"], *words.split()),
        DeviceMemory(64e9, "a test", on_gpu=False),
    )
    assert (config.train.use_dynamic_batch_size, config.train.max_tokens_per_gpu) == (
        dynamic,
        tokens,
    )
    assert ("not packed" in packing_line(config)) is not dynamic


def test_a_flag_that_the_other_makes_useless_is_refused(folders: dict[str, Path]) -> None:
    words = "--micro-batch-size 1 --max-tokens-per-gpu 4096"
    with pytest.raises(UserError, match="has no effect"):
        config_of(folders["HuggingFaceTB/SmolLM2-135M"], *words.split())


def test_a_size_that_packing_makes_useless_is_warned_of(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    words = "--micro-batch-size 2 --use-dynamic-batch-size"
    config = config_of(folders["HuggingFaceTB/SmolLM2-135M"], *words.split())
    assert config.train.use_dynamic_batch_size
    assert "--micro-batch-size has no effect" in caplog.text


def test_resolved_flags_can_be_given_again(folders: dict[str, Path], tmp_path: Path) -> None:
    config: Any = with_token_limit(config_of(folders["HuggingFaceTB/SmolLM2-135M"]))
    config.save(tmp_path / "config.json")
    assert Config.load(tmp_path / "config.json").train == config.train
