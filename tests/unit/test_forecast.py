"""The predicted time of steps against what was measured, and the simulation behind it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu.trainer import SHAPES
from slime.cli import plan as command
from slime.config import Config, make_config
from slime.config.parse import read_argv
from slime.errors import UserError
from slime.forecast import calibrate
from slime.forecast.engine import EngineSpeed, Fleet, Request, SimulatedEngine
from slime.forecast.layouts import best_plans, plan_of
from slime.forecast.lengths import log_normal, read_lengths
from slime.forecast.rates import DEFAULTS, Rates, default_rates, load_rates, save_rates
from slime.forecast.steps import Step, Workload, mean_phases, simulate
from slime.forecast.trainer import train_seconds
from slime.memory import hardware
from slime.memory.plan import Facts, facts_of
from slime.models import family_of
from slime.models.flops import SequenceCost, sequence_cost

#: The largest error that a prediction may have.
CLOSE = 0.15
H200 = DEFAULTS["H200"]
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
QWEN3_1_7B = SHAPES["qwen3-4b"] | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}


class Run:
    """A run of a model's shape, as `slime plan` sees it."""

    def __init__(self, folder: Path, shape: dict[str, Any], **flags: Any) -> None:
        (folder / "config.json").write_text(json.dumps(shape))
        common = {
            "hf_checkpoint": str(folder),
            "rollout_engine": "sglang",
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 8192,
            "num_rollout": 1,
        }
        self.config: Config = make_config(**{**common, **flags})
        self.facts: Facts = facts_of(self.config, on_gpu=True)
        self.cost: SequenceCost = sequence_cost(family_of(str(folder)), shape)

    def steps(self, rates: Rates, lengths: list[int], prompt: int, waves: int = 2) -> list[Step]:
        work = Workload.of(self.config, lengths, prompt)
        return simulate(self.facts, work, self.cost, rates, rates.gpu_gb * 1e9, waves)

    def training(self, lengths: list[int], rates: Rates = H200) -> float:
        assert self.facts.trainer is not None
        return train_seconds(self.facts.trainer, self.cost, rates, lengths).total


def seconds(steps: list[Step]) -> float:
    return sum(mean_phases(steps).values())


@pytest.mark.parametrize(
    ("layout", "mean", "generation", "training", "whole"),
    [
        # docs/performance.md, "Whole models on four H200s"
        pytest.param(
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            *(1016, 50.5, 55.0, 109.5),
            id="tensor parallel 2",
        ),
        pytest.param({}, 1007, 54.2, 48.2, 107.9, id="data parallel alone"),
    ],
)
def test_a_colocated_step_of_8b_on_four_h200(
    tmp_path: Path,
    layout: dict[str, Any],
    mean: int,
    generation: float,
    training: float,
    whole: float,
) -> None:
    """64 × 32 responses of at most 4,096 tokens."""
    run = Run(
        tmp_path,
        LLAMA_8B,
        colocate=True,
        actor_num_gpus_per_node=4,
        rollout_batch_size=64,
        n_samples_per_prompt=32,
        rollout_max_response_len=4096,
        rollout_max_context_len=4352,
        **layout,
    )
    steps = run.steps(H200, log_normal(mean, 4096), 133)
    phases = mean_phases(steps)
    assert phases["waiting for generation"] == pytest.approx(generation, rel=CLOSE)
    assert phases["training"] == pytest.approx(training, rel=CLOSE)
    assert seconds(steps) == pytest.approx(whole, rel=CLOSE)
    if layout:  # sleep and push were measured by themselves
        assert phases["sleep and wake"] == pytest.approx(1.9, rel=CLOSE)
        assert phases["push"] == pytest.approx(0.28, rel=CLOSE)


def test_a_colocated_step_of_30b_with_experts_on_four_h200(tmp_path: Path) -> None:
    """docs/performance.md, "Whole models on four H200s": 31.8 s generate, a push takes 1.1 s.
    Training is not compared: a random router gave the busiest expert 15.6 times the mean load, and
    the prediction is for equal loads."""
    run = Run(
        tmp_path,
        SHAPES["qwen3-30b-a3b"],
        colocate=True,
        actor_num_gpus_per_node=4,
        rollout_num_gpus_per_engine=2,
        expert_model_parallel_size=4,
        rollout_batch_size=32,
        n_samples_per_prompt=8,
        rollout_max_response_len=2048,
        rollout_max_context_len=2560,
        recompute_activations=True,
        optimizer_cpu_offload=True,
        exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
        max_tokens_per_gpu=18432,
    )
    phases = mean_phases(run.steps(H200, [2048], 132))
    assert phases["waiting for generation"] == pytest.approx(31.8, rel=CLOSE)
    assert phases["push"] == pytest.approx(1.1, rel=CLOSE)


