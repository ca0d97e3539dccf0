"""The canary: engines that compute something else than the trainer are found, sound ones are
not."""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.checkpoints.quantised_files import quantise_directory
from slime.cluster.gpu_memory import GpuMemoryOwner
from slime.cluster.run_cluster import Cluster
from slime.cluster.weight_push import WeightPush
from slime.config import make_config
from slime.embedded.generate_request import RequestLimits, parse_generate
from slime.embedded.generate_routes import Answer
from slime.embedded.scheduler import Scheduler
from slime.embedded.weight_update import ABILITIES
from slime.engines.api import EngineError
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.weights.canary import Canary, Difference, canary_tokens
from tests.support.embedded_models import (
    EOS,
    SHAPES,
    VOCAB,
    make_scheduler,
    no_adapters,
    run,
    save_tiny_model,
)
from tests.support.megatron_jobs import single

MEAN, LARGEST = "train/canary_logprob_abs_diff", "train/canary_logprob_abs_diff_max"


class Fleet:
    """Engines that answer with given log-probs."""

    def __init__(self, *said: list[float], **info: Any) -> None:
        self.said, self.info = said, {"dtype": "float32"} | info
        self.urls = tuple(f"http://engine-{number}" for number in range(len(said)))
        self.bodies: list[dict[str, Any]] = []

    def get(self, path: str, timeout: float) -> list[dict[str, Any]]:
        assert path == "/server_info"
        return [self.info] * len(self.urls)

    def post(self, path: str, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        assert path == "/generate"
        self.bodies.append(body)
        return [self.answer(said, body["input_ids"]) for said in self.said]

    @staticmethod
    def answer(said: list[float], tokens: list[int]) -> dict[str, Any]:
        entries = [[value, token, None] for value, token in zip([None, *said], tokens, strict=True)]
        return {"meta_info": {"input_token_logprobs": entries}}


class EmbeddedEngine(Fleet):
    """One embedded engine, in this process."""

    def __init__(self, model: Path, dtype: str = "float32") -> None:
        super().__init__([], dtype=dtype, abilities=ABILITIES.to_json())
        self.scheduler: Scheduler = make_scheduler(model, dtype=dtype)
        self.limits = RequestLimits(
            VOCAB, 256, frozenset({EOS}), None, random.Random(0), no_adapters()
        )

    def post(self, path: str, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        [job] = parse_generate(body, self.limits).jobs
        run(self.scheduler, [job.sequence])
        return [Answer(job, None).final()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {shape: save_tiny_model(folder / shape, shape) for shape in SHAPES}


@pytest.fixture(scope="module")
def config_json(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path]
) -> Callable[..., str]:
    """``config_json(name=value)``: a directory with nothing but a config, changed like this."""

    def write(**changes: Any) -> str:
        folder = tmp_path_factory.mktemp("config")
        known = json.loads((models["llama"] / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(known | changes))
        return str(folder)

    return write


def canary_of(fleet: Fleet, model: str | Path, expected: list[float], **flags: Any) -> Canary:
    precision = {} if flags.get("bf16") else {"fp32": True}
    canary = Canary(make_config(hf_checkpoint=str(model), **precision, **flags), fleet)  # type: ignore[arg-type]
    canary.expected = expected
    return canary


# -- the tokens ------------------------------------------------------------------------------------


@given(vocab=st.integers(32, 300_000), length=st.integers(1, 32))
def test_the_tokens_are_spread_and_repeat(vocab: int, length: int) -> None:
    whole = canary_tokens(vocab)
    assert canary_tokens(vocab, length) == whole[:length]
    assert whole[:16] == whole[16:] and len(set(whole)) == 16
    assert vocab // 32 <= min(whole) and max(whole) <= 31 * vocab // 32
    for shards in (2, 4, 8):
        assert {token * shards // vocab for token in whole} == set(range(shards))


def test_the_canary_fits_a_short_context(models: dict[str, Path]) -> None:
    assert len(canary_of(Fleet([0.0]), models["llama"], []).tokens) == 32
    assert (
        len(canary_of(Fleet([0.0]), models["llama"], [], rollout_max_context_len=20).tokens) == 19
    )


# -- the judgement ---------------------------------------------------------------------------------

EXPECTED = [-0.5 * (number % 7) - 1 for number in range(31)]


def moved(at: int, by: float) -> list[float]:
    return [value + by * (number == at) for number, value in enumerate(EXPECTED)]


@settings(max_examples=50)
@given(
    at=st.integers(0, 30),
    by=st.floats(0.0011, 50),
    sign=st.sampled_from([1, -1]),
    engine=st.integers(0, 2),
)
def test_in_float32_one_token_is_enough(
    models: dict[str, Path], at: int, by: float, sign: int, engine: int
) -> None:
    said = [list(EXPECTED) for _ in range(3)]
    said[engine] = moved(at, sign * by)
    canary = canary_of(Fleet(*said), models["llama"], EXPECTED)
    with pytest.raises(UserError) as caught:
        canary.check("a weight push")
    text = str(caught.value)
    assert f"engine http://engine-{engine} " in text and f"position {at + 1} of the canary" in text
    assert "1 of 3 engines differ" in text and ("attention, positions" in text) == (at > 0)
    canary = canary_of(Fleet(moved(at, sign * by * 0.001 / 50.001)), models["llama"], EXPECTED)
    assert 0 < canary.check("a weight push")[LARGEST] < 1e-3


def counted(sent: int, loaded: int, checked: int) -> dict[str, float]:
    numbers = {"sent": sent, "loaded": loaded, "checked": checked}
    return {
        f"perf/update_weights/{what}_tensors": float(number) for what, number in numbers.items()
    }


DROPPED, CHANGED, LOST = "dropped a tensor", "arrived changed", "lost when the engine released"
ROPE, BACKEND, QUANTISATION = "config.json or rope", "the attention backend", "quantisation"


@pytest.mark.parametrize(
    ("pushed", "flags", "at", "causes"),
    [
        (counted(9, 7, 3), {}, 3, [DROPPED, CHANGED, ROPE, BACKEND]),
        (counted(9, 9, 3), {"colocate": True}, 3, [CHANGED, LOST, ROPE, BACKEND]),
        (counted(9, 9, 9), {"colocate": True}, 3, [LOST, ROPE, BACKEND]),
        (counted(9, 9, 9), {}, 0, ["config.json other than"]),
        ({}, {}, 3, [DROPPED, CHANGED, ROPE, BACKEND]),
        (None, {"colocate": True}, 3, [LOST, ROPE, BACKEND]),  # after a wake
    ],
    ids=str,
)
def test_causes_are_in_order_and_without_those_that_are_excluded(
    models: dict[str, Path],
    pushed: dict[str, float] | None,
    flags: dict[str, Any],
    at: int,
    causes: list[str],
) -> None:
    canary = canary_of(Fleet(moved(at, 1.0)), models["llama"], EXPECTED, **flags)
    canary.pushed = pushed
    with pytest.raises(UserError) as caught:
        canary.check("a weight push")
    said = caught.value.why
    known = (DROPPED, CHANGED, LOST, ROPE, "config.json other than", BACKEND, QUANTISATION)
    assert [cause for cause in known if cause in said] == causes
    places = [said.index(cause) for cause in causes]
    assert places == sorted(places)
    assert ("--check-weight-update-equal" in caught.value.fix) is (CHANGED in causes)
    assert ("--no-offload-rollout" in caught.value.fix) is (LOST in causes)


def test_a_torn_pair_is_a_cause_where_engines_fuse_pairs(models: dict[str, Path]) -> None:
    for shape, fuses in (("deepseek_v3", True), ("llama", False)):
        canary = canary_of(Fleet(moved(3, 1.0)), models[shape], EXPECTED)
        canary.pushed = counted(9, 7, 3)
        with pytest.raises(UserError) as caught:
            canary.check("a weight push")
        assert ("half of a pair that it fuses" in caught.value.why) is fuses


def test_quantisation_is_a_cause_of_quantised_models_alone(config_json: Callable[..., str]) -> None:
    model = config_json(quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match=QUANTISATION):
        canary_of(Fleet([value + 9 for value in EXPECTED]), model, EXPECTED).check("a weight push")


def test_in_16_bits_the_mean_counts_against_the_spread(models: dict[str, Path]) -> None:
    deviation = float(torch.tensor(EXPECTED).std(correction=0))

    def check(said: list[float]) -> dict[str, float]:
        return canary_of(Fleet(said, dtype="bfloat16"), models["llama"], EXPECTED, bf16=True).check(
            "a weight push"
        )

    assert check([value + 0.09 * deviation for value in EXPECTED])[MEAN] == pytest.approx(
        0.09 * deviation
    )
    # a token went to another expert
    assert check(moved(7, 2 * deviation))[LARGEST] == pytest.approx(2 * deviation)
    with pytest.raises(UserError, match=rf"allowed is a mean of {0.1 * deviation:.2g}"):
        check([value + 0.11 * deviation for value in EXPECTED])


def test_a_model_that_finds_all_equally_likely(models: dict[str, Path]) -> None:
    flat = [-math.log(VOCAB)] * 31
    canary = canary_of(
        Fleet([value + 0.005 for value in flat], dtype="bfloat16"), models["llama"], flat, bf16=True
    )
    assert canary.check("a weight push")[MEAN] == pytest.approx(0.005)


@pytest.mark.parametrize(
    "mixed", [{"bf16": True}, {"dtype": "bfloat16"}, {"dtype": "auto"}], ids=str
)
def test_float32_needs_both_sides(models: dict[str, Path], mixed: dict[str, Any]) -> None:
    dtype = mixed.pop("dtype", "float32")
    canary_of(Fleet(moved(3, 0.01), dtype=dtype), models["llama"], EXPECTED, **mixed).check(
        "a weight push"
    )


@pytest.mark.parametrize(
    ("info", "config", "judged"),
    [
        ({"quantization": "fp8"}, {}, False),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, False),
        ({"kv_cache_dtype": "fp4_mx_block16"}, {}, False),
        ({"torchao_config": "int4wo-128"}, {}, False),
        (
            {"abilities": ABILITIES.to_json()},
            {"quantization_config": {"quant_method": "fp8"}},
            True,
        ),
        ({"quantization": None, "torchao_config": "", "kv_cache_dtype": "auto"}, {}, True),
        ({"quantization": "unquant", "kv_cache_dtype": "bfloat16"}, {}, True),
    ],
    ids=str,
)
def test_engines_that_quantise_by_themselves_are_only_measured(
    config_json: Callable[..., str], info: dict[str, Any], config: dict[str, Any], judged: bool
) -> None:
    canary = canary_of(Fleet(moved(3, 1.0), **info), config_json(**config), EXPECTED)
    if judged:
        with pytest.raises(UserError):
            canary.check("a weight push")
    else:
        assert canary.check("a weight push") == pytest.approx({MEAN: 1 / 31, LARGEST: 1.0})


def test_fp8_kernels_that_round_activations_are_measured_first(
    config_json: Callable[..., str],
) -> None:
    """The first check measures, up to the standard deviation; later ones allow twice as much."""
    model = config_json(quantization_config={"quant_method": "fp8"})
    spread = statistics.pstdev(EXPECTED)
    fleet = Fleet([value + 1.1 * spread for value in EXPECTED])
    with pytest.raises(UserError, match="allowed is a mean of"):
        canary_of(fleet, model, EXPECTED).check("a weight push")
    canary = canary_of(fleet, model, EXPECTED)
    for factor, refused in ((0.3, False), (0.55, False), (0.65, True)):
        fleet.said = ([value + factor * spread for value in EXPECTED],)
        if refused:
            with pytest.raises(UserError, match="allowed is a mean of"):
                canary.check("a wake")
        else:
            assert canary.check("a wake")[MEAN] == pytest.approx(factor * spread)


def test_what_is_not_a_number_differs(models: dict[str, Path]) -> None:
    canary = canary_of(Fleet(EXPECTED[:5] + [None] + EXPECTED[6:]), models["llama"], EXPECTED)  # type: ignore[list-item]
    with pytest.raises(
        UserError, match=r"position 6 of the canary, by inf \(trainer -3\.5000, engine nan\)"
    ):
        canary.check("taking its memory back")


@pytest.mark.parametrize("flags", [{}, {"bf16": True}], ids=str)
def test_a_trainer_whose_weights_are_broken(models: dict[str, Path], flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the trainer's own log-probs of the canary are not finite"):
        canary_of(Fleet(EXPECTED), models["llama"], [math.nan, *EXPECTED[1:]], **flags).check(
            "a weight push"
        )


def test_an_engine_that_does_not_answer_the_question(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(EXPECTED)
    canary = canary_of(fleet, models["llama"], EXPECTED)

    def refuse(*request: Any) -> Any:
        raise EngineError("http://engine-0", "/generate answered 503: loading", 503)

    shorter = fleet.answer(EXPECTED[:7], canary.tokens[:8])
    for answer, said in (
        (refuse, "answered 503"),
        (lambda *request: [shorter], r"answered those of 8; the first difference is at place 8"),
    ):
        monkeypatch.setattr(fleet, "post", answer)
        with pytest.raises(
            UserError,
            match=f"did not score the canary after a weight push: http://engine-0.*{said}",
        ):
            canary.check("a weight push")


def test_an_answer_that_the_end_of_a_rollout_cuts_is_asked_for_again(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollout that aborts its engines' requests does not know of the canary's."""
    fleet = Fleet(EXPECTED, EXPECTED)
    canary = canary_of(fleet, models["llama"], EXPECTED)
    whole = fleet.post
    cut = {"meta_info": {"input_token_logprobs": [], "finish_reason": {"type": "abort"}}}
    cuts = 2

    def cut_twice(path: str, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        nonlocal cuts
        answers = whole(path, body, timeout)
        cuts -= 1
        return [answers[0], cut] if cuts >= 0 else answers

    monkeypatch.setattr(fleet, "post", cut_twice)
    monkeypatch.setattr("slime.weights.canary.time.sleep", lambda seconds: None)
    assert canary.check("a weight push")[LARGEST] == 0
    assert cuts < 0
    # one that does not end is told as it is
    cuts = 10**6
    with pytest.raises(UserError, match="answered those of 0"):
        canary.check("a weight push")


# -- trainer and engine ----------------------------------------------------------------------------


def lose_rotary_tables(engine: EmbeddedEngine) -> None:
    for table in engine.scheduler.store.model.angles["main"]:
        table.zero_()


def keep_an_old_tensor(engine: EmbeddedEngine) -> None:
    engine.scheduler.store.named["model.layers.1.post_attention_layernorm.weight"].mul_(1.05)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["qwen3", "llama", "qwen3_moe", "deepseek_v3"])
def trained(
    request: pytest.FixtureRequest, models: dict[str, Path], dtype: str
) -> tuple[Path, list[float]]:
    """A model, and what the trainer says of the canary."""
    model = models[request.param]
    with single(model, bf16=dtype == "bfloat16") as backend:
        return model, backend.canary_log_probs(canary_tokens(VOCAB))


def checked(
    engine: EmbeddedEngine, trained: tuple[Path, list[float]], dtype: str
) -> dict[str, float]:
    return canary_of(engine, *trained, bf16=dtype == "bfloat16").check("a weight push")


def test_a_sound_engine_agrees(trained: tuple[Path, list[float]], dtype: str) -> None:
    found = checked(EmbeddedEngine(trained[0], dtype), trained, dtype)
    assert found[LARGEST] < 1e-4 if dtype == "float32" else found[MEAN] < 0.05


def test_lost_rotary_tables_are_found(trained: tuple[Path, list[float]], dtype: str) -> None:
    engine = EmbeddedEngine(trained[0], dtype)
    checked(engine, trained, dtype)
    lose_rotary_tables(engine)
    with pytest.raises(UserError, match=r"agrees: attention, positions \(rope\) or cache"):
        checked(engine, trained, dtype)


QUANTISED = {
    "fp8": Quantisation("fp8", Fp8((16, 16))),
    "int4": Quantisation("compressed-tensors", Int4(16), ("lm_head", "model.embed_tokens.weight")),
}


@pytest.fixture(scope="module", params=QUANTISED)
def quantised(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    dtype: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[float], list[float]]:
    """A model of quantised weights, and what the trainer says of the canary: with what engines get,
    and without."""
    pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")
    folder = tmp_path_factory.mktemp("quantised")
    plain, folder = shutil.copytree(models["qwen3"], folder / "plain"), folder / request.param
    [file] = plain.glob("*.safetensors")  # in the engine's dtype, which a push casts to first
    save_file(
        {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(file).items()}, file
    )
    quantise_directory(plain, folder, QUANTISED[request.param])
    with single(folder, ref_load=str(plain), bf16=dtype == "bfloat16") as backend:
        tokens = canary_tokens(VOCAB)
        return (
            folder,
            backend.canary_log_probs(tokens),
            backend.canary_log_probs(tokens, plain=True),
        )


def test_engines_of_quantised_weights_are_judged_as_any_other(
    quantised: tuple[Path, list[float], list[float]], dtype: str
) -> None:
    """From the first push on: what the format does, more than a damaged norm here, is on both
    sides."""
    model, expected, plain = quantised
    engine = EmbeddedEngine(model, dtype)
    found = checked(engine, (model, expected), dtype)
    if dtype == "float32":
        assert found[LARGEST] < 1e-4
        keep_an_old_tensor(engine)
        with pytest.raises(UserError, match=r"allowed is a largest of 0\.001") as caught:
            checked(engine, (model, expected), dtype)
        differs = float(str(caught.value).split("they differ by ")[1].split()[0])
        assert differs < statistics.fmean(abs(a - b) for a, b in zip(plain, expected))
    else:
        assert found[MEAN] < 0.05 * statistics.pstdev(expected)
    lose_rotary_tables(engine)
    with pytest.raises(UserError, match="other log-probs than the trainer with the same weights"):
        checked(engine, (model, expected), dtype)


def test_a_damaged_weight_is_found_in_float32(models: dict[str, Path]) -> None:
    with single(models["qwen3"]) as backend:
        trained = models["qwen3"], backend.canary_log_probs(canary_tokens(VOCAB))
    engine = EmbeddedEngine(models["qwen3"])
    keep_an_old_tensor(engine)
    with pytest.raises(UserError, match="the first token differs already"):
        checked(engine, trained, "float32")


def test_keys_and_values_of_before_are_not_used_again(models: dict[str, Path]) -> None:
    engine, asked = EmbeddedEngine(models["qwen3"]), []
    ask = engine.post
    engine.post = lambda *request: asked.append(ask(*request)) or asked[-1]  # type: ignore[method-assign]
    canary = canary_of(engine, models["qwen3"], [0.0] * 31)
    for _ in range(2):
        with pytest.raises(UserError):
            canary.check("a weight push")
    assert [answer["meta_info"]["cached_tokens"] for [answer] in asked] == [0, 0]


# -- in the loop -----------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> tuple[Cluster, list[str]]:
    """A cluster of nothing but turns on the GPUs and a canary, and what happened."""
    cluster, log = Cluster(make_config(colocate=True), tmp_path), []

    class Logged:
        fleet: Any = None

        def check(self, event: str) -> dict[str, float]:
            log.append(event)
            return {}

    class Engines:
        fleet = None
        table = SimpleNamespace(policy=[1], rejoin=lambda: None)

        def restart_dead(self) -> None: ...

        def wait_for_restarts(self, *, for_all: bool) -> None: ...

        def retry_without_dead(self, work: Callable[[], Any], what: str) -> Any:
            return work()

        def stop_health_checks(self) -> None: ...

        def explain_failures(self) -> AbstractContextManager[None]:
            return nullcontext()

    turns = GpuMemoryOwner(*[lambda *given: {}] * 4, offload_train=True, offload_rollout=True)  # type: ignore[arg-type, list-item]
    cluster._engines, cluster._gpu_memory = Engines(), turns  # type: ignore[assignment]
    cluster._weights = WeightPush(cluster._engines, None, turns, Logged(), tolerant=False)  # type: ignore[arg-type]
    return cluster, log


def test_engines_are_checked_when_they_wake_and_only_then(
    cluster: tuple[Cluster, list[str]],
) -> None:
    it, log = cluster
    assert it._gpu_memory is not None and it._weights is not None
    it._gpu_memory.release_for_launch()
    it._weights.wake_engines()
    assert log == ["taking its memory back"]
    it._weights.wake_engines()
    assert len(log) == 1
    with it._trainer_onloaded():
        pass
    it._weights.wake_engines()
    assert len(log) == 2


def test_example_of_a_difference() -> None:
    assert Difference.of([-1.0, -2.0], [-1.0, -2.5]) == Difference(
        mean=0.25, largest=0.5, at=1, first=0.0
    )


# -- adapters --------------------------------------------------------------------------------------

BASE = [-3.0] * 31
WITH = [-3.0 + 0.2 * (number % 2) for number in range(31)]


class AdapterFleet(Fleet):
    """One engine that says something else with an adapter."""

    def __init__(self, said: list[float], of_base: list[float], **info: Any) -> None:
        super().__init__(said, **info)
        self.of_base = of_base

    def post(self, path: str, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        self.bodies.append(body)
        said = self.said[0] if body.get("lora_path") == "policy-2" else self.of_base
        return [self.answer(said, body["input_ids"])]


def with_adapter(fleet: AdapterFleet, models: dict[str, Path], **flags: Any) -> Canary:
    canary = canary_of(fleet, models["llama"], WITH, **flags)
    canary.expected_of_base = BASE
    canary.adapter = "policy-2"
    return canary


def test_an_adapter_is_scored_with_and_without(models: dict[str, Path]) -> None:
    fleet = AdapterFleet(WITH, BASE)
    found = with_adapter(fleet, models).check("a weight push")
    assert found[LARGEST] == 0
    assert found["train/canary_adapter_abs_diff"] == pytest.approx(0.2 * 15 / 31)
    assert [body.get("lora_path") for body in fleet.bodies] == [None, "policy-2"]


@pytest.mark.parametrize("flags", [{}, {"bf16": True}])
def test_an_adapter_that_is_loaded_and_not_applied(
    models: dict[str, Path], flags: dict[str, Any]
) -> None:
    info = {"dtype": "bfloat16"} if flags else {}
    with pytest.raises(UserError, match="adapter policy-2 changes nothing in engine http://engine"):
        with_adapter(AdapterFleet(BASE, BASE, **info), models, **flags).check("a weight push")


def test_an_adapter_of_zeros_changes_nothing_and_need_not(models: dict[str, Path]) -> None:
    canary = with_adapter(AdapterFleet(BASE, BASE), models)
    canary.expected = BASE
    assert canary.check("a weight push")["train/canary_adapter_abs_diff"] == 0


def test_an_adapter_of_another_version(models: dict[str, Path]) -> None:
    said = [value + 0.05 for value in WITH]
    with pytest.raises(UserError, match="after a weight push, engine http://engine-0 gives other"):
        with_adapter(AdapterFleet(said, BASE), models).check("a weight push")


def test_a_base_that_is_not_the_trainers(models: dict[str, Path]) -> None:
    other = [value + 0.05 for value in BASE]
    with pytest.raises(UserError, match="after a weight push without an adapter, engine"):
        with_adapter(AdapterFleet(WITH, other), models).check("a weight push")


def test_a_base_that_moves(models: dict[str, Path]) -> None:
    """Within the tolerance each time, as the trainer's moves along."""
    fleet = AdapterFleet(WITH, BASE)
    canary = with_adapter(fleet, models)
    canary.check("a weight push")
    fleet.of_base = [value + 0.002 for value in BASE]
    canary.expected_of_base = fleet.of_base
    with pytest.raises(UserError, match="other log-probs than at the launch"):
        canary.check("a weight push")
