"""Routing replay: the experts of one pass are used again in another, with weights of the current
router."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.config import make_config
from slime.errors import UserError
from slime.processes.host import free_port
from slime.run.preflight import check_architecture
from slime.samples.batch import TrainBatch
from slime.trainer import update as update_module
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.moe_router import choose_experts
from slime.trainer.megatron.parallel import RankInfo
from slime.trainer.megatron.replay import RoutingGuide
from tests.support.parity import (
    CP2,
    EP2,
    ETP1,
    LOSS,
    PP2,
    RECOMPUTE,
    SP,
    TP2,
    VIRTUAL,
    parity_job,
    worst,
)
from tests.support.tiny_models import EXPERTS, TOPK, save_moe, save_tiny
from tests.support.trainer_ranks import Pools, make_batch, trainer_config
from tests.support.trainers import whole_gradients

LAYERS, MICRO_BATCHES = 4, [[0, 1], [2, 3], [], [4, 5]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("moe"))


def engine_batch(seed: int = 5) -> TrainBatch:
    """Two samples share a prompt, and the experts of its tokens; each row holds different
    experts."""
    batch = make_batch(MICRO_BATCHES)
    prompt = torch.arange(20)
    for i in (0, 1):
        batch.tokens[i] = torch.cat([prompt, torch.tensor([3 + i, 4, 5])])
        batch.response_lengths[i], batch.loss_masks[i] = 3, torch.ones(3)
    batch.rollout_log_probs = [-torch.rand(r) for r in batch.response_lengths]
    generator = torch.Generator().manual_seed(seed)

    def routed(length: int) -> Tensor:
        scores = torch.rand(length - 1, LAYERS, EXPERTS, generator=generator)
        return scores.argsort(dim=-1)[..., :TOPK].to(torch.int32)

    experts = [routed(len(tokens)) for tokens in batch.tokens]
    experts[1][: len(prompt)] = experts[0][: len(prompt)]
    batch.payloads["routed_experts"] = experts
    return batch


def backend_of(model: Path, **flags: Any) -> MegatronBackend:
    config = trainer_config(hf_checkpoint=str(model), optimizer="sgd", lr=0.3, **flags)
    backend = MegatronBackend(config, RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    backend.setup()
    return backend


class Watch:
    """The experts that each layer used, forward passes in order: (layer, gradient enabled,
    choices)."""

    def __init__(self, backend: MegatronBackend) -> None:
        self.seen: list[tuple[int, bool, Tensor]] = []
        assert backend.routing is not None
        for layer in backend.routing.layers:
            layer.router.register_forward_hook(self._note)

    def _note(self, router: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        self.seen.append((router.layer_number, torch.is_grad_enabled(), output[1].clone()))

    def take(self, *, with_gradient: bool | None = None) -> dict[int, list[Tensor]]:
        by_layer: dict[int, list[Tensor]] = {}
        for number, gradient, choices in self.seen:
            if with_gradient is None or gradient == with_gradient:
                by_layer.setdefault(number, []).append(choices)
        self.seen.clear()
        return by_layer


def shake_routers(backend: MegatronBackend) -> None:
    assert backend.routing is not None
    with torch.no_grad():
        for layer in backend.routing.layers:
            weight = layer.router.weight
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)))


def train_pass(backend: MegatronBackend, batch: TrainBatch) -> None:
    for chunk in backend.model_chunks:
        chunk.train()
    data = update_module._initial_tensors(backend, batch)
    data.log_probs = data.rollout_log_probs
    update_module.compute_advantages(backend, batch, data)
    step = batch.steps[0]
    backend.forward_backward(
        batch, 0, lambda samples: update_module._loss_inputs(backend, batch, data, step, samples)
    )


@pytest.mark.parametrize(
    "flags", [{}, RECOMPUTE, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}]
)
def test_training_uses_the_experts_of_the_old_policy_pass(
    flags: dict[str, Any], model: Path
) -> None:
    """Also when activations are recomputed, and although the routers have changed in between."""
    backend = backend_of(model, use_routing_replay=True, **flags)
    try:
        batch, watch = engine_batch(), Watch(backend)
        backend.log_probs(batch)
        recorded = watch.take()
        shake_routers(backend)
        train_pass(backend, batch)
        for number, choices in watch.take(with_gradient=True).items():
            assert len(choices) == len(recorded[number])
            assert all(torch.equal(a, b) for a, b in zip(choices, recorded[number]))
        backend.log_probs(batch, "reference")
        chosen_anew = watch.take()
        assert any(
            not torch.equal(a, b) for n in recorded for a, b in zip(chosen_anew[n], recorded[n])
        )
    finally:
        backend.close()


def test_without_replay_other_routers_choose_other_experts(model: Path) -> None:
    backend = backend_of(model)
    try:
        batch, watch = engine_batch(), Watch(backend)
        backend.log_probs(batch)
        before = watch.take()
        shake_routers(backend)
        train_pass(backend, batch)
        after = watch.take()
        assert any(not torch.equal(a, b) for n in before for a, b in zip(after[n], before[n]))
    finally:
        backend.close()


def test_replayed_experts_are_weighted_by_the_current_router(model: Path) -> None:
    """The router's gradient under replay is that of its scores at the replayed experts."""
    backend = backend_of(model, use_routing_replay=True)
    try:
        batch = engine_batch()
        backend.log_probs(batch)
        shake_routers(backend)
        assert backend.routing is not None
        weights: list[Tensor] = []
        router = backend.routing.layers[0].router
        router.register_forward_hook(lambda module, inputs, output: weights.append(output[0]))
        inputs: list[Tensor] = []
        router.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
        train_pass(backend, batch)
        recorded = next(iter(backend.routing.recorded.values()))[router.layer_number]
        logits = inputs[0] @ router.weight.t()
        expected = logits.gather(1, recorded.long()).softmax(-1)
        torch.testing.assert_close(weights[0], expected)
        assert router.weight.main_grad.abs().sum() > 0
    finally:
        backend.close()


