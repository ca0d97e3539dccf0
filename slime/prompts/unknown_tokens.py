"""Tokens that the tokenizer has and the model does not: their ids are beyond the rows of its
embedding.

A model never samples them. In a prompt or an answer they would fail in the trainer, or, with tensor
parallelism, count as zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slime.errors import UserError
from slime.prompts.chat_template import render_messages
from slime.prompts.conversation import tools_of
from slime.prompts.problems import RowProblem
from slime.prompts.row_format import Prompt, RowFormat
from slime.prompts.tokenizer import with_opening


class UnknownTokens:
    """The tokens of ``tokenizer`` with ids from ``vocab_size`` on; true if there are any.

    Args:
        vocab_size: rows of the model's embedding; None if unknown.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._texts: list[str] = []
        self._are_added = True
        if vocab_size is None or not hasattr(tokenizer, "get_vocab"):
            return
        self._texts = [text for text, id_ in tokenizer.get_vocab().items() if id_ >= vocab_size]
        added = getattr(tokenizer, "added_tokens_encoder", {})
        self._are_added = all(text in added for text in self._texts)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def problem(self, tokens: Iterable[int]) -> RowProblem | None:
        """Return the problem of a row with these ``tokens``; None if the model knows them."""
        largest = max(tokens, default=-1)
        if self._vocab_size is None or largest < self._vocab_size:
            return None
        return RowProblem(
            "have tokens that the model does not know",
            f"{self._tokenizer.convert_ids_to_tokens(largest)!r} has the id {largest}, and the "
            f"model's embedding {self._vocab_size} rows (vocab_size in config.json)",
            "use the tokenizer of this model, or give the model a row for each token "
            "(resize_token_embeddings of transformers)",
        )

    def of_prompt(self, prompt: Prompt, form: RowFormat) -> RowProblem | None:
        """Return the problem of a prompt that engines answer; None if there is none, or if it is
        trained as supervised data, which is encoded otherwise."""
        if form.raw or form.preference is not None:
            return None
        if prompt.tokens:
            return self.problem(prompt.tokens)
        text = prompt.text
        if not isinstance(text, str):
            tools = tools_of(prompt.metadata)
            try:
                text = render_messages(self._tokenizer, text, tools=tools, **form.template_kwargs)
            except UserError:  # there is no template, which is reported where it is needed
                return None
        ids: list[int] = []
        if not self._are_added or any(one in text for one in self._texts):
            ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        templated = form.apply_chat_template or text is not prompt.text
        return self.problem(with_opening(self._tokenizer, text, ids, templated=templated))
