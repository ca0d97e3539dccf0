"""The index of samples: what it finds is what a look at every line would find, however the files
grew."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.watched_runs import make_run, write_lines
from slime.observe.run_data import read_stages
from slime.page.index import SampleIndex
from slime.page.index import _transaction as transaction
from slime.page.rows import SORTS, Query, question_of, searched_text, short_texts

#: Few letters, so that words are found; with some that fold, end lines, mean something to a search,
#: or have no text.
LETTERS = "abcABßİ\"'*%_ \n\0\u2028é"
texts = st.text(LETTERS, max_size=12)
records = st.fixed_dictionaries(
    {
        "group": st.integers(0, 3),
        "index": st.integers(0, 50),
        "prompt": texts
        | st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": texts}), max_size=2),
        "response": texts,
        "label": st.none() | texts | st.integers(0, 30),
        "reward": st.none() | st.sampled_from([0.0, 0.5, 1.0]),
        "response_length": st.integers(0, 9),
    }
)


def index_of(folder: Path, cache: Path | None = None) -> SampleIndex:
    index = SampleIndex(folder, cache)
    index.update(read_stages(folder, {}))
    return index


def found(index: SampleIndex, query: Query, page: int = 3) -> list[dict[str, Any]]:
    """All pages."""
    rows, more = [], True
    while more:
        part, more = index.find(query, len(rows), page)
        assert part or not more
        rows += part
    return rows


def a_run(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("trigrams", "few", "late", "patience"),
    [(True, 3000, 25_000, 500), (True, 4, 9, 2), (True, 1, 1, 1), (False, 1, 1, 1)],
)
@settings(max_examples=20)
@given(lines=st.lists(records, max_size=12), data=st.data())
def test_a_search_finds_what_a_look_at_every_line_finds(
    tmp_path_factory: pytest.TempPathFactory,
    trigrams: bool,
    few: int,
    late: int,
    patience: int,
    lines: list[dict[str, Any]],
    data: st.DataObject,
) -> None:
    """Also where there are more matches, and lines in vain, than are looked at before the rest is
    narrowed down."""
    # whose parts are found, or nearly: one may reach over two lines
    said = "\n".join(map(searched_text, lines))
    parts = st.integers(0, len(said)).map(lambda start: said[start : start + 4]).filter(bool)
    any_words = st.text(LETTERS, min_size=1, max_size=5)
    words = data.draw(
        st.lists(any_words | parts.map(str.upper) | parts if said else any_words, max_size=2)
    )
    folder = a_run(tmp_path_factory.mktemp("run"))
    write_lines(folder / "samples" / "rollout_000000.jsonl", lines)
    index = index_of(folder)
    index.has_trigrams = index.has_trigrams and trigrams
    patch = pytest.MonkeyPatch()
    patch.setattr("slime.page.index._FEW", few)
    patch.setattr("slime.page.index._LATE", late)
    patch.setattr("slime.page.index._PATIENCE", patience)
    try:
        for name, down in itertools.product(("step", "reward", "length"), (False, True)):
            rows = found(index, Query(words=tuple(words), sort=name, descending=down))
            wanted = [
                line
                for line in lines
                if all(word.casefold() in searched_text(line) for word in words)
            ]
            assert sorted(map(repr, wanted)) == sorted(repr(row["record"]) for row in rows)
            values = [row[SORTS[name]] for row in rows if row[SORTS[name]] is not None]
            assert values == sorted(values, reverse=down)
            # what has no reward comes last
            assert all(row[SORTS[name]] is None for row in rows[len(values) :])
    finally:
        patch.undo()
        index.close()


@settings(max_examples=25)
@given(lines=st.lists(records, min_size=1, max_size=10), data=st.data())
def test_a_file_that_grew_in_pieces_is_indexed_as_a_whole_one(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    folder = a_run(tmp_path_factory.mktemp("run"))
    path = folder / "samples" / "rollout_000000.jsonl"
    path.parent.mkdir()
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=4)))
    grown = SampleIndex(folder)
    for start, end in itertools.pairwise([0, *cuts, len(content)]):
        with path.open("ab") as file:
            file.write(content[start:end])
        grown.update(read_stages(folder, {}))
    whole = index_of(folder)
    try:
        query = Query(sort="reward")
        one, other = found(grown, query), found(whole, query)
        assert [row["record"] for row in one] == [row["record"] for row in other]
        assert [row["above"] for row in one] == [row["above"] for row in other]
        assert (
            grown.steps("") == whole.steps("")
            and grown.groups(query)[0] != []
            and len(one) == len(lines)
        )
    finally:
        grown.close()
        whole.close()


def responses(index: SampleIndex, *words: str) -> list[str]:
    return [row["record"]["response"] for row in found(index, Query(words=words))]


def test_files_that_are_replaced_cut_short_or_gone_are_noticed(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    path = folder / "samples" / "rollout_000000.jsonl"
    write_lines(path, [{"response": "first answer"}, {"response": "second"}])
    index = index_of(folder)
    assert responses(index, "answer") == ["first answer"]
    path.with_suffix(".new").write_bytes(b'{"response": "other answer"}\n{"response": "sixth!"}\n')
    path.with_suffix(".new").replace(path)  # as a resumed run does
    index.update(read_stages(folder, {}))
    assert responses(index) == ["other answer", "sixth!"] and responses(index, "first") == []
    with path.open("r+b") as file:
        file.truncate(29)
    index.update(read_stages(folder, {}))
    assert responses(index) == ["other answer"]
    with path.open("ab") as file:
        file.write(b'\n{"response": "no end of the li')
    index.update(read_stages(folder, {}))
    assert responses(index) == ["other answer"]
    with path.open("ab") as file:
        file.write(b'ne"}')
    index.update(read_stages(folder, {}))
    assert responses(index, "no end", "line") == ["no end of the line"]
    path.unlink()
    index.update(read_stages(folder, {}))
    assert responses(index) == [] and index.steps("") == []
    index.close()


def test_an_index_is_kept_and_one_that_is_damaged_or_old_is_made_anew(tmp_path: Path) -> None:
    folder, cache = make_run(tmp_path / "run", rollouts=2), tmp_path / "cache"
    first = index_of(folder, cache)
    told = first.steps("")
    first.close()
    again = SampleIndex(folder, cache)  # without a look at the run
    assert again.steps("") == told and again.progress() == {"samples": 35, "texts": 35}
    assert not again.update(read_stages(folder, {}))
    again.close()
    (file,) = cache.glob("*.sqlite")
    for damage in (b"no database at all", b""):
        file.write_bytes(damage)
        mended = index_of(folder, cache)
        assert mended.steps("") == told
        mended.close()
    with sqlite3.connect(file) as older:
        older.execute("PRAGMA user_version = 99")
    older.close()
    mended = index_of(folder, cache)
    assert mended.steps("") == told
    mended.close()


def test_a_disk_that_was_full_for_a_while_leaves_no_trace(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=3)
    index = SampleIndex(folder)
    index._writer.execute("PRAGMA max_page_count = 1")  # no page more than there are
    with pytest.raises(sqlite3.OperationalError, match="full"):
        index.update(read_stages(folder, {}))
    index._writer.execute("PRAGMA max_page_count = 1000000")
    index.update(read_stages(folder, {}))
    assert index.progress() == {"samples": 51, "texts": 51}
    index.close()


def test_a_commit_that_fails_is_taken_back() -> None:
    class Refusing(sqlite3.Connection):
        refuses = True

        def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "COMMIT" and self.refuses:
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(sql, *values)

    connection = sqlite3.connect(":memory:", isolation_level=None, factory=Refusing)
    with pytest.raises(sqlite3.OperationalError, match="full"), transaction(connection):
        connection.execute("CREATE TABLE one (a)")
    connection.refuses = False
    with transaction(connection):
        connection.execute("CREATE TABLE one (a)")
    connection.close()


def test_an_index_that_another_process_holds_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, cache = make_run(tmp_path / "run", rollouts=1), tmp_path / "cache"
    index_of(folder, cache).close()
    (file,) = cache.glob("*.sqlite")
    inode = file.stat().st_ino
    monkeypatch.setattr("slime.page.index._BUSY_MS", 1)
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    second = index_of(folder, cache)
    assert second.progress() == {"samples": 19, "texts": 19} and file.stat().st_ino == inode
    second.close()
    holder.close()


def test_samples_are_there_while_the_rest_is_being_indexed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=3)
    index, seen = SampleIndex(folder), []

    def look() -> bool:
        seen.append((index.progress()["samples"], len(index.steps(""))))
        return True

    index.update(read_stages(folder, {}), look)
    assert seen[:4] == [(0, 0), (16, 1), (32, 2), (48, 3)] and seen[-1] == (51, 4)
    index.close()


def test_numbers_that_no_table_holds(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    large = {
        "group": 2**63,
        "index": 2**64 - 1,
        "reward": 2**64 - 1,
        "response_length": 2**63,
        "cached_tokens": -(2**63),
    }
    write_lines(
        folder / "samples" / "rollout_000000.jsonl",
        [large | {"response": "large"}, {"response": "small"}],
    )
    write_lines(folder / "samples" / f"rollout_{10**30}.jsonl", [{"response": "far"}])
    index = index_of(folder)
    assert sorted(responses(index)) == ["far", "large", "small"]
    index.close()


def test_a_file_of_a_single_group_is_no_more_work_than_one_of_many(tmp_path: Path) -> None:
    """Steps of SQLite while a file is read: as many again for as many rows again."""
    steps = []
    for count in (500, 2000):
        folder, work = a_run(tmp_path / f"{count}"), [0]
        rows = [{"response": "r", "reward": i % 2} for i in range(count)]
        write_lines(folder / "samples" / "rollout_000000.jsonl", rows)
        index = SampleIndex(folder)

        def step(work: list[int] = work) -> int:
            work[0] += 1
            return 0

        index._writer.set_progress_handler(step, 100)
        index.update(read_stages(folder, {}))
        steps.append(work[0])
        assert {row["above"] for row in found(index, Query())} == {-0.5, 0.5}
        index.close()
    assert steps[1] < 6 * steps[0]


def test_reward_against_the_group_groups_prompts_and_evaluations(tmp_path: Path) -> None:
    index = index_of(make_run(tmp_path / "run", rollouts=4, groups=3, size=4))
    rows = found(index, Query(step=2, group=4, sort="advantage", descending=True))
    mean = sum(row["reward"] for row in rows) / 4
    assert len(rows) == 4 and all(
        row["above"] == pytest.approx(row["reward"] - mean) for row in rows
    )
    spreads = [
        group["greatest"] - group["least"]
        for group in index.groups(Query(sort="spread", descending=True))[0]
    ]
    assert len(spreads) == 12 and spreads == sorted(spreads, reverse=True)
    same = found(index, Query(prompt=rows[0]["prompt"]))
    assert [row["step"] for row in same] == [2] * 4 + [4] * 4  # it was drawn twice
    held_out = found(index, Query(kind="eval"))
    assert [(row["step"], row["dataset"]) for row in held_out] == [(0, "sums")] * 3
    assert index.sample(held_out[0]["id"]) == held_out[0] and index.sample(10**9) is None
    index.close()


def test_one_and_two_characters_are_found_wherever_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a text no gram begins with them, in a text of one character there is none:
    these are made."""
    monkeypatch.setattr("slime.page.index._PATIENCE", 1)
    folder = a_run(tmp_path / "run")
    said = [
        "other", "zq at first", "in the zq midst", "at last zq", "z", "q", "zq", "ends in z",
        "\U0010ffff"
    ]  # fmt: skip
    write_lines(folder / "samples" / "rollout_000000.jsonl", [{"response": text} for text in said])
    index = index_of(folder)
    for word in ("z", "q", "zq", "ZQ", "xx", "\U0010ffff"):
        assert responses(index, word) == [text for text in said if word.lower() in text], word
    assert responses(index, "z", "q") == [text for text in said if "z" in text and "q" in text]
    index.close()


