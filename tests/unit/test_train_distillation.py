"""Distillation in the trainer: what reaches the advantage and the loss, at any layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.algorithms.divergence import DIVERGENCES
from slime.errors import UserError
from slime.samples.batch import StepPlan, TrainBatch
from slime.samples.teacher_scores import pack_top_tokens
from slime.trainer.distillation import teacher_columns_of, teacher_inputs
from slime.trainer.dumps import shard_of
from slime.trainer.megatron import forward
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.offload import WeightsCopy
from slime.trainer.records import RolloutTensors, TeacherColumns
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard, trainer_config
from tests.support.trainers import trainer

OPD = {"use_opd": True, "opd_teacher_load": ["elsewhere"]}
TWO = {"opd_teacher_load": ["math=here", "code=there"]}


def perturb(copy: WeightsCopy, seed: int) -> None:
    """Another model of the same size."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in copy.tensors:
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.add_(0.2 * noise.to(tensor.dtype) * tensor.float().std().nan_to_num(0.1))


def opened(**flags: Any) -> MegatronBackend:
    made = trainer(**{**OPD, **flags})
    for number, name in enumerate(sorted(made.copies)):
        perturb(made.copies[name], number)
    return made


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[MegatronBackend]:
    made = opened(**getattr(request, "param", {}))
    yield made
    made.close()


