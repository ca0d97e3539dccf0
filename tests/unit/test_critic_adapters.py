"""A critic that trains adapters and its value head: against PEFT, at every layout, what is frozen,
and the checkpoints from which it starts."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.checkpoints.hf_io import fill_adapters
from slime.checkpoints.load_plan import resolve_load
from slime.checkpoints.sharded_store import read_contents
from slime.diagnosis import checks_host
from slime.errors import UserError
from slime.memory.trainer import TrainerSettings, rank_parameters
from slime.models import family_of, table_of
from slime.models.adapters import AdapterConfig, adapter_family, is_adapter_parameter
from slime.models.layouts import Layout
from slime.run.preflight import check_weights
from slime.samples.batch import TrainBatch
from slime.trainer.megatron import forward
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.critic import Critic
from slime.trainer.megatron.offload import Offloader, torch_optimizers
from slime.weights.source import ModelSource
from tests.support import parity
from tests.support.parity import CP2, EP2, ETP1, PP2, SP, TP2, VIRTUAL, worst
from tests.support.peft_directories import random_adapter
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard, trainer_config
from tests.support.trainers import trainer

PPO: dict[str, Any] = {"advantage_estimator": "ppo", "critic_lr": 0.02}
LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6.0}
VOCABULARY = ("all-linear", "embed_tokens", "lm_head")


def critic_of(backend: MegatronBackend) -> Critic:
    assert backend.critic is not None
    return backend.critic


def trained(critic: Critic, hf_config: Any) -> dict[str, Tensor]:
    """The adapters by PEFT's names, and the head."""
    source = ModelSource(critic.chunks, hf_config, adapters=critic.adapters)
    found = {name: tensor.clone() for name, tensor in source.tensors()}
    if critic.head is not None:
        found["head"] = critic.head.weight.detach().clone()
        found["bias"] = critic.head.bias.detach().clone()
    return found


def weights(backend: MegatronBackend) -> dict[str, Tensor]:
    named = critic_of(backend).chunks[0].named_parameters()
    return {name: parameter.detach().clone() for name, parameter in named}


def is_trained(name: str) -> bool:
    return is_adapter_parameter(name) or "output_layer." in name


def values_of(batch: TrainBatch, **flags: Any) -> list[Tensor]:
    backend = trainer(**flags)
    try:
        found = critic_of(backend).outputs(batch)
        assert found is not None
        return found
    finally:
        backend.close()


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# -- the same numbers as elsewhere -----------------------------------------------------------------


