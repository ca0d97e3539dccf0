"""What a sample costs to train on, from the model's config.json: the measure for ``--balance-by-flops``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class SequenceCost:
    """Forward FLOPs of one sequence of L tokens: ``linear`` · L + ``quadratic`` · L².

    Example (attention outweighs the matrix products beyond linear / quadratic tokens):
        >>> cost = SequenceCost(linear=100.0, quadratic=1.0)
        >>> cost(10), cost(1000)
        (1100.0, 1100000.0)
    """

    linear: float
    quadratic: float

    def __call__(self, length: int) -> float:
        return self.linear * length + self.quadratic * length * length

    def of(self, lengths: Sequence[int]) -> list[float]:
        return [self(length) for length in lengths]

    @staticmethod
    def from_hf_config(config: dict[str, Any]) -> SequenceCost:
        """2 FLOPs per weight and token in the layers and the output layer; causal attention: half of 4·L²·heads·dim.

        Mixture-of-experts layers count the experts that a token passes (top-k and shared); MLA its low-rank factors.
        """
        config = config.get("text_config", config)
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        attention, head_width = _attention_weights(config)
        moe_width = config.get("moe_intermediate_size")
        dense_width = config.get("intermediate_size", 0)
        num_dense = config.get("first_k_dense_replace", 0) if moe_width else layers
        mlp = num_dense * 3 * hidden * dense_width
        if moe_width:
            active = config.get("num_experts_per_tok", 1) + (config.get("n_shared_experts") or 0)
            mlp += (layers - num_dense) * 3 * hidden * moe_width * active
        output = hidden * config["vocab_size"]
        return SequenceCost(
            linear=2.0 * (layers * attention + mlp + output),
            quadratic=2.0 * layers * head_width,
        )

    @staticmethod
    def from_checkpoint(hf_checkpoint: str) -> SequenceCost:
        return SequenceCost.from_hf_config(orjson.loads((Path(hf_checkpoint) / "config.json").read_bytes()))


def _attention_weights(config: dict[str, Any]) -> tuple[int, float]:
    """Weights of one attention layer, and Σ over heads of the mean of key and value width."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        qk_width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        v_width, kv_rank, q_rank = config["v_head_dim"], config["kv_lora_rank"], config.get("q_lora_rank")
        query = hidden * q_rank + q_rank * heads * qk_width if q_rank else hidden * heads * qk_width
        key_value = hidden * (kv_rank + config["qk_rope_head_dim"])
        key_value += kv_rank * heads * (config["qk_nope_head_dim"] + v_width)
        return query + key_value + heads * v_width * hidden, heads * (qk_width + v_width) / 2
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads), heads * head_dim
