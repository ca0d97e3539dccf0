"""An SGLang server's process: its own launcher, which is told the key to ask for where nobody reads it.

SGLang takes the key on its command line alone, which every user of the host can read, and writes all its arguments into
its log. Here the arguments get it after they were read, as a `Key`, whose repr does not show it.
"""

from __future__ import annotations

import importlib
import runpy
from typing import Any

from slime.engines import keys


def main() -> None:
    key = keys.take()
    if key:
        arguments: Any = importlib.import_module("sglang.srt.server_args")
        read = arguments.prepare_server_args

        def with_key(argv: list[str]) -> Any:
            found = read(argv)
            found.api_key = key
            return found

        arguments.prepare_server_args = with_key
    # under its own name, by which the processes that it starts find it again
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
