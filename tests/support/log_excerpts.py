"""What known troubles look like in a run folder: excerpts in the words of torch, NCCL, SGLang, Ray
and slime itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Excerpt:
    """One way in which a trouble shows.

    Attributes:
        trouble: its name.
        log: file below logs/; "" for an error that ended the run.
        text: what stands there.
        error: the class of that error.
    """

    trouble: str
    log: str
    text: str
    error: str = "UserError"

    def __str__(self) -> str:
        return f"{self.trouble}-{self.log or 'crash'}"


_FRAMES = (
    'Traceback (most recent call last):\n  File "/opt/x/site-packages/{}", line 12, in run\n    '
    "work()\n"
)
_SCHEDULER = "[2026-11-23 10:15:07 TP0] Scheduler hit an exception: " + _FRAMES.format(
    "sglang/srt/managers/scheduler.py"
)
_TRACEBACK = _FRAMES.format("torch/nn/functional.py")
_GPU_FULL = (
    "CUDA out of memory. Tried to allocate 2.40 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.20 GiB is free."
)
_IMA = (
    "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be "
    "asynchronously reported at"
    " some"
    " other API call, so the stacktrace below might be incorrect.\nFor debugging consider passing"
    " CUDA_LAUNCH_BLOCKING=1"
)
_NCCL = (
    "[rank1]:[E1123 20:27:21.433063423 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught "
    "collective operation"
    " timeout:"
    " WorkNCCL(SeqNum=71, OpType=ALLREDUCE, NumelIn=131072000, NumelOut=131072000, "
    "Timeout(ms)=600000) ran for 600081"
    " milliseconds before timing out.\n"
)

EXCERPTS = (
    Excerpt("engine-memory", "engine-0", f"{_SCHEDULER}torch.OutOfMemoryError: {_GPU_FULL}\n"),
    Excerpt(
        "engine-memory",
        "engine-1",
        f"{_SCHEDULER}Exception: Capture cuda graph failed: {_GPU_FULL}\nPossible solutions:\n",
    ),
    Excerpt(
        "engine-cache",
        "engine-0",
        f"{_SCHEDULER}RuntimeError: Not enough memory. Please try to increase "
        "--mem-fraction-static. Current value:"
        " mem_fraction_static=0.2\n",
    ),
    Excerpt(
        "graph-capture",
        "engine-0",
        f"{_SCHEDULER}cutlass.CUDADialectError: cannot lower the kernel\n",
    ),
    Excerpt(
        "trainer-memory",
        "",
        f"out of GPU memory in forward_backward\n  why: {_GPU_FULL}\n       peak memory by phase: "
        "log_probs 31.10 GB,"
        " forward_backward 77.91 GB (here)\n  fix: one or more of these, the first ones cost "
        "least:\n"
        "       --recompute-activations: keep one activation per layer\n       "
        "--max-tokens-per-gpu 9000 → 6750",
        "OutOfMemory",
    ),
    *(
        Excerpt(
            "trainer-memory",
            "",
            f"out of GPU memory in {phase}\n  why: {_GPU_FULL}\n  fix: --max-tokens-per-gpu 4096",
            "OutOfMemory",
        )
        for phase in ("critic_forward_backward", "values", "teacher_log_probs")
    ),
    Excerpt(
        "trainer-memory",
        "critic-0",
        f"{_TRACEBACK}torch.OutOfMemoryError: {_GPU_FULL} Of a critic.\n",
    ),
    Excerpt("trainer-memory", "trainer-0", f"{_TRACEBACK}torch.OutOfMemoryError: {_GPU_FULL}\n"),
    Excerpt(
        "optimizer-memory",
        "",
        f"out of GPU memory in optimizer\n  why: {_GPU_FULL}\n  fix: --offload-optimizer-states",
        "OutOfMemory",
    ),
    Excerpt(
        "wake-memory",
        "",
        f"out of GPU memory in setup\n  why: {_GPU_FULL}\n  fix: --offload-rollout",
        "OutOfMemory",
    ),
    Excerpt(
        "host-memory",
        "",
        "trainer-0 (pid 4711 on 10.0.0.3) was ended by Ray (training): the host's memory was "
        "nearly full\n"
        "  why: Task was killed due to the node running low on memory.",
        "ActorDied",
    ),
    Excerpt("host-memory", "rollout", f"{_TRACEBACK}MemoryError\n"),
    Excerpt(
        "host-memory",
        "driver",
        "(raylet) [2026-11-23 15:21:29,851 E 9751 9751] (raylet) node_manager.cc:3084: 4 Workers "
        "(tasks / actors)"
        " killed"
        " due to memory pressure (OOM), 0 Workers crashed due to other reasons at node (ID: b287, "
        "IP: 172.28.0.12)\n",
    ),
    Excerpt("illegal-memory-access", "engine-0", f"{_SCHEDULER}torch.AcceleratorError: {_IMA}\n"),
    Excerpt("illegal-memory-access", "trainer-1", f"{_TRACEBACK}RuntimeError: {_IMA}\n"),
    Excerpt(
        "illegal-memory-access",
        "engine-2",
        "[rank0]:[E1123 20:27:21.433063423 ProcessGroupNCCL.cpp:2057] [PG ID 0 PG GUID 0 Rank 0] "
        "Process group"
        " watchdog"
        f" thread terminated with exception: {_IMA}\n",
    ),
    Excerpt(
        "token-outside-vocabulary",
        "trainer-0",
        f"{_TRACEBACK}IndexError: index out of range in self\n",
    ),
    Excerpt(
        "token-outside-vocabulary",
        "",
        "an engine did not score the canary after a weight push: http://127.0.0.1:4000: asked for "
        "log-probs of 16"
        " given"
        " tokens, answered those of 16; the first difference is at place 3: [7] for [9]",
    ),
    Excerpt(
        "cuda-build",
        "trainer-0",
        f"{_TRACEBACK}RuntimeError: The NVIDIA driver on your system is too old (found version "
        "12080). Please update\n",
    ),
    Excerpt(
        "cuda-build",
        "engine-0",
        f"{_SCHEDULER}torch.AcceleratorError: CUDA error: no kernel image is available for "
        "execution on the device\n",
    ),
    Excerpt(
        "compile-cache",
        "engine-0",
        "[2026-11-23 10:15:07 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/opt/x/site-packages/torch/_inductor/codecache.py", line 330, in lookup\n'
        "    local_cache = json.load(local_cache_fp)\n"
        '  File "/usr/lib/python3.12/json/decoder.py", line 355, in raw_decode\n'
        '    raise JSONDecodeError("Expecting value", s, err.value) from None\n'
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n",
    ),
    Excerpt(
        "port-clash",
        "engine-0",
        "ERROR:    [Errno 98] error while attempting to bind on address ('10.0.0.3', 15000): "
        "address already in use\n",
    ),
    Excerpt(
        "port-clash",
        "trainer-0",
        f"{_TRACEBACK}torch.distributed.DistNetworkError: The server socket has failed to listen "
        "on any local network"
        " address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
        "already in use\n",
    ),
    Excerpt(
        "port-clash",
        "rollout",
        f"{_TRACEBACK}requests.exceptions.ConnectionError: HTTPConnectionPool(host='10.0.0.3', "
        "port=15000): Max"
        f" retries"
        " exceeded with url: /get_model_info (Caused by NewConnectionError('Failed to establish a "
        "new"
        " connection'))\n",
    ),
    Excerpt("collective-time-out", "trainer-1", _NCCL),
    Excerpt(
        "collective-time-out",
        "trainer-0",
        f"{_TRACEBACK}RuntimeError: "
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out"
        f" waiting"
        " 600000ms for recv operation to complete\n",
    ),
    Excerpt(
        "nccl-error",
        "trainer-0",
        f"{_TRACEBACK}torch.distributed.DistBackendError: NCCL error in: "
        "/pytorch/torch/csrc/distributed/c10d/"
        "NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL "
        "version 2.27.5\n",
    ),
    Excerpt(
        "connection-lost",
        "trainer-0",
        f"{_TRACEBACK}RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
        "Connection closed"
        f" by peer"
        " [10.0.0.4]:41722\n",
    ),
    Excerpt(
        "connection-lost",
        "",
        "training: processes that work together lost each other; no answer from trainer-1 (pid 7 "
        "on 10.0.0.4)\n"
        "  why: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer",
        "ConnectionBroken",
    ),
    Excerpt(
        "no-answer",
        "",
        "training: no answer within 600 s from trainer-0 (pid 4711 on 10.0.0.3), waited for since "
        "14:03:12\n"
        "  fix: read its log; py-spy dump --pid 4711, on 10.0.0.3, shows where it hangs",
        "DeadlinePassed",
    ),
    Excerpt(
        "no-answer",
        "",
        "pid 4711 (ray::TrainerActor) has been stopped since 14:03:12, and the run does not go "
        "on: the driver has waited since 14:03:10 (training) for trainer-0\n"
        "  why: a stopped process (SIGSTOP) does not answer, and there was no progress for 600 s "
        "(--distributed-timeout-minutes)",
        "DeadlinePassed",
    ),
    Excerpt(
        "ray-gone",
        "",
        "Failed to retrieve object 006ed9. The object's owner has exited. This is the Python "
        "worker that first"
        " created it",
        "OwnerDiedError",
    ),
    Excerpt(
        "placement",
        "",
        "4 GPUs did not become free within 300 s\n  why: 4; the cluster has 4, of which 0 are "
        "free: another job"
        " holds the"
        " rest\n  fix: end the other job, wait, or raise --placement-timeout",
    ),
    Excerpt(
        "missing-shards",
        "",
        "1 of 93 shards are missing in /models/glm\n  why: model-00010-of-00093.safetensors",
    ),
    Excerpt(
        "missing-shards",
        "engine-0",
        f"{_SCHEDULER}FileNotFoundError: No such file or directory: "
        "/models/glm/model-00010-of-00093.safetensors\n",
    ),
    Excerpt(
        "no-checkpoint",
        "",
        "--ref-load /data/base holds no checkpoint\n  why: no latest_checkpointed_iteration.txt, "
        "and no"
        " config.json that"
        " names a Hugging Face model_type or architectures; it holds: README.md",
    ),
    Excerpt(
        "damaged-checkpoint",
        "",
        "/data/iter_0000004 is not a complete checkpoint\n  why: missing: common.pt",
    ),
    Excerpt(
        "context-too-long",
        "engine-0",
        f"{_SCHEDULER}ValueError: The input (9001 tokens) is longer than the model's context "
        "length (8192 tokens).\n",
    ),
    Excerpt(
        "disk-full",
        "",
        "[Errno 28] No space left on device: '/data/iter_0000004/x.distcp'",
        "OSError",
    ),
    Excerpt("disk-full", "trainer-0", f"{_TRACEBACK}OSError: [Errno 28] No space left on device\n"),
    Excerpt(
        "read-only",
        "",
        "cannot write to the folder /mnt/outputs/x\n  why: Read-only file system\n  fix: pass "
        "--output-dir",
    ),
    Excerpt(
        "read-only",
        "trainer-0",
        f"{_TRACEBACK}OSError: [Errno 30] Read-only file system: '/mnt/x'\n",
    ),
    Excerpt(
        "permission",
        "rollout",
        f"{_TRACEBACK}PermissionError: [Errno 13] Permission denied: '/root/cache'\n",
    ),
    Excerpt("open-files", "rollout", f"{_TRACEBACK}OSError: [Errno 24] Too many open files\n"),
    Excerpt(
        "folder-in-use",
        "",
        "another process is writing to outputs/demo\n  why: it is pid 12 on node-1\n  fix: wait "
        "for it or stop it",
    ),
    Excerpt(
        "missing-module",
        "rollout",
        f"{_TRACEBACK}ModuleNotFoundError: No module named 'my_rewards'\n",
    ),
    Excerpt(
        "not-finite",
        "",
        "training stopped at rollout 3, step 0: NaN or Inf\n  why: the losses are finite but …",
    ),
    Excerpt(
        "push-mismatch",
        "",
        "weights of version 7 did not arrive: lm_head.weight is not on http://…",
        "WeightMismatch",
    ),
    Excerpt(
        "push-mismatch",
        "",
        "after a weight push, engine http://127.0.0.1:4000 gives other log-probs than the trainer "
        "with the same"
        " weights:"
        " they differ by 0.3 on average",
    ),
    Excerpt(
        "push-failed",
        "",
        "weight update to version 7 failed in the phase 'transfer' after 122.0 s: http://…",
    ),
    Excerpt(
        "own-function",
        "",
        "the reward function 'my.score' failed on sample 15\n  why: ZeroDivisionError: division "
        "by zero\n  fix:"
        " mend it",
    ),
    Excerpt(
        "own-function",
        "",
        "'hk.py:loss' (--custom-loss-function-path) returned the float 0.5 as its loss, without "
        "gradient\n  why: …",
    ),
    Excerpt(
        "own-function",
        "",
        "the reducer of 'hk.py:sum' (--custom-pg-loss-reducer-function-path) returned None",
    ),
    Excerpt(
        "own-function",
        "",
        "hk.py:nan returned nan as the reward of sample 0\n  fix: return a finite number",
    ),
    Excerpt(
        "native-crash",
        "engine-0",
        'Fatal Python error: Bus error\n\nThread 0x1 (most recent call first):\n  File "x"\n',
    ),
    Excerpt(
        "engine-died",
        "",
        "engine-0 (pid 4604) was killed (SIGKILL)\n  why: last lines of its log:",
        "RunFailed",
    ),
    Excerpt(
        "router-died",
        "",
        "generating: router (pid 1824) was killed (SIGKILL)\n  why: last lines of its log:",
        "RunFailed",
    ),
    Excerpt(
        "rollout-died",
        "",
        "rollout (pid 6668 on 127.0.0.1) died (generating)\n  why: its process ended without a "
        "word: by os._exit",
        "ActorDied",
    ),
    Excerpt(
        "host-lost",
        "",
        "host 10.0.0.4 is lost, and trainer-1 (pid 149 on 10.0.0.4) with it (training)\n  why: Ray's "
        "head gets no answer",
        "ActorDied",
    ),
    Excerpt(
        "trainer-died",
        "",
        "trainer-0 (pid 27030 on 127.0.0.1) died (pushing weights)\n  why: its process ended "
        "without a word",
        "ActorDied",
    ),
    Excerpt(
        "trainer-died",
        "",
        "critic-1 (pid 27031 on 127.0.0.1) died (training)\n  why: its process ended without a word",
        "ActorDied",
    ),
    Excerpt("wandb-refused", "", "--use-wandb: there is no API key for W&B\n  fix: WANDB_API_KEY"),
    Excerpt("wandb-refused", "", "CommError: permission denied to project x", "RunFailed"),
    Excerpt(
        "graph-capture",
        "engine-1",
        f"{_SCHEDULER}Exception: Capture cuda graph failed: cuFuncSetAttribute failed: 1\n",
    ),
    Excerpt(
        "wake-memory",
        "",
        "offload_engines: http://127.0.0.1:4000/release_memory_occupation answered 500\n"
        "  why: trainer and engines share GPUs and take turns; the next phase would run out of "
        "memory\n"
        "  fix: read the engine's log",
        "RunFailed",
    ),
    Excerpt(
        "trainer-memory",
        "trainer-1",
        f"{_TRACEBACK}RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling "
        "`cublasCreate(handle)`\n",
    ),
    Excerpt(
        "host-memory",
        "trainer-0",
        f"{_TRACEBACK}RuntimeError: [enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: "
        "can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12\n",
    ),
    Excerpt(
        "host-memory",
        "driver",
        f"{_TRACEBACK}ray.exceptions.OutOfMemoryError: Task was killed due to the node running low "
        "on memory.\n",
    ),
    Excerpt("host-memory", "rollout", f"{_TRACEBACK}OSError: [Errno 12] Cannot allocate memory\n"),
    Excerpt(
        "host-memory",
        "driver",
        "(raylet) 2 worker(s) were killed due to the node running low on memory. To see more, ...\n",
    ),
    Excerpt("host-memory", "", "out of host memory in save\n  why: [Errno 12]", "OutOfMemory"),
    Excerpt(
        "host-memory", "", "no 12.5 GB of host memory for the snapshot of an asynchronous save"
    ),
    Excerpt(
        "token-outside-vocabulary",
        "engine-0",
        f"{_SCHEDULER}torch.AcceleratorError: CUDA error: device-side assert triggered\n",
    ),
    Excerpt(
        "token-outside-vocabulary",
        "rollout",
        f"{_TRACEBACK}slime.engines.client.EngineError: http://127.0.0.1:4000: asked for log-probs "
        "of 16 given tokens, answered those of 15\n",
    ),
    Excerpt("port-clash", "router", f"{_TRACEBACK}OSError: [Errno 98] Address already in use\n"),
    Excerpt("port-clash", "engine-1", f"{_TRACEBACK}ValueError: Port 30000 is already in use\n"),
    Excerpt(
        "port-clash",
        "router",
        "thread '<unnamed>' panicked at src/server.rs:712:10: called `Result::unwrap()` on an `Err` "
        'value: Os { code: 98, kind: AddrInUse, message: "Address already in use" }\n',
    ),
    Excerpt(
        "port-clash",
        "router",
        "thread 'main' panicked at src/server.rs:712:10:\ncalled `Result::unwrap()` on an `Err` "
        'value: Os { code: 98, kind: AddrInUse, message: "Address already in use" }\n',
    ),
    Excerpt(
        "nccl-error",
        "trainer-1",
        f"{_TRACEBACK}RuntimeError: NCCL Error 2: unhandled system error\n",
    ),
    Excerpt(
        "collective-time-out",
        "trainer-2",
        "[rank2]:[E1123 20:27:21.433063423 ProcessGroupNCCL.cpp:684] [Rank 2] Some NCCL operations "
        "have failed or timed out. Due to the asynchronous nature of CUDA kernels, ...\n",
    ),
    Excerpt("ray-gone", "", "launching: RaySystemError: System error: Broken pipe", "RunFailed"),
    Excerpt("ray-gone", "", "Ray does not start on this host\n  why: AF_UNIX path too long"),
    Excerpt("ray-gone", "", "no Ray cluster answers at 10.0.0.3:6379\n  why: timed out"),
    Excerpt("placement", "", "this run needs 16 GPUs, the Ray cluster has 8\n  fix: --colocate"),
    Excerpt("push-failed", "", "engine http://127.0.0.1:4000 cannot be reached for weight updates"),
    Excerpt("router-died", "", "generating: the router has no healthy engine", "RunFailed"),
    Excerpt(
        "missing-shards",
        "",
        "/models/glm/model-00001.safetensors lacks 2 tensors that the index promises",
    ),
    Excerpt("missing-shards", "", "/models/glm/x.safetensors is not a readable safetensors file"),
    Excerpt("missing-shards", "", "/models/glm is not a complete glm4_moe model"),
    Excerpt("missing-shards", "", "no weights in /models/glm\n  why: it holds: config.json"),
    Excerpt(
        "missing-shards",
        "trainer-0",
        f"{_TRACEBACK}safetensors.SafetensorError: Error while deserializing header\n",
    ),
    Excerpt(
        "missing-shards",
        "engine-1",
        f"{_SCHEDULER}RuntimeError: Cannot find any model weights with `/models/glm`\n",
    ),
    Excerpt("no-checkpoint", "", "there is no checkpoint /data/iter_0000004"),
    Excerpt(
        "no-checkpoint",
        "",
        "/data/latest_checkpointed_iteration.txt does not hold an iteration number",
    ),
    Excerpt("disk-full", "", "saving: [Errno 122] Disk quota exceeded: '/data/x'", "RunFailed"),
    Excerpt("disk-full", "", "the disk is full\n  why: /data/x\n  fix: free disk space"),
    Excerpt(
        "disk-full",
        "",
        "cannot write to the folder /data/x\n  why: No space left on device\n  fix: --output-dir",
    ),
    Excerpt("permission", "", "saving: [Errno 13] Permission denied: '/data/x'", "RunFailed"),
    Excerpt("permission", "", "saving: PermissionError: /data/x", "RunFailed"),
    Excerpt(
        "missing-module",
        "trainer-0",
        f"{_TRACEBACK}ImportError: cannot import name 'score' from 'my_rewards' (/x/my_rewards.py)\n",
    ),
    Excerpt("missing-module", "", "generating: No module named 'my_rewards'", "RunFailed"),
    Excerpt("missing-module", "", "the module ray is not installed for /usr/bin/python3"),
    Excerpt("missing-module", "", "'my.score' cannot be found: there is no module 'my'"),
    Excerpt(
        "not-finite", "", "the trainer's own log-probs of the canary are not finite\n  why: nan"
    ),
    Excerpt("own-function", "", "3 groups have failed in this rollout of 8\n  why: a timeout"),
    Excerpt("own-function", "", "the reward function returned None for sample 3"),
)

#: Lines of runs in which nothing is wrong, and texts of samples that sound as if something were.
HEALTHY = {
    "driver": """\
