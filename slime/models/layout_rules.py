"""Check that the trainer's parallel sizes divide the model.

The checks need only a `ModelSpec`, so a launch runs them before it starts processes.
"""

from __future__ import annotations

import re

from slime.config.config import Config
from slime.config.flag import option_of
from slime.errors import UserError
from slime.models.layouts import Layout
from slime.models.mixers import mixers_of
from slime.models.spec import ModelSpec
from slime.placement import critic_placed


def layout_of(config: Config, spec: ModelSpec) -> Layout:
    """Return the layout of the flags, which must fit the model (`check_layout`)."""
    megatron = config.megatron
    cluster = config.cluster
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


def virtual_stages(spec: ModelSpec, config: Config) -> int | None:
    """Return model chunks per pipeline rank; None without interleaving, that is with one chunk.

    Raises:
        UserError: ``--num-layers-per-virtual-pipeline-stage`` does not divide a rank's layers.
    """
    megatron = config.megatron
    count = megatron.num_virtual_stages_per_pipeline_rank
    per_stage = megatron.num_layers_per_virtual_pipeline_stage
    if count is None and per_stage is not None:
        ranks = megatron.pipeline_model_parallel_size
        layers = spec.num_layers // ranks
        if layers % per_stage:
            raise UserError(
                f"--num-layers-per-virtual-pipeline-stage {per_stage} does not fit this model",
                why=f"a pipeline rank has {spec.num_layers} / {ranks} = {layers} layers",
                fix=f"use a divisor of {layers}",
            )
        count = layers // per_stage
    return count if count is not None and count > 1 else None


def check_layout(spec: ModelSpec, config: Config) -> None:
    """Refuse layouts that do not divide the model, and modules to recompute that it does not have.

    Raises:
        UserError: names a flag, its value and the number that is not divisible by the value; or
            attention by Transformer Engine cannot compute the model.
    """
    _check_recompute(spec, config)
    megatron = config.megatron
    tensor = megatron.tensor_model_parallel_size
    rules = [
        (spec.num_heads, tensor, "attention heads", "--tensor-model-parallel-size"),
        (_dense_width(spec), tensor, "intermediate features", "--tensor-model-parallel-size"),
        _stage_rule(spec, config),
        *(
            (rows, tensor, what, "--tensor-model-parallel-size")
            for mixer in mixers_of(spec.transformer)
            for rows, what in mixer.divided_rows(spec)
        ),
        (
            spec.padded_vocab_size,
            tensor,
            "rows of the padded vocabulary",
            "--tensor-model-parallel-size",
        ),
        *_expert_rules(spec, config),
    ]
    for total, parts, what, flag in rules:
        if total % parts:
            raise UserError(
                f"{flag} {parts} does not fit this model",
                why=f"{total} {what} cannot be divided by {parts}",
                fix=f"use a divisor of {total}",
            )
    groups = int(spec.transformer.get("num_query_groups") or spec.num_heads)
    if groups % tensor and tensor % groups:
        raise UserError(
            f"--tensor-model-parallel-size {tensor} does not fit this model",
            why=f"it has {groups} key-value heads: each rank needs the same number of them, or "
            "each of them the same number of ranks",
            fix=f"use a divisor or a multiple of {groups} that divides {spec.num_heads}, the "
            "number of attention heads",
        )
    if spec.wide_qk_norms and groups % tensor:
        raise UserError(
            f"--tensor-model-parallel-size {tensor} does not fit this model",
            why=f"the norm of keys spans its {groups} heads, and each rank needs whole heads",
            fix=f"use a divisor of {groups}",
        )
    if megatron.sequence_parallel and tensor == 1:
        raise UserError(
            "--sequence-parallel needs --tensor-model-parallel-size above 1",
            fix="leave --sequence-parallel out, or raise the size",
        )
    _check_levels(spec, config)
    _check_bidirectional(spec, config)
    check_heads(spec.num_heads, tensor, megatron.context_parallel_size)
    for mixer in mixers_of(spec.transformer):
        if mixer.state is not None:
            _check_key_heads(spec.delta_net.key_heads, tensor, megatron.context_parallel_size)


