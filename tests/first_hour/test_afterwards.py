"""After a run: its checkpoint is talked to, served and exported without a word about formats."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.gguf import gguf_to_hf
from slime.cli.serve import more_words
from slime.engines.kinds import engine_kind
from slime.processes import preloaded
from slime.processes.host import free_port
from tests.support.bpe_tokenizers import save_model_with_words
from tests.support.forks import fork_or_start, run_fork, socket_of_forks
from tests.support.processes import wait_until


def environment() -> dict[str, str]:
    """Servers of a command are forks, as the command is."""
    return {**os.environ, preloaded.VARIABLE: socket_of_forks(), "SLIME_DEBUG": "0"}


def slime(*words: object, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime", *map(str, words)]
    done = run_fork(command, environment(), said.encode())
    output, errors = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in errors, errors
    return subprocess.CompletedProcess(command, done.returncode, output, errors)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has left a Megatron checkpoint alone."""
    root = tmp_path_factory.mktemp("afterwards")
    model = save_model_with_words(root / "base", "qwen3")
    folder = root / "outputs" / "sums"
    done = slime(
        "convert", "hf-to-megatron", "--hf_model_path", model, "--save_path", folder / "checkpoints"
    )
    assert done.returncode == 0, done.stderr
    config = {
        "checkpoint": {
            "hf_checkpoint": str(model),
            "save": str(folder / "checkpoints"),
            "save_hf": None,
        },
        "observe": {"output_dir": "outputs", "run_name": "sums"},
        "origins": {},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_chat_answers_a_question_per_line(run_folder: Path) -> None:
    said = "Hello\n/nonsense\nagain\n/reset\nHello\n/quit\nnever asked\n"
    done = slime("chat", run_folder, "--temperature", "0", "--max-tokens", "6", said=said)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == third and second != first  # the second knows of the first; /reset forgets
    assert (
        "there is no /nonsense; there are /reset, /system TEXT, /image FILE, /quit" in done.stderr
    )
    assert "converting" in done.stderr
    said = f"/system Be brief.\nHello\n{'too long ' * 500}\nnever asked\n"
    system = slime("chat", run_folder, "--temperature", "0", "--max-tokens", "6", said=said)
    assert len(system.stdout.splitlines()) == 1 and system.stdout.splitlines() != [first]
    assert system.returncode == 2 and "/reset begins anew" in system.stderr
    assert "converting" not in system.stderr  # it was, once


def test_chat_reads_utf8_alone(run_folder: Path) -> None:
    command = [sys.executable, "-m", "slime", "chat", str(run_folder), "--max-tokens", "1"]
    done = run_fork(command, environment(), b"caf\xe9\n")
    assert done.returncode == 2 and b"a line of standard input is not UTF-8" in done.stderr


# SIGTERM is also in tests/unit/test_serve.py
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGHUP]
)
def test_serve_prints_what_to_call_and_ends_with_a_signal(
    run_folder: Path, tmp_path: Path, number: int
) -> None:
    port, output = free_port(), tmp_path / "said.txt"
    command = [
        sys.executable,
        "-m",
        "slime",
        "serve",
        str(run_folder),
        "--port",
        str(port),
        "--",
        "--max-slots",
        "2",
    ]
    # under nohup the server would ignore it, as it should
    heard = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with output.open("w") as stream, open(os.devnull, "rb") as nothing:
        stdio = nothing.fileno(), stream.fileno(), stream.fileno()
        process = fork_or_start(command, stdio, {**environment(), "TMPDIR": str(tmp_path)})
    signal.signal(signal.SIGHUP, heard)
    try:
        wait_until(
            lambda: "print(answer" in output.read_text() or process.poll() is not None,
            "the welcome",
        )
        text, url = output.read_text(), f"http://127.0.0.1:{port}"
        assert (
            f"curl {url}/v1/chat/completions" in text and f'OpenAI(base_url="{url}/v1"' in text
        ), text
        key = text.partition("export SLIME_ENGINE_KEY=")[2].split()[0]
        body = {
            "model": "sums",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 4,
        }
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        request.add_header("Authorization", f"Bearer {key}")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=60) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 4
        taken = slime("serve", run_folder, "--port", port)
        assert taken.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in taken.stderr
    finally:
        process.send_signal(number)
        assert process.wait(60) == 0 and not list(tmp_path.glob("slime-serve-*"))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0  # nobody listens any more


def test_export_of_a_run_is_its_model(run_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the package gguf is not installed")
    done = slime("export", run_folder, "--gguf", tmp_path / "sums.gguf")
    assert done.returncode == 0 and "wrote" in done.stdout, done.stderr
    back = gguf_to_hf(tmp_path / "sums.gguf", tmp_path / "back", "float32")
    base = run_folder.parents[1] / "base"
    ours, theirs = load_file(base / "model.safetensors"), load_file(back / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    model = save_model_with_words(tmp_path / "broken", "qwen3")
    (model / "model.safetensors").write_bytes(b"cut short")
    done = slime("chat", model, said="Hello\n")
    assert (
        done.returncode == 1
        and "before it was ready" in done.stderr
        and "model.safetensors" in done.stderr
    )


def test_sglang_is_told_the_name_and_how_to_read_calls(tmp_path: Path) -> None:
    model = save_model_with_words(tmp_path / "model", "qwen3")
    told = ["--served-model-name", "sums"]
    assert more_words(engine_kind("sglang"), "sums", model) == [
        *told,
        "--tool-call-parser",
        "qwen25",
    ]
    assert more_words(engine_kind("embedded"), "sums", model) == told
