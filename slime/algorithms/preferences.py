"""Losses on preferences: which of two answers is better (DPO, IPO, SimPO, reward model), or whether
an answer is desirable (KTO).

    tokens ─ sum over each answer ─► SequenceScores ─► loss per pair, implicit rewards

The losses are not linear in an answer's sum, so they need whole answers: both answers of a pair are
in one micro-batch, and context parallelism gathers their tokens before the sum.
To add a loss, add a function and a row in `PREFERENCES`, and a record with its name and facts in
`slime.config.preferences`.
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
        sums: Σ of the policy's log-probs over the trained tokens; for a reward model, the reward.
        log_ratios: Σ of (policy's − reference's log-prob) over the trained tokens; 0 without a
            reference.
        lengths: number of trained tokens, in the dtype of the others.
    """

    sums: Tensor
    log_ratios: Tensor
    lengths: Tensor

    def pick(self, places: Tensor) -> SequenceScores:
        """Return the scores of the answers at ``places``, int64 indices."""
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

    The difference to the reference is taken per token, so equal models give exactly 0 at any
    length.

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
        beta: factor of log-ratios: the implicit reward is β · log-ratio.
        label_smoothing: probability that a label is wrong.
        simpo_gamma: SimPO's target margin γ.
        desirable_weight, undesirable_weight: KTO's λ_D and λ_U.
        kl: KTO's z, before multiplication by β: KL(policy ‖ reference), at least 0, without
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
        chosen_rewards, rejected_rewards: implicit reward of each answer, without gradient.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo(inputs: PreferenceInputs) -> PreferenceLoss:
    """Return −log σ(β Δ), where Δ is the difference of the summed log-ratios; with label smoothing
    ε, −(1 − ε) log σ(β Δ) − ε log σ(−β Δ) (cDPO).

    Source: Rafailov et al., "Direct Preference Optimization" (arXiv:2305.18290), eq. 7; smoothing:
    Mitchell, "A note on DPO with noisy preferences" (2023).

    Example (a model equal to its reference has the loss ln 2):
        >>> zero = SequenceScores(torch.zeros(1), torch.zeros(1), torch.ones(1))
        >>> round(dpo(PreferenceInputs(zero, zero)).loss.item(), 6)
        0.693147
    """
    return _logistic(
        inputs, inputs.beta * inputs.chosen.log_ratios, inputs.beta * inputs.rejected.log_ratios
    )


def ipo(inputs: PreferenceInputs) -> PreferenceLoss:
    """Return (Δ − 1/(2β))², where Δ is the difference of the mean log-ratios per token. The margin
    has a target; DPO's grows without bound on pairs that always have the same label.

    Source: Azar et al., "A General Theoretical Paradigm to Understand Learning from Human
    Preferences" (arXiv:2310.12036), eq. 17; its authors have confirmed the mean over tokens.

    Example (β = 0.5 gives the target margin 1):
        >>> c, r = (SequenceScores(v, v, torch.tensor([2.0])) for v in torch.tensor([[3.0], [0.0]]))
        >>> ipo(PreferenceInputs(c, r, beta=0.5)).loss.tolist()
        [0.25]
    """
    chosen = inputs.chosen.mean_log_ratios
    rejected = inputs.rejected.mean_log_ratios
    loss = (chosen - rejected - 1.0 / (2.0 * inputs.beta)).square()
    return _result(loss, inputs.beta * chosen, inputs.beta * rejected)


def simpo(inputs: PreferenceInputs) -> PreferenceLoss:
    """Return −log σ(β (mean log-prob of chosen − of rejected) − γ), without a reference model.

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
    """Return λ_D (1 − σ(β(r − z))) of a desirable answer, λ_U (1 − σ(β(z − r))) of an undesirable
    one, where r is the log-ratio of the answer, and z is KL(policy ‖ reference), estimated on
    prompts paired with answers to other prompts.

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
    return _result(loss, chosen, rejected)


def bradley_terry(inputs: PreferenceInputs) -> PreferenceLoss:
    """Return −log σ(r_c − r_r), plus c (r_c + r_r)² to centre rewards at 0 if c > 0.

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
    return _result(loss, chosen, rejected)


def _logistic(
    inputs: PreferenceInputs, chosen: Tensor, rejected: Tensor, margin: float = 0.0
) -> PreferenceLoss:
    logits = chosen - rejected - margin
    epsilon = inputs.label_smoothing
    loss = -(1.0 - epsilon) * F.logsigmoid(logits)
    if epsilon:
        loss = loss - epsilon * F.logsigmoid(-logits)
    return _result(loss, chosen, rejected)


def _result(loss: Tensor, chosen: Tensor, rejected: Tensor) -> PreferenceLoss:
    return PreferenceLoss(loss, chosen.detach(), rejected.detach())


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A preference loss.

    Attributes:
        facts: name, and facts that flags depend on.
        paper: its source.
        formula: the loss, in the symbols of docs/algorithms.md.
        own_flags: the flags of this loss alone.
        choose: when to use it.
        loss: the scores of a micro-batch's answers → loss per pair, or per answer.
    """

    facts: PreferenceFacts
    paper: str
    formula: str
    own_flags: tuple[str, ...] = ()
    choose: str
    loss: Callable[[PreferenceInputs], PreferenceLoss]


PREFERENCES: dict[str, Preference] = {
    row.facts.name: row
    for row in (
        Preference(
            facts=PREFERENCE_FACTS["dpo"],
            paper="Rafailov et al., Direct Preference Optimization (arXiv:2305.18290)",
            formula="−log σ(β (r_c − r_r)); with smoothing ε (1 − ε) of it and ε of its opposite",
            choose="pairs; the usual choice. Try β from 0.05 to 0.5",
            loss=dpo,
        ),
        Preference(
            facts=PREFERENCE_FACTS["ipo"],
            paper="Azar et al., A General Theoretical Paradigm (arXiv:2310.12036), section 5",
            formula="(r_c/|c| − r_r/|r| − 1/(2β))²",
            choose="pairs whose labels nearly always agree: the margin has a target, where DPO's "
            "grows without bound",
            loss=ipo,
        ),
        Preference(
            facts=PREFERENCE_FACTS["simpo"],
            paper="Meng et al., SimPO (arXiv:2405.14734)",
            formula="−log σ(β (s_c/|c| − s_r/|r|) − γ)",
            own_flags=("--simpo-gamma",),
            choose="pairs, if responses grow too long with DPO, or there is no memory for a "
            "reference model. Try β from 2 to 2.5 and γ/β from 0.3 to 0.5",
            loss=simpo,
        ),
        Preference(
            facts=PREFERENCE_FACTS["kto"],
            paper="Ethayarajh et al., KTO (arXiv:2402.01306)",
            formula="λ_D (1 − σ(β (r − z))) of a desirable response, λ_U (1 − σ(β (z − r))) of an "
            "undesirable one",
            own_flags=("--kto-desirable-weight", "--kto-undesirable-weight"),
            choose="single responses labelled good or bad",
            loss=kto,
        ),
        Preference(
            facts=PREFERENCE_FACTS["reward_model"],
            paper="Ouyang et al., InstructGPT (arXiv:2203.02155), section 3.4",
            formula="−log σ(R_c − R_r) + c (R_c + R_r)², with c of `--reward-center-coef`",
            own_flags=("--reward-center-coef",),
            choose="pairs, to train a reward model for RL",
            loss=bradley_terry,
        ),
    )
}
