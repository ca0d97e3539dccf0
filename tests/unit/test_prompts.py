"""Reading rows, rendering prompts, and what bad input gets."""

from __future__ import annotations

import json
import logging
import pickle
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime import log
from slime.config import make_config
from slime.data_path import split_slice
from slime.errors import UserError
from slime.log import untold
from slime.prompts.chat_template import (
    carries_template,
    end_of_turn_tokens,
    render_prompt,
    template_markers,
    warn_of_no_generation_prompt,
)
from slime.prompts.order import shuffled
from slime.prompts.prepare import Checker, prepare
from slime.prompts.readers import JsonLines, iter_rows, open_rows
from slime.prompts.row_format import RowFormat, read_prompt
from slime.prompts.source import PromptSource, make_source
from slime.prompts.tokenizer import load_tokenizer, stop_token_report, with_opening
from tests.support.prompt_fixtures import CHATML, make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def log_records_reach_caplog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another test configured."""
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)


def rows_of(path: str) -> list[dict[str, Any]]:
    rows = open_rows(path)
    return [rows[i] for i in range(len(rows))]


def source_of(path: str, tokenizer: Any = TOKENIZER, **flags: Any) -> PromptSource:
    return PromptSource(
        make_config(**{"rollout_batch_size": 1, "num_rollout": 1, "prompt_data": path, **flags}),
        tokenizer,
    )


def first_prompt(path: str, **flags: Any) -> Any:
    return source_of(path, **flags).get_samples(1)[0][0]


# -- formats ---------------------------------------------------------------------------------------

ROWS = [{"input": f"q{i}", "label": str(i)} for i in range(10)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("formats")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(str(folder / "rows.parquet"))
    table.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": table, "test": table.select(range(2))}).save_to_disk(
        str(folder / "splits")
    )
    (folder / "hub").mkdir()
    table.to_parquet(str(folder / "hub" / "train-00000-of-00001.parquet"))
    (folder / "rows.json").write_text(json.dumps(ROWS))
    blank_lines = "\n".join(
        json.dumps(row) + ("\n  " if i % 3 == 0 else "") for i, row in enumerate(ROWS)
    )
    (folder / "rows.jsonl").write_text(blank_lines)  # and no line break at the end
    names = ("rows.parquet", "saved", "splits", "hub", "rows.json", "rows.jsonl")
    return {name: str(folder / name) for name in names}


def test_csv_is_text_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('prompt,label\n"one, two",007\nNA,\n', encoding="utf-8-sig")
    rows = open_rows(f"{file}@[0:2]")
    assert [rows[0], rows[1]] == [
        {"prompt": "one, two", "label": "007"},
        {"prompt": "NA", "label": ""},
    ]
    assert [where for where, _ in iter_rows(str(file))] == [f"{file}:2", f"{file}:3"]
    file.write_text("prompt,label\nonly one\n")
    with pytest.raises(UserError, match="a different number of columns than the header"):
        list(iter_rows(str(file)))


@pytest.mark.parametrize(
    "name", ["rows.parquet", "saved", "splits", "hub", "rows.json", "rows.jsonl"]
)
def test_every_format_gives_the_same_rows_mapped_and_streamed(
    files: dict[str, str], name: str
) -> None:
    path = files[name]
    assert rows_of(path) == ROWS
    assert [row for _, row in iter_rows(path)] == ROWS
    for part in ("[:3]", "[3:]", "[-3:]", "[2:-2]", "[:-8]"):
        start, stop = (int(x) if x else None for x in part.strip("[]").split(":"))
        assert rows_of(f"{path}@{part}") == ROWS[start:stop]
        assert [row for _, row in iter_rows(f"{path}@{part}")] == ROWS[start:stop]


def test_a_split_can_be_named(files: dict[str, str]) -> None:
    assert rows_of(files["splits"] + "/test") == ROWS[:2]


@given(st.lists(st.text(st.sampled_from("ab \r\t"), max_size=20), max_size=12), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_line_index_agrees_with_reading_line_by_line(
    tmp_path: Path, texts: list[str], final: bool
) -> None:
    lines = [
        json.dumps({"input": text}) if text.strip() else text.replace("\r", "") for text in texts
    ]
    file = tmp_path / "x.jsonl"
    file.write_bytes(("\n".join(lines) + ("\n" if final else "")).encode())
    expected = [
        (f"{file}:{n}", json.loads(line)) for n, line in enumerate(lines, 1) if line.strip()
    ]
    rows = JsonLines(str(file), slice(None))
    assert [(rows.where(i), rows[i]) for i in range(len(rows))] == expected
    again = pickle.loads(pickle.dumps(rows))
    assert [again[i] for i in range(len(again))] == [row for _, row in expected]


def test_slices_of_paths() -> None:
    assert split_slice("a@[b]c.jsonl") == ("a@[b]c.jsonl", slice(None))
    assert split_slice("d.jsonl@[5:]") == ("d.jsonl", slice(5, None))
    with pytest.raises(UserError, match="cannot be read"):
        split_slice("d.jsonl@[5]")


def test_rows_keep_their_own_keys(tmp_path: Path) -> None:
    rows = [
        {"input": "a", "metadata": {"x": 1}},
        {"input": "b", "metadata": {"y": [2]}},
        {"input": "c"},
    ]
    groups = source_of(write_jsonl(tmp_path / "m.jsonl", rows)).get_samples(3)
    assert [group[0].metadata for group in groups] == [{"x": 1}, {"y": [2]}, {}]


# -- rendering -------------------------------------------------------------------------------------


def test_text_and_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    path = write_jsonl(tmp_path / "c.jsonl", [{"input": "hi"}, {"input": messages}])
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    groups = source_of(path, apply_chat_template=True).get_samples(2)
    assert [group[0].prompt for group in groups] == [rendered, rendered]
    groups = source_of(path).get_samples(2)
    assert [group[0].prompt for group in groups] == ["hi", messages]


def test_tools_metadata_and_template_arguments(tmp_path: Path) -> None:
    template = "{{ tools | length if tools else 0 }} {{ mood }}: {{ messages[0]['content'] }}"
    tokenizer = make_tokenizer(template)
    tools = [{"type": "function", "function": {"name": "add"}}]
    for row in (
        {"tools": tools, "metadata": '{"k": 1}'},
        {"tools": json.dumps(tools), "metadata": '{"k": 1}'},
        {"metadata": {"k": 1, "tools": tools}},
    ):
        path = write_jsonl(tmp_path / "t.jsonl", [{"input": "q", **row}])
        flags = {"apply_chat_template": True, "apply_chat_template_kwargs": {"mood": "glad"}}
        sample = source_of(path, tokenizer, **flags).get_samples(1)[0][0]
        assert (sample.prompt, sample.metadata) == ("1 glad: q", {"k": 1, "tools": tools})


def test_rows_that_are_token_ids_are_taken_as_they_are(tmp_path: Path) -> None:
    ids = TOKENIZER.encode("hello")
    sample = first_prompt(
        write_jsonl(tmp_path / "i.jsonl", [{"input": ids}]), apply_chat_template=True
    )
    assert (sample.tokens, sample.prompt, sample.response_length) == (ids, "hello", 0)


def test_prompts_that_carry_the_template_already_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert template_markers(TOKENIZER) == ["<|im_end|>", "<|im_start|>"]
    assert carries_template([{"role": "user", "content": "<|im_start|>x"}], ["<|im_start|>"])
    rows = [{"input": "plain"}, {"input": render_prompt(TOKENIZER, "hi")}, {"input": "x<|im_end|>"}]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        source_of(path)
        assert not caplog.records
        source_of(path, apply_chat_template=True)
    assert f"2 prompts already carry the chat template (first: {path}:2" in caplog.text
    assert "--apply-chat-template would apply it a second time" in caplog.text


def test_a_template_that_renders_only_with_tools_is_examined_with_some() -> None:
    tokenizer = make_tokenizer("{% for tool in tools %}{{ tool.name }}{% endfor %}" + CHATML)
    assert template_markers(tokenizer) == ["<|im_end|>", "<|im_start|>"]
    assert list(end_of_turn_tokens(tokenizer).values()) == ["<|im_end|>"]


# -- length filter ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 30))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_length_filter_keeps_the_order(tmp_path: Path, lengths: list[int], limit: int) -> None:
    rows = [{"input": "x" * (n - 1) + chr(65 + i)} for i, n in enumerate(lengths)]
    path = write_jsonl(tmp_path / "l.jsonl", rows)
    expected = [row["input"] for row, n in zip(rows, lengths) if n <= limit]
    for streaming in (False, True):
        flags = {"rollout_max_prompt_len": limit, "streaming_data": streaming}
        if not expected:
            with pytest.raises(UserError, match=r"at most|longer than"):
                source_of(path, **flags).get_samples(1)
            continue
        drawn = [group[0].prompt for group in source_of(path, **flags).get_samples(len(expected))]
        assert drawn == expected


def test_the_context_limits_prompts_too_and_what_is_left_out_is_said(
    tmp_path: Path, caplog
) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", [{"input": "x" * n} for n in (3, 9, 10, 4)])
    with caplog.at_level(logging.WARNING):
        assert len(source_of(path, rollout_max_context_len=10)) == 3
    limit = "--rollout-max-context-len 10"
    said = (
        f"1 of 4 prompts are longer than 9 tokens and left out (the longest: 10; {limit}; first: "
    )
    assert f"{said}{path}:3)" in caplog.text and said in untold()[-1], "the terminal says it, too"
    assert len(source_of(path, rollout_max_context_len=10, rollout_max_prompt_len=3)) == 1
    told = untold()[-1]
    assert (
        "3 of 4 prompts are longer than 3 tokens" in told
        and "the longest: 10; --rollout-max-prompt-len 3;" in told
    )
    assert len(source_of(path, seq_length=5)) == 2
    with pytest.raises(
        UserError, match=r"every prompt .* than 2 tokens\s+why: 4 prompts, the shortest has 3"
    ):
        source_of(path, rollout_max_context_len=3)


@pytest.mark.parametrize(
    ("template", "text", "templated", "opens"),
    [
        (None, "2+2=", False, True),
        (CHATML, "2+2=", False, True),
        # a template that writes no BOS: servers add none to what they have templated
        (CHATML, "2+2=", True, False),
        # templated by whoever made the data
        (CHATML, "<|im_start|>user\n2+2=<|im_end|>\n", False, False),
        (None, "<|endoftext|>2+2=", False, False),  # never twice
        ({"default": CHATML, "tool_use": CHATML}, "2+2=", False, True),
        ("{% for m in messages %}{{ raise_exception('no') }}{% endfor %}", "2+2=", False, True),
    ],
)
def test_plain_text_begins_with_what_the_tokenizer_puts_before_one(
    template: Any, text: str, templated: bool, opens: bool
) -> None:
    tokenizer = make_tokenizer(template, bos="<|endoftext|>")
    bare = tokenizer.encode(text, add_special_tokens=False)
    ids = with_opening(tokenizer, text, bare, templated=templated)
    assert ids == ([tokenizer.bos_token_id] if opens else []) + bare
    if opens:
        assert ids == tokenizer.encode(text)[:-1], (
            "as a server reads it, but for the end token behind it"
        )
    assert with_opening(make_tokenizer(template), text, bare, templated=templated) == bare


def test_the_length_filter_counts_what_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input": "a" * n} for n in (3, 4, 5)])
    for bos, kept in ((None, 2), ("<|endoftext|>", 1)):
        source = source_of(path, make_tokenizer(bos=bos), rollout_max_prompt_len=4)
        assert len(source) == kept


def test_a_stream_tells_of_what_it_leaves_out_at_once_and_at_the_end_of_its_first_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_said", set())
    untold()
    path = write_jsonl(tmp_path / "l.jsonl", [{"input": "x" * n} for n in (3, 9, 12, 4)])
    source = source_of(path, streaming_data=True, rollout_max_prompt_len=8, rollout_shuffle=False)
    assert [len(group[0].prompt) for group in source.get_samples(5)] == [3, 4, 3, 4, 3]
    assert untold() == [
        f"{path}: a prompt of 9 tokens is longer than 8 and left out (--rollout-max-prompt-len 8)",
        f"{path}: 2 prompts are longer than 8 tokens and left out (the longest: 12; "
        "--rollout-max-prompt-len 8)",
    ]


def test_data_workers_find_the_same_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.prompts.prepare._TASK", 7)
    rng = random.Random(0)
    path = write_jsonl(
        tmp_path / "w.jsonl", [{"input": "x" * rng.randint(1, 20)} for _ in range(40)]
    )
    checker = Checker(RowFormat(), TOKENIZER, max_tokens=10)
    alone = prepare(open_rows(path), path, checker)
    assert prepare(open_rows(path), path, checker, num_workers=2).tolist() == alone.tolist()
    bad = write_jsonl(tmp_path / "b.jsonl", [{"input": "x"}] * 10 + [{"inptu": "x"}] * 20)
    with pytest.raises(
        UserError, match=r"20 of 30 rows have no key 'input' \(first: .*b.jsonl:11\)"
    ):
        prepare(open_rows(bad), bad, checker, num_workers=2)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["add_generation_prompt", "tools", "tokenize"])
def test_arguments_of_the_template_that_are_ours_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"--apply-chat-template-kwargs has {name}"):
        RowFormat(apply_chat_template=True, template_kwargs={name: True})


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (
            [{"input": "a"}, {"question": "b", "answer": "c"}, {"question": "d"}],
            {},
            [
                "2 of 3 rows have no key 'input' (first: ",
                ":2)",
                "its keys are: question, answer",
            ],
        ),
        (
            [{"prompt": "a"}],
            {"input_key": "promt"},
            ["no key 'promt'", "fix: pass --input-key prompt"],
        ),
        (
            [{"input": "a", "lable": 1}],
            {"label_key": "label"},
            ["no key 'label'", "fix: pass --label-key lable"],
        ),
        (
            [{"input": "a"}, {"input": "  "}],
            {},
            ["1 of 2 rows have an empty prompt (key 'input') (first: ", ":2)"],
        ),
        ([{"input": [{"role": "user", "content": ""}]}], {}, ["have an empty prompt"]),
        ([{"input": []}], {}, ["have an empty prompt"]),
        ([{"input": None}], {}, ["not text, chat messages or token ids", "found None"]),
        ([{"input": 3}], {}, ["found an int"]),
        ([{"input": ["a"]}], {}, ["found a list"]),
        ([{"input": [5, -1]}], {}, ["token ids that no vocabulary has"]),
        (
            [{"input": "a", "y": {"b": 1}}],
            {"label_key": "y", "rm_type": "math"},
            ["label (key 'y') that is neither text nor a number", "found a dict"],
        ),
        ([{"input": "a", "y": None}], {"label_key": "y", "rm_type": "boxed_math"}, ["found None"]),
        ([{"input": "a", "y": " "}], {"label_key": "y", "rm_type": "f1"}, ["empty label"]),
        (
            [{"input": "a", "metadata": [1]}],
            {},
            ["metadata (key 'metadata') that is not a dict", "found a list"],
        ),
        ([{"input": "a"}], {"metadata_key": "info"}, ["no key 'info'"]),
        (
            [{"input": "a", "tools": {"x": 1}}],
            {},
            ["have a tool that is not a function with a name"],
        ),
        ([["a"]], {}, ["are not JSON objects", "found a list"]),
        (
            [{"input": ""}, {"inp": "x"}, {"input": ""}],
            {},
            ["2 of 3 rows have an empty prompt", "1 of 3 rows have no key 'input'"],
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_give_one_clear_error(tmp_path: Path, rows, flags, said, streaming: bool) -> None:
    path = write_jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(UserError) as caught:
        source_of(path, streaming_data=streaming, **flags).get_samples(len(rows))
    if streaming:  # stops at the first bad row, wherever it is
        assert "bad.jsonl:" in str(caught.value)
    else:
        assert all(text in str(caught.value) for text in said), str(caught.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_malformed_line_is_named(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "a"}\n\n{"input": "b"\n{"input": "c"}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl:3") as caught:
        source_of(str(path), streaming_data=streaming).get_samples(3)
    assert "not valid JSON" in str(caught.value)


def test_a_reward_that_compares_needs_a_column_of_labels(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"input": "1+1=", "label": "2"}])
    with pytest.raises(UserError, match="--rm-type boxed_math compares responses with labels"):
        source_of(path, rm_type="boxed_math")
    source_of(path, rm_type="boxed_math", rollout_sample_hook_path=["my.hook"])
    source_of(path, rm_type="random")


def test_labels_of_any_type_for_a_reward_function_of_the_users_own(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", [{"input": "a", "y": {"tests": [1]}}])
    assert first_prompt(path, label_key="y").label == {"tests": [1]}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "there is no data file"),
        ("empty.jsonl", "", "has no rows"),
        ("rows.xyz", "a", "has a type that cannot be read"),
        ("rows.json", "[{]", "is not valid JSON"),
        ("rows.parquet", "no parquet", "is not a Parquet file"),
        ("lfs.jsonl", "version https://git-lfs.github.com/spec/v1\n", "is a git lfs pointer"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_files(
    tmp_path: Path, name: str, content: str | None, said: str, streaming: bool
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        source_of(str(tmp_path / name), streaming_data=streaming).get_samples(1)


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        source_of(str(tmp_path))


def test_a_template_that_refuses_the_messages_and_a_tokenizer_without_one(tmp_path: Path) -> None:
    strict = (
        "{{ raise_exception('roles must alternate') if messages | length > 1 }}{{ "
        "messages[0]['content'] }}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    path = write_jsonl(tmp_path / "m.jsonl", [{"input": "fine"}, {"input": messages}])
    with pytest.raises(
        UserError, match=r"1 of 2 rows are refused by the chat template(.|\s)*roles must alternate"
    ):
        source_of(path, make_tokenizer(strict), apply_chat_template=True)
    with pytest.raises(UserError, match="tokenizer has no chat template"):
        source_of(path, make_tokenizer(None), apply_chat_template=True)


# -- tokenizer -------------------------------------------------------------------------------------


def test_tokenizers_come_from_local_folders_only(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert loaded.encode("hi") == TOKENIZER.encode("hi") and loaded.chat_template == CHATML
    with pytest.raises(UserError, match=r"there is no model directory 'Qwen/Qwen3-0\.6B'"):
        load_tokenizer("Qwen/Qwen3-0.6B")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"has no tokenizer\s+why: it has: config.json"):
        load_tokenizer(str(tmp_path / "bare"))
    (tmp_path / "bare" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(str(tmp_path / "bare"))


def test_stop_tokens_are_compared_with_the_templates_end_of_turn() -> None:
    ends_elsewhere = make_tokenizer(eos="<|endoftext|>")
    im_end = ends_elsewhere.convert_tokens_to_ids("<|im_end|>")
    (warning,) = stop_token_report(ends_elsewhere)
    assert (
        f"ends turns with '<|im_end|>' ({im_end})" in warning
        and f"--rollout-stop-token-ids {im_end}" in warning
    )
    assert stop_token_report(make_tokenizer()) == []
    assert stop_token_report(ends_elsewhere, {"eos_token_id": [im_end]}) == []
    assert stop_token_report(ends_elsewhere, stop_token_ids=[im_end]) == []
    assert stop_token_report(ends_elsewhere, stop=["<|im_end|>"]) == []
    assert stop_token_report(make_tokenizer(None, eos="<|endoftext|>")) == [], (
        "no template: nothing to compare"
    )


@pytest.mark.parametrize(
    ("ask", "head"),
    [("", "<|im_start|>assistant"), ("{% if add_generation_prompt %}<|im_start|>assistant\n", "")],
)
def test_a_chat_template_without_generation_prompt_is_told(
    caplog: pytest.LogCaptureFixture, ask: str, head: str
) -> None:
    turns = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    )
    tokenizer = make_tokenizer(turns + ask + ("{% endif %}" if ask else ""))
    with caplog.at_level(logging.WARNING):
        warn_of_no_generation_prompt(tokenizer)
    assert [repr(head) in record.getMessage() for record in caplog.records] == [True] * bool(head)


def test_making_the_source_warns_of_endless_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make_tokenizer(eos="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    path = write_jsonl(tmp_path / "d.jsonl", [{"input": "a"}])
    flags = {
        "rollout_batch_size": 1,
        "num_rollout": 1,
        "prompt_data": path,
        "hf_checkpoint": str(tmp_path),
    }
    with caplog.at_level(logging.WARNING):
        make_source(
            make_config(apply_chat_template=True, rollout_stop=("<|im_end|>",), **flags), tokenizer
        )
        assert not caplog.records
        make_source(make_config(apply_chat_template=True, **flags), tokenizer)
    assert "no stop token ends a turn" in caplog.text


@pytest.mark.parametrize(
    ("row", "warns"),
    [
        ([{"role": "user", "content": "a"}], True),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", True),
        ("once upon a time", False),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_chat_are_noticed_without_the_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: Any, warns: bool, streaming: bool
) -> None:
    tokenizer = make_tokenizer(eos="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    path = write_jsonl(tmp_path / "d.jsonl", [{"input": "plain"}, {"input": row}])
    with caplog.at_level(logging.WARNING):
        flags = {
            "num_rollout": 1,
            "prompt_data": path,
            "hf_checkpoint": str(tmp_path),
            "streaming_data": streaming,
        }
        make_source(make_config(**flags), tokenizer)
    assert ("no stop token ends a turn" in caplog.text) == warns


# -- shuffling a stream ----------------------------------------------------------------------------


@given(st.lists(st.integers()), st.integers(1, 20), st.integers(0, 5))
def test_a_shuffled_stream_has_every_item_once_and_depends_on_the_seed_alone(
    items, size, seed
) -> None:
    first = list(shuffled(iter(items), random.Random(seed).randrange, size))
    assert sorted(first) == sorted(items)
    assert first == list(shuffled(iter(items), random.Random(seed).randrange, size))


def test_read_prompt_leaves_the_row_alone() -> None:
    row = {"input": "q", "metadata": {"a": 1}, "tools": [{"name": "t"}]}
    prompt = read_prompt(row, RowFormat(), TOKENIZER)
    prompt.metadata["b"] = 2
    assert row["metadata"] == {"a": 1}
