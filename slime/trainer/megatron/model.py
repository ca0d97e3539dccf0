"""The policy as megatron-core modules, built from a `ModelSpec`.

    embedding ─► decoder (local layer spec; our attention, norm and activation) ─► hidden states
                                     └─ last stage: rows that predict responses ─► log-probs

The full logits are never in memory.

Parameters have Megatron's names and sharding, so converters and checkpoints need no special case.
"""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from slime.algorithms.divergence import OutputRows
from slime.algorithms.logprobs import LowRankLogits, VocabShard, linear_log_probs
from slime.config.config import Config
from slime.engines.wire.buckets import dtype_of
from slime.errors import UserError
from slime.models.layout_rules import virtual_stages
from slime.models.mixers import mixer_of, mixers_of
from slime.models.model_flags import merge_transformer
from slime.models.rotary import frequency_axes, layer_frequencies, query_factors
from slime.models.spec import ModelSpec, RotaryKind
from slime.models.tower import build_tower
from slime.trainer.megatron import te_layers
from slime.trainer.megatron.adapters import give_gradient
from slime.trainer.megatron.attention import PackedAttention, PackedSelfAttention
from slime.trainer.megatron.embedder import add_levels, embed_images, local_rows
from slime.trainer.megatron.layers import (
    RECOMPUTE_ACTIVATION,
    ActivationRecomputingMLP,
    Embedding,
    GatedActivation,
    NormOfRotated,
    RMSNorm,
    WideNorm,
    change_outputs,
    leave_as_it_is,
    with_bias,
)
from slime.trainer.megatron.mla import LatentNorm, PackedMLASelfAttention
from slime.trainer.megatron.moe_layer import connect, expert_arguments, expert_layer_spec
from slime.trainer.megatron.packed import PackedMicroBatch
from slime.trainer.megatron.provider import provided, specified_layers
from slime.trainer.megatron.rotary import RotaryAngles
from slime.trainer.megatron.sinks import SinkAttention
from slime.trainer.megatron.vocabulary import BlockwiseVocabulary
from slime.trainer.records import TokenScores

_MEGATRON_NORMS = (WrappedTorchNorm, FusedLayerNorm)


