"""The group about on-policy distillation: teachers, and what the policy learns from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.flag import (
    NONE_OR_SOME,
    SAMPLES,
    Interval,
    Part,
    derived,
    finite,
    flag,
    on,
    unless,
)
from slime.config.teachers import Teacher, read_teachers

_OPD = on("use_opd")
_IN_TRAINER = unless("opd_type", "sglang", why="an engine's teacher has the weights of its server")
_IN_ENGINE = unless(
    "opd_type", "megatron", why="the trainer computes with weights, not with servers"
)
_POLICY_LOSS = unless("loss_type", "custom_loss", why="it belongs to the policy loss")
_DISTRIBUTION = on(
    "opd_loss", "reverse_kl", "forward_kl", "jsd", why="it asks for the sampled tokens alone"
)


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """On-policy distillation: the policy learns from a teacher's probabilities of its own tokens.

    If there is a task reward, both objectives are added."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    use_opd: bool = flag(False, needs=SAMPLES, read_by=("generation", "samples", "training"))
    """Also learn from a teacher; without a reward function, learn only from the teacher."""
    opd_type: Literal["sglang", "megatron"] | None = derived(
        "megatron with opd_teacher_load, else sglang",
        needs=_OPD,
        read_by=("generation", "samples", "training"),
    )
    """Where teachers run: sglang, in engines (models of --sglang-config, --opd-teacher-urls, or a
    function of yours that sets teacher_log_probs); megatron, in the trainer."""
    opd_kl_coef: float = flag(1.0, range=finite(0, "the weight of the teacher"), needs=_OPD)
    """Weight of the teacher's log-prob difference in the advantage, or of its loss term."""
    opd_loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = flag(
        "sampled", needs=(_OPD, _POLICY_LOSS), read_by=("generation", "training")
    )
    """sampled: subtract (policy log-prob - teacher log-prob) of each sampled token from its
    advantage. Others: a loss term between whole distributions: reverse KL(policy, teacher), forward
    KL(teacher, policy), or generalised Jensen-Shannon divergence (arXiv:2306.13649)."""
    opd_top_k: int = flag(
        0, range=NONE_OR_SOME, needs=(_OPD, _DISTRIBUTION), read_by=("generation", "training")
    )
    """Compare the teacher's N most likely tokens, and all others as one; 0 compares the whole
    vocabulary, which needs a teacher in the trainer."""
    opd_jsd_beta: float = flag(
        0.5,
        range=Interval(0, 1, above=True, below=True, what="a weight in a mixture"),
        needs=(_OPD, on("opd_loss", "jsd")),
    )
    """Weight of the teacher in the mixture of jsd, which approaches the forward KL towards 0 and
    the reverse KL towards 1."""
    opd_teacher_load: tuple[str, ...] = flag(
        (), needs=(_OPD, _IN_TRAINER), read_by=("trainer", "training", "samples")
    )
    """Teachers in the trainer: DIR, or NAME=DIR for each of several. A Hugging Face directory or a
    checkpoint of the policy's architecture; `self` is the policy as it was before the update, and
    `base`, with --lora-rank, the model without adapters."""
    opd_teacher_ckpt_step: int | None = flag(
        None, range=NONE_OR_SOME, needs=(_OPD, on("opd_teacher_load")), read_by="trainer"
    )
    """Iteration of the teachers' checkpoints; default: the latest."""
    opd_teacher_urls: tuple[str, ...] = flag((), needs=(_OPD, _IN_ENGINE), read_by="generation")
    """Teachers in engines: the URL of an engine outside the run, or the name of a model of
    --sglang-config; NAME=URL for each of several. Unset: every model of --sglang-config but the
    policy is a teacher of that name."""
    opd_teacher_key: str = flag("opd_teacher", needs=_OPD, read_by=("generation", "samples"))
    """Key of a row's metadata that names its teacher. Rows without it use the teacher `default`, or
    the only one."""
    opd_teacher_prompt_key: str | None = flag(
        None, needs=_OPD, read_by=("collection", "generation")
    )
    """Key of a row's metadata with the prompt that the teacher sees in place of the policy's: text,
    or messages. With `--opd-teacher-load self` the policy learns to answer without, say, a hint.
    `<image>` stands for the next image of the policy's prompt."""

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """Teachers in the trainer; () if they run in engines."""
        return read_teachers(self.opd_teacher_load) if self.use_opd else ()

    @property
    def in_advantage(self) -> bool:
        """The advantages contain the teacher's log-probs of the sampled tokens."""
        return self.use_opd and self.opd_loss == "sampled"

    @property
    def in_loss(self) -> bool:
        """The loss compares distributions."""
        return self.use_opd and self.opd_loss != "sampled"

    @property
    def in_trainer(self) -> bool:
        """The trainer holds the teachers."""
        return self.use_opd and self.opd_type == "megatron"
