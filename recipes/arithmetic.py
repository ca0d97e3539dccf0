"""A small world for the demo: sums, a character tokenizer, and a Qwen3-architecture model of 0.4
million parameters.

The task: "37+5=" → "42". The demonstrations for SFT are sloppy on purpose: three digits in ten are
any. So SFT teaches what an answer looks like and roughly what it says; only the reward of GRPO
tells right from wrong.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from slime.samples.types import Sample

CHARACTERS = "0123456789+="
PAD = "<pad>"
EOS = "<eos>"


def reward(args: Any, sample: Sample, **_: Any) -> float:
    """1 for the right sum, else 0. Used as ``--custom-rm-path recipes.arithmetic.reward``."""
    return float(sample.response == sample.label)


def problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All sums a + b with a < 90 and b < 10, shuffled: (training, held out)."""
    everything = [(a, b) for a in range(90) for b in range(10)]
    random.Random(seed).shuffle(everything)
    return everything[200:], everything[:200]


def write_data(folder: Path, seed: int, num_demonstrations: int, wrong_digits: float = 0.3) -> None:
    """``sft.jsonl`` (sloppy demonstrations), ``train.jsonl`` and ``test.jsonl`` (prompt, label)."""
    train, test = problems(seed)
    rng = random.Random(seed + 1)
    with open(folder / "sft.jsonl", "w") as out:
        for _ in range(num_demonstrations):
            a, b = rng.choice(train)
            digits = [
                rng.choice(CHARACTERS[:10]) if rng.random() < wrong_digits else d
                for d in f"{a + b:02d}"
            ]
            out.write(json.dumps({"prompt": f"{a:02d}+{b}=", "label": "".join(digits)}) + "\n")
    for name, pairs in (("train", train), ("test", test)):
        with open(folder / f"{name}.jsonl", "w") as out:
            for a, b in pairs:
                out.write(json.dumps({"prompt": f"{a:02d}+{b}=", "label": f"{a + b:02d}"}) + "\n")


def write_model(folder: Path, seed: int) -> None:
    """A Hugging Face model directory: random weights, configuration and tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token="<unk>"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = vocabulary[EOS]
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
