"""What a step with NaN or Inf leaves behind, and small things that used to go wrong in silence."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config
from slime.config.te_flags import missing
from slime.errors import UserError
from slime.samples.batch import TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.types import Group, Sample, SampleStatus
from slime.trainer.megatron import device, te_layers
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.offload import torch_optimizers
from slime.trainer.megatron.optimizer import apply_gradients
from slime.trainer.non_finite import NonFiniteTraining, write_failed_step
from tests.support.trainer_ranks import Pools, make_batch, shard, tiny_spec, trainer_config
from tests.support.trainers import poisoned, trainer


class Letters:
    """A tokenizer: one letter per token."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in tokens)


# -- NaN and Inf -----------------------------------------------------------------------------------


def failing_job(info: Any, layout: dict[str, Any], sample: int) -> Any:
    """What each rank keeps of a step in which ``sample`` has no finite reward."""
    backend = MegatronBackend(trainer_config(**layout, actor_num_gpus_per_node=2), info)
    backend.setup(spec=tiny_spec(), initialise=True)
    batch = poisoned(make_batch([[0, 1], [2, 3], [4], [5]]), sample)
    if backend.layout.data_parallel_size == 2:
        batch = shard(batch, [[0, 1, 4], [2, 3, 5]][backend.data_parallel_rank], [[0, 1], [2]])
    try:
        backend.train(batch)
    except NonFiniteTraining as error:
        return backend.failed_step, error.sample_indices, error.parameters
    return None


@pytest.mark.parametrize(
    "layout",
    [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}],
    ids=["data parallel", "tensor parallel", "pipeline parallel"],
)
def test_a_failed_step_can_be_read(ranks: Pools, layout: dict[str, Any], tmp_path: Path) -> None:
    kept = ranks.run(2, failing_job, layout, 3)
    steps, indices, names = zip(*kept)
    assert indices[0] == indices[1] == [102, 103]
    assert names[0] == names[1] and "decoder.layers.1.mlp.linear_fc1.weight" in names[0]
    lines, summary, tensors = write_failed_step(tmp_path / "crash", steps, Letters())

    samples = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [s["sample_index"] for s in samples] == [100, 101, 102, 103, 104, 105]
    bad = samples[3]
    assert bad["not_finite"] == ["advantages", "returns", "reward"] and bad["reward"] == "nan"
    batch = make_batch()
    assert bad["prompt"] + bad["response"] == Letters().decode(batch.tokens[3].tolist())
    assert len(bad["response"]) == batch.response_lengths[3]
    assert (
        bad["trained_tokens"] == int(batch.loss_masks[3].sum()) and samples[0]["not_finite"] == []
    )

    details = json.loads(summary.read_text())
    assert [m["sample_indices"] for m in details["micro_batches_not_finite"]] == [[102, 103]]
    assert details["micro_batches_not_finite"][0]["loss"] == "nan"
    found = {p["name"]: p for p in details["parameters_not_finite"]}
    assert set(found) == set(names[0])
    # tied: the embedding has both roles
    assert found["embedding.word_embeddings.weight"]["not_finite"] > 0

    record = torch.load(tensors)  # with its safe defaults
    assert record["rollout_id"] == 0 and record["step"] == 0
    sample = record["samples"][3]
    assert torch.equal(sample["tokens"], batch.tokens[3]) and sample["advantages"].isnan().all()
    assert sample["training_log_probs"].shape == sample["loss_mask"].shape


def test_only_the_steps_own_samples_are_kept(tmp_path: Path) -> None:
    backend = trainer(lr=1e-3)
    try:
        with pytest.raises(NonFiniteTraining) as caught:
            backend.train(poisoned(make_batch(num_steps=3), sample=2))
        assert "step 1" in caught.value.what and backend.failed_step is not None
        shown = write_failed_step(tmp_path, [backend.failed_step], None)
    finally:
        backend.close()
    samples = [json.loads(line) for line in shown[0].read_text().splitlines()]
    assert [s["sample_index"] for s in samples] == [102, 103] and "prompt" not in samples[0]
    assert [s["micro_batch"] for s in samples] == [0, 0]


def test_an_overflow_going_back_names_the_parameters() -> None:
    backend = trainer()
    batch = make_batch()
    batch.rewards = [3e38 * r for r in (1, -1, 1, -1, 1, -1)]
    try:
        with pytest.raises(NonFiniteTraining) as caught:
            backend.train(batch)
    finally:
        backend.close()
    assert caught.value.parameters and caught.value.parameters[0] in caught.value.why
    assert backend.failed_step is not None and backend.failed_step.shard is not None