class PolicyModel(GPTModel):
    """A Megatron GPT that outputs the log-prob of each response token.

    `linear_log_probs` computes the output projection, only for rows that predict response tokens.
    """

    def __init__(
        self, spec: ModelSpec, config: TransformerConfig, vp_stage: int | None, **kwargs: Any
    ) -> None:
        super().__init__(
            config=config,
            vocab_size=spec.padded_vocab_size,
            max_sequence_length=spec.max_position_embeddings,
            share_embeddings_and_output_weights=spec.tie_embeddings,
            # `self.angles` computes the angles once per micro-batch
            position_embedding_type="none",
            vp_stage=vp_stage,
            **kwargs,
        )
        self.spec = spec
        self._direct = False
        if self.pre_process:
            # same parameters; Megatron's specs cannot replace the embedding class
            self.embedding.word_embeddings.__class__ = Embedding
        place = torch.device(torch.cuda.current_device())
        self.angles: dict[RotaryKind, RotaryAngles] = {
            kind: RotaryAngles(
                *layer_frequencies(spec, kind), place, config.params_dtype, frequency_axes(spec)
            )
            for kind in spec.rotary_kinds
        }
        if spec.vision is not None and self.pre_process:
            again = config.recompute_granularity == "full"
            self.vision_model = build_tower(spec.vision, config.params_dtype, again).to(place)
            for parameter in self.vision_model.parameters():
                # each rank has the gradient of its own positions; this mark makes Megatron sum them
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
            add_levels(self.decoder.layers, spec.vision.num_levels)
        for layer in self.decoder.layers:
            if isinstance(layer.self_attention, PackedSelfAttention):
                layer.self_attention.rotary_kind = spec.rotary_kind(layer.layer_number - 1)

    def forward(
        self,
        batch: PackedMicroBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_logits: bool = False,
        chunk_size: int = -1,
        with_vocabulary: bool = False,
        with_rows: bool = False,
        top_k: int = 0,
    ) -> Tensor | TokenScores:
        """Return hidden states [T, 1, H] on inner pipeline stages, `TokenScores` on the last."""
        hidden = self.hidden_states(batch)
        if not self.post_process:
            return hidden
        hidden, low_rank = self._low_rank_head(hidden, batch)
        rows = self.predicting_rows(hidden, batch)
        weight = self.output_weight()
        temperature = temperature / self.spec.logits_scale
        logits = None
        if with_logits:
            size = self.vocab_shard().size
            logits = rows @ weight[:size].t()
            if low_rank is not None:
                logits = logits + low_rank.hidden @ low_rank.up[:size].t()
            logits = logits.float() / temperature
        log_probs, entropy = linear_log_probs(
            rows,
            weight,
            batch.targets,
            temperature=temperature,
            with_entropy=with_entropy,
            shard=self.vocab_shard(),
            chunk_size=chunk_size,
            grad_accumulator=self._direct_grad(),
            low_rank=low_rank,
            kept=batch.kept,
        )
        context = batch.sequences.context
        if context is not None:
            log_probs = context.whole(log_probs)
            entropy = context.whole(entropy) if entropy is not None else None
            logits = context.whole(logits) if logits is not None else None
        scores = TokenScores(log_probs, entropy, logits)
        if with_vocabulary or with_rows or top_k:
            assert low_rank is None, "refused at launch: an adapter of the output layer"
            own = BlockwiseVocabulary(
                OutputRows(rows, weight, temperature),
                self.vocab_shard(),
                chunk_size,
                self._direct_grad(),
                context,
            )
            scores.vocabulary = own if with_vocabulary else None
            scores.rows = own.whole_rows() if with_rows else None
            scores.top = own.top_tokens(top_k) if top_k else None
        return scores

    def hidden_states(self, batch: PackedMicroBatch) -> Tensor:
        """Return hidden states [T, 1, H], on the last stage after the final norm. Under sequence
        parallelism they cover only this rank's part of T."""
        sequences = batch.sequences
        assert sequences.positions is not None
        if sequences.rotary is None:
            self._check_lengths(batch)
            positions = sequences.positions
            turns = sequences.rotary_positions
            sequences.rotary = {
                kind: angles(positions if turns is None else turns)
                for kind, angles in self.angles.items()
            }
            if self.spec.query_scaling is not None:
                factors = query_factors(self.spec.query_scaling, positions)
                sequences.query_factors = factors.to(self.config.params_dtype)[:, None, None]
        embedded = None
        if self.pre_process:
            embedded = self.embedding(input_ids=batch.tokens, position_ids=None)
            if self.spec.embedding_scale != 1.0:
                scale = torch.tensor(self.spec.embedding_scale, dtype=self.config.params_dtype)
                embedded = embedded * scale.item()
            if sequences.images is not None:
                sequences.seen = sequences.images
                if self.config.sequence_parallel:  # the rank has a part of the positions
                    count = embedded.size(0)
                    start = count * self.pg_collection.tp.rank()
                    sequences.seen = local_rows(sequences.images, start, count)
                embedded = embed_images(self.vision_model, sequences.seen, embedded)
        return self.decoder(
            hidden_states=embedded, attention_mask=None, packed_seq_params=sequences
        )

    def _check_lengths(self, batch: PackedMicroBatch) -> None:
        limit = self.spec.longest_sequence
        if limit is None:
            return
        # padding is a prompt without responses; a response's last token is not fed
        sequences = [(prompt, own) for prompt, *own in batch.sequences.branches if own]
        longest = max((prompt + max(own) + 1 for prompt, own in sequences), default=0)
        if longest > limit:
            raise UserError(
                f"a sequence has {longest} tokens, and the model has other rotary frequencies for "
                f"more than {limit}",
                why="it has longrope, whose factors for longer sequences are not computed",
                fix=f"pass --seq-length {limit}",
            )

    def predicting_rows(self, hidden: Tensor, batch: PackedMicroBatch) -> Tensor:
        """Return the hidden states [N, H] that predict response tokens, as input of the
        vocabulary-parallel output layer.

        The backward pass sums the gradient of the rows over the tensor-parallel ranks, because each
        rank computes only the part of its vocabulary shard.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
            return hidden[:, 0].index_select(0, batch.rows)
        rows = hidden[:, 0].index_select(0, batch.rows)
        return tensor_parallel.copy_to_tensor_model_parallel_region(rows, group=group)

    def _low_rank_head(
        self, hidden: Tensor, batch: PackedMicroBatch
    ) -> tuple[Tensor, LowRankLogits | None]:
        """Return the hidden states for the output layer, and the adapter's summand of the logits
        for the rows that predict response tokens; None without an active adapter."""
        adapter = getattr(self.output_layer, "adapter", None)
        if adapter is None or not adapter.is_on:
            return hidden, None
        hidden, low_rank = adapter.low_rank(hidden)
        rows = low_rank[:, 0].index_select(0, batch.rows) * adapter.scaling
        return hidden, LowRankLogits(rows, adapter.up, partial(give_gradient, adapter.up))

    def output_weight(self) -> Tensor:
        """Return this rank's output weight [V / tp, H]; the embedding's if the weights are tied."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def vocab_shard(self) -> VocabShard:
        group = self.pg_collection.tp
        per_rank = self.spec.padded_vocab_size // group.size()
        start = per_rank * group.rank()
        return VocabShard(start, max(0, min(per_rank, self.spec.vocab_size - start)), group)

    def attach(self, wrapper: DistributedDataParallel) -> None:
        """Adapt the chunk to its data-parallel wrapper.

        Embedding and output layer add gradients directly to the gradient buffer, unless Megatron
        overlaps the reduction. With ``--overlap-param-gather`` Megatron waits for parameters when a
        module is called. Hooks wait for the parameters that are used without such a call: the
        output weight, which the log-probs read, and the query and key norms, which a kernel fuses.
        """
        self._direct = not wrapper.ddp_config.overlap_grad_reduce
        if self.pre_process:
            self.embedding.word_embeddings.direct_grad = self._direct
        if not wrapper.use_forward_hook:
            return
        wait = wrapper._make_forward_pre_hook()
        if self.post_process:
            self.decoder.final_layernorm.register_forward_pre_hook(
                lambda norm, _: _wait_for_all(self.output_layer, wait)
            )
        for module in self.modules():
            if isinstance(module, PackedSelfAttention):
                module.register_forward_pre_hook(
                    lambda attention, _: _wait_for_norms(attention, wait)
                )

    def _direct_grad(self) -> Tensor | None:
        weight = self.output_weight()
        if not self._direct or not torch.is_grad_enabled() or not weight.requires_grad:
            return None
        return weight.main_grad  # type: ignore[attr-defined]


