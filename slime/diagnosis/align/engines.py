"""Engines that score samples again: one in this process, and one at a URL."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from slime import deadlines
from slime.diagnosis.align.case import Untested
from slime.diagnosis.align.evidence import Scored
from slime.diagnosis.align.reference import Watcher
from slime.diagnosis.align.sight import read_images
from slime.embedded.architecture import Architecture
from slime.embedded.images import SequenceImages
from slime.embedded.kv_cache import KVCache
from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence as Request
from slime.embedded.weights import make_store
from slime.engines.api import WITHOUT_PROXIES
from slime.engines.keys import VARIABLE, header_of, key_of, register_external
from slime.engines.request_fields import parse_params
from slime.errors import UserError
from slime.models.images import ImageReader
from slime.rollout.generate import encoded_images

#: Maximum rows that ``/get_weights_by_name`` returns.
_MAX_ROWS = 10_000
_SLOTS = 16
_PREFILL = 2048
_CACHE_BYTES = 1 << 30


class EngineHere:
    """The embedded engine, without its server.

    Args:
        directory: a Hugging Face directory.
        dtype: "float32" or "bfloat16".
        stands_in: it replaces the run's engine, which does not answer any more. It computes the
            same, but its weights say nothing about that engine's weights.
        images: prepares the samples' images; None: it serves text only.
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
        images: ImageReader | None = None,
    ) -> None:
        self._stands_in = stands_in
        self._images = images
        arch = Architecture.from_dir(directory, sees_images=images is not None)
        store = make_store(
            directory,
            arch,
            dtype,
            torch.device(device),
            min(longest, arch.spec.max_position_embeddings),
            deterministic,
        )
        cache = KVCache(arch, store.dtype, store.device, _SLOTS, _CACHE_BYTES)
        self.scheduler = Scheduler(store, cache, _PREFILL, deterministic)

    def score(self, samples: Sequence[Scored], *, together: bool) -> list[list[float]]:
        params = parse_params({"max_new_tokens": 0, "temperature": 1.0})
        requests = [
            Request(
                str(number),
                sample.tokens.tolist(),
                params,
                0,
                frozenset(),
                0,
                logprob_start=0,
                images=self._images_of(sample),
            )
            for number, sample in enumerate(samples)
        ]
        for part in [requests] if together else [[request] for request in requests]:
            self.scheduler.flush()
            self.scheduler.submit(part)
            while self.scheduler.has_work:
                self.scheduler.step()
        return [request.input_logprobs for request in requests]

    def _images_of(self, sample: Scored) -> SequenceImages | None:
        if self._images is None:
            return None
        return read_images(sample.media, len(sample.tokens), self._images.read)

    def fingerprints(self) -> dict[str, str]:
        if self._stands_in:
            raise Untested("the engine that generated is gone: --engine URL asks one that runs")
        return self.scheduler.store.fingerprints()

    def tensor(self, name: str) -> Tensor:
        return self.scheduler.store.parameter(name)

    def parts(self, sample: Scored) -> dict[str, Tensor]:
        """Return part → output [L - 1, hidden] for all tokens except the last, with the part names
        of `slime.embedded.model.Observer`. The sample must fit into one prefill."""
        model = self.scheduler.store.model
        watcher = Watcher(keeps=True)
        model.forward = partial(model.forward, observer=watcher)  # type: ignore[method-assign]
        try:
            self.score([sample], together=False)
        finally:
            del model.forward  # uncovers the class's method
        return {name: value[: len(sample.tokens) - 1] for name, value in watcher.seen.items()}


class EngineThere:
    """An engine of any kind at a URL, or one of several behind a router. Requests carry the key
    from the environment variable SLIME_ENGINE_KEY.

    Raises:
        UserError: no engine answers there.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        register_external(self.url)
        try:
            self._ask("/server_info", None)
        except Untested as error:
            raise UserError(
                f"no engine answers at {url}",
                why=str(error),
                fix="pass --engine http://host:port; one that asks for a key gets that of "
                f"{VARIABLE}",
            ) from error

    def score(self, samples: Sequence[Scored], *, together: bool) -> list[list[float]]:
        with ThreadPoolExecutor(len(samples) if together else 1) as requests:
            return list(requests.map(self._score, samples))

    def _score(self, sample: Scored) -> list[float]:
        body: dict[str, Any] = {
            "input_ids": _one_placeholder_each(sample),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        if sample.media:
            body["image_data"] = encoded_images([one.reference for one in sample.media])
        entries = self._ask("/generate", body)["meta_info"]["input_token_logprobs"]
        return [float("nan") if entry[0] is None else float(entry[0]) for entry in entries[1:]]

    def fingerprints(self) -> dict[str, str]:
        found = self._ask("/weights_checker", {"action": "fingerprint"}).get("fingerprints")
        if not isinstance(found, dict):
            raise Untested(
                "this engine gives no fingerprints: --check-weight-update-equal compares them at "
                "every push"
            )
        return {str(name): str(value) for name, value in found.items()}

    def tensor(self, name: str) -> Tensor:
        found = torch.tensor(
            self._ask("/get_weights_by_name", {"name": name, "truncate_size": _MAX_ROWS})
        )
        if len(found) == _MAX_ROWS:
            raise Untested(f"the engine gives the first {_MAX_ROWS} rows of {name} only")
        return found

    def _ask(self, path: str, body: dict[str, Any] | None) -> Any:
        """Send a request; return the decoded JSON answer, which may be a list.

        Raises:
            Untested: the engine does not answer, or refuses.
        """
        data = None if body is None else orjson.dumps(body)
        headers = {"Content-Type": "application/json", **header_of(key_of(self.url))}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with WITHOUT_PROXIES.open(request, timeout=deadlines.ALIGN_ENGINES_ANSWER) as answer:
                return orjson.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise Untested(
                f"{path} answered {error.code}: {error.read()[:300].decode(errors='replace')}"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Untested(f"{path}: {error}") from error


def _one_placeholder_each(sample: Scored) -> list[int]:
    """Return a sample's tokens with one placeholder per image, as engines expect them."""
    ids = sample.tokens.tolist()
    found: list[int] = []
    end = 0
    for one in sample.media:
        found += ids[end : one.span.start + 1]
        end = one.span.end
    return found + ids[end:]
