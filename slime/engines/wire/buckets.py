"""Flat buckets: many tensors in one uint8 buffer, and the fingerprints that prove they arrived.

    tensors ─► pack ─► Bucket(buffer, entries) ── wire ──► unpack ─► tensors

A bucket holds tensors of one dtype without gaps. So names and shapes determine the byte layout, as
SGLang's ``flattened_bucket`` expects, and every tensor is aligned to its dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import xxhash

from slime.processes.host import num_cpus

#: nbytes → uint8 tensor of that many elements; lets the caller pack into shared or pinned memory.
Allocate = Callable[[int], torch.Tensor]

#: Name → names of all tensors that must share its bucket, itself included; () if there are no
#: others. For example `slime.models.fused_loading.LoadGroups.members`.
Together = Callable[[str], tuple[str, ...]]


def fingerprint(tensor: torch.Tensor) -> str:
    """Return xxh3-128 of the tensor's bytes in row-major order, as 32 hex digits. Shape and dtype
    have no effect.

    Example:
        >>> fingerprint(torch.zeros(2, 3)) == fingerprint(torch.zeros(6))
        True
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_128_hexdigest(flat.numpy().data)


#: Below this many bytes, hashing takes ten milliseconds and threads gain nothing.
_BYTES_FOR_THREADS = 256 << 20
_MAX_THREADS = 8


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the `fingerprint` of each tensor, by name; of many bytes on several cores."""
    threads = min(_MAX_THREADS, num_cpus())
    if threads == 1 or sum(tensor.nbytes for tensor in tensors.values()) < _BYTES_FOR_THREADS:
        return _each_fingerprint(tensors.items())
    pairs = list(tensors.items())
    with ThreadPoolExecutor(threads, "fingerprints") as pool:
        # one task per thread: a task takes as long as hashing a small tensor
        parts = pool.map(_each_fingerprint, [pairs[n::threads] for n in range(threads)])
        found = {name: digest for part in parts for name, digest in part.items()}
    return {name: found[name] for name in tensors}


def _each_fingerprint(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: fingerprint(tensor) for name, tensor in pairs}


_WORDS_AT_ONCE = 1 << 22
_SPREAD = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9
_FOLD = 0x94D049BB133111EB


def word_fingerprint(tensor: torch.Tensor) -> str:
    """Return 128 bits of the tensor's bytes in row-major order, as 32 hex digits; computed on the
    tensor's device.

    Mixes each word of 8 bytes with a key from its position and sums the results. Sums need no
    order, so a GPU can compute them; `fingerprint` would copy everything to the host. Integers wrap
    around equally on all devices. Detects damage and mix-ups, not forgery: always one changed word,
    several with a probability of about 1 - 2^-64. Source: the mixing steps are those of SplitMix64
    (Steele, Lea & Flood, OOPSLA 2014).

    Example:
        >>> word_fingerprint(torch.ones(2, 3)) == word_fingerprint(torch.ones(6))
        True
        >>> word_fingerprint(torch.arange(4)) == word_fingerprint(torch.arange(4).flip(0))
        False
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = data.numel()
    if size % 8:
        data = torch.nn.functional.pad(data, (0, 8 - size % 8))
    if data.storage_offset() % 8:
        data = data.clone()
    words = data.view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        keys = torch.arange(start + 1, start + 1 + part.numel(), device=data.device).mul_(
            _signed(_SPREAD)
        )
        keys ^= _shifted(keys, 30)
        mixed = keys.mul_(_signed(_MIX)) ^ part
        mixed ^= _shifted(mixed, 27)
        mixed.mul_(_signed(_FOLD))
        mixed ^= _shifted(mixed, 31)
        sums[0] += mixed.sum()
        sums[1] += mixed.mul_(keys).sum()
    first, second = (value % (1 << 64) for value in sums.tolist())
    return f"{(first + size) % (1 << 64):016x}{second:016x}"


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right, filling with zeros. torch's shift repeats the sign: ``x ^ (x >> bits)`` would be
    the same for the complement of x, and a word of zeros would equal one of 0xff bytes."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Reinterpret 64 unsigned bits as a signed integer."""
    return word - (1 << 64) if word >> 63 else word


