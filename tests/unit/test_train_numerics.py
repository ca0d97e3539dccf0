"""What changes the weights, against formulas in float64 that share no code with the trainer: the
optimizer over several steps, the schedule, the KL in the reward, attention in bfloat16, rotary
frequencies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.errors import UserError
from slime.models.activations import gated, gelu_tanh, quick_gelu
from slime.models.rotary import inverse_frequencies
from slime.trainer.megatron.attention import PackedAttention
from slime.trainer.megatron.backend import MegatronBackend
from slime.trainer.megatron.layers import ClampedGLU, GatedUnit, WideNorm
from slime.trainer.megatron.optimizer import apply_gradients, build_schedule, set_run_length
from slime.trainer.megatron.packed import PackingOptions, pack
from slime.trainer.records import RolloutTensors
from slime.trainer.update import compute_advantages
from slime.trainer.user_functions import UserFunctions
from tests.support.trainer_ranks import make_batch, trainer_config
from tests.support.trainers import trainer

CPU = torch.device("cpu")

# -- Adam ------------------------------------------------------------------------------------------

LR, BETA1, BETA2, EPS, DECAY, LIMIT = 0.02, 0.7, 0.9, 0.05, 0.3, 0.5
#: Norms of the gradients of successive steps, in units of the limit: clipped or not, in turns.
NORMS = (3.0, 0.5, 60.0, 0.99, 1.5)


@pytest.fixture(scope="module")
def backend() -> Iterator[MegatronBackend]:
    found = trainer(
        lr=LR, adam_beta1=BETA1, adam_beta2=BETA2, adam_eps=EPS, weight_decay=DECAY, clip_grad=LIMIT
    )  # fmt: skip
    yield found
    found.close()


def adam_in_float64(
    weights: list[Tensor], gradients: list[list[Tensor]], limit: float
) -> Iterator[list[Tensor]]:
    """The weights after each step (Loshchilov and Hutter, arXiv:1711.05101), vectors without
    decay."""
    weights = [weight.double() for weight in weights]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    for step, of_step in enumerate(gradients, 1):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in of_step))
        scale = min(1.0, limit / norm)
        for i, gradient in enumerate(of_step):
            g = gradient.double() * scale
            first[i] = BETA1 * first[i] + (1 - BETA1) * g
            second[i] = BETA2 * second[i] + (1 - BETA2) * g * g
            corrected = first[i] / (1 - BETA1**step)
            divisor = (second[i] / (1 - BETA2**step)).sqrt() + EPS
            decay = DECAY if weights[i].dim() > 1 else 0.0
            weights[i] = weights[i] * (1 - LR * decay) - LR * corrected / divisor
        yield list(weights)


def test_adam_over_several_steps_is_that_of_float64(backend: MegatronBackend) -> None:
    """Betas, epsilon, weight decay and clipping, where steps that are clipped follow others that
    are not."""
    parameters = [p for chunk in backend.model_chunks for p in chunk.parameters()]
    assert {p.dim() for p in parameters} == {1, 2}
    generator = torch.Generator().manual_seed(0)
    gradients = []
    for norm in NORMS:
        raw = [torch.randn(p.shape, generator=generator) for p in parameters]
        total = math.sqrt(sum(float(g.double().square().sum()) for g in raw))
        gradients.append([g * (norm * LIMIT / total) for g in raw])
    expected = adam_in_float64([p.detach() for p in parameters], gradients, LIMIT)
    for norm, of_step, weights in zip(NORMS, gradients, expected):
        for parameter, gradient in zip(parameters, of_step):
            parameter.main_grad.copy_(gradient)
        outcome = apply_gradients(backend.optimizer, LIMIT)
        assert outcome.applied and outcome.grad_norm == pytest.approx(norm * LIMIT, rel=1e-4)
        for parameter, weight in zip(parameters, weights):
            assert torch.allclose(parameter.double(), weight, rtol=0, atol=2e-6)


# -- the schedule ----------------------------------------------------------------------------------

#: 12 samples a rollout in two steps.
STEPS = {"rollout_batch_size": 4, "n_samples_per_prompt": 3, "num_steps_per_rollout": 2}
SAMPLES = 6


def rates(flags: dict[str, Any], length: int | None = None) -> list[tuple[float, float]]:
    """(learning rate, weight decay) of each step of a run, as the trainer advances its schedule."""
    config = trainer_config(**{**STEPS, "num_rollout": 10, "lr": 1.0, **flags})
    assert config.train.global_batch_size == SAMPLES
    optimizer = SimpleNamespace(param_groups=[{}])
    schedule = build_schedule(optimizer, config)  # type: ignore[arg-type]
    if length is not None:
        set_run_length(schedule, config, length)
    found = []
    for _ in range(22):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]))
        schedule.step(SAMPLES)
    return found


def test_the_schedule_of_a_checkpoint_keeps_its_lengths() -> None:
    flags = {"use_checkpoint_opt_param_scheduler": True, "load": "elsewhere", "lr": 1.0}
    config = trainer_config(**STEPS, num_rollout=10, lr_decay_style="linear", **flags)
    schedule = build_schedule(SimpleNamespace(param_groups=[{}]), config)  # type: ignore[arg-type]
    schedule.load_state_dict({**schedule.state_dict(), "lr_decay_steps": 1000, "num_steps": 50})
    set_run_length(schedule, config, 20)
    assert schedule.lr_decay_steps == 1000


def linear(step: float, warmup: float, decay: float, least: float = 0.0) -> float:
    if step <= warmup and warmup:
        return step / warmup
    return least + (1 - least) * max(0.0, (decay - step) / (decay - warmup))


def stable_then_down(step: float, decay: float, last: float) -> float:
    return min(1.0, max(0.0, (decay - step) / last))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"lr_decay_style": "linear", "lr_decay_iters": 15}, lambda k: linear(k, 0, 15)),
        ({"lr_decay_style": "linear"}, lambda k: linear(k, 0, 20)),
        (
            {"lr_decay_style": "linear", "lr_warmup_iters": 4, "min_lr": 0.25},
            lambda k: linear(k, 4, 20, 0.25),
        ),
        ({"lr_decay_style": "linear", "lr_warmup_fraction": 0.2}, lambda k: linear(k, 4, 20)),
        (
            {"lr_decay_style": "linear", "lr_warmup_fraction": 0.2, "lr_decay_iters": 15},
            lambda k: linear(k, 3, 15),
        ),
        (
            {"lr_decay_style": "linear", "lr_warmup_samples": 12, "lr_decay_samples": 60},
            lambda k: linear(k, 2, 10),
        ),
        (
            {
                "lr_decay_style": "linear",
                "advantage_estimator": "ppo",
                "num_critic_only_steps": 2,
            },
            lambda k: linear(k, 0, 16),
        ),
        (
            {
                "lr_decay_style": "WSD",
                "lr_wsd_decay_iters": 5,
                "lr_wsd_decay_style": "linear",
                "lr_decay_iters": 16,
            },
            lambda k: stable_then_down(k, 16, 5),
        ),
    ],
    ids=[
        "decay",
        "whole run",
        "warm-up and floor",
        "fraction of the run",
        "fraction of the decay",
        "samples",
        "behind the critic",
        "WSD",
    ],
)
def test_learning_rates_count_optimizer_steps(
    flags: dict[str, Any], expected: Callable[[int], float]
) -> None:
    found = [rate for rate, _ in rates(flags)]
    assert found == pytest.approx([expected(k) for k in range(22)], abs=1e-9)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"lr_decay_style": "linear", "lr_warmup_iters": 20}, "but decays within 120"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 16, "lr_warmup_iters": 5},
            "decays for 96, within 120 in all",
        ),
    ],
    ids=["linear", "WSD"],
)
def test_a_decay_without_room_behind_the_warm_up_is_refused_at_launch(
    flags: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        trainer_config(num_rollout=20, **flags)


def test_a_warm_up_longer_than_the_run_is_told() -> None:
    [told] = trainer_config(num_rollout=2, lr_warmup_iters=3).warnings
    assert "warms up for 18 samples, and the run trains on 12" in told


def test_weight_decay_rises_over_the_whole_run() -> None:
    flags = {
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.3,
        "weight_decay_incr_style": "linear",
        "lr_decay_style": "linear",
        "lr_decay_iters": 7,
    }
    for length in (None, 5):
        steps = 20 if length is None else 2 * length
        found = [decay for _, decay in rates(flags, length)]
        assert found == pytest.approx(
            [0.1 + 0.2 * min(1.0, k / steps) for k in range(22)], abs=1e-9
        )


# -- the KL in the reward --------------------------------------------------------------------------

KL_OF: dict[str, Callable[[float], float]] = {
    "k1": lambda r: r,
    "k2": lambda r: r * r / 2,
    "k3": lambda r: math.exp(-r) - 1 + r,
}


@pytest.mark.parametrize("kind", KL_OF)
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_the_kl_in_the_reward_is_of_its_kind_and_of_trained_tokens(
    kind: str, estimator: str
) -> None:
    config = trainer_config(
        advantage_estimator=estimator,
        kl_coef=0.3,
        kl_loss_type=kind,
        gamma=1.0,
        normalize_advantages=True,
    )
    batch = make_batch()
    generator = torch.Generator().manual_seed(1)
    old = [torch.randn(r, generator=generator) for r in batch.response_lengths]
    reference = [torch.randn(r, generator=generator) for r in batch.response_lengths]
    data = RolloutTensors(loss_masks=batch.loss_masks, log_probs=old, ref_log_probs=reference)
    assert any(0 < float(mask.sum()) < len(mask) for mask in batch.loss_masks)
    ranks = SimpleNamespace(device=CPU, has_output=True, sum_over_replicas=lambda tensor: tensor)
    compute_advantages(
        SimpleNamespace(config=config, functions=UserFunctions.load(config), ranks=ranks),
        batch,
        data,
    )  # type: ignore[arg-type]
    assert data.advantages is not None
    found, expected = [], []
    for i, mask in enumerate(batch.loss_masks):
        kl = [KL_OF[kind](float(a) - float(b)) for a, b in zip(old[i], reference[i])]
        trained = [t for t in range(len(mask)) if mask[t]]
        for t in trained:
            penalised = [t] if estimator.endswith("baseline") else [s for s in trained if s >= t]
            found.append(float(data.advantages[i][t]))
            expected.append(batch.rewards[i] - 0.3 * sum(kl[s] for s in penalised))
    mean, deviation = statistics.mean(expected), statistics.stdev(expected)
    assert found == pytest.approx([(value - mean) / deviation for value in expected], abs=1e-4)


# -- attention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [None, 0.9])
def test_attention_is_that_of_float64(dtype: torch.dtype, scale: float | None) -> None:
    """Three sequences of unequal lengths, two heads per group."""
    lengths, heads, groups, dim = [7, 3, 11], 4, 2, 8
    # the last one predicts nothing
    tokens = [torch.zeros(n + 1, dtype=torch.long) for n in lengths]
    sequences = pack([0, 1, 2], tokens, [1, 1, 1], PackingOptions(CPU)).sequences
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(lengths), n, dim, generator=generator).to(dtype)
        for n in (heads, groups, groups)
    )
    config: Any = SimpleNamespace(
        attention_dropout=0.0, kv_channels=dim, window_size=None, window_attn_skip_freq=None
    )
    out = PackedAttention(config, 1, softmax_scale=scale)(query, key, value, sequences)
    start = 0
    for n in lengths:
        for t in range(n):
            for head in range(heads):
                group = head // (heads // groups)
                seen = slice(start, start + t + 1)
                scores = (
                    key[seen, group].double()
                    @ query[start + t, head].double()
                    * (scale or dim**-0.5)
                )
                expected = scores.softmax(0) @ value[seen, group].double()
                tolerance = 1e-5 if dtype == torch.float32 else 0.03
                assert torch.allclose(out[start + t, head].double(), expected, atol=tolerance)
        start += n


# -- gates and norms -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [None, 1.25])
def test_gradients_of_gated_activations_are_those_of_their_formulas(limit: float | None) -> None:
    """Some entries are beyond the limit."""
    x = torch.tensor(
        [
            [-3.0, -1.24, 0.5, 1.24, 2.0, 0.3, -2.0, 1.24],
            [1.0, 3.0, 0.0, -0.7, 1.24, -1.24, 4.0, 0.1],
        ],
        dtype=torch.float64,
        requires_grad=True,
    )
    a, b = x.chunk(2, dim=-1)
    direction = torch.arange(1.0, 9.0, dtype=torch.float64).view(2, 4)
    for ours, theirs in (
        (ClampedGLU.apply(x, limit, 0.75), gated(a, b, quick_gelu, limit, 0.75)),
        (GatedUnit.apply(x, torch.nn.functional.silu), torch.nn.functional.silu(a) * b),
        (GatedUnit.apply(x, gelu_tanh), gelu_tanh(a) * b),
    ):
        assert torch.allclose(ours, theirs)
        (found,) = torch.autograd.grad(ours, x, direction, retain_graph=True)
        (expected,) = torch.autograd.grad(theirs, x, direction, retain_graph=True)
        assert torch.allclose(found, expected)


def test_the_gradient_at_the_limit_of_a_gated_activation_is_that_below_it() -> None:
    """As of torch's clamp until 2.13; from 2.14 on its gradient there is 0."""

    def gradient(gate: float, up: float) -> torch.Tensor:
        x = torch.tensor([[gate, up]], dtype=torch.float64, requires_grad=True)
        (found,) = torch.autograd.grad(ClampedGLU.apply(x, 1.25, 0.75).sum(), x)
        return found

    for gate, up in ((1.25, 0.3), (0.4, 1.25), (0.4, -1.25)):
        below = gradient(gate * (1 - 1e-9), up * (1 - 1e-9))
        assert torch.allclose(gradient(gate, up), below, atol=1e-6) and bool(below.all())