@pytest.mark.parametrize("targets", [(), ("v_proj", "gate_proj"), VOCABULARY])
def test_gradients_of_adapters_and_head_are_those_of_peft(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    import peft
    from transformers import AutoModelForTokenClassification

    (tmp_path / "hf").mkdir()
    save_tiny("mistral", tmp_path / "hf", layers=2)
    layers = tuple(target for target in targets if target != "lm_head")  # a critic has none
    given = random_adapter(
        tmp_path / "hf", tmp_path / "adapter", **LORA, lora_target_modules=layers
    )
    batch = make_batch()
    head = torch.linspace(-1.0, 1.0, 64)
    backend = trainer(
        **PPO, **LORA, lora_target_modules=targets, hf_checkpoint=str(tmp_path / "hf")
    )
    try:
        critic = critic_of(backend)
        assert critic.adapters is not None and critic.head is not None
        table = adapter_family(table_of(backend.spec), backend.spec, critic.adapters)
        fill_adapters(critic.chunks, table, backend.spec, given)
        head = head[: critic.head.weight.size(1)]
        with torch.no_grad():
            critic.head.weight.copy_(head[None])
            critic.head.bias.fill_(0.3)
        packed = backend._pack(batch, batch.steps[0].micro_batches)

        def loss_of(values: Any, micro_batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
            parts = zip(micro_batch.samples, micro_batch.split(values.values))
            loss = torch.stack([(1.0 + 0.3 * i) * (part**2).sum() for i, part in parts]).sum()
            return loss, {"loss": loss.detach()}

        results = forward.forward_backward(
            critic.chunks, packed, loss_of, gradient_scale=float(len(packed))
        )
        ours = sum(float(one.metrics["loss"]) for one in results)
        with torch.no_grad():
            for parameter in critic.chunks[0].parameters():
                if parameter.requires_grad:
                    parameter.copy_(parameter.main_grad)
        gradients = trained(critic, backend.hf_config)
    finally:
        backend.close()

    plain = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "hf", num_labels=1, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        plain.score.weight.copy_(head[None])
        plain.score.bias.fill_(0.3)
    settings = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
    settings.task_type = "TOKEN_CLS"
    settings.inference_mode = False
    model = peft.get_peft_model(plain, settings).eval()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in given.items():
            named[_in_peft(name)].copy_(tensor)
    loss = torch.zeros(())
    for i, (tokens, count) in enumerate(zip(batch.tokens, batch.response_lengths)):
        values = model(input_ids=tokens[None]).logits[0, :, 0]
        loss = loss + (1.0 + 0.3 * i) * (values[-count - 1 : -1] ** 2).sum()
    loss.backward()
    assert ours == pytest.approx(float(loss), rel=1e-5)
    theirs = {name: named[_in_peft(name)].grad for name in given}
    stem = "base_model.model.score.modules_to_save.default"
    theirs |= {"head": named[f"{stem}.weight"].grad, "bias": named[f"{stem}.bias"].grad}
    assert gradients.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert expected is not None and worst(gradients[name], expected) <= 1e-5, name


def _in_peft(name: str) -> str:
    """The name of an adapter's tensor in PEFT's model."""
    if "lora_embedding" in name:
        return f"{name}.default"
    return name.replace(".weight", ".default.weight")


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", {"fp32": True}), ("qwen3_moe", {"fp32": False, "bf16": True})]
)
def test_at_first_a_critic_with_adapters_is_the_one_without(
    family: str, dtype: dict[str, Any], tmp_path: Path
) -> None:
    """Also where it has learned something as a whole, and its head is not 0."""
    (tmp_path / "hf").mkdir()
    save_tiny(family, tmp_path / "hf", layers=2)
    flags = {**PPO, **LORA, **dtype, "hf_checkpoint": str(tmp_path / "hf")}
    source = str(tmp_path / "whole")
    backend = trainer(**flags, critic_lora_rank=0, save=source)
    try:
        for _ in range(2):
            backend.train(make_batch())
        backend.save(0)
        expected = critic_of(backend).outputs(make_batch(seed=5))
    finally:
        backend.close()
    assert expected is not None and expected[0].any()
    for rank in (0, 3):
        found = values_of(make_batch(seed=5), **flags, critic_load=source, critic_lora_rank=rank)
        assert equal(found, expected), rank


# -- layouts ---------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "TP2+SP": (2, 1, TP2 | SP),
    "PP2 virtual": (2, 1, PP2 | VIRTUAL),
    "CP2": (2, 1, CP2),
    "DP2": (2, 2, {}),
    "EP2": (2, 2, EP2 | ETP1),
    "TP2+SP x PP2": (4, 1, TP2 | SP | PP2),
    "TP2 x EP2, expert tensor": (4, 2, TP2 | EP2),
}
SHARED = {"lora_rank": 4, "lora_experts": "shared-outer", "lora_rank_by_topk": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "vocabulary": ("mistral", {"lora_target_modules": VOCABULARY}),
    "qwen3_moe": ("qwen3_moe", SHARED),
}


def cases() -> Iterator[Any]:
    for model in MODELS:
        for layout in LAYOUTS:
            if "EP2" in layout and model != "qwen3_moe":
                continue
            always = (model, layout) == ("qwen3_moe", "EP2")
            yield pytest.param(model, layout, marks=[] if always else [pytest.mark.full])