def test_a_whole_update_records_then_replays_then_forgets(model: Path) -> None:
    """With one step on the policy's own numbers nothing changes; the pass that records is not
    saved."""
    results = []
    for flags in ({}, {"use_routing_replay": True}):
        backend = backend_of(model, **flags)
        try:
            batch = make_batch(MICRO_BATCHES)
            metrics = backend.train(batch)
            results.append(metrics)
            assert backend.routing is not None and not backend.routing.recorded
            assert ("perf/log_probs_time" in metrics) == bool(flags)
        finally:
            backend.close()
    assert results[0]["train/grad_norm"] == pytest.approx(results[1]["train/grad_norm"], rel=1e-6)


# -- experts of the engine -------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, RECOMPUTE])
def test_training_uses_the_experts_of_the_engine(flags: dict[str, Any], model: Path) -> None:
    backend = backend_of(model, use_rollout_routing_replay=True, **flags)
    try:
        batch, watch = engine_batch(), Watch(backend)
        scores = backend.log_probs(batch)
        passes = {"old policy": watch.take()}
        train_pass(backend, batch)
        passes["training"] = watch.take(with_gradient=True)
        packed = backend._pack(batch, batch.steps[0].micro_batches)
        for by_layer in passes.values():
            for number, choices in by_layer.items():
                for micro_batch, used in zip(packed, choices, strict=True):
                    table = [batch.payloads["routed_experts"][i] for i in micro_batch.samples]
                    table = [
                        row for t in table for row in [*t[:, number - 1], torch.full((TOPK,), -1)]
                    ]
                    for row, origin in zip(used, micro_batch.origins.tolist()):
                        assert len(set(row.tolist())) == TOPK
                        assert origin < 0 or row.tolist() == table[origin].tolist()
        assert packed[0].num_tokens < sum(len(t) - 1 for t in batch.tokens[:2]), (
            "a prompt was shared"
        )
        assert scores is not None and any(
            not torch.equal(a, b)
            for a, b in zip(scores, backend.log_probs(batch, "reference") or [])
        )
    finally:
        backend.close()


