"""The loss of a micro-batch, against its formula written out token by token."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.algorithms.divergence import TopTokens
from slime.samples.batch import CHOSEN, REJECTED, StepPlan
from slime.trainer.loss import LOSS_TYPES, micro_batch_loss
from slime.trainer.preferences import labels_of, preference_step
from slime.trainer.records import (
    LossInputs,
    PreferenceLabels,
    PreferenceStep,
    RolloutTensors,
    TeacherInputs,
    TokenScores,
    TokenValues,
)
from slime.trainer.user_functions import UserFunctions
from tests.support.trainer_ranks import trainer_config

NEW, OLD, REF, ENGINE = (
    [-1.0, -0.4, -2.0],
    [-1.1, -0.9, -1.2],
    [-1.3, -0.2, -1.9],
    [-1.0, -1.0, -1.0],
)
ADVANTAGES, MASKS, WEIGHTS = [0.5, 0.5, -2.0], [1.0, 1.0, 1.0], [0.25, 0.25, 0.5]
ENTROPY = [0.7, 1.1, 0.3]
LENGTHS = [2, 1]


def loss_and_metrics(
    teacher: TeacherInputs | None = None, vocabulary: Any = None, /, **flags: Any
) -> tuple[float, dict[str, float]]:
    config = trainer_config(**flags)

    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    inputs = LossInputs(
        samples=[0, 1],
        sample_indices=[7, 8],
        lengths=torch.tensor(LENGTHS),
        masks=tensor(MASKS),
        weights=tensor(WEIGHTS),
        sample_weight=0.5,
        total_lengths=[4, 3],
        advantages=tensor(ADVANTAGES),
        old_log_probs=tensor(OLD),
        ref_log_probs=tensor(REF),
        rollout_log_probs=tensor(ENGINE),
        teacher=teacher,
    )
    scores = TokenScores(tensor(NEW), tensor(ENTROPY), vocabulary=vocabulary)
    loss, metrics = micro_batch_loss(
        LOSS_TYPES[config.algorithm.loss_type], scores, inputs, config, UserFunctions.load(config)
    )
    return loss.item(), {name: value.item() for name, value in metrics.items()}


def weighted(values: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, WEIGHTS))


def policy(low: float = 0.2, high: float = 0.2) -> list[float]:
    ratios = [math.exp(new - old) for new, old in zip(NEW, OLD)]
    return [max(-r * a, -min(max(r, 1 - low), 1 + high) * a) for r, a in zip(ratios, ADVANTAGES)]


def k3(ratios: list[float] | None = None) -> list[float]:
    values = [math.exp(ref - new) - 1 + new - ref for new, ref in zip(NEW, REF)]
    return values if ratios is None else [value * ratio for value, ratio in zip(values, ratios)]


def test_the_policy_loss_alone() -> None:
    loss, metrics = loss_and_metrics()
    assert loss == pytest.approx(weighted(policy())) == metrics["pg_loss"]
    assert metrics["pg_clipfrac"] == pytest.approx(WEIGHTS[1] + WEIGHTS[2])
    assert metrics["ppo_kl"] == pytest.approx(weighted([old - new for new, old in zip(NEW, OLD)]))


def test_entropy_is_rewarded() -> None:
    loss, metrics = loss_and_metrics(entropy_coef=0.3)
    assert metrics["entropy_loss"] == pytest.approx(weighted(ENTROPY))
    assert loss == pytest.approx(weighted(policy()) - 0.3 * weighted(ENTROPY))


@pytest.mark.parametrize("unbiased", [False, True])
def test_divergence_from_the_reference_is_punished(unbiased: bool) -> None:
    loss, metrics = loss_and_metrics(
        use_kl_loss=True, kl_loss_coef=0.4, kl_loss_type="k3", use_unbiased_kl=unbiased
    )
    ratios = [math.exp(new - old) for new, old in zip(NEW, OLD)] if unbiased else None
    assert metrics["kl_loss"] == pytest.approx(weighted(k3(ratios)))
    assert loss == pytest.approx(weighted(policy()) + 0.4 * weighted(k3(ratios)))


def test_a_bad_sample_that_drifted_away_is_masked() -> None:
    """The second sample's log-prob fell by 0.8 and its advantage is negative."""
    loss, metrics = loss_and_metrics(use_opsm=True, opsm_delta=0.5)
    assert loss == pytest.approx(weighted([*policy()[:2], 0.0]))
    assert metrics["opsm_clipfrac"] == pytest.approx(WEIGHTS[2])
    assert loss_and_metrics(use_opsm=True, opsm_delta=0.9)[0] == pytest.approx(weighted(policy()))


