"""Byte-level BPE tokenizers as those of real models, but small: trained here, with merges and
special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import PreTrainedTokenizerFast

from slime.checkpoints.gguf_export import QWEN_WORDS, TEKKEN_WORDS
from tests.support.embedded_models import VOCAB, tiny_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "The model learns to add: 12 + 30 = 42. It's the reward that counts, isn't it?\n\n"
    "  What one sees while training is a line per step; später mehr davon, naïve café, 日本語.\n"
) * 4


def words(pattern: str) -> PreTokenizer:
    from tokenizers import Regex

    split = Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


#: llama.cpp's name → how text is cut into words.
WORDS = {
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "qwen2": lambda: words(QWEN_WORDS % ""),
    "llama-bpe": lambda: words(QWEN_WORDS % "{1,3}"),
    "tekken": lambda: words(TEKKEN_WORDS),
    "smollm": lambda: pre_tokenizers.Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    ),
}


def bpe_tokenizer(pre: str = "qwen2") -> PreTrainedTokenizerFast:
    """All bytes, 120 merges, then <|im_start|>, <|im_end|> and <think>, which is no special
    token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = WORDS[pre](), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral 7B's: SentencePiece's way, characters that it does not know as
    bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.pre_tokenizer = Split(
        "▁", "merged_with_next"
    )  # for training: there are no words in SentencePiece
    special = ["<unk>", "<s>", "</s>"]
    marks = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=VOCAB - 8, special_tokens=marks, show_progress=False)
    )
    data = json.loads(backend.to_str()) | {"pre_tokenizer": None}
    data["added_tokens"] = data["added_tokens"][: len(special)]  # bytes are in the vocabulary alone
    backend = Tokenizer.from_str(json.dumps(data))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def save_model_with_words(directory: Path, shape: str, pre: str = "qwen2", **changes: Any) -> Path:
    """A tiny random model with such a tokenizer (or "pieces"), whose last rows belong to no
    token."""
    tokenizer = piece_tokenizer() if pre == "pieces" else bpe_tokenizer(pre)
    end = tokenizer.eos_token_id
    tiny_model(shape, eos_token_id=end, pad_token_id=end, **changes).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
