"""Optimizer states in host memory: the same bits as an optimizer whose states stay on the
device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.directory import iteration_dir
from slime.config import make_config
from slime.config.flag import option_of
from slime.errors import UserError
from slime.trainer.megatron import device, te_layers
from tests.support.megatron_jobs import everything, make_model, parameters, single
from tests.support.streamed_jobs import all_states, make_step, train
from tests.support.trainer_ranks import Pools

device.install()  # before anything imports megatron

STREAMED = {"optimizer_cpu_offload": True}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "qwen3", {}),
    "dp2": (2, "qwen3", {}),
    "tp2": (2, "qwen3", {"tensor_model_parallel_size": 2}),
    "ep2": (2, "qwen3_moe", {"expert_model_parallel_size": 2}),
}
COMMON: dict[str, Any] = {
    "bf16": True,
    "weight_decay": 0.1,
    "lr": 0.01,
    "lr_decay_style": "linear",
    "lr_warmup_iters": 2,
    "clip_grad": 0.5,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family) for family in ("qwen3", "qwen3_moe")}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert repr(ours["outcomes"]) == repr(theirs["outcomes"])  # one norm is NaN
    assert ours["rates"] == theirs["rates"]
    for mine, other in zip(ours["weights"], theirs["weights"], strict=True):
        assert torch.equal(mine, other)
    for (name, mine), (other_name, other) in zip(ours["states"], theirs["states"], strict=True):
        assert name == other_name and torch.equal(mine, other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_bits(ranks: Pools, models: dict[str, Path], layout: str) -> None:
    size, family, flags = LAYOUTS[layout]
    plain, streamed = (
        ranks.run(size, train, models[family], {**COMMON, **flags, **more}, 4, 0, 2)
        for more in ({}, STREAMED)
    )
    for ours, theirs in zip(streamed, plain, strict=True):
        assert_same(ours, theirs)
        assert [applied for _, applied in ours["outcomes"]] == [True, True, False, True]


@pytest.mark.parametrize(
    "flags",
    [
        {"bf16": False},
        {"accumulate_allreduce_grads_in_fp32": False},
        {"optimizer_offload_fraction": 0.5},
        {"optimizer_offload_fraction": 0.0},
        {"fp16": True, "bf16": False, "fp32": False},
    ],
    ids=["float32", "bf16 gradients", "half on the host", "nothing on the host", "loss scale"],
)
def test_same_bits_with(ranks: Pools, models: dict[str, Path], flags: dict[str, Any]) -> None:
    common = {name: value for name, value in flags.items() if "fraction" not in name}
    [plain] = ranks.run(1, train, models["qwen3"], {**COMMON, **common})
    [streamed] = ranks.run(1, train, models["qwen3"], {**COMMON, **STREAMED, **flags})
    assert_same(streamed, plain)


def test_moments_alone_can_be_streamed(ranks: Pools, models: dict[str, Path]) -> None:
    flags = {**COMMON, "expert_model_parallel_size": 2}
    plain, streamed = (
        ranks.run(2, train, models["qwen3_moe"], {**flags, **more})
        for more in ({}, {"offload_optimizer_states": True})
    )
    for ours, theirs in zip(streamed, plain, strict=True):
        assert_same(ours, theirs)


def test_adapters_alone(ranks: Pools, models: dict[str, Path]) -> None:
    flags = {**COMMON, "lora_rank": 4}
    [plain], [streamed] = (
        ranks.run(1, train, models["qwen3"], {**flags, **more}) for more in ({}, STREAMED)
    )
    assert_same(streamed, plain)


# -- checkpoints -----------------------------------------------------------------------------------


def test_checkpoints_are_the_same_bytes_and_load_either_way(
    ranks: Pools, models: dict[str, Path], tmp_path: Path
) -> None:
    """Written at one layout and read at another, with the states on either side."""
    model = models["qwen3_moe"]
    written = {"expert_model_parallel_size": 2}
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "streamed": STREAMED}
    for name, more in kinds.items():
        flags = {**COMMON, **written, **more, "save": str(tmp_path / name)}
        ranks.run(2, train, model, flags, 3)
    plain, streamed = (everything(iteration_dir(tmp_path / name, 3), tmp_path) for name in kinds)
    assert plain.keys() == streamed.keys()
    assert any(".exp_avg_sq." in name for name in plain)
    assert all(torch.equal(plain[name], streamed[name]) for name in plain)

    read = {"tensor_model_parallel_size": 2}
    [on, *_], [off, *_], [neither, *_] = (
        ranks.run(2, train, model, {**COMMON, **read, **more, "load": str(tmp_path / source)}, 2, 3)
        for source, more in (("plain", STREAMED), ("streamed", {}), ("plain", {}))
    )
    assert_same(on, neither)
    assert_same(off, neither)


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    ranks: Pools, models: dict[str, Path], tmp_path: Path
) -> None:
    flags = {**COMMON, **STREAMED, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    [whole] = ranks.run(1, train, models["qwen3"], flags, 5)
    ranks.run(1, train, models["qwen3"], {**flags, "save": str(tmp_path / "save")}, 3)
    [resumed] = ranks.run(
        1, train, models["qwen3"], {**flags, "load": str(tmp_path / "save")}, 2, 3
    )
    whole["outcomes"] = whole["outcomes"][3:]
    assert_same(resumed, whole)


@pytest.mark.parametrize(
    ("written", "read"), [("bf16", "fp32"), ("fp32", "bf16")], ids=["narrow", "wide"]
)
def test_moments_are_read_in_another_dtype(
    ranks: Pools, models: dict[str, Path], tmp_path: Path, written: str, read: str
) -> None:
    flags = {**COMMON, **STREAMED, "save": str(tmp_path / "save")}
    chosen = [{"exp_avg_dtype": one, "exp_avg_sq_dtype": one} for one in (written, read)]
    [before] = ranks.run(1, train, models["qwen3"], {**flags, **chosen[0]}, 2)
    more = {**COMMON, **STREAMED, **chosen[1], "load": str(tmp_path / "save")}
    [after] = ranks.run(1, train, models["qwen3"], more, 0)
    for (name, old), (_, new) in zip(before["states"], after["states"], strict=True):
        assert torch.equal(old.to(new.dtype), new), name


# -- less than float32 -----------------------------------------------------------------------------


def test_moments_in_bf16_follow_shrinking_gradients() -> None:
    """Rounded to nearest, the second moment would stay where the first gradients put it."""
    from slime.trainer.megatron.streamed import Member, StreamedStates

    def trained(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        gradients = torch.Generator().manual_seed(0)
        weights = torch.nn.Parameter(torch.zeros(500))
        inner = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.999), fused=True, foreach=False)
        dtypes = {"exp_avg": dtype, "exp_avg_sq": dtype}
        StreamedStates.install(inner, [Member(weights, 0)], None, dtypes)
        for step in range(1500):
            scale = 0.01 ** (step / 1500)
            weights.grad = scale * torch.randn(500, generator=gradients)
            inner.step()
        return {name: value.float() for name, value in inner.state[weights].items()}

    exact = trained(torch.float32)
    rounded = trained(torch.bfloat16)
    assert rounded["step"] == exact["step"] == 1500
    assert (rounded["exp_avg_sq"] / exact["exp_avg_sq"]).mean().item() == pytest.approx(1, abs=0.05)
    error = (rounded["exp_avg"] - exact["exp_avg"]).norm() / exact["exp_avg"].norm()
    assert error < 0.02


def test_rounding_keeps_the_mean() -> None:
    from slime.trainer.megatron.streamed import round_stochastically

    values = torch.full((100_000,), 1.0 + 1 / 512)  # bfloat16 has 1 and 1 + 1/128
    rounded = round_stochastically(values, torch.Generator().manual_seed(0))
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert rounded.float().mean().item() == pytest.approx(values[0].item(), abs=2e-4)
    exact = torch.tensor([0.0, -1.5, 3.0])
    assert torch.equal(round_stochastically(exact, torch.Generator()).float(), exact)


# -- asleep ----------------------------------------------------------------------------------------


def test_sleeping_copies_no_state(models: dict[str, Path]) -> None:
    from slime.trainer.megatron.offload import Offloader, torch_optimizers
    from slime.trainer.megatron.streamed import states_of

    flags = {**COMMON, **STREAMED, "optimizer_offload_fraction": 0.7}
    with single(models["qwen3"], **flags) as backend:
        make_step(backend, 0)
        [inner] = torch_optimizers(backend.optimizer)
        states = states_of(inner)
        assert states is not None
        places = {name: flat.data_ptr() for name, flat in states.host.items()}
        before = [*all_states(backend), *(("weights", one) for one in parameters(backend))]
        offloader = Offloader(backend.model_chunks, backend.optimizer, pin=False)
        weights = sum(one.nbytes for one in parameters(backend))
        freed = offloader.sleep()
        numel = weights // 2
        streamed = states.host["exp_avg"].numel()
        expected = weights + 4 * numel + 12 * (numel - streamed)  # weights, gradients, the rest
        assert freed == pytest.approx(expected, rel=0.02) and streamed > 0.6 * numel
        assert {name: flat.data_ptr() for name, flat in states.host.items()} == places
        offloader.wake()
        after = [*all_states(backend), *(("weights", one) for one in parameters(backend))]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True))
        make_step(backend, 1)


def test_reset_forgets_moments_and_steps(models: dict[str, Path]) -> None:
    from slime.trainer.megatron.optimizer import reset_moments

    with single(models["qwen3"], **COMMON, **STREAMED) as backend:
        make_step(backend, 0)
        reset_moments(backend.optimizer)
        kept = {name for name, tensor in all_states(backend) if tensor.any()}
        assert kept == {"param"}
        make_step(backend, 1)


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"exp_avg_dtype": "fp8"}, "--exp-avg-dtype fp8 with --optimizer-cpu-offload"),
        ({"exp_avg_sq_dtype": "fp16"}, "streamed states can be fp32 or bf16 there"),
        (
            {"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"},
            "--main-params-dtype fp16 with --optimizer-cpu-offload",
        ),
        ({"optimizer": "sgd"}, "--optimizer-cpu-offload has no effect without --optimizer adam"),
        ({"use_distributed_optimizer": False}, "without --use-distributed-optimizer"),
        ({"fp8_format": "hybrid", "fp8_param_gather": True}, "--fp8-param-gather with"),
        ({"offload_optimizer_states": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_streamed_is_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config(**STREAMED, **flags)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "flag",
    [
        "overlap_cpu_optimizer_d2h_h2d",
        "use_precision_aware_optimizer",
        "use_torch_optimizer_for_cpu_offload",
    ],
)
def test_flags_of_the_cpu_optimizer_warn(flag: str) -> None:
    config = make_config(**STREAMED, **{flag: True})
    assert any(f"{option_of(flag)} has no effect" in warning for warning in config.warnings)
    te_layers.check(config)  # none of them needs Transformer Engine


def test_dtypes_of_moments_need_an_optimizer_that_reads_them() -> None:
    with pytest.raises(UserError, match="--optimizer-cpu-offload"):
        make_config(exp_avg_dtype="bf16")


# -- streams ---------------------------------------------------------------------------------------


def test_each_hand_over_between_streams_waits_for_its_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slot is loaded, updated and returned on three streams; none begins before the one before
    it, and a slot is loaded again only after it was returned."""
    from slime.trainer.megatron.streamed import ALIGNMENT, StreamedStates

    log: list[tuple[str, str, int]] = []
    names = iter(["to device", "to host"])

    class Stream:
        def __init__(self, name: str | None = None) -> None:
            self.name = name or next(names)

        def wait_event(self, event: Any) -> None:
            log.append(("wait", self.name, id(event)))

        def wait_stream(self, stream: Any) -> None:
            log.append(("wait for stream", self.name, id(stream)))

    class Event:
        def record(self, stream: Stream) -> None:
            log.append(("record", stream.name, id(self)))

    here = Stream("update")
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: here)
    monkeypatch.setattr(StreamedStates, "bucket", ALIGNMENT)
    weights = torch.nn.Parameter(torch.zeros(5 * ALIGNMENT))
    inner = torch.optim.AdamW([weights], lr=1e-3, fused=True, foreach=False)
    StreamedStates.install(inner)
    weights.grad = torch.ones_like(weights)
    inner.step()

    first, *steps, last = log
    assert first[:2] == ("wait for stream", "to device") and last[1] == "update"
    buckets = [steps[start : start + 6] for start in range(0, len(steps), 6)]
    assert len(buckets) == 5
    returned_by_slot: dict[int, int] = {}
    for number, bucket in enumerate(buckets):
        assert [entry[:2] for entry in bucket] == [
            ("wait", "to device"),
            ("record", "to device"),
            ("wait", "update"),
            ("record", "update"),
            ("wait", "to host"),
            ("record", "to host"),
        ]
        free, loaded, loaded_too, updated, updated_too, returned = (entry[2] for entry in bucket)
        assert loaded == loaded_too and updated == updated_too and free == returned
        assert returned_by_slot.setdefault(number % 3, returned) == returned
    assert len(set(returned_by_slot.values())) == 3