def test_rollouts_between_pushes_take_none(tmp_path: Path) -> None:
    pushes = []
    for interval in (1, 2, 4):
        run = Run(
            tmp_path,
            SHAPES["qwen3-0.6b"],
            entry="train_async",
            rollout_num_gpus=1,
            actor_num_gpus_per_node=1,
            rollout_batch_size=8,
            update_weights_interval=interval,
        )
        pushes.append(mean_phases(run.steps(H200, [256], 128))["push"])
    assert pushes[1:] == pytest.approx([pushes[0] / 2, pushes[0] / 4])


def recorded(scale: float = 4.0) -> list[int]:
    """The lengths of `benchmarks.gpu.long_tail`."""
    path = Path("docs/measurements/lengths-gsm8k-h200.json")
    found = [length for step in json.loads(path.read_text()) for length in step]
    return [int(min(8192, max(256, scale * length))) for length in found]


@pytest.mark.parametrize(
    ("shape", "gpu", "prompts", "turns", "apart"),
    [
        # docs/measurements/long-tail-h200.jsonl, d9b2c49: 47.9 s in turns; steps 4 to 6 apart
        pytest.param(SHAPES["qwen3-4b"], "H200", 8, 47.9, 26.6, id="4B on two H200"),
        # docs/measurements/long-tail-h100.jsonl, 0d18d52
        pytest.param(QWEN3_1_7B, "H100", 16, 46.7, 35.0, id="1.7B on two H100"),
    ],
)
def test_what_two_gpus_gain_by_working_at_the_same_time(
    tmp_path: Path, shape: dict[str, Any], gpu: str, prompts: int, turns: float, apart: float
) -> None:
    flags = {
        "rollout_batch_size": prompts,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 8192,
        "rollout_max_context_len": 8448,
        "max_tokens_per_gpu": 8704,
    }
    colocated = Run(tmp_path, shape, colocate=True, actor_num_gpus_per_node=2, **flags)
    separate = Run(
        tmp_path,
        shape,
        entry="train_async",
        rollout_num_gpus=1,
        actor_num_gpus_per_node=1,
        async_buffer_size=3,
        update_weights_in_flight=True,
        **flags,
    )
    one = seconds(colocated.steps(DEFAULTS[gpu], recorded(), 120)[:1])
    other = seconds(separate.steps(DEFAULTS[gpu], recorded(), 120, waves=1))
    assert one == pytest.approx(turns, rel=CLOSE)
    assert other == pytest.approx(apart, rel=CLOSE)
    assert one / other == pytest.approx(turns / apart, rel=CLOSE)


def test_sixteen_prompts_in_turns(tmp_path: Path) -> None:
    """docs/measurements/long-tail-h200.jsonl, d3f4be8: 4B on two H200, 62.2 s."""
    run = Run(
        tmp_path,
        SHAPES["qwen3-4b"],
        colocate=True,
        actor_num_gpus_per_node=2,
        rollout_batch_size=16,
        n_samples_per_prompt=4,
        rollout_max_response_len=8192,
        rollout_max_context_len=8448,
        max_tokens_per_gpu=8704,
    )
    assert seconds(run.steps(H200, recorded(), 120)[:1]) == pytest.approx(62.2, rel=CLOSE)


def test_a_colocated_step_of_4b_on_one_h200(tmp_path: Path) -> None:
    """docs/performance.md, `colocated_step --shape qwen3-4b`: 64 × 8 responses of 1,024 tokens:
    56.6 s, of which 25.4 generate and 27.9 train."""
    run = Run(
        tmp_path,
        SHAPES["qwen3-4b"],
        colocate=True,
        actor_num_gpus_per_node=1,
        rollout_batch_size=64,
        n_samples_per_prompt=8,
        rollout_max_response_len=1024,
        rollout_max_context_len=1280,
        max_tokens_per_gpu=10240,
    )
    steps = run.steps(H200, [1024], 120)
    phases = mean_phases(steps)
    assert phases["waiting for generation"] == pytest.approx(25.4, rel=CLOSE)
    assert phases["training"] == pytest.approx(27.9, rel=CLOSE)
    assert seconds(steps) == pytest.approx(56.6, rel=CLOSE)


