"""Engines that can still be asked: one in this process, and one behind a URL."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.diagnosis.align.case import Untested
from slime.diagnosis.align.reference import Watcher
from slime.engines.api import EngineError
from slime.engines.embedded.architecture import Architecture
from slime.engines.embedded.kv_cache import KVCache
from slime.engines.embedded.scheduler import Scheduler
from slime.engines.embedded.sequence import Sequence as Request
from slime.engines.embedded.weights import make_store
from slime.engines.fleet import EngineFleet
from slime.engines.request_fields import parse_params
from slime.errors import UserError

#: Until an engine has scored one request; the first compiles kernels.
_SECONDS = 300.0
#: Rows that ``/get_weights_by_name`` gives at most.
_MOST_ROWS = 10_000
_SLOTS, _PREFILL, _CACHE_BYTES = 16, 2048, 1 << 30


class EngineHere:
    """The embedded engine, without its server.

    Args:
        directory: a Hugging Face directory.
        dtype: "float32" or "bfloat16".
        stands_in: for an engine that cannot be asked; what it computes is that one's, its weights are not.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: str,
        *,
        longest: int,
        device: str = "cpu",
        deterministic: bool = False,
        stands_in: bool = False,
    ) -> None:
        self._stands_in = stands_in
        arch = Architecture.from_dir(directory)
        store = make_store(
            directory, arch, dtype, torch.device(device), min(longest, arch.max_positions), deterministic
        )
        cache = KVCache(arch, store.dtype, store.device, _SLOTS, _CACHE_BYTES)
        self.scheduler = Scheduler(store, cache, _PREFILL, deterministic)

    def score(self, tokens: Sequence[Sequence[int]], *, together: bool) -> list[list[float]]:
        params = parse_params({"max_new_tokens": 0, "temperature": 1.0})
        requests = [
            Request(str(number), list(ids), params, 0, frozenset(), 0, logprob_start=0)
            for number, ids in enumerate(tokens)
        ]
        for part in [requests] if together else [[request] for request in requests]:
            self.scheduler.flush()
            self.scheduler.submit(part)
            while self.scheduler.has_work:
                self.scheduler.step()
        return [request.input_logprobs for request in requests]

    def fingerprints(self) -> dict[str, str]:
        if self._stands_in:
            raise Untested("the engine that generated is gone: --engine URL asks one that runs")
        return self.scheduler.store.fingerprints()

    def tensor(self, name: str) -> Tensor:
        return self.scheduler.store.parameter(name)

    def parts(self, tokens: Tensor) -> dict[str, Tensor]:
        """The outputs of all parts for all tokens but the last, which is not computed for them; at most as many tokens
        as one prefill takes. See `slime.engines.embedded.model.Observer`."""
        model, watcher = self.scheduler.store.model, Watcher(keeps=True)
        model.forward = partial(model.forward, observer=watcher)  # type: ignore[method-assign]
        try:
            self.score([tokens[:_PREFILL].tolist()], together=False)
        finally:
            del model.forward  # the class's own again
        return {name: value[: len(tokens) - 1] for name, value in watcher.seen.items()}


class EngineThere:
    """An engine of either kind behind a URL, or several behind a router, of which one answers.

    Raises:
        UserError: nobody answers there.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fleet = EngineFleet([url])
        try:
            self.info = self._fleet.get("/server_info", _SECONDS)[0]
        except EngineError as error:
            raise UserError(
                f"no engine answers at {url}", why=str(error), fix="pass --engine http://host:port"
            ) from error

    def score(self, tokens: Sequence[Sequence[int]], *, together: bool) -> list[list[float]]:
        asked: list[Any] = [[list(ids) for ids in tokens]] if together else [[list(ids)] for ids in tokens]
        found: list[list[float]] = []
        for ids in asked:
            body = {
                "input_ids": ids,
                "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answers: Any = self._post("/generate", body)
            for answer in answers if isinstance(answers, list) else [answers]:
                entries = answer["meta_info"]["input_token_logprobs"]
                found.append([float("nan") if entry[0] is None else float(entry[0]) for entry in entries][1:])
        return found

    def fingerprints(self) -> dict[str, str]:
        answer = self._post("/weights_checker", {"action": "fingerprint"})
        found = answer.get("fingerprints")
        if not isinstance(found, dict):
            raise Untested("SGLang gives no fingerprints: --check-weight-update-equal compares them at every push")
        return {str(name): str(value) for name, value in found.items()}

    def tensor(self, name: str) -> Tensor:
        found = torch.tensor(self._post("/get_weights_by_name", {"name": name, "truncate_size": _MOST_ROWS}))
        if len(found) == _MOST_ROWS:
            raise Untested(f"the engine gives the first {_MOST_ROWS} rows of {name} only")
        return found

    def close(self) -> None:
        self._fleet.close()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        try:
            return self._fleet.post(path, body, _SECONDS)[0]
        except EngineError as error:
            raise Untested(f"the engine refuses {path}: {error}") from error
