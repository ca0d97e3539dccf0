"""Push the trainer's adapters to the engines, version by version; the base model is never sent.

    sync = AdapterSync(config, model_chunks, hf_config, adapters, rank=rank, world_size=world_size)
    sync.connect(engines)                  # again whenever engines come or go
    receipt = sync.push(has_learned=True)

    first push after connect:  compare every weight of the base with the engines'
    push():  gather ─► check ─► load as policy-<version> ─► compare ─► update_weight_version

Running requests continue with their adapters; none is aborted. `connect` and pushes pause SGLang,
with its requests in place, while they query its tensors. `slime.engines.client` chooses the version
for each request; `slime.cluster.weight_push` unloads old ones.

All calls are collective over the trainer ranks: all gather, rank 0 sends to all engines, and every
rank returns the same receipt or raises the same error.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing import reductions

from slime import deadlines
from slime.checkpoints.quantised_reader import QuantisedReader
from slime.config.config import Config
from slime.engines.adapters import LOAD_ADAPTER, UNLOAD_ADAPTER, adapter_name
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet, is_local
from slime.engines.wire.abilities import Abilities
from slime.engines.wire.buckets import (
    TensorEntry,
    dtype_in,
    dtype_of,
    fingerprints,
    own_device,
    unpack,
)
from slime.errors import UserError
from slime.log import tell
from slime.models.adapters import AdapterConfig
from slime.models.parameters import Shape
from slime.models.spec import HfConfig
from slime.processes.pinned_memory import lock_pages
from slime.weights.adapter_checks import check_engine, check_names, check_sets, check_values
from slime.weights.adapter_layout import AdapterLayout, LargestValues
from slime.weights.distributed import own_address
from slime.weights.engine_check import SliceCheck, WholeTensorCheck
from slime.weights.ipc import Handle, Opened, storage_handle
from slime.weights.receipt import Receipt, WeightMismatch, compare
from slime.weights.route import Route, find_route
from slime.weights.source import ModelSource, exhaust
from slime.weights.sync import EngineSync, explain_engine_errors, register_engines
from slime.weights.transport import EngineSlots, NamedTensors, deadline_for

logger = logging.getLogger(__name__)


class AdapterSync(EngineSync):
    """Pushes of adapters.

    Args:
        model_chunks: this rank's model, with adapters in it.
        adapters: what is trained.
        options: see `EngineSync`.

    Attributes:
        layout: the tensors in each push.
    """

    def __init__(
        self,
        config: Config,
        model_chunks: Sequence[nn.Module],
        hf_config: HfConfig,
        adapters: AdapterConfig,
        **options: int,
    ) -> None:
        super().__init__(config, hf_config, **options)
        name = config.checkpoint.model_name
        self._base = ModelSource(model_chunks, hf_config, model_name=name)
        self._source = ModelSource(
            model_chunks, hf_config, model_name=name, adapters=adapters, in_runs=True
        )
        self.layout = AdapterLayout.of(self._source.parameters)
        check_sets(self.layout.sent, lone_queries=self.layout.lone_queries)
        self._complete: dict[str, Shape] = {}  # names and shapes that made up a whole adapter
        self._engines: list[EngineSlots] = []
        self._route: Route | None = None
        self._shares_memory = False
        self._is_base_compared = False
        self._by_rank: set[str] = set()  # URLs; see `Abilities.adapters_by_rank`
        self._packs_base = False  # engines pack quantised weights for their kernels
        self._previous: dict[str, str] = {}  # fingerprints of the last push; rank 0
        # Host memory for the next push, allocated in the background: that takes longer than filling
        # it.
        self._spare: Future[AdapterBuffer] | None = None
        self._background = ThreadPoolExecutor(1, "adapter-buffer")

    def connect(self, engines: Sequence[str | EngineSlots], *, on_this_node: bool = True) -> None:
        """Reach the engines. Collective; call again when the engines change.

        Args:
            engines, on_this_node: see `slime.weights.sync.WeightSync.connect`.
        Raises:
            UserError: an engine cannot be reached, or cannot serve these adapters.
        """
        self.close()
        self._engines = register_engines(engines)
        self._is_base_compared = False
        limit = 3 * deadlines.SYNC_CONTROL
        with self._ranks.round("connecting trainer and engines", limit):
            if self.rank == 0:
                with explain_engine_errors():
                    self._open(on_this_node)

    def push(self, *, has_learned: bool = False) -> Receipt:
        """Load the current adapters into every engine as version ``self.version + 1``. Collective.

        Args:
            has_learned: `slime.weights.adapter_checks.has_visibly_learned` since the last push: the
                adapters must then have changed.
        Raises:
            UserError: the adapters are invalid, the engines have another base, or a phase failed;
                the version stays, and engines continue with their adapters.
            WeightMismatch: an engine holds other tensors than were sent; names them.
        """
        if not self._is_base_compared:
            self._compare_base()
        version = self.version + 1
        tensors = self._source.tensors()
        limit = 6 * deadlines.SYNC_CONTROL + 3 * deadline_for(self._source.nbytes())
        with self._ranks.round(f"pushing adapter version {version}", limit) as pushed:
            try:
                if self.rank == 0:
                    pushed.value = self._push(tensors, version, has_learned).to_json()
            finally:
                exhaust(tensors)  # the other ranks need this one, even after a failure
        receipt = Receipt.from_json(pushed.value)
        self.version = version
        logger.info("%s", receipt)
        return receipt

    # -- rank 0 ------------------------------------------------------------------------------------

    def _open(self, on_this_node: bool) -> None:
        urls = [engine.url for engine in self._engines]
        fleet = self._fleet = EngineFleet(urls, self._patience)
        infos = fleet.get("/server_info", deadlines.ROUTE_INFO)
        abilities = dict(zip(fleet.urls, map(Abilities.read, infos), strict=True))
        for url, one in abilities.items():
            has_quantised_base = self._quantisation is not None
            check_engine(url, one, self.layout, has_quantised_base=has_quantised_base)
        self._by_rank = {url for url, one in abilities.items() if one.adapters_by_rank}
        self._route = find_route(self.config, fleet, self._hf_config, on_this_node=on_this_node)
        self._shares_memory = on_this_node and all(is_local(url) for url in fleet.urls)
        self._packs_base = self._route.asks_ranks and self._quantisation is not None
        self._spare = self._begin_buffer(self._route.dtype)
        if self._route.asks_ranks:
            address = own_address(fleet.urls)
            parameters = dataclasses.replace(self._base.parameters, quantisation=self._quantisation)
            plain = parameters.stored
            shapes = {
                name: list(shape)
                for name, (dtype, shape) in parameters.served.items()
                if name in plain and not dtype  # leave out parts of quantised weights
            }
            with self._paused():
                self._check = SliceCheck(
                    fleet, self._engines, address, shapes, in_sessions=self._route.in_sessions
                )
        else:
            self._check = WholeTensorCheck(fleet)

    def _compare_base(self) -> None:
        """Compare the trainer's base with the engines', which was loaded from files. Collective.

        Raises:
            UserError: weights of an engine differ; names them.
        """
        tensors = self._base.tensors()
        limit = 2 * deadlines.SYNC_CONTROL + 2 * deadline_for(self._base.nbytes())
        with self._ranks.round("comparing the base", limit):
            try:
                if self.rank == 0:
                    with explain_engine_errors():
                        self._compare(tensors)
            finally:
                exhaust(tensors)
        self._is_base_compared = True

    def _compare(self, tensors: NamedTensors) -> None:
        assert self._check is not None and self._route is not None
        dtype = self._route.dtype
        files = self._quantised_files()
        sent: dict[str, Any] = {}
        unlike = []
        packed = 0
        for name, tensor in tensors:
            cast = tensor.detach().to(dtype_in(dtype, name, tensor.dtype))
            held = {name: cast}
            if files is not None and (parts := files.parts(name)):
                held = {part: stored.to(cast.device) for part, stored in parts.items()}
                if not torch.equal(files.dequantised(name, held), cast):
                    unlike.append(name)
                if self._packs_base:
                    packed += 1
                    continue
            for part, stored in held.items():
                digest = self._check.digest(part, stored)
                if digest:  # else no engine has a known layout of it
                    sent[part] = digest
        if unlike:
            raise self._other_base(unlike)
        limit = deadline_for(self._base.nbytes())
        with self._paused():
            wrong = self._check.compare(sent, set(), False, limit).wrong
        if wrong:
            raise UserError(
                f"{len(wrong)} weights of the engines' base are not the trainer's: "
                + "; ".join(wrong[:4]),
                why="adapters belong to the weights that they were trained on. The base is not "
                "pushed: engines read it from --hf-checkpoint, the trainer from --load or "
                "--hf-checkpoint",
                fix="give both the same weights: leave --load out, or export that checkpoint "
                "(slime export) and pass it as --hf-checkpoint",
            )
        logger.info(
            "the engines' base is the trainer's: %d weights compared%s",
            len(sent),
            f", {packed} packed for kernels, which the canary judges" if packed else "",
        )

    def _quantised_files(self) -> QuantisedReader | None:
        """Return a reader of the quantised base as engines load it; None for a plain base."""
        if self._quantisation is None:
            return None
        flags = self.config.checkpoint
        assert flags.hf_checkpoint is not None and self._route is not None
        return QuantisedReader(
            flags.hf_checkpoint, self._quantisation, self._route.dtype, model_name=flags.model_name
        )

    def _other_base(self, unlike: Sequence[str]) -> UserError:
        return UserError(
            f"{len(unlike)} weights of the trainer's base are not those that the quantised "
            f"{self.config.checkpoint.hf_checkpoint} stands for: {', '.join(unlike[:4])}",
            why="the trainer has quantised those of --ref-load as slime convert does. The "
            "quantised model was made from other weights, or in another way (calibrated)",
            fix="leave --ref-load out: the trainer then takes the base from --hf-checkpoint",
        )

    def _push(self, tensors: NamedTensors, version: int, has_learned: bool) -> Receipt:
        assert self._fleet is not None and self._route is not None and self._check is not None
        seconds: dict[str, float] = {}
        begin = time.perf_counter()
        name = adapter_name(version)
        with self._phase("gather", version, seconds):
            buffer, largest = self._gather(tensors, self._route.dtype)
        views = buffer.tensors()
        with self._phase("fingerprint", version, seconds):
            prints = fingerprints(views)
        check_values(largest, prints, self._previous, has_learned=has_learned)
        with self._phase("transfer", version, seconds):
            self._load(name, buffer)
        with self._phase("check", version, seconds), self._paused():
            shapes = {one: list(view.shape) for one, view in views.items()}
            held = self._check.adapter_fingerprints(name, shapes, deadline_for(len(buffer.buffer)))
            wrong = compare(prints, held, set(prints))
        if wrong:
            raise WeightMismatch(version, wrong)
        with self._phase("version", version, seconds):
            body = {"new_version": str(version), "abort_all_requests": False}
            self._fleet.post("/update_weight_version", body, self._control_seconds)
        seconds["total"] = time.perf_counter() - begin
        self._previous = prints
        self._spare = self._begin_buffer(self._route.dtype)
        return Receipt(
            version,
            len(views),
            len(buffer.buffer),
            seconds,
            "shared memory" if self._shares_memory else "HTTP",
            checked=tuple(prints),
            full=True,
            loaded=len(views),
            adapter=name,
            fingerprints=prints,
        )

    def _gather(
        self, tensors: NamedTensors, dtype: torch.dtype
    ) -> tuple[AdapterBuffer, LargestValues]:
        """Convert the trainer's tensors to the engines' layout and dtype.

        Returns:
            The buffer on the host, and the largest absolute value of each trained tensor.
        """
        layout = self.layout
        spare = self._spare or self._begin_buffer(dtype)  # none after a push that failed
        self._spare = None
        host = spare.result()
        entries = host.entries
        flat: torch.Tensor | None = None
        views: dict[str, torch.Tensor] = {}
        shapes: dict[str, Shape] = {}
        for name, tensor in tensors:
            if flat is None:
                # on the trainer's device, for one copy to the host instead of hundreds
                if not tensor.is_cuda:
                    flat = host.buffer
                else:
                    flat = torch.zeros_like(host.buffer, device=tensor.device)
                views = dict(unpack(flat, entries))
            shapes[name] = tuple(tensor.shape)
            # others are reported below, after all have been gathered
            if self._complete.get(name) == shapes[name] or layout.fits(name, shapes[name]):
                layout.place(name, tensor.detach(), views)
        if shapes != self._complete:
            check_names(shapes, layout.trained, "the trainer's adapter")
            self._complete = shapes
        assert flat is not None
        if flat is not host.buffer:
            host.buffer.copy_(flat)
        return host, layout.largest(flat, dtype)

    def _begin_buffer(self, dtype: torch.dtype) -> Future[AdapterBuffer]:
        entries = self.layout.entries(dtype)
        gpu = own_device() if torch.cuda.is_available() else None
        return self._background.submit(
            AdapterBuffer, entries, is_shared=self._shares_memory, locked_by=gpu
        )

    def _load(self, name: str, buffer: AdapterBuffer) -> None:
        """Load an adapter into every engine.

        Raises:
            EngineError: one refused it.
        """
        assert self._fleet is not None
        limit = deadline_for(len(buffer.buffer))
        bodies = self._load_requests(name, buffer, self._fleet.urls)
        answers = self._fleet.post_to(LOAD_ADAPTER, bodies, limit)
        # loaded by a failed push that is now repeated, because another engine died
        again = [
            url
            for url, answer in answers.items()
            if isinstance(answer, EngineError) and "already" in answer.what
        ]
        if again:
            unload: dict[str, dict[str, Any]] = {url: {"lora_name": name} for url in again}
            for answer in self._fleet.post_to(UNLOAD_ADAPTER, unload, limit).values():
                if isinstance(answer, EngineError):
                    raise answer
            repeated = self._load_requests(name, buffer, again)
            answers |= self._fleet.post_to(LOAD_ADAPTER, repeated, limit)
        for url, answer in answers.items():
            if isinstance(answer, EngineError):
                raise answer
            if name not in (answer.get("loaded_adapters") or {}):
                raise EngineError(url, f"does not list {name} among its adapters: {answer!r:.300}")

    def _load_requests(
        self, name: str, buffer: AdapterBuffer, urls: Sequence[str]
    ) -> dict[str, dict[str, Any]]:
        """Make the request to each engine. All ranks of all of them read one text."""
        ranks = {engine.url.rstrip("/"): engine.num_ranks for engine in self._engines}
        text = buffer.payload(sum(ranks[url] for url in urls))
        body = {
            "lora_name": name,
            "config_dict": self.layout.config_dict(str(self.config.checkpoint.hf_checkpoint)),
        }
        return {
            url: {**body, "serialized_named_tensors": [text] * ranks[url]}
            if url in self._by_rank
            else {**body, "serialized_tensors": text}
            for url in urls
        }

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause SGLang engines with their requests in place.

        Without a pause, SGLang would delay the weight probe until every request has ended, and new
        requests until the probe has ended.
        """
        assert self._fleet is not None and self._route is not None
        if not self._route.asks_ranks:
            yield
            return
        try:
            self._fleet.post("/pause_generation", {"mode": "in_place"}, self._control_seconds)
            yield
        finally:
            self._fleet.post("/continue_generation", {}, self._control_seconds)

    def _describe(self, version: int) -> str:
        return f"the push of adapter version {version}"

    def _state_after(self, phase: str) -> str:
        return "engines continue with their current adapters"


