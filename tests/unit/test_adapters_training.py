"""Training of adapters in one process against PEFT and against the definition; what is frozen,
saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from slime.checkpoints.peft_files import read_adapter
from slime.errors import UserError
from slime.models.adapters import begins_with_zeros, is_adapter_parameter, peft_name
from slime.trainer.megatron import forward
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.offload import Offloader, torch_optimizers
from slime.weights.source import ModelSource
from tests.support.parity import EP2, PP2, SP, TP2, worst
from tests.support.peft_directories import adapters_for, random_adapter
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard, trainer_config
from tests.support.trainers import LOSS, gradients, trainer

LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
TOLERANCE = 1e-5
VOCABULARY = ("embed_tokens", "lm_head")


def tensors_of(backend: Any) -> dict[str, Tensor]:
    source = ModelSource(backend.model_chunks, backend.hf_config, adapters=backend.adapters)
    return {name: tensor.clone() for name, tensor in source.tensors()}


def log_probs_of(backend: MegatronBackend, role: str = "policy") -> list[Tensor]:
    found = backend.log_probs(make_batch(), role)
    assert found is not None
    return found


# -- the same numbers as elsewhere -----------------------------------------------------------------


def weights_of(samples: int) -> list[float]:
    return [1.0 + 0.3 * i for i in range(samples)]


def our_loss_and_gradients(**flags: Any) -> tuple[float, dict[str, Tensor]]:
    """Of the sum of all response tokens' log-probs, weighted by sample."""
    backend = trainer(**flags)
    try:
        batch = make_batch()
        packed = backend._pack(batch, batch.steps[0].micro_batches)
        weights = weights_of(len(batch.tokens))

        def loss_of(scores: Any, micro_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            parts = zip(micro_batch.samples, micro_batch.split(scores.log_probs))
            loss = -torch.stack([weights[i] * part.sum() for i, part in parts]).sum()
            return loss, {"loss": loss.detach()}

        results = forward.forward_backward(
            backend.model_chunks, packed, loss_of, gradient_scale=float(len(packed)),
            **backend._score_options(True) | {"with_entropy": False, "temperature": 1.0},
        )  # fmt: skip
        with torch.no_grad():
            for parameter in backend.model_chunks[0].parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.main_grad)
        return sum(float(one.metrics["loss"]) for one in results), tensors_of(backend)
    finally:
        backend.close()


def their_loss(model: Any, **call: Any) -> Tensor:
    batch = make_batch()
    loss = torch.zeros(())
    for weight, tokens, count in zip(
        weights_of(len(batch.tokens)), batch.tokens, batch.response_lengths, strict=True
    ):
        logits = model(input_ids=tokens[None], **call).logits[0]
        log_probs = F.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None])[:, 0]
        loss = loss - weight * log_probs[-count:].sum() if count else loss
    return loss


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        pytest.param("mistral", ("all-linear", *VOCABULARY), id="vocabulary"),
        pytest.param("mistral", ("lm_head",), id="head"),
        pytest.param("qwen3", (), id="qwen3-all"),
        pytest.param("qwen3", ("v_proj", "gate_proj"), id="qwen3-some"),
    ],
)
def test_loss_and_gradients_are_those_of_peft(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    import peft

    model = save_tiny(family, tmp_path, layers=2)
    lora = {**LORA, "lora_target_modules": targets}
    given = random_adapter(tmp_path, tmp_path / "adapter", **lora)
    loss, gradients = our_loss_and_gradients(
        hf_checkpoint=str(tmp_path), lora_adapter_path=str(tmp_path / "adapter"), **lora
    )
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", is_trainable=True)
    reference = their_loss(wrapped)
    reference.backward()
    assert loss == pytest.approx(float(reference), rel=TOLERANCE)
    theirs = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in wrapped.named_parameters()
        if parameter.requires_grad
    }
    assert given.keys() == gradients.keys() <= theirs.keys()
    for name, gradient in gradients.items():
        expected = theirs[name]
        assert expected is not None and worst(gradient, expected) <= TOLERANCE, name


