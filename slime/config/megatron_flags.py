"""Flags for Megatron: the fields of megatron-core's config classes, and further arguments of
Megatron-LM's command line.

megatron-core's wheel has the config classes but not Megatron-LM's argument parser. Its fields are a
generated table (`data/megatron_core.json`, by `tools/make_flag_tables.py`), because importing any
megatron module imports torch, which takes seconds that ``--help`` should not take.
`data/megatron.toml` has other names, refused fields with reasons, and Megatron-LM's arguments.

    TransformerConfig (and parents)   →  config.megatron.transformer["moe_router_topk"]
    MLATransformerConfig              →  config.megatron.model["q_lora_rank"]
    OptimizerConfig                   →  config.megatron.optimizer["loss_scale"]
    DistributedDataParallelConfig     →  config.megatron.ddp["bucket_size"]
"""

from __future__ import annotations

import functools
from collections.abc import Container
from dataclasses import replace
from typing import Any

from slime.config.data import read_table
from slime.config.flag import (
    FRACTION,
    POSITIVE,
    SOME,
    WEIGHT,
    FlagMeta,
    FlagSpec,
    Kind,
    Requirement,
    finite,
    on,
)

_TABLE = read_table("megatron.toml")

#: Field → Megatron-LM's name of the field, and further spellings.
NAMES: dict[str, list[str]] = _TABLE["names"]
#: Flags without a value that set other flags: name → {"help": …, "sets": {dest: value}}.
SHORTHANDS: dict[str, dict[str, Any]] = _TABLE["shorthands"]

_STAGES = on("num_virtual_stages_per_pipeline_rank") | on("num_layers_per_virtual_pipeline_stage")
_FP8 = on("fp8_format")
_FP4 = on("fp4_format")
_CPU_OPTIMIZER = on("optimizer_cpu_offload")
_PRECISION_AWARE = on("use_precision_aware_optimizer")
#: Conditions under which optimizer states are sharded over the data-parallel ranks.
SHARDED_STATES = (
    on("optimizer", "adam", why="only Adam's states are sharded over the replicas"),
    on(
        "use_distributed_optimizer",
        why="each rank updates all parameters, so there is nothing to gather or to shard",
    ),
)
#: Only a warning, because launch scripts keep the settings of loss scaling with --bf16.
_SCALED = on("fp16", why="only a loss in float16 is scaled", warns=True)


def _fields(names: str, *needs: Requirement, **meta: Any) -> dict[str, FlagMeta]:
    """Give several fields the same declaration; ``names`` are separated by spaces."""
    return dict.fromkeys(names.split(), FlagMeta(needs=needs, **meta))


#: Field of megatron-core → its declaration. Fields that are not listed may have any value.
FIELDS: dict[str, FlagMeta] = {
    # numbers
    **_fields("microbatch_group_size_per_vp_stage", _STAGES, range=SOME),
    **_fields("overlap_p2p_comm_warmup_flush", _STAGES),
    **_fields("align_param_gather", on("overlap_param_gather"), _STAGES),
    **_fields("loss_scale", range=POSITIVE),
    **_fields("initial_loss_scale min_loss_scale", _SCALED, range=POSITIVE),
    **_fields("loss_scale_window hysteresis", _SCALED, range=SOME),
    **_fields("decoupled_lr decoupled_min_lr", range=finite(0)),
    **_fields("bucket_size", on("overlap_grad_reduce"), range=SOME),
    **_fields("pad_buckets_for_high_nccl_busbw", *SHARDED_STATES),
    **_fields("moe_aux_loss_coeff moe_z_loss_coeff", range=WEIGHT),
    **_fields("moe_router_bias_update_rate", range=finite(0)),
    # details of a feature that another flag switches on
    **_fields(
        "fp8_recipe fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_dot_product_attention fp8_multi_head_attention fp8_quantizer_factory tp_only_amax_red "
        "activation_func_fp8_input_store reuse_grad_buf_for_mxfp8_param_ag",
        _FP8,
    ),
    **_fields("fp4_recipe fp4_param fp4_quantizer_factory", _FP4),
    **_fields(
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", on("first_last_layers_bf16")
    ),
    **_fields("optimizer_offload_fraction", _CPU_OPTIMIZER, range=FRACTION),
    **_fields("main_grads_dtype main_params_dtype store_param_remainders", _PRECISION_AWARE),
    **_fields("exp_avg_dtype exp_avg_sq_dtype", _PRECISION_AWARE | _CPU_OPTIMIZER),
    **_fields("offload_modules", on("fine_grained_activation_offloading")),
    **_fields("min_offloaded_tensor_size", on("fine_grained_activation_offloading"), range=SOME),
    **_fields("disable_parameter_transpose_cache", on("transformer_impl", "transformer_engine")),
    # values that are replaced or refused
    **_fields(
        "moe_token_dispatcher_type",
        instead=dict.fromkeys(
            ("allgather", "flex"),
            (
                "alltoall",
                "dispatchers differ only in speed, and slime's supports splits of any size",
            ),
        ),
    ),
    **{
        field: FlagMeta(**{status: row["reason"]})
        for status in ("no_effect", "refused")
        for row in _TABLE[status]
        for field in row["fields"]
    },
}


