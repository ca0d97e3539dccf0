"""``sampling_params`` of a request, checked and with SGLang's names, ranges and defaults."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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


class BadRequest(ValueError):
    """The request cannot be served as it is; answered with status 400 and this message."""


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
_INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "sampling_seed")
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_FLAGS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


def parse_params(raw: Mapping[str, Any] | None, vocab_size: int) -> Params:
    """Check ``sampling_params``; None values mean the default.

    Raises:
        BadRequest: unknown name, wrong type, value out of range, or a feature this engine does not have.
    """
    if raw is not None and not isinstance(raw, Mapping):
        raise BadRequest(f"sampling_params must be an object, got {type(raw).__name__}")
    values: dict[str, Any] = {}
    for name, value in (raw or {}).items():
        if value is None and name != "max_new_tokens":
            continue
        if name in _UNSUPPORTED:
            if value:
                raise BadRequest(f"sampling_params.{name} is not supported by the embedded engine")
            continue
        if name == "seed":  # OpenAI's word
            name = "sampling_seed"
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            raise BadRequest(f"unknown sampling parameter '{name}'" + (f"; nearest: '{near[0]}'" if near else ""))
        values[name] = _typed(name, value, vocab_size)
    params = Params(**values)
    _check_ranges(params)
    return params


def _typed(name: str, value: Any, vocab_size: int) -> Any:
    if name in _INTEGERS:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise BadRequest(f"{name} must be an integer, got {value!r}")
        return value
    if name in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadRequest(f"{name} must be a finite number, got {value!r}")
        return float(value)
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise BadRequest(f"{name} must be true or false, got {value!r}")
        return value
    if name == "stop":
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list | tuple) or not all(isinstance(item, str) and item for item in strings):
            raise BadRequest(f"stop must be a string or a list of strings that are not empty, got {value!r}")
        return tuple(strings)
    if name == "stop_token_ids":
        if not isinstance(value, list | tuple):
            raise BadRequest(f"stop_token_ids must be a list, got {value!r}")
        return frozenset(token_id(item, "stop_token_ids", vocab_size) for item in value if item is not None)
    assert name == "logit_bias"
    if not isinstance(value, Mapping) or not all(str(key).isdigit() for key in value):
        raise BadRequest(f"logit_bias must map token ids to numbers, got {value!r}")
    return tuple((token_id(int(key), "logit_bias", vocab_size), float(bias)) for key, bias in value.items())


def token_id(value: Any, where: str, vocab_size: int) -> int:
    """``value`` if it is a token of the vocabulary.

    Raises:
        BadRequest: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise BadRequest(f"{where} must hold token ids from 0 to {vocab_size - 1}, got {value!r}")
    return value


def _check_ranges(params: Params) -> None:
    longest = params.max_new_tokens
    ranges = (
        ("temperature", params.temperature >= 0, "0 (greedy) or more"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= params.min_p <= 1, "from 0 to 1"),
        ("top_k", params.top_k == -1 or params.top_k >= 1, "-1 (all) or at least 1"),
        ("frequency_penalty", -2 <= params.frequency_penalty <= 2, "from -2 to 2"),
        ("presence_penalty", -2 <= params.presence_penalty <= 2, "from -2 to 2"),
        ("repetition_penalty", 0 < params.repetition_penalty <= 2, "above 0 and at most 2"),
        ("n", params.n >= 1, "at least 1"),
        ("max_new_tokens", longest is None or longest >= 0, "0 or more"),
        ("min_new_tokens", params.min_new_tokens >= 0, "0 or more"),
        ("min_new_tokens", longest is None or params.min_new_tokens <= longest, "at most max_new_tokens"),
    )
    for name, holds, wanted in ranges:
        if not holds:
            raise BadRequest(f"{name} must be {wanted}, got {getattr(params, name)}")
