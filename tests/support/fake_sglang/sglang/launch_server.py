"""``python -m sglang.launch_server``: SGLang's own table of flags, answered by the embedded engine
on CPU.

Environment:
    FAKE_SGLANG_CALLS      file to which every steering call is appended, one JSON object per line
    FAKE_SGLANG_VERSION    the release that it behaves as, 0.5.16 by default
    FAKE_SGLANG_CRASH      text to print before ending with status 1, at the start
    FAKE_SGLANG_DIES_AT    path of the first request that it dies of, as SGLang does of a
                           scheduler's exception
    FAKE_SGLANG_DIES_ONCE  file that the first one to die of that makes; no other dies while it
                           is there
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from sglang.srt.entrypoints.http_server import app
from sglang.srt.server_args import prepare_server_args


def main(argv: list[str]) -> int:
    args = prepare_server_args(argv)
    logging.basicConfig(level=logging.INFO)
    logging.info(f"server_args={args!r}")  # as SGLang does
    crash = os.environ.get("FAKE_SGLANG_CRASH")
    if crash:
        print(crash, file=sys.stderr)
        return 1
    from sglang.as_sglang import install

    install(args)
    from slime.embedded.options import EngineOptions
    from slime.embedded.server import serve
    from slime.processes.host import bind

    listener = bind(args.host, args.port)
    options = EngineOptions(
        model_path=args.model_path,
        dtype={"half": "bfloat16", "float16": "bfloat16", "float": "float32"}.get(
            args.dtype, args.dtype
        ),
        device="cpu",
        max_slots=args.max_running_requests or 64,
        max_context_len=int(args.context_length) if args.context_length else None,
        deterministic=args.enable_deterministic_inference,
        random_seed=args.random_seed or 0,
        enable_return_routed_experts=args.enable_return_routed_experts,
        enable_lora=bool(args.enable_lora),
        lora_paths=tuple(tuple(one.split("=", 1)) for one in args.lora_paths or ()),
    )
    key, inference_only = args.api_key or "", app.inference_only
    return asyncio.run(serve(listener, options, os.getppid(), key, inference_only=inference_only))


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
