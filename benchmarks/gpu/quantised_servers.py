"""Engines for `benchmarks.gpu.quantised`: many on one GPU, started side by side, each as soon as
its model is there."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.quantised_state import STATE
from benchmarks.gpu.setting import HOST
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.config import make_config
from slime.engines.api import WEIGHT_LOADER
from slime.engines.kinds import engine_kind
from slime.engines.launch import EnginePlace
from slime.processes.host import num_gpus, reserve_port

#: A share of what was free when a server began, of which others take meanwhile: high, with the
#: cache limited by tokens.
_MEMORY = "--mem-fraction-static 0.85 --max-total-tokens 28672 --max-running-requests 64"
_WITH_GRAPHS = "--cuda-graph-max-bs-decode 64 --disable-prefill-cuda-graph"
_WITHOUT_GRAPHS = "--disable-cuda-graph"
#: Half a dozen imports of SGLang at once take all processors of the host; what is measured first is
#: started first.
_LATER_SECONDS = 25.0
#: Kernels that SGLang compiles when they are first needed, for minutes: module, function,
#: arguments.
_COMPILED = (
    ("gptq_marlin_repack", "_jit_gptq_marlin_repack_module()"),
    ("gptq_marlin", "_jit_gptq_marlin_module(torch.bfloat16)"),
    ("moe_wna16_marlin", "_jit_moe_wna16_marlin_module(torch.bfloat16)"),
)


class Server:
    """One engine.

    Attributes:
        name: "qwen3-4b/int4".
        shape, form: of its model; the directory is ``model``.
        graphs: it was started with CUDA graphs and lives.
        failure: why it did not start, or of what it died; "" while it lives.
        seconds: from the first start until it was ready.
    """

    def __init__(
        self,
        name: str,
        engine: str,
        shape: str,
        form: str,
        model: Path,
        log: Path,
        flags: Sequence[str],
        env: dict[str, str],
        wait: float,
        graphs: bool,
        delay: float,
    ) -> None:
        self.name = name
        self.engine = engine
        self.shape = shape
        self.form = form
        self.model = model
        self.ready = threading.Event()
        self.over = threading.Event()
        self.failure = ""
        self.seconds = 0.0
        self.graphs = graphs
        self._log = log
        self._flags = list(flags)
        self._env = env
        self._wait = wait
        self._delay = delay
        self._held = [reserve_port(HOST), reserve_port(HOST)]
        self.process: ServerProcess | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._held[0].port}"

    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive()

    def why(self) -> str:
        """Of what it died."""
        return (
            (self.process.exception_line() if self.process is not None else "")
            or self.failure
            or "no reason found"
        )

    def stop(self) -> None:
        self.over.set()
        if self.process is not None:
            self.process.stop(grace=0.0)
        for reservation in self._held:
            reservation.release()

    def _run(self) -> None:
        try:
            end = time.monotonic() + self._wait
            while (
                not (self.model / "config.json").exists()
                and time.monotonic() < end
                and not self.over.is_set()
            ):
                time.sleep(0.2)
            if not (self.model / "config.json").exists():
                self.failure = "its model was not made"
                return
            self.over.wait(self._delay)
            began = time.monotonic()
            graphs = [True, False] if self.graphs else [False]
            for number, self.graphs in enumerate(graphs):
                if self.over.is_set():
                    return
                try:
                    self._start(number, end - time.monotonic())
                    break
                except ServerDied as error:
                    self.failure = f"{error.what}: {self.why()}"
                    if number + 1 == len(graphs):
                        return
            self.failure = ""
            self.seconds = time.monotonic() - began
            self.ready.set()
            self.over.wait()  # the kernel ends a process with the thread that started it
        except Exception as error:  # whoever waits for it is told
            self.failure = repr(error)
        finally:
            if not self.ready.is_set():
                self.over.set()

    def _start(self, number: int, seconds: float) -> None:
        # the plain directory: that a run may have this one is what is to be found out
        flags: dict[str, Any] = {
            "hf_checkpoint": str(self.model.parent / "bf16"),
            "rollout_engine": self.engine,
        }
        if self.engine == "sglang":
            flags |= {"colocate": True, "rollout_num_gpus_per_engine": 1}
        else:
            flags["embedded_max_slots"] = 8
        config = make_config(
            **flags, actor_num_gpus_per_node=1, rollout_batch_size=1, num_rollout=1
        )
        place = EnginePlace(0, (), 1, self._held[1].port)
        spec = engine_kind(self.engine).command(
            config, str(self.model), HOST, self._held[0].port, place
        )
        argv = list(spec.argv)
        if self.engine == "sglang":
            argv.insert(argv.index(WEIGHT_LOADER) + 1, STATE)
            argv += self._flags + (_WITH_GRAPHS if self.graphs else _WITHOUT_GRAPHS).split()
        spec = replace(
            spec, argv=argv, env={**spec.env, **self._env}, startup_timeout=max(1.0, seconds)
        )
        log = self._log.with_name(f"{self._log.name}-{number}.log")
        self.process = ServerProcess(self.name, spec, self.url, log)
        self.process.start()
        self.process.wait_ready()


def start_servers(
    folder: Path,
    shapes: Sequence[str],
    forms: Sequence[str],
    flags: str,
    *,
    wait: float,
    engine: str,
    graphs: bool,
    deep_gemm: bool,
) -> list[Server]:
    """One for each shape and format, and one more for FP8 by DeepGEMM; the first shape's begin
    before the others'."""
    servers = []

    def add(shape: str, form: str, name: str, more: str, **env: str) -> None:
        words = [*flags.split(), *more.split()]
        model = folder / shape / form
        log = folder / "logs" / name.replace("/", "-")
        delay = (
            _LATER_SECONDS
            * (shape != shapes[0] or "by" in name)
            * (engine == "sglang")
            * bool(num_gpus())
        )
        servers.append(
            Server(name, engine, shape, form, model, log, words, env, wait, graphs, delay)
        )

    for shape in shapes:
        for form in forms:
            add(shape, form, f"{shape}/{form}", f"{_MEMORY} --fp8-gemm-backend triton")
    if deep_gemm and "fp8-block" in forms:
        name = f"{shapes[0]}/fp8-block by DeepGEMM"
        add(shapes[0], "fp8-block", name, f"{_MEMORY} --fp8-gemm-backend deep_gemm",
            SGLANG_JIT_DEEPGEMM_PRECOMPILE="false")  # fmt: skip
    return servers


def stop_all(servers: Sequence[Server]) -> None:
    """At once: each has memory to give back."""
    if servers:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers))


def as_ready(servers: Sequence[Server], end: float) -> Iterator[Server]:
    """Servers in the order in which they are ready or have failed, until ``end`` (of
    `time.monotonic`)."""
    waiting = list(servers)
    while waiting and time.monotonic() < end:
        found = next(
            (server for server in waiting if server.ready.is_set() or server.over.is_set()), None
        )
        if found is None:
            time.sleep(0.2)
            continue
        waiting.remove(found)
        yield found


def compile_kernels(log: Path) -> list[subprocess.Popen[bytes]]:
    """Compile what INT4 needs while models are made; servers then find it. Without a GPU there is
    nothing to do."""
    if not num_gpus():
        return []
    log.parent.mkdir(parents=True, exist_ok=True)
    code = "import time, torch; t = time.time(); import sglang.jit_kernel.{0} as m; m.{1}"
    code += "; print('{0}', round(time.time() - t, 1), 's')"
    with open(log, "ab") as file:
        return [
            subprocess.Popen([sys.executable, "-c", code.format(*kernel)], stdout=file, stderr=file)
            for kernel in _COMPILED
        ]
