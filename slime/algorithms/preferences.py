"""Losses that learn from preferences: which of two answers is the better one (DPO, IPO, SimPO, a
reward model), or whether an answer is desirable (KTO).

    tokens ─ sum over each answer ─► SequenceScores ─► loss per pair, implicit rewards

A sum over an answer goes into a function that is not linear, so an answer is never divided: both
answers of a pair are in one micro-batch, and context parallelism gathers their tokens before.
A new loss is a function here and a row in `PREFERENCES`; its name and its facts, from which the
flags follow, are a record in `slime.config.preferences`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.algorithms.reduce import sample_sums
from slime.config.preferences import PREFERENCE_FACTS, PreferenceFacts


@dataclass(frozen=True)
class SequenceScores:
    """Scores of answers, each [S].

    Attributes:
        sums: Σ of the policy's log-probs over the trained tokens; of a reward model, the reward.
        log_ratios: Σ of (policy's − reference's log-prob) over the same; 0 without a reference.
        lengths: trained tokens, as numbers of the same dtype.
    """

    sums: Tensor
    log_ratios: Tensor
    lengths: Tensor

    def pick(self, places: Tensor) -> SequenceScores:
        """The scores of some of the answers, by their places (int64)."""
        return SequenceScores(
            self.sums.index_select(0, places),
            self.log_ratios.index_select(0, places),
            self.lengths.index_select(0, places),
        )

    @property
    def means(self) -> Tensor:
        """The mean log-prob per trained token; 0 for an answer without any."""
        return self.sums / self.lengths.clamp(min=1.0)

    @property
    def mean_log_ratios(self) -> Tensor:
        """``log_ratios`` per trained token; 0 for an answer without any."""
        return self.log_ratios / self.lengths.clamp(min=1.0)


def sequence_scores(
    values: Tensor, reference: Tensor | None, masks: Tensor, lengths: Tensor
) -> SequenceScores:
    """Sum the tokens of each answer.

    The difference to the reference is taken per token, so that equal models give exactly 0,
    whatever the length.

    Args:
        values: flat [N], log-probs of response tokens, or a reward model's outputs.
        reference: flat [N], without gradient; None without a reference.
        masks: flat [N], 0 or 1.
        lengths: int64 [S], response tokens of each sample.

    Example (two answers, of 2 tokens and of 1):
        >>> lp, ref = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.0])
        >>> s = sequence_scores(lp, ref, torch.ones(3), torch.tensor([2, 1]))
        >>> s.sums.tolist(), s.log_ratios.tolist(), s.lengths.tolist()
        ([-3.0, -3.0], [0.5, -1.0], [2.0, 1.0])
    """
    sums = sample_sums(values, masks, lengths)
    if reference is None:
        ratios = torch.zeros_like(sums)
    else:
        ratios = sample_sums(values - reference, masks, lengths)
    counts = sample_sums(torch.ones_like(values), masks, lengths)
    return SequenceScores(sums, ratios, counts)


@dataclass(frozen=True)
class PreferenceInputs:
    """Input of a preference loss: the answers of a micro-batch, and the settings.

    Attributes:
        chosen, rejected: entry i of both is pair i. For KTO: the desirable and the undesirable
            answers, of any number.
        beta: how much a log-ratio counts: the reward is β · log-ratio.
        label_smoothing: probability that a label is wrong.
        simpo_gamma: margin γ that SimPO asks for.
        desirable_weight, undesirable_weight: KTO's λ_D and λ_U.
        kl: KTO's z before it is multiplied with β: KL from policy to reference, at least 0; without
            gradient.
        center_coef: weight of a reward model's (r_c + r_r)².
    """

    chosen: SequenceScores
    rejected: SequenceScores
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: Tensor | float = 0.0
    center_coef: float = 0.0


@dataclass(frozen=True)
class PreferenceLoss:
    """Result of a preference loss.

    Attributes:
        loss: [P], one per pair; for KTO one per answer, the desirable ones first.
        chosen_rewards, rejected_rewards: what the model holds each answer worth, without gradient.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo(inputs: PreferenceInputs) -> PreferenceLoss:
    """−log σ(β Δ), Δ the difference of the summed log-ratios; with label smoothing ε the mean of it
    and of its opposite, (1 − ε) and ε (cDPO).

    Source: Rafailov et al., "Direct Preference Optimization" (arXiv:2305.18290), eq. 7; smoothing:
    Mitchell, "A note on DPO with noisy preferences" (2023).

    Example (equal to its reference, a model has the loss ln 2):
        >>> zero = SequenceScores(torch.zeros(1), torch.zeros(1), torch.ones(1))
        >>> round(dpo(PreferenceInputs(zero, zero)).loss.item(), 6)
        0.693147
    """
    return _logistic(
        inputs, inputs.beta * inputs.chosen.log_ratios, inputs.beta * inputs.rejected.log_ratios
    )


def ipo(inputs: PreferenceInputs) -> PreferenceLoss:
    """(Δ − 1/(2β))², Δ the difference of the log-ratios per token: the margin has a target, where
    DPO's grows without bound on pairs that are always labelled alike.

    Source: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human
    Preferences" (arXiv:2310.12036), eq. 17. Its authors have confirmed the mean over tokens.

    Example (β = 0.5 asks for a margin of 1):
        >>> c, r = (SequenceScores(v, v, torch.tensor([2.0])) for v in torch.tensor([[3.0], [0.0]]))
        >>> ipo(PreferenceInputs(c, r, beta=0.5)).loss.tolist()
        [0.25]
    """
    chosen = inputs.chosen.mean_log_ratios
    rejected = inputs.rejected.mean_log_ratios
    loss = (chosen - rejected - 1.0 / (2.0 * inputs.beta)).square()
    return _rewarded(loss, inputs.beta * chosen, inputs.beta * rejected)


