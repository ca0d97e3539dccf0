"""Remedies with the values of a run's flags. Signatures in data/troubles.toml name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slime.diagnosis.troubles import TROUBLES
from slime.engines.kinds import engine_named

#: Flags of a run by name with underscores, as in config.json; unset flags may be missing.
Flags = Mapping[str, Any]
_OPTION = re.compile(r"--([a-z][a-z-]*[a-z])")
_FRACTION = "--sglang-mem-fraction-static"


def _now(flags: Flags, name: str) -> str:
    value = flags.get(name)
    return " (not set)" if value is None else f" (now {value})"


def _flag_in(words: str) -> str:
    """Return the first flag: "a smaller --rollout-batch-size" → ``rollout_batch_size``."""
    found = _OPTION.search(words)
    assert found is not None, words
    return found[1].replace("-", "_")


def _with_value(flags: Flags, words: str) -> str:
    return _OPTION.sub(lambda found: found[0] + _now(flags, _flag_in(found[0])), words, count=1)


def _fraction(flags: Flags, factor: float) -> str:
    """Return a remedy that multiplies the engine's share of GPU memory by ``factor``."""
    value = flags.get("sglang_mem_fraction_static")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return f"{_FRACTION} {0.7 if factor < 1 else 0.9} (not set: SGLang's own choice)"
    return f"{_FRACTION} {value:g} → {min(0.95, round(value * factor, 2)):g}"


def _smaller_engine(flags: Flags) -> list[str]:
    return [
        _fraction(flags, 0.85) if _FRACTION in words else _with_value(flags, words)
        for words in engine_named(flags).if_out_of_memory
    ]


def _larger_cache(flags: Flags) -> list[str]:
    wider = flags.get("rollout_num_gpus_per_engine") or 1
    return [
        _fraction(flags, 1.15),
        f"--rollout-num-gpus-per-engine {wider} → {2 * wider}: the weights of each GPU become half",
    ]


def _shorter_batches(flags: Flags) -> list[str]:
    ways = []
    if flags.get("use_dynamic_batch_size") and flags.get("max_tokens_per_gpu"):
        cap = flags["max_tokens_per_gpu"]
        context = flags.get("context_parallel_size") or 1
        way = f"--max-tokens-per-gpu {cap} → {max(1, cap * 3 // 4)}"
        if length := flags.get("rollout_max_response_len"):
            start = length // context
            way += f"; a safe start is rollout_max_response_len ÷ context_parallel_size = {start}"
        ways.append(way)
    elif (flags.get("micro_batch_size") or 1) > 1:
        ways.append(f"--micro-batch-size {flags['micro_batch_size']} → 1")
    if not flags.get("recompute_activations") and not flags.get("recompute_granularity"):
        ways.append("--recompute-activations")
    if (flags.get("tensor_model_parallel_size") or 1) > 1 and not flags.get("sequence_parallel"):
        ways.append("--sequence-parallel")
    now = _now(flags, "context_parallel_size")
    return [*ways, f"a larger --context-parallel-size{now}, for long samples"]


def _fewer_states(flags: Flags) -> list[str]:
    ways = [] if flags.get("offload_optimizer_states") else ["--offload-optimizer-states"]
    if flags.get("use_distributed_optimizer") is False:
        ways.append("leave --no-use-distributed-optimizer out")
    now = _now(flags, "tensor_model_parallel_size")
    return [*ways, f"a larger --tensor-model-parallel-size{now}, or more trainer GPUs"]


def _beside_engines(flags: Flags) -> list[str]:
    states = _fewer_states(flags)
    if not flags.get("colocate"):
        return ["look with nvidia-smi who else holds memory of this GPU", *states]
    asleep = ["--offload-rollout: the engines give their part away meanwhile"]
    return [*([] if flags.get("offload_rollout") else asleep), _fraction(flags, 0.6), states[0]]


def _smaller_host(flags: Flags) -> list[str]:
    first, *rest = TROUBLES["host-memory"].remedies
    ways = [first]
    if flags.get("num_data_workers"):
        ways.append(f"--num-data-workers {flags['num_data_workers']} → 0")
    # when colocated, a sleeping trainer's optimizer states are on the host either way
    if flags.get("offload_optimizer_states") and not flags.get("colocate"):
        ways.append(
            "without --offload-optimizer-states: 8 bytes per parameter and replica less on the host"
        )
    if flags.get("async_save"):
        ways.append("without --async-save: it holds a copy of what is saved")
    return [*ways, *rest]


