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

        Layers of experts count the experts that a token passes (top-k and shared) and the router; multi-latent
        attention its low-rank factors.
        """
        config = config.get("text_config", config)
        hidden = config["hidden_size"]
        attention, head_width = _attention_weights(config)
        kinds = has_experts(config)
        sparse = sum(kinds)
        mlp = (len(kinds) - sparse) * 3 * hidden * config.get("intermediate_size", 0)
        if sparse:
            active = config.get("num_experts_per_tok", 1) + (config.get("n_shared_experts") or 0)
            mlp += sparse * hidden * (3 * config["moe_intermediate_size"] * active + _num_experts(config))
        output = hidden * config["vocab_size"]
        return SequenceCost(
            linear=2.0 * (len(kinds) * attention + mlp + output),
            quadratic=2.0 * len(kinds) * head_width,
        )

    @staticmethod
    def from_checkpoint(hf_checkpoint: str) -> SequenceCost:
        return SequenceCost.from_hf_config(orjson.loads((Path(hf_checkpoint) / "config.json").read_bytes()))


def has_experts(config: dict[str, Any]) -> list[bool]:
    """Layer by layer: is its MLP a mixture of experts? All spellings: dense layers first (``first_k_dense_replace``),
    every n-th layer (``moe_layer_freq``, ``decoder_sparse_step``), listed dense ones (``mlp_only_layers``).

    Example:
        >>> has_experts({"num_hidden_layers": 3, "moe_intermediate_size": 8, "n_routed_experts": 4,
        ...              "first_k_dense_replace": 1})
        [False, True, True]
    """
    layers = range(config["num_hidden_layers"])
    if not config.get("moe_intermediate_size") or not _num_experts(config):
        return [False for _ in layers]
    first, freq = config.get("first_k_dense_replace") or 0, config.get("moe_layer_freq") or 1
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return [n >= first and n % freq == 0 and (n + 1) % step == 0 and n not in dense for n in layers]


def _num_experts(config: dict[str, Any]) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return int(next((config[name] for name in names if config.get(name)), 0))


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
