"""The memory plan of a run: who holds what in which phase, refusals with remedies that hold, the
table."""

from __future__ import annotations

import bisect
import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config, make_config
from slime.errors import UserError
from slime.memory.check import (
    changes,
    check_memory,
    check_memory_of_cluster,
    host_changes,
    judge,
    refuse,
    remedies,
)
from slime.memory.hardware import DeviceMemory, device_memory
from slime.memory.measured import Measured
from slime.memory.plan import (
    TRAINER_PROCESS_BYTES,
    MemoryPlan,
    Phase,
    ranges,
    summary,
    table,
)
from slime.memory.trainer import CONTEXT, longest_sequence
from slime.processes import host
from tests.support.hf_configs import PUBLISHED

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GROUPS = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "model.embed_tokens.weight"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128, "strategy": "group"}}
    },
}
DENSE, MOE = "Qwen/Qwen3-4B", "Qwen/Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories with nothing but a config.json."""
    found = {}
    for name in (DENSE, MOE, "deepseek-ai/DeepSeek-V3"):
        found[name] = tmp_path_factory.mktemp("model")
        (found[name] / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    return found


def config_of(folder: Path, **flags: Any) -> Config:
    base: dict[str, Any] = {
        "hf_checkpoint": str(folder),
        "bf16": True,
        "rollout_engine": "sglang",
        "rollout_max_context_len": 4096,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 8192,
        "rollout_batch_size": 64,
    }
    return make_config(**{**base, **flags})


def gpu(size: float) -> DeviceMemory:
    return DeviceMemory(size * 1e9, "test", on_gpu=True)


def plan_of(folder: Path, size: float = 80, **flags: Any) -> MemoryPlan:
    return MemoryPlan.of(config_of(folder, **flags), gpu(size))


def phases(plan: MemoryPlan) -> dict[tuple[str, str], Phase]:
    return {(phase.devices, phase.name): phase for phase in plan.phases}


def owned(phase: Phase, owner: str) -> dict[str, float]:
    return {use.what: use.nbytes for use in phase.uses if use.owner == owner}


# -- who holds what --------------------------------------------------------------------------------


def test_colocated_one_side_sleeps_while_the_other_works(folders: dict[str, Path]) -> None:
    plan = plan_of(folders[DENSE], colocate=True, sglang_mem_fraction_static=0.8)
    found = phases(plan)
    assert {name for _, name in found} == {"generate", "train", "push"} and {
        d for d, _ in found
    } == {"GPU 0"}
    generate, train, push = (found["GPU 0", name] for name in ("generate", "train", "push"))
    assert owned(generate, "trainer").keys() == {"asleep (CUDA context, NCCL)"}
    assert owned(train, "engine").keys() == {"asleep (CUDA context and graphs)"}
    assert owned(push, "trainer").keys() == {"weights", "CUDA context, NCCL"}
    assert not any("KV cache" in what for what in owned(push, "engine"))
    static = owned(generate, "engine")
    cache = next(size for what, size in static.items() if "KV cache" in what)
    assert cache + static["weights"] == pytest.approx(0.8 * 80e9)


def test_without_sleep_both_are_always_there(folders: dict[str, Path]) -> None:
    flags = {"colocate": True, "sglang_mem_fraction_static": 0.4}
    awake = phases(plan_of(folders[DENSE], offload_train=False, offload_rollout=False, **flags))
    asleep = phases(plan_of(folders[DENSE], **flags))
    assert "optimizer moments" in owned(awake["GPU 0", "generate"], "trainer")
    assert "KV cache" in owned(awake["GPU 0", "train"], "engine")
    assert all(awake[key].total > asleep[key].total for key in asleep)


def test_apart_each_gpu_has_its_own_phases(folders: dict[str, Path]) -> None:
    plan = plan_of(folders[DENSE], actor_num_gpus_per_node=2, rollout_num_gpus=2)
    assert [(p.devices, p.name) for p in plan.phases] == [
        ("GPU 0-1", "train"), ("GPU 0-1", "push"), ("GPU 2-3", "generate"), ("GPU 2-3", "push"),
    ]  # fmt: skip
    found = phases(plan)
    assert {use.owner for use in found["GPU 0-1", "train"].uses} == {"trainer"}
    assert {use.owner for use in found["GPU 2-3", "generate"].uses} == {"engine"}


def test_pipeline_stages_differ(folders: dict[str, Path]) -> None:
    plan = plan_of(
        folders[DENSE],
        actor_num_gpus_per_node=4,
        pipeline_model_parallel_size=2,
        rollout_num_gpus=1,
    )
    found = phases(plan)
    first, last = found["GPU 0-1", "train"], found["GPU 2-3", "train"]
    assert owned(first, "trainer")["activations"] == 2 * owned(last, "trainer")["activations"]
    assert "blocks of logits" in owned(last, "trainer") and "blocks of logits" not in owned(
        first, "trainer"
    )


def test_teachers_come_to_the_gpu_one_after_the_other(folders: dict[str, Path]) -> None:
    two = {"use_opd": True, "opd_teacher_load": ["math=a", "code=b"]}
    sampled = phases(plan_of(folders[DENSE], **two))
    scoring = owned(sampled["GPU 0", "log-probs"], "trainer")
    assert scoring["weights of a teacher"] == scoring["weights"]
    assert not any("teacher" in what for what in owned(sampled["GPU 0", "train"], "trainer"))
    plan = plan_of(folders[DENSE], **two, opd_loss="jsd")
    heads = owned(phases(plan)["GPU 0", "train"], "trainer")["output layers of teachers"]
    alone = {"use_opd": True, "opd_teacher_load": ["self"], "opd_loss": "jsd"}
    own = plan_of(folders[DENSE], **alone)
    assert owned(phases(own)["GPU 0", "train"], "trainer")["output layers of teachers"] * 2 == heads
    assert ("GPU 0", "log-probs") not in phases(own)
    # two copies of the weights more
    assert plan.host.total > own.host.total


def test_the_reference_comes_to_the_gpu_for_its_log_probs_only(folders: dict[str, Path]) -> None:
    plan = plan_of(folders[DENSE], 141, use_kl_loss=True, kl_loss_coef=0.1)
    found = phases(plan)
    scoring = owned(found["GPU 0", "log-probs"], "trainer")
    assert scoring["weights of the reference"] == scoring["weights"]
    assert "weights of the reference" not in owned(found["GPU 0", "train"], "trainer")
    assert owned(plan.host, "trainer")["weights of frozen models"] == scoring["weights"]


def test_policy_and_critic_take_turns_where_engines_need_the_gpu(folders: dict[str, Path]) -> None:
    flags = {"advantage_estimator": "ppo", "sglang_mem_fraction_static": 0.4}
    plan = plan_of(folders[DENSE], 141, colocate=True, **flags)
    found = phases(plan)
    critic = owned(found["GPU 0", "critic"], "critic")
    policy = owned(found["GPU 0", "train"], "trainer")
    assert "weights" not in owned(found["GPU 0", "critic"], "trainer")
    assert not any(owned(found["GPU 0", name], "critic") for name in ("generate", "train", "push"))
    # the same model without its output layer, which this one does not tie
    spec = plan.facts.trainer.spec  # type: ignore[union-attr]
    output = 0 if spec.tie_embeddings else spec.padded_vocab_size * spec.hidden_size
    assert policy["weights"] - critic["weights"] == 2 * output
    assert "blocks of logits" not in critic and critic["activations"] == policy["activations"]
    alone = plan_of(folders[DENSE], 141, colocate=True, sglang_mem_fraction_static=0.4)
    kept = ("weights", "value head", "master weights", "optimizer moments")
    states = sum(critic[name] for name in kept)
    assert plan.host.total == pytest.approx(alone.host.total + states)
    apart = phases(plan_of(folders[DENSE], 141, rollout_num_gpus=1, **flags))
    assert owned(apart["GPU 0", "train"], "critic").keys() == {
        "weights", "value head", "gradients", "master weights", "optimizer moments",
    }  # fmt: skip
    assert "weights" in owned(apart["GPU 0", "push"], "critic")


def test_a_critic_with_adapters_has_a_frozen_base(folders: dict[str, Path]) -> None:
    head = 2560 + 1
    flags = {"advantage_estimator": "ppo", "colocate": True, "lora_rank": 32}
    for own in ({}, {"critic_num_gpus_per_node": 1}):
        found = phases(plan_of(folders[DENSE], 141, critic_lora_rank=8, **flags, **own))
        slots = "GPU 1" if own else "GPU 0"
        states = owned(found[slots, "critic"], "critic")
        names = ("gradients", "master weights", "optimizer moments")
        assert [states[name] / (8 * 2_064_384 + head) for name in names] == [4, 4, 8]
        assert states["adapters"] == 2 * 8 * 2_064_384 and states["value head"] == 2 * head
        assert "weights (frozen)" in states and "weights" not in states
    whole = phases(plan_of(folders[DENSE], 141, critic_lora_rank=0, **flags))
    assert "weights" in owned(whole["GPU 0", "critic"], "critic")
    policys = owned(found["GPU 0", "train"], "trainer")
    assert policys == owned(whole["GPU 0", "train"], "trainer")


def test_a_base_of_policy_and_critic_is_counted_once(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    adapted = {"advantage_estimator": "ppo", "lora_rank": 32}
    for turns in ({"colocate": True}, {"rollout_num_gpus": 1}):
        plans = [
            plan_of(folders[DENSE], 141, **adapted, **turns, **more)
            for more in ({}, {"critic_load": str(tmp_path)})
        ]
        shared, apart = plans
        assert any("share one frozen base" in note for note in shared.notes)
        assert any("in addition to the policy's base" in note for note in apart.notes)
        policy, critic = (
            owned(phases(apart)["GPU 0", name], owner)["weights (frozen)"]
            for name, owner in (("train", "trainer"), ("critic", "critic"))
        )
        assert policy >= critic > 6e9
        if "colocate" in turns:  # one of the two at a time is on the GPU
            assert [p.total for p in shared.phases] == [p.total for p in apart.phases]
            assert apart.host.total - shared.host.total == pytest.approx(critic)
            continue
        assert apart.host.total == shared.host.total
        for ours, theirs in zip(shared.phases, apart.phases, strict=True):
            saved = critic if "GPU 0" in ours.devices else 0.0
            assert theirs.total - ours.total == pytest.approx(saved), ours.name
    for more in ({"critic_lora_rank": 0}, {"critic_num_gpus_per_node": 1}, {"lora_rank": 0}):
        plan = plan_of(folders[DENSE], 141, **{**adapted, "colocate": True, **more})
        assert not any("frozen base" in note for note in plan.notes)


def test_a_critic_with_its_own_layout_on_the_policys_gpus(folders: dict[str, Path]) -> None:
    flags = {
        "advantage_estimator": "ppo", "colocate": True, "sglang_mem_fraction_static": 0.4,
        "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2,
    }  # fmt: skip
    same = phases(plan_of(folders[DENSE], 141, **flags))
    halves = owned(same["GPU 0-1", "critic"], "critic")
    plan = plan_of(folders[DENSE], 141, **flags, critic_tensor_model_parallel_size=1)
    found = phases(plan)
    whole = owned(found["GPU 0-1", "critic"], "critic")
    assert whole["weights"] == pytest.approx(2 * halves["weights"], rel=0.01)
    assert owned(found["GPU 0-1", "train"], "trainer").keys() == {
        *owned(same["GPU 0-1", "train"], "trainer")
    }
    for name in ("generate", "train", "push"):  # its communicators
        more = found["GPU 0-1", name].total - same["GPU 0-1", name].total
        assert more == pytest.approx(0.5e9)
    # one of its two stages is on each GPU of the policy's only stage; the larger one counts
    cut = {"critic_tensor_model_parallel_size": 1, "critic_pipeline_model_parallel_size": 2}
    stage = owned(
        phases(plan_of(folders[DENSE], 141, **flags, **cut))["GPU 0-1", "critic"], "critic"
    )
    assert halves["weights"] < stage["weights"] < 0.7 * whole["weights"]
    # whole sequences where the policy has parts of them
    context = {**flags, "tensor_model_parallel_size": 1, "context_parallel_size": 2}
    parts, sequences = (
        plan_of(folders[DENSE], 141, **{**context, "rollout_max_context_len": 32768}, **own)
        for own in ({}, {"critic_context_parallel_size": 1})
    )
    assert sequences.facts.trainer is not None and parts.facts.trainer is not None
    assert parts.facts.trainer.as_critic().tokens == 16384
    assert sequences.facts.trainer.as_critic().tokens == 32768
    texts = {change.text: change for change in changes(plan, plan.facts, "critic")}
    [wider] = [
        text for text in texts if text.startswith("--critic-tensor-model-parallel-size 1 → 2")
    ]
    trainer = texts[wider].facts.trainer
    assert trainer is not None and trainer.as_critic().layout.tensor == 2


def test_a_critic_on_gpus_of_its_own_takes_none_of_the_policys(folders: dict[str, Path]) -> None:
    flags = {"colocate": True, "sglang_mem_fraction_static": 0.4, "num_gpus_per_node": 8}
    ppo = {"advantage_estimator": "ppo", **flags}
    own = {
        "critic_num_gpus_per_node": 4,
        "critic_tensor_model_parallel_size": 2,
        "critic_pipeline_model_parallel_size": 2,
    }
    plan = plan_of(folders[DENSE], 141, **ppo, **own)
    found = phases(plan)
    alone = phases(plan_of(folders[DENSE], 141, **flags))
    assert {name: phase.total for name, phase in found.items() if name[1] != "critic"} == {
        name: phase.total for name, phase in alone.items()
    }
    assert found.keys() - alone.keys() == {("GPU 1-2", "critic"), ("GPU 3-4", "critic")}
    shared = owned(phases(plan_of(folders[DENSE], 141, **ppo))["GPU 0", "critic"], "critic")
    halves = [owned(found[f"GPU {slots}", "critic"], "critic") for slots in ("1-2", "3-4")]
    assert shared.keys() <= halves[0].keys() | halves[1].keys()
    # norms are whole on each tensor-parallel rank
    parts = sum(half["weights"] for half in halves)
    assert parts == pytest.approx(shared["weights"] / 2, rel=0.01)
    # both use one precision; the critic's four processes are on the same node
    without = plan_of(folders[DENSE], 141, **flags)
    assert plan.host.total - without.host.total == pytest.approx(4 * TRAINER_PROCESS_BYTES)
    assert plan.fits


def test_what_helps_a_critic_on_gpus_of_its_own_names_its_flags(folders: dict[str, Path]) -> None:
    own = {"advantage_estimator": "ppo", "critic_num_gpus_per_node": 2, "num_gpus_per_node": 8}
    plan = plan_of(folders[DENSE], 24, actor_num_gpus_per_node=4, rollout_num_gpus=1, **own)
    found = list(changes(plan, plan.facts, "critic"))
    [wider] = [one for one in found if "tensor-model-parallel" in one.text]
    assert wider.text.startswith("--critic-tensor-model-parallel-size 1 → 2 --critic-sequence-")
    assert wider.facts.critic is not None and wider.facts.critic.layout.tensor == 2
    assert wider.facts.trainer is plan.facts.trainer


def test_sft_and_one_half_alone(folders: dict[str, Path]) -> None:
    trainer = plan_of(folders[DENSE], 141, loss_type="sft_loss")
    assert [phase.name for phase in trainer.phases] == ["train"]
    engines = plan_of(folders[DENSE], debug_rollout_only=True, rollout_num_gpus=2)
    assert [(phase.devices, phase.name) for phase in engines.phases] == [("GPU 0-1", "generate")]


def test_states_of_mixed_precision_are_18_bytes_per_parameter(folders: dict[str, Path]) -> None:
    states = owned(
        phases(plan_of(folders[DENSE], loss_type="sft_loss"))["GPU 0", "train"], "trainer"
    )
    parts = [
        states[name] for name in ("weights", "gradients", "master weights", "optimizer moments")
    ]
    parameters = states["weights"] / 2
    assert [part / parameters for part in parts] == [2, 4, 4, 8]
    assert parameters == pytest.approx(4.02e9, rel=0.01)


def test_adapters_are_18_bytes_per_parameter_and_the_frozen_base_is_2(
    folders: dict[str, Path],
) -> None:
    flags = {"lora_rank": 32, "use_kl_loss": True, "kl_loss_coef": 0.1}
    plan = plan_of(folders[DENSE], loss_type="sft_loss", lora_rank=32)
    states = owned(phases(plan)["GPU 0", "train"], "trainer")
    names = ("adapters", "gradients", "master weights", "optimizer moments")
    assert [states[name] / (32 * 2_064_384) for name in names] == [2, 4, 4, 8]
    assert states["weights (frozen)"] == pytest.approx(8.04e9, rel=0.01)
    assert not plan.facts.trainer.reference
    learning = plan_of(folders[DENSE], colocate=True, **flags)
    assert ("GPU 0", "log-probs") not in phases(learning)  # the reference is the frozen base


def test_the_pool_of_adapters_stays_while_the_engine_sleeps(folders: dict[str, Path]) -> None:
    plan = plan_of(folders[DENSE], colocate=True, lora_rank=32, sglang_mem_fraction_static=0.8)
    found = phases(plan)
    pool = 3 * 2 * 32 * 2_064_384  # the base counts as one
    for name in ("generate", "train", "push"):
        assert owned(found["GPU 0", name], "engine")["pool of 3 adapters"] == pool
    static = owned(found["GPU 0", "generate"], "engine")
    cache = next(size for what, size in static.items() if "KV cache" in what)
    assert cache + static["weights"] + pool == pytest.approx(0.8 * 80e9)
    assert owned(found["GPU 0", "push"], "both")["two buckets"] == 2 * 2 * 32 * 2_064_384
    two = plan_of(folders[DENSE], colocate=True, lora_rank=32, sglang_max_loras_per_batch=2)
    assert "pool of 2 adapters" in owned(phases(two)["GPU 0", "train"], "engine")


def test_engines_that_keep_their_weights_need_no_copy_on_the_host(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    flags = {"colocate": True, "lora_rank": 32, "sglang_mem_fraction_static": 0.6}
    released = plan_of(folders[DENSE], **flags)
    kept = plan_of(folders[DENSE], offload_rollout_weights=False, **flags)
    more = phases(kept)["GPU 0", "train"].total - phases(released)["GPU 0", "train"].total
    assert more == owned(phases(kept)["GPU 0", "train"], "engine")["weights"]
    assert released.host.total - kept.host.total == more

    def fits(size: int, **more: Any) -> bool:
        return plan_of(folders[DENSE], size, **flags, **more).fits

    def advises(size: int, **more: Any) -> bool:
        caplog.clear()
        with caplog.at_level("INFO"):
            check_memory(config_of(folders[DENSE], **flags, **more), gpu(size))
        return "--no-offload-rollout-weights" in caplog.text

    assert advises(140)
    assert not advises(140, offload_rollout_weights=False), "it is done already"
    full = bisect.bisect_left(range(140), True, key=fits)
    assert not fits(full, offload_rollout_weights=False) and not advises(full), "there is no room"


@pytest.mark.parametrize(
    ("model", "settings", "matrices", "entry"),
    [
        # beside float32 scales of 128 × 128 numbers, and beside bfloat16 scales of 128 numbers
        (DENSE, BLOCKS, 36 * 100_925_440, 1 + 4 / 128**2),
        (DENSE, GROUPS, 36 * 100_925_440, 1 / 2 + 2 / 128),
        (MOE, BLOCKS, 48 * (603_979_776 + 18_874_368), 1 + 4 / 128**2),  # experts, attention
    ],
)
def test_engines_hold_a_quantised_base_and_the_trainer_a_plain_one(
    folders: dict[str, Path], tmp_path: Path, model: str, settings: Any, matrices: int, entry: float
) -> None:
    plain = plan_of(folders[model], colocate=True, lora_rank=8)
    config = PUBLISHED[model]["config"] | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantised = plan_of(tmp_path, colocate=True, lora_rank=8)
    held = [
        owned(phases(plan)["GPU 0", "generate"], "engine")["weights"] for plan in (plain, quantised)
    ]
    assert held[0] - held[1] == pytest.approx(matrices * (2 - entry), rel=1e-3)
    both, alone = (
        plan_of(folder, colocate=True, lora_rank=8, rollout_engine="embedded").facts.engine
        for folder in (tmp_path, folders[model])
    )
    assert both and alone, "the embedded engine holds what was stored and what it stands for"
    assert both.weights - alone.weights == pytest.approx(matrices * entry, rel=1e-3)
    trained = [owned(phases(plan)["GPU 0", "train"], "trainer") for plan in (plain, quantised)]
    assert trained[0] == trained[1]


@pytest.mark.parametrize("experts", ["per-expert", "shared-outer"])
def test_adapters_of_experts_are_divided_with_them(folders: dict[str, Path], experts: str) -> None:
    counts = {"per-expert": 51_904_512, "shared-outer": 14_450_688}
    flags: dict[str, Any] = {
        "lora_rank": 8,
        "lora_experts": experts,
        "lora_target_modules": ("gate_proj", "up_proj", "down_proj"),
        "loss_type": "sft_loss",
        "actor_num_gpus_per_node": 4,
        "expert_tensor_parallel_size": 1,
    }
    sizes = [
        owned(
            phases(plan_of(folders[MOE], 400, expert_model_parallel_size=n, **flags))[
                "GPU 0-3", "train"
            ],
            "trainer",
        )["adapters"]
        for n in (1, 4)
    ]
    assert sizes[0] == 2 * 8 * counts[experts]
    shared = 0 if experts == "per-expert" else 48 * 8 * (2 * 2048 + 2048) * 2
    assert sizes[1] == (sizes[0] - shared) / 4 + shared


def test_adapters_of_embedding_and_output_layer_are_cut_over_the_vocabulary(
    folders: dict[str, Path],
) -> None:
    vocab, hidden = 151_936, 2048
    flags: dict[str, Any] = {
        "lora_rank": 8,
        "lora_target_modules": ("embed_tokens", "lm_head"),
        "actor_num_gpus_per_node": 2,
        "tensor_model_parallel_size": 2,
        "rollout_num_gpus_per_engine": 2,
        "colocate": True,
    }
    found = phases(plan_of(folders[MOE], 400, **flags))["GPU 0-1", "train"]
    assert owned(found, "trainer")["adapters"] == 2 * 8 * (vocab + 2 * hidden)
    # SGLang has all of the embedding's A on each rank
    pool = 3 * 2 * 8 * (vocab + vocab // 2 + 2 * hidden)
    assert owned(found, "engine")["pool of 3 adapters"] == pool


def test_frozen_matrices_need_no_inputs(folders: dict[str, Path]) -> None:
    def activations(**flags: Any) -> float:
        plan = plan_of(folders[DENSE], 400, loss_type="sft_loss", **flags)
        return owned(phases(plan)["GPU 0", "train"], "trainer")["activations"]

    whole = activations()
    everything = activations(lora_rank=1)
    attention = activations(lora_rank=1, lora_target_modules=("q_proj", "k_proj", "v_proj"))
    assert whole < everything < 1.01 * whole
    # of each layer the normalised input of the MLP and the product of gate and up
    dropped = 36 * 8192 * 2 * (2560 + 9728)
    assert attention == pytest.approx(whole - dropped, rel=0.01)


def test_offloaded_states_are_in_host_memory(folders: dict[str, Path]) -> None:
    here = plan_of(folders[DENSE], loss_type="sft_loss")
    there = plan_of(folders[DENSE], loss_type="sft_loss", offload_optimizer_states=True)
    moments = owned(here.peak, "trainer")["optimizer moments"]
    assert owned(there.host, "trainer")["optimizer moments"] == moments
    assert "optimizer moments" not in owned(there.peak, "trainer")
    everything = plan_of(folders[DENSE], loss_type="sft_loss", optimizer_cpu_offload=True)
    assert owned(everything.host, "trainer")["master weights"] == moments / 2
    assert "master weights" not in owned(everything.peak, "trainer")
    flags = {"loss_type": "sft_loss", "optimizer_cpu_offload": True}
    narrow = plan_of(folders[DENSE], **flags, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    assert owned(narrow.host, "trainer")["optimizer moments"] == moments / 2
    half = plan_of(folders[DENSE], **flags, optimizer_offload_fraction=0.5)
    assert owned(half.host, "trainer")["optimizer moments"] == moments / 2
    assert owned(half.peak, "trainer")["optimizer moments"] == moments / 2


def test_host_memory_of_a_whole_mixture_of_experts_is_as_measured(folders: dict[str, Path]) -> None:
    """On four H200, 2026-11-28: 377.4 GB were in use at the end of the first step."""
    flags: dict[str, Any] = {
        "colocate": True,
        "actor_num_gpus_per_node": 4,
        "num_gpus_per_node": 4,
        "rollout_num_gpus_per_engine": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "optimizer_cpu_offload": True,
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 8,
        "rollout_max_context_len": 2304,
        "sglang_mem_fraction_static": 0.75,
    }
    plain = plan_of(folders[MOE], 150.8, **flags)
    plan = plan_of(folders[MOE], 150.8, **flags, use_rollout_routing_replay=True)
    assert plan.host.total == pytest.approx(377.4e9, rel=0.05)
    tokens = plan.facts.engine.kv_tokens(150.8e9) if plan.facts.engine else 0
    assert tokens == pytest.approx(1_639_118, rel=0.03)  # of the engine's log
    routes = 4 * 48 * 8
    samples = 2 * 32 * 8 * 2304
    assert plan.host.total - plain.host.total == (4 * tokens + samples) * routes


def test_a_host_that_is_too_small_is_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"colocate": True, "optimizer_cpu_offload": True, "async_save": True, "save": "runs"}
    config = config_of(folders[DENSE], **flags)
    plan = MemoryPlan.of(config, dataclasses.replace(gpu(141), host=120e9))
    assert plan.host_is_full and not plan.overfull and not plan.fits
    text = str(refuse(plan))
    assert "host memory, limit 114.0 GB (of 120.0 GB)" in text
    assert "trainer copy of a checkpoint" in text and "trainer master weights 16.1 GB" in text
    assert "without --async-save: " in text and "--max-tokens-per-gpu" not in text
    with pytest.raises(UserError, match=r"limit 114\.0 GB"):
        check_memory_of_cluster(config, 141e9, 120e9, on_gpu=True)
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.5")
    assert MemoryPlan.of(config, dataclasses.replace(gpu(141), host=140e9)).host_limit == 70e9
    monkeypatch.setenv("RAY_memory_usage_threshold", "95%")
    with pytest.raises(UserError, match="RAY_memory_usage_threshold is '95%'"):
        MemoryPlan.of(config, dataclasses.replace(gpu(141), host=140e9)).host_limit  # noqa: B018
    monkeypatch.undo()
    roomy = MemoryPlan.of(config, dataclasses.replace(gpu(141), host=400e9))
    assert roomy.fits and " GB (limit 380.0 GB): trainer" in table(roomy)


def test_offloads_that_exclude_each_other_are_not_suggested_together(
    folders: dict[str, Path],
) -> None:
    """--offload-optimizer-states and --optimizer-cpu-offload: the second has what the first has."""
    plan = plan_of(folders[DENSE], 40, max_tokens_per_gpu=32768)
    together = next(text for text, _ in remedies(plan, "train") if " and " in text)
    assert "--optimizer-cpu-offload" in together
    assert "--offload-optimizer-states" not in together
    given = plan_of(folders[DENSE], 40, max_tokens_per_gpu=32768, offload_optimizer_states=True)
    wanted = "--optimizer-cpu-offload instead of --offload-optimizer-states"
    assert wanted in [text for text, _ in remedies(given, "train")]
    on_host = [change.text for change in host_changes(given.facts)]
    assert any(
        text.startswith("--optimizer-cpu-offload")
        and text.endswith("instead of --offload-optimizer-states")
        for text in on_host
    )


def test_sleeping_states_are_counted_wherever_they_are(folders: dict[str, Path]) -> None:
    """A trainer that sleeps has all of its states in host memory; what is offloaded is there
    once."""
    plain = plan_of(folders[DENSE], colocate=True)
    streamed = plan_of(folders[DENSE], colocate=True, optimizer_cpu_offload=True)
    assert plain.host.total == pytest.approx(streamed.host.total)
    assert "optimizer states asleep" not in owned(streamed.host, "trainer")


def test_a_sequence_above_the_limit_is_a_micro_batch_of_its_own(folders: dict[str, Path]) -> None:
    def tokens(**flags: Any) -> int:
        trainer = plan_of(folders[DENSE], **flags).facts.trainer
        assert trainer is not None
        return trainer.tokens

    assert tokens() == 8192
    assert tokens(rollout_max_context_len=16384) == 16384
    assert (
        tokens(rollout_max_context_len=16384, context_parallel_size=2, actor_num_gpus_per_node=2)
        == 8192
    )
    assert tokens(max_tokens_per_gpu=5000) == 5120  # padded to a multiple of 128
    assert (
        tokens(use_dynamic_batch_size=False, max_tokens_per_gpu=None, micro_batch_size=4)
        == 4 * 4096
    )


def test_ranges() -> None:
    assert ranges([3]) == "3" and ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


# -- refusals --------------------------------------------------------------------------------------


def test_a_plan_that_cannot_fit_is_refused_with_the_largest_parts_and_what_shrinks_them(
    folders: dict[str, Path],
) -> None:
    config = config_of(
        folders[DENSE], colocate=True, max_tokens_per_gpu=32768, tensor_model_parallel_size=1
    )
    with pytest.raises(UserError) as refused:
        check_memory(config, gpu(80))
    text = str(refused.value)
    assert "train needs" in text and "on GPU 0" in text and "limit 76.8 GB" in text
    assert re.search(r"activations \d+\.\d GB, optimizer moments 32\.\d GB", text)
    assert "--recompute-activations" in text and "--max-tokens-per-gpu 32768 → 16384" in text
    assert "--memory-plan warn" in text
    assert len(text.splitlines()) <= 8


def test_each_phase_that_does_not_fit_gets_its_own_advice(folders: dict[str, Path]) -> None:
    plan = plan_of(folders[DENSE], colocate=True, sglang_mem_fraction_static=0.97)
    assert {phase.name for phase in plan.overfull} == {"train", "generate"}
    text = str(refuse(plan))
    assert re.search(r"--sglang-mem-fraction-static 0.97 → 0\.8\d: generate 7\d\.\d GB", text)
    assert re.search(r"--optimizer-cpu-offload.*: train \d+\.\d GB", text)


def test_those_who_know_better_are_warned(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(folders[DENSE], colocate=True, memory_plan="warn")
    with caplog.at_level(logging.WARNING, "slime"):
        check_memory(config, gpu(40))
    assert "the memory plan does not fit" in caplog.text


def test_too_small_a_kv_cache_is_refused(folders: dict[str, Path]) -> None:
    config = config_of(
        folders[DENSE],
        rollout_num_gpus=1,
        sglang_mem_fraction_static=0.105,
        offload_optimizer_states=True,
    )
    plan = MemoryPlan.of(config, gpu(80))
    assert plan.starved and not plan.fits
    text = str(refuse(dataclasses.replace(plan, phases=())))
    assert (
        "less than one sequence of 4,096" in text and "--sglang-mem-fraction-static 0.105 →" in text
    )
    assert "147 kB" in text


#: Flags of a remedy as keyword arguments.
WORDS = {
    "--recompute-activations": ("recompute_activations", bool),
    "--sequence-parallel": ("sequence_parallel", bool),
    "--offload-optimizer-states": ("offload_optimizer_states", bool),
    "--optimizer-cpu-offload": ("optimizer_cpu_offload", bool),
    "--max-tokens-per-gpu": ("max_tokens_per_gpu", int),
    "--rollout-max-context-len": ("rollout_max_context_len", int),
    "--tensor-model-parallel-size": ("tensor_model_parallel_size", int),
    "--pipeline-model-parallel-size": ("pipeline_model_parallel_size", int),
    "--expert-model-parallel-size": ("expert_model_parallel_size", int),
    "--sglang-mem-fraction-static": ("sglang_mem_fraction_static", float),
    "--rollout-num-gpus-per-engine": ("rollout_num_gpus_per_engine", int),
    "--expert-tensor-parallel-size": ("expert_tensor_parallel_size", int),
}


def flags_of(text: str) -> dict[str, Any] | None:
    """What "--a 1 → 2 --b" asks for; None for a remedy that is not flags alone."""
    found: dict[str, Any] = {}
    for part in text.replace(" and ", " ").split("--")[1:]:
        name, *values = part.split()
        if f"--{name}" not in WORDS or "," in part or "(" in part:
            return None
        dest, kind = WORDS[f"--{name}"]
        found[dest] = True if kind is bool else kind(values[-1])
    return found or None


@given(
    model=st.sampled_from([DENSE, MOE]),
    size=st.sampled_from([16, 24, 40, 80]),
    colocate=st.booleans(),
    tokens=st.sampled_from([4096, 8192, 32768]),
    tensor=st.sampled_from([1, 2, 4]),
    fraction=st.sampled_from([0.5, 0.8, 0.97]),
)
@settings(max_examples=4)
def test_remedies_do_what_they_say(
    model: str,
    size: int,
    colocate: bool,
    tokens: int,
    tensor: int,
    fraction: float,
    folders: dict[str, Path],
) -> None:
    """Each remedy, given as flags, leads to the plan that was promised."""
    flags: dict[str, Any] = {
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 8,
        "colocate": colocate,
        "max_tokens_per_gpu": tokens,
        "tensor_model_parallel_size": tensor,
        "sglang_mem_fraction_static": fraction,
    }
    plan = plan_of(folders[model], size, **flags)
    if not plan.overfull:
        return
    assert str(refuse(plan))
    for name in {phase.name for phase in plan.overfull}:
        for text, promised in remedies(plan, name):
            changed = flags_of(text)
            if changed is not None:
                after = plan_of(folders[model], size, **{**flags, **changed})
                total = max(phase.total for phase in after.phases if phase.name == name)
                assert total == pytest.approx(promised, rel=0.01), text


# -- how it is shown -------------------------------------------------------------------------------


def test_table_and_summary(folders: dict[str, Path]) -> None:
    plan = plan_of(
        folders[MOE],
        141,
        actor_num_gpus_per_node=8,
        colocate=True,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        recompute_activations=True,
    )
    text = table(plan)
    assert text.splitlines()[1].split() == [
        "devices",
        "phase",
        "of",
        "what",
        "GB",
        "total",
        "limit",
    ]
    assert "GPU 0-7" in text and "KV cache (" in text and "activations of uneven experts" in text
    assert "!" not in text and plan.fits
    for phase in plan.phases:
        assert f"{phase.total / 1e9:.1f}" in text
    lines = summary(plan)
    assert "8 GPUs of 141.0 GB" in lines[0] and "generate" in lines[1] and "limit 135.4" in lines[1]
    assert len(lines) <= 4
    assert "135.4 !" not in text and " !" in table(plan_of(folders[MOE], 40))


@pytest.mark.parametrize("size", [16, 24, 40, 80, 141, 192])
def test_what_sglang_chooses_itself_is_never_too_much(size: int, folders: dict[str, Path]) -> None:
    plan = plan_of(folders[DENSE], size, colocate=True)
    assert phases(plan)["GPU 0", "generate"].total <= plan.limit


def test_assumptions_are_told(folders: dict[str, Path]) -> None:
    text = table(
        plan_of(folders[DENSE], rollout_max_context_len=None, rollout_max_response_len=1000)
    )
    assert (
        "sequences of 2024 tokens are assumed" in text
        and "mem-fraction-static is left to the engine" in text
    )


def test_no_sequence_is_longer_than_the_models_context(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    config = PUBLISHED[DENSE]["config"] | {"max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {"rollout_max_context_len": None, "rollout_max_response_len": 4}
    plan = plan_of(tmp_path, **flags)
    assert "are assumed (--rollout" not in table(plan)
    assert longest_sequence(config_of(tmp_path, **flags)) == (64, False)
    assert longest_sequence(config_of(tmp_path, **flags, rollout_max_prompt_len=32)) == (36, False)
    assert longest_sequence(config_of(folders[DENSE], **flags)) == (1028, True)


def test_what_was_measured_is_compared_with_the_plan(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    plan = plan_of(folders[DENSE], 141, colocate=True, use_kl_loss=True, kl_loss_coef=0.1)
    tensors = {
        what: size
        for what, size in owned(phases(plan)["GPU 0", "train"], "trainer").items()
        if what != CONTEXT
    }
    planned, metric = sum(tensors.values()) / 1e9, "perf/forward_backward_peak_memory_gb"
    measured = Measured(plan)
    with caplog.at_level(logging.INFO, "slime"):
        assert measured.compare({}) == []  # a step of the driver without an update
        assert measured.compare({metric: planned * 0.6, "train/loss": 1.0}) == []
        assert not caplog.text  # there were no moments yet
        assert measured.compare({metric: planned * 0.9, "train/loss": 1.0}) == []
    assert f"{planned * 0.9:.1f} GB measured, {planned:.1f} GB planned" in caplog.text
    assert measured.compare({metric: planned * 0.91}) == [] and measured.compare({}) == []
    [warning] = measured.compare({metric: planned * 1.2})
    assert "memory of train" in warning and f"{planned * 0.9:.1f} GB in the steps before" in warning
    assert measured.compare({metric: planned * 1.2}) == []  # said once
    [warning] = measured.compare({"perf/trainer_asleep_gb": 9.0})
    assert "the sleeping trainer: 9.0 GB measured" in warning
    [warning] = Measured(plan).compare({metric: planned * 1.2})  # without moments already
    assert "memory of train" in warning


@pytest.mark.parametrize(
    ("flags", "compared"),
    [
        ({}, 1),
        ({"offload_optimizer_states": True}, 0),
        ({"optimizer": "sgd", "sgd_momentum": 0.0}, 0),
    ],
)
def test_memory_of_training_is_compared_once_the_moments_exist(
    flags: dict[str, Any], compared: int, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    measured = Measured(plan_of(folders[DENSE], 141, **flags))
    for update in range(3):
        with caplog.at_level(logging.INFO, "slime"):
            measured.compare({"perf/forward_backward_peak_memory_gb": 40.0 + update})
        assert ("memory of train" in caplog.text) is (update == compared)
        caplog.clear()


# -- what there is ---------------------------------------------------------------------------------


def test_gpu_memory_is_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 143771\necho 81559\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLIME_NUM_GPUS", "2")
    seen = device_memory(make_config(hf_checkpoint="m"))
    assert seen.nbytes == 81559 * 2**20 and seen.on_gpu and seen.source == "nvidia-smi"
    assert device_memory(make_config(hf_checkpoint="m", gpu_memory_gb=141)).nbytes == 141e9
    for capability, flash4 in (("9.0", 256), ("8.0", 0), ("12.0", 0), ("[N/A]", 128)):
        script.write_text(f"#!/bin/sh\necho 143771, 9.0\necho 81559, {capability}\n")
        seen = device_memory(make_config(hf_checkpoint="m"))
        assert (seen.nbytes, seen.flash4) == (81559 * 2**20, flash4)
    script.write_text("#!/bin/sh\nexit 9\n")
    assert device_memory(make_config(hf_checkpoint="m")).nbytes == 80e9


def test_a_size_that_no_gpu_has_is_refused() -> None:
    with pytest.raises(UserError, match="--gpu-memory-gb is 0"):
        device_memory(make_config(hf_checkpoint="m", gpu_memory_gb=0))


def test_host_memory_respects_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(host, "_CGROUPS", ((limit, used),))
    whole = host.host_memory()
    assert host.free_host_memory() <= whole
    limit.write_text("1000000\n")
    used.write_text("400000\n")
    assert (host.host_memory(), host.free_host_memory()) == (1e6, 6e5)
    limit.write_text("max\n")
    assert host.host_memory() == whole


def test_without_gpus_the_host_is_planned_for_and_never_refused(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    config = config_of(
        folders[DENSE], rollout_engine="embedded", actor_num_gpus_per_node=2, colocate=True
    )
    plan = MemoryPlan.of(config, DeviceMemory(20e9, "free on this host", on_gpu=False))
    [phase] = plan.phases
    assert phase.devices == "host" and not plan.fits
    both = sum(use.nbytes for use in phase.uses if (use.owner, use.what) == ("trainer", "weights"))
    assert both == pytest.approx(2 * 4.02e9 * 2, rel=0.01)
    with caplog.at_level(logging.WARNING, "slime"):
        judge(config, plan)
    assert "this run may need" in caplog.text