@pytest.mark.parametrize(
    ("family", "shared"),
    [
        ("glm4", False),
        ("phi3", False),
        ("qwen3_moe", True),
        ("deepseek_v3", False),
        ("gpt_oss", False),
        ("qwen3_5_text", False),
        ("qwen3_5_moe_text", True),
        pytest.param("qwen3_5_moe_text", False, marks=pytest.mark.full),
        pytest.param("gpt_oss", True, marks=pytest.mark.full),
    ],
)
def test_loss_and_gradients_are_those_of_the_definition(
    family: str, shared: bool, tmp_path: Path
) -> None:
    """W + s·B·A in place of W, differentiated by torch."""
    model = save_tiny(family, tmp_path, layers=2)
    lora: dict[str, Any] = dict(LORA)
    if shared:
        lora |= {"lora_rank": 4, "lora_experts": "shared-outer", "lora_rank_by_topk": True}
    sides = random_adapter(tmp_path, tmp_path / "adapter", **lora)
    loss, gradients = our_loss_and_gradients(
        hf_checkpoint=str(tmp_path), lora_adapter_path=str(tmp_path / "adapter"), **lora
    )
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in sides.items()}
    chosen = adapters_for(tmp_path, **lora)

    def delta(module: str) -> Tensor | None:
        is_expert = ".experts." in module
        scaling = chosen.expert_scaling if is_expert else chosen.scaling
        stem, _, leaf = module.rpartition(".")
        common = f"{stem.rpartition('.')[0]}.{leaf}"
        found = [
            leaves.get(peft_name(module, side), leaves.get(peft_name(common, side)))
            for side in ("A", "B")
        ]
        if found[0] is None or found[1] is None:
            return None
        return scaling * found[1] @ found[0]

    state = {}
    for name, weight in model.state_dict().items():
        module = name.removesuffix(".weight")
        stem, _, leaf = name.rpartition(".experts.")
        if stem and weight.dim() == 3:  # transformers stacks experts
            experts = [f"{stem}.experts.{i}" for i in range(weight.size(0))]
            parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
            deltas = [[delta(f"{expert}.{part}") for part in parts] for expert in experts]
            given = [[one for one in row if one is not None] for row in deltas]
            if family == "gpt_oss":  # [experts, in, out], in which gate and up alternate
                added = torch.stack([torch.stack(row, 1).flatten(0, 1).t() for row in given])
            else:
                added = torch.stack([torch.cat(row) for row in given])
            state[name] = weight + added
        else:
            added = delta(module) if weight.dim() == 2 else None
            state[name] = weight if added is None else weight + added
    reference = their_loss(
        lambda **call: torch.func.functional_call(model, state, kwargs=call, tie_weights=False)
    )
    reference.backward()
    assert loss == pytest.approx(float(reference), rel=TOLERANCE)
    assert gradients.keys() == leaves.keys()
    for name, gradient in gradients.items():
        expected = leaves[name].grad
        # the decays of a delta net are sums of numbers that cancel
        tolerance = 10 * TOLERANCE if ".in_proj_a." in name else 2 * TOLERANCE
        assert expected is not None and worst(gradient, expected) <= tolerance, name


def test_gradients_of_micro_batches_are_not_rounded(tmp_path: Path) -> None:
    """With bfloat16 weights: 16 micro-batches give what one of 16 samples gives, to float32."""
    save_tiny("mistral", tmp_path, layers=2)
    lora = LORA | {"lora_target_modules": ("all-linear", *VOCABULARY)}
    random_adapter(tmp_path, tmp_path / "adapter", **lora)
    flags = {"hf_checkpoint": str(tmp_path), "lora_adapter_path": str(tmp_path / "adapter"), **lora}
    found = []
    for micro_batches in ([[i] for i in range(16)], [list(range(16))]):
        backend = trainer(bf16=True, fp32=False, rollout_batch_size=16, **flags)
        try:
            batch = make_batch(micro_batches, num_samples=16)
            found.append(gradients(backend, batch))
        finally:
            backend.close()
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float32
        assert worst(gradient, found[1][name]) <= 1e-5, name


