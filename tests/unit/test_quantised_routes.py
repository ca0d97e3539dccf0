"""Which quantised models are refused for SGLang, by name, and which go which way once a route is in the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime import preflight
from slime.config import make_config
from slime.engines.sglang import quantised_routes
from slime.engines.sglang.quantised_routes import QuantisedRoute, form_of, quantised_route
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.weights.route import routes_of

BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
TENSORS = {"quantization_config": {"quant_method": "fp8"}}
KNOWN = {"0.5.16": {"FP8 by block": QuantisedRoute(opens=False), "FP8 by tensor": QuantisedRoute(opens=True)}}


@pytest.mark.parametrize(("quantisation", "form"), [
    (Quantisation("compressed-tensors", Int4(32)), "INT4"),
    (Quantisation("compressed-tensors", Int4(32, False)), "INT4, asymmetric"),
    (Quantisation("fp8", Fp8()), "FP8 by block"),
    (Quantisation("fp8", Fp8((0, 0), "weight_scale")), "FP8 by tensor"),
    (Quantisation("compressed-tensors", Fp8((1, 0), "weight_scale")), "FP8 by row of compressed-tensors"),
])  # fmt: skip
def test_a_format_has_a_name_and_without_an_entry_a_reason(quantisation: Quantisation, form: str) -> None:
    assert form_of(quantisation) == form


def test_plain_weights_need_no_route() -> None:
    assert quantised_route({"model_type": "qwen3"}, "0.4.0") is None


@pytest.mark.parametrize(("config", "version", "said"), [
    (BLOCKS, "0.5.15", r"FP8 by block, quant(.|\n)*SGLang 0\.5\.15(.|\n)*other versions of SGLang alone"),
    ({"quantization_config": {"quant_method": "awq"}}, "0.5.16", "quant_method 'awq'"),
])  # fmt: skip
def test_what_nobody_tried_is_refused_by_name(config: dict[str, Any], version: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        quantised_route(config, version)


def test_every_entry_is_a_route_or_a_reason() -> None:
    for forms in quantised_routes.ROUTES.values():
        for found in forms.values():
            assert isinstance(found, QuantisedRoute) or found


def test_engines_must_agree_and_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised_routes, "ROUTES", {**KNOWN, "0.5.15": {"FP8 by tensor": QuantisedRoute(False)}})
    same = {"a": {"version": "0.5.16"}, "b": {"version": "0.5.16.post1"}}
    assert routes_of(same, TENSORS, "ipc") == QuantisedRoute(opens=True)
    assert routes_of(same, BLOCKS, "broadcast") == QuantisedRoute(opens=False)
    with pytest.raises(UserError, match="--update-weight-transport disk does not go with quantised weights in SGLang"):
        routes_of(same, TENSORS, "disk")
    with pytest.raises(UserError, match="take quantised weights in different ways"):
        routes_of({**same, "c": {"version": "0.5.15"}}, TENSORS, "ipc")


def test_a_launch_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "installed_version", lambda: "0.5.16")
    monkeypatch.setattr(quantised_routes, "ROUTES", {"0.5.16": {"FP8 by tensor": "its scales are lost"}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **TENSORS}))

    def look(**flags: Any) -> None:
        config = make_config(hf_checkpoint=str(tmp_path), rollout_batch_size=1, num_rollout=1, **flags)
        preflight.check_ignore_list(config)

    with pytest.raises(UserError, match=r"FP8 by tensor(.|\n)*its scales are lost(.|\n)*--rollout-engine embedded"):
        look(rollout_engine="sglang")
