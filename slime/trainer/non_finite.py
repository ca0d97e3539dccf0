"""NaN or Inf in a step: the error that stops the run, and the record of the step, which is written
into the crash folder in readable files:

samples.jsonl   one line per sample of the step: text, reward, lengths, names of non-finite values
step.json       micro-batches with their losses, and the parameters whose gradients are not finite
step.pt         every tensor: ``torch.load(path)``; the format of --save-debug-train-data
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from slime.config.config import Config
from slime.errors import UserError, first_few
from slime.files import json_safe
from slime.log import get_logger
from slime.trainer.dumps import RankDump, joined, save_whole

logger = get_logger(__name__)

_TEXT_LIMIT = 20_000


class NonFiniteTraining(UserError):
    """A loss or gradient is NaN or Inf. The weights are unchanged by the step.

    Every rank keeps a record of the step (`Trainer.failed_step`) for the crash folder.

    Attributes:
        sample_indices: of the samples whose loss is not finite, over all ranks; empty when only
            gradients are not.
        parameters: names of the gradients that are not finite, over all ranks.

    Args:
        functions: names of the user's functions that computed the loss, if any
            (`slime.trainer.user_functions.functions_before_loss`).
        of_critic: whether the step is the critic's.
    """

    def __init__(
        self,
        rollout_id: int,
        step: int,
        grad_norm: float,
        sample_indices: list[int],
        parameters: list[str],
        functions: Sequence[str] = (),
        *,
        of_critic: bool = False,
    ) -> None:
        self.sample_indices = sample_indices
        self.parameters = parameters
        if sample_indices:
            why = (
                "the loss is not finite in the micro-batches of the samples with index "
                f"{first_few(sample_indices, 16)}"
            )
        else:
            why = (
                f"the losses are finite but the gradient norm is {grad_norm}: the overflow is in "
                "the backward pass"
            )
            if parameters:
                why += f"; not finite: the gradient of {first_few(parameters)}"
        if functions:
            why = f"functions of yours compute the loss: {', '.join(functions)}; {why}"
        first = "check first what these functions return; then " if functions else ""
        whose = " of the critic" if of_critic else ""
        flags = "--critic-lr, check rewards and --normalize-values"
        if not of_critic:
            flags = "--lr, check rewards and --eps-clip"
        super().__init__(
            f"training stopped at rollout {rollout_id}, step {step}{whose}: NaN or Inf",
            why=why,
            fix=f"{first}look at the step's samples and tensors in the run's crash folder; lower "
            f"{flags}; or skip such steps with --no-check-for-nan-in-loss-and-grad",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_non_finite, (self.args, self.sample_indices, self.parameters)


def _restore_non_finite(
    args: tuple[Any, ...], sample_indices: list[int], parameters: list[str]
) -> NonFiniteTraining:
    error = NonFiniteTraining.__new__(NonFiniteTraining)
    UserError.__init__(error, *args)
    error.sample_indices = sample_indices
    error.parameters = parameters
    return error


@dataclass
class FailedStep:
    """A rank's record of a step with NaN or Inf, kept until the driver fetches it.

    Attributes:
        rank: data-parallel.
        shard: the step's samples; None on ranks for which another one reports (tensor- and
            context-parallel peers, inner pipeline stages).
        micro_batches: sample indices and metrics of each micro-batch, in order; [] if ``shard`` is
            None.
        parameters: (name, number of NaN or Inf entries, number of entries) of each gradient that is
            not finite on this rank.
    """

    rollout_id: int
    step_id: int
    rank: int
    grad_norm: float
    shard: RankDump | None = None
    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[tuple[str, int, int]] = field(default_factory=list)


# -- into the crash folder -------------------------------------------------------------------------


def keep_failed_step(
    error: BaseException,
    folder: Path,
    config: Config,
    ask_ranks: Callable[[], Sequence[FailedStep]],
) -> None:
    """Write the step of a `NonFiniteTraining` into ``folder`` and name the files in the error. Do
    nothing for other errors."""
    from slime.prompts.tokenizer import load_tokenizer

    if not isinstance(error, NonFiniteTraining):
        return
    try:
        model = config.checkpoint.model_dir
        trusted = config.checkpoint.trust_remote_code
        files = write_failed_step(
            folder, ask_ranks(), load_tokenizer(model, trust_remote_code=trusted)
        )
    except (OSError, UserError) as problem:  # must not hide the failure itself
        logger.error("could not write the failed step to %s: %s", folder, problem)
        return
    error.add_note(
        f"the step's samples: {files[0]}; losses and gradients: {files[1]}; tensors: {files[2]}"
    )


def write_failed_step(
    folder: Path, ranks: Sequence[FailedStep], tokenizer: Any | None
) -> list[Path]:
    """Write the three files.

    Args:
        folder: created if necessary.
        ranks: the records of all trainer ranks.
        tokenizer: for the samples' text; None omits it.
    Returns:
        The files, starting with the one to read first.
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
    rows = [_readable(_line(sample, of_sample, tokenizer)) for sample in record["samples"]]
    lines.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
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
    """Return the gradients that are not finite, each with the largest count of any rank."""
    found: dict[str, tuple[int, int]] = {}
    for rank in ranks:
        for name, bad, total in rank.parameters:
            found[name] = max(found.get(name, (0, total)), (bad, total))
    return [
        {"name": name, "not_finite": bad, "entries": total}
        for name, (bad, total) in sorted(found.items())
    ]


def _line(
    sample: dict[str, Any], micro_batch_of: dict[int, int], tokenizer: Any | None
) -> dict[str, Any]:
    tensors = {name: value for name, value in sample.items() if isinstance(value, Tensor)}
    line = {name: value for name, value in sample.items() if name not in tensors}
    tokens = tensors.pop("tokens").tolist()
    line["micro_batch"] = micro_batch_of.get(sample["sample_index"])
    line["not_finite"] = sorted(
        name for name, value in tensors.items() if not bool(torch.isfinite(value).all())
    ) + ([] if _is_finite(sample["reward"]) else ["reward"])
    mask = sample.get("loss_mask")
    line["trained_tokens"] = int(mask.sum()) if mask is not None else None
    for name in ("training_log_probs", "rollout_log_probs", "ref_log_probs", "advantages"):
        if name in tensors and tensors[name].numel():
            values = tensors[name]
            line[name] = {
                "mean": values.mean().item(),
                "min": values.min().item(),
                "max": values.max().item(),
            }
    if tokenizer is not None:
        split = sample["total_length"] - sample["response_length"]
        line["prompt"] = str(tokenizer.decode(tokens[:split]))[-_TEXT_LIMIT:]
        line["response"] = str(tokenizer.decode(tokens[split:]))[:_TEXT_LIMIT]
    return line


def _readable(value: Any) -> Any:
    """Convert to JSON types, with NaN and infinities as text, because here they matter."""
    if isinstance(value, dict):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json_safe(value)


def _is_finite(value: Any) -> bool:
    return value is None or math.isfinite(value)
