"""Push the trainer's weights to the engines, version by version, with a receipt as proof.

    sync = WeightSync(config, model_chunks, hf_config, rank=rank, world_size=world_size)
    sync.connect(engines)       # again whenever engines come or go
    receipt = sync.push()       # after each rollout that was trained on; sync.version + 1
    sync.close()

    push():  pause ─► transfer in flat buckets ─► flush caches ─► count and compare ─► continue

All calls are collective over the trainer ranks: all gather, rank 0 controls the engines, and every
rank returns the same receipt or raises the same error. With broadcast, one rank of each pipeline
stage sends its layers, stage after stage; other transports send from rank 0, or from all ranks. A
`WeightSource` yields the tensors, `route` chooses the `Transport` that sends them, `trainer_ranks`
carries messages between ranks, `engine_check` compares the engines' tensors.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from slime import deadlines
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.wire.expert_runs import ExpertRun
from slime.errors import UserError
from slime.models.fused_loading import LoadGroups
from slime.models.quantised import Quantisation
from slime.models.spec import HfConfig, read_hf_config
from slime.weights.distributed import own_address
from slime.weights.engine_check import (
    Digest,
    EngineCheck,
    SliceCheck,
    SliceDigest,
    WholeTensorCheck,
    digest_from_json,
    digest_to_json,
)
from slime.weights.receipt import Receipt, Sampler, WeightMismatch, kinds_of
from slime.weights.route import Route, find_route, open_transport
from slime.weights.source import ModelSource, QuantisedSource, WeightSource, exhaust
from slime.weights.trainer_ranks import StageError, TrainerRanks
from slime.weights.transport import EngineSlots, NamedTensors, Transferred, Transport, deadline_for

logger = logging.getLogger(__name__)

_CONNECTING = "connecting trainer and engines"


class EngineSync:
    """One trainer rank's side of pushes, of whole weights or of adapters.

    Args:
        hf_config: the config that the model was built from.
        rank, world_size: of the trainer.
        start_version: version of the last push, for a resumed run; engines start with the weights
            of ``--hf-checkpoint``, version 0.

    Attributes:
        version: of the last push, which the engines hold.
    """

    def __init__(
        self,
        config: Config,
        hf_config: HfConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        start_version: int = 0,
    ) -> None:
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.version = start_version
        self._hf_config = hf_config
        self._quantisation = Quantisation.read(read_hf_config(hf_config))
        self._ranks = TrainerRanks(rank, world_size)
        self._fleet: EngineFleet | None = None
        self._check: EngineCheck | None = None
        faults = config.fault_tolerance
        # an engine that stops answering is restarted
        self._patience = faults.rollout_health_check_timeout if faults.use_fault_tolerance else None
        limit = deadlines.SYNC_CONTROL
        self._control_seconds = min(self._patience or limit, limit)

    def close(self) -> None:
        """Close connections."""
        if self._check is not None:
            self._check.close()
        if self._fleet is not None:
            self._fleet.close()
        self._fleet = self._check = None

    def _describe(self, version: int) -> str:
        """Name a push in messages."""
        raise NotImplementedError

    def _state_after(self, phase: str) -> str:
        """Describe the state of the engines after the failure of a phase."""
        raise NotImplementedError

    @contextmanager
    def _phase(self, name: str, version: int, seconds: dict[str, float]) -> Iterator[None]:
        """Time a phase; turn the failure of an engine or a stage into a message with remedies."""
        started = time.perf_counter()
        try:
            yield
        except (EngineError, StageError) as error:
            waited = time.perf_counter() - started
            late = error.url if isinstance(error, EngineError) else error.where
            raise UserError(
                f"{self._describe(version)} failed in the phase '{name}' after {waited:.1f} s: "
                f"{error}",
                why=f"trainer rank 0 waited for {late}; {self._state_after(name)}",
                fix=REMEDIES,
            ) from error
        seconds[name] = time.perf_counter() - started


def register_engines(engines: Sequence[str | EngineSlots]) -> list[EngineSlots]:
    """Register the engines' keys in this process."""
    found = [EngineSlots(engine, ()) if isinstance(engine, str) else engine for engine in engines]
    for engine in found:
        keys.register(engine.url, engine.key)
    return found