def test_importance_weights_correct_the_engines_mismatch() -> None:
    loss, metrics = loss_and_metrics(use_tis=True, tis_clip=1.05)
    ratios = [math.exp(old - engine) for old, engine in zip(OLD, ENGINE)]
    assert loss == pytest.approx(
        weighted([value * min(r, 1.05) for value, r in zip(policy(), ratios)])
    )
    assert metrics["tis"] == pytest.approx(weighted(ratios))
    assert metrics["tis_abs"] == pytest.approx(weighted([abs(r - 1) for r in ratios]))


def test_icepop_leaves_out_what_the_engine_saw_differently() -> None:
    ratios = [math.exp(old - engine) for old, engine in zip(OLD, ENGINE)]
    bound = (sorted(ratios)[1] + sorted(ratios)[2]) / 2
    loss, metrics = loss_and_metrics(use_tis=True, tis_mode="icepop", tis_clip=bound)
    kept = [r if r <= bound else 0.0 for r in ratios]
    assert loss == pytest.approx(weighted([value * r for value, r in zip(policy(), kept)]))
    assert metrics["tis_clipfrac"] == pytest.approx(weighted([float(r > bound) for r in ratios]))
    assert metrics["tis_abs"] == pytest.approx(weighted([abs(r - 1) for r in ratios]))
    assert metrics["tis"] == pytest.approx(weighted(ratios))


def test_weights_of_whole_samples() -> None:
    """The first sample's two tokens share one ratio, by their sum or by their mean."""
    log_ratios = [old - engine for old, engine in zip(OLD, ENGINE)]
    total = sum(log_ratios[:2])
    flags = {"use_tis": True, "tis_clip": 5.0}
    for level, first in (("sequence", total), ("geometric", total / 2)):
        ratios = [math.exp(value) for value in (first, first, log_ratios[2])]
        loss, metrics = loss_and_metrics(**flags, tis_level=level)
        assert loss == pytest.approx(weighted([v * r for v, r in zip(policy(), ratios)]))
        assert metrics["tis"] == pytest.approx(weighted(ratios))


def test_rejected_samples_leave_the_loss_but_not_its_denominators() -> None:
    """The second sample's ratio is exp(-0.2) = 0.82, below 1/1.2; the first one's tokens have 0.90
    and 1.11."""
    loss, metrics = loss_and_metrics(use_rs=True, rs_upper_bound=1.2, rs_level="geometric")
    assert loss == pytest.approx(weighted([*policy()[:2], 0.0]))
    assert metrics["rs_fraction_low"] == pytest.approx(WEIGHTS[2])
    assert metrics["rs_fraction_high"] == 0.0
    loss, metrics = loss_and_metrics(use_rs=True, rs_veto_threshold=0.85)
    assert loss == pytest.approx(weighted([*policy()[:2], 0.0]))
    assert metrics["rs_fraction_veto"] == pytest.approx(WEIGHTS[2])
    both = loss_and_metrics(use_rs=True, rs_veto_threshold=0.85, use_tis=True, tis_clip=1.05)[0]
    ratios = [math.exp(old - engine) for old, engine in zip(OLD, ENGINE)]
    kept = [min(ratios[0], 1.05), min(ratios[1], 1.05), 0.0]
    assert both == pytest.approx(weighted([v * r for v, r in zip(policy(), kept)]))


def test_the_ratio_may_be_taken_against_the_engine() -> None:
    """``old_log_probs`` are the engine's then; what is compared with the engine is the training
    pass itself."""
    metrics = loss_and_metrics(use_rollout_logprobs=True)[1]
    expected = weighted([abs(new - engine) for new, engine in zip(NEW, ENGINE)])
    assert metrics["train_rollout_logprob_abs_diff"] == pytest.approx(expected)


def test_one_ratio_per_sequence() -> None:
    loss = loss_and_metrics(advantage_estimator="gspo")[0]
    first = math.exp(sum(new - old for new, old in zip(NEW[:2], OLD[:2])) / 2)
    ratios = [first, first, math.exp(NEW[2] - OLD[2])]
    clipped = [min(max(r, 0.8), 1.2) for r in ratios]
    assert loss == pytest.approx(
        weighted([max(-r * a, -c * a) for r, c, a in zip(ratios, clipped, ADVANTAGES)])
    )