def with_flags(**flags: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", [flags], indirect=True, ids=["+".join(flags)])


def distilled(batch: TrainBatch, *names: str) -> TrainBatch:
    """The batch without task reward, its samples having these teachers in turn."""
    count = batch.num_samples
    named = [names[i % len(names)] for i in range(count)]
    return dataclasses.replace(batch, teachers=named, rewards=[0.0] * count)


def token_mean(batch: TrainBatch, values: list[Tensor] | list[np.ndarray]) -> float:
    """As the loss weighs tokens by default."""
    return sum(
        float((np.asarray(value) * mask.numpy()).sum()) / total / batch.steps[0].global_batch_size
        for value, mask, total in zip(values, batch.loss_masks, batch.rollout_mask_sums)
    )


def distributions(backend: MegatronBackend, batch: TrainBatch, teacher: str) -> list[np.ndarray]:
    """[R, V] per sample in float64, from whole logits; "" is the policy."""
    micro_batches = [[i] for i in range(batch.num_samples)]
    packed = backend._pack(batch, micro_batches)
    options = {**backend._score_options(False), "with_logits": True}
    if teacher:
        with backend._computing_as(teacher):
            scores = forward.score(backend.model_chunks, packed, **options)
    else:
        scores = forward.score(backend.model_chunks, packed, **options)
    return [np.asarray(s.logits.double().softmax(-1)) for s in scores]


def by_definition(s: np.ndarray, p: np.ndarray, kind: str, beta: float = 0.5) -> np.ndarray:
    m = beta * p + (1 - beta) * s
    found = {
        "reverse_kl": s * np.log(s / p),
        "forward_kl": p * np.log(p / s),
        "jsd": beta * p * np.log(p / m) + (1 - beta) * s * np.log(s / m),
    }[kind]
    return np.asarray(found.sum(axis=-1))


def with_rest(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    top = np.take_along_axis(values, ids, axis=-1)
    return np.concatenate([top, 1 - top.sum(axis=-1, keepdims=True)], axis=-1)


# -- the advantage ---------------------------------------------------------------------------------


def test_the_advantage_is_minus_the_log_prob_difference(backend: MegatronBackend) -> None:
    batch = distilled(make_batch(), "default")
    own = backend.log_probs(batch)
    theirs = backend.log_probs(batch, "teacher default")
    assert own is not None and theirs is not None
    wanted = token_mean(batch, [a - b for a, b in zip(own, theirs)])
    metrics = backend.train(batch)
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(wanted, abs=1e-5)
    assert metrics["rollout/advantages"] == pytest.approx(-wanted, abs=1e-5)
    assert metrics["train/pg_loss"] == pytest.approx(wanted, abs=1e-5)  # at a ratio of 1
    assert 0 < metrics["rollout/opd_prefers_ratio"] < 1


@with_flags(
    opd_kl_coef=0.5, advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True
)
def test_it_is_added_to_the_task_reward_behind_whitening(backend: MegatronBackend) -> None:
    """Its weight does not depend on how large rewards are."""
    batch = dataclasses.replace(make_batch(), teachers=["default"] * 6)
    larger = dataclasses.replace(batch, rewards=[100 * reward for reward in batch.rewards])
    found = [backend.train(one) for one in (batch, larger)]
    whitened = [one["rollout/advantages"] + 0.5 * one["rollout/opd_reverse_kl"] for one in found]
    assert abs(whitened[0]) > 1e-3 and whitened[1] == pytest.approx(whitened[0], abs=1e-4)


@with_flags(**TWO)
def test_each_sample_has_its_own_teacher(backend: MegatronBackend) -> None:
    batch = distilled(make_batch(), "math", "code")
    own = backend.log_probs(batch)
    scored = [backend.log_probs(batch, f"teacher {name}") for name in ("math", "code")]
    assert own is not None and scored[0] is not None and scored[1] is not None
    wanted = token_mean(batch, [own[i] - scored[i % 2][i] for i in range(6)])
    assert backend.train(batch)["rollout/opd_reverse_kl"] == pytest.approx(wanted, abs=1e-5)


@with_flags(opd_teacher_load=["self"])
def test_the_policy_as_its_own_teacher_changes_nothing(backend: MegatronBackend) -> None:
    assert not backend.copies  # it costs no memory
    metrics = backend.train(distilled(make_batch(), "default"))
    assert metrics["rollout/opd_reverse_kl"] == 0.0 and metrics["train/grad_norm"] == 0.0


def closeness(args: Any, rollout_data: Any) -> None:
    """Advantages that are the teacher's log-probs."""
    rollout_data["advantages"] = [theirs.clone() for theirs in rollout_data["teacher_log_probs"]]


@with_flags(custom_advantage_function_path=f"{__name__}.closeness", opd_kl_coef=0.0)
def test_functions_and_dumps_see_a_teacher_in_the_trainer(
    backend: MegatronBackend, tmp_path: Path
) -> None:
    batch = distilled(make_batch(), "default")
    theirs = backend.log_probs(batch, "teacher default")
    assert theirs is not None
    found = backend.train(batch)["rollout/advantages"]
    assert found == pytest.approx(token_mean(batch, theirs), abs=1e-5)
    data = RolloutTensors(loss_masks=batch.loss_masks, teacher=TeacherColumns(log_probs=theirs))
    dumped = shard_of(batch, data, 0).samples
    assert all(
        torch.equal(one["teacher_log_probs"], values)
        for one, values in zip(dumped, theirs, strict=True)
    )


@with_flags(opd_teacher_load=["self"])
def test_a_teacher_may_see_another_prompt(backend: MegatronBackend) -> None:
    batch = distilled(make_batch(), "default")
    hint = torch.arange(5, 14)
    with_hint = [
        torch.cat([hint, own[own.numel() - r :]])
        for own, r in zip(batch.tokens, batch.response_lengths)
    ]
    own = backend.log_probs(batch)
    theirs = backend.log_probs(dataclasses.replace(batch, tokens=with_hint))
    assert own is not None and theirs is not None
    # the last sample has no prompt of its own for the teacher
    prompts = [hint] * 5 + [torch.zeros(0, dtype=torch.long)]
    theirs[5] = own[5]
    metrics = backend.train(dataclasses.replace(batch, payloads={"teacher_prompts": prompts}))
    wanted = token_mean(batch, [a - b for a, b in zip(own, theirs)])
    assert wanted != 0
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(wanted, abs=1e-5)


def test_a_teacher_whose_weights_change_ends_the_run(backend: MegatronBackend) -> None:
    batch = distilled(make_batch(), "default")
    backend.train(batch)
    backend.train(batch)
    perturb(backend.copies["teacher default"], 7)
    with pytest.raises(UserError, match="has other weights than when it was loaded"):
        backend.train(batch)


@with_flags(lora_rank=4, opd_teacher_load=["math=base", "code=elsewhere"])
def test_adapters_are_off_while_a_teacher_scores(backend: MegatronBackend) -> None:
    """The base teaches for free."""
    assert list(backend.copies) == ["teacher code"]
    batch = distilled(make_batch(), "math")
    assert backend.train(batch)["rollout/opd_reverse_kl"] == 0.0  # adapters change nothing yet
    code = distilled(make_batch(), "code")
    backend.train(code)
    base = backend.train(batch)["rollout/opd_reverse_kl"]
    assert base != 0.0
    theirs = backend.train(code)["rollout/opd_reverse_kl"]
    assert theirs not in (0.0, base)


# -- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_loss_is_the_divergence_by_definition(kind: str, top_k: int) -> None:
    backend = opened(**TWO, opd_loss=kind, opd_top_k=top_k, opd_kl_coef=2.0)
    try:
        batch = distilled(make_batch(), "math", "code")
        own = distributions(backend, batch, "")
        theirs = [distributions(backend, batch, name) for name in ("math", "code")]
        wanted = []
        for i in range(6):
            s, p = own[i], theirs[i % 2][i]
            if top_k:
                ids = np.argsort(-p, axis=-1)[:, :top_k]
                s, p = with_rest(s, ids), with_rest(p, ids)
            wanted.append(by_definition(s, p, kind))
        metrics = backend.train(batch)
        assert metrics["train/opd_loss"] == pytest.approx(token_mean(batch, wanted), rel=1e-4)
        assert metrics["train/loss"] == pytest.approx(2 * metrics["train/opd_loss"], rel=1e-5)
    finally:
        backend.close()


@pytest.mark.parametrize(("kind", "top_k"), [("reverse_kl", 0), ("forward_kl", 8)])
def test_a_step_along_the_gradient_lowers_the_loss_as_it_says(kind: str, top_k: int) -> None:
    """A central difference along the gradient of all weights."""
    backend = opened(opd_loss=kind, opd_top_k=top_k, lr=0.0, clip_grad=0.0)
    try:
        batch = distilled(make_batch(), "default")

        def loss() -> float:
            return float(backend.train(batch)["train/opd_loss"])

        loss()
        parameters = [p for chunk in backend.model_chunks for p in chunk.parameters()]
        gradients = [p.main_grad.clone() for p in parameters]  # type: ignore[attr-defined]
        square = sum(float(g.double().square().sum()) for g in gradients)
        step = 2e-3 / square**0.5
        found = []
        for sign in (1, -2):
            with torch.no_grad():
                for p, g in zip(parameters, gradients):
                    p.add_(sign * step * g)
            found.append(loss())
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(square, rel=0.02)
    finally:
        backend.close()


def test_numbers_do_not_depend_on_packing_and_order() -> None:
    names = ["math", "code", "math", "math", "code", "code"]
    whole = dataclasses.replace(make_batch([[0, 1, 2, 3, 4, 5]]), teachers=names)
    order = [3, 0, 5, 1, 4, 2]
    other = dataclasses.replace(
        shard(whole, order, [[0], [1, 4, 2], [3, 5]]), teachers=[names[i] for i in order]
    )
    found = []
    for batch in (whole, other):
        backend = opened(**TWO, opd_loss="jsd", opd_jsd_beta=0.3)
        metrics = backend.train(batch)
        found.append((metrics["train/opd_loss"], metrics["train/grad_norm"]))
        backend.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_engines_give_the_same_as_a_teacher_in_the_trainer() -> None:
    here = opened(opd_loss="forward_kl", opd_top_k=4, rollout_temperature=1.0)
    try:
        batch = distilled(make_batch(), "default")
        log_probs = here.log_probs(batch, "teacher default")
        dense = distributions(here, batch, "default")
        wanted = here.train(batch)
    finally:
        here.close()
    tops = []
    for p in dense:
        ids = np.argsort(-p, axis=-1)[:, :4]
        rows = [[(float(np.log(row[i])), int(i)) for i in own] for row, own in zip(p, ids)]
        tops.append(torch.from_numpy(pack_top_tokens(rows)))
    there = trainer(
        use_opd=True,
        opd_teacher_urls=["http://teacher"],
        opd_loss="forward_kl",
        opd_top_k=4,
        rollout_temperature=1.0,
    )
    try:
        with pytest.raises(UserError, match="carry no log-probs of a teacher"):
            there.train(dataclasses.replace(batch, teachers=[]))
        carried = dataclasses.replace(
            batch, teachers=[], teacher_log_probs=log_probs, payloads={"teacher_top": tops}
        )
        found = there.train(carried)
    finally:
        there.close()
    for name in ("train/opd_loss", "train/grad_norm", "rollout/opd_reverse_kl"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-4)


def test_columns_of_engines_are_as_the_samples_carry_them() -> None:
    """A sample that trains no token may have no tops; tokens of the vocabulary stand there."""
    flags = {
        "use_opd": True,
        "opd_teacher_urls": ["http://teacher"],
        "rollout_temperature": 1.0,
    }
    top = torch.tensor([[[7.0, 3.0], [1.0, 0.0]], [[-0.5, -1.0], [-0.25, -2.0]]])
    log_probs = [torch.tensor([-0.5, -2.0]), torch.zeros(3)]
    batch: Any = SimpleNamespace(
        teacher_log_probs=log_probs,
        payloads={"teacher_top": [top.flatten(), torch.zeros(0)]},
        response_lengths=[2, 3],
    )
    config = trainer_config(**flags, opd_loss="forward_kl", opd_top_k=2)
    found = teacher_columns_of(batch, config, torch.device("cpu"))
    assert found.top is not None and found.log_probs == log_probs
    assert torch.equal(found.top[0].ids, top[0].long())
    assert torch.equal(found.top[0].log_probs, top[1])
    assert found.top[1].ids.tolist() == [[0, 0]] * 3
    assert found.top[1].log_probs.isfinite().all() and found.top[1].log_probs.shape == (3, 2)
    batch.payloads = {}
    with pytest.raises(UserError, match="carry no most likely tokens"):
        teacher_columns_of(batch, config, torch.device("cpu"))
    sampled = trainer_config(**flags)
    assert teacher_columns_of(batch, sampled, torch.device("cpu")).top is None


def test_a_micro_batch_without_samples_has_teachers_of_no_tokens() -> None:
    of_top = teacher_inputs(TeacherColumns(top=[]), [], [], torch.device("cpu"))
    assert of_top.top is not None
    assert of_top.top.ids.shape == of_top.top.log_probs.shape == (0, 1)
    head = (torch.zeros(3, 2), 1.0)
    whole = teacher_inputs(TeacherColumns(heads={"math": head}), [], [], torch.device("cpu"))
    assert whole.top is None and whole.rows == []


def layout_job(info: Any, flags: dict[str, Any]) -> dict[str, float]:
    """Metrics of a step, and of another one after it."""
    config = trainer_config(use_opd=True, **flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    batch = distilled(make_batch([[0, 1], [2, 3], [4], [5]]), "math", "code")
    if backend.layout.data_parallel_size == 2:
        mine = [[0, 1, 4], [2, 3, 5]][backend.data_parallel_rank]
        named = [batch.teachers[i] for i in mine]
        batch = dataclasses.replace(shard(batch, mine, [[0, 1], [2]]), teachers=named)
    first = backend.train(batch)
    second = backend.train(batch)
    return {
        f"{name} {number}": metrics[name]
        for number, metrics in enumerate((first, second))
        for name in ("train/opd_loss", "train/grad_norm", "rollout/opd_reverse_kl")
        if name in metrics
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A student and two teachers."""
    folders = [tmp_path_factory.mktemp(name) for name in ("student", "math", "code")]
    for seed, folder in enumerate(folders):
        save_tiny("qwen3", folder, layers=2)
        (file,) = folder.glob("*.safetensors")
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: value + 0.3 * value.std() * torch.randn(value.shape, generator=generator)
            for name, value in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    return folders


LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "dp": {},
}


@pytest.mark.parametrize(
    ("layout", "top_k"),
    [
        ("tp", 0),
        ("cp", 6),
        pytest.param("tp", 6, marks=pytest.mark.full),
        pytest.param("cp", 0, marks=pytest.mark.full),
        pytest.param("pp", 0, marks=pytest.mark.full),
        pytest.param("dp", 6, marks=pytest.mark.full),
    ],
)
def test_numbers_do_not_depend_on_the_layout(
    ranks: Pools, models: list[Path], layout: str, top_k: int
) -> None:
    student, *teachers = map(str, models)
    flags = {
        "hf_checkpoint": student,
        "opd_teacher_load": [f"math={teachers[0]}", f"code={teachers[1]}"],
        "opd_loss": "reverse_kl",
        "opd_top_k": top_k,
    }
    (wanted,) = ranks.run(1, layout_job, flags)
    found = ranks.run(2, layout_job, flags | LAYOUTS[layout])
    for rank in found:
        assert rank == pytest.approx({name: wanted[name] for name in rank}, rel=2e-4)
    assert any(len(rank) == len(wanted) for rank in found)


# -- learning --------------------------------------------------------------------------------------


@with_flags(opd_loss="reverse_kl", lr=3e-3)
def test_the_divergence_falls_fivefold(backend: MegatronBackend) -> None:
    batch = distilled(make_batch([[*range(6)]]), "default")
    first = backend.train(batch)["train/opd_loss"]
    for _ in range(40):
        last = backend.train(batch)["train/opd_loss"]
    assert last < first / 5


def test_a_plan_has_a_step_for_samples_of_one_teacher_alone() -> None:
    """A rank whose samples all have other teachers takes part in the pass of this one."""
    backend = opened(**TWO, opd_loss="reverse_kl")
    try:
        batch = distilled(make_batch([[0, 1], [2], [3, 4, 5]]), "code")
        batch.steps[0] = StepPlan([[0, 1], [], [2, 3, 4, 5]], 5, batch.steps[0].num_loss_tokens)
        assert backend.train(batch)["train/opd_loss"] > 0
    finally:
        backend.close()
