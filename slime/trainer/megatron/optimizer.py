"""Megatron's data parallelism, optimizer and learning-rate schedule for the model chunks, and the
step that applies gradients."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as core_optimizer
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import nn

from slime.checkpoints.megatron_names import Placement, global_parameters, unwrapped
from slime.config.config import Config
from slime.config.schedule import schedule_lengths
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.models.vision import frozen_parts
from slime.processes.json_collectives import all_gather
from slime.samples.batch import StepPlan
from slime.trainer.megatron.offload import megatron_optimizers, torch_optimizers
from slime.trainer.megatron.streamed import StreamedOptimizer, StreamedStates, states_of
from slime.trainer.records import StepOutcome

if TYPE_CHECKING:
    from slime.trainer.megatron.replay import RoutingGuide

logger = get_logger(__name__)

_EMBEDDING = "embedding.word_embeddings.weight"
#: Megatron's options that `StreamedOptimizer` reads, with their defaults. As in Megatron-LM, all
#: states are in host memory by default.
_OF_STREAM: dict[str, Any] = {
    "optimizer_offload_fraction": 1.0,
    "exp_avg_dtype": torch.float32,
    "exp_avg_sq_dtype": torch.float32,
}
_DTYPES: dict[Any, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


def freeze(chunks: Sequence[GPTModel], config: Config) -> None:
    """Freeze parameters according to the regular expressions of the flags.

    Expressions are searched in Megatron's names with global layer numbers, so that they mean the
    same at every layout. Collective if there are expressions.

    Raises:
        UserError: an expression matches no parameter of the model, only some experts of a layer
            would be frozen, or nothing is left to train.
    """
    only = config.train.only_train_params_name_list
    frozen_names = config.train.freeze_params_name_list
    freeze_vision(chunks, config)
    patterns = [*only, *frozen_names]
    if not patterns:
        return
    seen: dict[str, bool] = {}  # name → is it trained
    for name, parameter in _named_parameters(chunks):
        found = any(re.search(pattern, name) for pattern in patterns)
        seen[name] = found if only else not found
        if not seen[name]:
            _whole(parameter)[0].requires_grad_(False)
    everywhere = all_gather(seen) if dist.is_initialized() and dist.get_world_size() > 1 else [seen]
    trained = {name: is_trained for part in everywhere for name, is_trained in part.items()}
    _check_expressions(patterns, trained)
    _check_experts(trained)
    logger.info(
        "%d of %d parameters are frozen", len(trained) - sum(trained.values()), len(trained)
    )


def freeze_vision(chunks: Sequence[GPTModel], config: Config) -> None:
    """Freeze the vision tower or its projector, if the flags say so."""
    flags = config.images
    patterns = frozen_parts(
        tower=flags.freeze_vision_tower, projector=flags.freeze_vision_projector
    )
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if any(re.search(pattern, name) for pattern in patterns):
                parameter.requires_grad_(False)


def _named_parameters(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (global name, parameter). The last pipeline stage's copy of a tied embedding has the
    embedding's name, so that both are frozen or both are trained."""
    experts: Any = unwrapped(chunks)[0].config.num_moe_experts or 0  # type: ignore[union-attr]
    for name, tensor in global_parameters(chunks, experts, Placement.current()):
        if isinstance(tensor, nn.Parameter):
            is_copy = name == "output_layer.weight" and hasattr(tensor, "shared_embedding")
            yield (_EMBEDDING if is_copy else name), tensor


def _whole(parameter: nn.Parameter) -> tuple[nn.Parameter, Any]:
    """Return the parameter that the optimizer has, which for experts is the stack of a layer's
    experts, and the index of ``parameter`` in it."""
    return parameter.stacked_in if hasattr(parameter, "stacked_in") else (parameter, ...)


def _check_experts(trained: dict[str, bool]) -> None:
    """Refuse to freeze only some of the experts of a layer."""
    layers: dict[str, bool] = {}
    for name, is_trained in trained.items():
        stacked = re.fullmatch(r"(.*\.experts\.linear_fc[12]\.weight)\d+", name)
        if stacked and layers.setdefault(stacked[1], is_trained) != is_trained:
            raise UserError(
                f"some experts of {stacked[1]} would be frozen and others trained",
                why="the experts of a layer are one parameter",
                fix="let the expression match all experts of a layer, or none",
            )