ENGINE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2+SP x EP2": (2, TP2 | SP | EP2 | ETP1),
    "TP2": (2, TP2),
    "PP2, recomputed": (2, PP2 | RECOMPUTE),
    "CP2": (2, CP2),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if "SP" in n or "PP" in n else [pytest.mark.full])
        for n in ENGINE_LAYOUTS
    ],
)
def test_the_engines_experts_at_every_layout(name: str, model: Path, ranks: Pools) -> None:
    size, layout = ENGINE_LAYOUTS[name]
    flags = {"hf_checkpoint": str(model), "use_rollout_routing_replay": True}
    batch = without_some_experts()
    batch.steps = [dataclasses.replace(batch.steps[0], micro_batches=[[0, 1], [2, 3], [4], [5]])]
    (single,) = ranks.once(1, replay_job, flags, batch)
    (plain,) = ranks.once(1, parity_job, {"hf_checkpoint": str(model)}, [batch])
    assert worst(single["gradients"][_ROUTER], plain["gradients"][_ROUTER]) > 0.1, (
        "the experts differ from the router's"
    )
    for result in ranks.run(size, replay_job, flags | layout, batch):
        for kind in ("gradients", "weights"):
            for parameter, value in single[kind].items():
                assert worst(result[kind][parameter], value) <= 1e-5, (kind, parameter)


@pytest.mark.parametrize("name", ["PP2 virtual", pytest.param("TP2", marks=pytest.mark.full)])
def test_the_old_policys_experts_at_every_layout(name: str, model: Path, ranks: Pools) -> None:
    """Over two optimizer steps whose longest micro-batches differ: the second replays what came
    before the first."""
    layout = {"TP2": TP2, "PP2 virtual": PP2 | VIRTUAL}[name]
    flags = {"hf_checkpoint": str(model), "use_routing_replay": True}
    batch = make_batch([[0, 1], [2, 3], [4], [5]], num_steps=2)
    (single,) = ranks.once(1, replay_job, flags, batch)
    (plain,) = ranks.run(1, replay_job, {"hf_checkpoint": str(model)}, batch)
    assert worst(single["weights"][_ROUTER], plain["weights"][_ROUTER]) > 1e-4, (
        "the second step chose other experts"
    )
    for result in ranks.run(2, replay_job, flags | layout, batch):
        for parameter, value in single["weights"].items():
            assert worst(result["weights"][parameter], value) <= 1e-5, parameter


_ROUTER = "model.layers.2.mlp.gate.weight"


def replay_job(info: Any, flags: dict[str, Any], batch: TrainBatch) -> dict[str, Any]:
    """Gradients, and weights after two steps; passes through `MegatronBackend.train` alone."""
    from slime.weights.source import ModelSource

    backend = MegatronBackend(
        trainer_config(**LOSS, **flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()

    def named() -> dict[str, Tensor]:
        return {
            name: tensor.clone()
            for name, tensor in ModelSource(backend.model_chunks, backend.hf_config).tensors()
        }

    backend.log_probs(batch)  # records
    gradients = whole_gradients(backend, batch, named)
    for _ in range(2):
        backend.train(batch)
    return {"gradients": gradients, "weights": named()}


# -- refusals --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guide() -> RoutingGuide:
    return RoutingGuide([], "engine", False, LAYERS, EXPERTS, TOPK)


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (None, "needs the experts that the engine chose"),
        (torch.zeros(23, LAYERS, TOPK), "shape"),
        (torch.zeros(22, LAYERS, TOPK + 1), "shape"),
        (
            torch.zeros(21, LAYERS, TOPK),
            "lack 1 tokens that are trained on (first: token 2 of the response)",
        ),
        (torch.zeros(0, 0), "lack 3 tokens"),
        (torch.full((22, LAYERS, TOPK), -1), "lack 3 tokens"),
        (torch.full((22, LAYERS, TOPK), -2), "numbers from -2 to -2"),
        ("too large", f"{EXPERTS} experts per layer"),
    ],
)
def test_experts_that_cannot_be_replayed_are_refused(
    experts: Any, said: str, guide: RoutingGuide
) -> None:
    batch = engine_batch()
    if experts is None:
        batch.payloads.clear()
    elif isinstance(experts, str):
        batch.payloads["routed_experts"][0] = batch.payloads["routed_experts"][0] + EXPERTS
    else:
        batch.payloads["routed_experts"][0] = experts
    with pytest.raises(UserError) as caught:
        guide._experts_of(batch, 0)
    assert said in str(caught.value)


