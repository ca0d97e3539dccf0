"""Memory: what is recomputed, what lives on the host, what a phase needs at most, and what is said
when it runs out."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.config import make_config
from slime.errors import UserError
from slime.memory.remedies import host_remedies, remedies
from slime.samples.batch import TrainBatch
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.streamed import ALIGNMENT, StreamedStates
from slime.trainer.memory import LargestMicroBatch, OutOfMemory, PhaseMemory, is_out_of_memory
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch
from tests.support.trainers import LOSS, gradients, train_job, trainer

RECOMPUTE: dict[str, dict[str, Any]] = {
    "activations": {"recompute_activations": True},
    "blocks of two layers": {"recompute_granularity": "full", "recompute_num_layers": 2},
    "the first layer": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "activation": {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "several": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mlp", "layernorm"],
    },
}


def shared_prompts(batch: TrainBatch) -> TrainBatch:
    """The same batch with three samples behind one prompt, which packing computes once."""
    prompt = torch.arange(2, 14)
    for i in range(3):
        response = batch.tokens[i][-batch.response_lengths[i] :]
        batch.tokens[i] = torch.cat([prompt, response])
    return batch


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """To the rounding of float32: which kernel a CPU takes for a tensor depends on where it lies in
    memory, too."""
    return ours.keys() == theirs.keys() and all(
        bool(
            (ours[name] - theirs[name]).abs().max()
            <= 1e-5 * theirs[name].abs().max().clamp(min=1e-3)
        )
        for name in theirs
    )


# -- recompute -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Tensor], int]:
    """Gradients without recompute, and the bytes that a forward pass keeps."""
    backend = trainer(4, **LOSS)
    try:
        batch = shared_prompts(make_batch())
        return gradients(backend, batch), saved_bytes(backend, batch)
    finally:
        backend.close()


def saved_bytes(backend: MegatronBackend, batch: TrainBatch) -> int:
    """What autograd keeps of one micro-batch's forward pass, parameters left out; each storage
    once."""
    packed = backend._pack(batch, [[0, 1, 2, 3, 4, 5]])[0]
    [model] = backend.model_chunks
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: list[torch.UntypedStorage] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage())
        return tensor

    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        scores = model(packed, temperature=1.0)
    # counted only now: what is computed again was saved first and emptied after
    kept = {storage.data_ptr(): storage.nbytes() for storage in saved}
    total = sum(size for address, size in kept.items() if address not in own)
    scores.log_probs.sum().backward()
    model.zero_grad_buffer()
    return total


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_gives_the_same_gradients_and_keeps_less(
    name: str, plain: tuple[dict[str, Tensor], int]
) -> None:
    backend = trainer(4, **LOSS, **RECOMPUTE[name])
    try:
        batch = shared_prompts(make_batch())
        assert len(backend._pack(batch, [[0, 1, 2]])[0].sequences.lengths) == 1, (
            "the prompt is shared"
        )
        assert equal(gradients(backend, batch), plain[0])
        share = saved_bytes(backend, batch) / plain[1]
    finally:
        backend.close()
    # four layers: whole layers keep one activation each, the modules what is outside of them
    assert share < {"activations": 0.4, "blocks of two layers": 0.4, "several": 0.8}.get(name, 0.97)


@pytest.mark.parametrize(
    "modules",
    [["moe", "layernorm", "mlp", "core_attn"], ["moe_act", "shared_experts", "mla_up_proj"]],
    ids="+".join,
)
def test_modules_of_experts_and_latent_attention(modules: list[str], tmp_path: Path) -> None:
    save_tiny("deepseek_v3", tmp_path)
    found = []
    for flags in ({}, {"recompute_granularity": "selective", "recompute_modules": modules}):
        backend = trainer(hf_checkpoint=str(tmp_path), **flags)
        try:
            found.append((gradients(backend, make_batch()), saved_bytes(backend, make_batch())))
        finally:
            backend.close()
    assert equal(found[1][0], found[0][0])
    assert found[1][1] < 0.9 * found[0][1]


def test_the_activation_between_adapters_is_computed_again(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    found = []
    for flags in ({}, RECOMPUTE["activation"]):
        backend = trainer(hf_checkpoint=str(tmp_path), lora_rank=4, **flags)
        try:
            with torch.no_grad():
                for name, parameter in backend.model_chunks[0].named_parameters():
                    if ".adapter" in name:
                        parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            found.append(gradients(backend, make_batch()))
        finally:
            backend.close()
    assert equal(found[1], found[0])


def test_forward_passes_run_again() -> None:
    counts = {}
    for flags in ({}, {"recompute_activations": True}, RECOMPUTE["the first layer"]):
        backend = trainer(4, **flags)
        calls = [0]

        def count(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1

        try:
            for layer in backend.model_chunks[0].module.decoder.layers:
                layer.mlp.register_forward_hook(count)
            backend.train(make_batch([[0, 1, 2, 3, 4, 5]]))
        finally:
            backend.close()
        counts[str(flags)] = calls[0]
    assert list(counts.values()) == [4, 8, 5]


def test_layers_behind_a_frozen_embedding_are_trained_all_the_same() -> None:
    batch = make_batch()
    frozen = {
        "freeze_params_name_list": ["embedding"],
        "weight_decay": 0.0,
        "use_kl_loss": True,
        "lr": 0.02,
    }
    norms = []
    for recompute in ({}, {"recompute_activations": True}, RECOMPUTE["mlp"]):
        backend = trainer(**frozen, **recompute)
        try:
            norms.append(backend.train(batch)["train/grad_norm"])
        finally:
            backend.close()
    assert norms[0] > 0 and norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-5)


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="--recompute-num-layers 3") as caught:
        trainer(4, recompute_granularity="full", recompute_num_layers=3)
    assert "divisor of 4" in caught.value.fix


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"recompute_method": "uniform"}, "no effect without --recompute-granularity full"),
        ({"recompute_modules": ["mlp"]}, "no effect without --recompute-granularity selective"),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 1},
            "--recompute-granularity full",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attention"]},
            "did you mean core_attn",
        ),
    ],
)
def test_contradictory_recompute_flags(flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config(**flags)
    assert expected in str(caught.value)


def test_full_recompute_needs_no_more_words() -> None:
    megatron = make_config(recompute_granularity="full").megatron
    assert (megatron.recompute_method, megatron.recompute_num_layers) == ("uniform", 1)


# -- on several ranks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "levers"),
    [
        pytest.param(
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            RECOMPUTE["activations"],
            marks=pytest.mark.full,
        ),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, RECOMPUTE["several"]),
        ({"pipeline_model_parallel_size": 2}, RECOMPUTE["activations"]),
        pytest.param(
            {"pipeline_model_parallel_size": 2}, RECOMPUTE["several"], marks=pytest.mark.full
        ),
        ({}, {"offload_optimizer_states": True}),
        ({"bf16": True}, {"optimizer_cpu_offload": True}),
        (
            {"bf16": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
            {"optimizer_cpu_offload": True},
        ),
    ],
    ids=[
        "tp2+sp, layers",
        "tp2+sp, modules",
        "pp2, layers",
        "pp2, modules",
        "dp2, moments on the host",
        "dp2, states on the host",
        "dp2, states on the host, overlapped",
    ],
)
def test_levers_change_no_number(
    ranks: Pools, layout: dict[str, Any], levers: dict[str, Any]
) -> None:
    # Adam would make whole steps of rounding where a gradient is nearly 0; only its states are
    # moved bit for bit
    is_streamed = levers.keys() <= {"offload_optimizer_states", "optimizer_cpu_offload"}
    optimizer = "adam" if is_streamed else "sgd"
    flags = {"optimizer": optimizer, **layout}
    before = ranks.once(2, train_job, flags)
    after = ranks.run(2, train_job, {**flags, **levers})
    for plain, lever in zip(before, after):
        assert equal(lever["weights"], plain["weights"])
        for ours, theirs in zip(lever["metrics"], plain["metrics"]):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)
        assert all(lever["on host"]) is is_streamed
        assert lever["peaks"] == [
            f"perf/{phase}_peak_memory_gb"
            for phase in ("ref_log_probs", "forward_backward", "optimizer")
        ]


@pytest.mark.parametrize(
    "layout",
    [{}, pytest.param({"pipeline_model_parallel_size": 2}, marks=pytest.mark.full)],
    ids=["dp2", "pp2 x dp2"],
)
def test_parameters_that_are_gathered_late_are_whole_after_a_rollout(
    ranks: Pools, layout: dict[str, Any]
) -> None:
    """They are pushed, saved and compared then, and nobody waits for a forward pass. The first
    step's weights must be whole in the second one's passes, too, in the output layer, which is no
    module that is called."""
    late = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
    size = 2 * layout.get("pipeline_model_parallel_size", 1)
    plain, overlapped = (ranks.run(size, train_job, {**layout, **more}) for more in ({}, late))
    for ours, theirs in zip(overlapped, plain):
        assert all(
            torch.allclose(ours["weights"][n], theirs["weights"][n], atol=1e-4)
            for n in theirs["weights"]
        )


# -- optimizer states on the host ------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_states_visit_the_device_bucket_by_bucket(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamedStates, "bucket", ALIGNMENT)
    more: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def make() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(n, 8)) for n in (4, 16, 1, 7, 20, 3)]
        groups = [
            {"params": parameters[:4], "weight_decay": 0.1},
            {"params": parameters[4:], "lr": 0.3},
        ]
        return parameters, kind(groups, lr=0.1, fused=True, foreach=False, **more)

    (ours, inner), (theirs, reference) = make(), make()
    states = StreamedStates.install(inner)
    for k in range(4):
        for a, b in zip(ours, theirs):
            a.grad = torch.sin(b.detach() * 100 + k)
            b.grad = a.grad.clone()
        inner.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert [len(group["params"]) for group in inner.param_groups] == [4, 2]
    assert inner.state.keys() == set(ours)
    for a, b in zip(ours, theirs):
        for name, value in reference.state[b].items():
            assert torch.equal(inner.state[a][name], value)
            assert name == "step" or states.holds(inner.state[a][name].untyped_storage())


def test_an_optimizer_that_counts_steps_per_group_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(UserError, match="Adagrad"):
        StreamedStates.install(torch.optim.Adagrad([parameter]))


def test_offloaded_states_survive_a_checkpoint(tmp_path: Any) -> None:
    from tests.support.megatron_jobs import make_model

    model = make_model(tmp_path / "model")
    flags = {"hf_checkpoint": str(model), "offload_optimizer_states": True, "lr": 0.01}
    batch = make_batch()
    first = trainer(**flags, save=str(tmp_path / "save"))
    try:
        first.train(batch)
        first.save(0)
        expected = first.train(batch)
    finally:
        first.close()
    second = trainer(**flags, load=str(tmp_path / "save"))
    try:
        assert second.train(batch)["train/grad_norm"] == pytest.approx(
            expected["train/grad_norm"], rel=1e-5
        )
    finally:
        second.close()


# -- out of memory ---------------------------------------------------------------------------------

GPU_WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"


@pytest.mark.parametrize(
    ("verb", "phase"),
    [
        ("log_probs", "ref_log_probs"),
        ("forward_backward", "forward_backward"),
        ("optim_step", "optimizer"),
    ],
)
def test_running_out_of_memory_is_explained(
    verb: str, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = trainer(**LOSS, use_dynamic_batch_size=True, max_tokens_per_gpu=8192)

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError(GPU_WORDS)

    monkeypatch.setattr(backend, verb, fail)
    batch = make_batch([[0, 1], [2, 3, 4, 5]])
    try:
        with pytest.raises(OutOfMemory) as caught:
            backend.train(batch)
    finally:
        backend.close()
    error = caught.value
    assert f"in {phase}" in error.what and "Tried to allocate 2.00 GiB" in error.why
    assert f"{phase} " in error.why and "GB (here)" in error.why
    largest = max(
        [0, 1], [2, 3, 4, 5], key=lambda samples: sum(batch.total_lengths[i] for i in samples)
    )
    tokens = sum(batch.total_lengths[i] for i in largest)
    assert (
        f"largest micro-batch of this rank: {tokens} tokens in {len(largest)} samples" in error.why
    )
    assert ("--recompute-activations" in error.fix) is (phase == "forward_backward")
    assert ("--max-tokens-per-gpu 8192 → " in error.fix) is (phase != "optimizer")
    assert ("--no-use-distributed-optimizer" in error.fix) is False
    # without a GPU they are on the host anyway
    assert "--offload-optimizer-states" not in error.fix
    assert ("or more trainer GPUs" in error.fix) is (phase == "optimizer")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # it travels through Ray


def test_peaks_are_metrics_of_every_phase() -> None:
    backend = trainer(**LOSS, advantage_estimator="gspo")
    try:
        metrics = backend.train(make_batch())
    finally:
        backend.close()
    for phase in ("ref_log_probs", "log_probs", "forward_backward", "optimizer"):
        assert 0.01 < metrics[f"perf/{phase}_peak_memory_gb"] < 100
    assert 0.01 < metrics["perf/trainer_memory_gb"] < 100


def test_a_peak_is_that_of_its_phase() -> None:
    """Pages that were touched and given back count in the phase that touched them, not in the next
    one."""
    memory = PhaseMemory(make_config(), torch.device("cpu"))
    with memory.phase("large"):
        block = torch.ones(100_000_000, dtype=torch.uint8)
        del block
    with memory.phase("small"):
        pass
    assert memory.peaks["large"] - memory.peaks["small"] > 80e6


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(GPU_WORDS), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"
            ),
            True,
        ),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("out of memory of last year"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_other_errors_pass_unchanged() -> None:
    memory = PhaseMemory(make_config(), torch.device("cpu"))
    with pytest.raises(RuntimeError, match="shapes"), memory.phase("log_probs"):
        raise RuntimeError("shapes")


def advice(
    phase: str = "forward_backward",
    lengths: tuple[int, ...] = (900, 600),
    *,
    whole_step: bool = False,
    on_gpu: bool = True,
    **flags: Any,
) -> str:
    return "\n".join(
        remedies(make_config(**flags), phase, lengths, whole_step=whole_step, on_gpu=on_gpu)
    )


def test_remedies_carry_this_runs_values() -> None:
    dynamic = {"use_dynamic_batch_size": True, "rollout_max_response_len": 8192}
    assert "--max-tokens-per-gpu 8192 → 6144" in advice(**dynamic, max_tokens_per_gpu=8192)
    assert "8192 ÷ 1 = 8192" in advice(**dynamic, max_tokens_per_gpu=8192)
    assert "--max-tokens-per-gpu 32768 → 8192" in advice(**dynamic, max_tokens_per_gpu=32768)
    assert "--micro-batch-size 4 → 2" in advice(micro_batch_size=4, rollout_batch_size=4)
    assert "--seq-length 4096 → 3072" in advice(seq_length=4096)
    assert "--recompute-activations" not in advice(recompute_activations=True)
    tensor = {"tensor_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
    assert "--sequence-parallel" in advice(**tensor)
    assert "--sequence-parallel" not in advice(**tensor, sequence_parallel=True)


def test_a_full_host_gets_remedies_of_its_own() -> None:
    def ways(**flags: Any) -> str:
        return "\n".join(host_remedies(make_config(**flags)))

    narrow = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    assert "--exp-avg-dtype bf16" in ways(optimizer_cpu_offload=True)
    assert "--exp-avg-dtype bf16" not in ways(optimizer_cpu_offload=True, **narrow)
    assert "without --optimizer-cpu-offload" in ways(optimizer_cpu_offload=True)
    assert "without --optimizer-cpu-offload" not in ways(optimizer_cpu_offload=True, colocate=True)
    assert "--async-save" in ways(async_save=True, save="runs") and "--async-save" not in ways()
    assert "--max-tokens-per-gpu" not in ways(max_tokens_per_gpu=4096)


def test_what_does_not_lower_the_peak_is_not_advised_as_if_it_did() -> None:
    """Gradients of micro-batches add up, whatever their number; blocks of logits keep their size
    with fewer rows, until they are as wide as the vocabulary; moments are on the host where there
    is no GPU."""
    several, one = (advice(global_batch_size=256, whole_step=whole) for whole in (False, True))
    assert "--global-batch-size 256 → 128" in several.splitlines()[-1] and "only once" in several
    assert "--global-batch-size 256 → 128" in one.splitlines()[-1] and "becomes half of it" in one
    assert "only once" in advice(global_batch_size=256, whole_step=True, lengths=(900,))
    assert "--global-batch-size" not in advice(global_batch_size=3, rollout_batch_size=3)
    assert "--log-probs-chunk-size 512 → 128" in advice(log_probs_chunk_size=512)
    assert "--log-probs-chunk-size" not in advice(log_probs_chunk_size=128)
    assert "--log-probs-chunk-size" not in advice(on_gpu=False)
    for phase in ("forward_backward", "optimizer"):
        assert advice(phase, colocate=True).count("--offload-optimizer-states") == 1
        assert "--offload-optimizer-states" not in advice(phase, offload_optimizer_states=True)
        assert "--offload-optimizer-states" not in advice(phase, on_gpu=False)
    micro_batches = advice(use_dynamic_batch_size=True, max_tokens_per_gpu=8192).splitlines()
    assert [line.split()[0] for line in micro_batches[:2]] == [
        "--recompute-activations:",
        "--max-tokens-per-gpu",
    ]


@pytest.mark.parametrize(
    ("steps", "whole"), [([[[0, 1, 2], [3]]], False), ([[[0, 1, 2]], [[3], [4, 5]]], True)]
)
def test_the_largest_micro_batch_may_be_a_whole_step(
    steps: list[list[list[int]]], whole: bool
) -> None:
    batch = make_batch([[0, 1, 2, 3, 4, 5]])
    [step] = batch.steps
    batch.steps = [
        dataclasses.replace(step, micro_batches=micro_batches) for micro_batches in steps
    ]
    largest = LargestMicroBatch.of(batch.steps, batch.total_lengths, batch.sample_indices)
    assert len(largest.lengths) == 3 and largest.whole_step is whole


def test_one_long_sample_is_told_apart() -> None:
    flags = {
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 4096,
        "rollout_max_response_len": 16384,
    }
    said = advice(lengths=(12000,), **flags)
    assert "one sample of 12000 tokens" in said and "--context-parallel-size 1 → 2" in said
    assert "--max-tokens-per-gpu" not in said


def test_colocated_engines_are_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = advice(colocate=True, sglang_mem_fraction_static=0.8)
    assert "--sglang-mem-fraction-static 0.8 → 0.6: if the sleeping engines hold more" in asleep
    awake = advice(colocate=True, sglang_mem_fraction_static=0.8, offload_rollout=False)
    assert "--offload-rollout" in awake and "--sglang-mem-fraction-static 0.8 → 0.6" in awake
    assert "--sglang-mem-fraction-static" not in advice()
