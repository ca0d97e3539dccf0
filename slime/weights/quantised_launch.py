"""Check before the launch that a quantised model can be pushed to a run's engines.

torch is imported only if the model is quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.config import Config
from slime.engines.kinds import engine_of
from slime.engines.sglang.command import adapts_experts
from slime.engines.sglang.quantised_routes import quantised_route
from slime.engines.sglang.versions import installed_version
from slime.engines.wire.abilities import SGLANG
from slime.errors import UserError
from slime.models import family_of, ignore_list
from slime.models.adapters import AdapterConfig
from slime.models.ignore_list import WeightMatrix
from slime.models.quantised import Quantisation
from slime.models.spec import read_hf_config
from slime.placement import needs_engines


def check_route(config: Config) -> None:
    """Check by flags and server groups that a quantised model can be pushed to SGLang.

    `slime.weights.route` checks the engines themselves when they answer.

    Raises:
        UserError: no tested route exists for one of them; names the argument or format.
    """
    flags = config.checkpoint
    hf_config = read_hf_config(flags.model_dir)
    version = installed_version()
    quantisation = Quantisation.read(hf_config)
    if engine_of(config).computed_here or not needs_engines(config) or quantisation is None:
        return
    family = family_of(flags.model_dir, flags.model_name)
    weights = ignore_list.matrices(family, family.describe(flags.model_dir))
    quantised = ignore_list.examine(weights, quantisation).quantised
    _check_output_layer(flags.model_dir, quantised, quantisation)
    _check_adapted_experts(config, flags.model_dir, quantised, quantisation)
    if config.debug.debug_rollout_only or version is None:
        return  # nothing is pushed, or all engines are external, with other versions
    from slime.weights.route import choose_route

    kind = choose_route(config, SGLANG.transports, local=True)
    models = [model for model in engine_of(config).served_models(config) if model.is_policy]
    started = [group for model in models for group in model.groups if group.num_engines]
    options = [
        {**config.engine.sglang, **group.overrides, "tp_size": group.num_gpus_per_engine}
        for group in started
    ]
    for engine in options or [{}]:  # the arguments of external engines are unknown here
        quantised_route(hf_config, {**engine, "version": version}, kind)


def _check_adapted_experts(
    config: Config, path: str, quantised: Sequence[WeightMatrix], quantisation: Quantisation
) -> None:
    adapters = AdapterConfig.of(config)
    has_experts = any(matrix.kernel.endswith(".experts") for matrix in quantised)
    if adapters is None or not has_experts:
        return
    family = family_of(path, config.checkpoint.model_name)
    if adapts_experts(family, family.model_spec(path), adapters):
        raise UserError(
            f"{path} has routed experts in {quantisation}, beside which SGLang serves no adapters "
            "of experts",
            why="not tried: SGLang computes such experts with kernels of their own, and there are "
            "reports of wrong answers with adapters (sgl-project/sglang#26930)",
            fix="take the experts out with --lora-exclude-modules gate_proj up_proj down_proj, "
            "quantise the model without its experts, or take --rollout-engine embedded",
        )


def _check_output_layer(
    path: str, quantised: Sequence[WeightMatrix], quantisation: Quantisation
) -> None:
    found = [matrix.module for matrix in quantised if matrix.module.endswith("lm_head")]
    if found:
        raise UserError(
            f"{path} has its output layer ({found[0]}) in {quantisation}, with which SGLang "
            "cannot compute",
            why="SGLang holds output layers plain: it would take the numbers for weights and drop "
            "their scales",
            fix=f"quantise the model again with {found[0]} among the rules to ignore, as the "
            "recommended list of slime convert has it, or take --rollout-engine embedded",
        )