def test_groups_follow_the_samples_that_are_found_however_the_files_change(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=3, groups=3)
    index = index_of(folder)
    files = sorted((folder / "samples").glob("rollout_*.jsonl"))

    def grow() -> None:
        with files[0].open("ab") as file:
            file.write(b'{"group": 0, "reward": 9.0}\n{"reward": null}\n')

    changes = (
        lambda: None,
        lambda: write_lines(
            files[1], [{"group": 7, "reward": r, "status": "failed"} for r in (0.25, None, 0.75)]
        ),
        grow,
        lambda: files[2].unlink(),
    )
    for change in changes:
        change()
        index.update(read_stages(folder, {}))
        everything = found(index, Query())
        for query in (
            Query(),
            Query(status="completed"),
            Query(status="failed"),
            Query(words=("antenna",)),
        ):
            for sort, descending in itertools.product(
                ("step", "spread", "reward", "length"), (True, False)
            ):
                query = dataclasses.replace(query, sort=sort, descending=descending)
                rows, (groups, more) = found(index, query), index.groups(query, limit=100)
                first = {(row["step"], row["grp"]): row["id"] for row in reversed(rows)}
                assert [(g["step"], g["group"], g["id"]) for g in groups] == [
                    (*key, first[key])
                    for key in dict.fromkeys((row["step"], row["grp"]) for row in rows)
                ], "in the order of the samples that were found"
                assert not more and [index.groups(query, i, 1)[0] for i in range(len(groups))] == [
                    [g] for g in groups
                ]
                for group in groups:
                    place = (group["step"], group["group"])
                    all_of = [
                        row["reward"] for row in everything if (row["step"], row["grp"]) == place
                    ]
                    known = [reward for reward in all_of if reward is not None]
                    numbers = [group[name] for name in ("samples", "least", "mean", "greatest")]
                    mean = pytest.approx(sum(known) / len(known)) if known else None
                    assert numbers == [
                        len(all_of),
                        min(known, default=None),
                        mean,
                        max(known, default=None),
                    ]
    index.close()


