"""The engines that can generate for a run: one record each, with everything that depends on which
engine it is.

To add an engine, whose server speaks the protocol of `slime.engines.api`, touch four files:

1. A new package's ``kind.py``: the command line (`EngineKind.command`), what a server holds
   (`EngineFootprint`), and the record ``KIND``.
2. This file: its row in `ENGINES`.
3. `slime.config.groups_rollout`: its name among the values of ``--rollout-engine``.
4. `slime.config.engine_flags`: its row in `ENGINE_OPTIONS`; a test compares the three.

Its server says in ``/server_info`` how weights reach it (`slime.engines.wire.abilities`).
``tests/contracts`` shows whether it keeps the protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.engines.launch import (
    EngineFootprint,
    EnginePlace,
    LaunchSpec,
    ServedModel,
    only_the_policy,
)

if TYPE_CHECKING:
    from slime.config.config import Config
    from slime.models.spec import ModelSpec


class ServerCommand(Protocol):
    """How to start one server of an engine, or one node's part of it; its first node answers the
    requests.

    Raises:
        UserError: the engine is not there, or cannot do what a flag asks for.
    """

    def __call__(
        self, config: Config, model_path: str, host: str, port: int, place: EnginePlace
    ) -> LaunchSpec: ...


@dataclass(frozen=True)
class EngineKind:
    """One engine implementation.

    Attributes:
        command: starts a server.
        footprint: what a server holds on each of its GPUs.
        startup_seconds: until it answers, at most.
        health_path: answers 200 while an engine works whose memory is not released. ``/health``,
            which the router asks, must answer at any time.
        served_models: which models a run's engines serve, on which groups of GPUs.
        check_flags: refuses what an engine could not do for this run; looks at flags and
            environment variables only.
        check_model: refuses a model, by its spec and config.json, that the engine is known to
            compute otherwise than the trainer, or that pushes cannot reach in it.
        check_transposed_experts: refuses a directory whose stacks of experts are transposed
            against published ones.
        check_installed: refuses an environment that cannot start it.
        weights_dtype: the dtype of the policy's weights, in the engine's words.
        computed_here: its model can be computed in another process of this system, part by part
            (`slime align`), and takes the trainer's library for quantised weights. What pushes
            bring to others of such weights is checked before they start
            (`slime.weights.quantised_launch`).
        reads_generation_config: sampling settings that a request leaves out are those of
            generation_config.json.
        tool_call_words: words of its command line that make it read calls of tools, by SGLang's
            name of their format ("qwen25").
        adapter_words: words of its command line for adapters that it serves from the start, by
            name → PEFT directory.
        image_words: words of its command line for a model that sees images, where the engine does
            not find that out itself.
        releases_without_gpu: it has memory to give to the trainer on hosts without GPUs, too.
        trainer_environment: what trainer ranks need in their environment to send it weights, where
            that does not say otherwise.
        if_out_of_memory, if_killed: remedies, each with its flag, for a server that ran out of its
            GPU's memory, and for one that ended without a message, perhaps because its host ran
            out of memory.
        memory_fraction: the flag of its share of a GPU's memory; "" where it has none.
        largest_graph: the largest batch that its flags allow a CUDA graph for; None where they set
            no limit.
        to_find_the_cause: remedies that help to find the cause of any death.
    """

    command: ServerCommand
    footprint: Callable[[Config], EngineFootprint]
    startup_seconds: float
    weights_dtype: Callable[[Config], str]
    health_path: str = "/health"
    served_models: Callable[[Config], list[ServedModel]] = only_the_policy
    check_flags: Callable[[Config], None] = lambda config: None
    check_model: Callable[[ModelSpec, Mapping[str, Any]], None] = lambda spec, config: None
    check_transposed_experts: Callable[[Path], None] = lambda folder: None
    check_installed: Callable[[], object] = lambda: None
    computed_here: bool = False
    reads_generation_config: bool = False
    tool_call_words: Callable[[str], tuple[str, ...]] = lambda parser: ()
    adapter_words: Callable[[Mapping[str, Path]], tuple[str, ...]] = lambda adapters: ()
    image_words: tuple[str, ...] = ()
    releases_without_gpu: bool = False
    trainer_environment: Mapping[str, str] = field(default_factory=dict)
    if_out_of_memory: tuple[str, ...] = ()
    if_killed: tuple[str, ...] = ()
    memory_fraction: str = ""
    largest_graph: Callable[[Mapping[str, Any]], int | None] = lambda flags: None
    to_find_the_cause: tuple[str, ...] = ()

    def remedies(self, exception: str) -> tuple[str, ...]:
        """Return the remedies for a server that died, whose log ends with ``exception`` ("": with
        none)."""
        if "out of memory" in exception.lower():
            return (*self.if_out_of_memory, *self.to_find_the_cause)
        return self.to_find_the_cause if exception else (*self.if_killed, *self.to_find_the_cause)


def named_paths(adapters: Mapping[str, Path]) -> list[str]:
    """Return NAME=PATH of each adapter, as engines have them on their command lines."""
    return [f"{name}={path}" for name, path in adapters.items()]


#: Name of ``--rollout-engine`` → the module whose ``KIND`` is its record, imported when a run uses
#: it.
ENGINES = {"embedded": "slime.embedded.kind", "sglang": "slime.engines.sglang.kind"}


def engine_kind(name: str) -> EngineKind:
    """Return the record of an engine by its name in `ENGINES`."""
    kind: EngineKind = importlib.import_module(ENGINES[name]).KIND
    return kind


def engine_of(config: Config) -> EngineKind:
    """Return the engine of a resolved configuration."""
    return engine_kind(config.engine.rollout_engine)


def engine_named(flags: Mapping[str, Any]) -> EngineKind:
    """Return the engine of a run folder's flags; SGLang where an old folder does not say."""
    name = str(flags.get("rollout_engine"))
    return engine_kind(name if name in ENGINES else "sglang")
