"""Labels are as they are written: what each form of data gives a reward function."""

from __future__ import annotations

import copy
import csv
import datetime
import json
import math
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.prompts.labels import NumberAsWritten, label_text
from slime.prompts.problems import RowProblem
from slime.prompts.readers import iter_rows, open_rows
from slime.prompts.row_format import RowFormat, read_prompt

HERE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

_DIGITS = st.text("0123456789", min_size=1, max_size=40)
_INTEGERS = _DIGITS.map(lambda digits: digits.lstrip("0") or "0")
#: Every number that JSON's grammar allows, as text.
JSON_NUMBERS = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-"]),
    _INTEGERS,
    st.one_of(st.just(""), _DIGITS.map(".{}".format)),
    st.one_of(
        st.just(""),
        st.builds("{}{}{}".format, st.sampled_from("eE"), st.sampled_from(["", "+", "-"]), _DIGITS),
    ),
)
#: What a file may hold as it stands.
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def labels_of(path: Any, **form: Any) -> list[Any]:
    """The labels of a file's rows, mapped and streamed."""
    form = {"input_key": "p", "label_key": "y", **form}
    rows = open_rows(str(path))
    mapped = [read_prompt(rows[i], RowFormat(**form), None).label for i in range(len(rows))]
    streamed = [read_prompt(row, RowFormat(**form), None).label for _, row in iter_rows(str(path))]
    assert repr(streamed) == repr(mapped)
    return mapped


def label_of(path: Any, **form: Any) -> Any:
    (label,) = labels_of(path, **form)
    return label


def column(path: Path, values: Any) -> Path:
    pyarrow.parquet.write_table(pa.table({"p": ["q"] * len(values), "y": values}), path)
    return path


# -- JSON ------------------------------------------------------------------------------------------


@given(JSON_NUMBERS, st.sampled_from(["", " "]), st.sampled_from([None, "math", "f1"]))
@HERE
def test_any_number_of_json_is_its_own_text(
    tmp_path: Path, number: str, space: str, rm_type: str | None
) -> None:
    row = f'{{"z": [0.5, {number}], "p": "q",{space}"y"{space}:{space}{number}{space}}}'
    for name, text in (("a.jsonl", row + "\n"), ("a.json", f"[{row}]"), ("b.json", row)):
        (tmp_path / name).write_text(text)
        assert label_of(tmp_path / name, rm_type=rm_type) == number


@given(JSON_NUMBERS)
@HERE
def test_numbers_within_lists_and_dicts_print_as_written_and_count_as_numbers(
    tmp_path: Path, number: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"p": "q", "y": {{"a": [{number}, "{number}"]}}}}\n')
    found = label_of(tmp_path / "a.jsonl")["a"]
    assert str(found[0]) == number and found[1] == number
    if "e" not in number.lower() and "." not in number:
        assert found[0] == int(number)
    else:
        assert isinstance(found[0], float) and found[0] == float(number)


@given(TEXTS.filter(str.strip))
@HERE
def test_text_stays_byte_for_byte(tmp_path: Path, text: str) -> None:
    for name, content in (
        ("a.jsonl", json.dumps({"p": "q", "y": text})),
        ("b.jsonl", json.dumps({"p": "q", "y": text}, ensure_ascii=False)),
        ("a.json", json.dumps([{"p": "q", "y": text}], indent=1)),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        assert label_of(tmp_path / name, rm_type="f1") == text
    column(tmp_path / "a.parquet", [text])
    assert [
        read_prompt(row, RowFormat("p", "y"), None).label
        for _, row in iter_rows(f"{tmp_path}/a.parquet")
    ] == [text]


@pytest.mark.parametrize(
    ("written", "text", "raw"),
    [
        ("12345678901234567890123", "12345678901234567890123", 12345678901234567890123),
        ("5.10", "5.10", 5.1),
        ("1e5", "1e5", 100000.0),
        ("-0", "-0", 0),
        ("true", "true", True),
        ("null", None, None),
        ('"007"', "007", "007"),
        (
            "[1, 2.50, 18446744073709551617]",
            [1, 2.5, 18446744073709551617],
            [1, 2.5, 18446744073709551617],
        ),
    ],
)
def test_raw_labels_are_python_numbers_with_all_digits_of_integers(
    tmp_path: Path, written: str, text: Any, raw: Any
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"p": "q", "y": {written}}}\n')
    as_text, as_it_is = (
        label_of(tmp_path / "a.jsonl"),
        label_of(tmp_path / "a.jsonl", raw_label=True),
    )
    assert (as_text, type(as_text)) == (text, type(text))
    assert (as_it_is, type(as_it_is)) == (raw, type(raw))


