"""The fields of a `Sample`: what each must hold, and which are frozen once the sample is generated.

All checks of user functions read the table `FIELDS`: `Sample.validate` (types and lengths),
`number_problem` (single token ids and log-probs) and `slime.samples.frozen_fields` (functions that
get a finished sample).
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import operator
import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.log import get_logger, tell
from slime.user_code.loading import FunctionFailed, shown

logger = get_logger(__name__)

#: Engines round log-probs of tokens that are almost certain to a little above 0.
LARGEST_LOG_PROB = 1e-3


@dataclass(frozen=True)
class SampleField:
    """One field of `Sample`.

    Attributes:
        wanted: what it must hold, for messages.
        fits: whether a value is valid; items of per-token lists are checked separately.
        is_frozen: part of the record of generation. Data sources, generate functions, rollout
            functions and sample hooks set it; functions that get a finished sample must not change
            it.
        is_per_token: one number per response token, or None.
    """

    wanted: str
    fits: Callable[[Any], bool]
    is_frozen: bool = False
    is_per_token: bool = False


def _either(*kinds: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kinds)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_whole(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_count(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:  # arrays have the method, too
        return False
    return True


def _is_prompt(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, (bool, int, np.bool_))


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and math.isfinite(value)


def _are_spans(value: Any) -> bool:
    return isinstance(value, list) and all(
        hasattr(item, "weight_version") and _is_whole(item.weight_version) for item in value
    )


def _are_versions(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) or (_is_count(item) and not isinstance(item, bool)) for item in value
    )


def _anything(value: Any) -> bool:
    return True


def _unread(why: str) -> SampleField:
    """Make a field that must be None, because training in this version would ignore it."""
    return SampleField(f"None, since nothing reads it: {why}", lambda value: value is None)


_NO_ID = "images are identified by their references"
_COUNTS = "left as it is: counters of the engine's calls"

FIELDS: dict[str, SampleField] = {
    "group_index": SampleField("a whole number, or None", _is_whole, is_frozen=True),
    "index": SampleField("a whole number, or None", _is_whole, is_frozen=True),
    "rollout_id": SampleField(
        "a whole number or text, or None", _either(int, np.integer, str), is_frozen=True
    ),
    "prompt": SampleField("text, or a list of messages", _is_prompt, is_frozen=True),
    "tokens": SampleField("a list of token ids", _is_list, is_frozen=True),
    "multimodal_inputs": SampleField("a dict, or None", _either(dict)),
    "multimodal_train_inputs": SampleField(
        "None, or the places of images that append_message and the prompt source note",
        lambda value: value is None or (isinstance(value, dict) and value.keys() == {"spans"}),
    ),
    "multimodal_train_input_id": _unread(_NO_ID),
    "apply_chat_template_kwargs": SampleField("a dict", lambda value: isinstance(value, dict)),
    "response": SampleField("text", lambda value: isinstance(value, str), is_frozen=True),
    "response_length": SampleField("the number of response tokens", _is_count, is_frozen=True),
    "label": SampleField("anything", _anything),
    # `reward_number` checks it
    "reward": SampleField(
        "a number, a dict of numbers, a list for tokens or turns, or None", _anything
    ),
    "token_rewards": SampleField("a list of numbers, or None", _either(list)),
    "loss_mask": SampleField(
        "a list of 0 and 1, or None", _either(list), is_frozen=True, is_per_token=True
    ),
    "weight_versions": SampleField(
        "a list of the weight_version of engines' answers, text or whole numbers",
        _are_versions,
        is_frozen=True,
    ),
    "rollout_log_probs": SampleField(
        "a list of numbers, or None", _either(list), is_frozen=True, is_per_token=True
    ),
    # `slime.samples.sampling_mask.mask_problem` checks them
    "rollout_top_p_token_ids": SampleField("an array, or None", _anything, is_frozen=True),
    "rollout_top_p_token_offsets": SampleField("an array, or None", _anything, is_frozen=True),
    "rollout_routed_experts": SampleField("an array, or None", _anything, is_frozen=True),
    "remove_sample": SampleField("True or False", _is_flag),
    "teacher_log_probs": SampleField(
        "a list of numbers, or None", _either(list), is_per_token=True
    ),
    "teacher_prompt_tokens": SampleField("a list of token ids, or None", _either(list)),
    "teacher_top_tokens": SampleField("an array [2, R, k], or None", _anything),
    # `Sample.validate` checks the value
    "status": SampleField("a Sample.Status", _anything, is_frozen=True),
    "metadata": SampleField("a dict", lambda value: isinstance(value, dict)),
    "generate_function_path": SampleField("text, or None", _either(str)),
    "custom_rm_path": SampleField("text, or None", _either(str)),
    "train_metadata": SampleField("a dict, or None", _either(dict)),
    "session_id": SampleField("text, or None", _either(str)),
    "non_generation_time": SampleField("a finite number of seconds", _is_finite),
    "spec_info": SampleField(_COUNTS, lambda value: hasattr(value, "spec_verify_ct")),
    "prefix_cache_info": SampleField(_COUNTS, lambda value: hasattr(value, "cached_tokens")),
    "token_spans": SampleField(
        "a list of TokenSpan, whose weight_version is a whole number or None",
        _are_spans,
        is_frozen=True,
    ),
    "trace": SampleField("a dict, or None", _either(dict)),
    "source": SampleField("text, or None", _either(str)),
    "drawn_as": SampleField("left as it is: a note of the rollout", _either(int)),
    "as_drawn": SampleField("left as it is: a note of the rollout", _either(dict)),
}
PER_TOKEN = tuple(name for name, field in FIELDS.items() if field.is_per_token)
FROZEN = tuple(name for name, field in FIELDS.items() if field.is_frozen)


def kind_problem(sample: Any) -> tuple[str, str] | None:
    """Return the first field with an invalid value, and the fix; None if all are valid.

    In per-token fields, arrays, tensors and tuples become lists; NumPy integers become Python's,
    and entries of ``weight_versions`` text.
    """
    for name in ("tokens", *PER_TOKEN):
        setattr(sample, name, as_list(getattr(sample, name)))
    for name, field in FIELDS.items():
        value = getattr(sample, name)
        if not field.fits(value):
            return f"{name} {shown(value)}", f"give {field.wanted}"
        if field.fits in (_is_whole, _is_count) and value is not None:
            setattr(sample, name, operator.index(value))
    if not all(type(version) is str for version in sample.weight_versions):
        sample.weight_versions = [str(version) for version in sample.weight_versions]
    return None


#: Names of other systems, or nearly those of fields → the field that was meant.
_MEANT = {
    "log_probs": "rollout_log_probs",
    "logprobs": "rollout_log_probs",
    "old_log_probs": "rollout_log_probs",
    "response_mask": "loss_mask",
    "completion_mask": "loss_mask",
    "action_mask": "loss_mask",
    "score": "reward",
    "completion": "response",
    "output": "response",
    "response_ids": "tokens",
    "completion_ids": "tokens",
    "output_ids": "tokens",
    "token_ids": "tokens",
    "meta_data": "metadata",
    "answer": "label",
}


def tell_of_other_names(samples: Iterable[Any], origin: str) -> None:
    """Warn once of attributes that a function has set, whose names are nearly those of fields:
    nothing reads them.

    Args:
        origin: names the function in messages.
    """
    for sample in samples:
        for name in vars(sample).keys() - FIELDS.keys():
            near = difflib.get_close_matches(name.lower(), FIELDS, n=1, cutoff=0.85)
            meant = _MEANT.get(name) or (near[0] if near else "")
            if meant:
                tell(
                    logger,
                    "%s sets sample.%s, which slime does not read; did you mean sample.%s?",
                    origin,
                    name,
                    meant,
                    once=f"attribute {name} {origin}",
                )


# -- values ----------------------------------------------------------------------------------------


def as_list(values: Any) -> Any:
    """Convert arrays, tensors, tuples and ranges to a list; return anything else unchanged."""
    if hasattr(values, "tolist"):
        return values.tolist()
    return list(values) if isinstance(values, (tuple, range)) else values


def numbers_in(values: Any) -> np.ndarray | None:
    """Return ``values`` as a flat array of numbers, also if empty; None if they are something
    else."""
    try:
        found = np.asarray(values)
    # ragged, or a tensor elsewhere or in bfloat16
    except (TypeError, ValueError, RuntimeError, OverflowError):
        if not hasattr(values, "tolist"):
            return None
        found = np.asarray(values.tolist())
    return found if found.ndim == 1 and found.dtype.kind in "biuf" else None


def token_problem(tokens: Any, vocab_size: int | None) -> str:
    """Return the problem of token ids; "" if there is none.

    Args:
        vocab_size: the model's; None if unknown.
    """
    found = packed_ids(tokens)
    if found is None:
        found = numbers_in(tokens)
    if found is None or (found.size and found.dtype.kind not in "iu"):
        if not _is_list(tokens := as_list(tokens)):
            return "no list"
        are_odd = (not _is_count(one) or abs(operator.index(one)) >= 2**31 for one in tokens)
        odd = next(itertools.compress(tokens, are_odd), None)
        return f"{shown(odd, 40)} among its tokens, which are ids of tokens"
    if not found.size:
        return ""
    least = int(found.min())
    most = int(found.max())
    if least < 0 or most >= (vocab_size or 2**31):
        has = f"{vocab_size} tokens, from 0" if vocab_size else "no such id"
        return f"the token {least if least < 0 else most}, and the model has {has}"
    return ""


def number_problem(name: str, values: Any) -> str:
    """Return the problem of the values of a per-token field; "" if there is none, or ``values`` is
    None."""
    if values is None or _are_plain(name, values):
        return ""
    found = numbers_in(values)
    if found is None:
        position = next((i for i, value in enumerate(values) if numbers_in([value]) is None), 0)
        return (
            f"{name} that are not all numbers: {shown(values[position], 40)} at position {position}"
        )
    if name == "loss_mask":
        bad = ~np.isin(found, (0, 1))
        return f"a loss_mask with values other than 0 and 1: {found[bad][0]}" if bad.any() else ""
    finite = np.isfinite(found)
    if not finite.all():
        return (
            f"{name} that are not finite: {found[~finite][0]} at position {int((~finite).argmax())}"
        )
    if found.size and found.max() > LARGEST_LOG_PROB:
        at = int(found.argmax())
        return (
            f"{name} above 0: {found[at]:g} at position {at}; the logarithm of a probability is "
            "not positive"
        )
    return ""


def packed_ids(tokens: Any) -> np.ndarray | None:
    """Return a list of Python ints as an array; None for anything else, such as a list with bools
    or NumPy integers."""
    packed = _packed(tokens, "q", int)
    # the sum does not reveal bools, which equal 0 or 1
    if packed is None or (packed.size and packed.min() <= 1 and set(map(type, tokens)) != {int}):
        return None
    return packed


def _packed(values: Any, code: str, kind: type) -> np.ndarray | None:
    """Convert a list of numbers to an array several times faster than NumPy does; None for anything
    else.

    Args:
        code: the format of `struct` for ``kind``.
    """
    if type(values) is not list:
        return None
    try:
        if values and type(sum(values)) is not kind:  # one term of another type changes it
            return None
        return np.frombuffer(struct.pack(f"{len(values)}{code}", *values), dtype=code)
    except (TypeError, ValueError, OverflowError, RuntimeError, struct.error):
        return None


def _are_plain(name: str, values: Any) -> bool:
    """Tell whether a list is certainly valid, by tests several times faster than NumPy's
    conversion."""
    if type(values) is not list:
        return False
    if name == "loss_mask":
        ones = values.count(1)  # compares by identity first, which is fast
        is_binary = ones == len(values) or ones + values.count(0) == len(values)
        return is_binary and all(type(value) is int for value in values[:1])
    found = _packed(values, "d", float)
    if found is None:
        return False
    return not found.size or bool(np.isfinite(found).all() and found.max() <= LARGEST_LOG_PROB)


def unpicklable(samples: Iterable[Any]) -> str:
    """Return the first field of a sample, or key of a dict in it, that cannot be pickled; "" if
    there is none."""
    for sample in samples:
        for name, value in vars(sample).items():
            parts = {name: value}
            if isinstance(value, dict) and value:
                parts = {f"{name}[{key!r}]": part for key, part in value.items()}
            for place, part in parts.items():
                try:
                    pickle.dumps(part)
                except Exception as error:  # a user's class may raise anything
                    return (
                        f"{place} of the sample with index {sample.index} "
                        f"({type(error).__name__}: {error})"
                    )
    return ""


# -- rewards ---------------------------------------------------------------------------------------

#: The loss is computed in float32, where the square of a larger number is infinite.
LARGEST_REWARD = 1e18


def reward_number(value: Any, origin: str, role: str, why: str = "") -> float:
    """Return ``value`` as a finite float: Python's, NumPy's and torch's numbers (also an array of
    one), bools, decimals.

    Args:
        origin: the function that returned it, in messages (`slime.user_code.loading.named`).
        role: what it was returned as: "the reward of sample 3".
        why: more about the sample, where the number is not finite.
    Raises:
        FunctionFailed: it is not a number, not finite, or beyond 1e18.
    """

    def refused(why: str) -> FunctionFailed:
        fix = (
            "a reward is one finite number between -1e18 and 1e18, or a dict with one under "
            "--reward-key"
        )
        return FunctionFailed(
            f"{origin} returned {shown(value, 100)} ({type(value).__name__}) as {role}", why, fix
        )

    is_complex = isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)
    if isinstance(value, (str, bytes)) or is_complex:
        raise refused("it is no real number")
    try:
        number = float(value.item() if getattr(value, "shape", None) else value)
    except OverflowError:
        raise refused("it does not fit a floating-point number") from None
    except Exception as error:  # whatever the class of the user's raises
        raise refused(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(number):
        raise refused(why)
    if abs(number) > LARGEST_REWARD:
        raise refused(
            f"its square does not fit float32, in which losses are computed; {why}".rstrip("; ")
        )
    return number


def is_number(value: Any) -> bool:
    """Tell whether ``value`` is one number of Python, NumPy or torch."""
    return isinstance(value, numbers.Number) or (
        hasattr(value, "item") and getattr(value, "shape", None) == ()
    )


def is_finite(value: Any) -> bool:
    """Tell whether a number is finite as a float."""
    try:
        return math.isfinite(float(value))
    # too large, complex, a signalling NaN
    except (OverflowError, TypeError, ValueError, RuntimeError):
        return False
