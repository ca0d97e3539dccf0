"""Write generated samples to disk: ``samples/rollout_000012.jsonl``, ``samples/eval_000012.jsonl``
and the traces.

A file has one line per sample, in a format that ``jq``, pandas and ``datasets`` read. A large
rollout keeps only some whole groups, evenly spread: enough to read, not a second copy of the data.
--save-debug-rollout-data keeps everything.
"""

from __future__ import annotations

import itertools
import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.errors import UserError, name_and_text
from slime.files import dump_line, json_safe, write_atomically
from slime.log import get_logger
from slime.observe.chrome_trace import write_trace
from slime.observe.run_folder import RunFolder
from slime.observe.trace import set_tracing
from slime.samples.media import references_of
from slime.samples.types import Group, Sample

if TYPE_CHECKING:
    import numpy as np

    from slime.config.config import Config
    from slime.samples.batch import SampleKey, TrainedTokens

logger = get_logger(__name__)

#: Maximum characters of a recorded prompt, response or label.
MAX_TEXT = 20_000
#: Maximum tokens per file that are recorded one by one with their log-probs: about 15 bytes each, a
#: megabyte per rollout.
MAX_TOKENS = 65_536
#: Maximum recorded failures of a rollout, or of all evaluations.
MAX_FAILURES = 256
#: The text of an incomplete character, and the maximum tokens of one character.
_PART = "\ufffd"
_MAX_PARTS = 4


def run_lengths(mask: Sequence[int]) -> list[list[int]]:
    """Run-length encode a loss mask as [value, count] pairs.

    Example:
        >>> run_lengths([1, 1, 0, 0, 0, 1])
        [[1, 2], [0, 3], [1, 1]]
    """
    runs: list[list[int]] = []
    for value in mask:
        if runs and runs[-1][0] == value:
            runs[-1][1] += 1
        else:
            runs.append([int(value), 1])
    return runs


