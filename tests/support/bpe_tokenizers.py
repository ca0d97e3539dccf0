"""Tiny models with tokenizers like those of real models: byte-level BPE and SentencePiece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, trainers
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from benchmarks.bpe_tokenizers import TEXT, bpe_tokenizer
from tests.support.embedded_models import VOCAB, tiny_model


def piece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral 7B's: SentencePiece's way, characters that it does not know as
    bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    # for training: there are no words in SentencePiece
    backend.pre_tokenizer = Split("▁", "merged_with_next")
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
