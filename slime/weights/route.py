"""Choose how a run's weights reach the engines, from its flags and from the engines' abilities.

find_route flags, engines' /server_info ─► Route on rank 0, which tells all ranks open_transport
Route ─► Transport on each rank that takes part
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime import deadlines
from slime.checkpoints.megatron_names import Placement
from slime.config.config import Config
from slime.engines.fleet import EngineFleet, is_local
from slime.engines.kinds import engine_of
from slime.engines.sglang.quantised_routes import QuantisedRoute, quantised_route
from slime.engines.wire.abilities import Abilities
from slime.engines.wire.buckets import Packing, Together, dtype_name, dtype_of
from slime.errors import UserError
from slime.models.quantised import Quantisation
from slime.models.spec import HfConfig, named_dtype, read_hf_config
from slime.weights.disk import DiskTransport
from slime.weights.distributed import DistributedTransport
from slime.weights.ipc import IpcTransport
from slime.weights.shared_memory_transport import SharedMemoryTransport
from slime.weights.transport import EngineSlots, Transport


@dataclass(frozen=True)
class Route:
    """How a run sends weights; known to every rank.

    Attributes:
        kind: see `choose_route`.
        dtype: of the engines' floating-point weights.
        asks_ranks: each rank of an engine reports its slices, instead of the engine whole tensors
            (`Abilities.check`).
        sources: the sending rank of each pipeline stage; only rank 0 if it gathers everything.
        in_runs: consecutive experts are sent as one tensor (`slime.engines.wire.expert_runs`).
        opens: engines make layers loadable before the transfer and process them after it, as SGLang
            needs for quantised weights (`slime.engines.sglang.quantised_routes`).
        in_sessions: see `Abilities.update_sessions`.
    """

    kind: str
    dtype: torch.dtype
    asks_ranks: bool
    sources: tuple[int, ...] = (0,)
    in_runs: bool = False
    opens: bool = False
    in_sessions: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": dtype_name(self.dtype)}

    @staticmethod
    def from_json(words: dict[str, Any]) -> Route:
        return Route(
            **words | {"dtype": dtype_of(words["dtype"]), "sources": tuple(words["sources"])}
        )


def find_route(
    config: Config, fleet: EngineFleet, hf_config: HfConfig, *, on_this_node: bool
) -> Route:
    """Read the engines' ``/server_info`` and choose a route.

    Args:
        on_this_node: see `WeightSync.connect`.
    Raises:
        EngineError: one does not answer.
        UserError: engines differ or cannot be pushed to (names them), or engines of a quantised
            model have another dtype than the flags say.
    """
    infos = dict(zip(fleet.urls, fleet.get("/server_info", deadlines.ROUTE_INFO), strict=True))
    check_experts(infos)
    abilities = {url: Abilities.read(info) for url, info in infos.items()}
    common = common_abilities(abilities)
    local = on_this_node and all(is_local(url) for url in fleet.urls)
    on_cpu = without_gpu(infos)
    kind = choose_route(config, common.transports, local=local, on_cpu=bool(on_cpu))
    if kind == "broadcast" and on_cpu and torch.cuda.is_available():
        raise UserError(
            f"weights cannot get to engine {on_cpu[0]}",
            why="it has no GPU, which NCCL needs; and it, or another one, is on another host than "
            "the trainer's rank 0, which shared memory does not reach",
            fix="pass --update-weight-transport disk and --update-weight-disk-dir with a "
            "directory that all see",
        )
    pipeline = Placement.current().pp_group if kind == "broadcast" else None
    # the ranks with rank 0's place in TP, DP and CP, of each stage
    sources = tuple(dist.get_process_group_ranks(pipeline)) if pipeline is not None else (0,)
    dtype = engine_dtype(infos, hf_config)
    quantisation = Quantisation.read(read_hf_config(hf_config))
    if quantisation is not None and dtype != (expected := flag_dtype(config, hf_config)):
        raise UserError(
            f"the engines quantise weights of {dtype_name(dtype)}, and the trainer those of "
            f"{dtype_name(expected)}",
            why="--fake-quantisation, --measure-quantisation and the canary go by flags, and would "
            "round to other numbers than a push",
            fix=f"start the engines with the dtype {dtype_name(expected)}, or set --sglang-dtype "
            "(--embedded-dtype) as theirs and leave it out of overrides of server groups",
        )
    quantised = routes_of(infos, hf_config, kind) if common.packs_quantised else None
    return Route(
        kind,
        dtype,
        asks_ranks=common.check == "slices",
        sources=sources,
        in_runs=takes_runs(kind, abilities.values(), quantised is not None),
        opens=quantised is not None and quantised.opens,
        in_sessions=common.update_sessions,
    )


def routes_of(
    infos: Mapping[str, Mapping[str, Any]], hf_config: HfConfig, kind: str
) -> QuantisedRoute | None:
    """Return how to push quantised weights to these SGLang engines; None for plain weights.

    Raises:
        UserError: no route is known for an engine with this transport and its arguments.
    """
    config = read_hf_config(hf_config)
    found = {url: quantised_route(config, info, kind) for url, info in infos.items()}
    route = next(iter(found.values()))
    if any(other != route for other in found.values()):
        versions = {url: info.get("version") for url, info in infos.items()}
        raise UserError(
            "the engines take quantised weights in different ways",
            why=str(versions),
            fix="start them alike",
        )
    return route


def open_transport(
    route: Route,
    config: Config,
    engines: Sequence[EngineSlots],
    fleet: EngineFleet | None,
    group: dist.ProcessGroup | None,
    stage: int | None,
    await_turn: Callable[[], None],
    together: Together,
) -> Transport:
    """Open this rank's part of the transport.

    Args:
        fleet: the engines; None on a rank that only follows.
        group: of all trainer ranks on CPU, for "ipc"; None for a single rank.
        stage: the pipeline stage that this rank sends for.
        await_turn: returns when this rank may send.
        together: tensors that engines must load in one call. A directory is one call.
    Raises:
        UserError: memory cannot be shared with an engine.
        EngineError: an engine did not join the broadcast group.
    """
    flags = config.sync
    packing = Packing(flags.update_weight_buffer_size, route.dtype, together)
    if route.kind == "ipc":
        return IpcTransport(fleet, engines, group, packing, route.in_runs)
    assert fleet is not None and stage is not None
    if route.kind == "disk":
        directory = flags.update_weight_disk_dir
        assets = config.checkpoint.hf_checkpoint
        assert directory is not None and assets is not None, "the checks of flags require both"
        keep = flags.update_weight_disk_keep_files
        return DiskTransport(fleet, Path(directory), route.dtype, Path(assets), keep)
    if route.kind == "shm":
        return SharedMemoryTransport(fleet, packing)
    await_turn()
    ranks = [engine.num_ranks if route.asks_ranks else 1 for engine in engines]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    timeout = 60.0 * config.cluster.distributed_timeout_minutes
    return DistributedTransport(
        fleet, packing, backend, ranks, timeout, stage=stage, await_turn=await_turn
    )


def common_abilities(abilities: Mapping[str, Abilities]) -> Abilities:
    """Return the abilities of all engines: a push treats them alike.

    Args:
        abilities: by engine URL; external engines may be of another kind than the flags say.
    Raises:
        UserError: engines are of different kinds, or cannot take part in a push.
    """
    (one, first), *others = abilities.items()
    for url, other in others:
        if other.engine != first.engine:
            raise UserError(
                f"engine {one} is {first.engine} and engine {url} is {other.engine}",
                why="weights get to the two in different ways, and what arrived is compared in "
                "different ways",
                fix="use engines of one kind",
            )
    sessions = [url for url, other in abilities.items() if other.update_sessions]
    if sessions and len(sessions) < len(abilities):
        raise UserError(
            f"engines load weights in different ways: {', '.join(sessions)} only in a session",
            why="SGLang needs one from 0.5.21 on, and has none before",
            fix="start engines of one version",
        )
    if sessions and (quantising := [url for url, one in abilities.items() if one.quantises]):
        raise UserError(
            f"weights cannot be pushed to engine {quantising[0]}, which quantises them by itself",
            why="not tried: SGLang processes all weights again at the end of a push from 0.5.21 "
            "on, those that it has quantised, too",
            fix="start it without --quantization, or with SGLang 0.5.16",
        )
    if not first.can_pause or not first.check:
        raise UserError(
            f"weights cannot be pushed to engine {one} ({first.engine})",
            why="it cannot pause its requests meanwhile, or cannot prove what it loaded",
            fix="use the embedded engine or SGLang",
        )
    return first


def without_gpu(infos: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the URLs of the engines that compute on the CPU."""
    return [url for url, info in infos.items() if info.get("device") == "cpu"]


