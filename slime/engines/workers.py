"""The engines behind a router, as the router lists them."""

from __future__ import annotations

from dataclasses import dataclass

from slime import deadlines
from slime.engines import keys
from slime.engines.api import EngineClient, EngineError

#: Requests of one session carry the same value; the ``manual`` policy sends them to the same
#: engine.
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"

#: Label of workers that were started outside this run, as the router stores and lists it.
EXTERNAL = {"slime": "external"}


@dataclass(frozen=True)
class RouterWorker:
    """One engine behind the router.

    The router's load count is omitted: it is 0 under most policies.

    Attributes:
        is_external: it was started outside this run.
    """

    id: str
    url: str
    healthy: bool
    is_external: bool = False


async def list_workers(router: EngineClient) -> list[RouterWorker]:
    """List the router's workers and register their keys; an engine without a router is listed as
    its own only worker.

    Raises:
        EngineError: no answer.
    """
    try:
        body = await router.get("/workers", timeout=deadlines.WORKERS_LIST)
    except EngineError as error:
        if error.status != 404:
            raise
        return [RouterWorker("", router.url, healthy=True)]
    workers = [
        RouterWorker(
            item["id"],
            item["url"],
            bool(item["is_healthy"]),
            EXTERNAL.items() <= item.get("metadata", {}).items(),
        )
        for item in body["workers"]
    ]
    for worker in workers if keys.key_of(router.url) else ():
        (keys.external if worker.is_external else keys.own)(worker.url)
    return workers
