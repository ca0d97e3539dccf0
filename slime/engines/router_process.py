"""The router's process: sglang-router's launcher without its debugging router.

The debugging router, which is not used here, imports FastAPI and, where it is installed, SGLang
with torch: 14 s on a host with GPUs at every start of a router. An empty module takes its place.

The environment passes the router's key, because every user of the host can read a command line.
"""

from __future__ import annotations

import sys
from types import ModuleType

from slime.engines import keys


def main() -> None:
    debugging = ModuleType("sglang_router.mini_lb")
    debugging.MiniLoadBalancer = None  # type: ignore[attr-defined]
    sys.modules[debugging.__name__] = debugging
    from sglang_router.launch_router import launch_router, parse_router_args

    args = parse_router_args(sys.argv[1:])
    args.api_key = str(keys.take_from_environment()) or None
    launch_router(args)


if __name__ == "__main__":
    main()
