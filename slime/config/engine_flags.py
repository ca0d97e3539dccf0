"""``--sglang-…`` and ``--router-…``: the command lines of SGLang's server and of sglang-router,
behind a prefix.

SGLang's table is stored (`sglang_flags.json`, made by `tools/make_sglang_flag_table.py`) for hosts
where SGLang is not installed; where another version is installed, its own source is read instead.
The router is always installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.config.flag import FlagMeta, FlagSpec, Kind
from slime.config.foreign import ForeignArg, SourceReader
from slime.documentation import doc_url

TABLE = Path(__file__).with_name("sglang_flags.json")

_PER_ENGINE = "it is chosen for each engine"


@dataclass(frozen=True)
class EngineFlags:
    """What the flags must know of an engine, before anything of it is imported; the rest is
    `slime.engines.kinds`.

    Attributes:
        section: of the flags that are its own options; "" where its options are flags like all
            others.
        spans_nodes: one engine may have GPUs of several nodes.
        splits_prefill: some engines may prefill for others that decode.
    """

    section: str = ""
    spans_nodes: bool = False
    splits_prefill: bool = False


#: By the name of ``--rollout-engine``.
ENGINE_OPTIONS = {
    "embedded": EngineFlags(),
    "sglang": EngineFlags("sglang", spans_nodes=True, splits_prefill=True),
}

_PORTS = "ports are reserved for each engine"
_OWN_KEY = (
    f"each run makes its own key, which its engines and routers require: {doc_url('security.md')}"
)
_PAST_KEY = "a gRPC listener would answer without the run's key"
_NO_TLS = "the clients of engines and router speak plain HTTP"
_NO_QUANTISED = (
    "pushes bring what --hf-checkpoint has, plain or quantised; one into weights that SGLang "
    "quantised was not tried"
)

#: SGLang's arguments that this system sets itself. name -> reason
SGLANG_RESERVED: dict[str, str] = {
    "model_path": "it is --hf-checkpoint",
    "config": (
        "give SGLang's options as --sglang-<name>; --sglang-config is the YAML file of server "
        "groups"
    ),
    "trust_remote_code": "it is --trust-remote-code",
    "random_seed": "it is --rollout-seed, different for each engine",
    "enable_memory_saver": "it follows --offload-rollout",
    "tp_size": "it is --rollout-num-gpus-per-engine divided by --sglang-pp-size",
    "host": "engines are reached at the address of their node",
    "port": _PORTS,
    "nccl_port": _PORTS,
    "dist_init_addr": _PORTS,
    "nnodes": _PER_ENGINE,
    "node_rank": _PER_ENGINE,
    "gpu_id_step": _PER_ENGINE,
    "base_gpu_id": _PER_ENGINE,
    "skip_server_warmup": "the first weight push warms the engine up",
    "enable_return_routed_experts": "it follows --use-rollout-routing-replay",
    **dict.fromkeys(("api_key", "admin_api_key"), _OWN_KEY),
    **dict.fromkeys(("grpc_port", "grpc_mode", "smg_grpc_mode"), _PAST_KEY),
    **dict.fromkeys(
        (
            "ssl_keyfile",
            "ssl_certfile",
            "ssl_ca_certs",
            "ssl_keyfile_password",
            "enable_ssl_refresh",
        ),
        _NO_TLS,
    ),
    **dict.fromkeys(
        (
            "quantization",
            "quantization_param_path",
            "modelopt_quant",
            "quantize_and_serve",
            "rl_quant_profile",
            "torchao_config",
        ),
        _NO_QUANTISED,
    ),
}

#: Single values of SGLang's arguments that ask for speed alone. name -> value -> (what is taken,
#: reason)
SGLANG_INSTEAD: dict[str, dict[str, tuple[str, str]]] = {
    "moe_a2a_backend": {
        "deepep": (
            "none",
            "DeepEP's exchange is not in this version; experts give the same results by "
            "collectives",
        )
    },
}

_OWN_ROUTER = "the router is started here, with the engines of this run"

#: The router's arguments that this system sets itself. name -> reason
ROUTER_RESERVED: dict[str, str] = {
    "host": _OWN_ROUTER,
    "port": _OWN_ROUTER,
    "worker_urls": _OWN_ROUTER,
    "model_path": "the client sends token ids; the router needs no tokenizer",
    "tokenizer_path": "the client sends token ids; the router needs no tokenizer",
    "request_timeout_secs": "use --sglang-router-request-timeout-secs",
    "mini_lb": "prefill and decode servers are groups of --sglang-config",
    "pd_disaggregation": "prefill and decode servers are groups of --sglang-config",
    "prefill": "prefill and decode servers are groups of --sglang-config",
    "decode": "prefill and decode servers are groups of --sglang-config",
    "prefill_policy": "prefill and decode servers are groups of --sglang-config",
    "decode_policy": "prefill and decode servers are groups of --sglang-config",
    "service_discovery": _OWN_ROUTER,
    "selector": _OWN_ROUTER,
    "prefill_selector": _OWN_ROUTER,
    "decode_selector": _OWN_ROUTER,
    "service_discovery_port": _OWN_ROUTER,
    "service_discovery_namespace": _OWN_ROUTER,
    **dict.fromkeys(
        (
            "api_key",
            "control_plane_api_keys",
            "control_plane_audit_enabled",
            "jwt_issuer",
            "jwt_audience",
            "jwt_jwks_uri",
            "jwt_role_mapping",
        ),
        _OWN_KEY,
    ),
    **dict.fromkeys(
        ("tls_cert_path", "tls_key_path", "client_cert_path", "client_key_path", "ca_cert_paths"),
        _NO_TLS,
    ),
    "disable_retries": "the router's retries are always off: the client owns retries",
    "disable_circuit_breaker": (
        "the router's circuit breaker is always off: the client owns retries"
    ),
}


def sglang_args_of(server_args_source: str) -> list[ForeignArg]:
    """What ``python -m sglang.launch_server`` accepts, read from the text of its
    ``server_args.py``."""
    reader = SourceReader(server_args_source)
    found: dict[str, ForeignArg] = {}
    for arg in (*reader.annotated_fields("ServerArgs"), *reader.added_arguments()):
        found.setdefault(arg.name, arg)
    return list(found.values())


@functools.lru_cache(maxsize=1)
def stored_sglang_args() -> tuple[str, list[ForeignArg]]:
    """(version, arguments) of the stored table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table["version"], [ForeignArg.from_json(row) for row in table["arguments"]]


