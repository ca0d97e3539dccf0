"""An SGLang server's process: its own launcher, which is told the key to ask for where nobody reads it.

SGLang takes the key on its command line alone, which every user of the host can read, and writes all its arguments into
its log. Here the arguments get it after they were read, and what is logged is looked through. It must be an ordinary
string: SGLang's processes send each other their arguments in a form that knows no other.
"""

from __future__ import annotations

import importlib
import logging
import runpy
from typing import Any

from slime.engines import keys
from slime.redact import HIDDEN


def main() -> None:
    key = str(keys.take())
    if key:
        hide_in_log(key)
        arguments: Any = importlib.import_module("sglang.srt.server_args")
        read = arguments.prepare_server_args

        def with_key(argv: list[str]) -> Any:
            found = read(argv)
            found.api_key = key
            return found

        arguments.prepare_server_args = with_key
    # under its own name, by which the processes that it starts find it again
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def hide_in_log(key: str) -> None:
    """Whatever this process logs from now on does not show the key."""
    make = logging.getLogRecordFactory()

    def without_key(*given: Any, **named: Any) -> logging.LogRecord:
        record = make(*given, **named)
        try:
            said = record.getMessage()
        except (TypeError, ValueError, KeyError):  # a message that does not fit its arguments: logging will say so
            return record
        if key in said:
            record.msg, record.args = said.replace(key, HIDDEN), ()
        return record

    logging.setLogRecordFactory(without_key)


if __name__ == "__main__":
    main()
