"""Log-probs of the reference model, kept in the run folder: they are computed once per answer,
across epochs and resumes.

    <run>/reference_log_probs/<reference model>.bin        a sequence of records:
        digest of tokens, images (16 bytes) │ number of log-probs (uint32) │ log-probs (float32)

The name of the file is a digest of the model's files and of the precision: another reference model
has another file. Another template or tokenizer gives other tokens, which are not found. Images
count by their bytes and places: a file that has changed is another image.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash

from slime.config.config import Config
from slime.log import get_logger
from slime.samples.batch import SampleKey, TrainBatch, TrainedTokens

logger = get_logger(__name__)

_HEAD = struct.Struct("<16sI")
_ITEM = 4  # bytes of a log-prob
#: Settings that change log-probs, beside the weights.
_PRECISION = ("bf16", "fp16", "fp32")


def reference_cache(config: Config, folder: Path) -> ReferenceCache | None:
    """Return the cache of a run whose preference loss compares with a reference model; None for
    other runs."""
    preference = config.algorithm.preference
    if preference is None or not preference.needs_reference:
        return None
    return ReferenceCache(folder / f"{_model_digest(config)}.bin")


def _model_digest(config: Config) -> str:
    """Return a digest of the names, sizes and times of the reference model's files, and of the
    precision."""
    flags = config.checkpoint
    digest = xxhash.xxh3_128()
    for given in dict.fromkeys((flags.ref_load, flags.hf_checkpoint)):
        if given is None:
            continue
        root = Path(given).resolve()
        digest.update(f"{root}|".encode())
        for file in sorted(root.rglob("*")):
            if file.is_file():
                known = file.stat()
                digest.update(f"{file}|{known.st_size}|{known.st_mtime_ns}|".encode())
    precision = [name for name in _PRECISION if getattr(config.megatron, name)]
    digest.update(f"{flags.ref_ckpt_step}|{precision}|{config.lora.lora_rank > 0}".encode())
    digest.update((config.quantised.fake_quantisation or "").encode())
    return digest.hexdigest()


class ReferenceCache:
    """Log-probs of the reference model, found by the tokens and images that were scored.

    Args:
        path: the file; a record that a crash has cut off at its end is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[bytes, tuple[int, int]] = {}
        self._end = 0
        self._awaited: dict[SampleKey, bytes] = {}
        if path.is_file():
            self._read_index()

    def __len__(self) -> int:
        return len(self._places)

    def _read_index(self) -> None:
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            while self._end + _HEAD.size <= size:
                file.seek(self._end)
                digest, count = _HEAD.unpack(file.read(_HEAD.size))
                start = self._end + _HEAD.size
                if start + count * _ITEM > size:
                    break
                self._places[digest] = (start, count)
                self._end = start + count * _ITEM
        logger.info("%d answers have log-probs of the reference model in %s", len(self), self._path)

    def fill(self, batches: Sequence[TrainBatch]) -> bool:
        """Set ``ref_log_probs`` of a rollout's batches if all answers are cached; otherwise let
        `add` expect them. Return whether all were cached."""
        digests = [_digests(batch) for batch in batches]
        if all(one in self._places for of_batch in digests for one in of_batch):
            with self._path.open("rb") as file:
                for batch, of_batch in zip(batches, digests, strict=True):
                    batch.ref_log_probs = list(self._read(file.fileno(), of_batch))
            return True
        for batch, of_batch in zip(batches, digests, strict=True):
            self._awaited.update((batch.key(i), one) for i, one in enumerate(of_batch))
        return False

    def _read(self, file: int, digests: Sequence[bytes]) -> Iterator[torch.Tensor]:
        for digest in digests:
            start, count = self._places[digest]
            content = bytearray(os.pread(file, count * _ITEM, start))
            yield torch.frombuffer(content, dtype=torch.float32)

    def add(self, scored: Sequence[TrainedTokens]) -> None:
        """Append the trainer's log-probs of answers that `fill` did not find."""
        records = []
        for one in scored:
            digest = self._awaited.pop(one.key, None)
            if digest is None or digest in self._places or one.ref_log_probs is None:
                continue
            values = one.ref_log_probs.astype("<f4").tobytes()
            self._places[digest] = (self._end + _HEAD.size, len(values) // _ITEM)
            self._end += _HEAD.size + len(values)
            records.append(_HEAD.pack(digest, len(values) // _ITEM) + values)
        if not records:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.truncate(self._end - sum(map(len, records)))
            file.write(b"".join(records))


def _digests(batch: TrainBatch) -> list[bytes]:
    """Return the digest of each sample."""
    images = {name: xxhash.xxh3_128_digest(data) for name, data in batch.images.items()}
    found = []
    for i in range(batch.num_samples):
        tokens = np.ascontiguousarray(batch.tokens[i].numpy(), dtype="<i8")
        digest = xxhash.xxh3_128(tokens.tobytes())
        digest.update(struct.pack("<I", batch.response_lengths[i]))
        for one in batch.media[i] if batch.media else ():
            digest.update(struct.pack("<3I", *one.span))
            digest.update(images[one.reference])
        found.append(digest.digest())
    return found
