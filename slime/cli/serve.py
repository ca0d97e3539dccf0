"""`slime serve`: a model behind OpenAI's API.

slime serve outputs/sums                    the newest model of a run
slime serve Qwen3-0.6B --port 8080          a Hugging Face directory
slime serve checkpoints --hf-checkpoint M   a --save directory that lies outside of its run folder
slime serve outputs/lora                    a run with --lora-rank: its adapter, on its base
slime serve Qwen3-0.6B --adapter a=DIR --adapter b=outputs/lora      several, by their names
slime serve DIR -- --max-slots 8            what follows -- goes to the engine's own command line

Requests must carry a key: that of --api-key, of SLIME_ENGINE_KEY in the environment, or one that is
made and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime import deadlines
from slime.checkpoints.peft_files import is_loadable, module_of, read_adapter, write_plain
from slime.cli.arguments import Arguments
from slime.cli.convert import PRECISIONS
from slime.cli.model_source import (
    NamedModels,
    add_model_arguments,
    chosen_model,
    model_name,
    named_models,
)
from slime.cluster.server_process import ServerDied, ServerProcess
from slime.config import make_config
from slime.config.engine_flags import ENGINE_OPTIONS
from slime.engines.keys import ACCESS, EVERYTHING, ONLY_INFERENCE, VARIABLE, key_of, register
from slime.engines.kinds import EngineKind, engine_of
from slime.engines.launch import ONE_GPU
from slime.engines.tool_calls import chat_template, tool_format
from slime.errors import RunFailed, UserError
from slime.files import left_behind
from slime.http_access import host_in_url, is_loopback
from slime.models import family_name, family_of, read_hf_config
from slime.models.adapters import adaptable_by_name
from slime.models.spec import named_dtype
from slime.processes.host import bind, reserve_port
from slime.prompts.images import sees_images

_LOGS = "slime-serve-"


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status."""
    at = argv.index("--") if "--" in argv else len(argv)
    flags = _parser().parse_args(argv[:at])
    extra = argv[at + 1 :]
    leave_on_signals()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also if stdout is a pipe or a file
    key = _key(flags)
    chosen = chosen_model(flags.path, flags.hf_checkpoint)
    models = named_models(chosen, flags.name or model_name(flags.path), flags.adapter)
    with serving(
        chosen.directory,
        models.base,
        adapters=models.adapters,
        engine=flags.engine,
        host=flags.host,
        port=flags.port,
        extra=extra,
        key=key,
        with_control_routes=flags.control_routes,
        trust_remote_code=flags.trust_remote_code,
        on_start=lambda url, log: print(
            f"loading {models.base} ({chosen.directory}) for {url}/v1; its log: {log}"
        ),
    ) as server:
        is_new = bool(key) and key not in (flags.api_key, os.environ.get(VARIABLE))
        print(_welcome(server.url, models, key if is_new else ""))
        try:
            while server.is_alive():
                time.sleep(deadlines.SERVE_POLL)
        except KeyboardInterrupt:
            return 0
        raise RunFailed(
            f"the server {server.how_it_ended()}",
            why=server.log_tail(),
            fix=f"its log: {server.log_path}",
        )


def _parser() -> Arguments:
    parser = Arguments("slime serve", __doc__)
    add_model_flags(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; 0.0.0.0 for all (default 127.0.0.1)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=30000,
        help="port to listen on; 0 picks a free one (default 30000)",
    )
    parser.add_argument(
        "--name", help="what clients call the model (default: the run's or directory's name)"
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--api-key", help=f"key that requests must carry (default: {VARIABLE}, else a new one)"
    )
    keys.add_argument(
        "--no-api-key",
        action="store_true",
        help="answer every program of this host; on loopback alone",
    )
    parser.add_argument(
        "--control-routes",
        action="store_true",
        help="also answer routes that replace weights, pause, abort, flush, …",
    )
    return parser


