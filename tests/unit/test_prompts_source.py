"""The prompt source: order, wrap-around, resume by what was consumed, buffer."""

from __future__ import annotations

import contextvars
import copy
import logging
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.compat.sources import RolloutDataSource
from slime.config import make_config, parse_args
from slime.errors import UserError
from slime.prompts.source import PromptSource, load_source, make_source, save_source, source_again
from slime.samples.types import Sample
from slime.user_code.hooks import DataSource, check_hooks
from tests.support.prompt_fixtures import make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_jsonl(
        tmp_path_factory.mktemp("data") / "d.jsonl",
        [{"input": f"p{i}", "answer": i} for i in range(7)],
    )


def make(data: str, **flags: Any) -> PromptSource:
    flags = {
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "num_rollout": 1,
        "prompt_data": data,
        **flags,
    }
    return PromptSource(make_config(**flags), TOKENIZER)


def prompts(groups: list[list[Sample]]) -> list[Any]:
    return [group[0].prompt for group in groups]


def test_groups_are_independent_copies_with_monotonic_indices(data: str) -> None:
    source = make(data, label_key="answer")
    groups = source.get_samples(3)
    assert [[(s.group_index, s.index) for s in g] for g in groups] == [
        [(0, 0), (0, 1)],
        [(1, 2), (1, 3)],
        [(2, 4), (2, 5)],
    ]
    groups[0][0].metadata["mine"] = 1
    assert groups[0][1].metadata == {}
    assert (groups[2][0].prompt, groups[2][0].label, len(source)) == ("p2", "2", 7)


def test_one_call_may_wrap_over_several_epochs(data: str) -> None:
    assert prompts(make(data).get_samples(17)) == [f"p{i % 7}" for i in range(17)]


