"""Records that describe engines and their servers, whichever engine it is.

    ServedModel ─► ServerGroup ─► EnginePlace ─► LaunchSpec   `slime.cluster` starts and watches it
    EngineFootprint                                           `slime.memory` plans with it

Nothing in this file starts a process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.config.engine_flags import ENGINE_OPTIONS

if TYPE_CHECKING:
    from slime.config.config import Config


#: Versions of a run's adapter that an engine holds at once: requests under way end with the older.
RESIDENT_ADAPTERS = 2


@dataclass(frozen=True)
class LaunchSpec:
    """How to start one server process, and how to see that it is ready.

    Attributes:
        argv: command line, the interpreter first.
        env: variables set on top of the caller's environment.
        health_path: answers 200 as soon as the server can work.
        startup_timeout: seconds until then, at most.
        health_timeout: seconds that one answer may take.
        is_preloaded: a fork of the preloaded process may run it (`slime.processes.preloaded`).
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    startup_timeout: float = 600.0
    health_timeout: float = 5.0
    is_preloaded: bool = False


@dataclass(frozen=True)
class EnginePlace:
    """The place of one engine, or of one node's part of it.

    Attributes:
        number: of the engine in the run; its seed follows from it.
        gpus: ids of the GPUs on this node, as CUDA_VISIBLE_DEVICES spells them; () leaves the
            environment alone.
        num_gpus: of the whole engine, over all its nodes.
        nccl_port: reserved for the engine's own process group; None lets the engine choose.
        num_nodes, node_rank: of an engine that reaches over nodes.
        dist_init_addr: host:port on its first node; needed then.
        overrides: the engine's options of the server group (--sglang-config), over those of the
            command line.
        model_path: of a model other than the policy: it keeps its weights.
    """

    number: int = 0
    gpus: tuple[str, ...] = ()
    num_gpus: int = 1
    nccl_port: int | None = None
    num_nodes: int = 1
    node_rank: int = 0
    dist_init_addr: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    model_path: str | None = None


#: The first engine, on one GPU that the environment names.
ONE_GPU = EnginePlace()


@dataclass(frozen=True)
class ServerGroup:
    """Servers that are alike.

    Attributes:
        worker_type: "regular", "prefill", "decode", or "placeholder" (GPUs left alone).
        num_gpus: of the whole group.
        num_gpus_per_engine: of each of its servers.
        overrides: the engine's options (names with underscores) over those of the command line.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class ServedModel:
    """One model's servers, behind a router of their own.

    Attributes:
        path: of its Hugging Face directory.
        is_policy: rollouts ask it, and pushes go to it. One model of a run is; the others keep
            their weights.
    """

    name: str
    path: str
    is_policy: bool
    groups: tuple[ServerGroup, ...]


def only_the_policy(config: Config) -> list[ServedModel]:
    """Return the policy's servers on all GPUs of the rollout; no model where it has none. They are
    alike, or with ``--prefill-num-servers`` so many prefill and the others decode."""
    total = config.cluster.rollout_num_gpus
    per_engine = config.cluster.rollout_num_gpus_per_engine
    groups: tuple[ServerGroup, ...] = (ServerGroup("regular", total, per_engine),)
    if (
        config.engine.prefill_num_servers
        and ENGINE_OPTIONS[config.engine.rollout_engine].splits_prefill
    ):
        prefill = config.engine.prefill_num_servers * per_engine
        groups = (
            ServerGroup("prefill", prefill, per_engine),
            ServerGroup("decode", total - prefill, per_engine),
        )
    return (
        [ServedModel("policy", str(config.checkpoint.hf_checkpoint), True, groups)] if total else []
    )


@dataclass(frozen=True, kw_only=True)
class EngineFootprint:
    """How an engine holds a model.

    Attributes:
        tensor, pipeline: how the engine's GPUs divide the model.
        attention: ranks that divide the attention: fewer than ``tensor`` with data-parallel
            attention.
        element, kv_element: bytes of a weight and of an entry of the KV cache.
        vocabulary_unit: the vocabulary is padded to a multiple of it.
        keeps_latents: of latent attention the cache has the latents, not the keys and values made
            of them.
        sequences: requests that the cache is made for; None: it takes what ``fraction`` leaves.
        fraction: of the GPU's memory for weights and KV cache together; None: the engine chooses.
        automatic_fraction: roughly what it chooses then, by the bytes of the device.
        fraction_option: where users set the fraction.
        adapters_at_once: adapters that memory is reserved for, if the run has adapters.
        dequantises: it holds quantised weights and the plain ones that they stand for.
        state_copies: copies of a sequence's state that it keeps besides the live one, for gated
            delta nets.
    """

    tensor: int = 1
    pipeline: int = 1
    attention: int = 1
    element: int
    kv_element: float
    vocabulary_unit: int = 1
    keeps_latents: bool = False
    sequences: int | None = None
    fraction: float | None = None
    automatic_fraction: Callable[[float], float] = lambda nbytes: 0.0
    fraction_option: str = ""
    adapters_at_once: int = RESIDENT_ADAPTERS
    dequantises: bool = False
    state_copies: int = 0