#: Flags of sizes that a critic may have of its own.
_SIZES = re.compile(
    r"--(?=(tensor-model|pipeline-model|context|expert-model|expert-tensor)-parallel-size"
    r"|sequence-parallel)"
)


def critic_flags(text: str) -> str:
    """Replace flags of the policy's layout in a text by the critic's.

    Example:
        >>> critic_flags("--tensor-model-parallel-size 2 --max-tokens-per-gpu 8")
        '--critic-tensor-model-parallel-size 2 --max-tokens-per-gpu 8'
    """
    return _SIZES.sub("--critic-", text)


def check_critic_layout(spec: ModelSpec, config: Config) -> None:
    """Refuse a critic's own layout that does not divide the model.

    Args:
        spec: of the checkpoint, with unpadded vocabulary.
    Raises:
        UserError: as `check_layout`; names the critic's flag.
    """
    placed = critic_placed(config)
    try:
        check_layout(spec.padded(placed.megatron.tensor_model_parallel_size), placed)
    except UserError as error:
        what, why, fix = map(critic_flags, error.args)
        raise UserError(what, why=why, fix=fix) from error


def _check_recompute(spec: ModelSpec, config: Config) -> None:
    if config.megatron.recompute_granularity != "selective":
        return
    transformer = spec.transformer
    has_experts = [spec.is_moe_layer(layer) for layer in range(spec.num_layers)]
    found = {
        "mla_up_proj": (transformer.get("multi_latent_attention"), "multi-latent attention"),
        "mlp": (not all(has_experts), "dense MLPs"),
        "mlp_act": (
            not all(has_experts) and spec.has_plain_gate,
            "dense MLPs without biases that are gated by SiLU or GELU",
        ),
        "moe": (any(has_experts), "routed experts"),
        "moe_act": (any(has_experts), "routed experts"),
        "shared_experts": (
            transformer.get("moe_shared_expert_intermediate_size"),
            "shared experts",
        ),
    }
    for module in config.megatron.recompute_modules:
        has_module, what = found.get(module, (True, ""))
        if not has_module:
            raise UserError(
                f"--recompute-modules {module} has no effect with this model",
                why=f"it has no {what}",
                fix=f"leave {module} out",
            )


def _check_levels(spec: ModelSpec, config: Config) -> None:
    """Check that the first pipeline stage adds all features of images.

    Raises:
        UserError: features of images would be added after layers of the second stage.
    """
    levels = 0 if spec.vision is None else spec.vision.num_levels
    if levels and config.megatron.pipeline_model_parallel_size > 1:
        first = len(layout_of(config, spec).layers_of(0, spec.num_layers))
        if first < levels:
            raise UserError(
                f"--pipeline-model-parallel-size {config.megatron.pipeline_model_parallel_size} "
                "does not fit this vision model",
                why=f"features of images are added after each of its first {levels} layers, but "
                f"the first stage has only {first} layers",
                fix="use fewer stages",
            )


def _check_bidirectional(spec: ModelSpec, config: Config) -> None:
    """Check that the attention follows the model's images.

    Raises:
        UserError: tokens of images attend to later ones, which Transformer Engine is not told.
    """
    if spec.has_bidirectional_images and config.train.transformer_impl == "transformer_engine":
        raise UserError(
            f"--transformer-impl transformer_engine cannot compute images of {spec.family}",
            why="the tokens of an image attend to each other in both directions, and its kernels "
            "for packed sequences are causal",
            fix="pass --transformer-impl local, or leave --multimodal-keys out",
        )


def _stage_rule(spec: ModelSpec, config: Config) -> tuple[int, int, str, str]:
    """Return (layers to divide, stages, description, flags) as Megatron divides layers: stages with
    their own number of layers are left out, embedding and loss may count as layers, and an explicit
    layout needs no division.

    Raises:
        UserError: the only stages have their own numbers of layers, and layers are left.
    """
    given = config.megatron.transformer
    ranks = config.megatron.pipeline_model_parallel_size
    layers = spec.num_layers
    what = "layers"
    if given.get("pipeline_model_parallel_layout") is not None:
        return 0, 1, what, "--pipeline-model-parallel-layout"
    for end in ("first", "last"):
        own = given.get(f"num_layers_in_{end}_pipeline_stage")
        if own is not None:
            layers = layers - own
            ranks = ranks - 1
            what = "layers outside the first or last stage"
    for part in ("embedding", "loss"):
        if given.get(f"account_for_{part}_in_pipeline_split"):
            layers += 1
            what = f"{what} and the {part}"
    if ranks == 0 and layers:  # both stages have their own number of layers
        raise UserError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers do not "
            "fit this model",
            why=f"together they have {spec.num_layers - layers} of its {spec.num_layers} layers, "
            "and there is no other stage",
            fix="give one of them",
        )
    stages = max(ranks, 1) * (virtual_stages(spec, config) or 1)
    return layers, stages, what, "--pipeline-model-parallel-size × virtual stages"