def _check_expressions(patterns: Sequence[str], trained: dict[str, bool]) -> None:
    unused = [
        pattern for pattern in patterns if not any(re.search(pattern, name) for name in trained)
    ]
    if unused:
        near = [
            name
            for pattern in unused
            for name in difflib.get_close_matches(pattern, trained, n=2, cutoff=0.3)
        ]
        near = near or sorted(trained)[:3]
        raise UserError(
            f"no parameter matches {', '.join(unused)}",
            why="--only-train-params-name-list and --freeze-params-name-list are searched "
            f"(re.search) in Megatron's names; nearest: {', '.join(dict.fromkeys(near))}",
            fix="correct the expression",
        )
    if not any(trained.values()):
        raise UserError(
            f"all {len(trained)} parameters are frozen",
            why=f"by the expressions {', '.join(patterns)}",
            fix="leave something to train",
        )


class DataParallel(DistributedDataParallel):
    """Megatron's data parallelism, without collectives if there is only one rank.

    A reduction over one rank copies the whole gradient buffer to itself, which on a CPU costs as
    much as a layer. It cannot be skipped with overlapped reduction, which gradient buckets start
    themselves.
    """

    @property
    def is_alone(self) -> bool:
        if self.ddp_config.overlap_grad_reduce:
            return False
        return self.dp_cp_group.size() == 1 and self.expt_dp_group.size() == 1

    def start_grad_sync(self, *unused: Any) -> None:
        if not self.is_alone:
            super().start_grad_sync(*unused)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if not self.is_alone:
            super().finish_grad_sync(force_all_reduce)

    def start_param_sync(
        self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False
    ) -> None:
        if not self.is_alone:
            super().start_param_sync(*unused, force_sync=force_sync, force_dispatch=force_dispatch)


def wrap_data_parallel(
    chunks: Sequence[GPTModel], config: Config, finalize: Callable[..., None] = finalize_model_grads
) -> list[DataParallel]:
    """Wrap the chunks with gradient buffers (default: float32) and data-parallel reduction.

    Args:
        finalize: reduces all gradients at the end of a step.
    """
    megatron = config.megatron
    options = {
        "grad_reduce_in_fp32": megatron.accumulate_allreduce_grads_in_fp32,
        "overlap_grad_reduce": megatron.overlap_grad_reduce,
        "overlap_param_gather": megatron.overlap_param_gather,
        "use_distributed_optimizer": is_distributed(config),
        # `apply_gradients` checks the gradient norm instead, which is the same on every rank
        "check_for_nan_in_grad": False,
        **megatron.ddp,
    }
    wrapped = [
        DataParallel(
            config=chunk.config,
            ddp_config=DistributedDataParallelConfig(**options),
            module=chunk,
            disable_bucketing=i > 0,
        )
        for i, chunk in enumerate(chunks)
    ]
    transformer = chunks[0].config
    transformer.no_sync_func = (
        wrapped[0].no_sync if len(wrapped) == 1 else [w.no_sync for w in wrapped]
    )
    transformer.finalize_model_grads_func = finalize
    if megatron.overlap_grad_reduce:
        starts = [w.start_grad_sync for w in wrapped]
        transformer.grad_sync_func = starts[0] if len(starts) == 1 else starts
    return wrapped


def gather_parameters(chunks: Sequence[DataParallel]) -> None:
    """Gather the updated weights before they are read (push, checkpoint, reference). Collective.

    With ``--overlap-param-gather`` a rank has only its own shard of the updated weights until the
    next forward pass.
    """
    for chunk in chunks:
        if chunk.use_forward_hook:
            chunk.start_param_sync(force_sync=True)


def is_distributed(config: Config) -> bool:
    """Tell whether optimizer states are sharded over the data-parallel ranks, which Megatron
    supports only for Adam."""
    return config.megatron.use_distributed_optimizer and config.megatron.optimizer_name == "adam"


