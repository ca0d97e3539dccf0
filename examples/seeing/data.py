"""Pictures to count in, for the example of a model that sees: python -m examples.seeing.data FOLDER

FOLDER gets pictures/, train.jsonl and test.jsonl, sft.jsonl, whose answers are wrong by one in four
of ten rows, and model/, a tiny Qwen3-VL that has learnt nothing yet.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from examples import tiny

#: A picture is so many cells wide and high; a cell is what one token of the model sees.
CELLS = 4
CELL = 8
COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
#: Demonstrations, tasks to learn on, and tasks that are held out.
SIZES = {"sft": 4096, "train": 1024, "test": 256}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


def write(folder: Path, seed: int = 0) -> None:
    """Pictures, rows and the model."""
    rng = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        rows = [row(folder, f"{name}{number}", rng, sloppy=name == "sft") for number in range(size)]
        tiny.write_rows(folder / f"{name}.jsonl", rows)
    write_model(folder / "model", seed)


def row(folder: Path, name: str, rng: random.Random, sloppy: bool) -> dict[str, Any]:
    """Draw a picture and ask for the squares of one colour in it."""
    asked = rng.choice(list(COLOURS))
    counts = dict.fromkeys(COLOURS, 0)
    shade = rng.randrange(150, 256)
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), (shade, shade, shade))
    draw = ImageDraw.Draw(picture)
    wanted = rng.randrange(6)
    cells = rng.sample(range(CELLS * CELLS), wanted + rng.randrange(5))
    (other,) = set(COLOURS) - {asked}
    for number, cell in enumerate(cells):
        colour = asked if number < wanted else other
        counts[colour] += 1
        left = cell % CELLS * CELL + rng.randrange(3)
        top = cell // CELLS * CELL + rng.randrange(3)
        draw.rectangle([left, top, left + 4, top + 4], fill=COLOURS[colour])
    file = f"pictures/{name}.png"
    picture.save(folder / file)
    answer = counts[asked]
    if sloppy and rng.random() < 0.4:
        answer = max(0, answer + rng.choice([-1, 1]))
    question = f"<image>How many {asked} squares are there?"
    return {"question": tiny.say(question), "answer": str(answer), "images": [file]}


def write_model(folder: Path, seed: int) -> None:
    """A Qwen3-VL of two hundred thousand random parameters, with tokenizer and image processor."""
    import torch
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    words = " ".join(["How many squares are there?", *COLOURS, *map(str, range(10))])
    tokenizer = tiny.make_tokenizer([words])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    start, pad, end = tokenizer.convert_tokens_to_ids(SPECIAL)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_heads": 4,
            "patch_size": CELL // 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=pad,
        video_token_id=tokenizer.unk_token_id,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():  # as far apart as those of larger models
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder)


def write_processor(folder: Path) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": CELL * CELL, "longest_edge": 64 * CELL * CELL},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