@pytest.mark.parametrize("number", ["1E400", "-1e999", "9" * 5000])
def test_a_number_beyond_floats_is_text_and_refused_as_a_raw_label(
    tmp_path: Path, number: str
) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"p": "q", "y": {number}}}\n')
    assert label_of(tmp_path / "a.jsonl", rm_type="math") == number
    with pytest.raises(RowProblem, match="no Python number holds"):
        label_of(tmp_path / "a.jsonl", raw_label=True)


def test_numbers_as_written_survive_copies_and_pickles() -> None:
    number = NumberAsWritten("5.10")
    for same in (copy.deepcopy(number), pickle.loads(pickle.dumps([number]))[0]):
        assert str(same) == repr(same) == f"{same}" == "5.10" and same == 5.1
    assert json.dumps([number]) == "[5.1]"


def test_metadata_has_python_numbers_with_all_digits_of_integers(tmp_path: Path) -> None:
    big = 12345678901234567890123
    for metadata in ({"a": big, "b": 5.10}, json.dumps({"a": big, "b": 5.10})):
        (tmp_path / "a.jsonl").write_text(json.dumps({"p": "q", "metadata": metadata}) + "\n")
        rows = open_rows(str(tmp_path / "a.jsonl"))
        found = read_prompt(rows[0], RowFormat("p"), None).metadata
        assert found == {"a": big, "b": 5.1} and type(found["b"]) is float


@pytest.mark.parametrize("prompt", ["5", "5.10", "true"])
def test_a_prompt_that_is_a_number_is_refused(tmp_path: Path, prompt: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"p": {prompt}}}\n')
    with pytest.raises(RowProblem, match="not text, chat messages or token ids"):
        read_prompt(open_rows(str(tmp_path / "a.jsonl"))[0], RowFormat("p"), None)


# -- CSV -------------------------------------------------------------------------------------------


