"""Text files of rows: an index that agrees with reading one row after another, and what is refused
and how."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.data_path import row_suffix, split_name, split_slice
from slime.errors import UserError
from slime.prompts.problems import RowProblem
from slime.prompts.readers import iter_rows, open_rows

HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def rows_of(path: Any) -> list[dict[str, Any]]:
    rows = open_rows(str(path))
    return [rows[i] for i in range(len(rows))]


def refusal(path: Any) -> str:
    """What is said of a file that cannot be read, or of its first row; the same for a stream."""
    said = []
    for read in (rows_of, lambda path: list(iter_rows(str(path)))):
        with pytest.raises((UserError, RowProblem)) as caught:
            read(path)
        error = caught.value
        said.append(str(error.at("")) if isinstance(error, RowProblem) else str(error))
    assert said[0].partition("rows here")[2] == said[1].partition("rows here")[2]
    return said[1]


def test_a_column_that_a_parquet_file_has_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table([["q"], ["1"], ["2"]], names=["p", "y", "y"]), path)
    assert "'y' twice" in refusal(path)


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"a": 1, "a": 2}', "have a key twice in one object"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b'"),
        ('{"a": NaN}', "found NaN"),
        ('{"a": [-Infinity]}', "found -Infinity"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a": 01}', "Expecting ',' delimiter (column 8)"),
        ("[" * 100_000, "nested too deeply"),
        ("3", "found an int"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{line}\n{{"a": 1}}\n')
    assert said in refusal(tmp_path / "a.jsonl")


def test_bytes_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"a": "é"}\n'.encode("latin-1"))
    assert "byte 8 of the line is not UTF-8" in refusal(tmp_path / "a.jsonl")
    (tmp_path / "a.csv").write_bytes("a\nx\né\n".encode("latin-1"))
    rows = open_rows(str(tmp_path / "a.csv"))
    assert rows[0] == {"a": "x"} and rows.where(1) == f"{tmp_path}/a.csv:3"
    with pytest.raises(RowProblem, match="are not UTF-8"):
        rows[1]
    with pytest.raises(UserError, match=r"a\.csv:3: this line is not UTF-8"):
        list(iter_rows(str(tmp_path / "a.csv")))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_utf16_is_named(tmp_path: Path, name: str, encoding: str) -> None:
    (tmp_path / name).write_bytes('{"a": 1}\n'.encode(encoding))
    assert "is not UTF-8" in refusal(tmp_path / name) and "iconv" in refusal(tmp_path / name)


_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.text(), _VALUES, max_size=3), min_size=1, max_size=4),
    st.sampled_from([None, 1]),
)
@HERE
def test_arrays_of_objects_are_read_as_json_reads_them(
    tmp_path: Path, rows: list[Any], indent: int | None
) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=indent is None)
    (tmp_path / "a.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    if "\\ud" in text or any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        return  # refused above
    assert rows_of(tmp_path / "a.json") == rows == json.loads(text)
    assert pickle.loads(pickle.dumps(open_rows(f"{tmp_path}/a.json@[-1:]")))[0] == rows[-1]


def test_items_of_an_array_have_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n {"a": 1},\n {"a": 2}\n]\n')
    rows = open_rows(f"{tmp_path}/a.json@[1:]")
    assert rows.where(0) == f"{tmp_path}/a.json:3 (item 1)"


@pytest.mark.parametrize(
    "text", ['[{"a": 1}', '[{"a": 1} {"a": 2}]', '[{"a": 1}] 3', '[{"a": 1},]', "[{]"]
)
def test_arrays_that_are_no_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match="is not valid JSON"):
        open_rows(str(tmp_path / "a.json"))


# -- CSV -------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from('ab",\n\r é'), max_size=25))
@settings(HERE, max_examples=400)
def test_csv_is_read_as_python_reads_it_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(f"x,y\n{text}".encode())
    try:
        records = [
            record for record in csv.reader(io.StringIO(text, newline=""), strict=True) if record
        ]
    except csv.Error:
        with pytest.raises(UserError, match=r"a\.csv:\d+: the row that begins here is not CSV"):
            open_rows(str(path))
        return
    if not records:
        with pytest.raises(UserError, match="has no rows"):
            open_rows(str(path))
        return
    rows = open_rows(str(path))
    assert len(rows) == len(records)
    for position, record in enumerate(records):
        if len(record) == 2:
            assert rows[position] == dict(zip("xy", record))
        else:
            with pytest.raises(RowProblem, match="a different number of columns"):
                rows[position]


def test_rows_of_csv_have_the_line_that_they_begin_at(tmp_path: Path) -> None:
    for text in (
        'a,b\n"1\n2",3\n\n4,5\n',
        'a,b\n"1\n2",3\n\n4 "x",5\n',
    ):  # with and without an index by quotes
        (tmp_path / "a.csv").write_text(text)
        rows = open_rows(str(tmp_path / "a.csv"))
        lines = [rows.where(i) for i in range(2)]
        assert lines == [where for where, _ in iter_rows(str(tmp_path / "a.csv"))]
        assert lines == [f"{tmp_path}/a.csv:2", f"{tmp_path}/a.csv:5"]
        assert pickle.loads(pickle.dumps(rows))[1]["b"] == "5"


def test_long_fields_are_read(tmp_path: Path) -> None:
    for letter in ("x", '""'):
        (tmp_path / "a.csv").write_text(f'a,b\n"{letter * 300_000}",1\n2" pipe,3\n')
        assert len(rows_of(tmp_path / "a.csv")[0]["a"]) == 300_000
        assert len(next(iter_rows(f"{tmp_path}/a.csv"))[1]["a"]) == 300_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt;label\n1;2\n", "separated by ';'"),
        ("prompt\tlabel\n1\t2\n", r"separated by '\t'"),
        ("a,b,a\n1,2,3\n", "the column 'a' twice"),
        ('a,b\n1,2\n3,"4\n5,6\n', "a.csv:3: the row that begins here is not CSV"),
        ('a,b\n1,2\n3,"4\n5,6\n', "a quote opens here and is never closed"),
        ('a,b\n"say \\"hi\\"",2\n', "a.csv:2: the row that begins here is not CSV"),
        ("a,b\n1,2,3\n", "3 instead of 2 (a, b)"),
        ("a,b\n1\n", "1 instead of 2 (a, b)"),
    ],
)
def test_what_is_wrong_with_a_csv_file(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    assert said in refusal(tmp_path / "a.csv")


def test_tabs_are_for_tsv(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('p\ty\n"a\tb"\t1,5\n')
    assert rows_of(tmp_path / "a.tsv") == [{"p": "a\tb", "y": "1,5"}]


# -- compressed files and other types --------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv"])
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_compressed_files_are_read(tmp_path: Path, name: str, suffix: str) -> None:
    text = {"a.csv": 'p,y\n"q",5.10\n', "a.tsv": "p\ty\nq\t5.10\n"}.get(
        name, '{"p": "q", "y": "5.10"}'
    )
    content = (f"[{text}]" if name == "a.json" else text).encode()
    packed = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": pa.Codec("zstd").compress}[
        suffix
    ](content)
    (tmp_path / (name + suffix)).write_bytes(bytes(packed))
    path = tmp_path / (name + suffix)
    assert rows_of(path) == [{"p": "q", "y": "5.10"}] == [row for _, row in iter_rows(str(path))]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"a": 1}\n' * 9999)[:-20]])
def test_a_compressed_file_that_is_none_or_cut_short_is_named(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    assert "cannot be decompressed" in refusal(tmp_path / "a.jsonl.gz")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.xz", "a.parquet.gz", "a"])
def test_other_types_are_refused_with_those_that_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"a": 1}\n')
    said = refusal(tmp_path / name)
    assert (
        "has a type that cannot be read" in said
        and ".jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow" in said
    )


# -- names of data ---------------------------------------------------------------------------------


def test_a_path_that_has_a_colon_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("C:rows.jsonl").write_text('{"a": 1}\n')
    Path("12:30").mkdir()
    Path("12:30/rows.jsonl").write_text('{"a": 2}\n')
    assert rows_of("C:rows.jsonl") == [{"a": 1}] and rows_of("12:30/rows.jsonl@[:1]") == [{"a": 2}]
    assert rows_of("12:30") == [{"a": 2}] == rows_of("12:30:train")
    with pytest.raises(UserError, match="there is no data file 'D:none'"):
        open_rows("D:none")
    with pytest.raises(UserError, match="names a split of a file"):
        open_rows("C:rows.jsonl:test")


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("data/trian.jsonl", "data has: train.jsonl, a.jsonl"),
        ("dat/train.jsonl", "there is no dat; the current folder has: data"),
        ("data/train.jsonl/a", "data/train.jsonl is a file"),
    ],
)
def test_a_missing_file_is_told_with_what_its_folder_has(
    missing: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name in ("a", "train"):
        Path(f"data/{name}.jsonl").touch()
    with pytest.raises(UserError) as caught:
        open_rows(missing)
    assert caught.value.why == told


def test_parts_of_a_path() -> None:
    assert split_slice("a/b:test@[1:-2]") == ("a/b:test", slice(1, -2))
    assert split_name("a/b:test.easy") == ("a/b", "test.easy")
    for path in ("a/b", "a:b/c", "C:\\data", "a:", "train.jsonl"):
        assert split_name(path) == (path, None)
    assert [row_suffix(path) for path in ("a.json.gz", "a.jsonl", "a.b", "json")] == [
        ".json",
        ".jsonl",
        "",
        "",
    ]