class WeightSync(EngineSync):
    """Pushes of whole weights.

    Args:
        model_chunks: this rank's model.
        options: see `EngineSync`.
    """

    def __init__(
        self, config: Config, model_chunks: Sequence[nn.Module], hf_config: HfConfig, **options: int
    ) -> None:
        super().__init__(config, hf_config, **options)
        self._model_chunks = model_chunks
        self._source: WeightSource | None = None
        self._load_groups = LoadGroups()
        self._stage_seconds: list[float] = []  # limit for each pipeline stage to send
        self._names: list[str] = []  # of all tensors of a push; rank 0
        self._sampler = Sampler()
        self._transport: Transport | None = None
        self._gloo: dist.ProcessGroup | None = None
        self._num_pushes = 0
        self._opens_layers = False
        # a push failed after its pause: engines may hold a mix of weights, and open layers
        self._is_interrupted = False
        self._last_seconds = 0.0

    def connect(self, engines: Sequence[str | EngineSlots], *, on_this_node: bool = True) -> None:
        """Reach the engines and set the transport up. Collective; call again when the engines
        change.

        Args:
            engines: base URLs, or also the slots of the engines (needed for ``--colocate`` with
                SGLang and for engines of several GPUs).
            on_this_node: the engines may be on rank 0's cluster node; false if they are not, though
                their addresses look local (containers on one host's network, rehearsals of a
                cluster).
        Raises:
            UserError: an engine cannot be reached, or the transport is impossible.
        """
        self.close()
        found = register_engines(engines)
        with self._ranks.round(_CONNECTING, 2 * deadlines.SYNC_CONTROL) as reached:
            if self.rank == 0:
                self._fleet = EngineFleet([engine.url for engine in found])
                with explain_engine_errors():
                    route = find_route(
                        self.config, self._fleet, self._hf_config, on_this_node=on_this_node
                    )
                reached.value = route.to_json()
        route = Route.from_json(reached.value)
        self._ranks.sources = route.sources
        self._opens_layers = route.opens
        if not self._prepare(route, found):
            self._prepare(dataclasses.replace(route, in_runs=False), found)

    def _prepare(self, route: Route, engines: Sequence[EngineSlots]) -> bool:
        """Open the transport, and learn which slices the engines can compare. Collective.

        Returns:
            False if engines hold runs of experts in a layout that cannot be compared; nothing is
            open then.
        """
        self._source = self._source_for(route)
        parameters = self._source.parameters
        self._load_groups = parameters.family.load_groups(parameters.spec)
        # both are collective, so they stay outside the block below
        contents = _StageContents.of(self._source, with_shapes=route.asks_ranks)
        gloo = self._gloo_group() if route.kind == "ipc" else None
        self._stage_seconds = [2 * deadlines.DISTRIBUTED_JOIN for _ in route.sources]
        explained = explain_engine_errors() if self.rank == 0 else nullcontext()
        with (
            self._ranks.round(
                _CONNECTING, sum(self._stage_seconds) + 2 * deadlines.SYNC_CONTROL
            ) as connected,
            explained,
        ):
            stage = self._ranks.stage
            if stage is not None and self._fleet is None:
                self._fleet = EngineFleet([engine.url for engine in engines])
            if stage is not None or route.kind == "ipc":
                self._transport = open_transport(
                    route,
                    self.config,
                    engines,
                    self._fleet,
                    gloo,
                    stage,
                    self._await_turn,
                    self._load_groups.members,
                )
            if stage is not None:
                self._ranks.report(asdict(contents))
            if self.rank == 0:
                stages = [
                    _StageContents(**report) for report in self._ranks.reports(self._stage_seconds)
                ]
                if self._prepare_check(route, engines, stages):
                    assert self._check is not None
                    compared = digest_to_json(self._check.digest)
                    nbytes = [stage.nbytes for stage in stages]
                    connected.value = {"digest": compared, "nbytes": nbytes}
        if connected.value is None:
            return False
        nbytes = connected.value["nbytes"]
        # a bucket's own limit comes first
        self._stage_seconds = [1.5 * deadline_for(n, self._timeout) for n in nbytes]
        share = Sampler.share / len(nbytes)
        floor = Sampler.floor / len(nbytes)
        digest = digest_from_json(connected.value["digest"])
        self._sampler = Sampler(share, floor, digest, self._always_compared(contents.names, digest))
        return True

    def _always_compared(self, names: Sequence[str], digest: Digest) -> list[list[str]]:
        """Return lists of names: kinds of tensors, and groups that engines fuse. Every push
        compares one name of each list."""
        if isinstance(digest, SliceDigest):
            names = [name for name in names if digest.slices.get(name)]
        return kinds_of(names) + [
            list(group) for group in self._load_groups.among(names) if set(group) <= set(names)
        ]

    def _source_for(self, route: Route) -> WeightSource:
        """Return the source of the whole model, quantised if the engines' weights are.

        Raises:
            UserError: the ignore list of quantised weights does not fit the model.
        """
        plain = ModelSource(
            self._model_chunks,
            self._hf_config,
            model_name=self.config.checkpoint.model_name,
            own_stage=len(route.sources) > 1,
            in_runs=route.in_runs,
        )
        if self._quantisation is None:
            return plain
        # with "ipc" every rank packs for its own GPU
        converts = self._ranks.stage is not None or route.kind == "ipc"
        return QuantisedSource(plain, self._quantisation, route.dtype, converts=converts)

    def push(self) -> Receipt:
        """Push the current weights to every engine as version ``self.version + 1``. Collective.

        Raises:
            UserError: a phase failed or timed out; names the phase, who waited for whom, and
                whether engines stay paused because they may hold a mix of old and new weights. The
                version stays; another `push` sends everything again.
            WeightMismatch: an engine holds other tensors than were sent; names them.
        """
        assert self._source is not None, "push before connect"
        version = self.version + 1
        tensors = self._source.tensors()
        self._has_sent = False
        with self._ranks.round(f"pushing weights version {version}", self._push_seconds) as pushed:
            try:
                if self.rank == 0:
                    pushed.value = self._push(tensors, version).to_json()
                elif self._ranks.stage is not None:
                    self._send(tensors, version)
                elif self._transport is not None:
                    self._transport.follow(tensors)
            finally:
                if self.world_size > 1:
                    if self.rank == 0 and not self._has_sent and self._transport is not None:
                        self._transport.follow(tensors)  # the others are in its collectives
                    exhaust(tensors)  # the other ranks need this one, even after a failure
        receipt = Receipt.from_json(pushed.value)
        if self._ranks.stage is not None:
            self._sampler.end()
        self._last_seconds = receipt.seconds["total"]
        self.version = version
        self._num_pushes += 1
        logger.info("%s", receipt)
        return receipt

    def close(self) -> None:
        """Release shared memory, groups and connections."""
        if self._transport is not None:
            with self._ranks.in_order(2 * deadlines.DISTRIBUTED_LEAVE):
                self._transport.close()
        self._transport = None
        super().close()

    # -- each rank that takes part -----------------------------------------------------------------

    def _send(self, tensors: NamedTensors, version: int) -> None:
        """Send this rank's tensors, then report."""
        assert self._transport is not None and self._source is not None
        self._sampler.begin(self._last_seconds, self.config.debug.check_weight_update_equal)
        self._has_sent = True
        sent = self._transport.send(tensors, version, self._sampler.observe)
        zeros = self._source.zeros
        self._ranks.report(
            asdict(_StageSent(sent, self._sampler.names, self._sampler.fingerprints, zeros))
        )

    def _await_turn(self) -> None:
        earlier = self._stage_seconds[: self._ranks.stage]
        # rank 0 pauses the engines first
        self._ranks.await_turn(2 * deadlines.SYNC_CONTROL + sum(earlier))

    @property
    def _timeout(self) -> float:
        """Return --distributed-timeout-minutes in seconds."""
        return 60.0 * self.config.cluster.distributed_timeout_minutes

    @property
    def _push_seconds(self) -> float:
        """Return the seconds that all phases of a push may take together."""
        return 6 * deadlines.SYNC_CONTROL + (3 if self._opens_layers else 2) * sum(
            self._stage_seconds
        )

    def _gloo_group(self) -> dist.ProcessGroup | None:
        """Make the gloo group of all trainer ranks, which exchanges handles without the GPU.

        The other ranks wait in this group while rank 0 waits for engines to load a bucket, so its
        timeout is longer than rank 0's.
        """
        if self.world_size == 1:
            return None
        if self._gloo is None:
            seconds = self._timeout + deadline_for(self.config.sync.update_weight_buffer_size)
            self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        return self._gloo

    # -- rank 0 ------------------------------------------------------------------------------------

    def _prepare_check(
        self, route: Route, engines: Sequence[EngineSlots], stages: Sequence[_StageContents]
    ) -> bool:
        """Set the check up; return False if runs of experts cannot be compared."""
        assert self._fleet is not None and self._transport is not None
        self._names = [name for stage in stages for name in stage.names]
        if route.asks_ranks:
            shapes = {name: shape for stage in stages for name, shape in stage.shapes.items()}
            slices = SliceCheck(
                self._fleet,
                engines,
                own_address(self._fleet.urls),
                shapes,
                route.opens,
                route.in_sessions,
            )
            if any(ExpertRun.parse(name) for name in slices.unknown):
                slices.close()
                return False
            if slices.unknown:
                some = ", ".join(slices.unknown[:4])
                logger.warning(
                    "%d tensors are not compared after pushes: %s", len(slices.unknown), some
                )
            self._check = slices
        else:
            self._check = WholeTensorCheck(self._fleet)
        logger.info("weights go to %d engine(s) by %s", len(engines), self._transport.name)
        return True

    def _push(self, tensors: NamedTensors, version: int) -> Receipt:
        assert self._fleet is not None and self._transport is not None and self._check is not None
        fleet = self._fleet
        seconds = dict[str, float]()
        verify_all = self.config.debug.check_weight_update_equal
        begin = time.perf_counter()
        with self._phase("pause", version, seconds):
            self._pause(fleet)
        self._is_interrupted = True
        if verify_all and self._num_pushes == 0:
            # so tensors that the push omits cannot look correct
            with self._phase("reset", version, seconds):
                fleet.post("/weights_checker", {"action": "reset_tensors"}, self._control_seconds)
        if self._opens_layers:
            with self._phase("open", version, seconds):
                self._check.open_layers(self._control_seconds)
        with ExitStack() as session:
            with self._phase("transfer", version, seconds):
                session.enter_context(self._check.session(self._control_seconds))
                self._check.begin(self._control_seconds)
                self._send(tensors, version)
                stages = self._ranks.reports(self._stage_seconds)
                sent = _StageSent.merged([_StageSent.from_json(stage) for stage in stages])
            with self._phase("flush", version, seconds):
                fleet.flush_cache(self._control_seconds)
            with self._phase("check", version, seconds):
                loaded = self._compare(version, sent, verify_all)
                session.close()
        if self._opens_layers:
            with self._phase("close", version, seconds):
                self._check.close_layers(deadline_for(sent.amount.nbytes))
        self._is_interrupted = False
        with self._phase("continue", version, seconds):
            fleet.post("/continue_generation", {}, self._control_seconds)
        seconds["total"] = time.perf_counter() - begin
        if sent.zeros:
            logger.warning(
                "version %d has matrices of zeros alone: %s", version, ", ".join(sent.zeros[:4])
            )
        return Receipt(
            version=version,
            num_tensors=sent.amount.num_tensors,
            nbytes=sent.amount.nbytes,
            seconds=seconds,
            transport=self._transport.name,
            checked=tuple(name for name, digests in sent.fingerprints.items() if digests),
            # tensors in an unknown layout cannot be compared
            full=verify_all and not self._check.unknown,
            zeros=tuple(sent.zeros),
            loaded=loaded,
        )

    def _pause(self, fleet: EngineFleet) -> None:
        """Pause all engines; on failure continue them, unless an earlier push left them paused."""
        try:
            fleet.post("/pause_generation", {"mode": "abort"}, self._control_seconds)
        except EngineError:
            if self._is_interrupted:
                raise
            try:
                fleet.post("/continue_generation", {}, min(10.0, self._control_seconds))
            except EngineError:
                logger.warning(
                    "not every engine could be continued after a failed pause", exc_info=True
                )
            raise

    def _compare(self, version: int, sent: _StageSent, verify_all: bool) -> int | None:
        """Compare the engines' weights with those sent; return the number of tensors that all
        engines are known to have loaded.

        Raises:
            WeightMismatch: an engine holds other tensors than were sent.
        """
        assert self._check is not None
        unsent = sorted(set(self._names) - set(sent.names))
        if unsent:
            raise WeightMismatch(version, [f"{name} was not sent" for name in unsent])
        limit = deadline_for(sent.amount.nbytes)
        held = self._check.compare(sent.fingerprints, set(sent.names), verify_all, limit)
        wrong = [self._dropped(name, where) for name, where in held.dropped] + held.wrong
        if wrong:
            raise WeightMismatch(version, wrong)
        return held.loaded

    def _dropped(self, name: str, where: str) -> str:
        others = [other for other in self._load_groups.members(name) if other != name]
        paired = f" (SGLang loads it only together with {', '.join(others)})" if others else ""
        return f"{name} was sent and not loaded by {where}{paired}"

    def _describe(self, version: int) -> str:
        return f"weight update to version {version}"

    def _state_after(self, phase: str) -> str:
        if phase == "pause" and not self._is_interrupted:
            return "no engine was changed; they go on with the weights they have"
        if phase == "continue":
            return "the engines have the new weights; some may still be paused"
        return "the engines stay paused, because they may hold a mix of old and new weights"


