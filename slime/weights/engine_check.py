"""Compare the tensors that engines hold with those sent, by the two methods of `Abilities.check`.

    "tensors"  the engine's own ``/weights_checker {"action": "fingerprint"}``: whole tensors under
               the names sent
    "slices"   `slime.engines.sglang.weight_probe` in SGLang's processes: each rank's slice of a
               tensor in SGLang's fused and sharded parameters

Whole tensors are compared by xxh3-128, slices on GPUs by a sum that GPUs compute. SGLang's own
checker is used only for ``reset_tensors``: it hashes all parameters of a model at once, under fused
names, and the trainer would need the same kernel to compute the expected hashes.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch

from slime import deadlines
from slime.engines.api import ONLY_THE_POLICY, WEIGHT_PROBE, EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.sglang.weight_probe import SIZE
from slime.engines.wire.buckets import FINGERPRINTS, fingerprint
from slime.engines.wire.process_group import ExternalGroup
from slime.weights.receipt import compare
from slime.weights.transport import EngineSlots

#: dim, start, stop; "1:0:64" in JSON.
Slice = tuple[int, int, int]

#: In SGLang's refusal to begin a session while one is open.
_OPEN_ALREADY = "already open"

#: (name, tensor) → value to compare with the engines'.
Digest = Callable[[str, torch.Tensor], Any]


@dataclass(frozen=True)
class HeldWeights:
    """The result of checking engines after a transfer.

    Attributes:
        wrong: one line per differing tensor and engine.
        dropped: (name, place) of each sent tensor that an engine, or a rank of it, has not loaded.
        loaded: number of tensors that every engine is known to have loaded; None if unknown.
    """

    wrong: list[str]
    dropped: list[tuple[str, str]]
    loaded: int | None


class EngineCheck:
    """Computes digests of the trainer's tensors and compares them with the engines'.

    Attributes:
        digest: function that every sending rank computes for its tensors; see `digest_to_json`.
        unknown: tensors that cannot be compared, because an engine holds them in an unknown layout.
    """

    digest: Digest
    unknown: Sequence[str] = ()

    def session(self, timeout: float) -> AbstractContextManager[None]:
        """Return the context in which engines load weights (`Abilities.update_sessions`); it may
        be entered inside of itself."""
        return nullcontext()

    def begin(self, timeout: float) -> None:
        """Make engines track what they load; call before a transfer, after `open_layers`."""

    def compare(
        self, sent: Mapping[str, Any], names: Collection[str], full: bool, timeout: float
    ) -> HeldWeights:
        """Compare the tensors that engines loaded in a transfer with those sent.

        Args:
            sent: name → `digest`, for some of the tensors.
            names: of all tensors that were sent.
            full: tensors that an engine holds but were not sent are errors, too.
        """
        raise NotImplementedError

    def open_layers(self, timeout: float) -> None:
        """Make layers loadable before a transfer of quantised weights (`Route.opens`)."""

    def close_layers(self, timeout: float) -> None:
        """Make engines convert the received weights for their kernels; call after `compare`."""

    def adapter_fingerprints(
        self, name: str, shapes: Mapping[str, Sequence[int]], timeout: float
    ) -> dict[str, dict[str, str]]:
        """Return the fingerprints (xxh3-128) of an adapter's tensors as sent: place (an engine, or
        a rank of it) → name → fingerprint.

        Args:
            name: of the adapter.
            shapes: of the tensors that were sent, by name.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release connections."""


def whole_tensor_digest(name: str, tensor: torch.Tensor) -> str:
    """Return the tensor's fingerprint; a `Digest`."""
    return fingerprint(tensor)


@dataclass(frozen=True)
class SliceDigest:
    """Computes fingerprints of the slices of a tensor that engine ranks hold.

    Attributes:
        slices: name → slices that any rank of any engine holds.
        method: of `FINGERPRINTS`.
    """

    slices: Mapping[str, Sequence[Slice]]
    method: str

    def __call__(self, name: str, tensor: torch.Tensor) -> dict[str, str]:
        """Return slice key → fingerprint."""
        take = FINGERPRINTS[self.method]
        return {
            slice_key((dim, a, b)): take(tensor.narrow(dim, a, b - a) if tensor.dim() else tensor)
            for dim, a, b in self.slices[name]
        }


def digest_to_json(digest: Digest) -> dict[str, Any] | None:
    return asdict(digest) if isinstance(digest, SliceDigest) else None


def digest_from_json(words: dict[str, Any] | None) -> Digest:
    return whole_tensor_digest if words is None else SliceDigest(**words)


def slice_key(part: Sequence[int]) -> str:
    dim, start, stop = part
    return f"{dim}:{start}:{stop}"


