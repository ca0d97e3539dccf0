"""Transformer Engine's layers give what the local ones give; what its presence must not change.

The tests marked ``gpu`` need a GPU and Transformer Engine. bfloat16 keeps 8 bits, so two right ways
to compute the same differ, by an amount that depends on the depth and the shape of a model. It is
measured instead of guessed: the local layers in float32 are the truth, their bfloat16 is one right
way, and Transformer Engine may be no more than twice as far off (the same number of roundings, in
other places).
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slime.errors import UserError
from slime.models import family_of
from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.megatron import forward, optimizer, te_layers
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.layers import RMSNorm
from tests.support.hf_configs import config_of
from tests.support.megatron_jobs import exported
from tests.support.megatron_stub import random_hf
from tests.support.trainers import trainer

needs_it = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None,
        reason="needs Transformer Engine, which is not installed",
    ),
]
VOCAB = 512
_SHAPE = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
}
# every expert is chosen, with its own weight: a choice between near equals would go either way
_EXPERTS = {"moe_intermediate_size": 128, "num_experts_per_tok": 4}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": True},  # biases, no norms of queries and keys
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "deepseek_v3": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
TE = {"bf16": True, "transformer_impl": "transformer_engine"}
WAYS: dict[str, dict[str, Any]] = {
    "truth": {},  # float32, local
    # torch's kernel, which need not be compiled
    "local": {"bf16": True, "attention_backend": "flash"},
    "te": TE,
}
#: Of the first model only.
MORE_WAYS: dict[str, dict[str, Any]] = {
    "te, gradients added by autograd": {**TE, "gradient_accumulation_fusion": False},
    "te, recomputed": {
        **TE,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def save_model(directory: Path, family: str) -> dict[str, Tensor]:
    """Random weights that are bfloat16 numbers, each product of about the size of what it is made
    of."""
    config = config_of(family, **{**_SHAPE, **MODELS[family]})
    spec = family_of(config).model_spec(config)
    tensors = {}
    for name, tensor in random_hf(family_of(config), spec, seed=3).items():
        scaled = (
            1 + 0.1 * tensor
            if "norm" in name
            else tensor / tensor.size(-1) ** 0.5
            if tensor.dim() > 1
            else tensor
        )
        tensors[name] = scaled.bfloat16().contiguous()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def long_batch() -> TrainBatch:
    """Two micro-batches of packed samples, from 2 to 300 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = [130, 71, 300, 12, 257, 2]
    responses = [100, 70, 171, 5, 128, 1]
    count = len(lengths)
    micro_batches = [[0, 1, 2], [3, 4, 5]]
    return TrainBatch(
        rollout_id=0,
        tokens=[torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths],
        response_lengths=responses,
        loss_masks=[torch.ones(r) for r in responses],
        rewards=[1.0] * count,
        raw_rewards=[1.0] * count,
        sample_indices=list(range(count)),
        group_indices=[0] * count,
        trajectory_ids=list(range(count)),
        rollout_mask_sums=[float(r) for r in responses],
        truncated=[False] * count,
        steps=[StepPlan(micro_batches, global_batch_size=count, num_loss_tokens=sum(responses))],
        rollout_log_probs=[torch.zeros(r) for r in responses],
    )


@dataclass
class Result:
    """What one way to compute the model gives; all on the host, in float64."""

    log_probs: Tensor
    entropy: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def opened(model: Path, **flags: Any) -> MegatronBackend:
    # plain gradients: nothing is clipped, and the step is too small to matter
    return trainer(hf_checkpoint=str(model), loss_type="sft_loss", lr=1e-9, clip_grad=0.0, **flags)


