"""What a launch says of the kernels that a trainer on GPUs would find."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.run import preflight
from slime.trainer import gpu_kernels
from slime.trainer.gpu_kernels import delta_net_gap, finds_windows
from tests.support.hf_configs import config_of


def install(monkeypatch: pytest.MonkeyPatch, *modules: str, **releases: tuple[int, ...]) -> None:
    """Let these modules, and no others, be installed."""
    monkeypatch.setattr(gpu_kernels, "installed_release", releases.get)
    find = importlib.util.find_spec
    named = ("fla", "tilelang")
    monkeypatch.setattr(
        gpu_kernels.importlib.util,
        "find_spec",
        lambda name, *rest: (
            (object() if name in modules else None) if name in named else find(name, *rest)
        ),
    )
    monkeypatch.setattr(gpu_kernels, "_has_flash4", lambda: "flash_attn" in modules)


@pytest.mark.parametrize(
    ("modules", "major", "triton", "gap"),
    [
        ((), 8, (3, 6, 0), "not installed"),
        (("fla",), 9, (3, 6, 0), "Triton 3.6.0"),
        (("fla",), 9, (3, 4), "Triton 3.4"),
        (("fla",), 9, (3, 3, 1), ""),
        (("fla",), 9, (3, 7, 1), ""),
        (("fla",), 10, (3, 6, 0), ""),
        (("fla", "tilelang"), 9, (3, 6, 0), ""),
    ],
)
def test_where_delta_nets_find_no_kernels(
    modules: tuple[str, ...],
    major: int,
    triton: tuple[int, ...],
    gap: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, *modules, triton=triton)
    said = delta_net_gap({major})
    assert gap in said and bool(said) == bool(gap)


@pytest.mark.parametrize(
    ("torch", "modules", "major", "head_dim", "torch_only", "found"),
    [
        ((2, 12, 0), (), 8, 64, True, True),
        ((2, 11, 0), (), 9, 64, False, False),
        ((2, 11, 0), ("flash_attn",), 9, 64, False, True),
        ((2, 11, 0), ("flash_attn",), 9, 64, True, False),
        ((2, 11, 0), ("flash_attn",), 9, 256, False, True),
        ((2, 11, 0), ("flash_attn",), 9, 264, False, False),
        ((2, 11, 0), ("flash_attn",), 10, 256, False, False),
        ((2, 11, 0), ("flash_attn",), 8, 64, False, False),
    ],
)
def test_where_windows_find_a_kernel(
    torch: tuple[int, ...],
    modules: tuple[str, ...],
    major: int,
    head_dim: int,
    torch_only: bool,
    found: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, *modules, torch=torch)
    assert finds_windows({major}, head_dim, torch_only=torch_only) == found


def config_for(folder: Path, family: str, flags: dict[str, Any], **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config_of(family, **fields)))
    return make_config(hf_checkpoint=str(folder), num_rollout=1, bf16=True, **flags)


@pytest.mark.parametrize(
    ("family", "fields", "flags", "gpus", "refused"),
    [
        ("mistral", {"sliding_window": 8}, {}, 1, True),
        ("mistral", {"sliding_window": None}, {}, 1, False),
        ("mistral", {"sliding_window": 8}, {}, 0, False),
        ("mistral", {"sliding_window": 8}, {"debug_rollout_only": True}, 1, False),
        ("gpt_oss", {}, {}, 1, False),  # sinks have a kernel of their own
    ],
)
def test_windows_are_refused_before_the_launch(
    family: str,
    fields: dict[str, Any],
    flags: dict[str, Any],
    gpus: int,
    refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_for(tmp_path, family, flags, **fields)
    install(monkeypatch, torch=(2, 11, 0))
    monkeypatch.setattr(preflight, "num_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "gpu_majors", lambda: {9})
    if not refused:
        preflight.check_windows(config)
        return
    with pytest.raises(UserError, match="attends to whole sequences only") as error:
        preflight.check_windows(config)
    assert "see 8 tokens" in error.value.why


@pytest.mark.parametrize(
    ("family", "gpus", "warns"),
    [("qwen3_next", 1, True), ("qwen3_next", 0, False), ("llama", 1, False)],
)
def test_slow_delta_nets_are_told_before_the_launch(
    family: str,
    gpus: int,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_for(tmp_path, family, {})
    install(monkeypatch)
    monkeypatch.setattr(preflight, "num_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "gpu_majors", lambda: {9})
    preflight.warn_of_slow_delta_nets(config)
    assert [("slime-rl[delta-net]" in line) for line in caplog.messages] == [True] * warns
