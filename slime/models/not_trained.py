"""Popular families without a table: why they are not trained, and what a table would need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class NotTrained:
    """Models that cannot be trained.

    Attributes:
        models: their usual names.
        names: values of ``model_type`` and ``architectures`` in their config.json.
        why: a clause without a full stop.
        needs: what training them would take, without a full stop.
    """

    models: str
    names: tuple[str, ...]
    why: str
    needs: str


NOT_TRAINED = (
    NotTrained(
        "Apertus",
        ("apertus", "ApertusForCausalLM"),
        "the MLP of Apertus has no gate, and its activation xIELU has learned scalars of its own",
        "an MLP without a gate, and an activation with parameters",
    ),
    NotTrained(
        "DeepSeek-V3.2, GLM-5",
        ("deepseek_v32", "DeepseekV32ForCausalLM", "glm_moe_dsa", "GlmMoeDsaForCausalLM"),
        "their attention is sparse: an indexer chooses the tokens that each token attends to",
        "a token mixer with the indexer, and the engine's choice of tokens replayed in training",
    ),
    NotTrained(
        "Gemma 2",
        ("gemma2", "Gemma2ForCausalLM"),
        "its attention scores and logits pass a tanh (attn_logit_softcapping, "
        "final_logit_softcapping)",
        "attention kernels with a softcap, and logits with one",
    ),
    NotTrained(
        "Gemma 4",
        ("gemma4", "gemma4_text", "Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"),
        "its layers may have an embedding of each token of their own, and share keys and values "
        "with earlier layers",
        "embeddings per layer, and layers that read another layer's keys and values",
    ),
    NotTrained(
        "Granite 4 H, Nemotron-H, Nemotron Nano 2",
        (
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            "nemotron_h",
            "NemotronHForCausalLM",
        ),
        "most of their layers are Mamba-2 state space layers",
        "a token mixer for Mamba-2; for Nemotron-H also layers without an MLP",
    ),
    NotTrained(
        "Kimi-Linear",
        ("kimi_linear", "KimiLinearForCausalLM"),
        "most of its layers are Kimi delta attention, whose state fades with a rate per channel",
        "a token mixer with this rule, beside latent attention",
    ),
    NotTrained(
        "LFM2",
        ("lfm2", "Lfm2ForCausalLM", "lfm2_moe", "Lfm2MoeForCausalLM"),
        "most of its layers are short convolutions with gates",
        "a token mixer for these convolutions",
    ),
    NotTrained(
        "Ling, Ring",
        ("bailing_moe", "BailingMoeForCausalLM", "bailing_moe_v2", "BailingMoeV2ForCausalLM"),
        "Ling and Ring need code of their repositories; transformers has no class to compare a "
        "table with",
        "a class in transformers",
    ),
    NotTrained(
        "Llama 4",
        ("llama4", "llama4_text", "Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
        "its attention works in chunks, and its router's scores multiply the inputs of experts "
        "instead of their outputs",
        "masks of chunks, and experts with scaled inputs",
    ),
    NotTrained(
        "Nemotron-NAS (Llama-3.3-Nemotron-Super-49B)",
        ("nemotron-nas", "DeciLMForCausalLM"),
        "each of its layers has a shape of its own, and some have no attention",
        "widths per layer, and a class in transformers to compare with",
    ),
    NotTrained(
        "Qwen3.8-Flash-Next",
        (
            "qwen4_exp",
            "qwen4_exp_text",
            "Qwen4ExpForConditionalGeneration",
            "Qwen4ExpForCausalLM",
        ),
        "it has sparse attention, embeddings of n-grams and hyper-connections between its layers",
        "each of these three parts, in the trainer and in the embedded engine",
    ),
)


def not_trained(names: Iterable[str]) -> NotTrained | None:
    """Return the record of a model by the ``model_type`` and ``architectures`` of its config.json;
    None for one without a record."""
    given = set(names)
    return next((one for one in NOT_TRAINED if given & set(one.names)), None)