# -- the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3_moe", {"fp32": False, "bf16": True}), ("mistral", {"fp32": True})]
)
def test_at_first_the_policy_is_its_base_to_the_bit(
    family: str, dtype: dict[str, bool], tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, layers=2)
    found = []
    adapted = LORA | ({"lora_target_modules": VOCABULARY} if family == "mistral" else {})
    for lora in ({}, adapted):
        backend = trainer(hf_checkpoint=str(tmp_path), **LOSS, **dtype, **lora)
        try:
            found.append(log_probs_of(backend))
            if lora:
                assert backend.reference_is_policy
                for name, tensor in tensors_of(backend).items():
                    assert bool(tensor.any()) != begins_with_zeros(name), name
                found.append(log_probs_of(backend, "reference"))
        finally:
            backend.close()
    plain = found[0]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def first_values_job(info: Any, flags: dict[str, Any]) -> dict[str, Tensor]:
    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    return tensors_of(backend)


def test_first_values_of_the_vocabulary_are_pefts(tmp_path: Path, ranks: Pools) -> None:
    import peft

    model = save_tiny("mistral", tmp_path, layers=2)
    flags = {
        "hf_checkpoint": str(tmp_path), "lora_rank": 64, "lora_target_modules": VOCABULARY,
    }  # fmt: skip
    (one,) = ranks.run(1, first_values_job, flags)
    settings = peft.LoraConfig(r=64, target_modules=list(VOCABULARY))
    theirs = {
        name.replace(".default", ""): parameter
        for name, parameter in peft.get_peft_model(model, settings).named_parameters()
    }
    for name, tensor in one.items():
        assert tensor.shape == theirs[name].shape
        assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.1), name
        assert bool(tensor.any()) == bool(theirs[name].any())
    for other in ranks.run(4, first_values_job, {**flags, **TP2, **SP, **PP2}):
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())


def test_first_values_depend_on_no_layout(tmp_path: Path, ranks: Pools) -> None:
    save_tiny("qwen3_moe", tmp_path, layers=2)
    flags = {"hf_checkpoint": str(tmp_path), **LORA}
    (one,) = ranks.run(1, first_values_job, flags)
    for name, tensor in one.items():
        if "lora_A" in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.5 * bound < tensor.abs().max() <= bound, name
        else:
            assert not tensor.any()
    assert len({tensor.flatten()[0].item() for name, tensor in one.items() if "_A" in name}) > 8
    for other in ranks.run(4, first_values_job, {**flags, **TP2, **SP, **EP2}):
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    (reseeded,) = ranks.run(1, first_values_job, {**flags, "seed": 7})
    assert any(not torch.equal(reseeded[name], tensor) for name, tensor in one.items())


# -- what is frozen --------------------------------------------------------------------------------


