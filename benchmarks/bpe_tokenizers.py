"""Small byte-level BPE tokenizers that split text as those of real models do; trained here."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import PreTrainedTokenizerFast

from slime.checkpoints.gguf_export import QWEN_WORDS, TEKKEN_WORDS

VOCABULARY_SIZE = 376  # without the special tokens
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
    backend.pre_tokenizer = WORDS[pre]()
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
