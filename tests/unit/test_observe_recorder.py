"""Recorded samples: every field readable, whatever users put into a sample."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.files import dump_line, json_safe, read_lines, write_atomically
from slime.observe.recorder import (
    Recorder,
    TokenTexts,
    run_lengths,
    sample_record,
    segments,
    spread,
)
from slime.observe.trace import span
from slime.samples.batch import TrainedTokens
from slime.samples.types import Group, Sample
from tests.support.run_folders import create_run


def decode(ids: list[int]) -> str:
    return "".join(chr(97 + i) for i in ids)


def two_turns(index: int = 0) -> Sample:
    sample = Sample(
        group_index=0, index=index, prompt="2+2?", tokens=[20, 21], label="4", reward=1.0
    )
    sample.append(
        tokens=[0, 1], log_probs=[-1.0, -3.0], text="ab", meta_info={"weight_version": "3"}
    )
    sample.append(tokens=[2], trainable=False, text="c")
    finish = {"finish_reason": {"type": "stop"}, "weight_version": "4"}
    sample.append(tokens=[3, 4], log_probs=[-2.0, -2.0], text="de", meta_info=finish)
    return sample


@given(st.lists(st.integers(0, 1)))
def test_run_lengths_are_lossless_and_short(mask: list[int]) -> None:
    runs = run_lengths(mask)
    assert [value for value, count in runs for _ in range(count)] == mask
    assert all(a[0] != b[0] for a, b in itertools.pairwise(runs))


def test_one_line_holds_what_a_reader_wants_to_know() -> None:
    record = sample_record(two_turns(), decode)
    assert record["prompt"] == "2+2?" and record["response"] == "abcde" and record["label"] == "4"
    assert (record["prompt_length"], record["response_length"], record["trained_tokens"]) == (
        2,
        5,
        4,
    )
    assert record["loss_mask"] == [[1, 2], [0, 1], [1, 2]]
    assert record["log_probs"] == {"mean": -2.0, "min": -3.0}
    assert record["status"] == "completed" and record["weight_versions"] == ["4"]
    assert record["segments"] == [
        {"text": "ab", "trained": True, "version": 3},
        {"text": "c", "trained": False, "version": None},
        {"text": "de", "trained": True, "version": 4},
    ]


def test_removed_samples_train_nothing() -> None:
    sample = two_turns()
    sample.remove_sample = True
    assert sample_record(sample)["trained_tokens"] == 0


def test_plain_responses_need_no_segments() -> None:
    sample = Sample(tokens=[1, 2, 3], response_length=2, response="bc")
    assert segments(sample, decode) == []
    assert segments(Sample(), decode) == []


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None))
    | st.binary()
    | st.sampled_from([object(), {1}, (1, 2), Path("/x")]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(anything)
def test_any_metadata_becomes_json_that_reads_back(value: Any) -> None:
    sample = Sample(
        prompt="p", metadata={"user": value}, label=value, reward={"score": 1.0, "extra": value}
    )
    line = dump_line(sample_record(sample))
    assert line.count(b"\n") == 1
    assert json.loads(line)["metadata"].keys() == {"user"}


class Unshown:
    """Like a user's class whose __init__ has not set what its texts are made of."""

    def __repr__(self) -> str:
        raise AttributeError("name")


def test_values_without_a_repr_are_named_by_their_class() -> None:
    sample = Sample(prompt="p", metadata={"mine": Unshown(), Unshown(): 1})
    line = json.dumps(sample_record(sample))
    assert line.count("<Unshown, whose repr raises AttributeError>") == 2


def test_a_failure_that_cannot_be_recorded_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path, make_config(rollout_batch_size=1, num_rollout=1))
    (tmp_path / "samples").write_text("a file where the folder was")
    recorder.record_failure(3, [Sample(prompt="p")], "reward", ValueError("mine"))
    assert "failed_000003.jsonl" in caplog.text


def test_long_texts_are_cut_and_say_so() -> None:
    assert json_safe("x" * 50, max_text=10) == "x" * 10 + "… [40 more characters]"
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    json.dumps(json_safe(deep))


def groups(count: int, size: int) -> list[Group]:
    return [
        Group(
            g,
            [
                [Sample(group_index=g, index=g * size + i, prompt="p", response="r")]
                for i in range(size)
            ],
        )
        for g in range(count)
    ]


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 100))
def test_spread_keeps_whole_groups_within_the_limit(count: int, size: int, limit: int) -> None:
    kept = spread(groups(count, size), limit)
    assert 1 <= len(kept) <= count
    assert len(kept) * size <= limit or len(kept) == 1
    assert len({group.index for group in kept}) == len(kept)


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    config = make_config(
        output_dir=str(tmp_path),
        run_name="r",
        stage="rl",
        rollout_batch_size=4,
        num_rollout=1,
        prompt_data="d",
        hf_checkpoint="m",
    )
    return Recorder(create_run(config).path, config, decode, max_samples=8)


def test_rollouts_and_traces_are_written(recorder: Recorder, tmp_path: Path) -> None:
    drawn = groups(4, 4)
    with span(drawn[0].samples, "generate_and_rm_group"):
        pass
    recorder.record_rollout(12, drawn)
    folder = tmp_path / "r"
    rows = read_lines(folder / "samples" / "rl" / "rollout_000012.jsonl")
    assert [(row["rollout_id"], row["group"]) for row in rows] == [(12, 0)] * 4 + [(12, 2)] * 4
    trace = json.loads((folder / "trace" / "rl" / "rollout_000012.json").read_text())
    assert sum(e["name"] == "generate_and_rm_group" for e in trace["traceEvents"]) == 4