def test_only_adapters_are_trained(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, layers=2)
    backend = trainer(hf_checkpoint=str(tmp_path), **LOSS, **LORA, lr=0.05)
    try:
        named = dict(backend.model_chunks[0].named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        batch = make_batch()
        base = log_probs_of(backend, "reference")
        for _ in range(2):  # the first step moves B alone
            backend.train(batch)
        for name, parameter in named.items():
            is_adapter = is_adapter_parameter(name)
            assert parameter.requires_grad == hasattr(parameter, "main_grad") == is_adapter
            assert torch.equal(parameter, before[name]) != is_adapter, name
        states = [
            value.numel()
            for inner in torch_optimizers(backend.optimizer)
            for state in inner.state.values()
            for key, value in state.items()
            if key == "exp_avg"
        ]
        trained = sum(p.numel() for name, p in named.items() if is_adapter_parameter(name))
        assert sum(states) == trained
        # the reference is the base, whatever was trained; the policy is not
        after = log_probs_of(backend, "reference")
        policy = log_probs_of(backend)
        assert all(torch.equal(a, b) for a, b in zip(base, after, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(base, policy, strict=True))
        assert not backend.reference_is_policy and not backend.copies
        tokens = [1, 5, 3, 8, 2]
        assert backend.canary_log_probs(tokens) != backend.canary_log_probs(tokens, base=True)
        # memory goes and comes back
        weights = [p.detach().clone() for p in backend.model_chunks[0].parameters()]
        offloader = Offloader(backend.model_chunks, backend.optimizer, pin=False)
        for _ in range(2):  # the base is copied once
            assert offloader.sleep() > 0
            kept = [copy.data_ptr() for copy in offloader._frozen.values()]
            assert kept and all(not p.untyped_storage().nbytes() for p in named.values())
            offloader.wake()
        assert kept == [copy.data_ptr() for copy in offloader._frozen.values()]
        now = backend.model_chunks[0].parameters()
        assert all(torch.equal(a, b) for a, b in zip(weights, now, strict=True))
    finally:
        backend.close()


def test_rows_of_other_parts_stay_zero(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, layers=2)
    backend = trainer(
        hf_checkpoint=str(tmp_path), **LORA, lora_target_modules=("q_proj", "v_proj"), lr=0.05
    )
    try:
        for _ in range(2):
            backend.train(make_batch())
        up = backend.model_chunks[0].module.decoder.layers[0].self_attention.linear_qkv.adapter.up
        head = backend.spec.head_dim
        zeros = (up == 0).all(1)
        # two groups of two query heads, a key and a value
        assert [bool(part.all()) for part in zeros.split(head)] == [False, False, True, False] * 2
        assert not any("k_proj" in name for name in tensors_of(backend))
    finally:
        backend.close()


def test_dropout_is_in_training_passes_alone(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, layers=2)
    random_adapter(tmp_path, tmp_path / "adapter", **LORA)
    common = {"hf_checkpoint": str(tmp_path), **LORA, "optimizer": "sgd"}
    common["lora_adapter_path"] = str(tmp_path / "adapter")
    found = []
    for dropout in ({}, {"lora_dropout": 0.5}):
        backend = trainer(**common, **dropout)
        try:
            scored = log_probs_of(backend)
            found.append((scored, backend.train(make_batch())["train/grad_norm"]))
        finally:
            backend.close()
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] != found[1][1]


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path / "hf", layers=2)
    flags = {
        "hf_checkpoint": str(tmp_path / "hf"), "load": str(tmp_path / "run"),
        "save": str(tmp_path / "run"), "bf16": True, **LOSS, **LORA,
    }  # fmt: skip
    batches = [make_batch(seed=i) for i in range(3)]
    first = trainer(**flags)
    try:
        first.train(batches[0])
        first.train(batches[1])
        first.save(1)
        first.train(batches[2])
        unbroken = tensors_of(first)
    finally:
        first.close()
    saved = sum(f.stat().st_size for f in (tmp_path / "run" / "iter_0000001").glob("*.distcp"))
    numel = sum(tensor.numel() for tensor in unbroken.values())
    assert saved < 1.5 * 14 * numel + 200_000, "the base is in no checkpoint"
    second = trainer(**flags)
    try:
        assert second.next_rollout_id == 2 and not second.reference_is_policy
        second.train(batches[2])
        resumed = tensors_of(second)
        second.export(str(tmp_path / "exported"))
    finally:
        second.close()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())
    exported = read_adapter(tmp_path / "exported")
    assert exported.rank == LORA["lora_rank"] and exported.alpha == LORA["lora_alpha"]
    assert exported.names() == resumed.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.to(torch.bfloat16), resumed[name])