def layout_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Any]:
    """Values, and the trained tensors after two rollouts."""
    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    assert backend.critic is not None
    batch = batches[backend.data_parallel_rank]
    values = backend.critic.outputs(batch)
    for _ in range(2):
        backend.train(batch)
    return {
        "samples": batch.sample_indices,
        "values": values,
        "trained": trained(backend.critic, backend.hf_config),
    }


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, ranks: Pools) -> Callable[[str, int], Any]:
    """By model and number of layers: flags with a critic whose adapters and head are not 0, and
    what one process makes of it."""

    @functools.cache
    def of(name: str, layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
        family, more = MODELS[name]
        folder = tmp_path_factory.mktemp(family)
        (folder / "hf").mkdir()
        save_tiny(family, folder / "hf", layers)
        flags = {**PPO, **LORA, **more, "hf_checkpoint": str(folder / "hf")}
        flags |= {"rollout_batch_size": 12, "adam_eps": 1e-3}
        backend = trainer(**flags, save=str(folder / "run"))
        try:
            for _ in range(3):
                backend.train(make_batch(parity.MICRO_BATCHES))
            backend.save(0)
        finally:
            backend.close()
        flags["critic_load"] = str(folder / "run")
        [alone] = ranks.run(1, layout_job, flags, [make_batch(parity.MICRO_BATCHES)])
        return flags, alone

    return of


@pytest.mark.parametrize(("model", "layout"), list(cases()))
def test_any_layout_trains_the_adapters_of_one_process(
    model: str, layout: str, ranks: Pools, started: Callable[[str, int], Any]
) -> None:
    flags, alone = started(model, 4 if "virtual" in layout else 2)
    assert all(tensor.any() for tensor in alone["trained"].values())
    size, data_parallel, more = LAYOUTS[layout]
    whole = make_batch(parity.MICRO_BATCHES)
    batches = [shard(whole, *plan) for plan in parity.DATA_PARALLEL[data_parallel]]
    expected = dict(zip(alone["samples"], alone["values"]))
    for rank in ranks.run(size, layout_job, flags | more, batches):
        for name, tensor in rank["trained"].items():
            # other micro-batches in one process move the embedding's A by 2.4e-5: rounding
            limit = 4e-5 if "lora_embedding_A" in name else 1e-5
            assert worst(tensor, alone["trained"][name]) <= limit, name
        for sample, values in zip(rank["samples"], rank["values"] or []):
            theirs = expected[sample]
            assert (values - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1.0)


# -- what is frozen --------------------------------------------------------------------------------


def test_adapters_and_head_alone_are_trained_and_planned(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, layers=2)
    flags = {**PPO, **LORA, "hf_checkpoint": str(tmp_path)}
    backend = trainer(**flags, critic_lora_rank=2)
    try:
        critic = critic_of(backend)
        before = weights(backend)
        for _ in range(3):  # a head of zeros sends no gradient back, and then B alone moves
            backend.train(make_batch())
        for name, parameter in critic.chunks[0].named_parameters():
            learns = is_trained(name)
            assert parameter.requires_grad == hasattr(parameter, "main_grad") == learns
            assert torch.equal(parameter, before[name]) != learns, name
        states = [
            value.numel()
            for inner in torch_optimizers(critic.optimizer)
            for state in inner.state.values()
            for key, value in state.items()
            if key == "exp_avg"
        ]
        counted = {name: parameter.numel() for name, parameter in before.items()}
        learning = sum(size for name, size in counted.items() if is_trained(name))
        assert sum(states) == learning
        settings = TrainerSettings.of(backend.config, backend.spec, on_gpu=False)
        [stage] = settings.as_critic().stages
        planned = stage.states()
        assert planned["gradients"] == 4 * learning
        assert planned["optimizer moments"] == 8 * learning
        assert planned["weights (frozen)"] == 4 * (sum(counted.values()) - learning)
        assert planned["adapters"] + planned["value head"] == 4 * learning
    finally:
        backend.close()


def test_the_output_layer_is_no_target(tmp_path: Path) -> None:
    save_tiny("mistral", tmp_path, layers=2)
    flags = {**PPO, "hf_checkpoint": str(tmp_path), "lora_rank": 2}
    spec = trainer_spec(tmp_path)
    family = table_of(spec)

    def of(**more: Any) -> AdapterConfig | None:
        return AdapterConfig.of_critic(trainer_config(**flags, **more), family, spec)

    found = of(lora_target_modules=("lm_head", "q_proj"), critic_lora_rank=5)
    assert found is not None and (found.targets, found.rank) == ({"q_proj"}, 5)
    with pytest.raises(UserError, match="no layer of the critic is left to adapt"):
        of(lora_target_modules=("lm_head",))
    assert of(lora_target_modules=("lm_head",), critic_lora_rank=0) is None
    default = of()
    assert default is not None and default.rank == 2


def test_the_disk_has_room_for_what_a_critic_saves(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path, layers=2)
    flags = {**PPO, "hf_checkpoint": str(tmp_path), "lora_rank": 2}

    def saved(**more: Any) -> tuple[int, int]:
        return checks_host._saved_parameters(trainer_config(**{**flags, **more}))

    policy, critic = saved(critic_lora_rank=4)
    assert critic == 2 * policy > 0
    whole = sum(p.numel for p in rank_parameters(trainer_spec(tmp_path), Layout(), 0))
    assert saved(critic_lora_rank=0) == (policy, whole)
    assert saved(lora_rank=0) == (whole, whole)
    assert saved(advantage_estimator="grpo", critic_lr=None) == (policy, 0)


def test_a_rate_of_full_training_is_warned_of() -> None:
    def warned(**more: Any) -> bool:
        config = trainer_config(**PPO | {"critic_lr": 1e-6} | more)
        return any("--critic-lr 1e-06 is typical" in line for line in config.warnings)

    assert warned(lora_rank=4)
    assert not warned(lora_rank=4, critic_lora_rank=0) and not warned()


def trainer_spec(directory: Path) -> Any:
    return family_of(directory).model_spec(directory)


# -- one base for policy and critic ----------------------------------------------------------------

BASES: dict[str, dict[str, Any]] = {
    "qwen3": {"bf16": True, "fp32": False, "lora_dropout": 0.1},
    "deepseek_v3": {
        **{"lora_experts": "shared-outer", "critic_lora_rank": 4},
        **parity.RECOMPUTE,
    },  # its routers have buffers
}


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def kept_of(backend: MegatronBackend, *, gradients: bool) -> dict[str, Tensor]:
    """All weights and buffers of policy and critic, or all gradients."""
    found = {}
    for role, chunks in (("policy", backend.model_chunks), ("critic", critic_of(backend).chunks)):
        for name, tensor in chunks[0].module.state_dict(keep_vars=True).items():
            held = getattr(tensor, "main_grad", None) if gradients else tensor
            if isinstance(held, Tensor):
                found[f"{role} {name}"] = held.detach().clone()
    return found


def trained_run(backend: MegatronBackend, *, takes_turns: bool) -> list[Any]:
    """Metrics, gradients, weights and random states of two rollouts, and the saved tensors."""
    critic = critic_of(backend)
    found: list[Any] = [numbers(backend.train(make_batch())), kept_of(backend, gradients=True)]
    if takes_turns:
        backend.offloader = Offloader(backend.model_chunks, backend.optimizer, pin=False)
        critic._offloader = Offloader(
            critic.chunks, critic.optimizer, pin=False, borrowed=critic.shared
        )
        critic.takes_turns = True
        critic.sleep()
        for _ in range(2):  # as around a push and the engines' turn
            backend.offloader.sleep(keep_weights=True)
            backend.offloader.sleep()
            held = [*critic.chunks[0].parameters(), *backend.model_chunks[0].parameters()]
            assert not any(p.untyped_storage().nbytes() for p in held)
            backend.offloader.wake()
    found.append(numbers(backend.train(make_batch(seed=1))))
    backend.save(0)
    if takes_turns:
        own, theirs = (one._frozen for one in (critic._offloader, backend.offloader))
        assert bool(own) != bool(critic.shared), "what is shared is copied to the host once"
        assert len(theirs) == sum(not p.requires_grad for p in backend.model_chunks[0].parameters())
        critic.wake()
    return [*found, kept_of(backend, gradients=False), {"random": torch.get_rng_state()}]


@pytest.mark.parametrize("family", BASES)
def test_a_shared_base_changes_no_bit(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, gradients, weights, random states and files are those of two bases; also with turns
    on the device."""
    (tmp_path / "hf").mkdir()
    save_tiny(family, tmp_path / "hf", layers=2)
    flags = {**PPO, **LORA, **BASES[family], "hf_checkpoint": str(tmp_path / "hf")}
    runs = {}
    for name in ("two bases", "one", "one by turns"):
        with monkeypatch.context() as patch:
            if name == "two bases":
                patch.setattr("slime.trainer.megatron.backend.shares_base", lambda *_: False)
            backend = trainer(**flags, save=str(tmp_path / name))
        try:
            policy, critic = (
                dict(chunks[0].module.named_parameters())
                for chunks in (backend.model_chunks, critic_of(backend).chunks)
            )
            same = {key for key, own in critic.items() if own is policy.get(key)}
            base = {key for key in critic if not is_trained(key)}
            assert same == (set() if name == "two bases" else base)
            runs[name] = trained_run(backend, takes_turns=name == "one by turns")
            still = dict(critic_of(backend).chunks[0].module.named_parameters())
            assert all(still[key] is policy[key] for key in same)
        finally:
            backend.close()
    for name in ("one", "one by turns"):
        for ours, theirs in zip(runs[name], runs["two bases"], strict=True):
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                is_equal = torch.equal if isinstance(value, Tensor) else float.__eq__
                assert is_equal(ours[key], value), key
        for file in (tmp_path / "two bases").rglob("*"):
            # both tables have random names of the save
            if file.is_file() and file.name not in (".metadata", "manifest.json"):
                other = tmp_path / name / file.relative_to(tmp_path / "two bases")
                assert other.read_bytes() == file.read_bytes(), file


def test_other_weights_are_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("hf", "other"):
        (tmp_path / name).mkdir()
        save_tiny("qwen3", tmp_path / name, layers=2)
    flags = {**PPO, **LORA, "hf_checkpoint": str(tmp_path / "hf")}
    saved_critic_run(tmp_path, "beside it", **flags)
    saved_critic_run(tmp_path, "beside another", **flags, critic_load=str(tmp_path / "other"))
    saved_critic_run(tmp_path, "whole", **flags, critic_lora_rank=0)
    for more, shared in (
        ({"critic_load": str(tmp_path / "hf")}, True),
        ({"critic_load": str(tmp_path / "beside it")}, True),
        ({"load": str(tmp_path / "beside it")}, True),
        ({"critic_load": str(tmp_path / "other")}, False),
        ({"critic_load": str(tmp_path / "beside another")}, False),
        ({"critic_load": str(tmp_path / "whole")}, False),
        ({"critic_lora_rank": 0}, False),
        ({"load": str(tmp_path / "beside another")}, False),
    ):
        caplog.clear()
        backend = trainer(**{**flags, **more})
        try:
            assert bool(critic_of(backend).shared) == shared, more
            # the plan goes by the flags: it counts a second base where one may be loaded
            planned = TrainerSettings.of(backend.config, backend.spec, on_gpu=False).shares_base
            assert planned == ("critic_load" not in more and "critic_lora_rank" not in more)
            assert ("held twice" in caplog.text) == (planned and not shared)
        finally:
            backend.close()


# -- checkpoints -----------------------------------------------------------------------------------


def saved_critic_run(root: Path, name: str, **flags: Any) -> list[Tensor]:
    """Save a run whose critic has learned; return its values."""
    backend = trainer(**flags, save=str(root / name))
    try:
        for _ in range(3):
            backend.train(make_batch())
        backend.save(0)
        found = critic_of(backend).outputs(make_batch(seed=5))
        assert found is not None and found[0].any()
        return found
    finally:
        backend.close()


def test_a_critic_starts_from_one_with_adapters_or_without(tmp_path: Path) -> None:
    for name in ("hf", "other"):
        (tmp_path / name).mkdir()
        save_tiny("qwen3", tmp_path / name, layers=2)
    other = tmp_path / "other" / "model.safetensors"
    assert other.is_file()
    _scale_weights(other)
    batch = make_batch(seed=5)
    flags = {**PPO, **LORA, "hf_checkpoint": str(tmp_path / "hf")}
    adapters = saved_critic_run(tmp_path, "adapters", **flags)
    written = read_contents(tmp_path / "adapters" / "iter_0000000").state_dict_metadata
    own = [name for name in written if name.startswith("critic.")]
    assert own and all(map(is_trained, own)), "the base is in no checkpoint"
    source = {"critic_load": str(tmp_path / "adapters")}
    assert equal(values_of(batch, **flags, **source), adapters)
    continued = {"load": str(tmp_path / "adapters")}
    assert equal(values_of(batch, **flags, **continued), adapters)
    assert equal(values_of(batch, **flags, **continued, finetune=True), adapters)
    # adapters beside a critic that was trained as a whole, and again from these
    whole = saved_critic_run(tmp_path, "whole", **flags, critic_lora_rank=0)
    beside = {**flags, "critic_load": str(tmp_path / "whole")}
    assert equal(values_of(batch, **beside), whole)
    second = saved_critic_run(tmp_path, "second", **beside)
    assert not equal(second, whole)
    again = flags | {"critic_load": str(tmp_path / "second")}
    assert equal(values_of(batch, **again), second)
    # beside the layers of another model; a resumed run finds them without the flag
    third = saved_critic_run(tmp_path, "third", **flags, critic_load=str(tmp_path / "other"))
    resumed = flags | {"load": str(tmp_path / "third"), "save": str(tmp_path / "third")}
    assert equal(values_of(batch, **resumed), third)
    shutil.move(tmp_path / "other", tmp_path / "moved")
    with pytest.raises(UserError, match="the frozen layers of the critic are missing"):
        values_of(batch, **resumed)


def _scale_weights(file: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor * 1.5 for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_tiny("qwen3", tmp_path / "hf", layers=2)
    common = {"hf_checkpoint": str(tmp_path / "hf")}
    flags = {**PPO, **LORA, **common}
    saved_critic_run(tmp_path, "adapters", **flags)
    saved_critic_run(tmp_path, "whole", **flags, critic_lora_rank=0)
    grpo = trainer(**common, **LORA, save=str(tmp_path / "grpo"))
    try:
        grpo.train(make_batch())
        grpo.save(0)
    finally:
        grpo.close()
    of_adapters = str(tmp_path / "adapters")
    for more, told in (
        ({"critic_load": of_adapters, "critic_lora_rank": 0}, "pass --critic-lora-rank 3"),
        ({"load": of_adapters, "critic_lora_rank": 0}, "has adapters of rank 3"),
        ({"critic_load": of_adapters, "critic_lora_rank": 2}, "--critic-lora-rank gave 3, now 2"),
        ({"critic_load": of_adapters, "lora_alpha": 7.0}, "--lora-alpha gave 6.0, now 7.0"),
        ({"load": str(tmp_path / "whole")}, "pass --critic-lora-rank 0"),
        ({"critic_load": str(tmp_path / "grpo")}, "holds only adapters of a policy"),
    ):
        with pytest.raises(UserError) as caught:
            trainer(**{**flags, **more}).close()
        assert told in str(caught.value)
    plain = trainer_config(**flags, critic_load=of_adapters)
    check_weights(plain, resolve_load(plain))
