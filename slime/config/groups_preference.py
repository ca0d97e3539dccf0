"""The group about learning from preferences (``--loss-type preference_loss``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slime.config.flag import WEIGHT, Interval, Part, derived, finite, flag, on
from slime.config.preferences import preferences_where

_PREFERENCES = on("loss_type", "preference_loss")
_PAIRS = _PREFERENCES & on("preference_loss", *preferences_where("takes_pairs"))
_KTO = on("preference_loss", *preferences_where("takes_pairs", False))


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """Preferences: pairs of a better and a worse answer to one prompt, or labelled answers.

    The answers come from the data, as in supervised fine-tuning. --global-batch-size and
    --micro-batch-size count pairs."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    chosen_key: str = flag("chosen", needs=_PAIRS, read_by="collection")
    """Column of the better answer: text or messages, with or without the prompt's messages."""
    rejected_key: str = flag("rejected", needs=_PAIRS, read_by="collection")
    """Column of the worse answer."""
    completion_key: str = flag("completion", needs=_KTO, read_by="collection")
    """Column of the answer that --label-key (default: label) judges, true or false."""
    eval_preference_data: str | None = flag(
        None, needs=_PREFERENCES, read_by=("driver", "collection")
    )
    """Held-out data with the same columns. The trainer scores it before training, every
    --eval-interval rollouts and at the end (eval/preferences/reward_accuracy and others)."""
    preference_beta: float = derived(
        "0.1; 2 with preference_loss simpo",
        range=finite(0, "the weight of a log-ratio", above=True),
        needs=_PREFERENCES & on("preference_loss", *preferences_where("beta")),
    )
    """β: weight of a log-ratio. A larger one keeps the policy closer to the reference."""
    preference_label_smoothing: float = flag(
        0.0,
        range=Interval(0, 0.5, below=True, what="the probability that a label is wrong"),
        needs=_PREFERENCES & on("preference_loss", *preferences_where("smooths_labels")),
    )
    """Assumed fraction of wrong labels (cDPO)."""
    preference_sft_coef: float = flag(
        0.0,
        range=WEIGHT,
        needs=_PREFERENCES & on("preference_loss", *preferences_where("adds_sft")),
    )
    """Weight of the negative log-likelihood of the chosen answer, per token (RPO,
    arXiv:2404.19733): it keeps both answers from becoming improbable."""
    simpo_gamma: float = flag(
        0.5, range=finite(0, "a margin"), needs=on("preference_loss", "simpo")
    )
    """γ: the margin that SimPO asks for; 0.3 to 0.5 times β is usual."""
    kto_desirable_weight: float = flag(1.0, range=WEIGHT, needs=_KTO)
    """λ_D: weight of desirable answers. With fewer answers of one kind, raise its weight until
    count × weight of the two kinds differs by a factor of at most 4/3."""
    kto_undesirable_weight: float = flag(1.0, range=WEIGHT, needs=_KTO)
    """λ_U: weight of undesirable answers."""
    reward_center_coef: float = flag(
        0.0, range=WEIGHT, needs=on("preference_loss", *preferences_where("trains_head"))
    )
    """Weight of (r_c + r_r)², which centres a reward model's outputs at 0; 0.01 is usual."""
