"""Chat templates of public models, read from packages that ship them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

#: Packages with files of chat templates; those that are installed are read.
PACKAGES = ("trl", "axolotl", "unsloth")
_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]{1,40}\|>|<｜[^｜<>]{1,40}｜>|</?s>|\[/?[A-Z_]{3,20}\]|<(?:start|end)_of_turn>|<\|?turn\|?>"
    r"|<\|?[a-z_]{3,20}\|?>|\[e~\[|\]~b\]|\]~!b\[|\[\|\w+\|\]|<[A-Z_\d]{3,30}>|<seed:\w+>|</assistant>"
)
#: What ends a turn where the template does not write the tokenizer's own end token.
_ENDS = (
    *(
        "<|END_OF_TURN_TOKEN|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "<turn|>",
        "<|return|>",
        "<seed:eos>",
    ),
    *(
        "[|endofturn|]",
        "<|assistant_end|>",
        "<end_of_utterance>",
        "</assistant>",
        "<sep>",
        "[e~[",
        "<|end|>",
    ),
)


def public_templates() -> dict[str, str]:
    """Distinct templates by name, from the packages that are installed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for file in files:
            if (
                file.suffix == ".jinja" and "chat_templates" in file.parts
            ) or "models/templates" in file.as_posix():
                text = Path(str(file.locate())).read_text(encoding="utf-8").strip()
                if text not in found.values():
                    found[f"{package}/{file.stem}"] = text
    return found


def tokenizer_of(template: str) -> Any:
    """A tokenizer of bytes that knows the template's special tokens."""
    if "eos_token" in template:
        eos = "<EOS>"
    else:
        eos = next((end for end in _ENDS if end in template), "<EOS>")
    names = {
        name
        for name in _SPECIAL.findall(template)
        if "think" not in name.lower() and "tool_call>" not in name
    }
    special = ["<pad>", "<BOS>", eos, *sorted(names - {eos})]
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(
        models.BPE(letters | {name: len(letters) + i for i, name in enumerate(special)}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<BOS>", eos_token=eos
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[3:]})
    tokenizer.chat_template = template
    return tokenizer
