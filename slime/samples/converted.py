"""The columns that a user's converter returned, checked before they are packed and become tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import numpy as np

from slime.hook_loading import FunctionFailed, described
from slime.samples.columns import Columns, Trainable, described_columns

#: The flag that names a converter, for messages.
CONVERSION = "--custom-convert-samples-to-train-data-path"

#: Names of the reference system's train-data dict → ours.
_HOOK_NAMES = {"raw_reward": "raw_rewards", "rollout_ids": "execution_ids", "rollout_routed_experts": "routed_experts"}
_OUR_NAMES = {ours: theirs for theirs, ours in _HOOK_NAMES.items()}


def columns_from_hook(result: Any, trainable: Trainable, origin: str, vocab_size: int | None = None) -> Columns:
    """Columns from what a user's converter returned.

    Masks, indices, groups and metadata that it left out are those of the samples. Where it returned another number of
    entries than there are samples, every response token is trained and every entry is an execution of its own.

    Args:
        origin: the function in messages (`slime.hook_loading.named`).
        vocab_size: of the model; None where it is not known.
    Raises:
        FunctionFailed: not a dict, a needed column missing, an unknown column, columns of different lengths, an entry
            of another kind or length.
    """
    data = _columns(result, origin)
    count = len(data["tokens"])
    lengths = {_OUR_NAMES.get(name, name): len(column) for name, column in data.items() if len(column) != count}
    if lengths:
        raise FunctionFailed(
            f"{origin} returned {count} tokens lists but {lengths}", fix="one entry per sample in each"
        )
    if not count:
        fix = "return an entry for each sample that is to be trained on"
        raise FunctionFailed(f"{origin} returned no samples, of {len(trainable.samples)}", fix=fix)
    for name, kind in _ONE_EACH.items():
        if name in data:
            data[name] = _each(data[name], kind, name, origin)
    if count == len(trainable.samples):
        defaults = described_columns(trainable)
    else:
        order = list(range(count))
        defaults = {
            "loss_masks": [[1] * length for length in data["response_lengths"]],
            **dict.fromkeys(("sample_indices", "group_ids", "execution_ids"), order),
            "truncated": [False] * count,
            "weight_versions": [()] * count,
            "metadata": [None] * count,
        }
    columns = Columns(**({"raw_rewards": data["rewards"]} | defaults | data))
    _check_tokens(columns, data.keys(), origin, vocab_size)
    return columns


def _columns(result: Any, origin: str) -> dict[str, list[Any]]:
    """The dict that was returned, by our names; columns that are None are left out."""
    names = "see slime.hooks.ConvertSamples (docs/hooks.md) for the names"
    if not isinstance(result, dict):
        fix = f"return a dict of lists, one entry per sample in each; {names}"
        raise FunctionFailed(f"{origin} returned {described(result)}", fix=fix)
    data: dict[str, list[Any]] = {}
    for name, column in result.items():
        if column is None or name in ("rollout_mask_sums", "total_lengths"):  # which follow from others
            continue
        if isinstance(column, (str, bytes, dict)) or not isinstance(column, Iterable):
            raise FunctionFailed(
                f"{origin} returned {described(column)} as {name!r}", fix="give a list, an entry per sample"
            )
        is_array = hasattr(column, "tolist") and getattr(column, "ndim", 0) == 1
        data[_HOOK_NAMES.get(name) or str(name)] = column.tolist() if is_array else list(column)  # type: ignore[attr-defined]
    missing = [name for name in ("tokens", "response_lengths", "rewards") if name not in data]
    unknown = sorted(data.keys() - {f.name for f in fields(Columns) if f.name != "weight_versions"})
    if missing or unknown:
        raise FunctionFailed(
            f"{origin} returned a dict " + (f"without {', '.join(missing)}" if missing else f"with {unknown}"),
            why=f"its keys are: {', '.join(map(str, result))}",
            fix=names,
        )
    return data


def _finite(value: Any) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError
    number = float(value)  # numpy's and torch's, too
    if not math.isfinite(number):
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


#: Column with one value per sample → what makes it of an entry, or raises, and what an entry must be.
_ONE_EACH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "response_lengths": (operator.index, "a whole number"),
    "rewards": (_finite, "a finite number"),
    "raw_rewards": (_finite, "a finite number"),
    "sample_indices": (operator.index, "a whole number"),
    "group_ids": (operator.index, "a whole number"),
    "execution_ids": (operator.index, "a whole number"),
    "truncated": (_truth, "0 or 1"),
    "metadata": (_metadata, "a dict or None"),
}


def _each(column: list[Any], kind: tuple[Callable[[Any], Any], str], name: str, origin: str) -> list[Any]:
    made, (make, wanted) = [], kind
    for position, value in enumerate(column):
        try:
            made.append(make(value))
        except (TypeError, ValueError, RuntimeError) as error:
            shown = f"{_OUR_NAMES.get(name, name)!r} of sample {position}"
            raise FunctionFailed(f"{origin} returned {described(value)} as {shown}", fix=f"give {wanted}") from error
    return made


def _check_tokens(columns: Columns, returned: Iterable[str], origin: str, vocab_size: int | None) -> None:
    """Lengths and values of what has one entry per token, where the converter ``returned`` it."""
    names = [name for name in _PER_TOKEN if name in returned]
    for position, (tokens, length) in enumerate(zip(columns.tokens, columns.response_lengths)):
        where = f"of sample {position}"
        ids = _numbers(tokens, f"{origin} returned {described(tokens)} as 'tokens' {where}", "give a list of token ids")
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= (vocab_size or math.inf)):
            has = f"{vocab_size} tokens, from 0" if vocab_size else "whole numbers from 0"
            raise FunctionFailed(
                f"{origin} returned 'tokens' {where} that the model does not have",
                why=f"they are {ids.dtype} from {ids.min()} to {ids.max()}; the model has {has}",
                fix="encode with its tokenizer",
            )
        found = {}
        for name in names:
            values, fix = getattr(columns, name)[position], f"give {_PER_TOKEN[name]} for each response token"
            found[name] = _numbers(values, f"{origin} returned {described(values)} as {name!r} {where}", fix)
            allowed = np.isin(found[name], (0, 1)) if name == "loss_masks" else np.isfinite(found[name])
            if not allowed.all():
                raise FunctionFailed(f"{origin} returned {found[name][~allowed][0]} among {name!r} {where}", fix=fix)
        sizes = {"loss_masks": len(columns.loss_masks[position])} | {name: len(found[name]) for name in names}
        if not 0 < length <= len(ids) or any(size != length for size in sizes.values()):
            also = "".join(f", {size} {name}" for name, size in sizes.items() if name != "loss_masks")
            raise FunctionFailed(
                f"{origin}: sample {position} has {len(ids)} tokens, response_length {length} and a loss mask of "
                f"{sizes['loss_masks']}{also}",
                fix="tokens hold prompt and response; loss masks and log-probs have one entry per response token",
            )
        if "loss_masks" in found:
            columns.loss_masks[position] = found["loss_masks"].astype(int).tolist()


_PER_TOKEN = {
    "loss_masks": "0 or 1",
    "rollout_log_probs": "a finite number",
    "teacher_log_probs": "a finite number",
}


def _numbers(values: Any, what: str, fix: str) -> Any:
    """[n], of an empty list too."""
    try:
        found = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FunctionFailed(what, why=str(error), fix=fix) from error
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise FunctionFailed(what, why="" if found.ndim != 1 else "not all of its entries are numbers", fix=fix)
    return found
