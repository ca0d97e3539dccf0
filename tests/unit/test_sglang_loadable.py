"""Layers that SGLang repacks after loading take new weights, end as after a start with them, and do
not move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slime.engines.sglang import weight_probe
from slime.engines.sglang.loadable import close_layers, open_layers
from tests.support.quantised_models import same_bits
from tests.support.repacked_layers import Model, UnquantizedLinearMethod, weights

LAYERS = ["fp8", "int4", "experts"]


def computed_with(model: Model) -> dict[str, torch.Tensor]:
    """Parameters, and what layers and schemes hold besides."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    found["int4 workspace"] = model.int4.scheme.workspace
    found["experts workspace"] = model.experts.workspace
    return found


def test_without_opening_a_load_fails_or_ends_in_wrong_places() -> None:
    model, new = Model(weights(0)), weights(1)
    for name in ("fp8.weight", "int4.weight_packed"):
        with pytest.raises(AttributeError, match="weight_loader"):
            model.load_weights([(name, new[name])])
    with pytest.raises(AssertionError):
        model.load_weights([("experts.w13_weight_packed", new["experts.w13_weight_packed"])])


@pytest.fixture(params=[torch.no_grad, torch.inference_mode])
def as_the_scheduler(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.usefixtures("as_the_scheduler")
def test_opened_loaded_and_closed_it_is_as_started_with_the_new_weights(parts: int) -> None:
    with torch.inference_mode(False):
        model, new = Model(weights(0)), weights(1)
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in computed_with(model).items()}
    for _ in range(2):  # pushes follow each other
        assert open_layers(model) == LAYERS
        items = list(new.items())
        for first in range(0, len(items), parts):
            model.load_weights(items[first : first + parts])
        # as after a sleep, from which memory comes back with anything
        model.int4.scheme.workspace.fill_(5)
        assert close_layers(model) == LAYERS
        expected = computed_with(Model(new))
        for name, tensor in computed_with(model).items():
            if name.startswith("norm"):
                continue
            assert same_bits(tensor, expected[name]), name
            assert tensor.stride() == expected[name].stride()
            assert tensor is before[name][0] and tensor.data_ptr() == before[name][1], (
                f"{name} has moved"
            )
        new = weights(2)
    assert close_layers(model) == []


def test_weights_are_loaded_into_the_memory_that_they_are_computed_from() -> None:
    model = Model(weights(0))
    places = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    open_layers(model)
    for name in (
        "fp8.weight",
        "int4.weight_packed",
        "int4.weight_scale",
        "experts.w13_weight_packed",
    ):
        assert model.get_parameter(name).untyped_storage().data_ptr() in places, name


def test_a_push_that_broke_off_is_begun_again() -> None:
    model, new = Model(weights(0)), weights(1)
    open_layers(model)
    model.load_weights([("int4.weight_packed", weights(3)["int4.weight_packed"])])
    open_layers(model)
    model.load_weights(new.items())
    close_layers(model)
    assert all(same_bits(tensor, computed_with(Model(new))[name])
               for name, tensor in computed_with(model).items() if "norm" not in name)  # fmt: skip


def test_what_sglang_processes_itself_behind_reading_files_waits_until_layers_are_closed() -> None:
    """What arrived is compared first, in the form in which it was sent."""
    model, new = Model(weights(0)), weights(1)
    open_layers(model)
    model.load_weights(new.items())
    model.process()
    for name in ("fp8.weight", "int4.weight_packed", "experts.w13_weight_packed"):
        assert same_bits(model.get_parameter(name), new[name]), name
    close_layers(model)
    expected = computed_with(Model(new))
    assert all(
        same_bits(tensor, expected[name])
        for name, tensor in computed_with(model).items()
        if "norm" not in name
    )
    assert not any(
        "process_weights_after_loading" in vars(module.quant_method) for module in model.quantised()
    )


def test_scales_of_the_cache_come_back_with_a_push() -> None:
    """SGLang takes them from files alone; after a sleep their memory holds anything, which its
    method refuses."""
    model, new = Model(weights(0)), weights(1)
    scale = model.attention.k_scale
    with torch.no_grad():
        scale.fill_(float("nan"))
    open_layers(model)
    model.load_weights(new.items())
    model.process()
    close_layers(model)
    assert (
        model.attention.k_scale is scale and scale.item() == model.attention.v_scale.item() == 1.0
    )
    model.process_attention()


def test_what_kernels_do_without_takes_no_memory_while_layers_are_open() -> None:
    model = Model(weights(0))
    open_layers(model)
    order = model.get_parameter("experts.w13_weight_g_idx")
    assert order.shape == (2, 32) and order.untyped_storage().nbytes() == order.element_size()


def test_a_method_that_nobody_tried_is_refused_before_anything_changes() -> None:
    class AWQLinearMethod(UnquantizedLinearMethod):
        pass

    model = Model(weights(0))
    model.int4.quant_method = AWQLinearMethod()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match="layers of AWQLinearMethod cannot be made loadable"):
        open_layers(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_what_comes_out_otherwise_than_at_the_start_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model(weights(0))
    open_layers(model)
    model.load_weights(weights(1).items())
    monkeypatch.setattr(
        type(model.fp8.quant_method), "process_weights_after_loading", lambda self, layer: None
    )
    with pytest.raises(
        ValueError,
        match=r"fp8 could not be closed: .*weight came out as torch.float8_e4m3fn \(48, 32\)",
    ):
        close_layers(model)


def test_the_probe_opens_and_closes_and_reports_what_it_cannot() -> None:
    model = Model(weights(0))

    def ask(action: str) -> Any:
        return weight_probe._answer(model, {"action": action})

    assert ask("open") == {"layers": LAYERS, "marked": 0}
    model.load_weights(weights(1).items())
    assert ask("close") == {"layers": LAYERS}
    assert ask("close") == {"layers": []}
    model.fp8.quant_method = type("GGUFLinearMethod", (), {})()
    assert "GGUFLinearMethod" in ask("open")["error"]
