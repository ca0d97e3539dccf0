"""A run on geometry problems with drawings: seconds of a step by phase, images per second, GPU
memory, and how far trainer and engine drift apart.

    python -m benchmarks.gpu.images --steps 6 --out images.json
    # dry, on a CPU
    python -m benchmarks.gpu.images --size tiny --engine embedded --prompts 2 --samples 2 \\
        --new-tokens 8 --steps 2

The model has the shape of Qwen3-VL-2B and random weights, so it answers with noise until the limit;
the reward is drawn by lot. The other side is the same model on the same questions without drawings.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.colocated_step import breakdown
from benchmarks.gpu.report import Report, Row, at_most
from benchmarks.gpu.setting import (
    median,
    new_run_parser,
    run_training,
    workspace,
    write_apart,
)
from benchmarks.gpu.vision_models import tokenizer_with_marks, write_processors, write_weights

_TEXT_TOKENS = 256
CASES = ["with drawings", "without"]
#: Fields of the decoder and of the tower.
_SIZES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-2b": (
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "tiny": (
        {
            "vocab_size": 288,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        {
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_heads": 4,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=32, samples=8, new_tokens=512, steps=6)
    parser.add_argument("--size", choices=list(_SIZES), default="qwen3-vl-2b")
    parser.add_argument("--side", type=int, default=512, help="pixels of a drawing (default: 512)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("images", args)
    with workspace() as folder:
        for case in args.cases:
            report.case(case, lambda case=case: measure(args, folder, case))  # type: ignore[misc]
    return report.finish()


def measure(args: argparse.Namespace, folder: Path, case: str) -> Row:
    with_images = case == CASES[0]
    model = args.model or written_model(args, folder)
    folder = folder / case.split()[0]
    folder.mkdir()
    tokens_of_image = (args.side // 32) ** 2 if with_images else 0
    more = ["--colocate", "--actor-num-gpus-per-node", str(args.gpus), "--no-save"]
    more += args.more.split()
    if with_images:
        more += ["--multimodal-keys", '{"image": "images"}']
    rows = problems(folder, 4 * args.prompts, args.side, with_images)
    stage = run_training(
        "train.py", args, model, folder, more, rows, _TEXT_TOKENS + tokens_of_image
    )
    steps = [row for row in stage.rows if "perf/step_time" in row and "perf/rollout_time" in row]
    measured = steps[1:] or steps  # the first one warms up
    found = breakdown(measured)
    images = args.prompts * args.samples if with_images else 0
    differences = [row["train/train_rollout_logprob_abs_diff"] for row in steps]
    return {
        "size": str(args.model or args.size),
        "gpus": args.gpus,
        **found,
        "images_per_second_of_training": images / found["seconds"]["actor_train_time"],
        "gpu_memory": {
            name: max(row[name] for row in measured)
            for name in measured[-1]
            if "memory" in name or "gpu_mem" in name
        },
        "log_prob_differences": differences,
        "raw": steps,
        "goals": [
            at_most(
                "log-prob difference, last ÷ first steps",
                median(differences[-2:]) / median(differences[:2]),
                1.1,
            )
        ],
    }


# -- problems --------------------------------------------------------------------------------------


def problems(folder: Path, count: int, side: int, with_images: bool) -> Iterator[dict[str, Any]]:
    """Yield rows that ask for the area of a drawn triangle."""
    from PIL import Image, ImageDraw

    rng = random.Random(0)
    for number in range(count):
        base = rng.randrange(side // 4, side // 2)
        height = rng.randrange(side // 4, side // 2)
        row: dict[str, Any] = {
            "prompt": "What is the area of the triangle?",
            "label": str(base * height / 2),
        }
        if with_images:
            left = rng.randrange(side // 8, side // 3)
            floor = side - rng.randrange(side // 8, side // 4)
            picture = Image.new("RGB", (side, side), "white")
            draw = ImageDraw.Draw(picture)
            corners = [(left, floor), (left + base, floor), (left, floor - height)]
            draw.polygon(corners, fill="lightblue", outline="black", width=3)
            draw.text((left + base // 2, floor + 4), str(base), fill="black")
            draw.text((left - 28, floor - height // 2), str(height), fill="black")
            path = folder / f"triangle{number}.png"
            picture.save(path)
            row |= {"prompt": f"<image>{row['prompt']}", "images": [str(path)]}
        yield row


# -- the model -------------------------------------------------------------------------------------


def written_model(args: argparse.Namespace, folder: Path) -> Path:
    path = Path(args.models or folder) / args.size
    if (path / "preprocessor_config.json").exists():  # it is written last
        return path
    write_apart(write_model, args.size, path)
    return path


def write_model(size: str, path: Path) -> None:
    """Write random weights in bfloat16, a byte tokenizer and an image processor, in the form of
    published checkpoints."""
    from transformers import Qwen3VLConfig

    decoder, tower = _SIZES[size]
    tokenizer, tokens = tokenizer_with_marks()
    half = decoder["head_dim"] // 2
    rows = half * 5 // 16
    config = Qwen3VLConfig(
        text_config={
            **decoder,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [half - 2 * rows, rows, rows],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": None,
        },
        vision_config={**tower, "patch_size": 16, "out_hidden_size": decoder["hidden_size"]},
        **tokens,
        tie_word_embeddings=size != "tiny",
    )
    write_weights(config, path)
    tokenizer.save_pretrained(path)
    write_processors(path)


if __name__ == "__main__":
    sys.exit(main())
