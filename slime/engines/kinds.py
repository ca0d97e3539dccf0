"""The engines that can generate for a run: one record each, with everything that differs between
engines.

To add an engine, whose server speaks the protocol of `slime.engines.api`, touch three files:

1. A new package's ``kind.py``: the command line (`EngineKind.command`), what a server holds
   (`EngineFootprint`), and the record ``KIND``.
2. `slime.config.engine_flags`: its row in `ENGINE_OPTIONS`, which names that module.
3. `slime.config.groups_rollout`: its name among the values of ``--rollout-engine``.

Its server reports in ``/server_info`` how it receives weights (`slime.engines.wire.abilities`).
``tests/contracts`` tests whether it follows the protocol.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.config.engine_flags import ENGINE_OPTIONS
from slime.engines.launch import (
    EngineFootprint,
    EnginePlace,
    LaunchSpec,
    ServedModel,
    only_the_policy,
)

if TYPE_CHECKING:
    from slime.config.config import Config
    from slime.models.draft_model import DraftModel
    from slime.models.spec import ModelSpec


class ServerCommand(Protocol):
    """Builds the command of one engine server, or of one node's part of it; the first node answers
    requests.

    Raises:
        UserError: the engine is not installed, or does not support a flag.
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
        startup_seconds: at most, until it answers.
        health_path: answers 200 while an engine works that holds its memory. ``/health``, which the
            router calls, must answer at any time.
        served_models: the models that a run's engines serve, and their groups of GPUs.
        check_flags: refuses unsupported flags; reads only flags and environment variables.
        check_model: refuses a model, by its spec and config.json, that the engine is known to
            compute differently from the trainer, or that cannot get pushes there.
        check_transposed_experts: refuses a directory with stacks of experts that are transposed
            relative to published ones.
        draft_model: the model that drafts for the policy (speculative decoding), if it has
            weights.
        check_installed: refuses an environment that cannot start it.
        weights_dtype: the dtype of the policy's weights, by the engine's name.
        computed_here: other processes of this system can compute its model part by part (`slime
            align`), and it uses the trainer's library for quantised weights. For other engines,
            pushes of quantised weights are checked before the launch
            (`slime.weights.quantised_launch`).
        reads_generation_config: generation_config.json gives sampling settings that a request
            leaves out.
        tool_call_words: command line options that make it parse tool calls, by SGLang's name of
            their format ("qwen25").
        adapter_words: command line options for adapters that it serves from the start, by name →
            PEFT directory.
        image_words: command line options for a model that reads images, if the engine does not
            detect this itself.
        releases_without_gpu: it can release memory for the trainer also on hosts without GPUs.
        trainer_environment: defaults of environment variables that trainer ranks need to send it
            weights.
        if_out_of_memory, if_killed: remedies, each with its flag, for a server that ran out of its
            GPU's memory, and for one that ended without a message, perhaps because its host ran
            out of memory.
        memory_fraction: the flag of its share of a GPU's memory; "" if there is none.
        largest_graph: the largest batch that its flags allow a CUDA graph for; None if they set no
            limit.
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
    draft_model: Callable[[Config], DraftModel | None] = lambda config: None
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
        """Return the remedies for a server that died; its log ends with ``exception`` ("":
        none)."""
        if "out of memory" in exception.lower():
            return (*self.if_out_of_memory, *self.to_find_the_cause)
        return self.to_find_the_cause if exception else (*self.if_killed, *self.to_find_the_cause)


def named_paths(adapters: Mapping[str, Path]) -> list[str]:
    """Return NAME=PATH of each adapter, as on engines' command lines."""
    return [f"{name}={path}" for name, path in adapters.items()]


def engine_kind(name: str) -> EngineKind:
    """Return the record of an engine by its name in `ENGINE_OPTIONS`."""
    return importlib.import_module(ENGINE_OPTIONS[name].kind).KIND


def engine_of(config: Config) -> EngineKind:
    """Return the engine of a resolved configuration."""
    return engine_kind(config.engine.rollout_engine)


def engine_named(flags: Mapping[str, Any]) -> EngineKind:
    """Return the engine of a run folder's flags; SGLang if an old folder does not name it."""
    name = str(flags.get("rollout_engine"))
    return engine_kind(name if name in ENGINE_OPTIONS else "sglang")
