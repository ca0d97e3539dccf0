"""Signatures of what happens between processes: ports, collectives, Ray, pushes, and deaths."""

from __future__ import annotations

import re

from slime.diagnosis.record import Trouble
from slime.diagnosis.signatures import Flags, Form, Level, Signature, flag_in, with_value
from slime.documentation import doc_url
from slime.engines.kinds import engine_named

PORT_CLASH = Signature(
    Trouble(
        "port-clash",
        "a port is in use",
        "Another server of this host took the port between its choice and its use, or was told to "
        "use the same one.",
        (
            "the same command again: ports are reserved anew",
            "ss -ltnp shows who listens",
            "fewer engines on a host: a larger --rollout-num-gpus-per-engine",
        ),
        "a server that listens on a port of the run",
    ),
    r"OSError: (?:\[Errno 98\]|.{0,40}[Aa]ddress already in use)|(?:DistNetworkError|RuntimeError):"
    r" .{0,200}(?:EADDRINUSE|"
    r"[Aa]ddress already in use)|ConnectionError: .{0,120}Max retries exceeded with url: "
    r"/(?:get_model_info"
    r"|model_info)"
    r"|ValueError: .{0,80}[Pp]ort \d+ is (?:not available|already in use)",
    is_survived=True,
)
PORT_CLASH_SAID = Signature(
    PORT_CLASH.trouble,
    r"\[Errno 98\] error while attempting to bind on address|panicked at .{0,200}AddrInUse",
    Form.SAID,
    is_survived=True,
)


