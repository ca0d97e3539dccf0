"""``--rm-type ifbench``: how a row reaches the checkers of if-verifiable, and what is refused and
never scores 0."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, make_config
from slime.errors import UserError
from slime.rollout.rewards import instructions
from slime.rollout.rewards.instructions import (
    NEEDS_DATA,
    check_data,
    check_task,
    follows_all,
    read_task,
)
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.validate_rows import validate_data
from slime.samples.types import Sample
from tests.support.prompt_fixtures import make_tokenizer

with_package = pytest.mark.skipif(
    importlib.util.find_spec("if_verifiable") is None,
    reason="if-verifiable is not installed: pip install 'slime-rl[ifbench]'",
)


def of(*names: str, **arguments: Any) -> dict[str, Any]:
    """Metadata with these instructions, each with the same arguments."""
    return {"instruction_id_list": list(names), "kwargs": [dict(arguments) for _ in names]}


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NLTK's data is in this folder alone, in this process and in those of a pool: of all languages
    the shortest."""
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    (tmp_path / "tokenizers/punkt_tab/english").mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (tmp_path / "tokenizers/punkt_tab/english" / name).touch()
    return tmp_path


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "task"),
    [
        (of("a:b", N=1, n=None), [("a:b", {"N": 1})]),
        (of("a:b", N=3.0, n=float("nan"), p=0.5), [("a:b", {"N": 3, "p": 0.5})]),
        (
            {"instruction_id_list": ["a:b ", "c:d"], "kwargs": {"N": 1}},
            [("a:b", {"N": 1}), ("c:d", {"N": 1})],
        ),
        ({"instruction_id_list": ["a:b", "c:d"], "kwargs": [{}, None]}, [("a:b", {}), ("c:d", {})]),
        ({"instruction_id_list": ["a:b"]}, [("a:b", {})]),
    ],
)
def test_rows_have_the_fields_of_the_benchmarks(metadata: dict[str, Any], task: Any) -> None:
    found = read_task(metadata, "here")
    assert found == task
    assert all(type(args["N"]) is int for _, args in found if "N" in args), "not 3.0"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        (None, "finds no instructions"),
        ({"instruction_id_list": []}, "finds no instructions"),
        ({"instruction_id_list": "a:b"}, "is 'a:b'"),
        ({"instruction_id_list": ["a:b", "c:d"], "kwargs": [{}]}, "its 2 instructions"),
        ({"instruction_id_list": ["a:b"], "kwargs": ["N"]}, "its 1 instructions"),
    ],
)
def test_rows_without_instructions_are_no_wrong_answers(metadata: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as refused:
        read_task(metadata, "a.jsonl:3")
    assert refused.value.what.startswith("a.jsonl:3: ")


def test_a_launch_without_the_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "if_verifiable" else there(name)
    )
    with pytest.raises(UserError, match="needs the package if-verifiable") as refused:
        RewardPool(make_config(rollout_batch_size=1, num_rollout=1, rm_type="boxed_ifbench"))
    assert refused.value.fix == "pip install 'slime-rl[ifbench]'"
    row = {"input": "x", "metadata": {"rm_type": "ifbench", **of("count:numbers", N=1)}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="needs the package if-verifiable"):
        check_rows(
            make_config(num_rollout=1, prompt_data=str(tmp_path / "rows.jsonl"), rm_type="random")
        )


def check_rows(config: Config) -> None:
    error = validate_data(config, make_tokenizer()).error
    if error is not None:
        raise error


# -- the package -----------------------------------------------------------------------------------


@with_package
def test_it_is_imported_without_the_network() -> None:
    code = (
        "import socket, sys\n"
        "def refuse(*_, **__): sys.exit('it asks the network')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from slime.rollout.rewards.instructions import follows_all\n"
        "print(follows_all('1 and 2', [('count:numbers', {'N': 2})]), 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.split() == ["1.0", "False"], ran.stderr


@with_package
@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("1, 2, 3, no spaces? and no commas", 0.0),
        ("1 2 3", 1.0),
        ("1 2 3, 4", 0.0),
        ("<think>1, 2, 3, 4, 5</think>1 2 3", 1.0),
        ("<think>1 2 3", 0.0),
        ("", 0.0),
    ],
)
def test_all_instructions_are_to_be_followed(response: str, reward: float) -> None:
    """One of each benchmark."""
    task = [("count:numbers", {"N": 3}), ("punctuation:no_comma", {})]
    assert follows_all(response, task) == reward


@with_package
def test_what_a_checker_trips_over_is_not_followed() -> None:
    assert follows_all("...", [("format:quote_unquote", {})]) == 0.0