def test_the_loss_of_a_teacher_is_over_its_most_likely_tokens_or_over_all() -> None:
    """The one token of the teacher has the probability 0.2, 0.4 and 0.5 with the policy, 0.5 with
    the teacher; the rest is the other outcome."""
    flags = {
        "use_opd": True,
        "opd_teacher_load": ["elsewhere"],
        "opd_loss": "reverse_kl",
        "opd_kl_coef": 3.0,
    }
    whole = TeacherInputs()
    apart = [0.5, 1.0, 2.0]

    def divergence(rows: Any, kind: str, beta: float) -> torch.Tensor:
        assert rows is whole.rows and (kind, beta) == ("reverse_kl", 0.5)
        return torch.tensor(apart, dtype=torch.float64)

    loss, metrics = loss_and_metrics(whole, SimpleNamespace(divergence=divergence), **flags)
    assert metrics["opd_loss"] == pytest.approx(weighted(apart))
    assert loss == pytest.approx(metrics["pg_loss"] + 3 * weighted(apart))

    own = [0.2, 0.4, 0.5]
    ids = torch.tensor([[4], [5], [6]])

    def log_probs_at(asked: torch.Tensor) -> torch.Tensor:
        assert asked is ids
        return torch.tensor(own, dtype=torch.float64).log()[:, None]

    top = TeacherInputs(TopTokens(ids, torch.full((3, 1), math.log(0.5))))
    vocabulary = SimpleNamespace(log_probs_at=log_probs_at)
    _, metrics = loss_and_metrics(top, vocabulary, **flags, opd_top_k=1)
    two = [s * math.log(s / 0.5) + (1 - s) * math.log((1 - s) / 0.5) for s in own]
    assert metrics["opd_loss"] == pytest.approx(weighted(two), abs=1e-7)


def loss_fails(*_: Any) -> Any:
    raise AssertionError("nothing is asked about no tokens")


@pytest.mark.parametrize("kind", ["policy_loss", "sft_loss", "custom_loss"])
def test_a_micro_batch_without_tokens_is_connected_to_the_model(kind: str) -> None:
    """Its backward pass takes part in the collectives. One with a single token is like any
    other."""
    own = {"custom_loss_function_path": f"{__name__}.loss_fails"} if kind == "custom_loss" else {}
    config = trainer_config(loss_type=kind, **own)

    def loss_of(values: torch.Tensor) -> torch.Tensor:
        count = values.numel()
        inputs = LossInputs(
            samples=[0] * count,
            sample_indices=[0] * count,
            lengths=torch.ones(count, dtype=torch.long),
            masks=torch.ones(count),
            weights=torch.full((count,), 0.5),
            sample_weight=0.5,
            total_lengths=[2] * count,
            advantages=torch.full((count,), 3.0),
            old_log_probs=values.detach(),
        )
        functions = UserFunctions.load(config)
        return micro_batch_loss(LOSS_TYPES[kind], TokenScores(values), inputs, config, functions)[0]

    nothing = torch.zeros(0, requires_grad=True)
    loss = loss_of(nothing)
    loss.backward()
    assert loss.item() == 0.0 and nothing.grad is not None
    if kind != "custom_loss":
        one = torch.tensor([-2.0], requires_grad=True)
        assert loss_of(one).item() == {"policy_loss": -1.5, "sft_loss": 1.0}[kind]


# -- preferences -----------------------------------------------------------------------------------

#: Tokens of six answers, chosen and rejected ones in turns: (policy's log-prob, reference's, mask).
ANSWERS = [
    [(-1.0, -2.0, 1), (-0.5, -1.0, 1), (-3.0, -1.0, 0)],
    [(-2.0, -1.75, 1)],
    [(-1.5, -1.0, 1), (-2.0, -2.0, 1)],
    [(-0.25, -0.5, 1), (-1.0, -1.0, 0)],
    [(-1.0, -1.5, 1)],
    [(-2.0, -2.5, 1)],
]
#: In the step there are answers of other micro-batches, too.
NUM_CHOSEN = 4.0
NUM_REJECTED = 5.0
OF_A_PAIR = 0.125
BETA = 0.5


