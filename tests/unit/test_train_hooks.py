"""What users bring to the trainer: what is frozen, a model provider, and functions around its
phases."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slime.checkpoints.megatron_names import global_parameters
from slime.errors import UserError
from slime.trainer.megatron.attention import PackedSelfAttention
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.provider import default_layer_spec, default_model
from tests.support.trainer_ranks import Pools, make_batch, shard, tiny_spec, trainer_config
from tests.support.trainers import trainer

seen: list[Any] = []


def hook_path(name: str) -> str:
    return f"{__name__}.{name}"


def weights(backend: MegatronBackend) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone() for name, tensor in global_parameters(backend.model_chunks)
    }


# -- freezing --------------------------------------------------------------------------------------


def moved_job(info: Any, flags: dict[str, Any], tie: bool) -> dict[str, bool]:
    """Which parameters of this rank two steps have moved; weight decay would move each that is not
    frozen."""
    config = trainer_config(
        **{"lr": 0.02, "weight_decay": 0.1, **flags}, actor_num_gpus_per_node=info.world_size
    )
    backend = MegatronBackend(config, info)
    backend.setup(spec=tiny_spec(tie=tie, layers=4), initialise=True)
    batch = make_batch([[0, 1], [2, 3], [4], [5]])
    if backend.layout.data_parallel_size == 2:
        batch = shard(batch, [[0, 1, 4], [2, 3, 5]][backend.data_parallel_rank], [[0, 1], [2]])
    before = weights(backend)
    for _ in range(2):
        backend.train(batch)
    after = weights(backend)
    return {name: not torch.equal(before[name], after[name]) for name in before}


def refusal_job(info: Any, flags: dict[str, Any]) -> str:
    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    try:
        backend.setup(spec=tiny_spec(), initialise=True)
    except UserError as error:
        return str(error)
    return ""


PP2 = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("layout", "flags", "is_frozen"),
    [
        (
            {},
            {"freeze_params_name_list": [r"mlp", "embedding"]},
            lambda name: "mlp" in name or "embedding" in name,
        ),
        (
            {"tensor_model_parallel_size": 2},
            {"only_train_params_name_list": ["norm"]},
            lambda name: "norm" not in name,
        ),
        (
            PP2,
            {"freeze_params_name_list": [r"layers\.[13]\."]},
            lambda name: ".1." in name or ".3." in name,
        ),
        (
            PP2,
            {"only_train_params_name_list": [r"layers\.3\."]},
            lambda name: "layers.3." not in name,
        ),
        (
            {**PP2, "recompute_activations": True},
            {"only_train_params_name_list": [r"layers\.2\."]},
            lambda name: "layers.2." not in name,
        ),
    ],
    ids=[
        "dp2, distributed optimizer",
        "tp2",
        "pp2, some layers of each stage",
        "pp2, a stage as a whole",
        "recompute",
    ],
)
def test_frozen_parameters_stay_at_every_layout(
    ranks: Pools, layout: dict[str, Any], flags: dict[str, Any], is_frozen: Any
) -> None:
    moved = {
        name: m
        for rank in ranks.run(2, moved_job, {**layout, **flags}, False)
        for name, m in rank.items()
    }
    assert len(moved) == 4 * 8 + 3
    assert moved == {name: not is_frozen(name) for name in moved}


@pytest.mark.parametrize("frozen", [True, False])
def test_both_copies_of_a_tied_embedding_are_frozen_or_trained(ranks: Pools, frozen: bool) -> None:
    names = ["embedding"] if frozen else ["mlp"]
    first, last = ranks.run(2, moved_job, {**PP2, "freeze_params_name_list": names}, True)
    assert first["embedding.word_embeddings.weight"] is last["output_layer.weight"] is not frozen


@pytest.mark.parametrize("layout", [{}, PP2], ids=["whole model", "pipeline"])
def test_expressions_that_match_nothing_are_refused_with_the_nearest(
    ranks: Pools, layout: dict[str, Any]
) -> None:
    said = ranks.run(
        2, refusal_job, {**layout, "freeze_params_name_list": ["mlp", "embeding.word_embeddings"]}
    )
    assert said[0] == said[1]
    assert "no parameter matches embeding.word_embeddings" in said[0]
    assert "nearest: embedding.word_embeddings.weight" in said[0]


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(UserError, match="parameters are frozen"):
        trainer(freeze_params_name_list=["."])


@pytest.mark.parametrize("flag", ["only_train_params_name_list", "freeze_params_name_list"])
def test_broken_expressions_are_refused_at_launch(flag: str) -> None:
    with pytest.raises(UserError, match="is no regular expression") as caught:
        trainer_config(**{flag: ["layers", "(mlp"]})
    assert "(mlp" in caught.value.what and "unterminated" in caught.value.why


# -- model provider --------------------------------------------------------------------------------


def half_frozen(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    model = default_model(pre_process, post_process, vp_stage)
    seen.append((pre_process, post_process, vp_stage))
    model.decoder.layers[0].requires_grad_(False)
    return model


def linear_layer(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return torch.nn.Linear(2, 2)


def always_whole(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return default_model(True, False, vp_stage)


def in_half_precision(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return default_model(pre_process, post_process, vp_stage).half()


def without_values(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return default_model(pre_process, post_process, vp_stage).to("meta")


def test_a_provider_builds_on_the_default_model() -> None:
    seen.clear()
    plain, provided = trainer(lr=0.02), None
    try:
        expected = plain.log_probs(make_batch())
    finally:
        plain.close()
    provided = trainer(custom_model_provider_path=hook_path("half_frozen"), lr=0.02)
    try:
        scores, before = provided.log_probs(make_batch()), weights(provided)
        assert expected is not None and scores is not None
        assert all(torch.equal(a, b) for a, b in zip(scores, expected))
        provided.train(make_batch())
        after = weights(provided)
    finally:
        provided.close()
    assert seen == [(True, True, None)]
    assert {name for name in before if torch.equal(before[name], after[name])} == {
        name for name in before if "layers.0." in name
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear_layer", "returned a Linear"),
        ("always_whole", r"\(pre_process, post_process\) = \(True, False\)"),
        ("in_half_precision", "has float16"),
        ("without_values", "no values, on the device meta"),
    ],
)
def test_a_provider_of_something_else_is_refused(name: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        trainer(custom_model_provider_path=hook_path(name))


def test_the_default_model_is_for_providers() -> None:
    with pytest.raises(UserError, match="outside of a model provider"):
        default_model(True, True)


# -- layer specification ---------------------------------------------------------------------------


class Silent(PackedSelfAttention):
    """Attention that adds nothing to the residual stream."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, bias = super().forward(*args, **kwargs)
        return output * 0, bias


