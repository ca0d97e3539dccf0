"""The router's process: sglang-router's own launcher, on a host where SGLang is installed too.

Its debugging router, which nobody starts here, tries to import SGLang, and with it torch: 14 s on a host with GPUs, at
every launch and every restart of a router. Told that there is none, it does without.

The key that it asks for, and sends to the workers of its command line, comes by the environment: a command line can be
read by every user of the host.
"""

from __future__ import annotations

import sys
from typing import Any

from slime.engines import keys


def main() -> None:
    modules: dict[str, Any] = sys.modules
    modules["sglang"] = None  # an import of it fails at once
    from sglang_router.launch_router import launch_router, parse_router_args

    args = parse_router_args(sys.argv[1:])
    args.api_key = str(keys.take()) or None
    launch_router(args)


if __name__ == "__main__":
    main()
