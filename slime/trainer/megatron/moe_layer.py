"""The mixture-of-experts layer that replaces Megatron's, and the Megatron settings that it needs.

    hidden [T, 1, H] ─► (its part of the tokens) ─► router ─► dispatch ─► experts ─► sum
                     ─► (all tokens) ─► + shared

Under tensor parallelism each rank routes its part of the tokens, so that no token goes to its
experts twice. With sequence parallelism the rank has only that part; otherwise the layer selects it
and gathers the result.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from slime.trainer.expert_rules import check_experts
from slime.trainer.megatron.experts import GroupedExperts
from slime.trainer.megatron.layers import GatedActivation
from slime.trainer.megatron.moe_dispatch import ExpertPlace, dispatch
from slime.trainer.megatron.moe_router import Router, Routing

# Megatron compares MLP classes by identity, and logs for every layer that a subclass is unknown
logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(
    lambda record: "Unknown MLP type" not in record.getMessage()
)


class ExpertLayer(MoELayer):
    """A mixture-of-experts layer on packed micro-batches.

    Attributes:
        routing: the current micro-batch's; a hook of the transformer layer sets it (`connect`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        normalises: bool = True,
        biases: bool = False,
    ) -> None:
        groups = pg_collection if pg_collection is not None else get_default_pg_collection()
        assert submodules is not None and config.num_moe_experts is not None
        self.splits_tokens = groups.tp.size() > 1 and not config.sequence_parallel
        submodules.router = partial(
            Router, splits_tokens=self.splits_tokens, normalises=normalises, bias=biases
        )
        super().__init__(config, submodules, layer_number, groups)
        self.token_dispatcher = None  # `dispatch` has no state
        self.place = ExpertPlace.of(groups, config.num_moe_experts)
        self.routing: Routing | None = None

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """[T, 1, H] → ([T, 1, H], None for the bias). Under sequence or context parallelism T is
        this rank's part."""
        compute = partial(self._compute, self.routing)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

    def _compute(self, routing: Routing | None, hidden_states: Tensor) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.size(-1))
        if self.splits_tokens:
            tokens = tensor_parallel.scatter_to_sequence_parallel_region(
                tokens, group=self.attn_tp_group
            )
        weights, choices = self.router(tokens, routing)
        plan = dispatch(choices, self.place)
        rows, row_weights = plan.to_experts(tokens, weights)
        output = plan.to_tokens(self.experts(rows, plan.ends, row_weights))
        if self.splits_tokens:
            output = tensor_parallel.gather_from_sequence_parallel_region(
                output, tensor_parallel_output_grad=False, group=self.attn_tp_group
            )
        output = output.view(hidden_states.shape)
        shared = self.shared_experts_compute(hidden_states)
        return output if shared is None else output + shared


def expert_layer_spec(
    config: TransformerConfig, *, normalises: bool = True, biases: bool = False
) -> ModuleSpec:
    """Return the spec that replaces the MLP in a mixture-of-experts layer.

    Args:
        normalises: the router divides the scores of the chosen experts by their sum.
        biases: router and routed experts have biases.
    """
    backend = LocalSpecProvider()
    shared = MLPSubmodules(
        linear_fc1=backend.column_parallel_linear(),
        linear_fc2=backend.row_parallel_linear(),
        activation_func=GatedActivation if config.use_te_activation_func else None,
    )
    parts = MoESubmodules(
        experts=ModuleSpec(module=GroupedExperts, params={"biases": biases}),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=shared),
    )
    params = {"normalises": normalises, "biases": biases}
    return ModuleSpec(module=ExpertLayer, params=params, submodules=parts)


def expert_layers(chunks: Sequence[nn.Module]) -> Iterator[ExpertLayer]:
    """Iterate over the mixture-of-experts layers of this rank's model chunks."""
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, ExpertLayer))


def connect(chunk: nn.Module) -> None:
    """Make each transformer layer pass the micro-batch's `Routing` to its experts.

    The routing is an attribute of the packed sequences, so it belongs to the right micro-batch in
    every pipeline schedule and when activations are recomputed.
    """
    for layer in chunk.get_submodule("decoder.layers").children():
        if isinstance(layer.mlp, ExpertLayer):
            layer.register_forward_pre_hook(_hand_over_routing, with_kwargs=True)


def _hand_over_routing(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    sequences = kwargs.get("packed_seq_params")
    experts = layer.mlp
    assert isinstance(experts, ExpertLayer)
    experts.routing = None if sequences is None else sequences.routing


def expert_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the ``TransformerConfig`` arguments about experts, with this trainer's defaults.

    ``moe_grouped_gemm`` is always on: products are grouped with or without the flag.
    ``moe_permute_fusion`` is always off: only Megatron's dispatchers use that kernel;
    `slime.trainer.megatron.moe_dispatch` gives the same result.

    Raises:
        UserError: a setting would be ignored, or the balance loss does not exist.
    """
    check_experts(arguments)
    unfused = {"moe_permute_fusion": False}
    if not arguments.get("num_moe_experts"):
        return unfused
    return unfused | {
        "moe_grouped_gemm": True,
        "moe_router_dtype": arguments.get("moe_router_dtype") or "fp32",
    }


def balance_type(config: TransformerConfig) -> str:
    """Return the type of balance loss in this model's gradients, or "none"."""
    if not config.num_moe_experts or not config.moe_aux_loss_coeff:
        return "none"
    return str(config.moe_router_load_balancing_type)


def uses_balance_losses(config: TransformerConfig) -> bool:
    """Tell whether a balance loss or z-loss adds to the gradients of this model."""
    return bool(config.num_moe_experts) and (
        balance_type(config) != "none" or bool(config.moe_z_loss_coeff)
    )


@torch.no_grad()
def balance_metrics(layers: Sequence[ExpertLayer], gradient_scale: float) -> dict[str, float]:
    """Return how evenly the step's tokens went to the experts, as means over layers. Collective.

    Returns:
        ``moe_max_load``, ``moe_mean_load``: tokens of the fullest and of the average expert. With
        balance losses on, ``load_balancing_loss`` (1 for equal loads) and ``z_loss``, without their
        coefficients.
    """
    config = layers[0].config if layers else None
    statistics = [layer.router.statistics for layer in layers]
    # layers, fullest, average, balance, z
    sums = torch.zeros(5, device=torch.cuda.current_device())
    if statistics:
        table = torch.stack(
            [torch.cat([s.tokens_per_expert, torch.stack([s.balance, s.z])]) for s in statistics]
        )
        dist.all_reduce(
            table,
            group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        )
        tokens = table[:, :-2]
        losses = table[:, -2:] / gradient_scale
        sums[0] = len(statistics)
        sums[1] = tokens.amax(dim=1).sum()
        sums[2] = tokens.mean(dim=1).sum()
        sums[3:] = losses.sum(dim=0)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    count, fullest, average, balance, z = sums.tolist()
    if not count:
        return {}
    metrics = {"moe_max_load": fullest / count, "moe_mean_load": average / count}
    if config is not None and uses_balance_losses(config):
        metrics |= {"load_balancing_loss": balance / count, "z_loss": z / count}
    return metrics
