"""What users' functions return in training is trained on as it is meant, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import slime.log
from slime.trainer.loss import LOSS_TYPES, micro_batch_loss
from slime.trainer.records import LossInputs, RolloutTensors, TokenScores
from slime.trainer.user_functions import UserFunctions, change_rollout
from slime.user_code.loading import FunctionFailed
from tests.support.trainer_ranks import make_batch, trainer_config

LENGTHS = [2, 1]
MASKS = [1.0, 0.0, 1.0]
ORIGIN = "'mine.py:function' (--flag)"


def trained(
    flags: dict[str, Any], masks: list[float] = MASKS, **functions: Any
) -> tuple[Tensor, Any, TokenScores]:
    """The loss of a micro-batch (two samples, three tokens), its metrics, and its scores, which
    have a gradient."""
    config = trainer_config(**flags)
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scores = TokenScores(logits.log_softmax(-1)[:, 0], torch.ones(3), logits * 1.0)
    weights = torch.tensor(masks) * torch.tensor([0.5, 0.5, 0.5])
    inputs = LossInputs(
        samples=[0, 1],
        sample_indices=[7, 8],
        lengths=torch.tensor(LENGTHS),
        masks=torch.tensor(masks),
        weights=weights,
        sample_weight=0.5,
        total_lengths=[4, 3],
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        old_log_probs=scores.log_probs.detach(),
        rollout_log_probs=scores.log_probs.detach(),
    )
    kind = LOSS_TYPES[config.algorithm.loss_type]
    users = UserFunctions(None, None, None, **functions)
    loss, metrics = micro_batch_loss(kind, scores, inputs, config, users)
    return loss, metrics, scores


def with_loss(function: Callable[..., Any], **more: Any) -> tuple[Tensor, Any, TokenScores]:
    flags = {"loss_type": "custom_loss", "custom_loss_function_path": "mine.loss"}
    return trained(flags, **more, loss=function, tis=None, reducer=None)


def with_tis(make: Callable[..., Any], **flags: Any) -> tuple[Tensor, Any, TokenScores]:
    def correct(args: Any, *, pg_loss: Tensor, loss_masks: list[Tensor], **rest: Any) -> Any:
        return make(pg_loss, loss_masks)

    flags = {"use_tis": True, "custom_tis_function_path": "mine.tis", **flags}
    return trained(flags, loss=None, tis=correct, reducer=None)


def with_reducer(reduce: Callable[[Tensor], Any], **more: Any) -> tuple[Tensor, Any, TokenScores]:
    flags = {"custom_pg_loss_reducer_function_path": "mine.reducer"}
    return trained(flags, **more, loss=None, tis=None, reducer=lambda *args: reduce)


def loss_of(batch: Any, mean: Any) -> Tensor:
    return -mean(torch.cat(batch["current_log_probs"]))


def test_a_loss_and_its_metrics_are_taken() -> None:
    def loss(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
        value = loss_of(batch, mean) + mean(logits.logsumexp(-1))
        return value, {"half": 0.5, "mine": value.detach(), "loss": 7}

    value, metrics, scores = with_loss(loss)
    assert metrics["loss"] == value.detach() == metrics["mine"] and metrics["half"] == 0.25
    (gradient,) = torch.autograd.grad(value, scores.log_probs)
    assert gradient.tolist() == [-0.5, 0.0, -0.5]


def test_a_function_may_change_the_logits_in_place() -> None:
    def loss(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
        before = mean(logits.sum(-1))
        logits.mul_(2.0)
        return before, {}

    assert with_loss(loss)[0].requires_grad


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda loss, metrics: None, "returned None"),
        (lambda loss, metrics: loss, r"returned a Tensor of shape \[\]\n.*\(loss, metrics\)"),
        (lambda loss, metrics: (loss,), "returned a tuple of 1"),
        (lambda loss, metrics: (None, metrics), "returned None as its loss"),
        (
            lambda loss, metrics: (loss.item(), metrics),
            "returned the float .* as its loss, without gradient",
        ),
        (lambda loss, metrics: (loss.detach(), metrics), "as its loss, without gradient"),
        (
            lambda loss, metrics: (loss.detach().requires_grad_() * 2, metrics),
            "as its loss, without gradient",
        ),
        (lambda loss, metrics: (loss.view(1), metrics), r"a Tensor of shape \[1\] as its loss"),
        (lambda loss, metrics: (loss, None), "returned None as its metrics"),
        (lambda loss, metrics: (loss, {"a": "x"}), "returned the str 'x' as its metric 'a'"),
        (
            lambda loss, metrics: (loss, {"a": loss.expand(3)}),
            r"a Tensor of shape \[3\] as its metric 'a'",
        ),
        (lambda loss, metrics: (loss, {1: loss}), "returned 1 as the name of a metric"),
    ],
)
def test_what_is_no_loss_is_refused(change: Callable[..., Any], told: str) -> None:
    with pytest.raises(FunctionFailed, match=told) as caught:
        with_loss(lambda args, batch, logits, mean: change(loss_of(batch, mean), {}))
    assert (
        caught.value.what.startswith("'mine.loss' (--custom-loss-function-path)")
        and caught.value.fix
    )


@pytest.mark.parametrize(
    "values", [lambda x: x[:, None], lambda x: x[:2], lambda x: x.sum(), lambda x: 1.0]
)
def test_what_would_spread_over_all_tokens_is_not_summed(values: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        FunctionFailed, match=r"called sum_of_sample_mean with .*\n.*of shape \[3\]"
    ):
        with_loss(
            lambda args, batch, logits, mean: (
                mean(values(torch.cat(batch["current_log_probs"]))),
                {},
            )
        )


def test_where_no_token_is_trained_a_loss_needs_no_gradient() -> None:
    def nothing(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
        return 0.0, {}

    value, _, scores = with_loss(nothing, masks=[0.0, 0.0, 0.0])
    (gradient,) = torch.autograd.grad(value, scores.log_probs)
    assert value == 0 and gradient.tolist() == [0.0, 0.0, 0.0]
    assert with_reducer(lambda losses: torch.zeros(()), masks=[0.0, 0.0, 0.0])[0].requires_grad


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda loss, masks: None, "returned None"),
        (lambda loss, masks: (loss, masks), "returned a tuple of 2"),
        (
            lambda loss, masks: (loss.mean(), masks, {}),
            r"returned a Tensor of shape \[\] as the loss",
        ),
        (
            lambda loss, masks: (loss[:, None], masks, {}),
            r"returned a Tensor of shape \[3, 1\] as the loss",
        ),
        (lambda loss, masks: (1.0, masks, {}), "returned the float 1.0 as the loss"),
        (lambda loss, masks: (loss.detach(), masks, {}), "as the loss, without gradient"),
        (lambda loss, masks: (loss, None, {}), "returned the loss masks as None"),
        (
            lambda loss, masks: (loss, torch.cat(masks), {}),
            r"the loss masks as a Tensor of shape \[3\]",
        ),
        (
            lambda loss, masks: (loss, [m[:, None] for m in masks], {}),
            "the loss masks of other shapes",
        ),
        (lambda loss, masks: (loss, [m * 0.5 for m in masks], {}), "values other than 0 and 1"),
        (lambda loss, masks: (loss, masks, None), "returned None as its metrics"),
        (
            lambda loss, masks: (loss, masks, {"a": loss[:2]}),
            r"a Tensor of shape \[2\] as its metric 'a'",
        ),
        (lambda loss, masks: (loss, masks, {"a": masks}), "a list of 2 as its metric 'a'"),
        (
            lambda loss, masks: (loss, masks, {"pg_loss": loss}),
            "a metric 'pg_loss', which the trainer has",
        ),
    ],
)
def test_what_is_no_correction_is_refused(make: Callable[..., Any], told: str) -> None:
    with pytest.raises(FunctionFailed, match=told) as caught:
        with_tis(make)
    assert (
        caught.value.what.startswith("'mine.tis' (--custom-tis-function-path)") and caught.value.fix
    )


def test_a_correction_is_taken() -> None:
    loss, metrics, _ = with_tis(
        lambda pg_loss, masks: (pg_loss * 3, [m > 0 for m in masks], {"a": pg_loss, "b": 2.0})
    )
    assert loss == metrics["pg_loss"] == 3 * metrics["a"] and metrics["b"] == 2.0


def test_with_the_mismatch_alone_only_the_metrics_are_looked_at() -> None:
    measure = {"use_tis": False, "get_mismatch_metrics": True}
    assert with_tis(lambda pg_loss, masks: (None, None, {"a": pg_loss}), **measure)[1]["a"] == 0.0


@pytest.mark.parametrize(
    ("reduce", "told"),
    [
        (lambda losses: None, "returned None"),
        (lambda losses: losses, r"returned a Tensor of shape \[3\]"),
        (lambda losses: losses.sum().item(), "returned the float .*, without gradient"),
        (
            lambda losses: losses.sum().detach(),
            r"returned a Tensor of shape \[\], without gradient",
        ),
        (lambda losses: (losses.sum(), {}), "returned a tuple of 2"),
    ],
)
def test_what_is_no_sum_of_losses_is_refused(reduce: Callable[[Tensor], Any], told: str) -> None:
    with pytest.raises(FunctionFailed, match=told) as caught:
        with_reducer(reduce)
    assert (
        "'mine.reducer' (--custom-pg-loss-reducer-function-path)" in caught.value.what
        and caught.value.fix
    )


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("None", "returned None"),
        ("1.0", "returned the float 1.0"),
        ("lambda: 1", r"cannot be called with \(losses\)"),
    ],
)
def test_what_is_no_reducer_is_refused(tmp_path: Any, made: str, told: str) -> None:
    path = tmp_path / f"reducer_{abs(hash(made))}.py"
    path.write_text(f"def make(total, responses, masks, per_token):\n    return {made}\n")
    config = trainer_config(custom_pg_loss_reducer_function_path=f"{path}:make")
    make = UserFunctions.load(config).reducer
    assert make is not None
    with pytest.raises(FunctionFailed, match=told) as caught:
        make([4], [2], [torch.ones(2)], False)
    assert f"'{path}:make' (--custom-pg-loss-reducer-function-path)" in caught.value.what


# -- advantages ------------------------------------------------------------------------------------


def assigned(values: Callable[[dict[str, Any]], Any]) -> RolloutTensors:
    batch = make_batch()
    data = RolloutTensors(loss_masks=batch.loss_masks)
    change_rollout(
        lambda view: view.__setitem__("advantages", values(view)), ORIGIN, batch, data, {}
    )
    return data


def ones(view: dict[str, Any], factor: float = 1.0) -> list[Tensor]:
    return [torch.full_like(mask, factor) for mask in view["loss_masks"]]


def test_numbers_in_lists_will_do() -> None:
    data = assigned(lambda view: [value.tolist() for value in ones(view)])
    assert data.advantages is not None and data.returns is data.advantages
    assert all(
        torch.equal(value, torch.ones_like(mask))
        for value, mask in zip(data.advantages, data.loss_masks)
    )


def test_a_nan_where_nothing_is_trained_does_no_harm() -> None:
    data = assigned(
        lambda view: [torch.where(mask > 0, 1.0, math.nan) for mask in view["loss_masks"]]
    )
    assert data.advantages is not None
    for values, mask in zip(data.advantages, data.loss_masks):
        assert torch.equal(values, mask)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (lambda view: 1.0, "as the float 1.0"),
        (lambda view: torch.cat(ones(view)), r"as a Tensor of shape \[\d+\]"),
        (lambda view: ones(view)[:-1], "as a list of 5\n.*6 samples"),
        (lambda view: dict(enumerate(ones(view))), "as a dict of 6"),
        (
            lambda view: view["rewards"],
            r"of other shapes.*\n.*index 100 is the float .* instead of \[\d+\]",
        ),
        (lambda view: [value[1:] for value in ones(view)], "of other shapes"),
        (lambda view: [value[:, None] for value in ones(view)], "of other shapes"),
        (lambda view: [["x"] * len(value) for value in ones(view)], "not all of it is numbers"),
        (lambda view: [None] * 6, "not all of it is numbers"),
        (lambda view: ones(view, math.nan), "NaN or infinite values\n.*6 of 6 samples"),
    ],
)
def test_what_is_not_one_number_per_token_is_refused(values: Callable[..., Any], told: str) -> None:
    with pytest.raises(FunctionFailed, match=told) as caught:
        assigned(values)
    assert (
        caught.value.what.startswith(f"{ORIGIN} assigned rollout_data['advantages']")
        and caught.value.fix
    )


# -- what trains otherwise than it looks -----------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings that were told are told again."""
    monkeypatch.setattr(slime.log, "_said", set())


