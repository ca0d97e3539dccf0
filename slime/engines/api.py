"""The engine protocol: SGLang's HTTP API, the only interface of rollout and weight sync to an
engine.

    rollout   /generate ──► router ──► engine 0..n
    weights   pause, update, flush, continue ──► each engine

Two servers speak it: stock SGLang and the embedded engine (`slime.embedded`). One contract test
suite (`tests/contracts/test_engine.py`) runs against both.
"""

from __future__ import annotations

import http.client
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from slime import deadlines
from slime.engines.keys import header_of, key_of

if TYPE_CHECKING:
    import aiohttp

#: Counts of requests and tokens; an engine answers this in any state, paused or asleep.
LOADS_PATH = "/v1/loads?include=core"

#: Dotted path of the function with which SGLang engines report their weights.
WEIGHT_PROBE = "slime.engines.sglang.weight_probe.report"

#: Dotted path of the function that loads buckets in which neighbouring experts are one tensor.
WEIGHT_LOADER = "slime.engines.sglang.weight_loader.load"

#: Fields of a request that sends weights or asks about them: they leave a draft model as it is.
#: SGLang reads the first up to 0.5.20, the second since; without them it loads the policy's
#: tensors into the draft as well.
ONLY_THE_POLICY = {"disable_draft_model": True, "selector": "target"}

#: Traffic between our own processes must ignore proxy variables.
WITHOUT_PROXIES = urllib.request.build_opener(urllib.request.ProxyHandler({}))


#: HTTP statuses from 400 to 499 after which the same request may succeed.
TRANSIENT = (408, 425, 429)


class EngineError(Exception):
    """A request to an engine or the router failed: HTTP status, time-out or a body with
    success=false."""

    def __init__(self, url: str, what: str, status: int | None = None) -> None:
        super().__init__(url, what, status)
        self.url = url
        self.what = what
        self.status = status

    def __str__(self) -> str:
        return f"{self.url}: {self.what}"


def is_silent(error: BaseException | None) -> bool:
    """Tell whether an engine did not answer at all; a refusal is an answer."""
    return isinstance(error, EngineError) and error.status is None


@dataclass
class GenerateResult:
    """One finished (or aborted) ``/generate`` call.

    Attributes:
        token_ids: sampled tokens, the stop token included.
        log_probs: one per token, temperature-scaled, before top-p / top-k; after them if the
            request had ``return_sampling_mask``.
        text: the decoded tokens.
        finish_reason: "stop" | "length" | "abort".
        meta_info: the engine's whole ``meta_info``, including ``weight_version`` and cache
            counters.
    """

    token_ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: str
    meta_info: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def from_json(body: dict[str, Any]) -> GenerateResult:
        """Read the answer of ``/generate``.

        Raises:
            EngineError: the answer is malformed, or has tokens without a log-prob (null stands for
                NaN).
        """
        if "meta_info" not in body:
            raise EngineError("/generate", f"the answer has no meta_info: {body!r:.200}")
        meta = body["meta_info"]
        pairs = meta.get("output_token_logprobs") or []
        token_ids = list(body.get("output_ids") or [])
        num_tokens = max(len(pairs), len(token_ids))
        num_log_probs = sum(pair[0] is not None for pair in pairs)
        if pairs and num_log_probs < num_tokens:
            raise EngineError(
                "/generate", f"the answer has {num_log_probs} log-probs for {num_tokens} tokens"
            )
        log_probs = [pair[0] for pair in pairs]
        if (sampled := meta.get("output_token_sampling_logprobs")) is not None:
            if len(sampled) != num_tokens or None in sampled:
                raise EngineError(
                    "/generate",
                    f"the answer has sampling log-probs {sampled!r:.200} for {num_tokens} tokens",
                )
            log_probs = sampled
        reason = meta.get("finish_reason") or {}
        return GenerateResult(
            token_ids=[int(pair[1]) for pair in pairs] if pairs else token_ids,
            log_probs=[float(value) for value in log_probs],
            text=body.get("text", ""),
            finish_reason=reason.get("type", "") if isinstance(reason, dict) else str(reason),
            meta_info=meta,
        )


def is_ready(url: str, timeout: float) -> bool:
    """Tell whether a GET of ``url`` is answered with 200 within ``timeout`` seconds; for callers
    without an event loop."""
    try:
        with WITHOUT_PROXIES.open(url, timeout=timeout) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):  # not up yet, or a status of 400 or more
        return False


class EngineClient:
    """Async HTTP client for one base URL (an engine or the router). Every call has a deadline, and
    carries the key that this process knows for the URL (`slime.engines.keys`).

    Use as ``async with EngineClient(url) as engine``. Any number of tasks of one event loop may
    share it.

    Args:
        url: base URL, e.g. "http://127.0.0.1:30000".
        timeout: default deadline of a call, in seconds; `request` can override it.
    """

    def __init__(self, url: str, timeout: float = deadlines.ENGINE_API_ANSWER) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineClient:
        import aiohttp  # imported here, because most processes make no requests

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
        # trust_env stays off, as in `WITHOUT_PROXIES`
        no_cookies = aiohttp.DummyCookieJar()
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=no_cookies, trust_env=False, read_bufsize=1 << 20
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make one call; return the decoded JSON body ({} if the answer has none).

        Raises:
            EngineError: connection failed, deadline passed, or HTTP status >= 400; 401 if the
                engine refuses the key.
        """
        import aiohttp

        assert self._session is not None, "EngineClient is used outside 'async with'"
        limit = aiohttp.ClientTimeout(total=timeout or self.timeout)
        payload = orjson.dumps(body) if body is not None else None
        key = key_of(self.url)
        send_headers = {"Content-Type": "application/json", **header_of(key), **(headers or {})}
        try:
            async with self._session.request(
                method, self.url + path, data=payload, headers=send_headers, timeout=limit
            ) as response:
                raw = await response.read()
                if response.status >= 400:
                    said = (
                        f"{path} answered {response.status}: {raw[:500].decode(errors='replace')}"
                    )
                    if response.status == 401:
                        refusal = (
                            "refuses the run's key" if key else "asks for a key, and none is known"
                        )
                        said = f"{refusal}: {said}"
                    raise EngineError(self.url, said, response.status)
        except TimeoutError as error:
            raise EngineError(
                self.url, f"{path} gave no answer within {timeout or self.timeout:.0f} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineError(
                self.url, f"{path} failed: {type(error).__name__}: {error}"
            ) from error
        try:
            decoded = orjson.loads(raw) if raw else {}
        except orjson.JSONDecodeError:  # /health and /flush_cache answer plain text
            return {"text": raw.decode(errors="replace")}
        return decoded if isinstance(decoded, dict) else {"items": decoded}

    async def get(self, path: str, timeout: float | None = None) -> dict[str, Any]:
        return await self.request("GET", path, timeout=timeout)

    async def post(
        self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> dict[str, Any]:
        """Call `request` with POST; a body with ``success: false`` raises EngineError too."""
        answer = await self.request("POST", path, body if body is not None else {}, timeout=timeout)
        if answer.get("success") is False:
            raise EngineError(self.url, f"{path} refused: {answer.get('message') or answer}")
        return answer
