"""The engines that generate for a run, one record each: everything that is asked of an engine for what it is.

To add an engine, whose server speaks the protocol of `slime.engines.api`:

1. ``slime/engines/<name>/command.py``: its command line (`EngineKind.command`) and what it holds (`EngineFootprint`).
2. Here: its row in `ENGINES`. The flag ``--rollout-engine`` takes it once its name is among the values of the field
   (`slime.config.groups_rollout`) and in `ENGINE_OPTIONS` (`slime.config.engine_flags`); a test compares them.

Placement, launch, health checks, the router, memory hand-over and the memory plan read the record and ask no further;
``tests/contracts`` shows whether its server keeps the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from slime.engines.embedded import command as embedded
from slime.engines.launch import EngineFootprint, EnginePlace, LaunchSpec, ServedModel, only_the_policy
from slime.engines.model_groups import served_models
from slime.engines.sglang import command as sglang
from slime.engines.sglang.versions import check_version, installed_version

if TYPE_CHECKING:
    from slime.config.config import Config


class Command(Protocol):
    """How to start one server of an engine, or one node's part of it; its first node answers the requests.

    Raises:
        UserError: the engine is not there, or cannot do what a flag asks for.
    """

    def __call__(self, config: Config, model_path: str, host: str, port: int, place: EnginePlace) -> LaunchSpec: ...


@dataclass(frozen=True)
class EngineKind:
    """One engine implementation.

    Attributes:
        command: starts a server.
        footprint: what a server holds on each of its GPUs.
        startup_seconds: until it answers, at most.
        health_path: answers 200 while an engine works whose memory is not released. ``/health``, which the router asks,
            must answer at any time.
        served_models: which models a run's engines serve, on which groups of GPUs.
        check_flags: refuses what an engine could not do for this run; looks at flags and environment variables only.
        check_installed: refuses an environment that cannot start it.
        weights_dtype: of the policy's weights, in its own words.
        computed_here: its model can be computed in another process of this system, part by part (`slime align`), and
            takes the trainer's library for quantised weights. What pushes bring to others of such weights is checked
            before they start (`slime.weights.quantised_launch`).
        reads_generation_config: sampling settings that a request leaves out are those of generation_config.json.
        tool_call_words: of its command line, for calls of tools in a format that SGLang calls so ("qwen25").
        releases_without_gpu: it has memory to give to the trainer on hosts without GPUs, too.
        trainer_environment: what trainer ranks need in their environment to send it weights, where that does not say
            otherwise.
        if_out_of_memory, if_killed: what helps a server that ran out of its GPU's memory, and one that ended without a
            word, whose host may have run out of memory; each names its flag.
        memory_fraction: the flag of its share of a GPU's memory; "" where it has none.
        to_find_the_cause: of any death.
    """

    command: Command
    footprint: Callable[[Config], EngineFootprint]
    startup_seconds: float
    weights_dtype: Callable[[Config], str]
    health_path: str = "/health"
    served_models: Callable[[Config], list[ServedModel]] = only_the_policy
    check_flags: Callable[[Config], None] = lambda config: None
    check_installed: Callable[[], object] = lambda: None
    computed_here: bool = False
    reads_generation_config: bool = False
    tool_call_words: Callable[[str], tuple[str, ...]] = lambda parser: ()
    releases_without_gpu: bool = False
    trainer_environment: Mapping[str, str] = field(default_factory=dict)
    if_out_of_memory: tuple[str, ...] = ()
    if_killed: tuple[str, ...] = ()
    memory_fraction: str = ""
    to_find_the_cause: tuple[str, ...] = ()

    def remedies(self, exception: str) -> tuple[str, ...]:
        """What to try after a server died, whose log ends with ``exception``; "": with none."""
        if "out of memory" in exception.lower():
            return (*self.if_out_of_memory, *self.to_find_the_cause)
        return self.to_find_the_cause if exception else (*self.if_killed, *self.to_find_the_cause)


#: By the name of ``--rollout-engine``.
ENGINES: dict[str, EngineKind] = {
    "embedded": EngineKind(
        embedded.embedded_command,
        embedded.embedded_footprint,
        embedded.STARTUP_SECONDS,
        embedded.dtype_of,
        served_models=lambda config: served_models(config, embedded.GROUP_RULES),
        computed_here=True,
        if_out_of_memory=("a smaller --embedded-max-slots", "a smaller --rollout-max-context-len"),
        if_killed=("a smaller --embedded-max-slots, if the host ran out of memory",),
    ),
    "sglang": EngineKind(
        sglang.sglang_command,
        sglang.sglang_footprint,
        sglang.STARTUP_SECONDS,
        sglang.dtype_of,
        health_path=sglang.HEALTH_PATH,
        served_models=lambda config: served_models(config, sglang.GROUP_RULES),
        check_flags=sglang.check_sglang,
        check_installed=lambda: check_version(installed_version()),
        reads_generation_config=True,
        tool_call_words=lambda parser: ("--tool-call-parser", parser),
        releases_without_gpu=True,
        # as SGLang sets it for its processes: NCCL cannot join two that map memory in different ways
        trainer_environment={"NCCL_CUMEM_ENABLE": "0"},
        if_out_of_memory=(
            "a lower --sglang-mem-fraction-static",
            "a smaller --sglang-server-concurrency",
            "a smaller --sglang-cuda-graph-max-bs",
            "a smaller --rollout-batch-size",
        ),
        if_killed=("a higher --sglang-mem-fraction-static", "a smaller --rollout-batch-size"),
        memory_fraction="sglang_mem_fraction_static",
        to_find_the_cause=("--sglang-disable-cuda-graph, to find the cause",),
    ),
}


def engine_of(config: Config) -> EngineKind:
    """The engine of a resolved configuration."""
    return ENGINES[config.engine.rollout_engine]


def engine_named(flags: Mapping[str, Any]) -> EngineKind:
    """The engine of a run folder's flags by name, of which the older may lack the engine's: SGLang."""
    return ENGINES.get(str(flags.get("rollout_engine")), ENGINES["sglang"])