def _network(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    minutes = flags.get("distributed_timeout_minutes")
    between_hosts = (flags.get("actor_num_nodes") or 1) > 1 or flags.get("ray_address")
    limit = (
        f"--distributed-timeout-minutes {minutes:g} → {3 * minutes:g}"
        if isinstance(minutes, (int, float))
        else "a larger --distributed-timeout-minutes"
    )
    hosts = (
        "NCCL_DEBUG=INFO in the environment: NCCL then says which interface and transport it takes",
        "NCCL_SOCKET_IFNAME=<the interface between the hosts> (ip -br addr lists them), "
        "GLOO_SOCKET_IFNAME too",
        "NCCL_IB_DISABLE=0, and ibstat: is InfiniBand up?",
    )
    first = (
        "compare the stacks of all trainer ranks: the odd one out is the cause (py-spy dump --pid "
        "<pid>)",
    )
    return (
        *first,
        *(hosts if between_hosts else hosts[:1]),
        f"NCCL_TIMEOUT=1800, or {limit}, if it was only slow",
    )


COLLECTIVE = Trouble(
    "collective-time-out",
    "a collective of NCCL or gloo times out",
    "A rank waited for another one that does not come: it hangs, is slow, is gone, or the network "
    "between them is"
    " wrong.",
    (
        "NCCL_DEBUG=INFO",
        "NCCL_SOCKET_IFNAME=<the right interface>",
        "NCCL_IB_DISABLE=0",
        "NCCL_TIMEOUT=1800, or a larger --distributed-timeout-minutes",
    ),
    "a trainer rank that is stopped (SIGSTOP)",
)
COLLECTIVE_SAID = Signature(
    COLLECTIVE,
    r"Watchdog caught collective operation timeout: |Some NCCL operations have failed or timed "
    r"out\.",
    Form.SAID,
    Level.TIME_OUT,
    is_survived=True,
    exact=_network,
)
COLLECTIVE_RAISED = Signature(
    COLLECTIVE,
    r"(?:RuntimeError|DistBackendError|DistStoreError|DistNetworkError): .{0,200}(?:Timed out "
    r"waiting \d+ms for"
    r" (?:recv|send)"
    r"|[Ww]atchdog caught|wait timeout after \d+ms|Timed out after \d+ seconds waiting for clients"
    r"|Application timeout caused pair closure|timed out in monitoredBarrier|socket has timed out "
    r"after|Timeout"
    r" waiting for key)",
    level=Level.TIME_OUT,
    is_survived=True,
    exact=_network,
)
NCCL_ERROR = Signature(
    Trouble(
        "nccl-error",
        "NCCL fails: “unhandled system error”, “unhandled cuda error”",
        "NCCL could not talk to another rank or to a GPU: a wrong interface, InfiniBand that is "
        "down, too little"
        " /dev/shm, two"
        " ranks on one GPU, or a GPU that failed before.",
        (
            "NCCL_DEBUG=INFO: NCCL then says what failed",
            "NCCL_SOCKET_IFNAME=<the right interface>",
            "docker run --shm-size=8g",
        ),
        "NCCL_SOCKET_IFNAME with an interface that is not there",
    ),
    r"(?:DistBackendError|RuntimeError): NCCL error in: |(?:DistBackendError|RuntimeError): NCCL "
    r"Error \d",
    level=Level.TIME_OUT,
    is_survived=True,
    exact=_network,
)
CONNECTION = Trouble(
    "connection-lost",
    "processes that work together lost each other",
    "The process at the other end is gone, or the network between them broke; its own log tells "
    "more.",
    (
        "look into the log of the process that is named: it went first",
        "dmesg: was it killed for lack of memory?",
        "--max-restarts 3 starts lost trainer ranks again from the newest checkpoint",
    ),
    "kill -9 of a trainer rank",
)
CONNECTION_RAISED = Signature(
    CONNECTION,
    r"(?:RuntimeError|DistBackendError): .{0,200}(?:Connection closed by peer|Connection reset by "
    r"peer|remote"
    r" process exited)",
    level=Level.LOST,
    is_survived=True,
)
CONNECTION_ERROR = Signature(
    CONNECTION,
    r"(?:\w+: )?[\w ]+: processes that work together lost each other",
    Form.ERROR,
    Level.LOST,
    is_survived=True,
)
NO_ANSWER = Signature(
    Trouble(
        "no-answer",
        "a process of the run did not answer in time",
        "It hangs, is stopped, or does something that takes longer than its deadline.",
        (
            "the last lines of its log: what was it doing?",
            "py-spy dump --pid <pid>, while the run still goes, shows where it stands",
            "raise the deadline by its flag if it is too short for this model: "
            f"{doc_url('deadlines.md')}",
        ),
        "kill -STOP of the rollout actor",
    ),
    r"(?:\w+: )?(?:[\w ,/-]+: no answer within \d+ s from |pid \d+ \(.*is stopped since .*the run "
    r"does not go on)",
    Form.ERROR,
    Level.TIME_OUT,
    is_survived=True,
)
GCS = Signature(
    Trouble(
        "ray-gone",
        "Ray's own processes do not answer",
        "Ray's control service (GCS) or the raylet of a host died, is stopped or starves, or a "
        "host left the cluster.",
        (
            "ls -t /tmp/ray/session_latest/logs | head: gcs_server.out and raylet.out say why",
            "dmesg: was it killed for lack of memory?",
            "slime resume goes on from the newest checkpoint",
        ),
        "kill -9 of gcs_server",
    ),
    r"(?:\w+: )*(?:.{0,120}(?:Failed to connect to GCS|GCS server is dead|because the GCS|The "
    r"object's owner has"
    r" exited)"
    r"|(?:OwnerDiedError|RaySystemError|RaySyncerError|NodeDiedError|RpcError)\b|Ray does not "
    r"start on this host"
    r"|no Ray cluster answers at )",
    Form.ERROR,
    Level.LOST,
)


def _gpus(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    nodes = flags.get("actor_num_nodes") or 1
    per_node = flags.get("actor_num_gpus_per_node") or 1
    rollout = flags.get("rollout_num_gpus")
    if flags.get("colocate"):
        need = (
            f"colocated: actor_num_nodes × actor_num_gpus_per_node = {nodes} × {per_node} = "
            f"{nodes * per_node}"
        )
    else:
        need = f"decoupled: {nodes} × {per_node} + rollout_num_gpus {rollout}"
    share = () if flags.get("colocate") else ("--colocate, to share GPUs",)
    return (
        f"ray status shows what is there; this run needs ({need})",
        "end the other job, or add nodes",
        *share,
    )


PLACEMENT = Signature(
    Trouble(
        "placement",
        "the run waits for GPUs that do not become free",
        "The cluster has fewer GPUs than the run asks for, or another job holds them.",
        ("ray status", "a lower --actor-num-gpus-per-node or --rollout-num-gpus", "--colocate"),
        "a run of four GPUs on a cluster of three",
    ),
    r"(?:\w+: )?(?:\d+ .{1,40} did not become free within|this run needs \d+ .{1,40}, (?:the Ray "
    r"cluster has|this"
    r" host has))",
    Form.ERROR,
    exact=_gpus,
)
PUSH_MISMATCH = Signature(
    Trouble(
        "push-mismatch",
        "after a push an engine does not hold the trainer's weights",
        "Names or shapes were mapped wrongly, a tensor was left out or quantised, or buffers were "
        "lost as the"
        " engine released"
        " its memory.",
        (
            "--check-weight-update-equal names every weight that differs",
            "--debug-rollout-only: does the engine make sense with the weights of --hf-checkpoint?",
            "without --offload-rollout: are buffers lost in a release?",
        ),
        "an engine that leaves a tensor out",
    ),
    r"(?:\w+: )?(?:weights of version \d+ did not arrive|after .{1,60}, engine \S+ gives other "
    r"log-probs than the"
    r" trainer)",
    Form.ERROR,
)
PUSH_FAILED = Signature(
    Trouble(
        "push-failed",
        "a weight push fails or takes too long",
        "An engine or a trainer rank did not do its part of the push in time: it died, hangs, or "
        "the network is slow.",
        (
            "the log of the engine that is named; an engine that died says why there",
            "--use-fault-tolerance repeats the push without it",
            "--colocate needs no network; a larger --update-weights-interval pushes less often; "
            "ibstat: is"
            " InfiniBand up?",
        ),
        "an engine that is stopped in a push",
    ),
    r"(?:\w+: )?(?:weight update to version \d+ failed in the phase|engine \S+ cannot be reached "
    r"for weight updates)",
    Form.ERROR,
    Level.TIME_OUT,
)
NATIVE_CRASH = Signature(
    Trouble(
        "native-crash",
        "a process dies of a fatal signal",
        "A C or CUDA library failed: a package that does not fit the others, /dev/shm that is "
        "full (bus error),"
        " the GPU.",
        (
            "the stack behind “Fatal Python error” in that log names the library",
            "bus error: more room in /dev/shm (docker run --shm-size=8g)",
            "slime version lists the packages; install them anew",
        ),
        "kill -SEGV of a trainer rank",
    ),
    r"Fatal Python error: (?:Segmentation fault|Aborted|Bus error|Illegal instruction|Floating[ "
    r"-]point exception)",
    Form.SAID,
)


def _engine_died(flags: Flags, match: re.Match[str]) -> tuple[str, ...]:
    tolerance = (
        ()
        if flags.get("use_fault_tolerance")
        else ("--use-fault-tolerance: it is then started again",)
    )
    engine = engine_named(flags)
    untried = [way for way in engine.to_find_the_cause if not flags.get(flag_in(way))]
    return (*tolerance, *(with_value(flags, way) for way in engine.if_killed), *untried)


ENGINE_DIED = Signature(
    Trouble(
        "engine-died",
        "an engine died",
        "Its process ended; why, its own log says, if it had the time. Killed without a word: "
        "perhaps for lack of"
        " host memory.",
        (
            "--use-fault-tolerance",
            "a higher --sglang-mem-fraction-static",
            "a smaller --rollout-batch-size",
            "--sglang-disable-cuda-graph",
        ),
        "kill -9 of an engine",
    ),
    r"(?:\w+: )?(?:[\w ]+: )?engine-\d+ (?:\(pid \d+\) )?(?:was killed|ended with exit "
    r"status|died \d+ times|was"
    r" not ready within)",
    Form.ERROR,
    Level.DEATH,
    exact=_engine_died,
)
ROUTER_DIED = Signature(
    Trouble(
        "router-died",
        "the router is gone, or knows no engine that works",
        "The router's process ended, or all engines behind it are gone.",
        (
            "logs/router.log, and those of the engines",
            "--use-fault-tolerance starts it again",
            "slime resume goes on",
        ),
        "kill -9 of the router",
    ),
    r"(?:\w+: )?(?:[\w ]+: )?(?:router(?:-\d+)? (?:\(pid \d+\) )?(?:was killed|ended with exit "
    r"status)"
    r"|.{0,120}the router has no healthy engine)",
    Form.ERROR,
    Level.DEATH,
)
ROLLOUT_DIED = Signature(
    Trouble(
        "rollout-died",
        "the process that generates and scores died without a word",
        "A function of your own, or a library that it calls, ended the process (os._exit, a crash "
        "in C), or it"
        " was killed,"
        " perhaps by the kernel for lack of memory.",
        (
            "the end of logs/rollout.log",
            "dmesg names what the kernel killed",
            "slime reward runs a reward on its own",
            "slime resume goes on from the newest checkpoint and the journal",
        ),
        "a reward function that calls os._exit",
    ),
    r"(?:\w+: )?rollout \([^)]*\) died \(",
    Form.ERROR,
    Level.DEATH,
)
PROCESS_DIED = Signature(
    Trouble(
        "trainer-died",
        "a trainer rank died without a word",
        "It was killed, by somebody or by the kernel for lack of memory, or a library ended it.",
        (
            "dmesg names what the kernel killed",
            "the end of its log",
            "--max-restarts 3 starts it again from the newest checkpoint",
        ),
        "kill -9 of a trainer rank",
    ),
    r"(?:\w+: )?trainer-\d+ (?:\(pid [^)]*\) )?(?:died \(|lacks what it was to work on)",
    Form.ERROR,
    Level.DEATH,
)
ALL = (
    *(
        PORT_CLASH,
        PORT_CLASH_SAID,
        NCCL_ERROR,
        COLLECTIVE_SAID,
        COLLECTIVE_RAISED,
        NO_ANSWER,
        GCS,
        PLACEMENT,
    ),
    *(
        PUSH_MISMATCH,
        PUSH_FAILED,
        NATIVE_CRASH,
        ENGINE_DIED,
        ROUTER_DIED,
        ROLLOUT_DIED,
        PROCESS_DIED,
    ),
    *(CONNECTION_ERROR, CONNECTION_RAISED),
)