class WholeTensorCheck(EngineCheck):
    """Compares whole tensors by fingerprints that the engine computes."""

    digest = staticmethod(whole_tensor_digest)

    def __init__(self, fleet: EngineFleet) -> None:
        self._fleet = fleet

    def compare(
        self, sent: Mapping[str, Any], names: Collection[str], full: bool, timeout: float
    ) -> HeldWeights:
        body = {"action": "fingerprint", "names": None if full else list(sent)}
        answers = self._fleet.post("/weights_checker", body, timeout)
        by_url = dict(zip(self._fleet.urls, answers, strict=True))
        held = {url: answer["fingerprints"] for url, answer in by_url.items()}
        dropped = [
            (name, url)
            for url, answer in by_url.items()
            for name in answer.get("missing", ())
            if name in names
        ]
        counts = [answer["loaded"] for answer in answers if answer.get("loaded") is not None]
        loaded = min(counts, default=None) if len(counts) == len(answers) else None
        return HeldWeights(compare(sent, held, names if full else None), dropped, loaded)

    def adapter_fingerprints(
        self, name: str, shapes: Mapping[str, Sequence[int]], timeout: float
    ) -> dict[str, dict[str, str]]:
        body = {"action": "fingerprint", "lora_name": name, "names": None}
        answers = self._fleet.post("/weights_checker", body, timeout)
        found = (answer["fingerprints"] for answer in answers)
        return dict(zip(self._fleet.urls, found, strict=True))