2026-11-23 06:40:01.360 INFO    driver  cluster.ray_session: placement: 1, ready after 0.0 s
2026-11-23 06:40:11.132 INFO    driver  session: launched: ray 6.5 s, trainer 1.0 s, engines 0.8 s
2026-11-23 06:40:12.132 INFO    driver  memory: plan: 61.2 of 79.1 GB; out of GPU memory in optimizer is not expected
2026-11-23 06:40:13.132 WARNING driver  engine_actor: engine-0: one of its ports was taken meanwhile, trying others
""",
    "engine-0": """\
[2026-11-23 06:40:07 TP0] Load weight end. type=Qwen3ForCausalLM, avail mem=63.91 GB, mem usage=14.67 GB.
[2026-11-23 06:40:09 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=7.77 GB
[2026-11-23 06:40:19 TP0] Decode batch, #running-req: 12, #token: 3111, token usage: 0.02, cuda graph: True
[2026-11-23 06:40:20 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1
[2026-11-23 06:40:21] Receive: obj=GenerateReqInput(text='why do I get CUDA out of memory, or illegal memory access?')
""",
    "rollout": """\
2026-11-23 06:40:20.132 INFO    rollout  rollout.loop: rollout 0: 64 samples
response: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
RuntimeError: CUDA error: an illegal memory access was encountered
The server says "address already in use", so ModuleNotFoundError: No module named 'x' follows.
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
{"prompt": "explain OSError: [Errno 28] No space left on device", "reward": 0.0}
MemoryError
""",
    "router": "[2m2026-11-23 06:40:26[0m [32m INFO[0m [2msmg::server[0m: Starting router on "
    "127.0.0.1:19218\n",
}
