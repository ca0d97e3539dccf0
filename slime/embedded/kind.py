"""The record of the embedded engine."""

from __future__ import annotations

from slime import deadlines
from slime.embedded import command as embedded
from slime.engines.kinds import EngineKind, named_paths
from slime.engines.model_groups import served_models

KIND = EngineKind(
    embedded.embedded_command,
    embedded.embedded_footprint,
    deadlines.EMBEDDED_STARTUP,
    embedded.dtype_of,
    served_models=lambda config: served_models(config, embedded.GROUP_RULES),
    computed_here=True,
    image_words=("--enable-multimodal",),
    adapter_words=lambda adapters: ("--lora-paths", *named_paths(adapters)),
    if_out_of_memory=("a smaller --embedded-max-slots", "a smaller --rollout-max-context-len"),
    if_killed=("a smaller --embedded-max-slots, if the host ran out of memory",),
)