def _key(flags: argparse.Namespace) -> str:
    """Return the key that requests must carry; "" for none.

    Raises:
        UserError: --no-api-key with an address that other hosts reach, or a malformed key.
    """
    if flags.no_api_key:
        if not is_loopback(flags.host):
            raise UserError(
                f"--no-api-key does not go with --host {flags.host}",
                why="everybody who reaches that address could use the server",
                fix="leave --no-api-key out, or listen on 127.0.0.1",
            )
        return ""
    key = flags.api_key if flags.api_key is not None else os.environ.get(VARIABLE) or None
    if key is None:
        return f"sk-slime-{secrets.token_urlsafe(24)}"
    if not re.fullmatch(r"[\x21-\x7e]{8,}", key):
        where = VARIABLE if flags.api_key is None else "--api-key"
        raise UserError(
            f"{where} is no key",
            why="a key has at least 8 characters, of ASCII and without blanks",
            fix="choose another",
        )
    return str(key)


def add_model_flags(parser: Arguments) -> None:
    """Declare the model and engine flags that `slime serve` and `slime chat` share."""
    add_model_arguments(parser)
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that the model brings"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="an adapter (LoRA) of the model: a PEFT directory or a run with --lora-rank; requests "
        "ask for it as MODEL:NAME",
    )
    choices = ("auto", *ENGINE_OPTIONS)
    parser.add_argument(
        "--engine",
        choices=choices,
        default="auto",
        help="auto: SGLang where it can run, else embedded",
    )


