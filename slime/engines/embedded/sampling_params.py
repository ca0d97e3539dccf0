"""``sampling_params`` of a request, checked and with SGLang's names, ranges and defaults."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from slime.engines.embedded.fields import (
    FLAG,
    OBJECT,
    BadRequest,
    Kind,
    asks_for_nothing,
    biases,
    integer,
    number,
    strings,
    tokens,
)

#: Below this a temperature means greedy, as in SGLang.
GREEDY_BELOW = 1e-6
#: Parameters that SGLang knows and this engine does not; allowed when they ask for nothing.
_UNSUPPORTED = (
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "stop_regex",
    "custom_params",
    "stream_interval",
)
_MOST_SAMPLES = 4096  # of one prompt: more is a slip, and would be queued at once


@dataclass(frozen=True, slots=True)
class Params:
    """How to sample. ``temperature`` 0 is greedy, ``top_k`` -1 the whole vocabulary, ``max_new_tokens`` None all room.

    ``seed`` makes the sampled tokens a function of seed, prompt and weights; sample i of ``n`` uses ``seed + i``.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = 1
    sampling_seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def scale(self) -> float:
        """What logits are divided by; greedy counts as 1, as in SGLang."""
        return 1.0 if self.temperature < GREEDY_BELOW else self.temperature

    @property
    def filters(self) -> bool:
        """Whether not every token may be sampled."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)

    @property
    def changes_logits(self) -> bool:
        penalised = self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1
        return penalised or bool(self.logit_bias) or self.min_new_tokens > 0


_NAMES = tuple(field.name for field in fields(Params))


@lru_cache
def kinds(vocab_size: int) -> dict[str, Kind]:
    """What each parameter takes."""
    count = integer(0)
    return {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "temperature": number(lambda x: x >= 0, "of 0 (greedy) or more"),
        "top_p": number(lambda x: 0 < x <= 1, "above 0 and at most 1"),
        "top_k": integer(1, also=-1, words=": -1 (all) or at least 1"),
        "min_p": number(lambda x: 0 <= x <= 1, "from 0 to 1"),
        "frequency_penalty": number(lambda x: -2 <= x <= 2, "from -2 to 2"),
        "presence_penalty": number(lambda x: -2 <= x <= 2, "from -2 to 2"),
        "repetition_penalty": number(lambda x: 0 < x <= 2, "above 0 and at most 2"),
        "stop": strings(),
        "stop_token_ids": tokens(vocab_size),
        "ignore_eos": FLAG,
        "skip_special_tokens": FLAG,
        "spaces_between_special_tokens": FLAG,
        "no_stop_trim": FLAG,
        "n": integer(1, _MOST_SAMPLES),
        "sampling_seed": integer(),
        "logit_bias": biases(vocab_size),
    }


def parse_params(raw: Any, vocab_size: int) -> Params:
    """Check ``sampling_params``; None values mean the default.

    Raises:
        BadRequest: unknown name, wrong type, value out of range, or a feature this engine does not have.
    """
    values: dict[str, Any] = {}
    for name, value in OBJECT.read("sampling_params", {} if raw is None else raw).items():
        if name in _UNSUPPORTED:
            if not asks_for_nothing(value):
                raise BadRequest(f"sampling_params.{name} is not supported by the embedded engine", name)
            continue
        name = "sampling_seed" if name == "seed" else name  # OpenAI's word
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            raise BadRequest(f"unknown sampling parameter '{name}'" + (f"; nearest: '{near[0]}'" if near else ""), name)
        if value is None:
            values |= {"max_new_tokens": None} if name == "max_new_tokens" else {}
        else:
            values[name] = kinds(vocab_size)[name].read(name, value)
    params = Params(**values)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        said = f"min_new_tokens must be at most max_new_tokens ({params.max_new_tokens}), got {params.min_new_tokens}"
        raise BadRequest(said, "min_new_tokens")
    return params
