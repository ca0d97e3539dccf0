"""Signatures of memory that ran out, and of GPUs that failed."""

from __future__ import annotations

import re

from slime.diagnosis.record import Trouble
from slime.diagnosis.signatures import Flags, Form, Signature, now, with_value
from slime.engines.kinds import engine_named

_FRACTION = "--sglang-mem-fraction-static"
_TRAINERS = ("trainer", "traceback")


def _fraction(flags: Flags, factor: float) -> str:
    """The share of a GPU's memory that an engine takes, changed."""
    value = flags.get("sglang_mem_fraction_static")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return f"{_FRACTION} {0.7 if factor < 1 else 0.9} (not set: SGLang's own choice)"
    return f"{_FRACTION} {value:g} → {min(0.95, round(value * factor, 2)):g}"


def _smaller_engine(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    words = engine_named(flags).if_out_of_memory
    return tuple(
        _fraction(flags, 0.85) if _FRACTION in one else with_value(flags, one) for one in words
    )


def _larger_cache(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    wider = flags.get("rollout_num_gpus_per_engine") or 1
    return (
        _fraction(flags, 1.15),
        f"--rollout-num-gpus-per-engine {wider} → {2 * wider}: the weights of each GPU become half",
    )


ENGINE_MEMORY = Signature(
    Trouble(
        "engine-memory",
        "an engine runs out of GPU memory",
        "What an engine allocates beside weights and cache (activations, CUDA graphs, sampling) "
        "does not fit"
        " beside them.",
        ("a lower --sglang-mem-fraction-static", "a smaller --sglang-server-concurrency"),
        "--sglang-mem-fraction-static 0.98",
    ),
    r"(?:OutOfMemoryError: |RuntimeError: |Exception: Capture cuda graph failed: "
    r"|AcceleratorError: )"
    r"(?:CUDA out of memory|CUDA error: out of memory|HIP out of memory)",
    kinds=("engine",),
    exact=_smaller_engine,
)
ENGINE_CACHE = Signature(
    Trouble(
        "engine-cache",
        "an engine does not start: no memory is left for its cache",
        "The engine's share of the GPU is smaller than the model's weights and what it wants for "
        "keys and values.",
        ("a higher --sglang-mem-fraction-static", "a larger --rollout-num-gpus-per-engine"),
        "--sglang-mem-fraction-static 0.05",
    ),
    r"RuntimeError: Not enough memory\. Please try to increase --mem-fraction-static",
    kinds=("engine",),
    exact=_larger_cache,
)


def _shorter_batches(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    ways = []
    if flags.get("use_dynamic_batch_size") and flags.get("max_tokens_per_gpu"):
        cap = flags["max_tokens_per_gpu"]
        context = flags.get("context_parallel_size") or 1
        length = flags.get("rollout_max_response_len")
        start = (
            "; a safe start is rollout_max_response_len ÷ context_parallel_size = "
            f"{length // context}"
            if length
            else ""
        )
        ways.append(f"--max-tokens-per-gpu {cap} → {max(1, cap * 3 // 4)}{start}")
    elif (flags.get("micro_batch_size") or 1) > 1:
        ways.append(f"--micro-batch-size {flags['micro_batch_size']} → 1")
    if not flags.get("recompute_activations") and not flags.get("recompute_granularity"):
        ways.append("--recompute-activations")
    if (flags.get("tensor_model_parallel_size") or 1) > 1 and not flags.get("sequence_parallel"):
        ways.append("--sequence-parallel")
    ways.append(
        f"a larger --context-parallel-size{now(flags, 'context_parallel_size')}, for long samples"
    )
    return tuple(ways)


def _fewer_states(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    ways = [] if flags.get("offload_optimizer_states") else ["--offload-optimizer-states"]
    if flags.get("use_distributed_optimizer") is False:
        ways.append("leave --no-use-distributed-optimizer out")
    return (
        *ways,
        f"a larger --tensor-model-parallel-size{now(flags, 'tensor_model_parallel_size')}, or "
        "more trainer GPUs",
    )


def _beside_engines(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    if not flags.get("colocate"):
        return (
            "look with nvidia-smi who else holds memory of this GPU",
            *_fewer_states(flags, match),
        )
    asleep = (
        ()
        if flags.get("offload_rollout")
        else ("--offload-rollout: the engines give their part away meanwhile",)
    )
    return (*asleep, _fraction(flags, 0.6), *_fewer_states(flags, match)[:1])


TRAINER_FORWARD = Signature(
    Trouble(
        "trainer-memory",
        "a trainer rank runs out of memory in its forward or backward pass",
        "A micro-batch has more tokens than its activations and logits leave room for.",
        (
            "a lower --max-tokens-per-gpu",
            "--recompute-activations",
            "a larger --context-parallel-size",
        ),
        "--max-tokens-per-gpu of many times what fits",
    ),
    r"(?:OutOfMemory: )?out of GPU memory in (?:forward_backward|log_probs|ref_log_probs)",
    Form.ERROR,
    exact=_shorter_batches,
)
TRAINER_OPTIMIZER = Signature(
    Trouble(
        "optimizer-memory",
        "a trainer rank runs out of memory in the optimizer's step",
        "Weights, gradients and the optimizer's states do not fit; what the batch is does not "
        "matter to them.",
        (
            "--offload-optimizer-states",
            "more data-parallel ranks",
            "a larger --tensor-model-parallel-size",
        ),
        "a model whose states are larger than the GPU",
    ),
    r"(?:OutOfMemory: )?out of GPU memory in optimizer",
    Form.ERROR,
    exact=_fewer_states,
)
TRAINER_WAKE = Signature(
    Trouble(
        "wake-memory",
        "the trainer runs out of memory as it comes up or takes its GPU back",
        "Engines, or another process, hold memory of the GPU that the trainer needs for its "
        "weights and states.",
        ("--offload-rollout", "a lower --sglang-mem-fraction-static", "--offload-optimizer-states"),
        "colocated engines that keep 0.9 of the GPU",
    ),
    r"(?:OutOfMemory: )?out of GPU memory in \w+|(?:\S+: )?.{0,80}trainer and engines share GPUs "
    r"and take turns;"
    r" the next",
    Form.ERROR,
    exact=_beside_engines,
)
TRAINER_ANYWHERE = Signature(
    TRAINER_FORWARD.trouble,
    r"(?:OutOfMemoryError: |RuntimeError: |AcceleratorError: )(?:CUDA out of memory|CUDA error: "
    r"out of memory)"
    r"|RuntimeError: .{0,40}CUBLAS_STATUS_ALLOC_FAILED",
    kinds=_TRAINERS,
    exact=_shorter_batches,
)

_HOST_REMEDIES = (
    "dmesg names what the kernel killed, and how large it was",
    "fewer processes on a host; fewer --num-data-workers, --streaming-data",
    "RAY_memory_usage_threshold=0.98, if Ray ended a process too early",
)


def _smaller_host(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    ways = (
        [f"--num-data-workers {flags['num_data_workers']} → 0"]
        if flags.get("num_data_workers")
        else []
    )
    if flags.get("offload_optimizer_states"):
        ways.append(
            "without --offload-optimizer-states: 8 bytes per parameter and replica less on the host"
        )
    if flags.get("async_save"):
        ways.append("without --async-save: it holds a copy of what is saved")
    return (*_HOST_REMEDIES[:1], *ways, *_HOST_REMEDIES[1:])


HOST_TROUBLE = Trouble(
    "host-memory",
    "the host's memory is full: a process is killed, or cannot allocate",
    "Processes of the run, Ray's object store and page-locked copies take more memory than the "
    "host (or its"
    " cgroup) has;"
    " the kernel or Ray's memory monitor then ends one of them.",
    _HOST_REMEDIES,
    "a reward function that keeps gigabytes",
)
HOST_RAISED = Signature(
    HOST_TROUBLE,
    r"MemoryError(?:$|: )|RuntimeError: .{0,80}DefaultCPUAllocator: can't allocate memory"
    r"|OutOfMemoryError: Task was killed due to the node running low on memory|OSError: \[Errno "
    r"12\]",
    exact=_smaller_host,
)
HOST_SAID = Signature(
    HOST_TROUBLE,
    r"\d+ Workers \(tasks / actors\) killed due to memory pressure \(OOM\), \d+ |"
    r"\d+ worker\(s\) were killed due to the node running low on memory",
    Form.SAID,
    exact=_smaller_host,
)
HOST_ERROR = Signature(
    HOST_TROUBLE,
    r"(?:\w+: )?(?:[\w-]+ (?:\(pid [^)]*\) )?was ended by Ray \(|out of host memory in |no [\d.]+ "
    r"GB of host"
    r" memory for)",
    Form.ERROR,
    exact=_smaller_host,
)


def _four_steps(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    """The way to the kernel, with what of it this run has switched on."""
    speculative = flags.get("sglang_speculative_algorithm")
    graphs = not flags.get("sglang_disable_cuda_graph")
    second = []
    if speculative:
        second.append(f"without --sglang-speculative-algorithm (now {speculative})")
    if graphs:
        second.append("with --sglang-disable-cuda-graph (graphs are on)")
    tried = "CUDA graphs are off already" if not graphs else "speculative decoding is off already"
    deepep = (
        flags.get("sglang_speculative_moe_a2a_backend") == "deepep"
    )  # for the main model it is never taken
    third = (
        "without DeepEP: leave --sglang-speculative-moe-a2a-backend out"
        if deepep
        else "DeepEP is not in use by this run"
    )
    return (
        "1. CUDA_LAUNCH_BLOCKING=1 in the environment: the traceback then names the kernel",
        "2. "
        f"{', then '.join(second) or 'with CUDA graphs and speculative decoding, which are off'}; "
        "see whether"
        f" anything"
        f" changes{f' ({tried})' if len(second) == 1 else ''}",
        f"3. {third}",
        "4. CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 CUDA_COREDUMP_FILE=/tmp/core_%p: cuda-gdb shows "
        "the kernel of the"
        " core dump",
        *(
            (f"it may be memory that ran out: {_fraction(flags, 0.85)}",)
            if engine_named(flags).memory_fraction
            else ()
        ),
    )


ILLEGAL_ACCESS = Signature(
    Trouble(
        "illegal-memory-access",
        "“CUDA error: an illegal memory access was encountered”",
        "A GPU kernel read or wrote outside of its memory: in engines mostly in the padding of a "
        "replayed CUDA"
        " graph, or"
        " where draft model and main model differ; or memory ran out and was not noticed.",
        (
            "CUDA_LAUNCH_BLOCKING=1",
            "with and without --sglang-disable-cuda-graph and --sglang-speculative-algorithm",
            "without DeepEP",
            "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1",
            "a lower --sglang-mem-fraction-static",
        ),
        "a kernel that indexes outside of a tensor",
    ),
    r"\w*(?:Error|Exception): (?:[^'\"]{0,160}\b)?(?:CUDA error|Triton Error \[CUDA\]): an "
    r"illegal memory access was"
    r" encountered",
    exact=_four_steps,
)
ILLEGAL_ACCESS_SAID = Signature(
    ILLEGAL_ACCESS.trouble,
    r"(?:Process group watchdog thread terminated with exception: |what\(\): +)"
    r"CUDA error: an illegal memory access was encountered",
    Form.SAID,
    kinds=("engine", "trainer"),
    exact=_four_steps,
)
DEVICE_ASSERT = Signature(
    Trouble(
        "token-outside-vocabulary",
        "“device-side assert triggered” in a look-up, or an answer for other tokens than were "
        "asked for",
        "A token id is not in the model's vocabulary: tokenizer and weights belong to different "
        "models, or a hook"
        " made"
        " tokens of its own.",
        (
            "--hf-checkpoint with the tokenizer that belongs to its weights",
            "CUDA_LAUNCH_BLOCKING=1: the traceback then names the look-up",
            "tokens of your own generate function: below vocab_size of config.json",
        ),
        "the tokenizer of a model with a larger vocabulary",
    ),
    r"(?:\w+Error: )?CUDA error: device-side assert triggered|IndexError: index out of range in "
    r"self"
    r"|EngineError: .{0,80}asked for log-probs of \d+ given tokens, answered those",
)
DEVICE_ASSERT_ERROR = Signature(
    DEVICE_ASSERT.trouble,
    r"(?:\w+: )?an engine did not score the canary after .{0,200}asked for log-probs of \d+ given "
    r"tokens, answered"
    r" those",
    Form.ERROR,
)
OLD_DRIVER = Signature(
    Trouble(
        "cuda-build",
        "CUDA does not work with this driver or GPU",
        "torch, or a kernel, was built for a newer CUDA than the driver has, or not for this "
        "GPU's architecture.",
        (
            "nvidia-smi names the driver's CUDA: install a torch built for it (make test TORCH=…)",
            "a newer driver",
            "of “no kernel image”: the package that names the kernel, built for this GPU",
        ),
        "torch for CUDA 13 on a driver for 12",
    ),
    r"(?:\w+Error: )(?:The NVIDIA driver on your system is too old|.{0,60}no kernel image is "
    r"available for trajectory"
    r"|CUDA driver version is insufficient|.{0,60}PTX was compiled with an unsupported toolchain)",
)
GRAPH_CAPTURE = Signature(
    Trouble(
        "graph-capture",
        "an engine dies while it captures CUDA graphs",
        "A kernel cannot be captured on this GPU, or for the shapes of this model.",
        ("--sglang-disable-cuda-graph", "a smaller --sglang-cuda-graph-max-bs"),
        "a toy model with a hidden size of 1,024",
    ),
    r"Exception: Capture cuda graph failed: |CUDADialectError",
    kinds=("engine",),
)
ALL = (
    *(ILLEGAL_ACCESS, ILLEGAL_ACCESS_SAID, ENGINE_MEMORY, ENGINE_CACHE, GRAPH_CAPTURE),
    *(TRAINER_FORWARD, TRAINER_OPTIMIZER, TRAINER_WAKE, TRAINER_ANYWHERE),
    *(HOST_RAISED, HOST_SAID, HOST_ERROR, DEVICE_ASSERT, DEVICE_ASSERT_ERROR, OLD_DRIVER),
)
