"""HTTP for users' generate functions: requests to any address, under the same rules as our own.

``post`` goes through the rollout's client, so it is counted as in flight, retried, and answered at once as aborted
while a rollout ends.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from slime.errors import UserError
from slime.rollout.generate import current_state

_ABORTED_META = {"finish_reason": {"type": "abort"}, "output_token_logprobs": []}


async def post(
    url: str,
    payload: dict[str, Any],
    max_retries: int = 60,
    action: str = "post",
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """POST JSON and return the decoded answer; an empty "abort" answer of ``/generate`` while an abort is under way.

    Args:
        max_retries: 0 or 1 for a single try; otherwise the rollout's own retry rules hold.
        action: "post"; the only one that is supported.
    Raises:
        RequestRefused: HTTP 4xx.
        EngineError: failing after all retries, or no answer within the deadline.
    """
    if action != "post":
        raise UserError(f"http action {action!r} is not supported", fix="use 'post', or get()")
    origin, path = _split(url)
    state = current_state()
    answer = await state.client.post(path, payload, url=origin, headers=headers, retry=max_retries > 1)
    return {"text": "", "output_ids": [], "meta_info": dict(_ABORTED_META)} if answer is None else answer


async def get(url: str) -> dict[str, Any]:
    """GET and return the decoded answer; not retried.

    Raises:
        EngineError: no answer within the deadline, or HTTP status >= 400.
    """
    origin, path = _split(url)
    return await (await current_state().client.engine(origin)).get(path)


def _split(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}", url[len(parts.scheme) + 3 + len(parts.netloc) :] or "/"
