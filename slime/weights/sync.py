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
from slime.weights.distributed import DistributedTransport
from slime.weights.engine_fleet import EngineFleet, is_local
from slime.weights.hf_io import HfExporter
from slime.weights.receipt import Receipt, Sampler, WeightMismatch, compare
from slime.weights.shared_memory_transport import SharedMemoryTransport
from slime.weights.transport import NamedTensors, Transport, deadline_for

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
        self._num_pushes = 0
        self._last_seconds = 0.0

    def connect(self, engine_urls: Sequence[str], *, on_this_node: bool = True) -> None:
        """Reach the engines and set the way of transfer up. Collective; call again when the engines change.

        Args:
            on_this_node: the engines may be on the cluster node of rank 0; false when it is known that they are not,
                though their addresses look like it (containers on one host's network, rehearsals of a cluster).
        Raises:
            UserError: an engine cannot be reached, or the wanted transport is not possible.
        """
        self.close()
        with self._shared_outcome("connecting trainer and engines"):
            if self.rank == 0:
                self._connect(engine_urls, on_this_node)

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
        if self._fleet is not None:
            self._fleet.close()
        self._transport = self._fleet = None

    # -- rank 0 --------------------------------------------------------------------------------------------

    def _connect(self, engine_urls: Sequence[str], on_this_node: bool) -> None:
        self._fleet = EngineFleet(engine_urls)
        try:
            infos = dict(zip(self._fleet.urls, self._fleet.get("/server_info", 30), strict=True))
            embedded = all(str(info.get("version")).startswith("slime-embedded") for info in infos.values())
            dtype = _engine_dtype(infos, self._hf_config)
            shares = embedded and on_this_node and all(is_local(url) for url in self._fleet.urls)
            self._transport = choose_transport(self.config, self._fleet, dtype, shares)
        except EngineError as error:
            raise UserError(
                f"engine {error.url} cannot be reached for weight updates", str(error), _REMEDIES
            ) from error
        logger.info("weights go to %d engine(s) by %s", len(engine_urls), self._transport.name)

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
        assert self._fleet is not None
        sampler = self._sampler
        unsent = sorted(set(self._exporter.names()) - set(sampler.names))
        if unsent:
            raise WeightMismatch(version, [f"{name} was not sent" for name in unsent])
        body = {"action": "fingerprint", "names": None if verify_all else list(sampler.fingerprints)}
        answers = self._fleet.post("/weights_checker", body, deadline_for(nbytes))
        held = {url: answer["fingerprints"] for url, answer in zip(self._fleet.urls, answers, strict=True)}
        wrong = compare(sampler.fingerprints, held, sampler.names if verify_all else None)
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


def choose_transport(config: Config, fleet: EngineFleet, dtype: torch.dtype, shares: bool) -> Transport:
    """Which way the weights go.

    =========================================  =====================================================================
    ``--update-weight-transport disk``         a Hugging Face directory
    embedded engines on this host, and either  shared memory (NCCL cannot join two processes of one GPU, and between
    no GPU or ``--colocate``                   CPUs it is the fastest)
    anything else                              broadcast: NCCL between GPUs, gloo between CPUs
    =========================================  =====================================================================

    Args:
        shares: all engines are embedded ones on this host, which read shared memory; SGLang does not.
    Raises:
        UserError: the disk transport has no directory; SGLang shares the trainer's GPUs.
        EngineError: an engine did not join the broadcast group.
    """
    flags, on_gpu = config.sync, torch.cuda.is_available()
    if flags.update_weight_transport == "disk":
        if flags.update_weight_disk_dir is None or config.checkpoint.hf_checkpoint is None:
            raise UserError(
                "--update-weight-transport disk has no directory",
                fix="pass --update-weight-disk-dir with one that trainer and engines both see, and --hf-checkpoint",
            )
        keep, assets = flags.update_weight_disk_keep_files, config.checkpoint.hf_checkpoint
        return DiskTransport(fleet, flags.update_weight_disk_dir, dtype, assets, keep)
    if shares and (not on_gpu or config.cluster.colocate):
        return SharedMemoryTransport(fleet, flags.update_weight_buffer_size, dtype)
    if on_gpu and config.cluster.colocate:
        raise UserError(
            "weights cannot be pushed to SGLang engines on the trainer's own GPUs yet",
            why="that takes CUDA IPC, and NCCL refuses two processes on one GPU",
            fix="pass --update-weight-transport disk, or give the engines GPUs of their own (no --colocate)",
        )
    timeout = 60.0 * config.cluster.distributed_timeout_minutes
    ranks = config.cluster.rollout_num_gpus_per_engine
    backend = "nccl" if on_gpu else "gloo"
    return DistributedTransport(fleet, flags.update_weight_buffer_size, dtype, backend, ranks, timeout)


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