REMEDIES = (
    "look at the engine's log first. If it is alive but slow: push less often "
    "(--update-weights-interval 5), share GPUs (--colocate, no network), check the network "
    "(ibstat; NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, NCCL_IB_DISABLE=0), give it longer "
    "(NCCL_TIMEOUT=1800), or go through a directory (--update-weight-transport disk)"
)


@dataclass(frozen=True)
class _StageContents:
    """The tensors of every push of one pipeline stage.

    Attributes:
        shapes: by name; {} if the check does not need them.
    """

    names: list[str]
    nbytes: int
    shapes: dict[str, list[int]]

    @staticmethod
    def of(source: WeightSource, with_shapes: bool) -> _StageContents:
        """Read the contents of a source. Collective over the ranks of the stage.

        Shapes need one gathering of all weights, which also sets up the communicators.
        """
        tensors = source.tensors() if with_shapes else ()
        shapes = {name: list(tensor.shape) for name, tensor in tensors}
        return _StageContents(source.names(), source.nbytes(), shapes)


@dataclass(frozen=True)
class _StageSent:
    """The tensors that one pipeline stage sent, with fingerprints of some."""

    amount: Transferred
    names: list[str]
    fingerprints: dict[str, Any]
    zeros: list[str]

    @staticmethod
    def from_json(fields: dict[str, Any]) -> _StageSent:
        return _StageSent(**fields | {"amount": Transferred(**fields["amount"])})

    @staticmethod
    def merged(stages: Sequence[_StageSent]) -> _StageSent:
        num_tensors = sum(stage.amount.num_tensors for stage in stages)
        return _StageSent(
            Transferred(num_tensors, sum(stage.amount.nbytes for stage in stages)),
            [name for stage in stages for name in stage.names],
            {name: digest for stage in stages for name, digest in stage.fingerprints.items()},
            [name for stage in stages for name in stage.zeros],
        )


@contextmanager
def explain_engine_errors() -> Iterator[None]:
    """Convert failures of an engine or a stage while preparing pushes into messages with
    remedies."""
    try:
        yield
    except EngineError as error:
        raise UserError(
            f"engine {error.url} cannot be reached for weight updates", str(error), REMEDIES
        ) from error
    except StageError as error:
        raise UserError(
            f"{error.where} could not prepare weight updates", error.what, REMEDIES
        ) from error
