"""A chat model of 0.2 million parameters, made in seconds: it has seen how a conversation goes, and guesses the rest.

Examples train it in a minute on a CPU. What it has to learn is what it guesses: which operator, which letter.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

Conversation = list[tuple[str, str]]
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = ["<pad>", "<unk>", "<|end|>", *(f"<|{role}|>" for role in ROLES)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make(folder: Path, words: list[str], talk: Callable[[random.Random], Conversation], steps: int = 300) -> Path:
    """Write a Hugging Face model that has seen ``steps * 64`` conversations of ``talk``; returns its folder.

    Args:
        words: its vocabulary. What is none of them is unknown to it, character by character.
        talk: a conversation, as pairs of role and text.
    """
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tokenizer(words)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    tokens = {"vocab_size": 64 * (1 + len(tokenizer) // 64), "eos_token_id": end, "pad_token_id": pad}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **tokens, bos_token_id=None, max_position_embeddings=256))
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=3e-3), random.Random(0)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        texts = ["".join(f"<|{role}|>{text}<|end|>" for role, text in talk(rng)) for _ in range(64)]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.input_ids == pad, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        slower.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(words: list[str]):  # type: ignore[no-untyped-def]  # transformers' own has none
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *words])}, unk_token="<unk>"))
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longest_first}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    known = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|end|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **known)
    fast.chat_template = TEMPLATE
    return fast