@functools.lru_cache(maxsize=1)
def sglang_args() -> tuple[str, list[ForeignArg]]:
    """(version, arguments) of the installed SGLang, or of the stored table where none is
    installed."""
    stored = stored_sglang_args()
    try:
        distribution = importlib.metadata.distribution("sglang")
    except importlib.metadata.PackageNotFoundError:
        return stored
    if distribution.version == stored[0]:
        return stored
    source = Path(str(distribution.locate_file("sglang/srt/server_args.py")))
    return distribution.version, sglang_args_of(source.read_text(encoding="utf-8"))


def sglang_that_has(option: str) -> tuple[str, str] | None:
    """(installed version, version that has it) for an option of SGLang that the installed one
    lacks, else None.

    Args:
        option: "sglang-mem-fraction-static".
    """
    version, arguments = sglang_args()
    stored_version, stored = stored_sglang_args()
    name = option.removeprefix("sglang-").replace("-", "_")
    here, there = (
        {x for arg in table for x in (arg.name, *arg.aliases)} for table in (arguments, stored)
    )
    return (version, stored_version) if name in there - here else None


@functools.lru_cache(maxsize=1)
def sglang_flags() -> dict[str, FlagSpec]:
    """``--sglang-<name>`` for everything SGLang's server accepts, by dest."""
    version, arguments = sglang_args()
    return with_prefix("sglang", arguments, SGLANG_RESERVED, f"sglang {version}")


@functools.lru_cache(maxsize=1)
def router_flags() -> dict[str, FlagSpec]:
    """``--router-<name>`` for everything sglang-router accepts, by dest."""
    distribution = importlib.metadata.distribution("sglang-router")
    path = Path(str(distribution.locate_file("sglang_router/router_args.py")))
    reader = SourceReader(path.read_text(encoding="utf-8"))
    arguments = reader.added_arguments(reader.class_defaults("RouterArgs"))
    flags = with_prefix(
        "router", arguments, ROUTER_RESERVED, f"sglang-router {distribution.version}"
    )
    policy = flags[
        "router_policy"
    ]  # also under the names that launch scripts of the reference system use
    flags["router_policy"] = replace(
        policy,
        choices=(*policy.choices, "consistent_hashing"),
        meta=replace(policy.meta, aliases=("sglang-router-strategy", "sglang-router-policy")),
    )
    return flags


def with_prefix(
    prefix: str, arguments: list[ForeignArg], reserved: dict[str, str], origin: str
) -> dict[str, FlagSpec]:
    """The flags for another program's arguments: ``--<prefix>-<name>``, into
    ``config.engine.<prefix>``."""
    specs = {}
    for arg in arguments:
        reason = reserved.get(arg.name, "")
        kind: Kind = arg.kind  # type: ignore[assignment]
        dest = f"{prefix}_{arg.name}"
        meta = FlagMeta(
            aliases=tuple(f"{prefix}-{alias}".replace("_", "-") for alias in arg.aliases),
            off="" if arg.negatable else "-",
            refused=reason,
            is_reserved=bool(reason),
            instead=SGLANG_INSTEAD.get(arg.name, {}) if prefix == "sglang" else {},
            read_by=("engine",) if prefix == "sglang" else ("router",),
        )
        specs[dest] = FlagSpec(
            dest=dest,
            group="engine",
            attribute=arg.name,
            kind=kind,
            default=arg.default,
            sections=(prefix,),
            many=arg.many,
            value_optional=arg.value_optional,
            optional=True,
            choices=arg.choices,
            help=arg.help,
            meta=meta,
            origin=origin,
        )
    return specs


def table_as_json(version: str, arguments: list[ForeignArg]) -> dict[str, Any]:
    """What `sglang_flags.json` holds: names, types, choices and defaults; SGLang's own `--help` has
    the texts."""
    rows = [
        {key: value for key, value in arg.to_json().items() if key != "help"} for arg in arguments
    ]
    return {"version": version, "arguments": rows}