def preference_metrics(
    name: str, num_chosen: float = NUM_CHOSEN, **flags: Any
) -> tuple[float, dict[str, float]]:
    config = trainer_config(
        loss_type="preference_loss", preference_loss=name, n_samples_per_prompt=1, **flags
    )
    columns = torch.tensor([token for answer in ANSWERS for token in answer], dtype=torch.float64)
    values, reference, masks = columns.unbind(1)
    trains_head = name == "reward_model"
    inputs = LossInputs(
        samples=list(range(6)),
        sample_indices=list(range(6)),
        lengths=torch.tensor([len(answer) for answer in ANSWERS]),
        masks=masks,
        weights=masks,
        sample_weight=OF_A_PAIR,
        total_lengths=[9] * 6,
        ref_log_probs=None if trains_head else reference,
        preferences=PreferenceLabels(
            chosen=torch.tensor([0, 2, 4]),
            rejected=torch.tensor([1, 3, 5]),
            step=PreferenceStep(num_chosen, NUM_REJECTED, 0.5 if name == "kto" else 0.0),
        ),
    )
    scores = TokenValues(values) if trains_head else TokenScores(values)
    functions = UserFunctions.load(config)
    loss, metrics = micro_batch_loss(
        LOSS_TYPES["preference_loss"], scores, inputs, config, functions
    )
    return loss.item(), {metric: value.item() for metric, value in metrics.items()}


def sums(column: Any) -> list[float]:
    """Over the trained tokens of each answer."""
    return [math.fsum(column(*token[:2]) for token in answer if token[2]) for answer in ANSWERS]


def means_of_answers(values: list[float], name: str) -> dict[str, float]:
    return {
        f"chosen_{name}": sum(values[::2]) / NUM_CHOSEN,
        f"rejected_{name}": sum(values[1::2]) / NUM_REJECTED,
    }


def test_every_metric_of_pairs_is_its_definition() -> None:
    """The first pair is right, the second one wrong, the third one equal."""
    rewards = [BETA * ratio for ratio in sums(lambda own, reference: own - reference)]
    assert [rewards[i] - rewards[i + 1] for i in (0, 2, 4)] == [0.875, -0.375, 0.0]
    log_probs = sums(lambda own, _: own)
    counts = [sum(mask for *_, mask in answer) for answer in ANSWERS]
    losses = [math.log1p(math.exp(rewards[i + 1] - rewards[i])) for i in (0, 2, 4)]
    expected = {
        "preference_loss": OF_A_PAIR * sum(losses),
        **means_of_answers(rewards, "rewards"),
        **means_of_answers(log_probs, "log_probs"),
        "reward_accuracy": OF_A_PAIR * 1,
    }
    expected["reward_margin"] = expected["chosen_rewards"] - expected["rejected_rewards"]
    loss, metrics = preference_metrics("dpo", preference_beta=BETA)
    assert metrics == pytest.approx({**expected, "loss": loss})
    assert loss == pytest.approx(expected["preference_loss"])

    nll = -sum(log_probs[i] / counts[i] for i in (0, 2, 4)) / NUM_CHOSEN
    loss, metrics = preference_metrics("dpo", preference_beta=BETA, preference_sft_coef=0.25)
    assert metrics == pytest.approx({**expected, "chosen_nll": nll, "loss": loss})
    assert loss == pytest.approx(expected["preference_loss"] + 0.25 * nll)


def test_every_metric_of_labelled_answers_is_its_definition() -> None:
    """An answer is right on its side of the zero point; those that are at it are not."""
    rewards = [BETA * ratio for ratio in sums(lambda own, reference: own - reference)]
    zero = BETA * 0.5
    assert [reward - zero for reward in rewards] == [0.5, -0.375, -0.5, -0.125, 0.0, 0.0]

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    losses = [1 - sigmoid(reward - zero) for reward in rewards[::2]]
    losses += [1 - sigmoid(zero - reward) for reward in rewards[1::2]]
    expected = {
        "preference_loss": OF_A_PAIR * sum(losses),
        **means_of_answers(rewards, "rewards"),
        **means_of_answers(sums(lambda own, _: own), "log_probs"),
        "reward_accuracy": OF_A_PAIR * (1 + 2),
        "kto_kl": OF_A_PAIR * 6 * zero,
    }
    expected["reward_margin"] = expected["chosen_rewards"] - expected["rejected_rewards"]
    loss, metrics = preference_metrics("kto", preference_beta=BETA)
    assert metrics == pytest.approx({**expected, "loss": loss})
    # a step without desirable answers has no mean of them
    _, metrics = preference_metrics("kto", num_chosen=0.0, preference_beta=BETA)
    missing = {"chosen_rewards", "chosen_log_probs", "reward_margin"}
    assert metrics.keys() == {*expected, "loss"} - missing