def same_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    seen.append(("spec", args.lr, config.num_layers, vp_stage))
    return default_layer_spec(args, config, vp_stage)


def silent_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    block = default_layer_spec(args, config, vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = Silent
    return block


def one_layer_for_all(args: Any, config: Any, vp_stage: int | None) -> Any:
    return default_layer_spec(args, config, vp_stage).layer_specs[0]


def too_few_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    block = default_layer_spec(args, config, vp_stage)
    return dataclasses.replace(block, layer_specs=block.layer_specs[1:])


def fewer_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    config.num_layers = 1
    return default_layer_spec(args, config, vp_stage)


def no_layers(args: Any, config: Any, vp_stage: int | None) -> Any:
    return torch.nn.Linear(2, 2)


def spec_scores(name: str | None) -> list[torch.Tensor]:
    flags = {} if name is None else {"spec": [__name__, name]}
    backend = trainer(lr=0.02, **flags)
    try:
        scores = backend.log_probs(make_batch())
    finally:
        backend.close()
    assert scores is not None
    return scores


def test_a_layer_spec_is_given_the_run_and_takes_effect() -> None:
    seen.clear()
    expected = spec_scores(None)
    for name in ("same_layers", "one_layer_for_all"):
        assert all(torch.equal(a, b) for a, b in zip(spec_scores(name), expected, strict=True))
    assert seen[0][:2] == ("spec", 0.02) and seen[0][3] is None
    assert not any(
        torch.equal(a, b) for a, b in zip(spec_scores("silent_layers"), expected, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_layers", "gave a Linear"),
        ("too_few_layers", r"gave \d+ layers?"),
        ("fewer_layers", r"changed config\.num_layers from 2 to 1"),
    ],
)
def test_a_spec_of_something_else_is_refused(name: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        trainer(spec=[__name__, name])


def test_the_default_layer_spec_is_for_specs() -> None:
    with pytest.raises(UserError, match="outside of a layer specification"):
        default_layer_spec(None, None)  # type: ignore[arg-type]


# -- functions around the phases -------------------------------------------------------------------


def on_init(args: Any) -> None:
    seen.append(("init", args.lr, dist.is_initialized()))


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    seen.append(
        (
            "log_prob",
            store_prefix,
            sum(p.numel() for chunk in model for p in chunk.parameters()) > 1000,
        )
    )


def before_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    seen.append(("step", rollout_id, step_id, opt_param_scheduler.num_steps))
    with torch.no_grad():
        for parameter in model[0].parameters():  # seen by the passes of this very step
            parameter.mul_(0.0)


def steps_itself(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    optimizer.step()
    if step_id:
        opt_param_scheduler.step(increment=1)


@pytest.mark.parametrize("hook", ["steps_itself", "before_step"])
def test_a_hook_that_takes_a_step_of_its_own_is_told_of(
    hook: str, caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    backend = trainer(custom_megatron_before_train_step_hook_path=hook_path(hook))
    try:
        backend.train(make_batch(num_steps=2))
    finally:
        backend.close()
    said = [line for line in caplog.messages if ".step() itself" in line]
    names = ["optimizer", "opt_param_scheduler"] if hook == "steps_itself" else []
    assert len(said) == len(names)
    for name, line in zip(names, said):
        assert f"calls {name}.step() itself" in line
        assert "steps_itself' (--custom-megatron-before-train-step-hook-path)" in line


def returns_the_model(args: Any, model: Any, store_prefix: str) -> Any:
    model.clear()  # a list of its own
    return 1.0


def test_what_a_function_around_a_phase_returns_is_refused() -> None:
    backend = trainer(custom_megatron_before_log_prob_hook_path=hook_path("returns_the_model"))
    try:
        with pytest.raises(UserError, match=r"returned the float 1\.0, which nothing reads"):
            backend.log_probs(make_batch())
        assert backend.model_chunks
    finally:
        backend.close()


def test_each_function_sees_what_it_should() -> None:
    seen.clear()
    backend = trainer(
        custom_megatron_init_path=hook_path("on_init"),
        custom_megatron_before_log_prob_hook_path=hook_path("before_log_prob"),
        custom_megatron_before_train_step_hook_path=hook_path("before_step"),
        use_kl_loss=True,
        kl_loss_coef=0.1,
    )
    batch = make_batch(num_steps=3)
    try:
        backend.train(batch)
        entropy = backend.step_metrics[0]["train/entropy_loss"]
    finally:
        backend.close()
    assert seen == [
        ("init", 1e-2, True),
        ("log_prob", "ref_", True),
        ("log_prob", "", True),
        *(("step", 0, k, k * 5) for k in range(3)),
    ]
    step = batch.steps[0]
    weight = sum(
        float(batch.loss_masks[i].sum()) / batch.rollout_mask_sums[i] / step.global_batch_size
        for samples in step.micro_batches
        for i in samples
    )
    # with all weights 0 every token is as likely: the hook came before the step's forward pass
    assert entropy == pytest.approx(weight * math.log(97), rel=1e-4)