@pytest.mark.parametrize("streaming", [False, True])
def test_each_epoch_is_a_new_permutation_of_the_original_order(data: str, streaming: bool) -> None:
    drawn = prompts(make(data, rollout_shuffle=True, streaming_data=streaming).get_samples(21))
    epochs = [drawn[:7], drawn[7:14], drawn[14:]]
    assert all(sorted(epoch) == [f"p{i}" for i in range(7)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert drawn == prompts(
        make(data, rollout_shuffle=True, streaming_data=streaming).get_samples(21)
    )
    assert drawn != prompts(
        make(data, rollout_shuffle=True, streaming_data=streaming, rollout_seed=1).get_samples(21)
    )


def test_streaming_knows_no_length(data: str) -> None:
    with pytest.raises(UserError, match="not known with --streaming-data"):
        len(make(data, streaming_data=True))


# -- resume ----------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["draw", "consume", "put back", "resume"]), st.integers(0, 5)),
    min_size=1,
    max_size=30,
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of which some are too long, and some cannot be used."""
    rows = [
        {"input": "long"},
        *({"input": f"p{i}"} for i in range(4)),
        {"inptu": "p"},
        {"input": "p4"},
        {"input": ""},
    ]
    return write_jsonl(tmp_path_factory.mktemp("mixed") / "d.jsonl", rows)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"rollout_shuffle": True},
        {"rollout_shuffle": True, "streaming_data": True},
        pytest.param({"rollout_shuffle": True, "rollout_max_prompt_len": 2}, id="unchecked rows"),
    ],
)
@given(steps=STEPS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_any_history_every_draw_is_consumed_once_and_is_what_it_always_was(
    data, mixed, monkeypatch, flags, steps
) -> None:
    """Draw, consume, put back, and resume from a saved state in any order: draw k is always the
    same prompt with the same indices, an unfinished draw comes again, and a finished one never
    does."""
    if "rollout_max_prompt_len" in flags:
        monkeypatch.setattr("slime.prompts.source.ALL_ROWS", 4)
        data = mixed
    always = {
        group[0].group_index: group[0].prompt for group in make(data, **flags).get_samples(100)
    }
    source, under_way, consumed = make(data, **flags), [], set()
    for action, number in steps:
        if action == "draw":
            under_way.extend(source.get_samples(number))
        elif action == "consume" and under_way:
            group = under_way.pop(number % len(under_way))
            source.mark_consumed([group[0].group_index])
            consumed.add(group[0].group_index)
        elif action == "put back" and under_way:
            group = under_way.pop(number % len(under_way))
            group[0].response = "partial"
            source.add_samples([group])
        elif action == "resume":
            state = pickle.loads(pickle.dumps(source.state_dict()))
            source, under_way = make(data, **flags), []
            source.load_state_dict(state)
        for group in under_way:
            index = group[0].group_index
            assert index not in consumed
            assert group[0].prompt == always[index]
            assert [s.index for s in group] == [2 * index, 2 * index + 1]
        indices = [group[0].group_index for group in under_way]
        assert len(set(indices)) == len(indices), "no draw is under way twice"
    state = source.state_dict()
    source = make(data, **flags)
    source.load_state_dict(state)
    rest = {group[0].group_index for group in source.get_samples(100 - len(consumed))}
    assert rest | consumed == set(range(100)) and not rest & consumed, "nothing lost, nothing twice"


def test_resume_draws_undone_groups_again_in_the_same_order(data: str) -> None:
    source = make(data, rollout_shuffle=True)
    drawn = source.get_samples(6)
    source.mark_consumed([0, 1, 4])
    source.mark_discarded([2])
    resumed = make(data, rollout_shuffle=True)
    resumed.load_state_dict(source.state_dict())
    again = resumed.get_samples(4)
    assert [g[0].group_index for g in again] == [3, 5, 6, 7]
    assert prompts(again)[:2] == [drawn[3][0].prompt, drawn[5][0].prompt]
    assert prompts(again)[2:] == prompts(source.get_samples(2)), (
        "an unbroken run goes on with the same prompts"
    )


def test_buffered_groups_survive_a_resume_with_their_partial_responses(data: str) -> None:
    source = make(data)
    groups = source.get_samples(3)
    groups[1][0].append_response_tokens(tokens=[7], log_probs=[-0.5], text="x")
    source.add_samples([groups[1]])
    source.mark_consumed([0, 2])
    resumed = make(data)
    resumed.load_state_dict(copy.deepcopy(source.state_dict()))
    first, second = resumed.get_samples(2)
    assert (first[0].group_index, first[0].response, first[0].rollout_log_probs) == (1, "x", [-0.5])
    assert (second[0].group_index, second[0].prompt) == (3, "p3")


@pytest.mark.parametrize("streaming", [False, True])
def test_other_data_after_a_resume_starts_at_its_beginning(
    data: str, tmp_path: Path, streaming: bool
) -> None:
    source = make(data, streaming_data=streaming)
    source.get_samples(4)
    source.mark_consumed([0, 1, 3])
    path = write_jsonl(tmp_path / "other.jsonl", [{"input": f"q{i}"} for i in range(3)])
    other = make(path, streaming_data=streaming)
    other.load_state_dict(source.state_dict())
    group = other.get_samples(1)[0]
    assert (group[0].prompt, group[0].group_index) == ("q0", 4)


def test_another_order_after_a_resume_is_said(data: str, caplog: pytest.LogCaptureFixture) -> None:
    state = make(data, rollout_shuffle=True).state_dict()
    make(data, rollout_shuffle=True).load_state_dict(state)
    assert not caplog.records
    for flags in ({"rollout_shuffle": True, "rollout_seed": 7}, {}):
        make(data, **flags).load_state_dict(state)
        assert (
            "order of the data was shuffled with seed 42" in caplog.text
            and "some not at all" in caplog.text
        )
        caplog.clear()


def test_a_run_that_began_in_the_order_of_the_data_goes_on_so_where_no_flag_says_otherwise(
    data: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Shuffling is a run's default; a checkpoint of a run without keeps its order, and a flag
    decides."""
    source = make(data)
    source.get_samples(3)
    source.mark_consumed([0, 1, 2])
    state = source.state_dict()

    def resumed(*words: str) -> PromptSource:
        base = [
            "--hf-checkpoint",
            "m",
            "--prompt-data",
            data,
            "--num-rollout",
            "1",
            "--rollout-batch-size",
            "2",
        ]
        source = PromptSource(parse_args([*base, "--n-samples-per-prompt", "2", *words]), TOKENIZER)
        source.load_state_dict(state)
        return source

    goes_on = resumed()
    assert prompts(goes_on.get_samples(11)) == [f"p{i % 7}" for i in range(3, 14)]
    assert goes_on.state_dict()["shuffling"] == state["shuffling"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert prompts(resumed("--rollout-shuffle").get_samples(4)) != [f"p{i}" for i in range(3, 7)]
    assert "some not at all" in caplog.text


# -- buffer and other sources ----------------------------------------------------------------------


def test_put_back_groups_come_first_and_a_filter_may_choose(
    data: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "my_buffer_filter.py").write_text(
        "def newest(args, rollout_id, buffer, num_samples):\n    return [buffer.pop()]\n"
        "def keeps(args, rollout_id, buffer, num_samples):\n    return buffer[:1]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for flags, expected in [
        ({}, ["p0", "p1"]),
        ({"buffer_filter_path": "my_buffer_filter.newest"}, ["p1", "p2"]),
    ]:
        source = make(data, **flags)
        source.add_samples(source.get_samples(2))
        assert prompts(source.get_samples(2)) == expected
    source = make(data, buffer_filter_path="my_buffer_filter.keeps")
    source.add_samples(source.get_samples(1))
    with pytest.raises(UserError, match="returned 1 groups of 1 asked for and removed 0"):
        source.get_samples(1)


class Counting(DataSource):
    """Resumes through files of its own, at what was consumed."""

    def __init__(self, args: Any) -> None:
        self.args, self.next, self.consumed = args, 0, 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        self.next += num_samples
        return [[Sample(group_index=i, index=i)] for i in range(self.next - num_samples, self.next)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise AssertionError

    def mark_consumed(self, group_indices: Iterable[int]) -> None:
        self.consumed = max([self.consumed, *(index + 1 for index in group_indices)])

    def save(self, rollout_id: int) -> None:
        (Path(self.args.save) / f"source_{rollout_id}").write_text(str(self.consumed))

    def load(self, rollout_id: int | None = None) -> None:
        self.next = self.consumed = int((Path(self.args.load) / f"source_{rollout_id}").read_text())


def counting(**flags: Any) -> tuple[Any, DataSource]:
    config = make_config(num_rollout=1, data_source_path=f"{__name__}.Counting", **flags)
    return config, make_source(config, TOKENIZER)


def test_a_users_source_writes_with_each_checkpoint_and_resumes_from_it(tmp_path: Path) -> None:
    config, source = counting(save=str(tmp_path))
    source.get_samples(5)
    source.mark_consumed([0, 1, 2])
    state = save_source(source, config, 7)
    assert state == {}
    config, source = counting(load=str(tmp_path))
    load_source(source, config, 7, state)
    assert [group[0].index for group in source.get_samples(1)] == [3]
    with pytest.raises(UserError, match=r"Counting.load\(8\) failed") as caught:
        load_source(source, config, 8, state)
    assert "source_8" in caught.value.why


def test_a_users_source_goes_back_to_a_checkpoint_that_its_launch_did_not_load(
    tmp_path: Path,
) -> None:
    """The trainer alone has begun again: with --save and no --load the source was built with no
    place to read from."""
    config, source = counting(save=str(tmp_path))
    source.get_samples(5)
    source.mark_consumed([0, 1, 2])
    state = save_source(source, config, 7)
    source.mark_consumed([3, 4])
    loads = make_config(
        num_rollout=1,
        data_source_path=f"{__name__}.Counting",
        save=str(tmp_path),
        load=str(tmp_path),
    )
    again = source_again(source, loads, TOKENIZER)
    load_source(again, loads, 7, state)
    assert [group[0].index for group in again.get_samples(1)] == [3]


def test_a_users_source_goes_back_to_where_it_began(tmp_path: Path) -> None:
    """There is no checkpoint yet, and so no file of the source's to be read, also where --load
    names the place."""
    config, source = counting(save=str(tmp_path), load=str(tmp_path))
    at_launch = source.state_dict()
    source.get_samples(5)
    again = source_again(source, config, TOKENIZER)
    load_source(again, config, None, at_launch)
    assert [group[0].index for group in again.get_samples(1)] == [0]


def test_a_users_source_writes_nothing_where_no_checkpoint_is_written(tmp_path: Path) -> None:
    config, source = counting(save_hf=str(tmp_path / "{rollout_id}"))
    assert save_source(source, config, 7) == {} and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["RolloutDataSource", "RolloutDataSourceWithBuffer"])
def test_the_reference_systems_own_source_is_the_built_in_one(data: str, name: str) -> None:
    flags = {"num_rollout": 1, "prompt_data": data, "n_samples_per_prompt": 2}
    path = f"slime.rollout.data_source.{name}"
    config = make_config(
        data_source_path=path, buffer_filter_path="slime.rollout.data_source.pop_first", **flags
    )
    check_hooks(config.flat())
    source = make_source(config, TOKENIZER)
    assert isinstance(source, PromptSource) and prompts(source.get_samples(2)) == ["p0", "p1"]


def test_plugins_derive_from_the_built_in_source(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reversed(RolloutDataSource):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return super().get_samples(num_samples)[::-1]

    monkeypatch.setitem(globals(), "Reversed", Reversed)
    config = make_config(num_rollout=1, prompt_data=data, data_source_path=f"{__name__}.Reversed")
    assert prompts(make_source(config, TOKENIZER).get_samples(2)) == ["p1", "p0"]
    with pytest.raises(UserError, match="Reversed is built where there is no run"):
        contextvars.Context().run(Reversed, config.flat())


def test_without_a_data_set_prompts_are_blank(data: str) -> None:
    group = make(data, rollout_global_dataset=False).get_samples(2)[1]
    assert [(s.prompt, s.group_index, s.index) for s in group] == [("", 1, 2), ("", 1, 3)]


def test_a_source_of_the_users_own(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "my_source.py").write_text(
        "from slime.user_code.hooks import DataSource\nfrom slime.samples.types import Sample\n"
        "class Mine(DataSource):\n"
        "    def __init__(self, args): self.n = args.n_samples_per_prompt\n"
        "    def get_samples(self, num_samples): return [[Sample(prompt='x')] * self.n] * "
        "num_samples\n"
        "    def add_samples(self, samples): pass\n"
        "class Broken:\n    def __init__(self, args): pass\n"
        "class Half(DataSource):\n    def add_samples(self, samples): pass\n"
        "class Picky(Mine):\n    def __init__(self, args, more): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = make_config(
        rollout_batch_size=1,
        n_samples_per_prompt=3,
        num_rollout=1,
        data_source_path="my_source.Mine",
    )
    source = make_source(config, TOKENIZER)
    assert len(source.get_samples(2)[1]) == 3
    with pytest.raises(UserError, match="does not say how many prompts"):
        len(source)
    for name, said in [
        ("Broken", "is no DataSource"),
        ("Half", "lacks get_samples"),
        ("Picky", "'more'"),
    ]:
        config = make_config(
            rollout_batch_size=1, num_rollout=1, data_source_path=f"my_source.{name}"
        )
        with pytest.raises(UserError, match=said):
            make_source(config, TOKENIZER)
