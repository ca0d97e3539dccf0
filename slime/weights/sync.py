"""Weight sync: the trainer's weights become the engines', version by version, and a receipt proves it.

    push():  pause ─► transfer in flat buckets ─► flush caches ─► compare fingerprints ─► continue      version + 1

Collective over all trainer ranks: each takes part in gathering, rank 0 talks to the engines, and every rank gets the
same receipt or raises the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slime.config import Config
from slime.errors import UserError
from slime.rollout.engines.api import EngineError
from slime.weights.buckets import dtype_of
from slime.weights.convert.spec import HfConfig, read_hf_config
from slime.weights.disk import DiskTransport
from slime.weights.distributed import DistributedTransport, own_address
from slime.weights.engine_check import EngineCheck, SliceCheck, WholeTensorCheck
from slime.weights.engine_fleet import EngineFleet, is_local
from slime.weights.hf_io import HfExporter
from slime.weights.ipc import IpcTransport
from slime.weights.receipt import Receipt, Sampler, WeightMismatch
from slime.weights.shared_memory_transport import SharedMemoryTransport
from slime.weights.transport import EngineSlots, NamedTensors, Transport, deadline_for

logger = logging.getLogger(__name__)

_CONTROL_SECONDS = 120.0  # pausing waits for the forward pass under way, nothing longer


class WeightSync:
    """One trainer rank's side.

    Args:
        model_chunks: this rank's model.
        hf_config: what the model was built from.
        rank, world_size: of the trainer.
        start_version: version of the last push, when a run is resumed; the engines start with the weights of
            ``--hf-checkpoint``, which are version 0.
    """

    def __init__(
        self,
        config: Config,
        model_chunks: Sequence[nn.Module],
        hf_config: HfConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        start_version: int = 0,
    ) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        self.version = start_version
        self._hf_config = hf_config
        self._exporter = HfExporter(model_chunks, hf_config, model_name=config.checkpoint.model_name)
        self._sampler = Sampler()
        self._fleet: EngineFleet | None = None
        self._transport: Transport | None = None
        self._check: EngineCheck | None = None
        self._route: Route | None = None
        self._gloo: dist.ProcessGroup | None = None
        self._num_pushes = 0
        self._last_seconds = 0.0

    def connect(self, engines: Sequence[str | EngineSlots], *, on_this_node: bool = True) -> None:
        """Reach the engines and set the way of transfer up. Collective; call again when the engines change.

        Args:
            engines: base URLs, or with them the slots that the engines stand on (needed for ``--colocate`` with SGLang
                and for engines of several GPUs).
            on_this_node: the engines may be on the cluster node of rank 0; false when it is known that they are not,
                though their addresses look like it (containers on one host's network, rehearsals of a cluster).
        Raises:
            UserError: an engine cannot be reached, or the wanted transport is not possible.
        """
        self.close()
        found = [EngineSlots(engine, ()) if isinstance(engine, str) else engine for engine in engines]
        with self._shared_outcome("connecting trainer and engines"):
            if self.rank == 0:
                self._reach(found, on_this_node)
        route = self._route = self._from_rank_0(self._route)
        shapes = self._shapes() if route.asks_ranks else {}  # collective, hence outside of the block that follows
        gloo = self._gloo_group() if route.kind == "ipc" else None
        with self._shared_outcome("connecting trainer and engines"):
            if self.rank == 0:
                self._connect(found, shapes, gloo)
            elif route.kind == "ipc":
                size = self.config.sync.update_weight_buffer_size
                self._transport = IpcTransport(None, found, gloo, size, route.dtype)

    def push(self) -> Receipt:
        """Bring the current weights to every engine as version ``self.version + 1``. Collective.

        Raises:
            UserError: a phase failed or passed its deadline; says which, who waited for whom, and that the engines
                stay paused if they hold a mix of old and new weights. The version is not advanced; a new `push`
                sends everything again.
            WeightMismatch: an engine does not hold what was sent; names tensors.
        """
        tensors = self._exporter.tensors()
        receipt: list[Any] = [None]
        with self._shared_outcome(f"pushing weights version {self.version + 1}"):
            try:
                if self.rank == 0:
                    receipt[0] = self._push(tensors, self.version + 1)
                elif isinstance(self._transport, IpcTransport):
                    self._transport.follow(tensors)
            finally:
                if self.world_size > 1:
                    for _ in tensors:  # the other ranks count on rank 0 in every gather, also after a failure
                        pass
        if self.world_size > 1:
            dist.broadcast_object_list(receipt, src=0)
        self.version += 1
        self._num_pushes += 1
        logger.info("%s", receipt[0])
        return receipt[0]

    def close(self) -> None:
        """Give up shared memory, groups and connections."""
        if self._transport is not None:
            self._transport.close()
        if self._check is not None:
            self._check.close()
        if self._fleet is not None:
            self._fleet.close()
        self._transport = self._fleet = self._check = None

    def _from_rank_0(self, value: Any) -> Any:
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _gloo_group(self) -> dist.ProcessGroup | None:
        """All trainer ranks on CPU: what is exchanged there are words, and NCCL would need the GPU for them."""
        if self.world_size == 1:
            return None
        if self._gloo is None:
            self._gloo = dist.new_group(backend="gloo")
        return self._gloo

    def _shapes(self) -> dict[str, list[int]]:
        """Of everything that a push sends; one gathering of all weights, which also sets the communicators up."""
        return {name: list(tensor.shape) for name, tensor in self._exporter.tensors()}

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _reach(self, engines: Sequence[EngineSlots], on_this_node: bool) -> None:
        self._fleet = EngineFleet([engine.url for engine in engines])
        with _naming_engine():
            infos = dict(zip(self._fleet.urls, self._fleet.get("/server_info", 30), strict=True))
        embedded = all(str(info.get("version")).startswith("slime-embedded") for info in infos.values())
        local = on_this_node and all(is_local(url) for url in self._fleet.urls)
        dtype = _engine_dtype(infos, self._hf_config)
        self._route = Route(choose_route(self.config, embedded=embedded, local=local), dtype, asks_ranks=not embedded)

    def _connect(
        self, engines: Sequence[EngineSlots], shapes: dict[str, list[int]], gloo: dist.ProcessGroup | None
    ) -> None:
        assert self._fleet is not None and self._route is not None
        with _naming_engine():
            self._transport = _open_transport(self.config, self._route, self._fleet, engines, gloo)
            if self._route.asks_ranks:
                slices = SliceCheck(self._fleet, engines, own_address(self._fleet.urls), shapes)
                if slices.unknown:
                    some = ", ".join(slices.unknown[:4])
                    logger.warning("%d tensors are not compared after pushes: %s", len(slices.unknown), some)
                self._check = slices
            else:
                self._check = WholeTensorCheck(self._fleet)
        self._sampler = Sampler(digest=self._check.digest)
        logger.info("weights go to %d engine(s) by %s", len(engines), self._transport.name)

    def _push(self, tensors: NamedTensors, version: int) -> Receipt:
        assert self._fleet is not None and self._transport is not None, "push before connect"
        fleet, seconds = self._fleet, dict[str, float]()
        verify_all = self.config.debug.check_weight_update_equal
        begin = time.perf_counter()
        with self._phase("pause", version, seconds):
            self._pause(fleet)
        if verify_all and self._num_pushes == 0:
            # what the push does not bring cannot pass for what it should have brought
            with self._phase("reset", version, seconds):
                fleet.post("/weights_checker", {"action": "reset_tensors"}, _CONTROL_SECONDS)
        self._sampler.begin(self._last_seconds, verify_all)
        with self._phase("transfer", version, seconds):
            sent = self._transport.send(tensors, version, self._sampler.observe)
        with self._phase("flush", version, seconds):
            fleet.flush_cache(_CONTROL_SECONDS)
        with self._phase("check", version, seconds):
            self._compare(version, sent.nbytes, verify_all)
        with self._phase("continue", version, seconds):
            fleet.post("/continue_generation", {}, _CONTROL_SECONDS)
        self._sampler.end()
        seconds["total"] = self._last_seconds = time.perf_counter() - begin
        checked = tuple(self._sampler.fingerprints)
        return Receipt(version, sent.num_tensors, sent.nbytes, seconds, self._transport.name, checked, verify_all)

    def _pause(self, fleet: EngineFleet) -> None:
        """Pause all, or leave none paused."""
        try:
            fleet.post("/pause_generation", {"mode": "abort"}, _CONTROL_SECONDS)
        except EngineError:
            try:
                fleet.post("/continue_generation", {}, 10)
            except EngineError:
                logger.warning("not every engine could be continued after a failed pause", exc_info=True)
            raise

    def _compare(self, version: int, nbytes: int, verify_all: bool) -> None:
        assert self._check is not None
        sampler = self._sampler
        unsent = sorted(set(self._exporter.names()) - set(sampler.names))
        if unsent:
            raise WeightMismatch(version, [f"{name} was not sent" for name in unsent])
        complete = sampler.names if verify_all else None
        wrong = self._check.wrong(sampler.fingerprints, complete, deadline_for(nbytes))
        if wrong:
            raise WeightMismatch(version, wrong)

    @contextmanager
    def _phase(self, name: str, version: int, seconds: dict[str, float]) -> Iterator[None]:
        """Time a phase and turn an engine's failure into a message with the way out."""
        started = time.perf_counter()
        try:
            yield
        except EngineError as error:
            waited = time.perf_counter() - started
            state = {
                "pause": "no engine was changed; they go on with the weights they have",
                "continue": "the engines have the new weights; some may still be paused",
            }.get(name, "the engines stay paused, because they may hold a mix of old and new weights")
            raise UserError(
                f"weight update to version {version} failed in the phase '{name}' after {waited:.1f} s: {error}",
                why=f"trainer rank 0 waited for {error.url}; {state}",
                fix=_REMEDIES,
                check_id="weight-sync-timeout",
            ) from error
        seconds[name] = time.perf_counter() - started

    @contextmanager
    def _shared_outcome(self, what: str) -> Iterator[None]:
        """Every rank leaves the block with the same outcome: rank 0's error is raised on all."""
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if self.world_size > 1:
            said = [str(failure) if failure is not None else None]
            dist.broadcast_object_list(said, src=0)
            if failure is None and said[0] is not None:
                raise UserError(f"{what} failed on trainer rank 0", why=said[0])
        if failure is not None:
            raise failure


_REMEDIES = (
    "look at the engine's log first. If it is alive but slow: push less often (--update-weights-interval 5), share GPUs"
    " (--colocate, no network), check the network (ibstat; NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=0),"
    " give it longer (NCCL_TIMEOUT=1800), or go through a directory (--update-weight-transport disk)"
)


@dataclass(frozen=True)
class Route:
    """How weights travel in a run; known to every rank.

    Attributes:
        kind: see `choose_route`.
        dtype: of the engines' floating-point weights.
        asks_ranks: the engines' ranks are asked for their slices (SGLang), not the engines for whole tensors.
    """

    kind: str
    dtype: torch.dtype
    asks_ranks: bool


def choose_route(config: Config, *, embedded: bool, local: bool) -> str:
    """Which way the weights go.

    ==============  ===============================================  =====================================
    "disk"          ``--update-weight-transport disk``               a Hugging Face directory
    "shm"           embedded engines on this host, and either no     shared memory (between CPUs it is the
                    GPU or ``--colocate``                            fastest; NCCL cannot join two
                                                                     processes of one GPU)
    "ipc"           SGLang with ``--colocate``                       handles of the trainer's buffers
    "broadcast"     anything else                                    NCCL between GPUs, gloo between CPUs
    ==============  ===============================================  =====================================
    """
    if config.sync.update_weight_transport == "disk":
        return "disk"
    if embedded and local and (not torch.cuda.is_available() or config.cluster.colocate):
        return "shm"
    return "ipc" if config.cluster.colocate and not embedded else "broadcast"


def _open_transport(
    config: Config, route: Route, fleet: EngineFleet, engines: Sequence[EngineSlots], gloo: dist.ProcessGroup | None
) -> Transport:
    """Raises:
    UserError: the disk transport has no directory; memory cannot be shared with an engine.
    EngineError: an engine did not join the broadcast group.
    """
    flags, dtype = config.sync, route.dtype
    size = flags.update_weight_buffer_size
    if route.kind == "disk":
        if flags.update_weight_disk_dir is None or config.checkpoint.hf_checkpoint is None:
            raise UserError(
                "--update-weight-transport disk has no directory",
                fix="pass --update-weight-disk-dir with one that trainer and engines both see, and --hf-checkpoint",
            )
        keep, assets = flags.update_weight_disk_keep_files, config.checkpoint.hf_checkpoint
        return DiskTransport(fleet, flags.update_weight_disk_dir, dtype, assets, keep)
    if route.kind == "shm":
        return SharedMemoryTransport(fleet, size, dtype)
    if route.kind == "ipc":
        return IpcTransport(fleet, engines, gloo, size, dtype)
    timeout = 60.0 * config.cluster.distributed_timeout_minutes
    ranks = [max(1, len(engine.slots)) if route.asks_ranks else 1 for engine in engines]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return DistributedTransport(fleet, size, dtype, backend, ranks, timeout)


@contextmanager
def _naming_engine() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise UserError(f"engine {error.url} cannot be reached for weight updates", str(error), _REMEDIES) from error


def _engine_dtype(infos: Mapping[str, Mapping[str, Any]], hf_config: HfConfig) -> torch.dtype:
    """The dtype that all engines hold their weights in; "auto" means the model config's.

    Args:
        infos: engine URL → its ``/server_info``.
    Raises:
        UserError: engines differ, or do not say.
    """
    named = {url: info.get("dtype") for url, info in infos.items()}
    if len(set(named.values())) != 1:
        raise UserError("the engines hold their weights in different dtypes", why=str(named), fix="start them alike")
    [name] = set(named.values())
    if name == "auto":
        config = read_hf_config(hf_config)
        said = str(config.get("dtype") or config.get("torch_dtype"))
        name = said if "16" in said else f"auto, and config.json says {said}"  # engines make float16 of float32
    try:
        return dtype_of(str(name))
    except ValueError as error:
        raise UserError(
            f"engine {next(iter(named))} does not say which dtype its weights have",
            why=f"/server_info gives dtype {name}",
            fix="pass an explicit --sglang-dtype (bfloat16, float32)",
        ) from error