def _wait_for_all(layer: torch.nn.Module, wait: Callable[[torch.nn.Module], Any]) -> None:
    for module in layer.modules():  # the adapter is one of them
        wait(module)


def _wait_for_norms(attention: PackedSelfAttention, wait: Callable[[torch.nn.Module], Any]) -> None:
    for norm in (attention.q_layernorm, attention.k_layernorm):
        if isinstance(norm, RMSNorm):
            wait(norm)


def build_model_chunks(
    spec: ModelSpec,
    config: Config,
    *,
    initialise: bool = False,
    model: type[PolicyModel] = PolicyModel,
) -> list[PolicyModel]:
    """Build this rank's pipeline stage(s) on the trainer's device, without loading parameters.

    Args:
        spec: a model that fits the layout (`slime.models.layout_rules.check_layout`).
        initialise: draw random weights; otherwise parameters are undefined until a checkpoint is
            loaded.
        model: the class to build.
    Raises:
        UserError: a flag contradicts the model or cannot be honoured, or a provider built something
            else.
    """
    transformer = transformer_config(spec, config, initialise=initialise)
    virtual = transformer.virtual_pipeline_model_parallel_size
    core: type | ModuleSpec = PackedAttention
    if config.train.attention_backend == "flash" and not te_layers.is_used(config):
        core = ModuleSpec(module=PackedAttention, params={"torch_only": True})

    def build(first: bool, last: bool, vp_stage: int | None) -> PolicyModel:
        if config.train.spec:
            layers = specified_layers(
                config.train.spec, config.shared_args, transformer, vp_stage, local_layers
            )
        else:
            layers = local_layers(transformer, vp_stage)
        put_in_mixers(layers, transformer, spec, vp_stage)
        put_in_parts(layers, transformer, spec, core_attention=core)
        return model(
            spec,
            transformer,
            vp_stage,
            transformer_layer_spec=layers,
            pre_process=first,
            post_process=last,
        )

    chunks = []
    path = config.train.custom_model_provider_path
    for vp_stage in range(virtual) if virtual else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        if path:
            chunk = provided(path, build, PolicyModel, first, last, vp_stage)
        else:
            chunk = build(first, last, vp_stage)
        connect(chunk)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        _prepare_recompute(chunk)
        chunks.append(chunk.to(torch.cuda.current_device()))
    return chunks