@pytest.mark.parametrize("flag", ["use_routing_replay", "use_rollout_routing_replay"])
def test_replay_of_a_dense_model_is_refused_before_anything_starts(
    flag: str, model: Path, tmp_path: Path
) -> None:
    save_tiny("qwen3", tmp_path)
    with pytest.raises(
        UserError, match=f"--{flag.replace('_', '-')}, but the model has no experts"
    ):
        check_architecture(trainer_config(hf_checkpoint=str(tmp_path), **{flag: True}))
    check_architecture(trainer_config(hf_checkpoint=str(model), **{flag: True}))


@pytest.mark.parametrize("flag", ["use_routing_replay", "use_rollout_routing_replay"])
@pytest.mark.parametrize("loss", ["sft_loss", "preference_loss"])
def test_replay_without_an_old_policy_is_refused(flag: str, loss: str) -> None:
    option = f"--{flag.replace('_', '-')}"
    with pytest.raises(UserError, match=f"{option} has no effect with --loss-type {loss}"):
        make_config(loss_type=loss, **{flag: True})
    assert make_config(loss_type=loss, **{flag: False}).warnings == ()


def test_the_engines_experts_imply_replay() -> None:
    assert trainer_config(use_rollout_routing_replay=True).train.use_routing_replay
    assert not trainer_config().train.use_routing_replay


# -- what the engine did not compute ---------------------------------------------------------------


def without_some_experts() -> TrainBatch:
    """`engine_batch`; the third sample ends with two tokens of a tool, the last one's prompt was
    not computed whole."""
    batch = engine_batch()
    batch.loss_masks[2][-2:] = 0.0
    batch.payloads["routed_experts"][2] = batch.payloads["routed_experts"][2][:-2]
    batch.payloads["routed_experts"][5][:2] = -1
    return batch


def test_tokens_that_the_engine_did_not_compute_are_routed_by_the_trainer(model: Path) -> None:
    backend = backend_of(model, use_rollout_routing_replay=True, **RECOMPUTE)
    try:
        batch, watch = without_some_experts(), Watch(backend)
        own: list[Tensor] = []
        assert backend.routing is not None
        for layer in backend.routing.layers:
            layer.router.register_forward_hook(
                lambda router, given, _: own.append(router_choice(router, given[0]))
            )
        backend.log_probs(batch)
        packed, seen, own_by_layer = (
            backend._pack(batch, batch.steps[0].micro_batches),
            watch.take(),
            {},
        )
        for position, number in enumerate(seen):
            own_by_layer[number] = own[position :: len(seen)]
        compared = {True: 0, False: 0}
        for number, choices in seen.items():
            for used, chosen, micro_batch in zip(
                choices, own_by_layer[number], packed, strict=True
            ):
                table: list[Tensor | None] = []
                for i in micro_batch.samples:
                    rows = [
                        None if int(row.min()) < 0 else row
                        for row in batch.payloads["routed_experts"][i][:, number - 1]
                    ]
                    table += rows + [None] * (len(batch.tokens[i]) - 1 - len(rows))
                    table.append(torch.arange(TOPK))
                for row, anew, origin in zip(used, chosen, micro_batch.origins.tolist()):
                    if origin >= 0:
                        expected = table[origin]
                        compared[expected is None] += 1
                        assert row.tolist() == (anew if expected is None else expected).tolist()
        assert compared[True] == 4 * len(seen) and compared[False] > 0
    finally:
        backend.close()


def router_choice(router: Any, hidden: Tensor) -> Tensor:
    return choose_experts(router.gating(hidden).detach(), router.expert_bias, router.config)


def test_flat_experts_reach_the_trainer(guide: RoutingGuide) -> None:
    batch = engine_batch()
    whole = batch.payloads["routed_experts"][2]
    batch.payloads["routed_experts"][2] = whole.flatten(1)
    assert torch.equal(guide._experts_of(batch, 2), whole)
