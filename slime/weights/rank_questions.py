"""Questions to the processes of SGLang engines, through the probe that their custom weight loader
runs there.

    ask({"action": …}) ── /update_weights_from_tensor, load_format = the probe ──► every rank
    answers            ◄── TCP store of this process ───────────────────────────── every rank

SGLang's own answer says only that the loader was called; what it found, or what went wrong, comes
through the store.
"""

from __future__ import annotations

import base64
import json
import pickle
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from slime import deadlines
from slime.engines.api import WEIGHT_PROBE, EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.wire.process_group import ExternalGroup
from slime.weights.transport import EngineSlots


class RankQuestions:
    """
    Args:
        engines: as many tensor-parallel ranks each as they have slots.
        address: of this process, as the engines reach it.
    """

    def __init__(self, fleet: EngineFleet, engines: Sequence[EngineSlots], address: str) -> None:
        self._fleet = fleet
        self._engines = engines
        self._address = address
        self._store = ExternalGroup.open_store(address, 1, deadlines.RANK_QUESTIONS_ANSWER)

    def ask(self, request: Mapping[str, Any], timeout: float) -> list[list[dict[str, Any]]]:
        """Every rank's answer, by engine.

        Args:
            request: for `slime.engines.sglang.weight_probe.report`, without the place of the store.
        Raises:
            EngineError: a rank could not do it, with its own words, or did not answer.
        """
        key = secrets.token_hex(4)

        def body(number: int) -> dict[str, Any]:
            place = {"host": self._address, "port": self._store.port, "key": f"{key}/{number}"}
            raw = json.dumps({**request, **place}).encode()
            payload = serialized(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            count = self._engines[number].num_ranks
            return {
                "serialized_named_tensors": [payload] * count,
                "load_format": WEIGHT_PROBE,
                "flush_cache": False,
            }

        self._fleet.post("/update_weights_from_tensor", body, timeout)
        return [[self._answer(f"{key}/{n}/{rank}", n) for rank in range(engine.num_ranks)]
                for n, engine in enumerate(self._engines)]  # fmt: skip

    def close(self) -> None:
        del self._store  # the listening socket goes with it

    def _answer(self, key: str, number: int) -> dict[str, Any]:
        url = self._engines[number].url
        try:
            self._store.wait([key], timedelta(seconds=deadlines.RANK_QUESTIONS_ANSWER))
        except RuntimeError as error:
            raise EngineError(
                url,
                f"a rank did not report its weights within {deadlines.RANK_QUESTIONS_ANSWER:.0f} s",
            ) from error
        answer: dict[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if "error" in answer:
            raise EngineError(
                url, f"its weights cannot be reported: {answer['error']}\n{answer['traceback']}"
            )
        return answer


def serialized(tensor: torch.Tensor) -> str:
    """One payload of ``serialized_named_tensors`` with the bytes of a small CPU tensor in it."""
    return base64.b64encode(pickle.dumps([("request", tensor)])).decode()
