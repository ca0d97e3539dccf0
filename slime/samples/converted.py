"""Check the columns that a user's converter returned, before they are packed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from typing import Any

from slime.documentation import doc_url
from slime.samples.columns import Columns, Trainable, described_columns
from slime.samples.payloads import PAYLOADS
from slime.samples.sample_fields import as_list, number_problem, reward_number, token_problem
from slime.user_code.loading import FunctionFailed, described

#: The flag that names a converter, for messages.
CONVERSION = "--custom-convert-samples-to-train-data-path"

#: Names of the reference system's train-data dict → ours.
_HOOK_NAMES = {
    "raw_reward": "raw_rewards",
    "rollout_ids": "trajectory_ids",
    **{payload.field: name for name, payload in PAYLOADS.items()},
}
_OUR_NAMES = {ours: theirs for theirs, ours in _HOOK_NAMES.items()}


def columns_from_hook(
    result: Any, trainable: Trainable, origin: str, vocab_size: int | None = None
) -> Columns:
    """Make columns from the return value of a user's converter.

    Masks, indices, groups and metadata that it left out are those of the samples. If the number of
    entries differs from the number of samples, every response token is trained and every entry is a
    separate trajectory.

    Args:
        origin: names the function in messages (`slime.user_code.loading.named`).
        vocab_size: the model's; None if unknown.
    Raises:
        FunctionFailed: the value is not a dict, a required column is missing, a column is unknown,
            lengths differ, or an entry has an invalid type or length.
    """
    data = _columns(result, origin)
    count = len(data["tokens"])
    sizes = {_OUR_NAMES.get(name, name): len(column) for name, column in data.items()}
    if lengths := {name: size for name, size in sizes.items() if size != count}:
        raise FunctionFailed(
            f"{origin} returned {count} tokens lists but {lengths}",
            fix="one entry per sample in each",
        )
    if not count:
        fix = "return an entry for each sample that is to be trained on"
        raise FunctionFailed(f"{origin} returned no samples, of {len(trainable.samples)}", fix=fix)
    for name, kind in _ONE_EACH.items():
        if name in data:
            data[name] = _each(data[name], kind, name, origin)
    for name in ("rewards", "raw_rewards"):
        if name in data:
            role = f"{_OUR_NAMES.get(name, name)!r} of sample"
            data[name] = [
                reward_number(value, origin, f"{role} {i}") for i, value in enumerate(data[name])
            ]
    if count == len(trainable.samples):
        defaults = described_columns(trainable)
    else:
        order = list(range(count))
        defaults = {
            "loss_masks": [[1] * length for length in data["response_lengths"]],
            **dict.fromkeys(("sample_indices", "group_ids", "trajectory_ids"), order),
            "truncated": [False] * count,
            "weight_versions": [()] * count,
            "metadata": [None] * count,
        }
    given = {name: data.pop(name) for name in PAYLOADS if name in data}
    # a converter may copy columns that are None in every sample
    payloads = {
        name: column for name, column in given.items() if any(one is not None for one in column)
    }
    columns = Columns(**({"raw_rewards": data["rewards"]} | defaults | data), payloads=payloads)
    _check_tokens(columns, data.keys(), origin, vocab_size)
    if count == len(trainable.samples):
        _check_padding(columns, trainable, origin)
    return columns


def _check_padding(columns: Columns, trainable: Trainable, origin: str) -> None:
    """Check that tokens were not padded: the response is the end of them, so the padding would be
    trained as the response.

    Raises:
        FunctionFailed: an entry has its sample's tokens, more behind them, and the same length of
            the response.
    """
    for sample, tokens, length in zip(trainable.samples, columns.tokens, columns.response_lengths):
        more = len(tokens) - len(sample.tokens)
        is_same = length == sample.response_length and tokens[: len(sample.tokens)] == sample.tokens
        if more > 0 and is_same:
            raise FunctionFailed(
                f"{origin} returned {more} more tokens behind those of the sample with index "
                f"{sample.index}, and its response length of {length}",
                why="the response is the end of the tokens, so that other tokens would be trained",
                fix="leave padding out, or count the tokens in response_lengths",
            )


def _columns(result: Any, origin: str) -> dict[str, list[Any]]:
    """Return the returned dict under our names, without columns that are None."""
    names = f"the names are those of slime.user_code.hooks.ConvertSamples: {doc_url('hooks.md')}"
    if not isinstance(result, dict):
        fix = f"return a dict of lists, one entry per sample in each; {names}"
        raise FunctionFailed(f"{origin} returned {described(result)}", fix=fix)
    data: dict[str, list[Any]] = {}
    for name, column in result.items():
        # both are computed from other columns
        if column is None or name in ("rollout_mask_sums", "total_lengths"):
            continue
        if isinstance(column, (str, bytes, dict)) or not isinstance(column, Iterable):
            raise FunctionFailed(
                f"{origin} returned {described(column)} as {name!r}",
                fix="give a list, an entry per sample",
            )
        is_array = hasattr(column, "tolist") and getattr(column, "ndim", 0) == 1
        values = column.tolist() if is_array else list(column)  # type: ignore[attr-defined]
        data[_HOOK_NAMES.get(name) or str(name)] = values
    missing = [name for name in ("tokens", "response_lengths", "rewards") if name not in data]
    known = {f.name for f in fields(Columns)} - {"weight_versions", "payloads", "teachers"}
    unknown = sorted(data.keys() - known - PAYLOADS.keys())
    if missing or unknown:
        raise FunctionFailed(
            f"{origin} returned a dict "
            + (f"without {', '.join(missing)}" if missing else f"with {unknown}"),
            why=f"its keys are: {', '.join(map(str, result))}",
            fix=names,
        )
    return data


def _whole(value: Any) -> int:
    number = operator.index(value)
    if abs(number) >= 2**63:
        raise ValueError
    return number


def _truth(value: Any) -> bool:
    if operator.index(value) not in (0, 1):
        raise ValueError
    return bool(value)


def _metadata(value: Any) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise TypeError
    return value


#: Column with one value per sample → its conversion, which may raise, and a description of valid
#: entries.
_ONE_EACH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "response_lengths": (_whole, "a whole number"),
    "sample_indices": (_whole, "a whole number"),
    "group_ids": (_whole, "a whole number"),
    "trajectory_ids": (_whole, "a whole number"),
    "truncated": (_truth, "0 or 1"),
    "metadata": (_metadata, "a dict or None"),
}


def _each(
    column: list[Any], kind: tuple[Callable[[Any], Any], str], name: str, origin: str
) -> list[Any]:
    make, wanted = kind
    made = []
    for position, value in enumerate(column):
        try:
            made.append(make(value))
        except (TypeError, ValueError, RuntimeError) as error:
            shown = f"{_OUR_NAMES.get(name, name)!r} of sample {position}"
            raise FunctionFailed(
                f"{origin} returned {described(value)} as {shown}", fix=f"give {wanted}"
            ) from error
    return made


def _check_tokens(
    columns: Columns, returned: Collection[str], origin: str, vocab_size: int | None
) -> None:
    """Check lengths and values of the per-token columns that the converter ``returned``."""
    names = [name for name in _PER_TOKEN if name in returned]
    for position, length in enumerate(columns.response_lengths):
        where = f"of sample {position}"
        tokens = columns.tokens[position] = as_list(columns.tokens[position])
        if problem := token_problem(tokens, vocab_size):
            raise FunctionFailed(
                f"{origin} returned 'tokens' {where} with {problem}",
                fix="encode with its tokenizer",
            )
        for name in names:
            column = getattr(columns, name)
            values = column[position] = as_list(column[position])
            problem = f"{described(values)} as {name}"
            if isinstance(values, list):
                problem = number_problem("loss_mask" if name == "loss_masks" else name, values)
            if problem:
                fix = f"give {_PER_TOKEN[name]} for each response token"
                raise FunctionFailed(f"{origin} returned for sample {position} {problem}", fix=fix)
        sizes = {
            name: len(getattr(columns, name)[position])
            for name in {"loss_masks": 0, **dict.fromkeys(names)}
        }
        if not 0 < length < len(tokens) or any(size != length for size in sizes.values()):
            mask = sizes.pop("loss_masks")
            also = "".join(f", {size} {name}" for name, size in sizes.items())
            raise FunctionFailed(
                f"{origin}: sample {position} has {len(tokens)} tokens, response_length {length} "
                f"and a loss mask of {mask}{also}",
                why="tokens hold the prompt, at least one token, and the response",
                fix="loss masks and log-probs have one entry per response token",
            )
        if "loss_masks" in names:
            columns.loss_masks[position] = [int(value) for value in columns.loss_masks[position]]
        for name, column in columns.payloads.items():
            if problem := PAYLOADS[name].problem(column[position], len(tokens)):
                raise FunctionFailed(
                    f"{origin} returned {PAYLOADS[name].field!r} {where} {problem}"
                )


_PER_TOKEN = {
    "loss_masks": "0 or 1",
    "rollout_log_probs": "a finite number, at most 0,",
    "teacher_log_probs": "a finite number, at most 0,",
}
