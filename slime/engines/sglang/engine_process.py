"""An SGLang server's process: SGLang's own launcher, with the run's key kept from other users.

SGLang takes its key on the command line only, which every user of the host can read, and logs all
its arguments. Here the parsed arguments get the key, and log records are searched for it. The key
must be a plain string, because SGLang's processes send each other their arguments in a form that
knows no subclasses.
"""

from __future__ import annotations

import importlib
import logging
import runpy
from typing import Any

from slime.engines import keys
from slime.http_access import AsgiGuard, EngineAccess, is_loopback
from slime.redact import HIDDEN


def main() -> None:
    key = str(keys.take())
    access = keys.take_access()
    if key:
        hide_in_log(key)
    arguments: Any = importlib.import_module("sglang.srt.server_args")
    read = arguments.prepare_server_args

    def prepare(argv: list[str]) -> Any:
        found = read(argv)
        if key:
            found.api_key = key
        if access:
            guard(str(found.host), inference_only=access == keys.ONLY_INFERENCE)
        return found

    arguments.prepare_server_args = prepare
    # under its own name, by which the processes that it starts find it again
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def guard(host: str, *, inference_only: bool) -> None:
    """Refuse requests of pages from elsewhere, which SGLang allows (CORS).

    Args:
        inference_only: refuse requests to control routes, too.
    """
    server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    server.app.add_middleware(AsgiGuard, access=EngineAccess(is_loopback(host), inference_only))


def hide_in_log(key: str) -> None:
    """Hide the key in whatever this process logs from now on."""
    make = logging.getLogRecordFactory()

    def without_key(*given: Any, **named: Any) -> logging.LogRecord:
        record = make(*given, **named)
        try:
            text = record.getMessage()
        # the message does not fit its arguments, which logging reports
        except (TypeError, ValueError, KeyError):
            return record
        if key in text:
            record.msg = text.replace(key, HIDDEN)
            record.args = ()
        return record

    logging.setLogRecordFactory(without_key)


if __name__ == "__main__":
    main()