@pytest.mark.parametrize(
    ("shape", "limit", "measured"),
    [
        # docs/performance.md, "On H200s": 16,384 tokens in sequences of 2,048 on one H200
        ("qwen3-0.6b", 8192, 74_100),
        ("qwen3-0.6b", 16384, 91_300),
        ("qwen3-4b", 4096, 18_800),
        ("qwen3-moe-4b", 16384, 39_100),
    ],
)
def test_a_trainer_on_one_gpu(tmp_path: Path, shape: str, limit: int, measured: float) -> None:
    run = Run(tmp_path, SHAPES[shape], rollout_batch_size=8, max_tokens_per_gpu=limit)
    assert 16384 / run.training([2048] * 8) == pytest.approx(measured, rel=CLOSE)


@pytest.mark.parametrize(
    ("flags", "measured"),
    [
        # docs/performance.md, note 6: speed per GPU of two H200 against one, 4B
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 0.912),
        ({"context_parallel_size": 2}, 0.901),
    ],
)
def test_two_gpus_for_one_replica(tmp_path: Path, flags: dict[str, Any], measured: float) -> None:
    alone = Run(tmp_path, SHAPES["qwen3-4b"], rollout_batch_size=8)
    both = Run(
        tmp_path, SHAPES["qwen3-4b"], rollout_batch_size=16, actor_num_gpus_per_node=2, **flags
    )
    share = alone.training([2048] * 8) / both.training([2048] * 16)
    assert share == pytest.approx(measured, rel=CLOSE)


@pytest.mark.parametrize(
    ("in_flight", "measured"),
    # docs/performance.md, `generation --shape qwen3-0.6b`: tokens/s of SGLang driven directly
    [(256, 36_100), (1024, 32_800)],
)
def test_generation_of_a_small_model(tmp_path: Path, in_flight: int, measured: float) -> None:
    run = Run(
        tmp_path, SHAPES["qwen3-0.6b"], rollout_batch_size=in_flight, rollout_max_response_len=512
    )
    assert run.facts.engine is not None
    fleet = Fleet(EngineSpeed.of(run.facts.engine, run.cost, H200, 141e9), 1)
    fleet.add([Request(0, 128, 512, 128)] * in_flight, 0.0)
    ends = [fleet.finish()[0] for _ in range(in_flight)]
    # the benchmark keeps as many in flight by a second round: no caches are short for long
    assert in_flight * 512 / ends[-1] == pytest.approx(measured, rel=CLOSE)


# -- the simulation --------------------------------------------------------------------------------

SPEED = EngineSpeed(2e-3, 0.0, 0.0, 1e-5, 1e-3, 4e-8, 10_000.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=30),
    st.lists(st.floats(0.01, 3.0), max_size=6),
)
def test_looking_at_an_engine_changes_nothing(lengths: list[int], looks: list[float]) -> None:
    """Advancing in pieces leads to the same ends as advancing from end to end."""
    ends = []
    for pieces in ([], sorted(looks)):
        engine = SimulatedEngine(SPEED)
        for length in lengths:
            engine.add(Request(0, 10, length, 0), 0.0)
        left = list(pieces)
        found = []
        while engine.load:
            while left and left[0] < engine.next_end():
                engine.advance(left.pop(0))
            engine.finish()
            found.append(engine.time)
        ends.append(found)
    assert ends[0] == pytest.approx(ends[1])
    assert len(ends[0]) == len(lengths)


def test_one_response_takes_its_iterations() -> None:
    engine = SimulatedEngine(SPEED)
    engine.add(Request(0, 100, 50, 100), 0.0)
    prefill = 100 * SPEED.compute
    read = SPEED.cached * (50 * 100 + 50 * 50 / 2)
    assert engine.next_end() == pytest.approx(prefill + 50 * SPEED.iteration(1) + read)


def test_requests_wait_for_a_full_cache() -> None:
    engine = SimulatedEngine(SPEED)
    for _ in range(3):
        engine.add(Request(0, 6_000, 10, 0), 0.0)
    ends = []
    while engine.load:
        engine.finish()
        ends.append(engine.time)
    # the cache has room for one, and the second enters when the first has left
    assert ends[1] == pytest.approx(2 * ends[0], rel=0.2)
    assert ends[2] == pytest.approx(3 * ends[0], rel=0.2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 900), min_size=2, max_size=30), st.integers(0, 10))