def test_every_metric_of_a_reward_model_is_its_definition() -> None:
    rewards = sums(lambda own, _: own)
    losses = [math.log1p(math.exp(rewards[i + 1] - rewards[i])) for i in (0, 2, 4)]
    squares = [(rewards[i] + rewards[i + 1]) ** 2 for i in (0, 2, 4)]
    expected = {
        "preference_loss": OF_A_PAIR * (sum(losses) + 0.01 * sum(squares)),
        **means_of_answers(rewards, "rewards"),
        "reward_accuracy": OF_A_PAIR * 2,
    }
    expected["reward_margin"] = expected["chosen_rewards"] - expected["rejected_rewards"]
    loss, metrics = preference_metrics("reward_model", reward_center_coef=0.01)
    assert metrics == pytest.approx({**expected, "loss": loss})


#: Σ of the trained tokens' log-ratios is 0.75 and -0.25 for the two that are mismatched.
OWN = [[-1.0], [-0.5, -2.0, -9.0], [-1.0], [-1.25, -1.0]]
REFERENCE = [[0.0], [-1.0, -2.25, 0.0], [0.0], [-1.0, -3.0]]
TRAINED = [[1.0], [1.0, 1.0, 0.0], [1.0], [1.0, 0.0]]


def known_of_step(
    kind: str, scored: list[list[int]], own: list[list[float]] | None = OWN, replicas: int = 1
) -> PreferenceStep:
    def rows(values: list[list[float]]) -> list[torch.Tensor]:
        return [torch.tensor(row) for row in values]

    def log_probs(*_: Any, micro_batches: list[list[int]]) -> list[torch.Tensor] | None:
        assert micro_batches == scored
        return None if own is None else rows(own)

    trainer: Any = SimpleNamespace(
        config=trainer_config(
            loss_type="preference_loss", preference_loss=kind, n_samples_per_prompt=1
        ),
        ranks=SimpleNamespace(
            device=torch.device("cpu"), sum_over_replicas=lambda values: replicas * values
        ),
        log_probs=log_probs,
    )
    batch: Any = SimpleNamespace(
        rewards=[CHOSEN, 0.0, REJECTED, 0.0, CHOSEN], response_lengths=[1, 3, 1, 2, 1]
    )
    data = RolloutTensors(ref_log_probs=rows(REFERENCE), loss_masks=rows(TRAINED))
    step = StepPlan([[0], [2, 4]], global_batch_size=3, num_loss_tokens=9, scored=scored)
    return preference_step(trainer, batch, data, step)


def test_a_step_on_labelled_answers_knows_their_numbers_and_the_kl() -> None:
    assert known_of_step("kto", [[1], [3]]) == PreferenceStep(2.0, 1.0, (0.75 - 0.25) / 2)
    assert known_of_step("kto", [[1], [3]], replicas=2) == PreferenceStep(4.0, 2.0, 0.25)
    assert known_of_step("kto", [[1]]) == PreferenceStep(2.0, 1.0, 0.75)
    assert known_of_step("kto", [[3]]) == PreferenceStep(2.0, 1.0, 0.0)  # a KL is not negative
    assert known_of_step("kto", []) == PreferenceStep(2.0, 1.0, 0.0)
    # on a rank without outputs, whose sums those with outputs complete
    assert known_of_step("kto", [[1], [3]], own=None) == PreferenceStep(2.0, 1.0, 0.0)
    assert known_of_step("dpo", []) == PreferenceStep(3.0, 3.0, 0.0)


def test_labels_of_pairs_are_sorted_alike() -> None:
    batch: Any = SimpleNamespace(
        rewards=[REJECTED, CHOSEN, 0.0, CHOSEN, REJECTED], trajectory_ids=[7, 5, 6, 7, 5]
    )
    labels = labels_of(batch, [3, 0, 1, 2, 4], PreferenceStep(2.0, 2.0), torch.device("cpu"))
    assert labels.chosen.tolist() == [2, 0] and labels.rejected.tolist() == [4, 1]
