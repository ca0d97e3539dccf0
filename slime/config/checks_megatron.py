"""Contradictions between flags of Megatron's: what it would ignore, stop at, or get wrong in silence."""

from __future__ import annotations

from slime.config.needs import without
from slime.config.registry import all_flags
from slime.config.resolve import Draft
from slime.config.specs import option_of
from slime.errors import UserError

#: Launch scripts carry these along with --bf16 too.
_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")


def check_megatron(draft: Draft) -> None:
    """Refuse flags that would be ignored, and schedules that Megatron cannot make.

    Raises:
        UserError: the first one found.
    """
    _without_effect(draft)
    _loss_scale(draft)
    _distributed_optimizer(draft)
    _virtual_stages(draft)
    _schedule(draft)


def _without_effect(draft: Draft) -> None:
    """Warn of settings whose absence changes no number."""
    for dest in draft.given.values:
        reason = all_flags()[dest].meta.no_effect
        if reason and draft.differs(dest):
            draft.warnings.append(f"{option_of(dest)} has no effect: {reason}")
    scaling = [option_of(dest) for dest in _SCALING if draft.differs(dest)]
    if scaling and not draft["fp16"]:
        draft.warnings.append(f"{', '.join(scaling)}: no effect without --fp16")


def _loss_scale(draft: Draft) -> None:
    scale = draft.values.get("loss_scale")
    if scale not in (None, 1.0) and not draft["fp16"]:
        raise UserError(
            f"--loss-scale {scale:g} needs --fp16",
            why="only a loss in float16 is scaled, and Megatron would divide the gradients by it all the same",
            fix="leave it out",
        )


def _distributed_optimizer(draft: Draft) -> None:
    """What belongs to optimizer states that are sharded over the replicas."""
    for dest in ("overlap_param_gather", "use_precision_aware_optimizer", "ddp_pad_buckets_for_high_nccl_busbw"):
        if not draft.values.get(dest):
            continue
        if draft["optimizer"] != "adam":
            raise UserError(
                f"{option_of(dest)} has no effect with --optimizer {draft['optimizer']}",
                why="only Adam's states are sharded over the replicas",
                fix=f"leave {option_of(dest)} out",
            )
        if not draft["use_distributed_optimizer"]:
            why = "each rank updates all parameters, so there is nothing to gather or to shard"
            raise without(dest, "--use-distributed-optimizer", why)


def _virtual_stages(draft: Draft) -> None:
    stages = draft["num_layers_per_virtual_pipeline_stage"] or draft["num_virtual_stages_per_pipeline_rank"]
    for dest in ("microbatch_group_size_per_vp_stage", "overlap_p2p_comm_warmup_flush", "align_param_gather"):
        if draft.differs(dest) and not stages:
            raise without(dest, "--num-virtual-stages-per-pipeline-rank")
    dest, ranks = "microbatch_group_size_per_vp_stage", draft["pipeline_model_parallel_size"]
    group = draft.values.get(dest)
    if group is not None and group < ranks:
        raise UserError(
            f"{option_of(dest)} {group} is less than the pipeline parallel size {ranks}",
            why="a pipeline rank would wait for the micro-batch that it has just sent on",
            fix=f"pass {ranks} or more, or leave it out",
        )


def _schedule(draft: Draft) -> None:
    """What Megatron's schedule of learning rate and weight decay would stop at, or choose between."""
    for same in (
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters"),
    ):
        given = [option_of(dest) for dest in same if draft[dest]]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} say the same thing", fix="give one of them")
    if draft["lr_decay_style"] == "WSD" and draft["lr_wsd_decay_iters"] is None:
        raise UserError(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters",
            why="it is the length of the last phase, in which the learning rate decays",
            fix="pass the number of optimizer steps",
        )
    start, end, style = draft["start_weight_decay"], draft["end_weight_decay"], draft["weight_decay_incr_style"]
    if end < start:
        raise UserError(
            f"--end-weight-decay {end:g} is less than --start-weight-decay {start:g}",
            why="Megatron's schedule of the weight decay only rises",
        )
    if style == "constant" and start != end:
        raise UserError(
            f"--start-weight-decay {start:g} and --end-weight-decay {end:g} differ",
            why="--weight-decay-incr-style is constant",
            fix="pass --weight-decay-incr-style linear or cosine, or --weight-decay alone",
        )
