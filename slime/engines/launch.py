"""Command lines of the server processes: an engine of either kind, and the router in front of them.

What is described here is started, watched and stopped by `slime.cluster`; nothing in this file starts a process.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.engines.router import router_flags
from slime.engines.sglang.command import (
    HEALTH_SECONDS,
    ONE_GPU,
    STARTUP_SECONDS,
    EnginePlace,
    sglang_argv,
    sglang_environment,
)

if TYPE_CHECKING:
    from slime.config import Config

_LARGEST_PAYLOAD = 4 << 30  # the router's own limit of 512 MiB is too small for requests with many images


@dataclass(frozen=True)
class LaunchSpec:
    """How to start one server process, and how to see that it is ready.

    Attributes:
        argv: command line, the interpreter first.
        env: variables set on top of the caller's environment.
        health_path: answers 200 as soon as the server can work.
        startup_timeout: seconds until then, at most.
        health_timeout: seconds that one answer may take.
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    startup_timeout: float = 600.0
    health_timeout: float = 5.0


def embedded_command(config: Config, model_path: str, host: str, port: int, number: int = 0) -> LaunchSpec:
    """The embedded engine (`slime.engines.embedded`), CPU or GPU.

    Args:
        number: of the engine in the run. Its seed follows from it: engines that drew the same numbers would give equal
            answers to the samples of one prompt.
    """
    argv = [sys.executable, "-m", "slime.engines.embedded"]
    argv += ["--model-path", model_path, "--host", host, "--port", str(port)]
    argv += ["--dtype", _embedded_dtype(config)]
    argv += ["--max-slots", str(config.engine.embedded_max_slots)]
    argv += ["--random-seed", str(config.rollout.rollout_seed + number)]
    argv += ["--log-level", config.observe.log_level]
    longest = config.rollout.rollout_max_context_len
    if longest is not None:
        argv += ["--max-context-len", str(longest)]
    if config.rollout.deterministic:
        argv += ["--deterministic"]
    if config.train.use_rollout_routing_replay:
        argv += ["--enable-return-routed-experts"]
    return LaunchSpec(argv, startup_timeout=300.0)


def sglang_command(config: Config, model_path: str, host: str, port: int, place: EnginePlace = ONE_GPU) -> LaunchSpec:
    """A stock SGLang server, or one node's part of it.

    Raises:
        UserError: SGLang is not installed, in no supported version, or cannot do what a flag asks for.
    """
    return LaunchSpec(
        sglang_argv(config, model_path, host, port, place),
        env=sglang_environment(config, place),
        # the other nodes of an engine serve nothing but this
        health_path="/health" if place.node_rank else "/health_generate",
        startup_timeout=STARTUP_SECONDS,
        health_timeout=HEALTH_SECONDS,
    )


def router_command(config: Config, host: str, port: int, worker_urls: list[str] | None = None) -> LaunchSpec:
    """The router; its workers are registered once it answers (`slime.engines.router.register_workers`).

    Under a policy that wants to be started with them, it is: hence ``worker_urls``.

    Its retries and circuit breaker are off, because our client owns retries. Its metrics need a port of their own
    (a fixed default would let only one router live on a host); it is free at this moment, and should it be taken
    before the router binds it, the router dies of "Address already in use" and is started again.
    """
    flags: dict[str, Any] = {
        "policy": "cache_aware",
        "request_timeout_secs": config.engine.sglang_router_request_timeout_secs,
        "prometheus_host": "127.0.0.1",
        "prometheus_port": _free_port("127.0.0.1"),
        "log_level": "warn",
        "max_payload_size": _LARGEST_PAYLOAD,
        "disable_retries": True,
        "disable_circuit_breaker": True,
        **config.engine.router,
    }
    flags = {**router_flags(flags.pop("policy"), worker_urls or []), **flags}
    argv = [sys.executable, "-m", "sglang_router.launch_router", "--host", host, "--port", str(port)]
    return LaunchSpec([*argv, *_as_flags(flags)], health_path="/liveness", startup_timeout=60.0)


def disaggregated_router_command(
    config: Config, host: str, port: int, prefill: list[tuple[str, int]], decode: list[str]
) -> LaunchSpec:
    """The router in front of pairs of servers: one computes the prompt's cache, the other decodes.

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


def _as_flags(values: Mapping[str, Any]) -> list[str]:
    """{"policy": "random", "disable_retries": True} → ["--policy", "random", "--disable-retries"]."""
    words: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


def _embedded_dtype(config: Config) -> str:
    """--embedded-dtype, where "auto" means the trainer's precision (float16 training generates in bfloat16)."""
    chosen = config.engine.embedded_dtype
    if chosen != "auto":
        return str(chosen)
    return "float32" if config.megatron.fp32 else "bfloat16"


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