def choose_route(
    config: Config, transports: Collection[str], *, local: bool, on_cpu: bool = False
) -> str:
    """Choose the kind of transport.

    "disk"       with ``--update-weight-transport disk``: a Hugging Face directory. Each value of
                 the flag except "nccl" names a kind
    "shm"        shared memory on this host, without a GPU, with ``--colocate`` or to engines on the
                 CPU: it is the fastest between CPUs, and NCCL cannot join two processes of one GPU
    "ipc"        with ``--colocate``: handles of the trainer's buffers
    "broadcast"  otherwise: NCCL between GPUs, gloo between CPUs

    Args:
        transports: `Abilities.transports` of the engines.
        local: trainer and engines share a host.
        on_cpu: an engine computes on the CPU.
    Raises:
        UserError: the kind that the flag names does not reach the engines.
    """
    named = config.sync.update_weight_transport
    if named != "nccl":
        if named not in transports:
            raise UserError(
                f"--update-weight-transport {named} does not reach the engines",
                why=f"they can receive weights by {', '.join(transports)}",
                fix="leave the flag out",
            )
        return named
    shares_host = not torch.cuda.is_available() or config.cluster.colocate or on_cpu
    if "shm" in transports and local and shares_host:
        return "shm"
    return "ipc" if "ipc" in transports and config.cluster.colocate else "broadcast"