def test_a_loss_scale_that_overflows_finds_its_value() -> None:
    """float16: the first scale is too large; steps are skipped, not the run stopped, until it
    fits."""
    backend = trainer(fp16=True, fp32=False, lr=1e-4, initial_loss_scale=2.0**40, hysteresis=1)
    try:
        skipped = []
        for _ in range(60):
            skipped.append(backend.train(make_batch())["train/skipped_steps"])
            if not skipped[-1]:
                break
    finally:
        backend.close()
    assert skipped[0] == 1.0 and skipped[-1] == 0.0


def test_a_rank_whose_share_is_empty_clips_nothing() -> None:
    backend = trainer()
    try:
        batch = make_batch()
        backend.train(batch)
        for inner in torch_optimizers(backend.optimizer):
            for group in inner.param_groups:
                group["params"] = []
        for part in backend.optimizer.chained_optimizers:
            part.step_with_ready_grads = lambda: True
            part.prepare_grads = lambda: False
            part.get_grad_norm = lambda: 7.0
        backend.optimizer.get_grad_norm = lambda: 7.0
        assert apply_gradients(backend.optimizer, 1.0).applied
    finally:
        backend.close()


# -- log-probs of the engine -----------------------------------------------------------------------


def test_the_difference_to_the_engine_is_measured_before_training() -> None:
    """With the engine's log-probs as the old ones and several steps, later steps would count what
    training changed."""
    batch = make_batch(num_steps=3)
    backend = trainer(use_rollout_logprobs=True, lr=0.05)
    try:
        exact = backend.log_probs(batch)
        assert exact is not None
        batch.rollout_log_probs = [values.clone() for values in exact]
        metrics = backend.train(batch)
        later = [step["train/train_rollout_logprob_abs_diff"] for step in backend.step_metrics]
    finally:
        backend.close()
    assert later[0] == pytest.approx(0.0, abs=1e-6) and min(later[1:]) > 1e-3, (
        "training moves the policy"
    )
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.0, abs=1e-5)
    first = batch.steps[0]
    expected = sum(
        float((exact[i] * batch.loss_masks[i]).sum())
        / batch.rollout_mask_sums[i]
        / first.global_batch_size
        for samples in first.micro_batches
        for i in samples
    )
    assert metrics["rollout/log_probs"] == pytest.approx(expected, rel=1e-4)


def finished(index: int, **fields: Any) -> Sample:
    return Sample(
        index=index,
        tokens=[1, 2, 3, 4, 5],
        response_length=3,
        reward=1.0,
        status=SampleStatus.COMPLETED,
        **fields,
    )


@pytest.mark.parametrize("name", ["rollout_log_probs", "teacher_log_probs"])
def test_a_missing_number_among_log_probs_is_named(name: str) -> None:
    samples = [finished(7, **{name: [-1.0, -2.0, -3.0]}), finished(8, **{name: [-1.0, None, -3.0]})]
    config = make_config(rollout_batch_size=1, n_samples_per_prompt=2, hf_checkpoint="/nowhere")
    with pytest.raises(UserError) as caught:
        to_train_batches(
            [Group(index=0, trajectories=[[s] for s in samples])], config, TrainLayout(), 0
        )
    assert (
        f"a sample (index 8) with {name} that are not finite: nan at position 1"
        in caught.value.what
    )


# -- determinism -----------------------------------------------------------------------------------


def test_deterministic_mode_reaches_torch_and_the_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    for name in names:
        monkeypatch.setenv(name, "x")  # so that they are put back afterwards
        monkeypatch.delenv(name)
    try:
        backend = trainer(deterministic_mode=True)
        try:
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert [os.environ[name] for name in names] == [":4096:8", "Ring", "0"]
            assert backend.train(make_batch())["train/grad_norm"] > 0, (
                "nothing it uses lacks a deterministic kernel"
            )
        finally:
            backend.close()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_what_is_not_deterministic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    with pytest.raises(UserError, match="NCCL_ALGO=NVLS"):
        make_config(deterministic_mode=True)
    assert make_config() is not None
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    with pytest.raises(UserError, match="NVTE_ALLOW_NONDETERMINISTIC_ALGO"):
        make_config(deterministic_mode=True)


