"""A small tokenizer with a chat template, and data files, for tests of prompts and samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def make_tokenizer(
    chat_template: str | None = CHATML, eos: str = "<|im_end|>", bos: str | None = None
) -> PreTrainedTokenizerFast:
    """One token per character (printable ASCII and newline), plus three special tokens.

    Args:
        bos: the tokenizer puts this one before every text by itself, and ``eos`` behind it.
    """
    vocab = {chr(code): i for i, code in enumerate([10, *range(32, 127)])}
    core = Tokenizer(models.WordLevel({**vocab, "<unk>": len(vocab)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    if bos is not None:
        known = [(token, core.token_to_id(token)) for token in (bos, eos)]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A {eos}", special_tokens=known
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=eos,
        bos_token=bos,
        unk_token="<unk>",
        additional_special_tokens=SPECIAL,
        chat_template=chat_template,
    )


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