def test_gradients_are_left_to_the_trainer() -> None:
    def loss(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
        value = loss_of(batch, mean)
        value.backward(retain_graph=True)
        return value, {}

    with pytest.raises(FunctionFailed, match=r"called backward\(\)"):
        with_loss(loss)

    def penalised(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
        value = loss_of(batch, mean)
        torch.autograd.grad(value, batch["current_log_probs"], retain_graph=True)
        return value, {}

    assert with_loss(penalised)[0].requires_grad, "gradients of what it was given are its own"


def summed(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
    return loss_of(batch, mean), {}


def averaged(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
    return torch.cat(batch["current_log_probs"]).mean(), {}


def of_pairs(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
    return batch["current_log_probs"][1].sum(), {}


@pytest.mark.parametrize(
    ("run", "is_told"),
    [
        (lambda: with_loss(summed), False),
        (lambda: with_loss(averaged), True),
        (lambda: with_loss(of_pairs), False),
        (lambda: with_reducer(lambda losses: losses.sum()), False),
        (lambda: with_reducer(lambda losses: losses.mean()), True),
    ],
)
def test_a_loss_that_depends_on_the_micro_batch_is_told(
    run: Callable[[], Any], is_told: bool, fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    run()
    assert ("is no sum over samples" in caplog.text) == is_told


def test_ranks_with_other_samples_call_a_loss_equally_often(
    fresh: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collective in it would otherwise wait for ranks that have fewer samples."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    calls = []

    def counted(args: Any, batch: Any, logits: Tensor, mean: Any) -> Any:
        calls.append(1)
        return averaged(args, batch, logits, mean)

    with_loss(counted)
    assert len(calls) == 1
    assert "is no sum over samples" not in caplog.text


@pytest.mark.parametrize("name", ["grad_norm", "skipped", "lr-pg_0"])
def test_metrics_of_the_trainer_are_not_replaced(name: str) -> None:
    with pytest.raises(FunctionFailed, match="which the trainer has"):
        with_loss(lambda args, batch, logits, mean: (loss_of(batch, mean), {name: 1.0}))


#: What a function does with ``rollout_data`` → a part of the refusal, or of the warning.
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "probabilities": (
        lambda data: data.update(log_probs=[torch.ones_like(x) for x in data["log_probs"]]),
        "the logarithm of a probability is not above 0",
    ),
    "complex advantages": (
        lambda data: data.update(advantages=[x * 1j for x in data["advantages"]]),
        "it is complex",
    ),
    "kl in place": (lambda data: data["kl"][0].add_(1.0), r"changed rollout_data\['kl'\] in place"),
    "no masks": (
        lambda data: data.update(loss_masks=[x * 0 for x in data["loss_masks"]]),
        "masks every token of the 2 samples",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_function_assigns_can_be_trained_on(
    change: str, fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    do, told = CHANGES[change]
    batch = make_batch([[0, 1]])
    ones = [torch.ones(length) for length in batch.response_lengths]
    data = RolloutTensors(loss_masks=list(batch.loss_masks))
    data.advantages, data.kl = ones, [-one for one in ones]
    data.log_probs = [-one for one in ones]
    if told.startswith("masks every token"):
        change_rollout(do, ORIGIN, batch, data, {})
        assert f"{ORIGIN} masks every token" in caplog.text
        return
    with pytest.raises(FunctionFailed, match=told):
        change_rollout(do, ORIGIN, batch, data, {})