@pytest.mark.usefixtures("backend")
def test_a_norm_over_all_heads_is_its_formula_and_saves_its_own_weight() -> None:
    config: Any = SimpleNamespace(params_dtype=torch.float32)
    norm = WideNorm(config, 4, heads=3, eps=0.01)
    norm.weight.data = torch.arange(1.0, 13.0)
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    wide = x.double().flatten(1)
    expected = wide / (wide.square().mean(dim=1, keepdim=True) + 0.01).sqrt() * norm.weight.double()
    assert torch.allclose(norm(x).double(), expected.view_as(x), atol=1e-5)
    # the optimizer finds the states of a parameter by its identity
    assert norm.sharded_state_dict("of.")["of.weight"].data is norm.weight


# -- rotary frequencies ----------------------------------------------------------------------------


@pytest.mark.parametrize("truncate", [None, True, False])
def test_yarn_blends_between_whole_dimensions_or_exact_ones(truncate: bool | None) -> None:
    """Peng et al. (arXiv:2309.00071), section 3.2: by the rotations of a dimension within the
    trained length."""
    dim, base, factor, trained = 64, 10000.0, 8.0, 2048
    settings: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    }
    if truncate is not None:
        settings["truncate"] = truncate
    found, attention = inverse_frequencies(dim, base, settings, 4 * trained)
    low, high = (
        dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (24.0, 2.0)
    )
    if truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    for pair in range(dim // 2):
        plain = base ** (-2 * pair / dim)
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        assert float(found[pair]) == pytest.approx(
            plain / factor * ramp + plain * (1 - ramp), rel=1e-5
        )
    assert attention == pytest.approx(0.1 * math.log(factor) + 1)
