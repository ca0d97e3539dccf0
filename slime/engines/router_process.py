"""The router's process: sglang-router's own launcher without its debugging router.

That one, which nobody starts here, imports FastAPI, half of this process's start, and SGLang where
it is installed, and with it torch: 14 s on a host with GPUs, at every launch and every restart of a
router. In its place is an empty name.

The key that it asks for, and sends to the workers of its command line, comes by the environment: a
command line can be read by every user of the host.
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
    args.api_key = str(keys.take()) or None
    launch_router(args)


if __name__ == "__main__":
    main()