def takes_runs(kind: str, abilities: Collection[Abilities], quantised: bool = False) -> bool:
    """Return whether all engines accept runs of experts: only with "ipc", whose load format can
    name slime's loader inside the engines.

    Args:
        quantised: weights are sent quantised, as the model stores them. Engines that quantise plain
            weights themselves accept no runs.
    """
    return kind == "ipc" and all(
        one.takes_expert_runs and (quantised or not one.quantises) for one in abilities
    )


def check_experts(infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Reject engines that hold experts in a layout that pushes cannot fill.

    Args:
        infos: engine URL → its ``/server_info``.
    Raises:
        UserError: an engine permutes experts only at its start (SGLang 0.5.16,
            ``process_weights_after_loading`` of unquantised experts), not after a push. It is
            SGLang's default on Blackwell GPUs.
    """
    for url, info in infos.items():
        backend = str(info.get("moe_runner_backend") or "")
        if backend.startswith("flashinfer_trtllm"):
            raise UserError(
                f"engine {url} cannot take experts: its moe_runner_backend is {backend}",
                why="SGLang permutes them for these kernels when it starts, and up to 0.5.20 not "
                "again after a push; later versions, which do, were not tried",
                fix="pass --sglang-moe-runner-backend triton",
            )


def flag_dtype(config: Config, hf_config: HfConfig) -> torch.dtype:
    """Return the dtype of the engines' weights according to the flags; "auto" is the model
    config's."""
    return engine_dtype(
        {"--sglang-dtype": {"dtype": engine_of(config).weights_dtype(config)}}, hf_config
    )


def engine_dtype(infos: Mapping[str, Mapping[str, Any]], hf_config: HfConfig) -> torch.dtype:
    """Return the dtype of all engines' weights; "auto" is the model config's.

    Args:
        infos: engine URL → its ``/server_info``.
    Raises:
        UserError: engines differ, or do not tell.
    """
    named = {url: info.get("dtype") for url, info in infos.items()}
    if len(set(named.values())) != 1:
        raise UserError(
            "the engines hold their weights in different dtypes",
            why=str(named),
            fix="start them alike",
        )
    [name] = set(named.values())
    if name == "auto":
        config = read_hf_config(hf_config)
        name = named_dtype(config)
        if "16" not in name:  # engines convert float32 to float16
            name = f"auto, and config.json says {name or 'nothing'}"
    try:
        return dtype_of(str(name))
    except ValueError as error:
        raise UserError(
            f"engine {next(iter(named))} does not say which dtype its weights have",
            why=f"/server_info gives dtype {name}",
            fix="pass an explicit --sglang-dtype (bfloat16, float32)",
        ) from error