def _four_steps(flags: Flags) -> list[str]:
    """Return steps to find the kernel of an illegal memory access, adapted to the run's flags."""
    speculative = flags.get("sglang_speculative_algorithm")
    graphs = not flags.get("sglang_disable_cuda_graph")
    second = []
    if speculative:
        second.append(f"without --sglang-speculative-algorithm (now {speculative})")
    if graphs:
        second.append("with --sglang-disable-cuda-graph (graphs are on)")
    without = ", then ".join(second) or "with CUDA graphs and speculative decoding, which are off"
    tried = ""
    if len(second) == 1:
        tried = f" ({'speculative decoding is' if graphs else 'CUDA graphs are'} off already)"
    # only the speculative model can use DeepEP
    deepep = flags.get("sglang_speculative_moe_a2a_backend") == "deepep"
    third = "DeepEP is not in use by this run"
    if deepep:
        third = "without DeepEP: leave --sglang-speculative-moe-a2a-backend out"
    ways = [
        "1. CUDA_LAUNCH_BLOCKING=1 in the environment: the traceback then names the kernel",
        f"2. {without}; see whether anything changes{tried}",
        f"3. {third}",
        "4. CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE=/tmp/core_%p: cuda-gdb shows "
        "the kernel of the core dump",
    ]
    if engine_named(flags).memory_fraction:
        ways.append(f"it may be memory that ran out: {_fraction(flags, 0.85)}")
    return ways


def _network(flags: Flags) -> list[str]:
    minutes = flags.get("distributed_timeout_minutes")
    between_hosts = (flags.get("actor_num_nodes") or 1) > 1 or flags.get("ray_address")
    ways = [
        "compare the stacks of all trainer ranks: the odd one out is the cause (py-spy dump --pid "
        "<pid>)",
        "NCCL_DEBUG=INFO in the environment: NCCL then says which interface and transport it takes",
    ]
    if between_hosts:
        ways += [
            "NCCL_SOCKET_IFNAME=<the interface between the hosts> (ip -br addr lists them), "
            "GLOO_SOCKET_IFNAME too",
            "NCCL_IB_DISABLE=0, and ibstat: is InfiniBand up?",
        ]
    limit = "a larger --distributed-timeout-minutes"
    if isinstance(minutes, (int, float)):
        limit = f"--distributed-timeout-minutes {minutes:g} → {3 * minutes:g}"
    return [*ways, f"NCCL_TIMEOUT=1800, or {limit}, if it was only slow"]


def _gpus(flags: Flags) -> list[str]:
    nodes = flags.get("actor_num_nodes") or 1
    per_node = flags.get("actor_num_gpus_per_node") or 1
    if flags.get("colocate"):
        need = (
            f"colocated: actor_num_nodes × actor_num_gpus_per_node = {nodes} × {per_node} = "
            f"{nodes * per_node}"
        )
        share = []
    else:
        need = f"decoupled: {nodes} × {per_node} + rollout_num_gpus {flags.get('rollout_num_gpus')}"
        share = ["--colocate, to share GPUs"]
    return [
        f"ray status shows what is there; this run needs ({need})",
        "end the other job, or add nodes",
        *share,
    ]


def _engine_died(flags: Flags) -> list[str]:
    engine = engine_named(flags)
    ways = [_with_value(flags, way) for way in engine.if_killed]
    if not flags.get("use_fault_tolerance"):
        ways.insert(0, "--use-fault-tolerance: it is then started again")
    return ways + [way for way in engine.to_find_the_cause if not flags.get(_flag_in(way))]


def endless_generation(flags: Flags) -> list[str]:
    """Return the remedies of the trouble "endless-generation" with the run's values."""
    stops = flags.get("rollout_stop_token_ids") or flags.get("rollout_stop") or "not set"
    end_token, longer, template = TROUBLES["endless-generation"].remedies
    ways = [
        f"{end_token} (now {stops})",
        f"{longer} (now {flags.get('rollout_max_response_len')})",
    ]
    return ways if flags.get("apply_chat_template") else [*ways, template]


#: Field ``exact`` of a signature → function that returns the remedies.
REMEDIES: dict[str, Callable[[Flags], list[str]]] = {
    "smaller-engine": _smaller_engine,
    "larger-cache": _larger_cache,
    "shorter-batches": _shorter_batches,
    "fewer-states": _fewer_states,
    "beside-engines": _beside_engines,
    "smaller-host": _smaller_host,
    "four-steps": _four_steps,
    "network": _network,
    "gpus": _gpus,
    "engine-died": _engine_died,
}
