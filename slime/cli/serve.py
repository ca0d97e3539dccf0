"""`slime serve`: a model behind OpenAI's API.

slime serve outputs/sums                    the newest model of a run
slime serve Qwen3-0.6B --port 8080          a Hugging Face directory
slime serve checkpoints --hf-checkpoint M   a --save directory that lies outside of its run folder
slime serve DIR -- --max-slots 8            what follows -- goes to the engine's own command line

With SLIME_ENGINE_KEY in the environment it answers only requests that carry that key.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.cli.arguments import Arguments
from slime.cli.convert import PRECISIONS
from slime.cli.model_source import model_directory, model_name
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.config import make_config
from slime.engines.keys import VARIABLE, key_of, know
from slime.engines.kinds import ENGINES, EngineKind, engine_of
from slime.engines.launch import ONE_GPU
from slime.engines.tool_calls import chat_template, tool_format
from slime.errors import RunFailed
from slime.host import bind, reserve_port
from slime.models import family_name, read_hf_config
from slime.models.spec import named_dtype

_LOOK_SECONDS = 0.5


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status."""
    at = argv.index("--") if "--" in argv else len(argv)
    flags, extra = _parser().parse_args(argv[:at]), argv[at + 1 :]
    leave_on_signals()
    directory, name = model_directory(flags.path, flags.hf_checkpoint), flags.name or model_name(flags.path)
    with serving(directory, name, engine=flags.engine, host=flags.host, port=flags.port, extra=extra) as server:
        print(_welcome(server.url, name, directory, server.log_path), flush=True)
        try:
            while server.is_alive():
                time.sleep(_LOOK_SECONDS)
        except KeyboardInterrupt:
            return 0
        raise RunFailed(f"the server {server.how_it_ended()}", why=server.log_tail(), fix=f"its log: {server.log_path}")


def _parser() -> Arguments:
    parser = Arguments("slime serve", __doc__)
    add_model_flags(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (default 127.0.0.1)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on; 0 picks a free one (default 30000)")
    parser.add_argument("--name", help="what clients call the model (default: the run's or directory's name)")
    return parser


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What `slime serve` and `slime chat` share: which model, on which engine."""
    parser.add_argument(
        "path", help="a run folder, a --save directory, a Hugging Face directory, or org/name on the hub"
    )
    parser.add_argument(
        "--hf-checkpoint", help="config and tokenizer, for a --save directory outside of its run folder"
    )
    choices = ("auto", *ENGINES)
    parser.add_argument(
        "--engine", choices=choices, default="auto", help="auto: SGLang where it can run, else embedded"
    )


def leave_on_signals() -> None:
    """SIGTERM and SIGHUP leave the way that Ctrl-C does: the server ends, and what it wrote is removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, leave)


@contextlib.contextmanager
def serving(
    directory: Path,
    name: str,
    *,
    engine: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    extra: list[str] | None = None,
) -> Iterator[ServerProcess]:
    """A server of the model that answers; it ends with the block, or with this process.

    Args:
        engine: "auto" or a name of `ENGINES`.
        port: 0 picks a free one.
        extra: more words for the engine's command line. The key that it asks for is that of the environment.
    Raises:
        UserError: the engine cannot be started here, the port is taken, or the server dies before it answers.
    """
    precision = PRECISIONS.get(named_dtype(read_hf_config(directory)), "bf16")
    flags: dict[str, Any] = {"hf_checkpoint": str(directory), "rollout_engine": engine, precision: True}
    config = make_config(**flags)
    record = engine_of(config)
    record.check_installed()
    reservation = None if port else reserve_port(host)
    if reservation is not None:
        port = reservation.port
    else:
        bind(host, port).close()  # taken: said at once
    spec = record.command(config, str(directory), host, port, ONE_GPU)
    log = Path(tempfile.mkdtemp(prefix="slime-serve-")) / "engine.log"
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    spec = replace(spec, argv=[*spec.argv, *more_words(record, name, directory), *(extra or [])])
    know(url, os.environ.get(VARIABLE, ""))
    server = ServerProcess(f"the {config.engine.rollout_engine} engine", spec, url, log)
    try:
        server.start()
        server.wait_ready()
        yield server
    except ServerDied as error:
        cause = server.exception_line()
        raise RunFailed(
            f"{error.name} {error.what}", why=cause or error.log_tail, fix="; ".join(record.remedies(cause))
        ) from error
    finally:
        if server.is_alive():  # of one that died the log is wanted
            shutil.rmtree(log.parent, ignore_errors=True)
        server.stop()
        if reservation is not None:
            reservation.release()


def more_words(record: EngineKind, name: str, directory: Path) -> list[str]:
    """What a server has on its command line beyond that of an engine of a run: the name that clients use, and how it is
    to read calls of tools, where it does not find that out itself."""
    words, found = ["--served-model-name", name], tool_format(chat_template(directory), family_name(directory))
    if found is not None and found.sglang_parser:
        words += record.tool_call_words(found.sglang_parser)
    return words


def _welcome(url: str, name: str, directory: Path, log: Path) -> str:
    known = bool(key_of(url))
    header = f'-H "Authorization: Bearer ${VARIABLE}" ' if known else ""
    key = f'os.environ["{VARIABLE}"]' if known else '"none"'
    return f"""\
{name} ({directory}) is at {url}/v1; Ctrl-C ends it; its log: {log}

curl {url}/v1/chat/completions -H 'Content-Type: application/json' {header}\\
  -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello"}}])
print(answer.choices[0].message.content)
"""
