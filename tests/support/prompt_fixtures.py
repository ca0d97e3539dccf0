"""A small tokenizer with a chat template, and data files, for tests of prompts and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(chat_template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """One token per character (printable ASCII and newline), plus three special tokens."""
    vocab = {chr(code): i for i, code in enumerate([10, *range(32, 127)])}
    core = Tokenizer(models.WordLevel({**vocab, "<unk>": len(vocab)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        unk_token="<unk>",
        additional_special_tokens=SPECIAL,
        chat_template=chat_template,
    )


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
