"""Files that are written tensor by tensor are as the library writes and reads them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime.checkpoints.safetensors_stream import read_table, table_of, write_stream
from tests.support.quantised_models import same_bits

#: Of one size each: of several the library sorts by a list of its own.
SIZES = (torch.int64, torch.float32, torch.bfloat16, torch.float8_e4m3fn)
DTYPES = (*SIZES, torch.float16, torch.int32, torch.uint8, torch.bool)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
Kinds = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def kinds(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[Kinds]:
    names = st.text("ab.", min_size=1, max_size=6)
    return st.dictionaries(names, st.tuples(st.sampled_from(dtypes), SHAPES), min_size=1)


def made_of(kinds: Kinds) -> dict[str, torch.Tensor]:
    return {name: (torch.rand(shape) * 9).to(dtype) for name, (dtype, shape) in kinds.items()}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds(SIZES), st.randoms(use_true_random=False))
def test_a_file_is_what_the_library_writes(tmp_path: Path, kinds: Kinds, order: Random) -> None:
    tensors = made_of(kinds)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    names = list(tensors)
    order.shuffle(names)
    write_stream(tmp_path / "ours", table_of(tensors), ((name, tensors[name]) for name in names))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds(DTYPES))
def test_the_library_reads_what_was_written(tmp_path: Path, kinds: Kinds) -> None:
    tensors = made_of(kinds)
    write_stream(tmp_path / "ours", table_of(tensors), tensors.items())
    assert read_table(tmp_path / "ours") == table_of(tensors)
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys() and all(
        same_bits(read[name], tensors[name]) for name in tensors
    )


def test_a_view_is_written_as_it_reads(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    write_stream(tmp_path / "file", table_of({"t": whole.T}), [("t", whole.T)])
    save_file({"t": whole.T.contiguous()}, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_what_ends_half_way_leaves_nothing(tmp_path: Path) -> None:
    table = {"a": ("float32", (2,)), "b": ("float32", (2,))}

    def dies():  # type: ignore[no-untyped-def]
        yield "a", torch.ones(2)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_stream(tmp_path / "file", table, dies())
    with pytest.raises(AssertionError, match="b"):
        write_stream(tmp_path / "file", table, [("a", torch.ones(2))])
    assert not list(tmp_path.iterdir())


def test_a_file_that_was_cut_is_no_file(tmp_path: Path) -> None:
    write_stream(tmp_path / "file", {"a": ("float32", (64,))}, [("a", torch.ones(64))])
    whole = (tmp_path / "file").read_bytes()
    for length in (0, 7, 20, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises((SafetensorError, OSError)):
            read_table(tmp_path / "cut")
