"""Every parameter of a model, and how many of its entries one rank holds at a parallel layout. Exact.

    layer_parameters(spec, 3)    whole, and what cuts them        decoder.layers.3.mlp.linear_fc1.weight  2·F·H  tensor
    rank_parameters(spec, …)     a pipeline stage's, cut          decoder.layers.3.mlp.linear_fc1.weight  2·F·H / tp

The shapes are those of Megatron's modules; the tests compare them with the modules themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slime.config import Config
from slime.models.layout_rules import virtual_stages
from slime.models.spec import ModelSpec

Cut = Literal["none", "tensor", "expert"]
"""What divides a parameter: nothing, tensor parallelism, or expert and expert tensor parallelism."""


@dataclass(frozen=True)
class Layout:
    """The trainer's parallel sizes.

    Attributes:
        world: trainer ranks.
        virtual: model chunks per pipeline rank (1 without interleaving).
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False

    @property
    def data(self) -> int:
        """Data-parallel replicas: ranks that train on different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def shards(self) -> int:
        """Ranks over which the distributed optimizer spreads the states of dense parameters."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """The same for the parameters of experts."""
        return max(1, self.world // (self.expert_tensor * self.expert * self.pipeline))

    @staticmethod
    def of(config: Config, spec: ModelSpec) -> Layout:
        """From the flags, which fit the model (`slime.models.layout_rules.check_layout`)."""
        megatron, cluster = config.megatron, config.cluster
        tensor = megatron.tensor_model_parallel_size
        return Layout(
            world=cluster.actor_num_nodes * cluster.actor_num_gpus_per_node,
            tensor=tensor,
            pipeline=megatron.pipeline_model_parallel_size,
            virtual=virtual_stages(spec, config) or 1,
            context=megatron.context_parallel_size,
            expert=megatron.expert_model_parallel_size,
            expert_tensor=megatron.expert_tensor_parallel_size or tensor,
            sequence_parallel=megatron.sequence_parallel,
        )

    def layers_of(self, stage: int, num_layers: int) -> list[int]:
        """Global numbers of a pipeline rank's layers, chunk after chunk.

        Example (eight layers, two ranks with two chunks each):
            >>> Layout(world=2, pipeline=2, virtual=2).layers_of(1, 8)
            [2, 3, 6, 7]
        """
        size = num_layers // (self.pipeline * self.virtual)
        starts = [(chunk * self.pipeline + stage) * size for chunk in range(self.virtual)]
        return [start + i for start in starts for i in range(size)]


@dataclass(frozen=True)
class Parameter:
    """One parameter by Megatron's name with global layer numbers; the experts of a layer are one.

    Attributes:
        numel: its entries; on one rank, where it comes from `rank_parameters`.
        cut: what divides it.
        kind: what it belongs to, for the engine, which divides some of them in another way.
    """

    name: str
    numel: int
    cut: Cut
    kind: Literal[
        "embedding", "output", "norm", "query", "key_value", "latent", "attention", "mlp", "router", "experts"
    ]

    @property
    def is_expert(self) -> bool:
        return self.kind == "experts"


def outer_parameters(spec: ModelSpec) -> tuple[Parameter, Parameter, Parameter]:
    """Embedding, final norm and output layer. The last one is the embedding's where they are tied."""
    table = spec.padded_vocab_size * spec.hidden_size
    return (
        Parameter("embedding.word_embeddings.weight", table, "tensor", "embedding"),
        Parameter("decoder.final_layernorm.weight", spec.hidden_size, "none", "norm"),
        Parameter("output_layer.weight", table, "tensor", "output"),
    )


def layer_parameters(spec: ModelSpec, layer: int) -> list[Parameter]:
    """All parameters of one layer, whole."""
    prefix = f"decoder.layers.{layer}."
    norms = ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
    norms += ["post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"] if spec.post_norms else []
    found = [Parameter(prefix + name, spec.hidden_size, "none", "norm") for name in norms]
    found += _latent_attention(spec, prefix) if spec.is_mla else _attention(spec, prefix)
    found += _experts(spec, prefix) if spec.is_moe_layer(layer) else _mlp(spec, prefix)
    return found