def _prepare_recompute(chunk: PolicyModel) -> None:
    """Fill three gaps in Megatron's activation recompute (``--recompute-*`` flags).

    Megatron recomputes whole layers, or single modules (``--recompute-modules``), in the backward
    pass, but:

    - its checkpoint of a norm's output asks Transformer Engine whether FP8 is on, even where
      Transformer Engine is not installed;
    - a checkpointed function computes no parameter gradients if none of its inputs requires a
      gradient: the layers after a frozen embedding would silently not be trained, and a fully
      frozen pipeline stage would have no gradient to send back;
    - a number of layers per block that does not divide a stage's layers causes an IndexError.

    Raises:
        UserError: ``--recompute-num-layers`` does not divide the layers of a stage.
    """
    config = chunk.config
    if not megatron_random.HAVE_TE:
        # the default, False, means "not FP8", but Megatron compares it with None
        megatron_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        per_block = config.recompute_num_layers or 1
        layers = len(chunk.decoder.layers)
        if layers % per_block:
            raise UserError(
                f"--recompute-num-layers {per_block} does not fit this model",
                why=f"a pipeline stage has {layers} layers, which cannot be divided into blocks "
                f"of {per_block}",
                fix=f"use a divisor of {layers}; 1 keeps one activation per layer",
            )
    if RECOMPUTE_ACTIVATION in (config.recompute_modules or ()):
        for module in chunk.modules():
            if type(module) is MLP and config.use_te_activation_func:
                # in a layer's spec Megatron takes no other class than its own
                module.__class__ = ActivationRecomputingMLP
    sends_back = config.pipeline_model_parallel_size > 1
    if chunk.pre_process and (config.recompute_granularity is not None or sends_back):
        chunk.embedding.register_forward_hook(_let_gradients_pass)


def _let_gradients_pass(module: torch.nn.Module, inputs: Any, embedded: Tensor) -> None:
    """Make the output of a frozen embedding require a gradient."""
    if torch.is_grad_enabled() and module.training and not embedded.requires_grad:
        embedded.requires_grad_()


