"""Which quantised models are refused for SGLang, by name, and which go which way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config
from slime.embedded.weight_update import ABILITIES
from slime.engines.sglang import quantised_routes
from slime.engines.sglang.quantised_routes import QuantisedRoute, form_of, quantised_route
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.weights import quantised_launch
from slime.weights.quantised_launch import check_route
from slime.weights.route import find_route, routes_of
from tests.support.hf_configs import config_of as hf_config_of

BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
TENSORS = {"quantization_config": {"quant_method": "fp8"}}
TRITON = {"version": "0.5.16", "fp8_gemm_runner_backend": "triton"}


def groups(size: int, symmetric: bool = True) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": size,
        "symmetric": symmetric,
    }
    scheme = {"targets": ["Linear"], "weights": weights}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
    }
    return {"quantization_config": config}


@pytest.mark.parametrize(
    ("quantisation", "form"),
    [
        (Quantisation("compressed-tensors", Int4(32)), "INT4 in groups of 32, symmetric"),
        (Quantisation("fp8", Fp8()), "FP8 in blocks of 128×128"),
        (Quantisation("fp8", Fp8((0, 0), "weight_scale")), "FP8 by tensor"),
        (
            Quantisation("compressed-tensors", Fp8((0, 0), "weight_scale")),
            "FP8 by tensor of compressed-tensors",
        ),
    ],
)
def test_a_format_has_a_name_of_its_own(quantisation: Quantisation, form: str) -> None:
    assert form_of(quantisation) == form


def test_plain_weights_need_no_route() -> None:
    assert quantised_route({"model_type": "qwen3"}, {"version": "0.4.0"}, "disk") is None


@pytest.mark.parametrize(
    "config", [BLOCKS, TENSORS, groups(128)], ids=["blocks", "tensors", "INT4"]
)
def test_what_was_measured_goes_into_open_layers(config: dict[str, Any]) -> None:
    route = quantised_route({"model_type": "qwen3", **config}, TRITON, "ipc")
    assert route is not None and route.opens
    by_flag = {"version": "0.5.16", "fp8_gemm_backend": "triton", "tp_size": 1}
    assert quantised_route(config, by_flag, "ipc") == route


def test_fp8_in_blocks_goes_by_handles_to_engines_of_two_gpus() -> None:
    two = {**TRITON, "tp_size": 2}
    assert quantised_route(BLOCKS, two, "ipc") is not None
    for config, kind in ((BLOCKS, "broadcast"), (TENSORS, "ipc"), (groups(128), "ipc")):
        with pytest.raises(UserError, match="with tp_size 2"):
            quantised_route(config, two, kind)


@pytest.mark.parametrize("config", [BLOCKS, groups(128)], ids=["blocks", "INT4"])
def test_engines_on_gpus_of_their_own_take_what_was_measured(config: dict[str, Any]) -> None:
    route = quantised_route(config, TRITON, "broadcast")
    assert route is not None and route.opens


@pytest.mark.parametrize(
    ("config", "engine", "kind", "said"),
    [
        (
            TENSORS,
            TRITON,
            "broadcast",
            r"by broadcast(.|\n)*not tried(.|\n)*by handles \(--colocate\) alone",
        ),
        (BLOCKS, TRITON, "disk", r"by --update-weight-transport disk(.|\n)*not tried"),
        (
            BLOCKS,
            {"version": "0.5.15"},
            "ipc",
            r"FP8 in blocks of 128×128, quant(.|\n)*0\.5\.15(.|\n)*other versions",
        ),
        (
            BLOCKS,
            {"version": "0.5.16"},
            "ipc",
            r"fp8_gemm_backend auto(.|\n)*--sglang-fp8-gemm-backend triton",
        ),
        (
            TENSORS,
            {**TRITON, "fp8_gemm_runner_backend": "deep_gemm"},
            "ipc",
            "fp8_gemm_backend deep_gemm",
        ),
        (
            groups(128),
            {"version": "0.5.16", "tp_size": 4},
            "ipc",
            r"tp_size 4(.|\n)*--rollout-num-gpus-per-engine 1",
        ),
        (
            {**TENSORS, "num_experts": 8},
            TRITON,
            "ipc",
            r"and experts(.|\n)*a second time(.|\n)*--block_size 128 128",
        ),
        (groups(32), TRITON, "ipc", r"INT4 in groups of 32, symmetric(.|\n)*not tried"),
        (
            groups(128, symmetric=False),
            TRITON,
            "ipc",
            r"INT4 in groups of 128, asymmetric(.|\n)*not tried",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            TRITON,
            "ipc",
            "64×64",
        ),
        ({**BLOCKS, "kv_lora_rank": 512}, TRITON, "ipc", "latent attention"),
        ({"quantization_config": {"quant_method": "awq"}}, TRITON, "ipc", "quant_method 'awq'"),
    ],
)
def test_what_nobody_tried_is_refused_by_name(
    config: dict[str, Any], engine: dict[str, Any], kind: str, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        quantised_route(config, engine, kind)


def test_engines_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"FP8 by tensor": QuantisedRoute(False, needs={"ipc": {}})}
    monkeypatch.setattr(quantised_routes, "ROUTES", {**quantised_routes.ROUTES, "0.5.15": other})
    same = {"a": TRITON, "b": {**TRITON, "version": "0.5.16.post1"}}
    found = routes_of(same, TENSORS, "ipc")
    assert found is not None and found.opens
    with pytest.raises(UserError, match="take quantised weights in different ways"):
        routes_of({**same, "c": {"version": "0.5.15"}}, TENSORS, "ipc")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"colocate": True}, "--sglang-fp8-gemm-backend triton"),
        (
            {"sglang_fp8_gemm_backend": "triton"},
            r"by broadcast(.|\n)*--colocate(.|\n)*--rollout-engine embedded",
        ),
        (
            {
                "colocate": True,
                "sglang_fp8_gemm_backend": "triton",
                "rollout_num_gpus_per_engine": 4,
                "actor_num_gpus_per_node": 4,
            },
            "tp_size 4",
        ),
        ({"colocate": True, "sglang_fp8_gemm_backend": "triton"}, None),
        ({"groups": [{"num_gpus": 1, "overrides": {"fp8_gemm_backend": "triton"}}]}, None),
        (
            {
                "groups": [
                    {"num_gpus": 1, "overrides": {"fp8_gemm_backend": "triton"}},
                    {"num_gpus": 1},
                ]
            },
            "backend auto",
        ),
        (
            {
                "groups": [
                    {
                        "num_gpus": 4,
                        "num_gpus_per_engine": 4,
                        "overrides": {"fp8_gemm_backend": "triton"},
                    }
                ]
            },
            "tp_size 4",
        ),
        ({"debug_rollout_only": True, "rollout_num_gpus": 1}, None),
        ({"debug_train_only": True, "load_debug_rollout_data": "{rollout_id}.pt"}, None),
        ({"loss_type": "sft_loss"}, None),
    ],
)
def test_a_launch_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], said: str | None
) -> None:
    monkeypatch.setattr(quantised_launch, "installed_version", lambda: "0.5.16")
    (tmp_path / "config.json").write_text(json.dumps({**hf_config_of("qwen3"), **TENSORS}))
    words: dict[str, Any] = {
        "hf_checkpoint": str(tmp_path),
        "rollout_engine": "sglang",
        "rollout_batch_size": 4,
        "num_rollout": 1,
    }
    flags = dict(flags)
    if groups := flags.pop("groups", None):
        (tmp_path / "groups.yaml").write_text(
            json.dumps({"sglang": [{"name": "policy", "server_groups": groups}]})
        )
        num_gpus = sum(group["num_gpus"] for group in groups)
        words |= {"colocate": True, "sglang_config": str(tmp_path / "groups.yaml")}
        words |= {"actor_num_gpus_per_node": num_gpus, "rollout_num_gpus": num_gpus}
    config = make_config(**words, **flags)
    if said is None:
        check_route(config)
        return
    with pytest.raises(UserError, match=said):
        check_route(config)


@pytest.mark.parametrize("more", [{}, {"debug_rollout_only": True}])
def test_an_output_layer_that_sglang_holds_plain_is_refused(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    model = hf_config_of("qwen3") | {"tie_word_embeddings": False}
    words: dict[str, Any] = {
        "hf_checkpoint": str(tmp_path),
        "rollout_batch_size": 2,
        "num_rollout": 1,
        **more,
    }
    words |= (
        {"rollout_num_gpus": 1} if more else {"colocate": True, "sglang_fp8_gemm_backend": "triton"}
    )
    rules = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp.gate_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(model | {"quantization_config": rules}))
    with pytest.raises(
        UserError, match=r"output layer \(lm_head\) in FP8 by tensor(.|\n)*drop their scales"
    ):
        check_route(make_config(**words, rollout_engine="sglang"))
    if not more:
        del words["sglang_fp8_gemm_backend"]
    check_route(make_config(**words))  # the embedded engine computes with it


def test_engines_of_another_dtype_than_flags_say_are_refused(tmp_path: Path) -> None:
    """The trainer would round to other numbers than pushes bring."""
    (tmp_path / "config.json").write_text(json.dumps({**hf_config_of("qwen3"), **TENSORS}))
    config = make_config(
        hf_checkpoint=str(tmp_path),
        rollout_engine="embedded",
        rollout_batch_size=2,
        num_rollout=1,
        bf16=True,
    )

    class Fleet:
        urls = ("http://127.0.0.1:1",)

        def __init__(self, dtype: str) -> None:
            self._dtype = dtype

        def get(self, path: str, timeout: float) -> list[dict[str, Any]]:
            return [{"abilities": ABILITIES.to_json(), "device": "cpu", "dtype": self._dtype}]

    assert (
        find_route(config, Fleet("bfloat16"), tmp_path, on_this_node=True).dtype == torch.bfloat16
    )  # type: ignore[arg-type]
    with pytest.raises(UserError, match="weights of float16, and the trainer those of bfloat16"):
        find_route(config, Fleet("float16"), tmp_path, on_this_node=True)  # type: ignore[arg-type]