class AdapterBuffer:
    """Host memory for one version of an adapter, and its form for
    ``/load_lora_adapter_from_tensors``: a pickle of {name: tensor}, as text.

    All tensors are in one flat buffer. For engines on this host, the pickle tells how to map it;
    they keep the mapping while the adapter is loaded, because SGLang holds adapters in host memory
    and copies them to its GPU on request. For other engines, the pickle contains the numbers.

    Args:
        entries: of one dtype.
        is_shared: other processes on this host may map it.
        locked_by: the GPU whose driver locks the pages, if it may: it copies to them several times
            as fast.

    Attributes:
        buffer: uint8 [nbytes], initially zeros.
    """

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        *,
        is_shared: bool,
        locked_by: torch.device | None = None,
    ) -> None:
        self.entries = list(entries)
        nbytes = sum(entry.nbytes for entry in entries)
        self._is_shared = is_shared
        if is_shared:
            storage: Any = torch.UntypedStorage
            self.buffer = torch.empty(0, dtype=torch.uint8).set_(
                storage._new_using_filename_cpu(nbytes), 0, (nbytes,), (1,)
            )
        else:
            self.buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.buffer.zero_()
        if locked_by is not None:
            torch.cuda.set_device(locked_by)  # a new thread starts with the first GPU
            try:
                lock_pages(self.buffer, owner=self)
            except MemoryError as error:
                tell(logger, "pushes of adapters take longer: %s", error, once="adapter pages")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return views into the buffer by name."""
        return dict(unpack(self.buffer, self.entries))

    def payload(self, readers: int) -> str:
        """Return the text for ``serialized_tensors``.

        Args:
            readers: number of processes that will unpickle it, each once.
        """
        tensors: dict[str, Any] = (
            self._mapped(readers)
            if self._is_shared
            # copies, because pickling a view would include the whole buffer
            else {name: tensor.clone() for name, tensor in self.tensors().items()}
        )
        return base64.b64encode(pickle.dumps(tensors)).decode()

    def _mapped(self, readers: int) -> dict[str, Opened]:
        dtype = dtype_of(self.entries[0].dtype)
        # one object is pickled once, so readers map the buffer once
        whole = Opened(storage_handle(self.buffer, dtype, readers))
        tensors = {}
        for entry, tensor in zip(self.entries, self.tensors().values(), strict=True):
            place = (entry.offset // dtype.itemsize, tensor.size(), tensor.stride(), False)
            handle = Handle(reductions.rebuild_tensor, (torch.Tensor, whole, place))
            tensors[entry.name] = Opened(handle)
        return tensors