def compute(model: Path, **flags: Any) -> Result:
    backend = opened(model, **flags)
    try:
        weights, batch = exported(backend), long_batch()
        packed = backend._pack(batch, batch.steps[0].micro_batches)
        scores = forward.score(backend.model_chunks, packed, temperature=1.0, with_entropy=True)
        loss = backend.train(batch)["train/loss"]
        gradients = {
            name: parameter.main_grad.double().cpu()
            for name, parameter in backend.model_chunks[0].named_parameters()
        }
        return Result(
            torch.cat([score.log_probs for score in scores]).double().cpu(),
            torch.cat([score.entropy for score in scores if score.entropy is not None])
            .double()
            .cpu(),
            torch.tensor([loss]).double(),
            gradients,
            {name: tensor.cpu() for name, tensor in weights.items()},
        )
    finally:
        backend.close()


def distance(result: Tensor, truth: Tensor) -> float:
    """Relative, over all numbers together."""
    return float((result - truth).norm() / truth.norm())


Results = dict[str, Result]


@pytest.fixture(scope="module", params=MODELS)
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Results, Any]]:
    """Of every way, and the weights in the files."""
    model = tmp_path_factory.mktemp(request.param)
    saved = save_model(model, request.param)
    ways = {**WAYS, **MORE_WAYS} if request.param == "qwen3" else WAYS
    yield {way: compute(model, **flags) for way, flags in ways.items()}, saved


def theirs_of(found: Results) -> dict[str, Result]:
    return {way: result for way, result in found.items() if way.startswith("te")}