@functools.cache
def megatron_core() -> dict[str, Any]:
    """Return the generated table: {"version": …, "fields": [{"section": …, "name": …, …}]}."""
    return read_table("megatron_core.json")


def _lm_flag(dest: str, kind: Kind, help: str = "", **more: Any) -> FlagSpec:
    return FlagSpec(
        dest=dest,
        group="megatron",
        attribute=dest,
        kind=kind,
        default=False if kind == "bool" else None,
        sections=("model",),
        optional=True,
        help=help,
        origin="Megatron-LM",
        **more,
    )


def lm_flags() -> dict[str, FlagSpec]:
    """Return Megatron-LM's arguments that are neither a field nor a shorthand, by dest."""
    specs = [_lm_flag(row["name"], row["kind"], row["help"]) for row in _TABLE["model"]]
    for dest, row in _TABLE["always"].items():
        kind: Kind = "str" if row["choices"] else "bool"
        meta = FlagMeta(off="-")
        specs.append(_lm_flag(dest, kind, row["help"], choices=tuple(row["choices"]), meta=meta))
    for dest, reason in _TABLE["refused_arguments"].items():
        specs.append(_lm_flag(dest, "str", many=True, meta=FlagMeta(refused=reason)))
    return {spec.dest: spec for spec in specs}


def native_flags(own: Container[str]) -> dict[str, FlagSpec]:
    """Return Megatron's fields as flags by dest, except those that a group of slime has.

    If several classes have a field (``fp8_recipe``), one flag sets it in all of them.
    """
    origin = f"megatron-core {megatron_core()['version']}"
    model = {row["name"] for row in _TABLE["model"]}
    specs: dict[str, FlagSpec] = {}
    for row in megatron_core()["fields"]:
        field = row["name"]
        section = row["section"]
        dest, *spellings = NAMES.get(field, [field])
        if dest in own or field in own or field in _TABLE["skipped_fields"]:
            continue
        if section == "model" and (dest in model or dest in specs):
            continue
        if dest in specs:
            specs[dest] = replace(specs[dest], sections=(*specs[dest].sections, section))
            continue
        specs[dest] = FlagSpec(
            dest=dest,
            group="megatron",
            attribute=field,
            kind=row["kind"],
            default=row["default"],
            sections=(section,),
            many=row.get("many", False),
            scalar_or_list=row.get("scalar_or_list", False),
            optional=row.get("optional", False) or row["default"] is None,
            choices=tuple(row.get("choices", ())),
            help=row.get("help", ""),
            meta=_meta_of(row, dest, {*row.get("arg_names", ()), *spellings}),
            origin=origin,
        )
    return specs


def _meta_of(row: dict[str, Any], dest: str, names: set[str]) -> FlagMeta:
    """Add aliases to a field's declaration: the field's own name, and megatron-core's argument
    names."""
    spelled = {name.removeprefix("--") for name in names}
    if dest != row["name"]:
        spelled.add(row["name"].replace("_", "-"))
    off = ""
    if row["kind"] == "bool" and row["default"] is True:
        off = next((name for name in spelled if name.startswith(("no-", "disable-"))), "")
    spelled -= {dest.replace("_", "-"), off}
    declared = FIELDS.get(row["name"], FlagMeta())
    return replace(declared, aliases=tuple(sorted(spelled)), off=off, read_by=("trainer",))