@dataclass(eq=False)
class RankQuestions:
    """Queries the processes of SGLang engines through their custom weight loader.

        ask({"action": …}) ── /update_weights_from_tensor, load_format = the probe ──► every rank
        answers            ◄── TCP store of this process ───────────────────────────── every rank

    SGLang's HTTP answer says only that the loader was called; results and errors come through the
    store.

    Args:
        engines: one tensor-parallel rank per slot each.
        address: of this process, as the engines reach it.
        in_sessions: see `Abilities.update_sessions`.
    """

    fleet: EngineFleet
    engines: Sequence[EngineSlots]
    address: str
    in_sessions: bool = False

    def __post_init__(self) -> None:
        self._is_open = False
        self._store = ExternalGroup.open_store(self.address, 1, deadlines.ENGINE_CHECK_ANSWER)

    def ask(self, request: Mapping[str, Any], timeout: float) -> list[list[dict[str, Any]]]:
        """Ask all ranks; return their answers by engine.

        Args:
            request: for `slime.engines.sglang.weight_probe.report`, without the fields of the
                store.
        Raises:
            EngineError: a rank failed (has its message) or did not answer.
        """
        key = secrets.token_hex(4)

        def body(number: int) -> dict[str, Any]:
            place = {"host": self.address, "port": self._store.port, "key": f"{key}/{number}"}
            raw = json.dumps({**request, **place}).encode()
            payload = serialized(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            count = self.engines[number].num_ranks
            return {
                "serialized_named_tensors": [payload] * count,
                "load_format": WEIGHT_PROBE,
                "flush_cache": False,
                **ONLY_THE_POLICY,
            }

        with self.session(timeout):
            self.fleet.post("/update_weights_from_tensor", body, timeout)
            return [
                [self._answer(f"{key}/{n}/{rank}", n) for rank in range(engine.num_ranks)]
                for n, engine in enumerate(self.engines)
            ]

    @contextmanager
    def session(self, timeout: float) -> Iterator[None]:
        """Open a session on every engine, if they need one and none is open here.

        After a failure the engines' sessions stay open, as some may be gone or hold a mix of
        weights. The next session here takes them over.

        Raises:
            EngineError: an engine refuses.
        """
        if not self.in_sessions or self._is_open:
            yield
            return
        bodies: dict[str, dict[str, Any]] = {url: {} for url in self.fleet.urls}
        for answer in self.fleet.post_to("/begin_weight_update", bodies, timeout).values():
            if isinstance(answer, EngineError) and _OPEN_ALREADY not in answer.what:
                raise answer
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
        self.fleet.post("/end_weight_update", {}, timeout)

    def close(self) -> None:
        del self._store  # the listening socket goes with it

    def _answer(self, key: str, number: int) -> dict[str, Any]:
        url = self.engines[number].url
        try:
            self._store.wait([key], timedelta(seconds=deadlines.ENGINE_CHECK_ANSWER))
        except RuntimeError as error:
            raise EngineError(
                url,
                f"a rank did not report its weights within {deadlines.ENGINE_CHECK_ANSWER:.0f} s",
            ) from error
        answer: dict[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if "error" in answer:
            raise EngineError(
                url, f"its weights cannot be reported: {answer['error']}\n{answer['traceback']}"
            )
        return answer


def serialized(tensor: torch.Tensor) -> str:
    """Encode a small CPU tensor as one item of ``serialized_named_tensors``."""
    return base64.b64encode(pickle.dumps([("request", tensor)])).decode()


class SliceCheck(EngineCheck):
    """Compares the slices that each rank of SGLang engines holds, through the weight probe.

    Args:
        engines: one tensor-parallel rank per slot each.
        address: of this process, as the engines reach it.
        shapes: of all tensors that pushes send, by name.
        opens: layers are open during loading and comparison.
        in_sessions: see `Abilities.update_sessions`.
    Raises:
        EngineError: an engine cannot run the probe, or has layers that cannot be opened.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        engines: Sequence[EngineSlots],
        address: str,
        shapes: Mapping[str, Sequence[int]],
        opens: bool = False,
        in_sessions: bool = False,
    ) -> None:
        self._engines = engines
        self._opens = opens
        # xxh3 is faster on a CPU
        self._method = "words" if torch.cuda.is_available() else "xxh3"
        self._shapes = {name: list(shape) for name, shape in shapes.items()}
        self._ranks = RankQuestions(fleet, engines, address, in_sessions)
        layouts = self._ranks.ask(
            {"action": "layout", "tensors": self._shapes, "opens": opens},
            deadlines.ENGINE_CHECK_ANSWER,
        )
        self._slices = [[_slices(rank) for rank in ranks] for ranks in layouts]
        self._others = [
            sorted(set.intersection(*(set(rank["others"]) for rank in ranks))) for ranks in layouts
        ]
        held = {
            name: {
                part
                for ranks in self._slices
                for rank in ranks
                if (part := rank.get(name)) is not None
            }
            for name in self._shapes
        }
        self.digest = SliceDigest(
            {name: sorted(parts) for name, parts in held.items()}, self._method
        )
        self.unknown = sorted(
            name for name in self._shapes if not name.endswith(SIZE) and not self._is_whole(name)
        )

    def session(self, timeout: float) -> AbstractContextManager[None]:
        return self._ranks.session(timeout)

    def begin(self, timeout: float) -> None:
        if not self._opens:  # opening marks the layers
            self._ranks.ask({"action": "mark"}, timeout)

    def compare(
        self, sent: Mapping[str, Any], names: Collection[str], full: bool, timeout: float
    ) -> HeldWeights:
        lines: list[str] = []
        dropped: list[tuple[str, str]] = []
        shapes = {name: self._shapes[name] for name in sent}
        answers = self._ranks.ask(
            {"action": "fingerprint", "tensors": shapes, "method": self._method}, timeout
        )
        for engine, slices, ranks in zip(self._engines, self._slices, answers, strict=True):
            for number, (held, answer) in enumerate(zip(slices, ranks, strict=True)):
                where = _place(engine, number)
                untouched = set(answer["untouched"]) & set(names)
                dropped += [(name, where) for name in sorted(untouched)]
                for name, expected in sent.items():
                    part = held.get(name)
                    if part is None or name in untouched:
                        continue
                    there = answer["fingerprints"].get(name, "nothing")
                    wanted = expected[slice_key(part)]
                    if there != wanted:
                        lines.append(
                            f"{name} differs on {where} (sent {wanted[:8]}…, holds {there[:8]}…)"
                        )
        if full:
            for engine, others in zip(self._engines, self._others, strict=True):
                lines += [f"{name} on {engine.url} was never sent" for name in others]
        # sizes count as held: nothing reads them
        countable = sum(name.endswith(SIZE) or self._is_held_everywhere(name) for name in names)
        return HeldWeights(lines, dropped, countable - len({name for name, _ in dropped}))

    def adapter_fingerprints(
        self, name: str, shapes: Mapping[str, Sequence[int]], timeout: float
    ) -> dict[str, dict[str, str]]:
        request = {
            "action": "adapter",
            "lora_name": name,
            "tensors": {one: list(shape) for one, shape in shapes.items()},
        }
        return {
            _place(engine, number): answer["fingerprints"]
            for engine, ranks in zip(self._engines, self._ranks.ask(request, timeout), strict=True)
            for number, answer in enumerate(ranks)
        }

    def close(self) -> None:
        self._ranks.close()

    def open_layers(self, timeout: float) -> None:
        self._ranks.ask({"action": "open"}, timeout)

    def close_layers(self, timeout: float) -> None:
        self._ranks.ask({"action": "close"}, timeout)

    def _is_held_everywhere(self, name: str) -> bool:
        return all(any(rank.get(name) is not None for rank in ranks) for ranks in self._slices)

    def _is_whole(self, name: str) -> bool:
        """Tell whether on every engine the ranks' slices make up the whole tensor."""
        return all(
            _covers([rank.get(name) for rank in ranks], self._shapes[name])
            for ranks in self._slices
        )


def _place(engine: EngineSlots, rank: int) -> str:
    """Name a rank of an engine, or the engine if it has only one."""
    return engine.url if engine.num_ranks == 1 else f"{engine.url} (rank {rank})"


def _slices(answer: Mapping[str, Any]) -> dict[str, Slice | None]:
    return {
        name: None if part is None else (part[0], part[1], part[2])
        for name, part in answer["slices"].items()
    }


def _covers(parts: Sequence[Slice | None], shape: Sequence[int]) -> bool:
    held = [part for part in parts if part is not None]
    if not held:
        return False
    reached = 0
    for dim, start, stop in sorted(held):
        if dim != held[0][0] or start > reached:
            return False
        reached = max(reached, stop)
    return reached >= (shape[held[0][0]] if shape else 1)
