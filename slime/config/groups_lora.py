"""The group about low-rank adapters (LoRA, arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.flag import NONE_OR_SOME, POSITIVE, Interval, Part, flag, on

_LORA = on("lora_rank", why="the model is trained as a whole")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: the base model is frozen, and each chosen Linear layer computes
    W·x + alpha / rank · B·A·x with trained A [rank, in] and B [out, rank]."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("trainer",)

    lora_rank: int = flag(0, range=NONE_OR_SOME, read_by=("trainer", "engine", "driver"))
    """Rank of the adapters; 0 trains the whole model. For reinforcement learning, 8 to 32 is usual.
    The learning rate is about ten times that of full training."""
    lora_alpha: float = flag(32.0, range=POSITIVE, needs=_LORA)
    """Adapters are scaled by alpha / rank; the best learning rate then hardly depends on the
    rank."""
    lora_target_modules: tuple[str, ...] = flag((), needs=_LORA, read_by=("trainer", "engine"))
    """Layers that get an adapter, by the last part of their Hugging Face names (q_proj down_proj);
    default, and with all-linear: every Linear layer of attention, MLPs, shared and routed experts.
    Embedding and output layer (embed_tokens, lm_head) get one only if they are named, and none if
    they share their weight. Routers cannot be adapted."""
    lora_exclude_modules: tuple[str, ...] = flag((), needs=_LORA)
    """Layers of --lora-target-modules that get no adapter."""
    lora_dropout: float = flag(
        0.0, range=Interval(0, 1, below=True, what="a fraction"), needs=_LORA
    )
    """Fraction of an adapter's inputs that is dropped in training passes. Adapters of the embedding
    and of routed experts have no dropout. Leave it at 0 for reinforcement learning."""
    lora_adapter_path: str | None = flag(None, needs=_LORA)
    """Start from this PEFT adapter (a directory with adapter_config.json and
    adapter_model.safetensors) instead of one with B = 0; its rank and layers must be those of the
    flags."""
    lora_experts: Literal["per-expert", "shared-outer"] = flag("per-expert", needs=_LORA)
    """Adapters of routed experts. per-expert: an A and a B for each. shared-outer: all experts of a
    layer share A of gate and up, and B of down, which makes adapters several times smaller."""
    lora_rank_by_topk: bool = flag(False, needs=_LORA)
    """Adapters of routed experts have rank lora_rank ÷ experts per token and scale alpha / that
    rank; a token then uses as many adapter parameters as in a dense layer."""