@with_package
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ([("count:nmbers", {"N": 3})], "did you mean 'count:numbers'"),
        ([("count:numbers", {"number": 3})], "does not take these arguments"),
        ([("repeat:repeat_span", {})], "prompt_to_repeat must be set"),
        ([("ratio:overlap", {})], "does not take these arguments: {}"),
        ([("keywords:frequency", {"keyword": "**"})], "does not take these arguments"),
    ],
)
def test_instructions_that_nobody_can_judge(task: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_task(task)


@with_package
def test_what_arguments_leave_open_is_drawn_once_per_row() -> None:
    texts = [" ".join("1" for _ in range(count)) for count in range(1, 7)]
    before = random.getstate()
    seen = {tuple(follows_all(text, [("count:numbers", {})]) for text in texts) for _ in range(3)}
    assert len(seen) == 1 and sum(*seen) == 1.0
    assert random.getstate() == before, "it draws from nobody else's numbers"


# -- NLTK's data -----------------------------------------------------------------------------------


@with_package
def test_which_checkers_need_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are asked, on text that has what they look for."""
    monkeypatch.setattr("nltk.data.path", [])
    given = {
        "words:keywords_specific_position": {"keyword": "keyword", "n": 1, "m": 1},
        "ratio:overlap": {"reference_text": "Say it again", "percentage": 50},
        **{
            name: {"prompt_to_repeat": "Say it"}
            for name in ("repeat:repeat_change", "combination:repeat_prompt")
        },
        "repeat:repeat_span": {"prompt_to_repeat": "Say it again now", "n_start": 1, "n_end": 2},
    }
    lacking = set()
    for name, checker in instructions._checkers().items():
        judge = checker(name)
        judge.build_description(**given.get(name, {}))
        try:
            judge.check_following("One Keyword here. " * 60)
        except LookupError as error:
            assert type(error) is LookupError, name
            lacking.add(name)
    assert lacking == set(NEEDS_DATA)


@with_package
def test_missing_data_is_named_with_what_gets_it(words: Path) -> None:
    with pytest.raises(
        UserError, match="the checkers of ratio:stop_words, words:start_verb need"
    ) as refused:
        check_data(["words:start_verb", "ratio:stop_words", "count:numbers", "format:title_case"])
    assert refused.value.fix.startswith(
        "python -m nltk.downloader averaged_perceptron_tagger_eng stopwords, on each"
    )
    with pytest.raises(UserError, match="need NLTK data"):
        follows_all("The end", [("words:start_verb", {})])


@with_package
def test_data_that_the_table_does_not_know_is_no_zero(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(instructions.NEEDS_DATA, "ratio:stop_words", ())
    with pytest.raises(UserError, match="of ratio:stop_words need NLTK data") as refused:
        follows_all("The end", [("ratio:stop_words", {"percentage": 50})])
    assert "'stopwords' not found" in refused.value.why


@with_package
def test_data_that_is_here_is_used(words: Path) -> None:
    assert follows_all("The Cat Sat", [("format:title_case", {})]) == 1.0
    assert follows_all("The cat sat", [("format:title_case", {})]) == 0.0
    two = [("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"})]
    assert follows_all("One. Two are here.", two) == 1.0 and follows_all("One is here.", two) == 0.0


# -- a run -----------------------------------------------------------------------------------------


def config_for(rows: list[dict[str, Any]], folder: Path, **flags: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"input": "x", "metadata": metadata}) + "\n" for metadata in rows)
    )
    return make_config(
        **{"num_rollout": 1, "prompt_data": str(path), "rm_type": "ifbench", **flags}
    )


@with_package
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, r"rows.jsonl:2\)\s+why: .*--rm-type ifbench finds no instructions"),
        (of("count:nmbers"), r"rows.jsonl:2\)\s+why: no instruction .* 'count:nmbers'"),
        (of("format:title_case", "ratio:stop_words"), "of ratio:stop_words need NLTK data"),
    ],
)
def test_rows_are_looked_at_before_a_launch(words: Path, row: dict[str, Any], said: str) -> None:
    good = of("count:numbers", N=1)
    with pytest.raises(UserError, match=said):
        check_rows(config_for([good, row], words))
    check_rows(config_for([good, {"rm_type": "random", **row}], words))
    check_rows(config_for([good, row], words, custom_rm_path="their.function"))
    asked = {
        "rm_type": "random",
        "eval_prompt_data": ["set", str(words / "rows.jsonl")],
        "eval_interval": 1,
    }
    check_rows(config_for([good, row], words, **asked))
    (words / "sets.yaml").write_text(
        f"datasets: [{{name: a, path: {words}/rows.jsonl, rm_type: ifbench}}]"
    )
    with pytest.raises(UserError, match=said):
        check_rows(
            config_for(
                [good, row],
                words,
                rm_type="random",
                eval_config=str(words / "sets.yaml"),
                eval_interval=1,
            )
        )


@with_package
def test_samples_are_scored_in_processes_of_their_own(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = of("count:numbers", N=2)

    async def use() -> None:
        pool = RewardPool(
            make_config(rollout_batch_size=1, num_rollout=1, rm_num_workers=1, rm_type="ifbench")
        )
        try:
            samples = [Sample(response=text, metadata=numbers) for text in ("1 2", "1 2 3")]
            assert await asyncio.gather(*map(pool.score, samples)) == [1.0, 0.0]
            boxed = Sample(
                response=r"1 \boxed{2 3}", metadata={**numbers, "rm_type": "boxed_ifbench"}
            )
            assert await pool.score(boxed) == 1.0
            for metadata, said in (
                (of("words:start_verb"), "need NLTK data"),
                ({}, "sample 7: .*no instructions"),
            ):
                with pytest.raises(UserError, match=said):
                    await pool.score(Sample(index=7, response="1", metadata=metadata))
            assert (
                len(pool._instructions.pids) == 1
                and pool._grading.pids == []
                and not any(pool.metrics().values())
            )
            monkeypatch.setattr(
                "slime.rollout.rm_hub.ifbench.compute_ifbench_reward",
                lambda said, label, metadata: 3,
            )
            assert await pool.score(samples[0]) == 3.0
        finally:
            await pool.close()

    asyncio.run(use())


@with_package
def test_the_earlier_path() -> None:
    from slime.rollout.rm_hub.ifbench import compute_ifbench_reward

    assert compute_ifbench_reward("1 2", None, of("count:numbers", N=2)) == 1.0
    assert compute_ifbench_reward("1", "2", metadata=of("count:numbers", N=2)) == 0.0
    with pytest.raises(UserError, match="no instructions"):
        compute_ifbench_reward("1 2", None)
