"""One engine as `benchmarks.gpu.quantised` sees it: what it holds, what it says, and ways of
pushing weights to it."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.quantised_models import device
from benchmarks.gpu.quantised_state import state_of
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import HOST

SECONDS = 150.0  # a kernel may be compiled first
_NUM_PROMPTS = 8
_PROMPT_TOKENS = 64
_NEW_TOKENS = 16
_BUFFER = 512 << 20


def synchronise() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


class Seen:
    """What an engine held and said.

    Attributes:
        log_probs: of the prompts' tokens; answers: tokens and log-probs that it generated greedily.
        state: parameter → fingerprint.
    """

    def __init__(self, log_probs: list[float], answers: list[Any], state: dict[str, str]) -> None:
        self.log_probs = log_probs
        self.answers = answers
        self.state = state

    def distance(self, other: Seen) -> float:
        """Mean difference in nats, of the prompts that both were asked."""
        pairs = list(zip(self.log_probs, other.log_probs))
        return statistics.fmean(abs(a - b) if a == a and b == b else 1e9 for a, b in pairs)

    def verdict(self, other: Seen) -> Row:
        differ = sorted(name for name in self.state if self.state[name] != other.state.get(name))
        distance = self.distance(other)
        right = not differ and distance < 0.02
        return {
            "verdict": "right" if right else "wrong",
            "distance": distance,
            "parameters_that_differ": len(differ),
            "some": differ[:4],
            "same_answers": [a[0] for a in self.answers] == [a[0] for a in other.answers],
        }


class Engine:
    """Questions and pushes to one server."""

    def __init__(self, url: str, vocabulary: int, folder: Path | None) -> None:
        from slime.engines.fleet import EngineFleet
        from slime.weights.engine_check import RankQuestions
        from slime.weights.transport import EngineSlots

        self.fleet = EngineFleet([url])
        self._folder = folder
        self._slots = [EngineSlots(url, (0,))]
        self._ranks = RankQuestions(self.fleet, self._slots, HOST) if folder is not None else None
        draw = random.Random(0)
        self._prompts = [
            [draw.randrange(vocabulary) for _ in range(_PROMPT_TOKENS)] for _ in range(_NUM_PROMPTS)
        ]
        self._version = 0

    def close(self) -> None:
        self.fleet.close()

    def look(self) -> Seen:
        """What it says and holds."""
        self.fleet.flush_cache(SECONDS)
        log_probs = self.log_probs()
        return Seen(log_probs, self.answers, self._state())

    def log_probs(self, prompts: int = _NUM_PROMPTS, new_tokens: int = _NEW_TOKENS) -> list[float]:
        """Of all tokens of the prompts but the first ones; sets ``answers``."""
        found: list[float] = []
        self.answers: list[Any] = []
        for prompt in self._prompts[:prompts]:
            [answer] = self.fleet.post(
                "/generate",
                {
                    "input_ids": prompt,
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "sampling_params": {
                        "temperature": 0.0,
                        "max_new_tokens": new_tokens,
                        "ignore_eos": True,
                    },
                },
                SECONDS,
            )
            meta = answer["meta_info"]
            found += [_number(entry[0]) for entry in meta["input_token_logprobs"][1:]]
            generated = meta["output_token_logprobs"]
            self.answers.append(
                ([entry[1] for entry in generated], [_number(entry[0]) for entry in generated])
            )
        return found

    def push(
        self, way: str, tensors: Iterator[tuple[str, torch.Tensor]], directory: Path | None = None,
        resume: Callable[[], Any] = lambda: None,
    ) -> dict[str, float]:  # fmt: skip
        """Pause to continue; seconds by phase."""
        assert self._ranks is not None
        self._version += 1
        seconds: dict[str, float] = {}
        began = time.perf_counter()

        def timed(name: str, work: Callable[[], Any]) -> None:
            started = time.perf_counter()
            work()
            seconds[name] = time.perf_counter() - started

        ask = self._ranks.ask
        timed("pause", lambda: self.fleet.post("/pause_generation", {"mode": "abort"}, SECONDS))
        if way.startswith("open"):
            timed("open", lambda: ask({"action": "open"}, SECONDS))
        timed("transfer", lambda: self._send(way, tensors, directory))
        if way.startswith("open"):
            timed("close", lambda: ask({"action": "close"}, SECONDS))
        resume()
        timed("flush", lambda: self.fleet.flush_cache(SECONDS))
        timed("continue", lambda: self.fleet.post("/continue_generation", {}, SECONDS))
        return {**seconds, "total": time.perf_counter() - began}

    def _send(
        self, way: str, tensors: Iterator[tuple[str, torch.Tensor]], directory: Path | None
    ) -> None:
        from slime.engines.wire.buckets import Packing
        from slime.weights.distributed import DistributedTransport
        from slime.weights.ipc import IpcTransport
        from slime.weights.transport import Transport

        if "disk" in way:
            body = {
                "model_path": str(directory),
                "weight_version": str(self._version),
                "flush_cache": False,
            }
            self.fleet.post("/update_weights_from_disk", body, SECONDS)
            return
        transport: Transport
        packing = Packing(_BUFFER, torch.bfloat16)
        if "gloo" in way:
            transport = DistributedTransport(self.fleet, packing, "gloo", None, SECONDS)
        else:
            transport = IpcTransport(self.fleet, self._slots, None, packing, "runs" in way)
        try:
            synchronise()
            transport.send(tensors, self._version, lambda name, tensor: None)
        finally:
            transport.close()

    def _state(self) -> dict[str, str]:
        return {} if self._folder is None else state_of(self.fleet, self._folder, 1, SECONDS)


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
