"""The step that ended in NaN or Inf, written into the crash folder where people and programs can read it:

samples.jsonl   one line per sample of the step: text, reward, lengths, what is not finite
step.json       micro-batches with their losses, and the parameters whose gradients are not finite
step.pt         every tensor: ``torch.load(path)``; the format of --save-debug-train-data
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from slime.files import json_safe
from slime.train.dumps import joined, save_whole
from slime.train.non_finite import FailedStep

_TEXT_LIMIT = 20_000


def write_failed_step(folder: Path, ranks: Sequence[FailedStep], tokenizer: Any | None) -> list[Path]:
    """Write the three files.

    Args:
        folder: made if need be.
        ranks: of all trainer ranks.
        tokenizer: for the samples' text; None leaves it out.
    Returns:
        The files, the one to read first coming first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    first = ranks[0]
    speaking = [rank for rank in ranks if rank.shard is not None]
    record = joined(first.rollout_id, [rank.shard for rank in speaking if rank.shard is not None])
    micro_batches = [
        {"data_parallel_rank": rank.rank, "micro_batch": k, **micro_batch}
        for rank in speaking
        for k, micro_batch in enumerate(rank.micro_batches)
    ]
    bad_micro_batches = [m for m in micro_batches if not _is_finite(m.get("loss"))]
    parameters = _parameters(ranks)
    record |= {"step": first.step_id, "micro_batches": micro_batches, "parameters": parameters}
    names = ("samples.jsonl", "step.json", "step.pt")
    lines, summary, tensors = (folder / name for name in names)
    of_sample = {index: m["micro_batch"] for m in micro_batches for index in m["sample_indices"]}
    lines.write_bytes(
        b"".join(orjson.dumps(_readable(_line(s, of_sample, tokenizer))) + b"\n" for s in record["samples"])
    )
    details = {
        "rollout_id": first.rollout_id,
        "step": first.step_id,
        "grad_norm": first.grad_norm,
        "micro_batches_not_finite": bad_micro_batches,
        "parameters_not_finite": parameters,
        "micro_batches": micro_batches,
    }
    summary.write_bytes(orjson.dumps(_readable(details), option=orjson.OPT_INDENT_2))
    save_whole(record, tensors)
    return [lines, summary, tensors]


def _parameters(ranks: Sequence[FailedStep]) -> list[dict[str, Any]]:
    """Gradients that are not finite, the worst rank's count of each."""
    found: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for name, bad, total in rank.parameters:
            found[name] = max(found.get(name, (0, total)), (bad, total))
    return [{"name": name, "not_finite": bad, "entries": total} for name, (bad, total) in sorted(found.items())]


def _line(sample: dict[str, Any], micro_batch_of: dict[int, int], tokenizer: Any | None) -> dict[str, Any]:
    tensors = {name: value for name, value in sample.items() if isinstance(value, Tensor) and name != "tokens"}
    line: dict[str, Any] = {name: value for name, value in sample.items() if not isinstance(value, Tensor)}
    line["micro_batch"] = micro_batch_of.get(sample["sample_index"])
    line["not_finite"] = sorted(name for name, value in tensors.items() if not bool(torch.isfinite(value).all())) + (
        [] if _is_finite(sample["reward"]) else ["reward"]
    )
    mask = sample.get("loss_mask")
    line["trained_tokens"] = int(mask.sum()) if mask is not None else None
    for name in ("training_log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
        if name in tensors and tensors[name].numel():
            values = tensors[name]
            line[name] = {"mean": values.mean().item(), "min": values.min().item(), "max": values.max().item()}
    if tokenizer is not None:
        tokens, split = sample["tokens"].tolist(), sample["total_length"] - sample["response_length"]
        line["prompt"] = str(tokenizer.decode(tokens[:split]))[-_TEXT_LIMIT:]
        line["response"] = str(tokenizer.decode(tokens[split:]))[:_TEXT_LIMIT]
    return line


def _readable(value: Any) -> Any:
    """JSON types, with NaN and infinities by name: here they are what one looks for."""
    if isinstance(value, dict):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json_safe(value)


def _is_finite(value: Any) -> bool:
    return value is None or math.isfinite(value)