def test_stopped_requests_have_left_what_they_did_not_generate(
    lengths: list[int], ended: int
) -> None:
    engine = SimulatedEngine(SPEED)
    for number, length in enumerate(lengths):
        engine.add(Request(number, 700, length, 0), 0.0)
    over = {engine.finish().group for _ in range(min(ended, len(lengths) - 1))}
    stopped = {number for number in range(len(lengths)) if number % 2 and number not in over}
    left = engine.stop(stopped, engine.time)
    assert {request.group for request in left} == stopped
    for request in left:
        assert request.prompt + request.response == 700 + lengths[request.group]
        assert request.response >= 1
        assert request.prefill in (0, request.prompt)  # 0: it had not begun
    rest = [engine.finish().group for _ in range(engine.load)]
    assert sorted(rest) == sorted(set(range(len(lengths))) - over - stopped)


def test_drawing_more_groups_saves_time_if_they_are_finished_later(tmp_path: Path) -> None:
    lengths = [500] * 7 + [8000]  # one response of each second group

    def waits(**flags: Any) -> list[float]:
        shared = {"rollout_batch_size": 4, "n_samples_per_prompt": 4, "colocate": True}
        run = Run(tmp_path, QWEN3_1_7B, actor_num_gpus_per_node=1, **shared, **flags)
        return [step.waiting for step in run.steps(H200, lengths, 256)]

    whole = waits()
    drawn = waits(over_sampling_batch_size=8)
    partial = waits(over_sampling_batch_size=8, partial_rollout=True)
    # long groups gather in the end, since each rollout begins with those that were put back;
    # more of them run at a time, and all but the chosen ones were generated in vain
    assert min(drawn) > max(whole)
    assert sum(partial) / len(partial) < 0.8 * min(whole)
    assert waits(over_sampling_batch_size=4, partial_rollout=True) == whole


def test_experts_are_read_as_tokens_need_them() -> None:
    sparse = EngineSpeed(1e-3, 8e-3, 8 / 128, 0.0, 0.0, 0.0, 1e6)
    assert sparse.iteration(1) == pytest.approx(1e-3 + 8e-3 * 8 / 128, rel=0.03)
    assert sparse.iteration(256) > 8.9e-3


def test_more_engines_are_never_slower() -> None:
    lengths = log_normal(300, 2000)[:64]
    ends = []
    for count in (1, 2, 4):
        fleet = Fleet(SPEED, count)
        fleet.add([Request(0, 10, length, 10) for length in lengths], 0.0)
        times = [fleet.finish()[0] for _ in lengths]
        assert fleet.next_end() == math.inf
        assert times == sorted(times)
        ends.append(times[-1])
    assert ends[0] > ends[1] > ends[2]