def test_a_link_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    write_lines(tmp_path / "secret.jsonl", [{"response": "secret"}])
    (folder / "samples").mkdir()
    (folder / "samples" / "rollout_000000.jsonl").symlink_to(tmp_path / "secret.jsonl")
    index = index_of(folder)
    assert responses(index) == []
    index.close()


def test_one_sample_is_shown_with_what_training_knew_of_its_tokens(tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    lengths = {"prompt_length": 3, "response_length": 2}
    sample = {
        **lengths,
        "index": 5,
        "response": "ab",
        "tokens": {"text": ["a", "b"], "log_probs": [-1.0, -2.0]},
    }
    others = [
        {**sample, "index": 6},
        {**sample, "prompt_length": "odd"},
        {**sample, "tokens": None},
    ]
    write_lines(folder / "samples" / "rollout_000007.jsonl", [sample, *others])
    write_lines(folder / "samples" / "eval_000007.jsonl", [sample])
    index = index_of(folder)
    rows = found(index, Query())

    def tokens(number: int) -> dict[str, Any]:
        shown = index.sample(number)
        assert shown is not None
        return dict(shown["record"]["tokens"] or {})

    assert all("advantages" not in tokens(row["id"]) for row in rows), "it is not trained on yet"
    line = {
        "index": 5,
        "total_length": 5,
        "response_length": 2,
        "advantages": -0.5,
        "log_prob_diffs": [0.25, None],
    }
    trained = folder / "samples" / "trained_000007.jsonl"
    write_lines(trained, [{**line, "total_length": 6}, line])
    trained.write_bytes(b"half a line\n[1]\n" + trained.read_bytes())
    assert not index.update(read_stages(folder, {})), "these are no samples"
    told = [tokens(row["id"]) for row in rows]
    assert told[0] == sample["tokens"] | {
        "advantages": [-0.5, -0.5],
        "log_prob_diffs": [0.25, None],
    }
    assert not any("advantages" in one for one in told[1:])
    assert "advantages" not in tokens(found(index, Query(kind="eval"))[0]["id"])
    write_lines(trained, [{**line, "log_prob_diffs": [1.0]}])
    assert tokens(rows[0]["id"])["log_prob_diffs"] is None, "of other tokens"
    index.close()


@pytest.mark.parametrize(
    ("prompt", "question"),
    [
        ("What is 2 + 2?", "What is 2 + 2?"),
        (
            "<|im_start|>system\nBe "
            "kind.<|im_end|>\n<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n",
            "What?",
        ),
        ("<|im_start|>user<|im_sep|>What?<|im_end|><|im_start|>assistant<|im_sep|>", "What?"),
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nDate<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nWhat?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
            "What?",
        ),
        ("<bos><start_of_turn>user\nWhat?<end_of_turn>\n<start_of_turn>model\n", "What?"),
        ("<s>[INST] First [/INST] Yes.</s>[INST] What? [/INST]", "What?"),
        ("<｜begin▁of▁sentence｜>System.<｜User｜>What?<｜Assistant｜><think>\n", "What?"),
        (
            "<|start|>system<|message|>You<|end|><|start|>user<|message|>What?<|end|><|start|>assistant",
            "What?",
        ),
        (
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>What?<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>",
            "What?",
        ),
        (
            "<|im_user|>user<|im_middle|>What?<|im_end|><|im_assistant|>assistant<|im_middle|>",
            "What?",
        ),
        ("[gMASK]<sop><|system|>\nBe kind.<|user|>\nWhat?<|assistant|>\n", "What?"),
        ("<|system|>\nBe kind.</s>\n<|user|>\nWhat?</s>\n<|assistant|>\n", "What?"),
        ("<user>What?<end><assistant>", "What?"),
        ("Human: First\n\nAssistant: Yes.\n\nHuman: What?\n\nAssistant:", "What?"),
        (
            "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\nf()<|im_end|>\n<|im_start|>user\n"
            "<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            "What?",
        ),
        (
            "<|im_start|>user\nIs a < b or <b>a</b> > c?<|im_end|>\n<|im_start|>assistant\n",
            "Is a < b or <b>a</b> > c?",
        ),
        (
            [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What?"}],
            "What?",
        ),
        (
            [
                {"role": "user", "content": "What?"},
                {"role": "assistant", "content": "Hm"},
                {"role": "tool", "content": "4"},
            ],
            "What?",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
            "[image] What?",
        ),
        ([{"role": "system", "content": None}], ""),
        (["x"], "x"),
        ([], ""),
        (None, ""),
        ("", ""),
        ({"a": 1}, '{"a":1}'),
        ("<|im_start|>user\n<|im_end|>", "<|im_start|>user\n<|im_end|>"),
    ],
)
def test_the_question_of_a_prompt_is_its_last_user_turn(prompt: Any, question: str) -> None:
    assert question_of(prompt) == question
    assert short_texts({"prompt": prompt, "label": ["4"]})["label"] == '["4"]'


@given(
    st.text()
    | st.recursive(
        st.none() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_every_prompt_has_a_question(prompt: Any) -> None:
    texts = short_texts({"prompt": prompt, "response": prompt, "label": prompt}, 7)
    assert set(texts) == {"question", "response", "label"} and all(
        len(text) <= 7 for text in texts.values()
    )
