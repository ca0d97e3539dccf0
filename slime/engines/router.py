"""The router (`sglang-router` 0.3.2): its command line, its workers, its policies.

    POST /workers {"url", …}   answers 202 at once; the router then asks the worker for /health, …
    GET  /workers              lists those that passed, with health, current load and labels
    DELETE /workers/{id}       answers 202 at once

These routes and those that generate require the router's key. Requests that it forwards carry the
worker's key instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime import deadlines
from slime.config.engine_flags import to_argv
from slime.engines import keys
from slime.engines.api import EngineClient, EngineError
from slime.engines.launch import LaunchSpec
from slime.errors import UserError
from slime.processes.host import free_port, python_module

if TYPE_CHECKING:
    from slime.config.config import Config

#: Name on the command line → policy of the router. ``cache_aware`` keeps the samples of one prompt
#: on one engine, also for requests that come as token ids. ``consistent_hashing`` is the reference
#: system's name for session affinity, which this router calls ``manual``.
POLICIES = {
    name: name for name in ("cache_aware", "round_robin", "random", "power_of_two", "manual")
} | {"consistent_hashing": "manual"}

#: Answers 200 as long as the router itself is healthy, whatever the state of its workers.
LIVENESS_PATH = "/liveness"

#: Requests of one session carry the same value; the ``manual`` policy sends them to the same
#: engine.
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"

#: Label of workers that were started outside this run, as the router stores and lists it.
EXTERNAL = {"slime": "external"}

# the router's own limit of 512 MiB is too small for requests with many images
_LARGEST_PAYLOAD = 4 << 30


def router_policy(name: str) -> str:
    """Return the router's own name of a policy given as ``--router-policy`` or
    ``--sglang-router-strategy``.

    Raises:
        UserError: there is no such policy.
    """
    if name not in POLICIES:
        raise UserError(
            f"--router-policy {name}: there is no such policy",
            fix=f"choose one of: {', '.join(sorted(POLICIES))}",
        )
    return POLICIES[name]


def router_flags(name: str, worker_urls: list[str]) -> dict[str, Any]:
    """Return the router's flags for a policy and the workers that it will have.

    ``power_of_two`` only starts with two workers on its command line, so it gets them there; under
    other policies they register (`register_workers`). It polls their load (``/get_load``) at the
    interval of its start-up checks, which is therefore a second instead of half a minute. One
    worker needs no policy.
    """
    policy = router_policy(name)
    first = workers_at_start(name, worker_urls)
    if first:
        return {"policy": policy, "worker_urls": first, "worker_startup_check_interval": 1}
    return {"policy": "round_robin" if policy == "power_of_two" else policy}


def workers_at_start(name: str, worker_urls: list[str]) -> list[str]:
    """Return the workers that this policy needs on the router's command line.

    The router sends them its own key, so external engines are never among them.
    """
    own = [url for url in worker_urls if not keys.is_external(url)]
    return own if router_policy(name) == "power_of_two" and len(own) > 1 else []


def wants_routing_key(name: str) -> bool:
    """Return whether this policy needs `ROUTING_KEY_HEADER` in requests."""
    return router_policy(name) == "manual"


# -- its command line ------------------------------------------------------------------------------


def router_command(
    config: Config, host: str, port: int, worker_urls: list[str] | None = None
) -> LaunchSpec:
    """Return how to start the router; its workers register once it answers (`register_workers`).

    Its retries and circuit breaker are off: `RolloutClient` does the retries, and an open circuit
    would answer 503 for a minute after an engine has returned. Its metrics get a free port, because
    with a fixed port only one router could run per host. If another process takes that port first,
    the router ends with "Address already in use" and is restarted.

    Args:
        worker_urls: workers for policies that need them on the command line (`workers_at_start`).
    """
    flags: dict[str, Any] = {
        "policy": "cache_aware",
        "request_timeout_secs": config.engine.sglang_router_request_timeout_secs,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": free_port("127.0.0.1"),
        "log_level": "warn",
        "max_payload_size": _LARGEST_PAYLOAD,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        **config.engine.router,
    }
    flags = {**router_flags(flags.pop("policy"), worker_urls or []), **flags}
    argv = [*python_module("slime.engines.router_process"), "--host", host, "--port", str(port)]
    given = {
        name: value for name, value in flags.items() if value is not None and value is not False
    }
    return LaunchSpec(
        [*argv, *to_argv(given)],
        health_path=LIVENESS_PATH,
        startup_timeout=deadlines.ROUTER_STARTUP,
    )


def disaggregated_router_command(
    config: Config, host: str, port: int, prefill: list[tuple[str, int]], decode: list[str]
) -> LaunchSpec:
    """Return how to start a router for pairs of servers: one for the prompt, the other decodes.

    Args:
        prefill: URL and bootstrap port of each prefill server; decode: URLs of the decode servers.
    """
    spec = router_command(config, host, port)
    pairs = ["--pd-disaggregation"]
    for url, bootstrap_port in prefill:
        pairs += ["--prefill", url, str(bootstrap_port)]
    for url in decode:
        pairs += ["--decode", url]
    return dataclasses.replace(spec, argv=[*spec.argv, *pairs])


# -- its workers -----------------------------------------------------------------------------------


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
        (keys.register_external if worker.is_external else keys.register_own)(worker.url)
    return workers


#: The router's name of the model. Without it the router would reveal the model's path, because
#: /v1/models needs no key.
_MODEL = "policy"


async def register_workers(
    router_url: str, worker_urls: list[str], timeout: float, policy: str = "cache_aware"
) -> None:
    """Put engines behind the router and wait until it has accepted each of them as healthy.

    Known workers are not changed.

    Args:
        timeout: deadline in seconds for all of them together.
        policy: the name that the router was configured with, see `workers_at_start`.
    Raises:
        EngineError: names engines that the router refused or that were not healthy in time.
    """
    end = time.monotonic() + timeout
    async with EngineClient(router_url, timeout=min(timeout, deadlines.WORKERS_LIST)) as router:
        known = {worker.url for worker in await list_workers(router)}
        known |= set(workers_at_start(policy, worker_urls))
        for url in worker_urls:
            if url not in known:
                labels = EXTERNAL if keys.is_external(url) else {}
                body = {
                    "url": url,
                    "api_key": keys.key_of(url) or keys.NO_KEY,
                    "labels": labels,
                    "model_id": _MODEL,
                }
                await router.request("POST", "/workers", body)
        while True:
            healthy = {worker.url for worker in await list_workers(router) if worker.healthy}
            missing = [url for url in worker_urls if url not in healthy]
            if not missing:
                return
            if time.monotonic() > end:
                raise EngineError(
                    router_url,
                    f"not healthy behind the router in {timeout:.0f} s: {', '.join(missing)}",
                )
            await asyncio.sleep(0.1)


async def remove_worker(router_url: str, worker_url: str, timeout: float) -> None:
    """Remove an engine from the router (it gets no new requests), and wait until it is removed.

    Raises:
        EngineError: the engine is still registered after ``timeout`` seconds.
    """
    end = time.monotonic() + timeout
    async with EngineClient(router_url, timeout=timeout) as router:
        while True:
            ids = [worker.id for worker in await list_workers(router) if worker.url == worker_url]
            if not ids:
                return
            if time.monotonic() > end:
                raise EngineError(
                    router_url, f"worker {worker_url} is still registered after {timeout:.0f} s"
                )
            try:
                await router.request("DELETE", f"/workers/{ids[0]}")
            except EngineError as error:
                if error.status != 404:  # it was removed meanwhile
                    raise
            await asyncio.sleep(0.1)