def test_dropout_of_attention_is_refused() -> None:
    with pytest.raises(UserError, match="--attention-dropout"):
        trainer(attention_dropout=0.1)


# -- Transformer Engine ----------------------------------------------------------------------------

NEEDY = [
    {"transformer_impl": "transformer_engine"},
    {"fp8_format": "hybrid"},
    {"use_precision_aware_optimizer": True},
]


@pytest.mark.parametrize("flags", NEEDY, ids=lambda flags: next(iter(flags)))
def test_flags_that_need_transformer_engine_say_so(flags: dict[str, Any]) -> None:
    config = make_config(**flags)
    option = "--" + next(iter(flags)).replace("_", "-")
    with pytest.raises(UserError) as caught:
        te_layers.check(config)
    assert (
        option in caught.value.what
        and "not installed" in caught.value.why
        and "pip install" in caught.value.fix
    )
    with pytest.raises(UserError, match=option):
        trainer(**flags)


def test_flags_that_act_in_its_layers_need_them() -> None:
    error = missing({"fp8_format": "hybrid", "transformer_impl": "auto"}, installed=True)
    assert error is not None and "--transformer-impl transformer_engine" in error.what
    assert (
        missing({"fp8_format": "hybrid", "transformer_impl": "transformer_engine"}, installed=True)
        is None
    )
    assert missing({"attention_backend": "flash"}, installed=False) is None


def test_fp8_flags_reach_the_transformer_config() -> None:
    config = make_config(
        fp8_format="hybrid", fp8_recipe="tensorwise", transformer_impl="transformer_engine"
    )
    assert (
        config.megatron.transformer["fp8"] == "hybrid"
        and config.megatron.transformer["fp8_recipe"] == "tensorwise"
    )
    assert te_layers.transformer_arguments(config)["transformer_impl"] == "transformer_engine"
    assert te_layers.transformer_arguments(make_config()) == {"transformer_impl": "local"}


def test_every_part_of_a_layer_has_its_counterpart() -> None:
    """The walk over the block spec, with stand-ins for Transformer Engine's classes: no local part
    is left."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from slime.trainer.megatron.attention import PackedAttention
    from slime.trainer.megatron.layers import RMSNorm
    from slime.trainer.megatron.model import local_layers, put_in_parts

    backend = trainer()
    try:
        config = backend.model_chunks[0].module.config
        block = local_layers(config, None)
        put_in_parts(block, config, backend.spec)
    finally:
        backend.close()
    parts = {
        kind: type(f"TE{kind.__name__}", (), {})
        for kind in (ColumnParallelLinear, RowParallelLinear)
    }
    parts |= {RMSNorm: type("TENorm", (), {}), PackedAttention: type("TEAttention", (), {})}
    te_layers.replace_parts(block, parts)
    layer = block.layer_specs[0].submodules
    attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
    assert block.layer_norm is parts[RMSNorm] is layer.input_layernorm is layer.pre_mlp_layernorm
    assert attention.core_attention is parts[PackedAttention]
    assert attention.linear_qkv is mlp.linear_fc1 is parts[ColumnParallelLinear]
    assert attention.linear_proj is mlp.linear_fc2 is parts[RowParallelLinear]
    assert attention.q_layernorm is attention.k_layernorm is parts[RMSNorm]


def test_attention_backend_flash_is_torchs_kernel_even_where_there_is_another_one() -> None:
    from slime.trainer.megatron.model import build_model_chunks

    backend = trainer()
    try:
        config, spec = backend.config, backend.spec
        chosen = dataclasses.replace(
            config, train=dataclasses.replace(config.train, attention_backend="flash")
        )
        kernels = [
            build_model_chunks(spec, one, initialise=True)[0].decoder.layers[0]
            for one in (config, chosen)
        ]
    finally:
        backend.close()
    assert [layer.self_attention.core_attention.torch_only for layer in kernels] == [False, True]


def test_no_gpu_is_no_obstacle() -> None:
    assert not device.has_gpu()
    backend = trainer(optimizer_cpu_offload=True)  # here the optimizer is on the CPU anyway
    try:
        assert backend.optimizer.config.optimizer_offload_fraction == 1.0, (
            "on a GPU all of it moves, not nothing"
        )
        assert backend.train(make_batch())["train/grad_norm"] > 0
    finally:
        backend.close()
