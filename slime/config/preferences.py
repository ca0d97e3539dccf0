"""Facts about each ``--preference-loss``, from which conditions, checks and defaults of other flags
follow. `slime.algorithms.preferences` has the computation of each.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

#: Values of ``--preference-loss``.
PreferenceName = Literal["dpo", "ipo", "simpo", "kto", "reward_model"]


@dataclass(frozen=True, kw_only=True)
class PreferenceFacts:
    """Which flags affect a preference loss, and what it needs. No fact has a default.

    Attributes:
        takes_pairs: a row is a pair of answers, the chosen and the rejected one; else one answer
            with a label, true or false.
        needs_reference: log-probs count relative to those of the reference model.
        beta: default of ``--preference-beta``; None if the loss has no β.
        smooths_labels: ``--preference-label-smoothing`` acts.
        adds_sft: ``--preference-sft-coef`` acts: the loss may add supervised fine-tuning on the
            chosen answer.
        trains_head: the model has one output per sequence, the reward, in place of the vocabulary.
    """

    name: PreferenceName
    takes_pairs: bool
    needs_reference: bool
    beta: float | None
    smooths_labels: bool
    adds_sft: bool
    trains_head: bool


_DPO = PreferenceFacts(
    name="dpo",
    takes_pairs=True,
    needs_reference=True,
    beta=0.1,
    smooths_labels=True,
    adds_sft=True,
    trains_head=False,
)
_IPO = replace(_DPO, name="ipo", smooths_labels=False)

#: Loss → its facts, some of them as differences from another loss.
PREFERENCE_FACTS: dict[str, PreferenceFacts] = {
    facts.name: facts
    for facts in (
        _DPO,
        _IPO,
        replace(_DPO, name="simpo", needs_reference=False, beta=2.0),
        replace(_IPO, name="kto", takes_pairs=False, adds_sft=False),
        PreferenceFacts(
            name="reward_model",
            takes_pairs=True,
            needs_reference=False,
            beta=None,
            smooths_labels=False,
            adds_sft=False,
            trains_head=True,
        ),
    )
}


def preferences_where(fact: str, is_so: bool = True) -> tuple[str, ...]:
    """Return the names of the losses whose ``fact`` is set (or not, if ``is_so`` is False).

    Example:
        >>> preferences_where("needs_reference")
        ('dpo', 'ipo', 'kto')
    """
    assert fact in {field.name for field in fields(PreferenceFacts)}, fact
    return tuple(
        name
        for name, facts in PREFERENCE_FACTS.items()
        if (getattr(facts, fact) not in (None, False)) is is_so
    )