def segments(sample: Sample, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """Split the response into pieces of text: each is trained on or not, and comes from one version
    of the weights.

    Returns:
        [{"text", "trained", "version"}] in order; empty if all tokens are trained on and have one
        version.
    """
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    versions: list[int | None] = [None] * sample.response_length
    for piece in sample.token_spans:
        versions[piece.start : piece.end] = [piece.weight_version] * (piece.end - piece.start)
    keys = list(zip(mask, versions))
    cuts = [0] + [i for i in range(1, len(keys)) if keys[i] != keys[i - 1]] + [len(keys)]
    if len(cuts) <= 2 and all(mask):
        return []
    response = sample.tokens[sample.prompt_length :]
    return [
        {
            "text": decode(response[start:end]),
            "trained": bool(mask[start]),
            "version": versions[start],
        }
        for start, end in itertools.pairwise(cuts)
        if end > start
    ]


def _log_prob_stats(
    values: Sequence[float] | None, mask: Sequence[int] | None
) -> dict[str, float] | None:
    """Return the mean and the minimum log-prob of the trained tokens."""
    if not values:
        return None
    kept = [
        v
        for v, m in zip(values, mask if mask is not None else [1] * len(values))
        if m and math.isfinite(v)
    ]
    return {"mean": sum(kept) / len(kept), "min": min(kept)} if kept else None


class TokenTexts:
    """The text of each token within a response. A character of several tokens is at the first of
    them; the others get "". Invalid bytes become �.

    Args:
        decode: turns token ids into text; called twice per new token id, once per such character.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._characters: dict[tuple[int, ...], str] = {}

    def of(self, tokens: Sequence[int]) -> list[str]:
        texts = [
            self._known[token] if token in self._known else self._look(token) for token in tokens
        ]
        parts: list[int] = []
        for i, text in enumerate(texts):
            parts = [*parts, i][-_MAX_PARTS:] if _PART in text else []
            if len(parts) > 1 and _PART not in (
                whole := self._together(tuple(tokens[part] for part in parts))
            ):
                for part in parts:
                    texts[part] = whole if part == parts[0] else ""
                parts = []
        return texts

    def _look(self, token: int) -> str:
        try:
            alone = self._decode([token])
            twice = self._decode([token, token])
        except (OverflowError, ValueError, TypeError, IndexError, KeyError):
            alone = ""  # an id of a user's own that the tokenizer does not know
            twice = f"<{token}>"
        # decoding may strip a text's first space; the second of two tokens keeps it
        text = self._known[token] = str(
            json_safe(twice[len(alone) :] if twice.startswith(alone) else alone)
        )
        return text

    def _together(self, tokens: tuple[int, ...]) -> str:
        if tokens in self._characters:
            return self._characters[tokens]
        text = str(json_safe(self._decode(list(tokens))))
        if _PART not in text:  # invalid byte sequences are unbounded in number
            self._characters[tokens] = text
        return text


def token_record(sample: Sample, texts: TokenTexts) -> dict[str, Any] | None:
    """Return ``{"text": [...], "log_probs": [...] or None}`` with one entry per response token;
    None without a response."""
    if not sample.response_length:
        return None
    log_probs = sample.rollout_log_probs
    if log_probs:
        rounded = [round(float(value), 3) if math.isfinite(value) else None for value in log_probs]
    else:
        rounded = None
    return {"text": texts.of(sample.tokens[-sample.response_length :]), "log_probs": rounded}


def sample_record(
    sample: Sample, decode: Callable[[list[int]], str] | None = None
) -> dict[str, Any]:
    """Return one line of a samples file; ``docs/run-folder.md`` lists the fields."""
    record: dict[str, Any] = {
        "group": sample.group_index,
        "index": sample.index,
        "execution": sample.rollout_id,
        "status": sample.status.value,
        "reward": sample.reward,
        "prompt": sample.prompt,
        "response": sample.response,
        "label": sample.label,
        "prompt_length": sample.prompt_length,
        "response_length": sample.response_length,
        "trained_tokens": 0 if sample.remove_sample else sample.effective_response_length,
        "loss_mask": None if sample.loss_mask is None else run_lengths(sample.loss_mask),
        "log_probs": _log_prob_stats(sample.rollout_log_probs, sample.loss_mask),
        "weight_versions": sample.weight_versions,
        "token_spans": [[s.start, s.end, s.weight_version] for s in sample.token_spans],
        "cached_tokens": sample.prefix_cache_info.cached_tokens,
        "non_generation_time": sample.non_generation_time,
        "remove_sample": sample.remove_sample,
        "source": sample.source,
        "metadata": sample.metadata,
    }
    if decode is not None:
        record["segments"] = segments(sample, decode)
    if images := references_of(sample):
        record["images"] = images
    safe: dict[str, Any] = json_safe(record, max_text=MAX_TEXT)
    return safe


def _as_far_as_it_goes(sample: Sample) -> dict[str, Any]:
    """Return a sample's record, or only its main fields if users' code left it inconsistent."""
    try:
        return sample_record(sample)
    except (TypeError, ValueError, AttributeError, IndexError, UserError):
        kept = {
            "group": sample.group_index,
            "index": sample.index,
            "status": str(getattr(sample.status, "value", sample.status)),
        }
        safe: dict[str, Any] = json_safe(
            {**kept, "prompt": sample.prompt, "response": sample.response}
        )
        return safe


def spread(groups: Sequence[Group], max_samples: int) -> list[Group]:
    """Choose evenly spread whole groups with about ``max_samples`` samples in all, and at least one
    group."""
    count = sum(len(group.samples) for group in groups)
    if count <= max_samples:
        return list(groups)
    keep = max(1, int(len(groups) * max_samples / count))
    return [groups[i * len(groups) // keep] for i in range(keep)]


def trained_name(rollout_id: int) -> str:
    """Return the name of the file that `Recorder.record_training` writes."""
    return f"trained_{rollout_id:06d}.jsonl"


def _key(sample: Sample, index: int) -> SampleKey:
    return index, len(sample.tokens), sample.response_length


def _numbers(
    values: np.ndarray | None, *, one_for_all: bool = False
) -> list[float | None] | float | None:
    """Round values for JSON, [R] → one entry per token, or with ``one_for_all`` a single number if
    all are equal."""
    if values is None or not len(values):
        return None
    rounded: list[float] = (values.astype("float64").round(4) + 0.0).tolist()  # no "-0.0"
    if one_for_all and min(rounded) == max(rounded):
        return rounded[0] if math.isfinite(rounded[0]) else None
    return [value if math.isfinite(value) else None for value in rounded]


class Recorder:
    """Writes samples and traces; used in the rollout process.

    Args:
        run: the run folder, or its path; `config` then gives the stage.
        decode: turns token ids into text (``tokenizer.decode``); needed to record tokens one by one
            and `segments`.
        max_samples: maximum training samples per rollout, and maximum evaluation samples per data
            set; 0 records none.
    """

    def __init__(
        self,
        run: RunFolder | Path,
        config: Config,
        decode: Callable[[list[int]], str] | None = None,
        max_samples: int = 256,
    ) -> None:
        self._run = (
            run if isinstance(run, RunFolder) else RunFolder(run, config.observe.stage or None)
        )
        self._decode = decode
        self._texts = TokenTexts(decode) if decode is not None else None
        self._max_samples = max_samples
        self._tracing = config.observe.trace
        self._num_failures: Counter[int | None] = Counter()
        set_tracing(self._tracing)

    def record_rollout(self, rollout_id: int, groups: Sequence[Group]) -> None:
        """Write the samples of rollout `rollout_id`, and its timeline."""
        # if the rollout is repeated, this file is outdated
        (self._run.samples / trained_name(rollout_id)).unlink(missing_ok=True)
        kept = spread(groups, self._max_samples) if self._max_samples else []
        self._write(
            f"rollout_{rollout_id:06d}",
            [{"rollout_id": rollout_id}] * len(kept),
            [g.samples for g in kept],
        )
        if self._tracing:
            samples = [sample for group in groups for sample in group.samples]
            write_trace(self._run.trace / f"rollout_{rollout_id:06d}.json", samples)

    def record_failure(
        self, rollout_id: int | None, samples: Sequence[Sample], while_: str, error: Exception
    ) -> None:
        """Append samples of one trajectory on which users' code failed, with the traceback.

        Args:
            rollout_id: None for an evaluation.
            while_: "generating", "sample hooks" or "reward".
        """
        self._num_failures[rollout_id] += 1
        if self._num_failures[rollout_id] > MAX_FAILURES:
            return
        told = {
            "failed": while_,
            "error": name_and_text(error),
            "rollout_id": rollout_id,
            "traceback": "".join(traceback.format_exception(error))[-MAX_TEXT:],
        }
        name = "failed_eval.jsonl" if rollout_id is None else f"failed_{rollout_id:06d}.jsonl"
        lines = [dump_line(json_safe(told) | _as_far_as_it_goes(sample)) for sample in samples]
        try:
            self._run.samples.mkdir(parents=True, exist_ok=True)
            with (self._run.samples / name).open("ab") as file:
                file.write(b"".join(lines))
        except OSError as problem:  # a full disk; the failure has been logged
            logger.warning("%s: %s", self._run.samples / name, problem)

    def token_keys(self, groups: Sequence[Group]) -> frozenset[SampleKey]:
        """Return the keys of samples whose tokens `record_rollout` writes one by one. Keys that are
        not unique in the rollout are left out."""
        if self._texts is None or not self._max_samples:
            return frozenset()
        left = MAX_TOKENS
        keys: list[SampleKey] = []
        for sample in (
            sample for group in spread(groups, self._max_samples) for sample in group.samples
        ):
            if 0 < sample.response_length <= left:
                left -= sample.response_length
                keys += [] if sample.index is None else [_key(sample, sample.index)]
        counts = Counter(
            _key(s, s.index) for group in groups for s in group.samples if s.index is not None
        )
        return frozenset(key for key in keys if counts[key] == 1)

    def record_training(self, rollout_id: int, trained: Sequence[TrainedTokens]) -> None:
        """Write advantages and log-prob differences of recorded samples to `trained_name`."""
        lines = [
            dump_line({
                "index": one.key[0],
                "total_length": one.key[1],
                "response_length": one.key[2],
                "advantages": _numbers(one.advantages, one_for_all=True),
                "log_prob_diffs": _numbers(one.log_prob_diffs),
            })
            for one in sorted(trained, key=lambda one: one.key)
        ]  # fmt: skip
        if lines:
            write_atomically(self._run.samples / trained_name(rollout_id), b"".join(lines))

    def record_evaluation(
        self, name: str, rollout_id: int, data: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Write the samples of an evaluation: ``data`` as in
        `slime.user_code.hooks.RolloutFnEvalOutput`.

        Args:
            name: of the file, without its suffix.
        """
        extras = []
        lists = []
        for dataset, result in data.items():
            extras.append({"rollout_id": rollout_id, "dataset": dataset})
            lists.append(list(result.get("samples") or [])[: self._max_samples])
        self._write(name, extras, lists)

    def _write(
        self, name: str, extras: Sequence[Mapping[str, Any]], lists: Sequence[Sequence[Sample]]
    ) -> None:
        lines = []
        left = MAX_TOKENS
        for extra, samples in zip(extras, lists):
            for sample in samples:
                record = {**extra, **sample_record(sample, self._decode)}
                if self._texts is not None and sample.response_length <= left:
                    # added after json_safe, which is slow for so many values
                    record["tokens"] = token_record(sample, self._texts)
                    left -= sample.response_length
                lines.append(dump_line(record))
        if lines:
            write_atomically(self._run.samples / f"{name}.jsonl", b"".join(lines))