class TestOnAGpu:
    pytestmark = needs_it

    def test_scores_and_loss_are_as_near_the_truth_as_ours(
        self, results: tuple[Results, Any]
    ) -> None:
        truth, ours = results[0]["truth"], results[0]["local"]
        for way, theirs in theirs_of(results[0]).items():
            for name in ("log_probs", "entropy"):
                own, their = (
                    distance(getattr(one, name), getattr(truth, name)) for one in (ours, theirs)
                )
                print(f"{way}: {name} off by {their:.2e}, ours by {own:.2e}")
                assert their < 0.02 and their <= 2 * own + 1e-4, (way, name, own, their)
            # a mean over all tokens, in which roundings cancel
            assert abs(float(theirs.loss - truth.loss)) < 2e-3 * abs(float(truth.loss)), way

    def test_gradients_are_as_near_the_truth_as_ours(self, results: tuple[Results, Any]) -> None:
        truth, ours = results[0]["truth"].gradients, results[0]["local"].gradients
        everything = torch.cat([gradient.flatten() for gradient in truth.values()])
        for way, result in theirs_of(results[0]).items():
            theirs = result.gradients
            assert truth.keys() == ours.keys() == theirs.keys()
            own, their = (
                distance(torch.cat([one[n].flatten() for n in truth]), everything)
                for one in (ours, theirs)
            )
            each = {
                name: (distance(ours[name], true), distance(theirs[name], true))
                for name, true in truth.items()
            }
            farthest = max(each, key=lambda name: each[name][1])
            print(
                f"{way}: gradients off by {their:.2e}, ours by {own:.2e}; farthest {farthest} "
                f"{each[farthest]}"
            )
            assert their < 0.05 and their <= 2 * own + 1e-4, (way, own, their)
            # a single small parameter has luck or not
            assert not {
                name: pair for name, pair in each.items() if pair[1] > 3 * pair[0] + 5e-3
            }, way

    def test_weights_go_in_and_out_bit_by_bit(self, results: tuple[Results, Any]) -> None:
        found, saved = results
        for way in found.keys() - {"truth"}:
            assert found[way].weights.keys() == saved.keys()
            assert all(torch.equal(found[way].weights[name], saved[name]) for name in saved), way

    @pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
    def test_fp8_trains(self, tmp_path: Path, recipe: str) -> None:
        """Its flags reach the products: log-probs differ from bfloat16's, though not by much."""
        save_model(tmp_path, "qwen3")
        batch = long_batch()
        plain = compute(tmp_path, **TE)
        backend = opened(tmp_path, **TE, fp8_format="hybrid", fp8_recipe=recipe)
        try:
            dtypes = {name: tensor.dtype for name, tensor in exported(backend).items()}
            packed = backend._pack(batch, batch.steps[0].micro_batches)
            for _ in range(2):  # delayed scaling knows its factors from the second pass on
                scores = forward.score(backend.model_chunks, packed, temperature=1.0)
            log_probs = torch.cat([score.log_probs for score in scores]).double().cpu()
            metrics = backend.train(batch)
            assert {name: tensor.dtype for name, tensor in exported(backend).items()} == dtypes
            assert not backend.nonfinite_gradients()
        finally:
            backend.close()
        assert all(
            torch.isfinite(torch.tensor(value))
            for value in (metrics["train/loss"], metrics["train/grad_norm"])
        )
        off = distance(log_probs, plain.log_probs)
        print(f"FP8, {recipe}: log-probs differ by {off}")
        assert 1e-4 < off < 0.1

    def test_checkpoints_of_either_kind_of_layers_load_into_the_other(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        saved = save_model(tmp_path / "model", "qwen3")
        kinds: dict[str, dict[str, Any]] = {"local": {"bf16": True}, "te": TE}
        for name, flags in kinds.items():
            backend = opened(tmp_path / "model", **flags, save=str(tmp_path / name))
            backend.save(0)
            backend.close()
        for name, flags in kinds.items():
            other = next(kind for kind in kinds if kind != name)
            backend = opened(tmp_path / "model", **flags, load=str(tmp_path / other))
            back = exported(backend)
            backend.close()
            assert all(torch.equal(back[key].cpu(), saved[key]) for key in saved)


# -- without it ------------------------------------------------------------------------------------


class NormWithState(RMSNorm):
    """As Transformer Engine's norm: the same parameter, and a state beside it in checkpoints."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.shape == (3,)


@pytest.mark.parametrize("first_has_state", [False, True])
def test_layers_with_an_extra_state_share_checkpoints_with_others(
    first_has_state: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(te_layers, "is_installed", lambda: True)
    monkeypatch.setattr(te_layers, "_parts", lambda: {RMSNorm: NormWithState})
    kinds: list[dict[str, Any]] = [{}, {"transformer_impl": "transformer_engine"}]
    save_model(tmp_path, "qwen2")
    writer = trainer(
        hf_checkpoint=str(tmp_path), save=str(tmp_path / "saved"), **kinds[first_has_state]
    )
    weights = exported(writer)
    writer.save(0)
    writer.close()
    for kind in kinds:
        reader = trainer(hf_checkpoint=str(tmp_path), load=str(tmp_path / "saved"), **kind)
        norms = {
            type(module)
            for module in reader.model_chunks[0].modules()
            if isinstance(module, RMSNorm)
        }
        found = exported(reader)
        reader.close()
        assert norms == {NormWithState if kind else RMSNorm} and reader.next_rollout_id == 1
        assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_one_that_cannot_be_imported_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(te_layers, "is_installed", lambda: True)
    # and no more of it
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.HAVE_TE", False)
    with pytest.raises(UserError) as caught:
        trainer(transformer_impl="transformer_engine")
    assert "cannot be used" in caught.value.what and "ModuleNotFoundError" in caught.value.why
    assert ">=2.9,<2.12" in caught.value.fix


def test_the_optimizer_is_torchs_also_where_megatron_knows_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(torch.optim.Adam):
        """What `megatron.core.optimizer` would have imported."""

    core, distributed = optimizer.core_optimizer, optimizer.distrib_optimizer
    monkeypatch.setattr(core, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(core, "Adam", Other)
    monkeypatch.setattr(distributed, "Adam", Other)
    backend = trainer()
    kinds = {type(inner) for inner in optimizer.torch_optimizers(backend.optimizer)}
    backend.close()
    assert kinds == {torch.optim.AdamW}
    assert core.Adam is distributed.Adam is Other and not core.USING_PYTORCH_OPTIMIZER


def test_reset_moments_forgets_steps_that_are_counted_per_group() -> None:
    backend = trainer()
    [inner] = optimizer.torch_optimizers(backend.optimizer)
    for group in inner.param_groups:
        group["step"] = 7
    optimizer.reset_moments(backend.optimizer)
    backend.close()
    assert not inner.state and all("step" not in group for group in inner.param_groups)
