"""SGLang's arguments: its own table of flags."""

from __future__ import annotations

import argparse
import json
from typing import Any

from slime.config.engine_flags import sglang_args


def prepare_server_args(argv: list[str]) -> argparse.Namespace:
    """As SGLang's parser: the same names, types and choices; unknown flags end the process with
    status 2."""
    parser = argparse.ArgumentParser(prog="launch_server.py")
    kinds = {"int": int, "float": float, "str": str, "json": json.loads}
    _, arguments = sglang_args()
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