def unbroken_job(
    info: Any, flags: dict[str, Any], batch: Any, num_steps: int
) -> list[dict[str, Tensor]]:
    """The adapters after each step of one process."""
    backend = MegatronBackend(trainer_config(**flags), info)
    backend.setup()
    found = []
    for _ in range(num_steps):
        backend.train(shard(batch, range(6), [[i] for i in range(6)]))
        found.append(tensors_of(backend))
    return found


def save_job(info: Any, flags: dict[str, Any], members: list[Any], batch: Any) -> dict[str, Tensor]:
    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    start = backend.setup()
    mine = members[backend.data_parallel_rank]
    backend.train(shard(batch, mine, [[i] for i in range(len(mine))]))
    backend.save(start)
    return tensors_of(backend)


@pytest.mark.parametrize(
    ("family", "adapted"),
    [
        pytest.param("qwen3_moe", {"lora_experts": "per-expert"}, id="per-expert"),
        pytest.param("qwen3_moe", {"lora_experts": "shared-outer"}, id="shared-outer"),
        pytest.param("gpt_oss", {"lora_experts": "per-expert"}, id="stacks"),
        # 97 tokens, which two ranks fill up to 98
        pytest.param("mistral", {"lora_target_modules": VOCABULARY}, id="vocabulary"),
    ],
)
def test_a_checkpoint_of_adapters_loads_at_any_layout(
    family: str, adapted: dict[str, Any], tmp_path: Path, ranks: Pools
) -> None:
    save_tiny(family, tmp_path / "hf", layers=4 if "shared-outer" in adapted.values() else 2)
    flags = {
        "hf_checkpoint": str(tmp_path / "hf"), "adam_eps": 1e-3, "rollout_batch_size": 12,
        **adapted, **LORA,
    }  # fmt: skip
    batch = make_batch()
    one: list[Any] = [range(6)]
    two: list[Any] = [[0, 1, 4], [2, 3, 5]]
    layouts: list[tuple[int, dict[str, Any], list[Any]]] = [
        (2, PP2, one),
        (4, {**TP2, **EP2}, two),
        (1, {}, one),
    ]
    if "shared-outer" in adapted.values():
        layouts = [(4, {**TP2, **SP, **EP2}, two), (2, PP2, one)]
    elif family == "mistral":
        layouts = [(4, {**TP2, **SP, **PP2}, one), (1, {}, one)]

    run = {"load": str(tmp_path / "run"), "save": str(tmp_path / "run")}
    resharded = [
        ranks.run(size, save_job, {**flags, **run, **layout}, members, batch)[0]
        for size, layout, members in layouts
    ]
    [unbroken] = ranks.run(1, unbroken_job, flags, batch, len(layouts))
    for here, there in zip(resharded, unbroken, strict=True):
        for name, tensor in there.items():
            # Adam magnifies the rounding, differently on each CPU; a lost moment would make 0.1
            assert worst(here[name], tensor) <= 2e-4, name


def test_what_does_not_belong_to_the_adapters_is_refused(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "hf", layers=2)
    save_tiny("qwen3", tmp_path / "other", layers=2)
    common: dict[str, Any] = {"hf_checkpoint": str(tmp_path / "hf")}
    run = {"load": str(tmp_path / "run"), "save": str(tmp_path / "run")}
    backend = trainer(**common, **run, **LORA)
    try:
        backend.train(make_batch())
        backend.save(0)
    finally:
        backend.close()
    for flags, said in (
        (run | LORA | {"lora_alpha": 7.0}, "--lora-alpha gave 6.0, now 7.0"),
        (run | LORA | {"lora_target_modules": ("q_proj",)}, "--lora-target-modules"),
        (run, "it holds only adapters"),
        ({"load": str(tmp_path / "other")} | LORA, "another base model"),
    ):
        with pytest.raises(UserError) as caught:
            trainer(**common, **flags).close()
        assert said in str(caught.value)
