"""``python -m slime.embedded --model-path DIR --port 30000``: start one engine server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from slime.embedded.options import EngineOptions
from slime.engines import keys
from slime.errors import UserError, is_debugging
from slime.log import setup_logging
from slime.processes import stacks
from slime.processes.garbage import paused


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slime.embedded",
        description="An inference server that speaks SGLang's HTTP protocol, on CPU or GPU. With "
        "SLIME_ENGINE_KEY in its environment it answers only requests that carry that key.",
        allow_abbrev=False,
    )
    EngineOptions.add_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add(
        "--port",
        type=int,
        default=30000,
        help="port to listen on; 0 picks a free one (default: %(default)s)",
    )
    add(
        "--fd",
        type=int,
        help="inherited descriptor of a socket that listens already, instead of host and port",
    )
    add("--parent-pid", type=int, help="end when this process ends")
    add("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        setup_logging("engine", args.log_level)
        stacks.answer()
        return _run(args)
    except UserError as error:
        if is_debugging():
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from slime.processes.host import bind

    key = keys.take_from_environment()
    inference_only = keys.take_access() == keys.ONLY_INFERENCE
    listener = bind(args.host, args.port, args.fd)  # before torch is imported
    with paused():
        import torch

        from slime.embedded.server import serve

    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    return asyncio.run(
        serve(listener, EngineOptions.of(args), args.parent_pid, key, inference_only=inference_only)
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still wait minutes for a collective or a file that is no longer needed.
    os._exit(status)