@given(
    st.lists(TEXTS.map(lambda text: text.replace("\0", "")), min_size=1, max_size=5),
    st.sampled_from(["csv", "tsv"]),
)
@HERE
def test_every_field_of_a_csv_file_is_its_text(tmp_path: Path, texts: list[str], kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
        writer.writerows([["p", "y"], *(["q", text] for text in texts)])
    assert labels_of(path) == texts


@pytest.mark.parametrize(
    "text", ["007", "1e5", "5.10", "NA", "nan", "None", "True", "12345678901234567890123"]
)
def test_fields_that_look_like_something_else_are_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(f"p,y\nq,{text}\n")
    assert label_of(tmp_path / "a.csv", rm_type="math") == text


# -- columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array([Decimal("5.10"), Decimal("0.00")], pa.decimal128(10, 2)), ["5.10", "0.00"]),
        (pa.array([Decimal("1E-10")], pa.decimal256(60, 10)), ["0.0000000001"]),
        (pa.array([0.1, 16777216.0, 1e-5], pa.float32()), ["0.1", "16777216.0", "1e-05"]),
        (pa.array([0.1], pa.float16()), ["0.1"]),
        (pa.array([2**64 - 1], pa.uint64()), ["18446744073709551615"]),
        (pa.array([2**53 + 1, None], pa.int64()), ["9007199254740993", None]),
        (pa.array([True]), ["true"]),
        (pa.array(["5.10"], pa.large_string()), ["5.10"]),
        (pa.array(["x", "y", "x"]).dictionary_encode(), ["x", "y", "x"]),
        (pa.array([0.1], pa.float32()).dictionary_encode(), ["0.1"]),
        (pa.array([datetime.date(2024, 1, 2)]), ["2024-01-02"]),
        (
            pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5)], pa.timestamp("us")),
            ["2024-01-02 03:04:05"],
        ),
        (pa.array([1700000000123456789], pa.timestamp("ns")), ["2023-11-14 22:13:20.123456789"]),
        (pa.array([datetime.time(1, 2, 3)]), ["01:02:03"]),
        (pa.array([5], pa.duration("s")), ["0:00:05"]),
        (pa.array([math.nan, 0.5]), [None, "0.5"]),
        (pa.array([[0.1, None]], pa.list_(pa.float32())), [[0.1, None]]),
        (pa.array([{"a": [0.1]}], pa.struct([("a", pa.list_(pa.float16()))])), [{"a": [0.1]}]),
        (pa.array([[Decimal("5.10")]], pa.list_(pa.decimal128(10, 2))), [["5.10"]]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_columns_of_parquet_and_arrow_files(
    tmp_path: Path, values: Any, expected: list[Any]
) -> None:
    assert labels_of(column(tmp_path / "a.parquet", values)) == expected
    table = pa.table({"p": ["q"] * len(values), "y": values})
    with (
        pa.OSFile(f"{tmp_path}/b.arrow", "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert labels_of(tmp_path / "b.arrow") == expected


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
@HERE
def test_floats_of_columns_are_the_shortest_text_that_reads_as_the_same(number: float) -> None:
    from slime.prompts.arrow_rows import _conversion

    convert = _conversion(pa.float32())
    assert convert is not None
    text = label_text(convert(number))
    assert np.float32(text) == np.float32(number)
    assert len(text.partition("e")[0].strip("-0.").replace(".", "")) <= 9
    assert float(label_text(number)) == number


@pytest.mark.parametrize("rm_type", ["math", "boxed_math", "gpqa"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_label_of_a_reward_that_compares(
    tmp_path: Path, value: float, rm_type: str
) -> None:
    path = column(tmp_path / "a.parquet", [value])
    with pytest.raises(RowProblem, match="that is not a number"):
        label_of(path, rm_type=rm_type)
    assert label_of(path, rm_type=rm_type, own_reward=True) == (
        None if math.isnan(value) else str(value)
    )


def test_a_label_inside_a_column(tmp_path: Path) -> None:
    row = {"p": "?", "reward_model": {"style": "rule", "ground_truth": 5}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row).replace("5", "5.10"))
    key = "reward_model.ground_truth"
    prompt = read_prompt(open_rows(str(path))[0], RowFormat(input_key="p", label_key=key), None)
    assert (prompt.label, prompt.unread_columns) == ("5.10", ())
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    assert label_of(tmp_path / "rows.parquet", label_key=key) == "5"

    path.write_text(json.dumps(row | {key: "a column of this name"}))
    assert label_of(path, label_key=key) == "a column of this name"
    with pytest.raises(RowProblem, match="no 'truth' inside 'reward_model'"):
        label_of(path, label_key="reward_model.truth")
    with pytest.raises(RowProblem, match=r"no key 'reward\.truth'"):
        label_of(path, label_key="reward.truth")


def test_rows_that_name_a_reward_that_compares_need_a_label_for_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"p": "q", "y": null, "metadata": {"rm_type": "math"}}\n')
    with pytest.raises(RowProblem, match="neither text nor a number"):
        label_of(tmp_path / "a.jsonl", rm_type="random")
    assert label_of(tmp_path / "a.jsonl", own_reward=True) is None
    (tmp_path / "a.jsonl").write_text('{"p": "q", "y": null, "metadata": {"rm_type": "random"}}\n')
    assert label_of(tmp_path / "a.jsonl", rm_type="math") is None


@pytest.mark.parametrize("values", [[2], [2.0], [Decimal(2)]])
def test_positions_of_choices_are_integers_whatever_their_column(
    tmp_path: Path, values: list[Any]
) -> None:
    label = label_of(column(tmp_path / "a.parquet", values), rm_type="gpqa")
    assert (label, type(label)) == (2, int)
