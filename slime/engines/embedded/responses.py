"""What goes back over HTTP: SGLang's ``meta_info`` with its field names and shapes, and our few extra fields.

Beyond SGLang: ``token_weight_versions`` [[first output token, version], …], so that tokens sampled on either side of
a push are told apart, and ``prefill_time`` and ``decode_time`` in seconds.
"""

from __future__ import annotations

from typing import Any

from slime.engines.embedded.generate_request import Job
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.text import TextStream, Tokenizer, hold_back, trim_stop


class Answer:
    """Builds the answers of one sample: cumulative ones while it streams, and the last.

    Args:
        tokenizer: None leaves ``text`` out, as an engine without tokenizer does.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer | None) -> None:
        self.job, self.sequence = job, job.sequence
        self._tokenizer = tokenizer
        self._stream_text: TextStream | None = None
        self._streamed = 0

    def partial(self, version: str) -> dict[str, Any]:
        """Text and tokens so far; ``version`` is that of the weights now.

        The text leaves out a character that is not complete yet, and what may become a stop string: it only grows.
        """
        count = len(self.sequence.output_ids)
        body: dict[str, Any] = {"output_ids": self.sequence.output_ids[:count]}
        if self._tokenizer is not None:
            body["text"] = self.text_so_far(count)
        body["meta_info"] = meta_info(self.job, self._tokenizer, count, version)
        return body

    def final(self) -> dict[str, Any]:
        sequence = self.sequence
        count = len(sequence.output_ids)
        body: dict[str, Any] = {"output_ids": list(sequence.output_ids)}
        if self._tokenizer is not None:
            body["text"] = final_text(self.job, self._tokenizer)
        body["meta_info"] = meta_info(self.job, self._tokenizer, count, sequence.final_version)
        if self.job.experts_start is not None:
            assert sequence.experts is not None
            start = self.job.experts_start
            # the last token was not sent through the model
            body["meta_info"]["routed_experts"] = sequence.experts.encoded(start, sequence.length - 1)
            body["meta_info"]["routed_experts_start_len"] = start
        return body

    def text_so_far(self, count: int) -> str:
        """Text of the first ``count`` tokens, see `partial`. The last may be the stop token of an end that the engine
        thread has not reported yet."""
        assert self._tokenizer is not None
        if count and self.sequence.output_ids[count - 1] in self.sequence.stop_ids:
            count -= 1
        if self._stream_text is None:
            params = self.job.params
            self._stream_text = TextStream(
                self._tokenizer, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        self._stream_text.extend(self.sequence.output_ids[self._streamed : count])
        self._streamed = count
        return hold_back(self._stream_text.text, self.job.params.stop)


def final_text(job: Job, tokenizer: Tokenizer) -> str:
    """The decoded output, without what stopped it unless ``no_stop_trim``."""
    params, sequence = job.params, job.sequence
    matched = (sequence.finish_reason or {}).get("matched")
    ids = sequence.output_ids
    if isinstance(matched, int) and not params.no_stop_trim:
        ids = ids[:-1]
    text = tokenizer.decode(
        ids,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
    )
    return trim_stop(text, matched, params.no_stop_trim)


def meta_info(job: Job, tokenizer: Tokenizer | None, count: int, version: str) -> dict[str, Any]:
    """SGLang's ``meta_info`` for the first ``count`` output tokens."""
    sequence = job.sequence
    info: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish_reason,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": count,
        "cached_tokens": sequence.num_cached,
        "weight_version": version,
        "token_weight_versions": [[start, spanned] for start, spanned in sequence.versions],
        "num_retractions": sequence.num_retractions,
    }
    if job.return_logprob:
        info |= _logprobs(job, tokenizer, count)
    if sequence.finish_reason is not None:
        info |= _times(sequence, count)
    return info


def _logprobs(job: Job, tokenizer: Tokenizer | None, count: int) -> dict[str, Any]:
    sequence = job.sequence
    shown = tokenizer if job.text_in_logprobs else None
    output = _triples(sequence.output_logprobs[:count], sequence.output_ids[:count], shown)
    info: dict[str, Any] = {
        "input_token_logprobs": [],
        "output_token_logprobs": output,
        "output_token_logprobs_length": len(output),
    }
    if sequence.logprob_start is not None:
        ids = sequence.prompt[sequence.logprob_start :].tolist()
        info["input_token_logprobs"] = _triples([None, *sequence.input_logprobs], ids, shown)
    if sequence.num_top_logprobs:
        info["output_top_logprobs"] = [_top(row, shown) for row in sequence.top_logprobs[:count]]
        starts = [] if sequence.logprob_start is None else [None]  # nothing predicts the first position
        info["input_top_logprobs"] = [*starts, *(_top(row, shown) for row in sequence.input_top_logprobs)]
    return info


def _top(row: list[tuple[float, int]], tokenizer: Tokenizer | None) -> list[list[Any]]:
    return _triples([value for value, _ in row], [token for _, token in row], tokenizer)


def _triples(values: list[Any], ids: list[int], tokenizer: Tokenizer | None) -> list[list[Any]]:
    """[[log-prob, token id, text or None], …]"""
    if tokenizer is None:
        return [[value, token, None] for value, token in zip(values, ids)]
    return [[value, token, tokenizer.decode([token])] for value, token in zip(values, ids)]


def _times(sequence: Sequence, count: int) -> dict[str, Any]:
    times = sequence.times
    decode = times.finished - times.first_token if times.first_token else 0.0
    info = {
        "e2e_latency": times.finished - times.received,
        "queue_time": (times.started or times.finished) - times.received,
        "prefill_time": times.prefill,
        "decode_time": decode,
    }
    if count > 1 and decode > 0:
        info["decode_throughput"] = (count - 1) / decode
    return info