def _dense_width(spec: ModelSpec) -> int:
    """Return the intermediate features of dense MLPs; 0 if all layers have experts."""
    layers = spec.transformer.get("moe_layer_freq", 1)
    all_experts = bool(spec.num_experts) and (
        layers == 1 or (isinstance(layers, list) and all(layers))
    )
    return 0 if all_experts else int(spec.transformer.get("ffn_hidden_size") or 0)


def _expert_rules(spec: ModelSpec, config: Config) -> list[tuple[int, int, str, str]]:
    """Return (number to divide, divisor, description, flags) for each rule about experts.

    Raises:
        UserError: the flags ask for expert parallelism or routing replay without experts.
    """
    megatron = config.megatron
    experts = megatron.expert_model_parallel_size
    shards = megatron.expert_tensor_parallel_size
    if not spec.num_experts:
        for flag, size in (
            ("--expert-model-parallel-size", experts),
            ("--expert-tensor-parallel-size", shards or 1),
        ):
            if size > 1:
                raise UserError(
                    f"{flag} {size}, but the model has no experts", fix="leave the flag out"
                )
        # the first flag implies the second
        for dest in ("use_rollout_routing_replay", "use_routing_replay"):
            if getattr(config.train, dest):
                raise UserError(
                    f"{option_of(dest)}, but the model has no experts", fix="leave the flag out"
                )
        return []
    cut = shards or megatron.tensor_model_parallel_size
    cut_by = "--tensor-model-parallel-size" if shards is None else "--expert-tensor-parallel-size"
    width = int(spec.transformer["moe_ffn_hidden_size"])
    shared = int(spec.transformer.get("moe_shared_expert_intermediate_size") or 0)
    world = config.cluster.actor_num_nodes * config.cluster.actor_num_gpus_per_node
    ranks = cut * experts * megatron.pipeline_model_parallel_size
    product = "expert tensor × expert × pipeline parallel size ="
    return [
        (spec.num_experts, experts, "experts", "--expert-model-parallel-size"),
        (width, cut, "intermediate features of an expert", cut_by),
        (
            shared,
            megatron.tensor_model_parallel_size,
            "features of the shared experts",
            "--tensor-model-parallel-size",
        ),
        (world, ranks, "trainer ranks", product),
    ]


def _check_key_heads(heads: int, tensor: int, context: int) -> None:
    if heads % (tensor * context):
        raise UserError(
            f"--context-parallel-size {context} does not fit this model",
            why="gated delta nets run on whole sequences, with key heads divided over ranks: "
            f"{heads} key heads cannot be divided by {tensor} tensor-parallel x {context} "
            "context-parallel ranks",
            fix=f"let the product of both sizes divide {heads}",
        )


def check_heads(heads: int, tensor_parallel: int, context_parallel: int) -> None:
    """Check that context parallelism can divide the heads of a tensor-parallel rank.

    Raises:
        UserError: the division leaves a remainder; names possible sizes.
    """
    local = heads // tensor_parallel
    if local % context_parallel:
        divisors = [d for d in range(1, local + 1) if local % d == 0]
        raise UserError(
            f"--context-parallel-size {context_parallel} does not fit this model",
            why=f"attention runs on whole sequences, with heads divided over ranks: {heads} heads "
            f"/ {tensor_parallel} tensor-parallel ranks = {local} heads, not a multiple of "
            f"{context_parallel}",
            fix=f"use a divisor of {local}: {', '.join(map(str, divisors))}",
        )