def build_optimizer(
    chunks: list[DataParallel], config: Config
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Build Adam or SGD with float32 master weights, and the learning-rate schedule, which counts
    samples."""
    megatron = config.megatron
    dtype = chunks[0].module.config.params_dtype
    options = {name: _DTYPES.get(value, value) for name, value in megatron.optimizer.items()}
    streamed = {}
    if megatron.optimizer_cpu_offload:
        streamed = {name: options.pop(name) for name in _OF_STREAM if name in options}
    optimizer_config = OptimizerConfig(
        **{
            "optimizer": megatron.optimizer_name,
            "lr": megatron.lr,
            "min_lr": megatron.min_lr,
            "weight_decay": megatron.weight_decay,
            "adam_beta1": megatron.adam_beta1,
            "adam_beta2": megatron.adam_beta2,
            "adam_eps": megatron.adam_eps,
            "sgd_momentum": megatron.sgd_momentum,
            "clip_grad": megatron.clip_grad,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "params_dtype": dtype,
            "use_distributed_optimizer": is_distributed(config),
            "overlap_param_gather": megatron.overlap_param_gather,
            "use_precision_aware_optimizer": megatron.use_precision_aware_optimizer
            and not megatron.optimizer_cpu_offload,
            **options,
        }
    )
    if megatron.optimizer_cpu_offload:
        for name, value in (_OF_STREAM | streamed).items():
            setattr(optimizer_config, name, value)
    kind = StreamedOptimizer if megatron.optimizer_cpu_offload else DistributedOptimizer
    # the precision-aware optimizer is Transformer Engine's Adam
    with nullcontext() if optimizer_config.use_precision_aware_optimizer else _torchs_own(kind):
        optimizer = get_megatron_optimizer(optimizer_config, chunks)
    for inner in torch_optimizers(optimizer):
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for group in inner.param_groups:
                # one pass over parameters, gradients and moments instead of a dozen
                group["fused"] = True
                group["foreach"] = False
        if megatron.offload_optimizer_states:
            StreamedStates.install(inner)
    scale = optimizer.scale_loss if dtype == torch.float16 else None
    chunks[0].module.config.grad_scale_func = scale
    return optimizer, build_schedule(optimizer, config)


@contextmanager
def _torchs_own(kind: type[DistributedOptimizer]) -> Iterator[None]:
    """Make Megatron build torch's Adam and SGD, even if Transformer Engine's are installed.

    Transformer Engine's keep states in another format and support neither a gradient scale nor
    `StreamedStates`. Training, checkpoints and memory plans must not depend on its installation.

    Args:
        kind: class of the distributed optimizer that contains them.
    """
    stand_ins: tuple[tuple[Any, str, Any], ...] = (
        (core_optimizer, "DistributedOptimizer", kind),
        (core_optimizer, "USING_PYTORCH_OPTIMIZER", True),
        (core_optimizer, "Adam", torch.optim.AdamW),
        (core_optimizer, "SGD", torch.optim.SGD),
        (distrib_optimizer, "Adam", torch.optim.Adam),
    )
    before = [vars(module)[name] for module, name, _ in stand_ins]
    try:
        for module, name, value in stand_ins:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(stand_ins, before, strict=True):
            setattr(module, name, value)


def build_schedule(optimizer: MegatronOptimizer, config: Config) -> OptimizerParamScheduler:
    """Build the learning-rate schedule: warm-up, then decay, both counted in samples.

    With ``--num-epoch`` the length of the run is unknown until the prompts are counted: see
    `set_run_length`.
    """
    megatron = config.megatron
    batch = config.train.global_batch_size
    warmup, decay, total = _schedule_lengths(config, config.rollout.num_rollout)
    wsd = megatron.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=megatron.lr_warmup_init,
        max_lr=megatron.lr,
        min_lr=megatron.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=megatron.lr_decay_style,
        start_wd=megatron.start_weight_decay,
        end_wd=megatron.end_weight_decay,
        wd_incr_steps=total,
        wd_incr_style=megatron.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=megatron.use_checkpoint_opt_param_scheduler,
        # flags override the checkpoint; otherwise Megatron refuses a changed --lr or run length
        override_opt_param_scheduler=not megatron.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=None if wsd is None else wsd * batch,
        lr_wsd_decay_style=megatron.lr_wsd_decay_style,
    )


def set_run_length(scheduler: OptimizerParamScheduler, config: Config, num_rollout: int) -> None:
    """Fit the schedule to a run of ``num_rollout`` rollouts, unless it is the checkpoint's."""
    if scheduler.use_checkpoint_opt_param_scheduler and scheduler.num_steps > 0:
        return
    warmup, decay, total = _schedule_lengths(config, num_rollout)
    scheduler.lr_warmup_steps = warmup
    scheduler.lr_decay_steps = decay
    scheduler.wd_incr_steps = total
    scheduler.step(0)  # recompute the current rates with the new lengths


def _schedule_lengths(config: Config, num_rollout: int | None) -> tuple[int, int, int]:
    megatron = config.megatron
    return schedule_lengths(
        num_rollout=num_rollout,
        num_critic_only_steps=config.critic.num_critic_only_steps,
        num_steps_per_rollout=config.train.num_steps_per_rollout,
        global_batch_size=config.train.global_batch_size,
        lr_decay_style=megatron.lr_decay_style,
        lr_decay_iters=megatron.lr_decay_iters,
        lr_decay_samples=megatron.lr_decay_samples,
        lr_warmup_iters=megatron.lr_warmup_iters,
        lr_warmup_samples=megatron.lr_warmup_samples,
        lr_warmup_fraction=megatron.lr_warmup_fraction,
        lr_wsd_decay_iters=megatron.lr_wsd_decay_iters,
    )


@contextmanager
def telling_of_steps(
    optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, origin: str
) -> Iterator[None]:
    """Within the block a user's function runs; warn once if it steps optimizer or scheduler.

    The trainer takes a step behind each function, so that a second one is applied to every batch.

    Args:
        origin: name of the function in messages.
    """
    before = _steps_taken(optimizer), scheduler.num_steps
    yield
    after = _steps_taken(optimizer), scheduler.num_steps
    for name, count in zip(("optimizer", "opt_param_scheduler"), map(operator.sub, after, before)):
        if count > 0:
            tell(
                logger,
                "%s calls %s.step() itself (%g more): the trainer calls it too in each step, so "
                "that weights or the learning rate change twice; leave the call out",
                origin,
                name,
                count,
                once=f"extra step {name} {origin}",
            )


def _steps_taken(optimizer: MegatronOptimizer) -> float:
    """Return the steps that the optimizer has counted; 0 if it counts none, as SGD."""
    counts = [0.0]
    for inner in torch_optimizers(optimizer):
        state: dict[str, Any] = next(iter(inner.state.values()), {})
        counts.append(float(state.get("step") or 0.0))
        # Transformer Engine's Adam counts per group
        counts += [float(group.get("step") or 0.0) for group in inner.param_groups[:1]]
    return max(counts)


def reset_moments(optimizer: MegatronOptimizer) -> None:
    """Reset the optimizer's moments and step counts (``--reset-optimizer-states``)."""
    for inner in torch_optimizers(optimizer):
        states = states_of(inner)
        if states is None:
            inner.state.clear()
        else:
            states.reset()
        for group in inner.param_groups:
            group.pop("step", None)  # Transformer Engine's Adam counts per group


@torch.no_grad()
def take_step(
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    routing: RoutingGuide | None,
    clip_grad: float,
    step: StepPlan,
    *,
    skip: bool,
) -> StepOutcome:
    """Apply the accumulated gradients and advance the schedule; with ``skip`` do neither.
    Collective."""
    balance = routing.step_metrics() if routing is not None else {}
    outcome = StepOutcome(math.nan, applied=False)
    if not skip:
        outcome = apply_gradients(optimizer, clip_grad)
    if outcome.applied:
        scheduler.step(step.global_batch_size)
    elif routing is not None:
        routing.restore_biases()
    return dataclasses.replace(outcome, metrics=balance)


def apply_gradients(optimizer: MegatronOptimizer, clip_grad: float) -> StepOutcome:
    """Compute the global gradient norm, clip, and step. If the norm is not finite, no rank applies
    the gradients."""
    overflow = optimizer.prepare_grads()
    grad_norm = math.inf if overflow else float(optimizer.get_grad_norm())
    if not math.isfinite(grad_norm):
        return StepOutcome(grad_norm, applied=False)
    if clip_grad > 0 and grad_norm > clip_grad:
        for part in megatron_optimizers(optimizer):
            _clip(part, clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
    for inner in torch_optimizers(optimizer):
        inner.__dict__.pop("grad_scale", None)
    return StepOutcome(grad_norm, applied=True)


def _clip(part: MegatronOptimizer, clip_grad: float, grad_norm: float) -> None:
    """Scale the gradients to norm ``clip_grad``; fused Adam does so itself, given the divisor."""
    inner = part.optimizer
    if isinstance(inner, torch.optim.Adam) and inner.param_groups[0].get("fused"):
        where = torch.cuda.current_device()  # gradients are here, even if master weights are not
        scale = torch.tensor((grad_norm + 1e-6) / clip_grad, device=where)
        inner.grad_scale = scale  # type: ignore[attr-defined]
        return
    parameters = part.get_parameters()
    if parameters:
        clip_grad_by_total_norm_fp32(
            parameters,
            max_norm=clip_grad,
            total_norm=grad_norm,
            use_decoupled_grad=part.config.use_precision_aware_optimizer,
        )


def learning_rates(optimizer: MegatronOptimizer) -> list[float]:
    """Return the rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


@torch.no_grad()
def nonfinite_gradients(chunks: Sequence[nn.Module]) -> list[tuple[str, int, int]]:
    """Return (global name, number of NaN or Inf entries, number of entries) for each accumulated
    gradient of this rank that is not finite."""
    found = []
    for name, parameter in _named_parameters(chunks):
        whole, place = _whole(parameter)
        if not whole.requires_grad:
            continue
        gradient = whole.main_grad[place]  # type: ignore[attr-defined]
        bad = gradient.numel() - int(torch.isfinite(gradient).sum())
        if bad:
            found.append((name, bad, gradient.numel()))
    return found
