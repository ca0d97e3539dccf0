"""The options of an engine, each with its default and its argument of the command line."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


def _option(default: Any, description: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": description, **argument})


def named_path(text: str) -> tuple[str, str]:
    """Parse NAME=PATH, or PATH, which is then also the name."""
    name, separator, path = text.partition("=")
    if not name or (separator and not path):
        raise argparse.ArgumentTypeError(f"{text!r} is neither NAME=PATH nor PATH")
    return name, path or name


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine; the command line's help describes each."""

    model_path: str = field(metadata={"help": "Hugging Face model directory", "required": True})
    served_model_name: str | None = _option(
        None, "what clients call the model (default: the directory's name)"
    )
    dtype: str = _option("auto", "auto: the checkpoint's", choices=("auto", "bfloat16", "float32"))
    device: str = _option("auto", "auto: a GPU where there is one", choices=("auto", "cpu", "cuda"))
    max_slots: int = _option(
        64, "requests decoded at once; more wait (default: %(default)s)", type=int
    )
    max_context_len: int | None = _option(
        None, "most tokens of prompt plus response (default: the model's)", type=int
    )
    prefill_tokens: int = _option(2048, "most prompt tokens between two decode steps", type=int)
    kv_cache_gb: float | None = _option(
        None, "most memory for keys and values (default: half of what is free)", type=float
    )
    deterministic: bool = _option(
        False, "results do not depend on how requests are batched together", action="store_true"
    )
    enable_return_routed_experts: bool = _option(
        False, "record experts, for return_routed_experts", action="store_true"
    )
    trust_remote_code: bool = _option(
        False, "run the code of a tokenizer that the model brings", action="store_true"
    )
    enable_lora: bool = _option(
        False,
        "serve adapters (LoRA), which requests name in lora_path or as model BASE:NAME",
        action="store_true",
    )
    lora_paths: tuple[tuple[str, str], ...] = _option(
        (),
        "adapters to serve from the start, directories as PEFT writes them; implies --enable-lora",
        nargs="+",
        type=named_path,
        metavar="NAME=PATH",
    )
    max_lora_rank: int | None = _option(
        None, "refuse adapters of a higher rank (default: no limit)", type=int
    )
    max_loaded_loras: int | None = _option(
        None, "refuse to load more adapters at once (default: no limit)", type=int
    )
    enable_multimodal: bool = _option(
        False,
        "load the tower that sees images, which requests bring in image_data",
        action="store_true",
    )
    image_max_pixels: int | None = _option(
        None, "scale larger images down (default: the model's)", type=int
    )
    limit_images: int = _option(
        16, "refuse prompts with more images (default: %(default)s)", type=int
    )
    random_seed: int = _option(42, "seeds requests that bring no sampling_seed", type=int)
    num_threads: int | None = _option(
        None, "CPU threads (default: OMP_NUM_THREADS, or one per core)", type=int
    )

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        for option in fields(EngineOptions):
            default = {} if option.default is MISSING else {"default": option.default}
            flag = f"--{option.name.replace('_', '-')}"
            parser.add_argument(flag, **option.metadata, **default)

    @staticmethod
    def of(args: argparse.Namespace) -> EngineOptions:
        return EngineOptions(**{one.name: getattr(args, one.name) for one in fields(EngineOptions)})