def local_layers(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Return megatron-core's layer specs of a pipeline stage, without Transformer Engine."""
    plain = copy.copy(config)
    # Megatron's spec for grouped GEMM needs an extra package, and its experts are replaced anyway
    plain.moe_grouped_gemm = False
    return get_gpt_decoder_block_spec(plain, use_transformer_engine=False, vp_stage=vp_stage)


def put_in_mixers(
    block: TransformerBlockSubmodules,
    config: TransformerConfig,
    spec: ModelSpec,
    vp_stage: int | None,
) -> None:
    """Replace Megatron's attention by the module of each layer's token mixer, if it names one.

    Modules that the user's ``--spec`` puts there are kept.
    """
    if all(mixer.megatron_module is None for mixer in mixers_of(spec.transformer)):
        return
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        numbers = [first + i for i in range(len(block.layer_specs))]
    else:
        numbers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    for place, number in enumerate(numbers):
        layer = block.layer_specs[place]
        module = mixer_of(spec.transformer, number).megatron_module
        if module is not None and layer.submodules.self_attention.module is SelfAttention:
            own = copy.deepcopy(layer)  # several layers may share one spec
            own.submodules.self_attention = pkgutil.resolve_name(module)(spec)
            block.layer_specs[place] = own


def put_in_parts(
    block: TransformerBlockSubmodules,
    config: TransformerConfig,
    spec: ModelSpec,
    *,
    core_attention: type | ModuleSpec = PackedAttention,
) -> None:
    """Replace megatron-core's norm, attention, activation and biases by ours, which support packed
    sequences.

    Modules that the user's ``--spec`` puts there are kept.
    """
    if block.layer_norm is None or block.layer_norm in _MEGATRON_NORMS:
        block.layer_norm = RMSNorm
    for layer in {id(layer): layer for layer in block.layer_specs}.values():  # may be shared
        parts = layer.submodules
        if spec.pre_norms:
            _replace_norms(parts, "input_layernorm", "pre_mlp_layernorm")
        else:
            parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
        attention = parts.self_attention
        if attention.module is SelfAttention:
            attention.module = PackedSelfAttention
        if issubclass(attention.module, PackedSelfAttention):
            attention.submodules.core_attention = (
                SinkAttention if spec.has_sinks else core_attention
            )
            if spec.output_bias:
                attention.submodules.linear_proj = with_bias(attention.submodules.linear_proj)
            _replace_norms(attention.submodules, "q_layernorm", "k_layernorm")
            if spec.wide_qk_norms:
                attention.submodules.q_layernorm = _wide_norm(spec.num_heads)
                attention.submodules.k_layernorm = _wide_norm(spec.num_query_groups)
            if spec.rotates_first:
                attention.submodules.q_layernorm = NormOfRotated
                attention.submodules.k_layernorm = NormOfRotated
        if attention.module is MLASelfAttention:
            attention.module = PackedMLASelfAttention
        if issubclass(attention.module, PackedMLASelfAttention):
            attention.submodules.core_attention = core_attention
            attention.submodules.q_layernorm = attention.submodules.kv_layernorm = LatentNorm
        if isinstance(parts.mlp, ModuleSpec) and parts.mlp.module is MLP:
            mlp = parts.mlp.submodules
            if config.use_te_activation_func:
                mlp.activation_func = GatedActivation
            if spec.mlp_bias:
                mlp.linear_fc1 = with_bias(mlp.linear_fc1)
                mlp.linear_fc2 = with_bias(mlp.linear_fc2)
        if isinstance(parts.mlp, ModuleSpec) and parts.mlp.module is MoELayer:
            parts.mlp = expert_layer_spec(
                config, normalises=spec.normalised_scores, biases=spec.expert_biases
            )
    change_outputs(block, spec)
    if config.transformer_impl == "transformer_engine":
        te_layers.replace_parts(block)


def _wide_norm(heads: int) -> ModuleSpec:
    return ModuleSpec(module=WideNorm, params={"heads": heads})


def _replace_norms(parts: Any, *names: str) -> None:
    for name in names:
        if getattr(parts, name) in _MEGATRON_NORMS:
            setattr(parts, name, RMSNorm)


def transformer_config(
    spec: ModelSpec, config: Config, *, initialise: bool = False
) -> TransformerConfig:
    """Return Megatron's configuration of the model, from the checkpoint, the layout and the native
    flags that the user set.

    Raises:
        UserError: a flag contradicts the checkpoint (the message has both values) or cannot be
            honoured.
    """
    given = config.megatron.transformer
    described = merge_transformer(spec.transformer_kwargs(), given)
    acting = {name: described[name] for name in given if name in described}
    arguments = {**described, **_trainer_arguments(spec, config, initialise), **acting}
    arguments.update(expert_arguments(arguments))
    mixer = mixer_of(spec.transformer, 0)
    # Megatron refuses the bias with softmax scores; `slime.trainer.megatron.moe_router` supports it
    has_bias = arguments.pop("moe_router_enable_expert_bias", False)
    config_class = pkgutil.resolve_name(mixer.megatron_config)
    made: TransformerConfig = config_class(**arguments | mixer.megatron_overrides)
    made.moe_router_enable_expert_bias = has_bias
    # Megatron's slot for another module, which it refuses for activations that are not TE's
    made.use_te_activation_func = spec.has_plain_gate
    if RECOMPUTE_ACTIVATION in config.megatron.recompute_modules:
        made.recompute_modules.append(RECOMPUTE_ACTIVATION)  # which Megatron would refuse
    return made


def _trainer_arguments(spec: ModelSpec, config: Config, initialise: bool) -> dict[str, Any]:
    """Return the arguments that do not describe the model: layout, precision, recomputation, and
    the trainer's own settings."""
    megatron = config.megatron
    dtype = parameter_dtype(config)
    virtual = virtual_stages(spec, config)
    arguments: dict[str, Any] = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual,
        "context_parallel_size": megatron.context_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "sequence_parallel": megatron.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        # with virtual stages two ranks exchange activations and gradients at the same time; only
        # the overlapped exchange of equal shapes keeps the two apart
        "variable_seq_lengths": virtual is None,
        "overlap_p2p_comm": virtual is not None,
        "batch_p2p_comm": virtual is None,
        "moe_token_dispatcher_type": "alltoall",  # "allgather" refuses variable lengths
        **te_layers.transformer_arguments(config),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "recompute_granularity": megatron.recompute_granularity,
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
        # by the matrix products of `device.install`, or in Transformer Engine's layers
        "gradient_accumulation_fusion": True,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        # each rank draws the full tensor and keeps its shard, so random weights do not depend on
        # the layout
        "use_cpu_initialization": initialise
        and torch.device(torch.cuda.current_device()).type == "cpu",
        "attention_softmax_in_fp32": True,
        # Megatron's default would update the bias without a flag that asks for it
        "moe_router_bias_update_rate": 0.0,
        # an overlapped send over gloo may still read the output when Megatron frees it
        "deallocate_pipeline_outputs": megatron.pipeline_model_parallel_size > 1
        and virtual is None,
    }
    if not initialise:
        # "perform_initialization": False would save the same time, but then Megatron does not mark
        # which parameters are split over tensor-parallel ranks, and the gradient norm would count
        # those of one rank only
        for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
            arguments[name] = leave_as_it_is
    if megatron.expert_tensor_parallel_size is not None:
        arguments["expert_tensor_parallel_size"] = megatron.expert_tensor_parallel_size
    if megatron.recompute_modules:
        arguments["recompute_modules"] = [
            name for name in megatron.recompute_modules if name != RECOMPUTE_ACTIVATION
        ]
    return arguments


def parameter_dtype(config: Config) -> torch.dtype:
    return dtype_of(config.megatron.dtype)
