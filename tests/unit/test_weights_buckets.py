"""Flat buckets keep every byte, respect their limit, and have the layout that the wire promises."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.wire import buckets
from slime.engines.wire.buckets import (
    BufferPair,
    TensorEntry,
    dtype_name,
    dtype_of,
    entries_of,
    fingerprint,
    fingerprints,
    pack,
    unpack,
    word_fingerprint,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@st.composite
def named_tensors(draw: st.DrawFn) -> list[tuple[str, torch.Tensor]]:
    count = draw(st.integers(1, 12))
    tensors = []
    for number in range(count):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        tensor = torch.randint(0, 100, shape).to(dtype)
        if tensor.ndim == 2 and draw(st.booleans()):
            tensor = tensor.t()  # not contiguous
        tensors.append((f"t{number}", tensor))
    return tensors


@given(tensors=named_tensors(), threads=st.integers(2, 5))
def test_threads_take_the_same_fingerprints(
    tensors: list[tuple[str, torch.Tensor]], threads: int
) -> None:
    expected = {name: fingerprint(tensor) for name, tensor in tensors}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_BYTES_FOR_THREADS", 0)
        patch.setattr(buckets, "num_cpus", lambda: threads)
        found = fingerprints(dict(tensors))
    assert found == expected and list(found) == list(expected)


@settings(max_examples=100)
@given(tensors=named_tensors(), limit=st.integers(1, 600))
def test_pack_and_unpack(tensors: list[tuple[str, torch.Tensor]], limit: int) -> None:
    buckets = list(pack(iter(tensors), limit))
    back = {name: tensor for bucket in buckets for name, tensor in bucket.tensors}
    assert len(back) == len(tensors)
    for name, tensor in tensors:
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor)
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.entries) == 1
        assert len({entry.dtype for entry in bucket.entries}) == 1
        names = [entry.name for entry in bucket.entries]
        # the byte layout is a function of names, dtypes and shapes: the receiver of a broadcast
        # computes it
        recomputed = entries_of(
            names, [e.dtype for e in bucket.entries], [list(e.shape) for e in bucket.entries]
        )
        assert recomputed == bucket.entries
        assert [
            TensorEntry.from_json(entry.to_json()) for entry in bucket.entries
        ] == bucket.entries


def test_floats_are_cast_while_packing_and_integers_are_not() -> None:
    [floats, integers] = pack(
        [("a", torch.ones(3)), ("b", torch.ones(2, dtype=torch.int64))], 1000, torch.bfloat16
    )
    assert floats.entries[0].dtype == "bfloat16" and floats.nbytes == 6
    assert integers.entries[0].dtype == "int64"


def test_buffers_come_from_the_caller() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    [bucket] = pack(
        [("a", torch.full((4,), 7, dtype=torch.uint8))],
        100,
        allocate=lambda nbytes: memory[:nbytes],
    )
    assert memory[:4].tolist() == [7, 7, 7, 7] and bucket.buffer.data_ptr() == memory.data_ptr()


def test_two_buffers_take_turns_and_stay() -> None:
    pair = BufferPair(100, torch.device("cpu"))
    first, second = (pair.current(60) for _ in range(2) if pair.advance() in (0, 1))
    assert first.numel() == second.numel() == 60 and first.data_ptr() != second.data_ptr()
    assert (pair.advance(), pair.current(100).data_ptr()) == (0, first.data_ptr())
    assert pair.current(101).numel() == 101  # a larger one takes its place
    assert (pair.advance(), pair.current(1).data_ptr()) == (1, second.data_ptr())


def test_reading_is_lazy() -> None:
    read: list[str] = []

    def tensors():
        for name in "abcd":
            read.append(name)
            yield name, torch.zeros(4)

    stream = pack(tensors(), 32)
    next(stream)
    assert read == ["a", "b", "c"]


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_fingerprint_is_xxh3_of_the_bytes(content: bytes, data: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    assert fingerprint(tensor) == xxhash.xxh3_128_hexdigest(content)
    position = data.draw(st.integers(0, len(content) - 1))
    changed = tensor.clone()
    changed[position] ^= 1
    assert fingerprint(changed) != fingerprint(tensor)


def test_fingerprint_of_views_and_scalars() -> None:
    matrix = torch.randn(4, 6).to(torch.bfloat16)
    assert fingerprint(matrix.t()) == fingerprint(matrix.t().contiguous()) != fingerprint(matrix)
    assert fingerprint(torch.tensor(1.0)) == fingerprint(torch.ones(1))
    assert fingerprint(torch.zeros(0)) == xxhash.xxh3_128_hexdigest(b"")


def uint8(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


@settings(max_examples=150)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_word_fingerprint_sees_every_change(content: bytes, data: st.DataObject) -> None:
    tensor, before = uint8(content), word_fingerprint(uint8(content))
    assert len(before) == 32 and word_fingerprint(tensor) == before
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    assert word_fingerprint(changed) != before
    for other in (content + b"\0", b"\0" + content, content[:-1], content + content):
        assert word_fingerprint(uint8(other)) != before
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.integers(start + 1, len(content)))
    filled = tensor.clone()
    filled[start:stop] ^= 0xFF  # whole words of complements among them
    assert word_fingerprint(filled) != before


@settings(max_examples=100)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=40), st.data())
def test_word_fingerprint_sees_the_order_and_single_words(
    words: list[int], data: st.DataObject
) -> None:
    tensor = torch.tensor(words)
    before = word_fingerprint(tensor)
    i, j = data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True))
    swapped = tensor.clone()
    swapped[[i, j]] = tensor[[j, i]]
    assert (word_fingerprint(swapped) == before) is (words[i] == words[j])
    for other in (~words[i], words[i] ^ -(2**63), data.draw(st.integers(-(2**63), 2**63 - 1))):
        changed = tensor.clone()
        changed[i] = other
        assert (word_fingerprint(changed) == before) is (other == words[i])


def test_zeros_ones_and_lengths_have_word_fingerprints_of_their_own() -> None:
    fills = [
        torch.full((size,), fill, dtype=torch.uint8)
        for size in range(70)
        for fill in (0, 1, 0x80, 0xFF)
    ]
    assert len({word_fingerprint(tensor) for tensor in fills}) == 69 * 4 + 1
    assert (
        word_fingerprint(torch.zeros(0))
        == word_fingerprint(torch.zeros(3, 0, dtype=torch.int8))
        == "0" * 32
    )


@settings(max_examples=100)
@given(content=st.binary(max_size=240), at_once=st.integers(1, 40), offset=st.integers(0, 17))
def test_word_fingerprint_is_of_the_bytes_alone(content: bytes, at_once: int, offset: int) -> None:
    whole = uint8(content)
    expected = word_fingerprint(whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_WORDS_AT_ONCE", at_once)
        assert word_fingerprint(whole) == expected
    memory = torch.full((len(content) + 40,), 7, dtype=torch.uint8)
    within = memory[offset : offset + len(content)]
    within.copy_(whole)
    assert word_fingerprint(within) == expected
    aligned = whole[: len(content) // 8 * 8].clone()
    views = {word_fingerprint(aligned.view(dtype)) for dtype in DTYPES}
    assert views == {word_fingerprint(aligned)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_word_fingerprint_of_strided_tensors(dtype: torch.dtype) -> None:
    cube = torch.randint(0, 100, (6, 5, 9)).to(dtype)
    for view in (
        cube.permute(2, 0, 1),
        cube[:, 1:3],
        cube[..., ::2],
        cube[:, :, 3],
        cube[2, 3, 4],
        cube[:0],
    ):
        assert word_fingerprint(view) == word_fingerprint(
            view.clone(memory_format=torch.contiguous_format)
        )
        assert word_fingerprint(view) == word_fingerprint(view.reshape(-1))
    assert word_fingerprint(cube[:, :5, 0].t()) != word_fingerprint(cube[:, :5, 0])
    weight = torch.nn.Parameter(torch.ones(3))
    assert word_fingerprint(weight) == word_fingerprint(torch.ones(3))


def test_word_fingerprint_is_this_one() -> None:
    """Trainer and engines compute it on their own, with versions of torch of their own."""

    def expected(words: list[int], size: int) -> str:
        first = second = 0
        for place, word in enumerate(words, start=1):
            key = place * 0x9E3779B97F4A7C15 % 2**64
            key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = key ^ word
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
            mixed ^= mixed >> 31
            first, second = first + mixed, second + mixed * key
        return f"{(first + size) % 2**64:016x}{second % 2**64:016x}"

    words = [0, 1, 2**64 - 1, 2**63, 0x0123456789ABCDEF]
    content = b"".join(word.to_bytes(8, "little") for word in words)
    assert word_fingerprint(uint8(content)) == expected(words, 40)
    assert word_fingerprint(uint8(content[:39])) == expected(
        [*words[:4], words[4] & (2**56 - 1)], 39
    )


def test_an_entry_beyond_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="ends at byte 16"):
        list(unpack(torch.zeros(8, dtype=torch.uint8), [TensorEntry("w", "float32", (4,), 0)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_names(dtype: torch.dtype) -> None:
    assert dtype_of(dtype_name(dtype)) == dtype_of(f"torch.{dtype_name(dtype)}") == dtype
    with pytest.raises(ValueError, match="no"):
        dtype_of("nonsense")


def test_what_routers_read_in_float32_stays_so() -> None:
    bias, weight = (
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.gate.weight",
    )
    tensors = [
        (bias, torch.tensor([1.0001])),
        (weight, torch.tensor([1.0001])),
        ("ids", torch.tensor([3])),
    ]
    back = {
        name: tensor
        for bucket in pack(tensors, 100, torch.bfloat16)
        for name, tensor in bucket.tensors
    }
    assert {name: tensor.dtype for name, tensor in back.items()} == {
        bias: torch.float32, weight: torch.bfloat16, "ids": torch.int64,
    }  # fmt: skip
    assert torch.equal(back[bias], tensors[0][1])
