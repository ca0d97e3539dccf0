"""A model for an example, made on the spot: a Qwen3 of a hundred thousand parameters that has seen
some conversations.

It is taught what answers look like, not which of them are good: that is what the example's run is
for. `write_model` takes five seconds or so on one core. Words are tokens, numbers are spelt in
digits, and tags (<calc>) are words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Chat = list[dict[str, str]]

PAD = "<pad>"
UNKNOWN = "<unk>"
END = "<end>"
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BATCH = 64
CONTEXT = 256
HIDDEN = 64


def say(question: str, *turns: str) -> Chat:
    """The user's words, and what is said to them: see `answer`."""
    return [{"role": "user", "content": question}, *answer(*turns)]


def answer(*turns: str) -> Chat:
    """The assistant's words and a tool's, by turns.

    Example:
        >>> [message["role"] for message in answer("<calc>2 * 3</calc>", "6", "6")]
        ['assistant', 'tool', 'assistant']
    """
    return [
        {"role": ("assistant", "tool")[number % 2], "content": content}
        for number, content in enumerate(turns)
    ]


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(
    folder: Path,
    lesson: Callable[[random.Random], Chat],
    steps: int = 100,
    seed: int = 0,
    template: str = TEMPLATE,
) -> None:
    """A Hugging Face directory of a model that speaks as in ``lesson``, which makes one
    conversation at a time.

    Args:
        steps: of 64 conversations each, in which the words of the assistant are learned.
        template: for chats; one that writes what is in a lesson as `TEMPLATE` does.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rng = random.Random(seed)
    chats = [lesson(rng) for _ in range(steps * BATCH)]
    tokenizer = make_tokenizer((message["content"] for chat in chats for message in chat), template)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for layer in (
        model.model.layers
    ):  # what is looked at is copied, from the first step on: where to look is learned
        torch.nn.init.eye_(layer.self_attn.v_proj.weight)
        torch.nn.init.eye_(layer.self_attn.o_proj.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(
            1.0, (step + 1) / 20, 2 * (steps - step) / steps
        )
        tokens, labels = _batch(tokenizer, chats[step * BATCH :][:BATCH])
        model(input_ids=torch.tensor(tokens), labels=torch.tensor(labels)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(texts: Iterable[str], template: str = TEMPLATE) -> Any:
    """Of words, digits and signs, each a token; blanks are tokens, too."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Split(Regex(r"</?\w+>|[A-Za-z]+|[\s\S]"), behavior="isolated")
    words = {word for text in set(texts) for word, _ in split.pre_tokenize_str(text)}
    special = [PAD, UNKNOWN, END, *(f"<{role}>" for role in ROLES)]
    vocabulary = {
        word: number for number, word in enumerate([*special, *sorted(words - set(special))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )
    fast.add_special_tokens({"additional_special_tokens": special[3:]})
    fast.chat_template = template
    return fast


def _batch(tokenizer: Any, chats: list[Chat]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and labels, padded at the right. Learned is what the assistant says to the last words
    of the user; other labels are -100."""
    tokens = []
    labels = []
    for chat in chats:
        ids = []
        wanted = []
        last = max(number for number, message in enumerate(chat) if message["role"] == "user")
        for number, message in enumerate(chat):
            head = tokenizer.encode(f"<{message['role']}>")
            body = tokenizer.encode(message["content"] + END)
            ids += head + body
            is_learned = number > last and message["role"] == "assistant"
            wanted += [-100] * len(head) + (body if is_learned else [-100] * len(body))
        tokens.append(ids)
        labels.append(wanted)
    longest = max(map(len, tokens))
    pad = tokenizer.pad_token_id
    return (
        [ids + [pad] * (longest - len(ids)) for ids in tokens],
        [wanted + [-100] * (longest - len(wanted)) for wanted in labels],
    )
