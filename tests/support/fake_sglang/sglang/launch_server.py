"""``python -m sglang.launch_server``: SGLang's own table of flags, answered by the embedded engine on CPU.

Environment:
    FAKE_SGLANG_CALLS   file to which every steering call is appended, one JSON object per line
    FAKE_SGLANG_CRASH   text to print before ending with status 1, at the start
    FAKE_SGLANG_DIES_AT path of the first request that it dies of, as SGLang does of a scheduler's exception
    FAKE_SGLANG_DIES_ONCE file that the first one to die of that makes; no other dies while it is there
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

from slime.config.engine_flags import stored_sglang_args


def parse_args(argv: list[str]) -> argparse.Namespace:
    """As SGLang's parser: the same names, types and choices; unknown flags end the process with status 2."""
    parser = argparse.ArgumentParser(prog="launch_server.py")
    kinds = {"int": int, "float": float, "str": str, "json": json.loads}
    _, arguments = stored_sglang_args()
    for arg in arguments:
        options = ["--" + name.replace("_", "-") for name in (arg.name, *arg.aliases)]
        more: dict[str, Any] = {"dest": arg.name, "default": arg.default}
        if arg.kind == "bool":
            more["action"] = argparse.BooleanOptionalAction if arg.negatable else "store_true"
        else:
            more["type"] = kinds[arg.kind]
            more |= {"choices": arg.choices} if arg.choices else {}
            more |= {"nargs": "+"} if arg.many else {"nargs": "?"} if arg.value_optional else {}
        parser.add_argument(*options, **more)
    args = parser.parse_args(argv)
    if not args.model_path:
        parser.error("the following arguments are required: --model-path")
    return args


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    crash = os.environ.get("FAKE_SGLANG_CRASH")
    if crash:
        print(crash, file=sys.stderr)
        return 1
    from sglang.as_sglang import install

    install(args)
    from slime.engines.embedded.engine import EngineOptions
    from slime.engines.embedded.server import serve
    from slime.host import bind

    listener = bind(args.host, args.port)
    options = EngineOptions(
        model_path=args.model_path,
        dtype={"half": "bfloat16", "float16": "bfloat16", "float": "float32"}.get(args.dtype, args.dtype),
        device="cpu",
        max_slots=args.max_running_requests or 64,
        max_context_len=int(args.context_length) if args.context_length else None,
        deterministic=args.enable_deterministic_inference,
        random_seed=args.random_seed or 0,
        record_experts=args.enable_return_routed_experts,
    )
    return asyncio.run(serve(listener, options, os.getppid()))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
