"""Records that describe the servers of any engine.

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


#: Versions of a run's adapter that an engine holds at once: running requests end with the older.
RESIDENT_ADAPTERS = 2


@dataclass(frozen=True)
class LaunchSpec:
    """How to start one server process, and how to tell that it is ready.

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
        number: the engine's number in the run, from which its seed follows.
        gpus: ids of the GPUs on this node, as CUDA_VISIBLE_DEVICES spells them; () leaves the
            environment alone.
        num_gpus: number of GPUs of the whole engine, over all its nodes.
        nccl_port: reserved for the engine's own process group; None lets the engine choose.
        num_nodes, node_rank: of a multi-node engine.
        dist_init_addr: host:port on its first node; required for a multi-node engine.
        overrides: engine options of the server group (--sglang-config), which override the command
            line.
        model_path: the directory of a model other than the policy, which keeps its weights.
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


#: The first engine, on one GPU from the environment.
ONE_GPU = EnginePlace()


@dataclass(frozen=True)
class ServerGroup:
    """Servers with the same settings.

    Attributes:
        worker_type: "regular", "prefill", "decode", or "placeholder" (GPUs left alone).
        num_gpus: GPUs of the whole group.
        num_gpus_per_engine: GPUs of each server.
        overrides: engine options (names with underscores) that override the command line.
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
    """One model's servers, behind their own router.

    Attributes:
        path: its Hugging Face directory.
        is_policy: it generates rollouts and gets weight pushes. Exactly one model of a run is the
            policy; the others keep their weights.
    """

    name: str
    path: str
    is_policy: bool
    groups: tuple[ServerGroup, ...]


def group_options(
    given: Mapping[str, Any], overrides: Mapping[str, Any], *, is_policy: bool
) -> dict[str, Any]:
    """Return a server group's engine options by name: those of the command line, without its draft
    for another model than the policy, and the group's own.

    Args:
        given: options of the command line (names with underscores).

    Example:
        >>> group_options({"speculative_algorithm": "EAGLE", "dtype": "auto"}, {"dtype": "half"},
        ...     is_policy=False)
        {'dtype': 'half'}
    """
    inherited = {
        name: value
        for name, value in given.items()
        if is_policy or not name.startswith("speculative_")
    }
    return {**inherited, **overrides}


def only_the_policy(config: Config) -> list[ServedModel]:
    """Return the policy's servers on all GPUs of the rollout; [] without such GPUs. All are
    regular, or with ``--prefill-num-servers`` that many prefill and the others decode."""
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
        vocabulary_unit: the vocabulary is padded to a multiple of this.
        keeps_latents: with latent attention, the cache holds the latents instead of keys and
            values.
        sequences: number of requests for which the cache is sized; None: it uses the memory that
            ``fraction`` leaves.
        fraction: share of the GPU's memory for weights and KV cache together; None: the engine
            chooses.
        automatic_fraction: the approximate fraction that it then chooses, given the bytes of the
            device.
        fraction_option: the option that sets the fraction.
        adapters_at_once: number of adapters for which memory is reserved, if the run has adapters.
        dequantises: it holds both quantised weights and their dequantised values.
        draft: bytes of the weights of a draft model on one rank.
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
    draft: float = 0.0
    state_copies: int = 0