#: Fingerprints of a tensor's bytes, by name; both sides of a comparison must use the same one.
FINGERPRINTS: dict[str, Callable[[torch.Tensor], str]] = {
    "xxh3": fingerprint,
    "words": word_fingerprint,
}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype: "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Invert `dtype_name`; "torch.bfloat16" is accepted too. Raises ValueError for other names."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


@dataclass(frozen=True)
class TensorEntry:
    """The place of one tensor in a bucket.

    Attributes:
        name: Hugging Face parameter name.
        dtype: as in `dtype_name`.
        shape: row-major.
        offset: bytes from the start of the buffer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @functools.cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "offset": self.offset,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> TensorEntry:
        return TensorEntry(data["name"], data["dtype"], tuple(data["shape"]), int(data["offset"]))


@dataclass
class Bucket:
    """A flat buffer (uint8 [nbytes]) and the table of its tensors."""

    buffer: torch.Tensor
    entries: list[TensorEntry]

    @property
    def nbytes(self) -> int:
        return int(self.buffer.numel())

    @functools.cached_property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return (name, view into the buffer); writing to a view writes to the bucket."""
        return list(unpack(self.buffer, self.entries))


def own_device() -> torch.device:
    """Return this process's GPU, or the CPU if it has none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class BufferPair:
    """Two flat buffers that alternate: one is packed while the other is read. They are allocated
    when needed.

    Args:
        nbytes: smallest size of each.
        device: where they are.

    Attributes:
        turn: 0 or 1, the buffer that `current` returns.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._nbytes = nbytes
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None, None]
        self.turn = 1

    def advance(self) -> int:
        """Switch to the other buffer; return its number."""
        self.turn = 1 - self.turn
        return self.turn

    def current(self, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of the current buffer, which grows if it is too small."""
        buffer = self._buffers[self.turn]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[self.turn] = buffer = None  # free the smaller one first
            buffer = torch.empty(max(nbytes, self._nbytes), dtype=torch.uint8, device=self._device)
            self._buffers[self.turn] = buffer
        return buffer[:nbytes]

    def rewind(self) -> None:
        """Start with the first one again, so the same buckets meet buffers of the same sizes."""
        self.turn = 1

    def drop(self) -> None:
        """Free the memory."""
        self._buffers = [None, None]
        self.rewind()


def unpack(
    buffer: torch.Tensor, entries: Iterable[TensorEntry]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the views of the tensors in a flat uint8 buffer.

    Raises:
        ValueError: an entry reaches beyond the buffer.
    """
    for entry in entries:
        end = entry.offset + entry.nbytes
        if entry.offset < 0 or end > buffer.numel():
            raise ValueError(
                f"{entry.name} ends at byte {end} of a bucket of {buffer.numel()} bytes"
            )
        yield entry.name, buffer[entry.offset : end].view(dtype_of(entry.dtype)).view(entry.shape)


#: Tensors that SGLang holds in float32 whatever the model's dtype: routers' score corrections, and
#: the decays of gated delta nets.
FLOAT32_NAMES = ("e_score_correction_bias", "linear_attn.A_log")
SCALE_NAMES = (".weight_scale", ".weight_scale_inv")


def dtype_in(model_dtype: torch.dtype | None, name: str, own: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor in a model of ``model_dtype`` (None: the tensor's own). FP8 and
    scales keep theirs.

    Example:
        >>> name = "model.layers.3.mlp.gate.e_score_correction_bias"
        >>> dtype_in(torch.bfloat16, name, torch.float32)
        torch.float32
    """
    if (
        model_dtype is None
        or not own.is_floating_point
        or own.itemsize == 1
        or name.endswith(SCALE_NAMES)
    ):
        return own
    return torch.float32 if name.endswith(FLOAT32_NAMES) else model_dtype


def entries_of(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[TensorEntry]:
    """Return the table of a bucket from the fields of ``/update_weights_from_distributed``."""
    entries = []
    offset = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        entry = TensorEntry(name, dtype.removeprefix("torch."), tuple(shape), offset)
        entries.append(entry)
        offset += entry.nbytes
    return entries


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    limit: int,
    dtype: torch.dtype | None = None,
    allocate: Allocate | None = None,
    together: Together | None = None,
) -> Iterator[Bucket]:
    """Pack named tensors into buckets of at most ``limit`` bytes; a larger one gets its own bucket.

    Each tensor is copied (and cast) once, into the buffer. One bucket per dtype is open at a time:
    the order within a dtype is kept, and memory is at most ``limit`` per dtype. A group of tensors
    that must share a bucket is held until its last member comes, and takes that place.

    Args:
        tensors: (name, tensor of any strides), read lazily.
        limit: bytes per bucket; a larger tensor or group makes its bucket as large as itself.
        dtype: cast floating-point tensors to it (see `dtype_in`); None keeps each tensor's own.
        allocate: creates the buffers; by default on the tensors' device.
        together: which tensors must share a bucket; None if none must.
    Raises:
        ValueError: a member of a group never came, or the members have several dtypes.

    Example:
        >>> [b.nbytes for b in pack([(name, torch.zeros(4)) for name in "abc"], limit=32)]
        [32, 16]
    """
    open_buckets: dict[torch.dtype, list[tuple[str, torch.Tensor]]] = {}
    sizes: dict[torch.dtype, int] = {}
    for unit in _complete_groups(tensors, together):
        targets = {dtype_in(dtype, name, tensor.dtype) for name, tensor in unit}
        if len(targets) > 1:
            names = ", ".join(name for name, _ in unit)
            raise ValueError(f"{names} must share a bucket but have different dtypes: {targets}")
        [target] = targets
        nbytes = sum(tensor.numel() for _, tensor in unit) * target.itemsize
        if open_buckets.get(target) and sizes[target] + nbytes > limit:
            yield _fill(open_buckets.pop(target), target, allocate)
        if target not in open_buckets:
            open_buckets[target] = []
            sizes[target] = 0
        open_buckets[target].extend(unit)
        sizes[target] += nbytes
    for target in list(open_buckets):
        yield _fill(open_buckets.pop(target), target, allocate)


@dataclass(frozen=True)
class Packing:
    """The arguments of `pack` that are the same for all pushes."""

    limit: int
    dtype: torch.dtype
    together: Together | None = None

    def buckets(
        self, tensors: Iterable[tuple[str, torch.Tensor]], allocate: Allocate
    ) -> Iterator[Bucket]:
        return pack(tensors, self.limit, self.dtype, allocate, self.together)


def _complete_groups(
    tensors: Iterable[tuple[str, torch.Tensor]], together: Together | None
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    waiting: dict[tuple[str, ...], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors:
        members = together(name) if together is not None else ()
        if len(members) < 2:
            yield [(name, tensor)]
            continue
        here = waiting.setdefault(members, [])
        here.append((name, tensor))
        if len(here) == len(members):
            yield waiting.pop(members)
    if waiting:
        missing = [set(members) - {name for name, _ in here} for members, here in waiting.items()]
        raise ValueError(
            "engines load these only with others that were not sent: "
            f"{sorted(set().union(*missing))}"
        )


def _fill(
    tensors: list[tuple[str, torch.Tensor]], dtype: torch.dtype, allocate: Allocate | None
) -> Bucket:
    names = [name for name, _ in tensors]
    shapes = [list(tensor.shape) for _, tensor in tensors]
    entries = entries_of(names, [dtype_name(dtype)] * len(names), shapes)
    total = entries[-1].offset + entries[-1].nbytes
    make = allocate or partial(torch.empty, dtype=torch.uint8, device=tensors[0][1].device)
    bucket = Bucket(make(total), entries)
    # in one call: a mixture of experts has more than ten thousand tensors
    torch._foreach_copy_(
        [view for _, view in bucket.tensors], [source.detach() for _, source in tensors]
    )
    return bucket