def _attention(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    """Megatron has query, key and value in one; here key and value are apart, for engines that repeat them."""
    width = spec.transformer["kv_channels"]
    query, key_value = spec.num_heads * width, 2 * spec.num_query_groups * width
    prefix += "self_attention."
    for rows, kind in ((query, "query"), (key_value, "key_value")):
        yield Parameter(prefix + "linear_qkv.weight", rows * spec.hidden_size, "tensor", kind)  # type: ignore[arg-type]
        if spec.transformer.get("add_qkv_bias"):
            yield Parameter(prefix + "linear_qkv.bias", rows, "tensor", kind)  # type: ignore[arg-type]
    if spec.transformer.get("qk_layernorm"):
        yield Parameter(prefix + "q_layernorm.weight", width, "none", "norm")
        yield Parameter(prefix + "k_layernorm.weight", width, "none", "norm")
    yield Parameter(prefix + "linear_proj.weight", query * spec.hidden_size, "tensor", "attention")


def _latent_attention(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    facts, hidden, heads = spec.transformer, spec.hidden_size, spec.num_heads
    plain, position, value = facts["qk_head_dim"], facts["qk_pos_emb_head_dim"], facts["v_head_dim"]
    rank, query_rank = facts["kv_lora_rank"], facts["q_lora_rank"]
    query = heads * (plain + position)
    prefix += "self_attention."
    if query_rank is None:
        yield Parameter(prefix + "linear_q_proj.weight", query * hidden, "tensor", "attention")
    else:
        yield Parameter(prefix + "linear_q_down_proj.weight", query_rank * hidden, "tensor", "latent")
        yield Parameter(prefix + "q_layernorm.weight", query_rank, "none", "norm")
        yield Parameter(prefix + "linear_q_up_proj.weight", query * query_rank, "tensor", "attention")
    yield Parameter(prefix + "linear_kv_down_proj.weight", (rank + position) * hidden, "tensor", "latent")
    yield Parameter(prefix + "kv_layernorm.weight", rank, "none", "norm")
    yield Parameter(prefix + "linear_kv_up_proj.weight", heads * (plain + value) * rank, "tensor", "attention")
    yield Parameter(prefix + "linear_proj.weight", heads * value * hidden, "tensor", "attention")


def _mlp(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    width, halves = spec.transformer["ffn_hidden_size"], 2 if spec.transformer.get("gated_linear_unit") else 1
    yield Parameter(prefix + "mlp.linear_fc1.weight", halves * width * spec.hidden_size, "tensor", "mlp")
    yield Parameter(prefix + "mlp.linear_fc2.weight", width * spec.hidden_size, "tensor", "mlp")


def _experts(spec: ModelSpec, prefix: str) -> Iterator[Parameter]:
    facts, hidden = spec.transformer, spec.hidden_size
    halves = 2 if facts.get("gated_linear_unit") else 1
    matrix = spec.num_experts * facts["moe_ffn_hidden_size"] * hidden
    shared = int(facts.get("moe_shared_expert_intermediate_size") or 0)
    prefix += "mlp."
    yield Parameter(prefix + "router.weight", spec.num_experts * hidden, "none", "router")
    yield Parameter(prefix + "experts.linear_fc1.weight", halves * matrix, "expert", "experts")
    yield Parameter(prefix + "experts.linear_fc2.weight", matrix, "expert", "experts")
    if shared:
        yield Parameter(prefix + "shared_experts.linear_fc1.weight", halves * shared * hidden, "tensor", "mlp")
        yield Parameter(prefix + "shared_experts.linear_fc2.weight", shared * hidden, "tensor", "mlp")


def rank_parameters(spec: ModelSpec, layout: Layout, stage: int) -> list[Parameter]:
    """What each rank of pipeline stage ``stage`` holds. ``spec`` has the vocabulary padded for the layout.

    A tied model on several stages has its embedding twice: the last stage's copy serves as the output layer.
    """
    cuts = {"none": 1, "tensor": layout.tensor, "expert": layout.expert * layout.expert_tensor}
    embedding, norm, output = outer_parameters(spec)
    whole = [embedding] if stage == 0 else []
    for layer in layout.layers_of(stage, spec.num_layers):
        whole += layer_parameters(spec, layer)
    if stage == layout.pipeline - 1:
        whole += [norm] if spec.tie_embeddings and layout.pipeline == 1 else [norm, output]
    return [Parameter(p.name, p.numel // cuts[p.cut], p.cut, p.kind) for p in whole]
