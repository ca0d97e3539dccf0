"""An SGLang server's process: its own launcher, which is told the key to ask for where nobody reads
it.

SGLang takes the key on its command line alone, which every user of the host can read, and writes
all its arguments into its log. Here the arguments get it after they were read, and what is logged
is looked through. It must be an ordinary string: SGLang's processes send each other their arguments
in a form that knows no other.
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
    """Have SGLang's application answer no pages of elsewhere, which it allows by itself (CORS),
    and, if it is to only generate, no route that steers it."""
    server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    server.app.add_middleware(AsgiGuard, access=EngineAccess(is_loopback(host), inference_only))


def hide_in_log(key: str) -> None:
    """Hide the key in whatever this process logs from now on."""
    make = logging.getLogRecordFactory()

    def without_key(*given: Any, **named: Any) -> logging.LogRecord:
        record = make(*given, **named)
        try:
            said = record.getMessage()
        except (
            TypeError,
            ValueError,
            KeyError,
        ):  # a message that does not fit its arguments: logging will say so
            return record
        if key in said:
            record.msg = said.replace(key, HIDDEN)
            record.args = ()
        return record

    logging.setLogRecordFactory(without_key)


if __name__ == "__main__":
    main()
