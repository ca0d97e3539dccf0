"""The record of the embedded engine: its command line, and its memory footprint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime import deadlines
from slime.engines.kinds import EngineKind, named_paths
from slime.engines.launch import ONE_GPU, EngineFootprint, EnginePlace, LaunchSpec
from slime.engines.model_groups import GroupRules, served_models
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import AdapterConfig, served_rank
from slime.processes.host import python_module
from slime.prompts.images import sees_images

if TYPE_CHECKING:
    from slime.config.config import Config

#: Copies of states of gated delta nets that a sequence keeps in addition to the live one
#: (`slime.embedded.states`).
STATE_COPIES = 2


def embedded_command(
    config: Config, model_path: str, host: str, port: int, place: EnginePlace = ONE_GPU
) -> LaunchSpec:
    """Return how to start an embedded engine, on CPU or on the GPU in the environment. It is always
    one process.

    Its seed depends on its number: engines with equal seeds would give equal answers to the samples
    of one prompt. Models other than the policy keep the dtype of their files.
    """
    is_policy = place.model_path is None
    argv = python_module("slime.embedded")
    argv += ["--model-path", place.model_path or model_path, "--host", host, "--port", str(port)]
    argv += ["--dtype", dtype_of(config) if is_policy else "auto"]
    argv += ["--max-slots", str(config.engine.embedded_max_slots)]
    argv += ["--random-seed", str(config.rollout.rollout_seed + place.number)]
    argv += ["--log-level", config.observe.log_level]
    longest = config.rollout.rollout_max_context_len
    if longest is not None and is_policy:
        argv += ["--max-context-len", str(longest)]
    adapters = AdapterConfig.of(config) if is_policy else None
    if adapters is not None:
        family = family_of(model_path, config.checkpoint.model_name)
        argv += ["--enable-lora", "--max-lora-rank", str(served_rank(family, adapters))]
    other = place.model_path
    if config.images.multimodal_keys and (other is None or sees_images(Path(other))):
        argv += ["--enable-multimodal", "--limit-images", str(config.images.images_per_sample)]
        if config.images.image_max_pixels is not None:
            argv += ["--image-max-pixels", str(config.images.image_max_pixels)]
    if config.rollout.deterministic:
        argv += ["--deterministic"]
    if config.train.use_rollout_routing_replay and is_policy:
        argv += ["--enable-return-routed-experts"]
    if config.checkpoint.trust_remote_code:
        argv += ["--trust-remote-code"]
    return LaunchSpec(argv, startup_timeout=deadlines.EMBEDDED_STARTUP, is_preloaded=True)


def _check_override(name: str, value: Any) -> None:
    raise UserError(
        f"overrides {name}", why="embedded engines are all alike", fix="leave overrides out"
    )


#: Rules for the server groups of --sglang-config.
GROUP_RULES = GroupRules(("regular", "placeholder"), _check_override)


def embedded_footprint(config: Config) -> EngineFootprint:
    """Return the footprint of one process: the whole model, and a cache for a number of
    sequences."""
    element = 4 if dtype_of(config) == "float32" else 2
    return EngineFootprint(
        element=element,
        kv_element=element,
        sequences=config.engine.embedded_max_slots,
        dequantises=True,
        state_copies=STATE_COPIES,
    )


def dtype_of(config: Config) -> str:
    """Return --embedded-dtype, where "auto" means the trainer's precision (float16 training
    generates in bfloat16)."""
    chosen = config.engine.embedded_dtype
    if chosen != "auto":
        return str(chosen)
    return "float32" if config.megatron.fp32 else "bfloat16"


KIND = EngineKind(
    embedded_command,
    embedded_footprint,
    deadlines.EMBEDDED_STARTUP,
    dtype_of,
    served_models=lambda config: served_models(config, GROUP_RULES),
    computed_here=True,
    image_words=("--enable-multimodal",),
    adapter_words=lambda adapters: ("--lora-paths", *named_paths(adapters)),
    if_out_of_memory=("a smaller --embedded-max-slots", "a smaller --rollout-max-context-len"),
    if_killed=("a smaller --embedded-max-slots, if the host ran out of memory",),
)
