"""``--rm-type remote_rm``: a reward model. POST {prompt, response, label}; the JSON answer is the
reward."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from slime.engines.api import TRANSIENT
from slime.errors import UserError
from slime.samples.types import Sample

_MAX_CONNECTIONS = 64
_MAX_DELAY = 30.0


@dataclass(eq=False)
class RemoteReward:
    """Client of one reward server.

    Args:
        url: where to POST.
        timeout: seconds for each attempt.
        backoff: seconds before the second attempt; doubled each time, up to 30, plus jitter of up
            to the smaller of ``backoff`` and 1 second.
        tries: number of attempts.
    """

    url: str
    timeout: float
    backoff: float = 1.0
    tries: int = 10

    def __post_init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def score(self, sample: Sample) -> Any:
        """Return the server's reward. Retries after a time-out, a lost connection or a 5xx answer.

        Raises:
            TimeoutError: the last attempt timed out.
            UserError: the server refuses the request, cannot be reached, or does not answer with
                JSON.
        """
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
            # unlike the run's addresses, the user's may be reached through the environment's proxy
            self._session = aiohttp.ClientSession(connector=connector, trust_env=True)
        # orjson accepts neither integers beyond 64 bits nor subclasses of float
        body = json.dumps(
            {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
        ).encode()
        last: Exception | str = ""
        for attempt in range(self.tries):
            if attempt:
                delay = min(self.backoff * 2 ** (attempt - 1), _MAX_DELAY)
                await asyncio.sleep(delay + random.uniform(0, min(self.backoff, 1.0)))
            try:
                status, raw = await self._post(body)
            except (TimeoutError, aiohttp.ClientError) as error:
                last = error
                continue
            if status >= 500 or status in TRANSIENT:
                last = f"status {status}: {raw[:200].decode(errors='replace')}"
                continue
            return self._decode(status, raw)
        if isinstance(last, TimeoutError):
            raise TimeoutError(
                f"no answer from {self.url} in {self.tries} tries of {self.timeout:.0f} s"
            )
        raise UserError(
            f"the reward model at {self.url} failed {self.tries} times in a row",
            why=str(last) or type(last).__name__,
            fix="check that it runs, and --rm-url",
        )

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        assert self._session is not None
        headers = {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=self.timeout)
        async with self._session.post(
            self.url, data=body, headers=headers, timeout=limit
        ) as response:
            return response.status, await response.read()

    def _decode(self, status: int, raw: bytes) -> Any:
        said = raw[:200].decode(errors="replace")
        if status >= 400:
            raise UserError(
                f"the reward model at {self.url} answered {status}", why=said, fix="check --rm-url"
            )
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise UserError(
                f"the reward model at {self.url} answered with no JSON", why=said
            ) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
