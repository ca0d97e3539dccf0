"""Checks before the start of a run with quantised engines; they read the model's config.json."""

from __future__ import annotations

import os

from slime.checkpoints.load_plan import resolve_reference
from slime.config.config import Config
from slime.engines.kinds import engine_of
from slime.errors import UserError
from slime.log import get_logger
from slime.models import family_of, ignore_list
from slime.models.quantised import Quantisation
from slime.models.spec import read_hf_config
from slime.placement import joined_cluster, needs_engines

logger = get_logger(__name__)

#: The variable with which other scripts request INT4 fake quantisation of the routed experts.
_OLD_SWITCH = "OPEN_TRAINING_INT4_FAKE_QAT_FLAG"


def check_ignore_list(config: Config) -> None:
    """Warn about rules of the ignore list that name no module of the model."""
    flags = config.checkpoint
    quantisation = Quantisation.read(read_hf_config(flags.model_dir))
    if quantisation is not None:
        family = family_of(flags.model_dir, flags.model_name)
        spec = family.describe(flags.model_dir)
        if config.lora.lora_rank:
            # the frozen base is served unchanged: the list has no effect, but may have idle rules
            found = ignore_list.examine(ignore_list.matrices(family, spec), quantisation)
            tensors = (name for name, _ in family.hf_tensors(spec))
            idle = ignore_list.idle_among(found, tensors)
        else:
            idle = ignore_list.check(family, spec, quantisation).idle
        for rule in idle:
            logger.warning(
                "the rule %r of quantization_config in %s names nothing", rule, flags.model_dir
            )


def check_quantised_library(config: Config) -> None:
    """Check that the library for the format of the engines' weights is installed, if the trainer or
    embedded engines compute on this host; on a cluster each process checks this itself.

    Raises:
        UserError: it is not installed.
    """
    path = config.checkpoint.model_dir
    quantisation = Quantisation.read(read_hf_config(path))
    computes_elsewhere = config.debug.debug_rollout_only and not engine_of(config).computed_here
    if quantisation is None or computes_elsewhere or joined_cluster(config) is not None:
        return
    from slime.engines.wire.quantised import require_library  # needs torch; other models do not

    require_library(quantisation.scheme)


def check_quantised_flags(config: Config) -> None:
    """Refuse flags for quantised weights that would have no effect or contradict others.

    Raises:
        UserError: engines hold unquantised weights, no tensor would be rounded, or Transformer
            Engine also rounds the weights.
    """
    flags = config.quantised
    path = config.checkpoint.model_dir
    if config.lora.lora_rank and not config.debug.debug_rollout_only:
        _check_frozen_base(config)
    chosen = flags.fake_quantisation
    measured = flags.measure_quantisation
    if os.environ.get(_OLD_SWITCH, "0") not in ("", "0") and chosen is None:
        logger.warning(
            "the environment has %s, which has no effect; pass --fake-quantisation experts",
            _OLD_SWITCH,
        )
    asked = (
        f"--fake-quantisation {chosen}" if chosen else "--measure-quantisation" if measured else ""
    )
    stored = Quantisation.read(read_hf_config(path))
    quantisation = stored if asked else None
    if (
        stored is not None
        and config.megatron.transformer.get("fp8_param")
        and needs_engines(config)
    ):
        raise UserError(
            "--fp8-param-gather and engines of quantised weights exclude each other",
            why=f"{path} says how weights are rounded for engines; nobody has tried that with "
            "parameters that Transformer Engine has rounded to FP8 before",
            fix="leave --fp8-param-gather out, or take plain weights for --hf-checkpoint",
        )
    if asked and quantisation is None:
        raise UserError(
            f"{asked} has no effect",
            why=f"{path} has no quantization_config: engines hold plain weights, and no format "
            "says what to round to",
            fix="slime convert hf-to-int4 or hf-to-fp8 makes a directory for --hf-checkpoint, "
            "with the plain one as --ref-load; or leave the flag out",
        )
    if chosen is None or quantisation is None:
        return
    family = family_of(path, config.checkpoint.model_name)
    quantised = ignore_list.check(family, family.describe(path), quantisation).quantised
    experts = [matrix for matrix in quantised if matrix.kernel.endswith(".experts")]
    if not (experts if chosen == "experts" else quantised):
        raise UserError(
            f"--fake-quantisation {chosen} has no effect",
            why=f"{path} has no quantised layers"
            if not quantised
            else f"{path} has no routed experts",
            fix="--fake-quantisation linears"
            if quantised
            else "correct the ignore list, or leave the flag out",
        )
    for flag in ("fp8", "fp4"):
        if config.megatron.transformer.get(flag):
            raise UserError(
                f"--fake-quantisation {chosen} and --{flag}-format exclude each other",
                why=f"Transformer Engine would round the weights to {flag.upper()} once more, and "
                "engines do not",
                fix="choose one",
            )
    if measured and (chosen == "linears" or len(experts) == len(quantised)):
        raise UserError(
            f"--measure-quantisation has no effect with --fake-quantisation {chosen}",
            why="training computes with the engines' weights already, so that "
            "train/train_rollout_logprob_abs_diff is what is left without the format",
            fix="leave --measure-quantisation out",
        )
    logger.info("training computes with weights as %s would have them", quantisation)


def _check_frozen_base(config: Config) -> None:
    """Refuse flags with which the trainer's frozen base would differ from the one with which
    quantised engines compute."""
    path = config.checkpoint.model_dir
    hf_config = read_hf_config(path)
    quantisation = Quantisation.read(hf_config)
    if quantisation is None:
        return
    for flag in ("fp8", "fp4"):
        if config.megatron.transformer.get(flag):
            raise UserError(
                f"--{flag}-format does not go with --lora-rank and a quantised --hf-checkpoint",
                why=f"Transformer Engine would round the frozen base to {flag.upper()} once more, "
                "and engines do not",
                fix=f"leave --{flag}-format out",
            )
    base = resolve_reference(config)
    if base.kind != "hf":
        raise UserError(
            f"--ref-load {base.path} is a Megatron checkpoint, which cannot be the base of "
            f"adapters for engines of {quantisation}",
            why="the base is quantised as a conversion does it, weight by weight from Hugging Face "
            "files",
            fix="leave --ref-load out: the trainer takes the base from --hf-checkpoint, as engines "
            "do. Or pass the Hugging Face directory that it was made from",
        )
    # imports torch; other models do not
    from slime.engines.wire.buckets import dtype_name
    from slime.weights.route import flag_dtype

    trained = config.megatron.dtype
    served = dtype_name(flag_dtype(config, hf_config))
    # float32 represents the values of 16-bit engines exactly; the reverse is not true
    if needs_engines(config) and trained not in ("float32", served):
        raise UserError(
            f"the quantised base would be {served} in engines and {trained} in the trainer",
            why="what the stored numbers stand for is rounded to that dtype",
            fix=f"pass --sglang-dtype (--embedded-dtype) {trained}, or train in {served}",
        )