def with_tokens(index: int, tokens: list[int], response: int) -> Sample:
    return Sample(
        group_index=0,
        index=index,
        tokens=tokens,
        response_length=response,
        rollout_log_probs=[0.0] * response,
    )


def test_what_training_knew_of_recorded_tokens_is_kept_beside_them(
    recorder: Recorder, tmp_path: Path
) -> None:
    # of one trajectory, and as long
    siblings = [with_tokens(7, [1, 2, 3], 2), with_tokens(7, [4, 5, 3], 2)]
    samples = [
        with_tokens(5, [1, 2, 3], 2),
        with_tokens(6, [1, 2], 0),
        *siblings,
        with_tokens(7, [4, 5], 1),
    ]
    drawn = [Group(0, [[sample] for sample in samples])]
    assert recorder.token_keys(drawn) == {(5, 3, 2), (7, 2, 1)}
    folder = tmp_path / "r" / "samples" / "rl"
    recorder.record_rollout(3, drawn)
    recorder.record_training(3, [])
    assert [path.name for path in folder.iterdir()] == ["rollout_000003.jsonl"]
    half, other = np.array([0.5, 0.5], "float32"), np.array([0.12345, np.nan], "float32")
    recorder.record_training(
        3, [TrainedTokens((7, 2, 1), other[:1]), TrainedTokens((5, 3, 2), half, other)]
    )
    rows = read_lines(folder / "trained_000003.jsonl")
    assert rows[0] == {"index": 5, "total_length": 3, "response_length": 2, "advantages": 0.5,
                       "log_prob_diffs": [0.1235, None]}  # fmt: skip
    assert rows[1]["advantages"] == 0.1235 and rows[1]["log_prob_diffs"] is None
    recorder.record_rollout(3, drawn)  # done again: other tokens
    assert [path.name for path in folder.iterdir()] == ["rollout_000003.jsonl"]


def test_no_more_tokens_are_asked_for_than_are_recorded(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.observe.recorder.MAX_TOKENS", 3)
    drawn = [Group(i, [[with_tokens(i, [0] * 4, length)]]) for i, length in enumerate((2, 2, 1))]
    assert recorder.token_keys(drawn) == {(0, 4, 2), (2, 4, 1)}
    recorder.record_rollout(0, drawn)
    rows = read_lines(recorder._run.samples / "rollout_000000.jsonl")
    assert [row["index"] for row in rows if row.get("tokens")] == [0, 2]


def test_evaluations_before_and_after_training_are_kept_apart(
    recorder: Recorder, tmp_path: Path
) -> None:
    data = {"aime": {"rewards": [1.0], "truncated": [0], "samples": groups(1, 1)[0].samples}}
    recorder.record_rollout(0, groups(1, 1))
    recorder.record_evaluation("eval_start", 0, data)
    recorder.record_evaluation("eval_000000", 0, data)
    folder = tmp_path / "r" / "samples" / "rl"
    assert sorted(p.name for p in folder.iterdir()) == [
        "eval_000000.jsonl",
        "eval_start.jsonl",
        "rollout_000000.jsonl",
    ]
    assert read_lines(folder / "eval_start.jsonl")[0]["dataset"] == "aime"


def test_readers_never_see_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, b"old")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_half_written_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n\n[1]\n{"a": 2}\n{"a": ')
    assert read_lines(path) == [{"a": 1}, {"a": 2}]
    assert read_lines(tmp_path / "none") == []


def test_tokens_are_kept_one_by_one_until_the_file_has_enough(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.observe.recorder.MAX_TOKENS", 5)
    drawn = groups(1, 3)
    for (sample,) in drawn[0].trajectories:
        sample.tokens, sample.response_length, sample.rollout_log_probs = (
            [7, 1, 2, 3],
            3,
            [-0.12345, -1.0, math.nan],
        )
    drawn[0].trajectories[2][0].tokens = [7, 1, 2]
    drawn[0].trajectories[2][0].response_length = 2
    drawn[0].trajectories[2][0].rollout_log_probs = None
    recorder.record_rollout(0, drawn)
    kept = [
        row.get("tokens")
        for row in read_lines(tmp_path / "r" / "samples" / "rl" / "rollout_000000.jsonl")
    ]
    texts = [decode([token]) for token in (1, 2, 3)]
    assert (
        kept
        == [
            {"text": texts, "log_probs": [-0.123, -1.0, None]},
            None,  # it has no room
            {"text": texts[:2], "log_probs": None},
        ]
    )


def test_a_token_reads_as_it_does_within_a_text() -> None:
    def stripping(tokens: list[int]) -> str:
        return "".join([" the", " cat", "s", "�"][token] for token in tokens).removeprefix(" ")

    asked = TokenTexts(stripping)
    assert asked.of([0, 1, 2, 3, 0]) == [" the", " cat", "s", "�", " the"]


def test_a_character_of_several_tokens_stands_at_the_first_of_them() -> None:
    def of_bytes(tokens: list[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")

    said = "a\U0001f642\U0001f642é!"
    smile = ["\U0001f642", "", "", ""]
    texts = TokenTexts(of_bytes)
    assert texts.of(list(said.encode())) == ["a", *smile, *smile, "é", "", "!"]
    assert texts.of([0xF0, 0x9F, 65, 0xC3, 0xA9]) == ["\ufffd", "\ufffd", "A", "é", ""]


def test_tokens_that_the_tokenizer_does_not_know_end_no_rollout() -> None:
    def refuses(tokens: list[int]) -> str:
        if min(tokens) < 0:
            raise OverflowError("number too small to fit in target type")
        return decode(tokens)

    assert TokenTexts(refuses).of([1, -1, 2]) == ["b", "<-1>", "c"]