def test_lengths_have_the_mean_that_was_asked_for(tmp_path: Path) -> None:
    drawn = log_normal(1016, 4096)
    assert sum(drawn) / len(drawn) == pytest.approx(1016, rel=0.01)
    assert max(drawn) == 4096
    file = tmp_path / "lengths.json"
    file.write_text("[[3, 4], [5]]")
    assert read_lengths(file) == [3, 4, 5]
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    (samples / "eval_000000.jsonl").write_text('{"response_length": 5}\n')
    rows = [{"response_length": length} for length in (7, 0, 9)]
    (samples / "rollout_000000.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_lengths(tmp_path / "run") == [7, 9]  # neither evaluations nor what was cut at once


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "holds no lengths"),
        ("[[1, 2.5]]", "2.5 is no number of tokens"),
        ("[-1]", "-1 is no number of tokens"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_of_lengths_that_cannot_be_used(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        read_lengths(file)


# -- layouts, rates, the command -------------------------------------------------------------------


LOCK_STEP = {"colocate": True, "actor_num_gpus_per_node": 8}
AHEAD = {
    "actor_num_gpus_per_node": 4,
    "rollout_num_gpus": 8,
    "async_buffer_size": 3,
    "update_weights_in_flight": True,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "pipeline_model_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("shape", "gpus", "per_host", "given"),
    [
        ("qwen3-30b-a3b", 16, 8, LOCK_STEP | {"expert_model_parallel_size": 8}),
        ("qwen3-0.6b", 12, 8, LOCK_STEP | {"context_parallel_size": 2}),
        ("qwen3-0.6b", 9, 8, LOCK_STEP),
        ("qwen3-0.6b", 6, 4, AHEAD),
    ],
)
def test_the_best_plans_are_sorted_and_are_what_their_flags_ask_for(
    tmp_path: Path, shape: str, gpus: int, per_host: int, given: dict[str, Any]
) -> None:
    common = {
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "rollout_max_response_len": 2048,
        "rollout_max_context_len": 2304,
    }
    run = Run(tmp_path, SHAPES[shape], **common, **given)
    lengths = log_normal(512, 2048)
    work = Workload.of(run.config, lengths, 128)
    rates = replace(H200, gpus_per_host=per_host)
    now = plan_of(run.facts, work, run.cost, rates, 141e9)
    plans = best_plans(run.facts, work, run.cost, rates, gpus, 141e9)
    assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    for plan in plans:
        assert plan.facts.placement.total == gpus
        assert plan.seconds == pytest.approx(sum(plan.phases.values()))
        told = read_argv(plan.flags(now, per_host).split()).values
        asked = Run(tmp_path, SHAPES[shape], **{**common, **given, **told})
        assert Workload.of(asked.config, lengths, 128) == plan.work
        assert layout(asked.facts) == layout(plan.facts)
    assert {plan.facts.colocate for plan in plans} == (set() if gpus == 9 else {True, False})


def layout(facts: Facts) -> tuple[Any, ...]:
    assert facts.trainer is not None and facts.engine is not None
    return (
        facts.trainer.layout,
        facts.placement.num_rollout,
        facts.engine.tensor,
        facts.colocate,
        facts.trainer_sleeps,
        facts.engine_sleeps,
    )


def test_a_critic_on_gpus_of_its_own_trains_meanwhile(tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "colocate": True,
        "actor_num_gpus_per_node": 4,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 1,
        "rollout_max_response_len": 2048,
        "rollout_max_context_len": 2304,
    }
    ppo = {**flags, "advantage_estimator": "ppo"}

    def training(**more: Any) -> float:
        run = Run(tmp_path, LLAMA_8B, **more)
        return mean_phases(run.steps(H200, log_normal(512, 2048), 128))["training"]

    own = {"critic_tensor_model_parallel_size": 1}
    alone = training(**flags)
    equal = training(**ppo, **own, critic_num_gpus_per_node=4)
    slow = training(**ppo, **own, critic_num_gpus_per_node=1)
    # the policy has a pass more, the critic one for its values
    assert alone <= equal < 1.5 * alone
    assert training(**ppo) > 1.5 * equal and slow > 2.5 * equal
    run = Run(tmp_path, LLAMA_8B, **ppo, **own, critic_num_gpus_per_node=4)
    work = Workload.of(run.config, log_normal(512, 2048), 128)
    plans = best_plans(run.facts, work, run.cost, H200, 8, 141e9)
    assert plans and {plan.facts.placement.total for plan in plans} == {8}
    assert {plan.facts.placement.critic_offset for plan in plans} == {4}
    assert not best_plans(run.facts, work, run.cost, H200, 4, 141e9)


def test_a_critic_with_its_own_layout_on_the_policys_gpus_takes_its_own_time(
    tmp_path: Path,
) -> None:
    flags: dict[str, Any] = {
        "advantage_estimator": "ppo",
        "colocate": True,
        "actor_num_gpus_per_node": 4,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 1,
        "rollout_max_response_len": 2048,
        "rollout_max_context_len": 2304,
    }

    def training(policy: int, critic: int) -> float:
        layout = {
            "tensor_model_parallel_size": policy,
            "critic_tensor_model_parallel_size": critic,
        }
        run = Run(tmp_path, LLAMA_8B, **flags, **layout)
        return mean_phases(run.steps(H200, log_normal(512, 2048), 128))["training"]

    policys = training(4, 4)
    fast = training(1, 1)
    assert fast < training(4, 1) < policys and fast < training(1, 4) < policys
    run = Run(tmp_path, LLAMA_8B, **flags, critic_tensor_model_parallel_size=4)
    work = Workload.of(run.config, log_normal(512, 2048), 128)
    assert best_plans(run.facts, work, run.cost, H200, 4, 141e9)
    assert not best_plans(run.facts, work, run.cost, H200, 2, 141e9)  # it does not fit there


def test_rates_go_through_a_file(tmp_path: Path) -> None:
    save_rates(H200, tmp_path / "rates.json")
    assert load_rates(tmp_path / "rates.json") == H200
    assert default_rates("NVIDIA H100 80GB HBM3") is DEFAULTS["H100"]
    with pytest.raises(UserError, match="no rates are known"):
        default_rates("RTX 4090")
    for changes in ({"memory": 0}, {"products": "fast"}, {"gpu": 3}, {"unknown": 1}):
        (tmp_path / "rates.json").write_text(json.dumps(asdict(H200) | changes))
        with pytest.raises(UserError, match="cannot be read"):
            load_rates(tmp_path / "rates.json")


def test_the_kind_of_gpu_is_asked_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpu_name() is None
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho '81559, 9.0, NVIDIA H100 80GB HBM3'\n")
    driver.chmod(0o755)
    assert hardware.gpu_name() == "NVIDIA H100 80GB HBM3"
    assert hardware.seen_gpu_memory() == 81559 * 2**20


def test_the_measurements_of_the_calibration_are_positive() -> None:
    assert calibrate.product_rate(64, "cpu", 0.01) > 0
    assert calibrate.copy_rate(1 << 16, "cpu", "cpu", 0.01) > 0
    assert 0 < calibrate.operation_seconds("cpu", 0.01, count=10) < 1


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-0.6b"]))
    found = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "x.jsonl", "--num-rollout", "1"]
    found += ["--custom-rm-path", "recipes.gsm8k.reward", "--rollout-batch-size", "8", "--colocate"]
    return [*found, "--actor-num-gpus-per-node", "2", "--rollout-max-context-len", "1024"]


def test_the_command_says_memory_time_and_what_to_try(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text("[100, 200, 4000]")
    assert command.main([*words, "--gpus", "4", "--lengths", str(lengths), "--device", "A100"]) == 0
    said = capsys.readouterr().out
    assert "memory plan: 2 GPUs of 80.0 GB" in said
    assert "worth trying on 4 GPUs:" in said
    assert "s a step" in said and "limited by" in said
    assert "768 at most; lengths of" in said and "cut at the 768 that the flags allow" in said


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--calibrate", "rates.json"], "other flags would be ignored"),
        (["--rates", "rates.json", "--device", "H100"], "both say which GPU"),
        (["--prompt-tokens", "1024"], "leaves no room for a response"),
        (["--gpu-memory-gb", "-3"], "--gpu-memory-gb is -3"),
        (
            ["--actor-num-gpus-per-node", "3", "--pipeline-model-parallel-size", "3"],
            "28 layers cannot be divided by 3",
        ),
    ],
)
def test_what_would_be_ignored_or_is_impossible_is_refused(
    words: list[str], more: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        command.main([*words, *more])


def test_a_short_context_has_room_for_a_prompt_and_a_response(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--rollout-max-context-len", "128", "--rollout-max-response-len", "32"]
    assert command.main([*words, *short, "--device", "A100"]) == 0
    assert "of the 32 tokens that the flags allow" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_comes_with_remedies(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*words, "--gpu-memory-gb", "12", "--gpus", "1"]) == 0
    said = capsys.readouterr().out
    assert "the memory plan does not fit: train needs" in said and "fix: " in said
    assert "no layout divides 1 GPU and fits into the memory" in said


def test_the_command_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs the flags"):
        command.main([])
    alone = ["--calibrate", "rates.json"]
    with pytest.raises(UserError, match="other flags would be ignored"):
        command.main([*alone, "--prompt-tokens", "300"])
    with pytest.raises(UserError, match="no GPU to calibrate"):
        command.main(["--calibrate", str(tmp_path / "rates.json")])


def test_the_engine_and_the_gpu_are_those_of_the_flags_and_of_this_host(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An A100 has 40 or 80 GB; a configuration file may name the engine."""
    monkeypatch.setattr(command, "gpu_name", lambda: "NVIDIA A100-SXM4-40GB")
    monkeypatch.setattr(command, "seen_gpu_memory", lambda: 40e9)
    (tmp_path / "run.yaml").write_text("rollout_engine: embedded\n")
    command.main([*words, "--config", str(tmp_path / "run.yaml")])
    said = capsys.readouterr().out
    assert "memory plan: 2 GPUs of 40.0 GB" in said
    assert "--sglang-mem-fraction-static" not in said