def simpo(inputs: PreferenceInputs) -> PreferenceLoss:
    """−log σ(β (mean log-prob of chosen − of rejected) − γ), without a reference model.

    Source: Meng et al., "SimPO" (arXiv:2405.14734), eq. 6; label smoothing as for `dpo`.

    Example (means that differ by γ / β = 0.25 give ln 2):
        >>> one = torch.ones(1)
        >>> c, r = SequenceScores(-one, one, one), SequenceScores(-1.25 * one, one, one)
        >>> round(simpo(PreferenceInputs(c, r, beta=2.0, simpo_gamma=0.5)).loss.item(), 6)
        0.693147
    """
    return _logistic(
        inputs,
        inputs.beta * inputs.chosen.means,
        inputs.beta * inputs.rejected.means,
        margin=inputs.simpo_gamma,
    )


def kto(inputs: PreferenceInputs) -> PreferenceLoss:
    """λ_D (1 − σ(β(r − z))) of a desirable answer, λ_U (1 − σ(β(z − r))) of an undesirable one: r
    its log-ratio, z the KL from policy to reference, estimated on prompts with answers of others.

    Source: Ethayarajh et al., "KTO" (arXiv:2402.01306), eq. 8.

    Example (at the start r = z = 0, and both terms are ½):
        >>> zero = SequenceScores(torch.zeros(1), torch.zeros(1), torch.ones(1))
        >>> kto(PreferenceInputs(zero, zero, undesirable_weight=2.0)).loss.tolist()
        [0.5, 1.0]
    """
    chosen = inputs.beta * inputs.chosen.log_ratios
    rejected = inputs.beta * inputs.rejected.log_ratios
    zero_point = inputs.beta * inputs.kl
    loss = torch.cat(
        [
            inputs.desirable_weight * torch.sigmoid(zero_point - chosen),
            inputs.undesirable_weight * torch.sigmoid(rejected - zero_point),
        ]
    )
    return _rewarded(loss, chosen, rejected)


def bradley_terry(inputs: PreferenceInputs) -> PreferenceLoss:
    """−log σ(r_c − r_r), and c (r_c + r_r)² where rewards are to be centred at 0.

    Source: Ouyang et al., "InstructGPT" (arXiv:2203.02155), eq. 1; centring: Eisenstein et al.
    (arXiv:2312.09244), section 4.

    Example:
        >>> c, r = (SequenceScores(v, v, v) for v in torch.tensor([[2.0], [2.0]]))
        >>> round(bradley_terry(PreferenceInputs(c, r, center_coef=0.01)).loss.item(), 6)
        0.853147
    """
    chosen = inputs.chosen.sums
    rejected = inputs.rejected.sums
    loss = -F.logsigmoid(chosen - rejected)
    if inputs.center_coef:
        loss = loss + inputs.center_coef * (chosen + rejected).square()
    return _rewarded(loss, chosen, rejected)


def _logistic(
    inputs: PreferenceInputs, chosen: Tensor, rejected: Tensor, margin: float = 0.0
) -> PreferenceLoss:
    logits = chosen - rejected - margin
    epsilon = inputs.label_smoothing
    loss = -(1.0 - epsilon) * F.logsigmoid(logits)
    if epsilon:
        loss = loss - epsilon * F.logsigmoid(-logits)
    return _rewarded(loss, chosen, rejected)


def _rewarded(loss: Tensor, chosen: Tensor, rejected: Tensor) -> PreferenceLoss:
    return PreferenceLoss(loss, chosen.detach(), rejected.detach())


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A way of learning from preferences.

    Attributes:
        facts: what the flags know of it, its name in the first place.
        paper: where it comes from.
        loss: the scores of a micro-batch's answers → loss per pair, or per answer.
    """

    facts: PreferenceFacts
    paper: str
    loss: Callable[[PreferenceInputs], PreferenceLoss]


PREFERENCES: dict[str, Preference] = {
    row.facts.name: row
    for row in (
        Preference(
            facts=PREFERENCE_FACTS["dpo"],
            paper="Rafailov et al., Direct Preference Optimization (arXiv:2305.18290)",
            loss=dpo,
        ),
        Preference(
            facts=PREFERENCE_FACTS["ipo"],
            paper="Azar et al., A General Theoretical Paradigm (arXiv:2310.12036), section 5",
            loss=ipo,
        ),
        Preference(
            facts=PREFERENCE_FACTS["simpo"],
            paper="Meng et al., SimPO (arXiv:2405.14734)",
            loss=simpo,
        ),
        Preference(
            facts=PREFERENCE_FACTS["kto"],
            paper="Ethayarajh et al., KTO (arXiv:2402.01306)",
            loss=kto,
        ),
        Preference(
            facts=PREFERENCE_FACTS["reward_model"],
            paper="Ouyang et al., InstructGPT (arXiv:2203.02155), section 3.4",
            loss=bradley_terry,
        ),
    )
}
