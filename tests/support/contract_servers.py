"""Starting a server process for the contract tests, and the requests they send."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slime.processes.host import free_port
from tests.support.forks import Fork, fork_or_start

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111]
CONTEXT = 256
_START_DEADLINE = 120.0
_CALL_DEADLINE = 60.0


@dataclass
class Answer:
    status: int
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@dataclass
class Server:
    """A running engine (or router) and plain HTTP calls to it."""

    url: str
    process: subprocess.Popen[bytes] | Fork
    log: Path

    def call(self, method: str, path: str, body: Any = None, raw: bytes | None = None) -> Answer:
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=_CALL_DEADLINE) as answer:
                return Answer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.read())

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    def post(self, path: str, body: Any = None) -> Answer:
        return self.call("POST", path, {} if body is None else body)

    def ok(self, path: str, body: Any = None) -> Any:
        """POST that must succeed; returns the decoded answer (None where it has no body)."""
        answer = self.post(path, body)
        assert answer.status == 200, f"{path}: {answer.status} {answer.raw[:500]!r}"
        return answer.json if answer.raw.startswith((b"{", b"[")) else None

    def generate(self, input_ids: list[int], **params: Any) -> Any:
        body = {
            "input_ids": input_ids,
            "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, **params},
        }
        return self.ok("/generate", body | {"return_logprob": True})


@contextlib.contextmanager
def running(argv: list[str], port: int, log: Path, health: str = "/health") -> Iterator[Server]:
    """Start, wait until the health path answers 200, stop at the end.

    Raises:
        AssertionError: it ended, or did not come up in time; carries its log.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log, "wb") as output, open(os.devnull, "rb") as nothing:
        process = fork_or_start(argv, (nothing.fileno(), output.fileno(), output.fileno()), env)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    end = time.monotonic() + _START_DEADLINE
    try:
        while True:
            assert process.poll() is None, f"ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < end, f"not up in {_START_DEADLINE} s:\n{log.read_text()}"
            with contextlib.suppress(OSError):
                if server.get(health).status == 200:
                    break
            time.sleep(0.05)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def embedded_argv(model: Path, port: int, *flags: str) -> list[str]:
    argv = [sys.executable, "-m", "slime.embedded", "--model-path", str(model), "--port", str(port)]
    return [*argv, "--parent-pid", str(os.getpid()), "--served-model-name", model.name, *flags]


def start_embedded(model: Path, log: Path, *more: str) -> Any:
    port = free_port()
    flags = [
        "--dtype",
        "float32",
        "--max-context-len",
        str(CONTEXT),
        "--max-slots",
        "8",
        "--device",
        "cpu",
    ]
    flags += ["--prefill-tokens", "64"]  # longer prompts are prefilled in pieces
    return running(embedded_argv(model, port, *flags, *more), port, log)


#: Name → context manager that starts one server.
ENGINES: dict[str, Callable[[Path, Path], Any]] = {"embedded": start_embedded}


def logprobs_of(directory: Path, tokens: list[int]) -> list[float]:
    """Log-prob of each token after the first, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return (
        torch.log_softmax(logits, -1)
        .gather(1, torch.tensor(tokens[1:])[:, None])
        .squeeze(1)
        .tolist()
    )


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.01)


class Background:
    """A request in a thread of its own."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        self.result = function()

    def join(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.result

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()


def num_running(engine: Server) -> int:
    return int(engine.get("/v1/loads").json["loads"][0]["num_running_reqs"])


def long_generation(
    engine: Server, rid: str, seed: int = 1, count: int = 240, **fields: Any
) -> Background:
    body = {
        "input_ids": PROMPT,
        "rid": rid,
        "return_logprob": True,
        **fields,
        "sampling_params": {"max_new_tokens": count, "ignore_eos": True, "sampling_seed": seed},
    }
    return Background(lambda: engine.ok("/generate", body))