def leave_on_signals() -> None:
    """Make SIGTERM and SIGHUP exit as Ctrl-C does: the server ends and its temporary files are
    removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(0)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, leave)


@contextlib.contextmanager
def serving(
    directory: Path,
    name: str,
    *,
    adapters: Mapping[str, Path] | None = None,
    engine: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    extra: list[str] | None = None,
    key: str | None = None,
    with_control_routes: bool = False,
    trust_remote_code: bool = False,
    on_start: Callable[[str, Path], None] = lambda url, log: None,
) -> Iterator[ServerProcess]:
    """Serve the model, ready to answer, until the block or this process ends.

    Args:
        adapters: name → PEFT directory, in any form that `read_adapter` reads.
        engine: "auto" or a name in `ENGINE_OPTIONS`.
        port: 0 picks a free one.
        extra: more arguments for the engine's command line.
        key: the API key of requests; "" for none. By default a key that only this process knows.
        with_control_routes: whether the control routes are open (replace weights, pause, …).
        on_start: called with the server's URL and log file before it answers.
    Raises:
        UserError: the engine cannot be started here, the port is taken, or the server dies before
            it answers.
    """
    precision = PRECISIONS.get(named_dtype(read_hf_config(directory)), "bf16")
    flags: dict[str, Any] = {
        "hf_checkpoint": str(directory),
        "rollout_engine": engine,
        precision: True,
        "trust_remote_code": trust_remote_code,
    }
    config = make_config(**flags)
    record = engine_of(config)
    record.check_installed()
    for adapter in (adapters or {}).values():
        _check_modules(adapter, directory)
    reservation = None if port else reserve_port(host)
    if reservation is not None:
        port = reservation.port
    else:
        bind(host, port).close()  # fail at once if the port is taken
    spec = record.command(config, str(directory), host, port, ONE_GPU)
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://{host_in_url(reached)}:{port}"
    key = secrets.token_urlsafe(32) if key is None else key
    access = {VARIABLE: key, ACCESS: EVERYTHING if with_control_routes else ONLY_INFERENCE}
    register(url, key)
    remove_logs_of_the_dead()
    folder, lock = _log_folder()
    words = [*spec.argv, *more_words(record, name, directory)]
    if adapters:
        words += record.adapter_words(
            {key: _loadable(path, directory, folder / key) for key, path in adapters.items()}
        )
    spec = replace(spec, argv=[*words, *(extra or [])], env={**spec.env, **access})
    log = folder / "engine.log"
    server = ServerProcess(f"the {config.engine.rollout_engine} engine", spec, url, log)
    try:
        on_start(url, log)
        server.start()
        server.wait_ready()
        yield server
    except ServerDied as error:
        cause = server.exception_line()
        raise RunFailed(
            f"{error.name} {error.what}",
            why=cause or error.log_tail,
            fix="; ".join(record.remedies(cause)),
        ) from error
    finally:
        if server.is_alive():  # the log of a server that died is kept
            shutil.rmtree(folder, ignore_errors=True)
        server.stop()
        os.close(lock)
        if reservation is not None:
            reservation.release()


def _check_modules(adapter: Path, base: Path) -> None:
    """Check that engines apply all of an adapter.

    Raises:
        UserError: an adapter of a module that engines apply none to, such as a router.
    """
    family = family_of(base) if family_name(base) else None
    if family is None:
        return
    known = adaptable_by_name(family, family.describe(base))
    modules = map(module_of, read_adapter(adapter, family).names())
    for module in sorted(modules):
        leaf = module.rpartition(".")[2]
        if leaf not in known and ".experts." not in module:
            raise UserError(
                f"{adapter} has an adapter of {module}, which no engine applies",
                why=f"engines apply those of {', '.join(known)}",
                fix=f"merge it: slime export {adapter} --merge --to DIR, and pass DIR",
            )


def _loadable(adapter: Path, base: Path, folder: Path) -> Path:
    """Return an adapter that engines can load: itself, or a rewritten copy in ``folder`` if its
    ranks or scalings differ, it has PEFT's expert layout, or it adapts only part of a fused
    weight."""
    family = family_of(base) if family_name(base) else None
    spec = family.describe(base) if family is not None else None
    found = read_adapter(adapter, family)
    return adapter if is_loadable(found, spec) else write_plain(folder, found, spec)


def _log_folder() -> tuple[Path, int]:
    """Create a folder for the log and lock it; the caller holds the lock while the server lives."""
    folder = Path(tempfile.mkdtemp(prefix=_LOGS))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):  # no locks on this file system: nobody can take one
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, lock


def remove_logs_of_the_dead() -> None:
    """Remove the log folders of this user's earlier servers that were killed or have died."""
    for path in Path(tempfile.gettempdir()).glob(f"{_LOGS}*/"):
        with left_behind(path) as is_free:
            if is_free:
                shutil.rmtree(path, ignore_errors=True)


def more_words(record: EngineKind, name: str, directory: Path) -> list[str]:
    """Return the arguments that a server needs in addition to those of a run's engine: the model
    name for clients, the tool-call parser, and image input if the model has it."""
    words = ["--served-model-name", name]
    found = tool_format(chat_template(directory), family_name(directory))
    if found is not None and found.sglang_parser:
        words += record.tool_call_words(found.sglang_parser)
    return [*words, *record.image_words] if sees_images(directory) else words


def _welcome(url: str, models: NamedModels, new_key: str) -> str:
    name = models.requested
    known = bool(key_of(url))
    header = f'-H "Authorization: Bearer ${VARIABLE}" ' if known else ""
    key = f'os.environ["{VARIABLE}"]' if known else '"none"'
    key_line = (
        f"Its key, which is shown this once:\n\nexport {VARIABLE}={new_key}\n\n" if new_key else ""
    )
    names = [f"{models.base}:{adapter}" for adapter in models.adapters]
    adapters = f"Adapters: {', '.join(names)}; without: {models.base}\n\n" if names else ""
    return f"""\
{name} is at {url}/v1; Ctrl-C ends it

{adapters}{key_line}curl {url}/v1/chat/completions -H 'Content-Type: application/json' {header}\\
  -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(
    model="{name}", messages=[{{"role": "user", "content": "Hello"}}]
)
print(answer.choices[0].message.content)
"""
