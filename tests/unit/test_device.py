"""The redirect that lets megatron-core run where no GPU is present."""

from __future__ import annotations

import threading

import pytest
import torch

from slime.trainer.megatron import device

device.install()

pytestmark = pytest.mark.skipif(device.has_gpu(), reason="on a GPU nothing is redirected")


def test_every_way_of_saying_gpu_means_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.tensor([1.0], device="cuda:0", pin_memory=True).device.type == "cpu"
    assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.empty(1, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.ones(1).to("cuda").device.type == "cpu"
    x = torch.ones(1)
    assert x.cuda() is x


def test_other_threads_see_it_too() -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(torch.zeros(1, device="cuda").device.type))
    thread.start()
    thread.join(timeout=10)
    assert seen == ["cpu"]


def test_types_are_spelt_as_megatron_compares_them() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    assert isinstance(torch.zeros(1), torch.cuda.FloatTensor)


def test_streams_and_events_are_in_program_order() -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        event.record(stream)
    assert event.query() and stream.query()


def test_rng_tracker_forks_and_restores() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 7)
    torch.manual_seed(1)
    before = torch.rand(1)
    torch.manual_seed(1)
    with tracker.fork("mine"):
        inside = torch.rand(1)
    assert torch.equal(torch.rand(1), before)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), inside)


def test_torchscript_and_dynamo_still_know_the_factories() -> None:
    @torch.jit.script
    def zeros(n: int) -> torch.Tensor:
        return torch.zeros([n])

    assert zeros(3).shape == (3,)
    import torch._dynamo.trace_rules as rules

    assert rules.get_torch_obj_rule_map()


def test_installing_twice_changes_nothing() -> None:
    factory = torch.zeros
    assert device.install() == torch.device("cpu")
    assert torch.zeros is factory


def test_nothing_else_branches_on_compile() -> None:
    assert torch.compile.__module__.startswith("torch")  # put back after megatron was imported


def test_without_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.compiler.is_compiling() else x * 3

    monkeypatch.setattr(device.shutil, "which", lambda name: None)
    try:
        device._run_eagerly_without_compiler()
        assert torch.compile(double, backend="eager")(torch.ones(1)).item() == 3
    finally:
        device._run_eagerly_without_compiler.cache_clear()
        torch.compiler.set_stance("default")
    assert torch.compile(double, backend="eager")(torch.ones(1)).item() == 2
