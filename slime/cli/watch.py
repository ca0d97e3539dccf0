"""`slime watch`: runs as a live page in the browser, while they go on and afterwards.

slime watch                        the newest runs in outputs/, and those that begin later
slime watch outputs/sums           one run
slime watch outputs/a outputs/b    curves over each other, settings that differ
slime watch --host 0.0.0.0         from other hosts, for who has the address with its token

Only reads. An index of the samples is kept in ~/.cache/slime/watch.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from pathlib import Path

from aiohttp import web

from slime import deadlines
from slime.cli.arguments import Arguments
from slime.errors import UserError
from slime.http_access import host_in_url, is_loopback
from slime.page.index import cache_folder
from slime.page.server import Runs, application
from slime.processes.host import bind

_OUTPUTS = "outputs"


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM. Returns the exit status."""
    parser = Arguments("slime watch", __doc__)
    add = parser.add_argument
    add("run_dir", nargs="*", help=f"run folders, or folders of runs (default: {_OUTPUTS})")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add(
        "--port",
        type=int,
        default=8090,
        help="port to listen on; 0 picks a free one (default 8090)",
    )
    add("--no-cache", action="store_true", help="keep no index from one call to the next")
    flags = parser.parse_args(argv)
    paths = [Path(name) for name in flags.run_dir] or [Path(_OUTPUTS)]
    if not flags.run_dir and not paths[0].is_dir():
        raise UserError(
            f"there is no {_OUTPUTS}/ here",
            why=f"the working directory is {Path.cwd()}",
            fix="slime watch RUN_DIR, or call it where runs were started",
        )
    token = None if is_loopback(flags.host) else secrets.token_urlsafe(24)
    with bind(flags.host, flags.port) as listener:
        runs = Runs(paths, None if flags.no_cache else _usable(cache_folder()))
        asyncio.run(_serve(runs, listener, flags.host, token))
    return 0


def _usable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / ".writable").touch()
    except OSError:  # the cache is not writable: keep the index in memory only
        return None
    return folder


async def _serve(runs: Runs, listener: socket.socket, host: str, token: str | None) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # under nohup SIGHUP stays ignored
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stopping.set)
    port = listener.getsockname()[1]
    app = application(runs, token, f"slime_watch_{port}")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=deadlines.WATCH_SHUTDOWN)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        print(f"{address(host, port, token)}  (Ctrl-C ends it)", flush=True)
        await stopping.wait()
    finally:
        await runner.cleanup()


def address(host: str, port: int, token: str | None) -> str:
    """Return the URL to open in a browser.

    Example:
        >>> address("127.0.0.1", 8090, None), address("10.0.0.7", 80, "abc")
        ('http://127.0.0.1:8090/', 'http://10.0.0.7:80/?token=abc')
    """
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host_in_url(host)
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
