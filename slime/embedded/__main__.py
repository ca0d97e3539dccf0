"""``python -m slime.embedded --model-path DIR --port 30000``: start one engine server."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import fields

from slime.engines import keys
from slime.errors import UserError
from slime.log import setup_logging
from slime.processes import stacks
from slime.processes.garbage import paused


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m slime.embedded",
        description="An inference server that speaks SGLang's HTTP protocol, on CPU or GPU. With "
        "SLIME_ENGINE_KEY in"
        " its environment it answers only requests that carry that key.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="Hugging Face model directory")
    add("--served-model-name", help="what clients call the model (default: the directory's name)")
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
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="auto: the checkpoint's",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU where there is one",
    )
    add(
        "--max-slots",
        type=int,
        default=64,
        help="requests decoded at once; more wait (default: %(default)s)",
    )
    add(
        "--max-context-len",
        type=int,
        help="most tokens of prompt plus response (default: the model's)",
    )
    add(
        "--prefill-tokens",
        type=int,
        default=2048,
        help="most prompt tokens between two decode steps",
    )
    add(
        "--kv-cache-gb",
        type=float,
        help="most memory for keys and values (default: half of what is free)",
    )
    add(
        "--deterministic",
        action="store_true",
        help="results do not depend on how requests are batched together",
    )
    add(
        "--enable-return-routed-experts",
        action="store_true",
        help="record experts, for return_routed_experts",
    )
    add(
        "--trust-remote-code",
        action="store_true",
        help="run the code of a tokenizer that the model brings",
    )
    add(
        "--enable-lora",
        action="store_true",
        help="serve adapters (LoRA), which requests name in lora_path or as model BASE:NAME",
    )
    add(
        "--lora-paths",
        nargs="+",
        type=named_path,
        default=(),
        metavar="NAME=PATH",
        help="adapters to serve from the start, directories as PEFT writes them; implies "
        "--enable-lora",
    )
    add("--max-lora-rank", type=int, help="refuse adapters of a higher rank (default: no limit)")
    add(
        "--max-loaded-loras",
        type=int,
        help="refuse to load more adapters at once (default: no limit)",
    )
    add(
        "--enable-multimodal",
        action="store_true",
        help="load the tower that sees images, which requests bring in image_data",
    )
    add("--image-max-pixels", type=int, help="scale larger images down (default: the model's)")
    add(
        "--limit-images",
        type=int,
        default=16,
        help="refuse prompts with more images (default: %(default)s)",
    )
    add("--random-seed", type=int, default=42, help="seeds requests that bring no sampling_seed")
    add("--num-threads", type=int, help="CPU threads (default: OMP_NUM_THREADS, or one per core)")
    add("--parent-pid", type=int, help="end when this process ends")
    add("--log-level", default="INFO", help="DEBUG, INFO, WARNING or ERROR")
    return parser.parse_args(argv)


def named_path(text: str) -> tuple[str, str]:
    """NAME=PATH, or PATH, which then is the name, too."""
    name, separator, path = text.partition("=")
    if not name or (separator and not path):
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=PATH nor PATH")
    return name, path or name


def main(argv: list[str] | None = None) -> int:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        setup_logging("engine", args.log_level)
        stacks.answer()
        return _run(args)
    except UserError as error:
        if os.environ.get("SLIME_DEBUG", "0") not in ("", "0"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    from slime.processes.host import bind

    key = keys.take()
    inference_only = keys.take_access() == keys.ONLY_INFERENCE
    listener = bind(args.host, args.port, args.fd)  # before torch is imported
    with paused():
        import torch

        from slime.embedded.engine import EngineOptions
        from slime.embedded.server import serve

    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    names = {field.name for field in fields(EngineOptions)}
    options = EngineOptions(
        record_experts=args.enable_return_routed_experts,
        **{name: value for name, value in vars(args).items() if name in names},
    )
    return asyncio.run(
        serve(listener, options, args.parent_pid, key, inference_only=inference_only)
    )


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread may still wait minutes for a collective or a file that nobody needs any more.
    os._exit(status)
