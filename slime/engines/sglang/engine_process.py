"""An SGLang server's process: SGLang's own launcher, with the run's key hidden from other users.

SGLang only accepts its key on the command line, which every user of the host can read, and logs all
its arguments. This launcher adds the key to the parsed arguments, and hides it in log records. The
key must be a plain string, because the format in which SGLang's processes exchange arguments does
not support subclasses.
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
    key = str(keys.take_from_environment())
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
    # run it under its own name, by which its child processes import it
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def guard(host: str, *, inference_only: bool) -> None:
    """Refuse requests from foreign web pages, which SGLang allows (CORS).

    Args:
        inference_only: also refuse requests to control routes.
    """
    server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    server.app.add_middleware(AsgiGuard, access=EngineAccess(is_loopback(host), inference_only))


def hide_in_log(key: str) -> None:
    """Hide the key in all log records of this process from now on."""
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
