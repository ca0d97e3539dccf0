"""Preferences: rows become samples, pairs stay together, and a trainer learns from them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config, make_config
from slime.errors import UserError
from slime.prompts.prepare import remember
from slime.prompts.problems import missing_key
from slime.prompts.source import PromptSource
from slime.rollout.preferences import generate_preferences
from slime.rollout.reference_cache import ReferenceCache, _model_digest
from slime.rollout.validate_rows import DataReport, validate_data
from slime.samples.batch import StepPlan, TrainedTokens, TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.packing import PackingRules, plan_steps
from slime.samples.types import Group, Sample
from slime.trainer.megatron import forward
from slime.trainer.megatron.backend import MegatronBackend
from tests.support import parity
from tests.support.prompt_fixtures import CHATML, make_tokenizer, write_jsonl
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, preference_batch, shard, trainer_config
from tests.support.trainers import trainer

TOKENIZER = make_tokenizer()
CHAT = make_tokenizer(CHATML)
PREFERENCES: dict[str, Any] = {"loss_type": "preference_loss"}


@pytest.fixture(autouse=True)
def nothing_was_checked_before() -> None:
    remember([])


def config_for(path: str, loss: str = "dpo", **flags: Any) -> Config:
    given = {"prompt_data": path, "rollout_batch_size": 2, "num_rollout": 1}
    return make_config(**{**given, **PREFERENCES, "preference_loss": loss, **flags})


def groups_of(path: str, loss: str = "dpo", tokenizer: Any = TOKENIZER, **flags: Any) -> Any:
    config = config_for(path, loss, rollout_shuffle=False, **flags)
    return generate_preferences(config, PromptSource(config, tokenizer), tokenizer)


def trained(sample: Sample, tokenizer: Any) -> str:
    assert sample.loss_mask is not None
    response = sample.tokens[sample.prompt_length :]
    return str(tokenizer.decode([t for t, bit in zip(response, sample.loss_mask) if bit]))


def said(*turns: str) -> list[dict[str, str]]:
    """A conversation whose turns take turns."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


# -- rows ------------------------------------------------------------------------------------------

ROWS = {
    "text": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "messages of the prompt": {"prompt": said("q"), "chosen": "good", "rejected": "bad"},
    "messages of all": {
        "prompt": said("q"),
        "chosen": said("q", "good")[1:],
        "rejected": said("q", "bad")[1:],
    },
    "whole conversations": {"chosen": said("q", "good"), "rejected": said("q", "bad")},
    "conversations as text": {
        "chosen": json.dumps(said("q", "good")),
        "rejected": json.dumps(said("q", "bad")),
    },
    "several turns": {
        "chosen": said("p", "a", "q", "good"),
        "rejected": said("p", "a", "q", "bad"),
    },
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_pair_shares_its_prompt_and_trains_its_answers(tmp_path: Path, kind: str) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [ROWS[kind]] * 2)
    tokenizer = TOKENIZER if kind == "text" else CHAT
    output = groups_of(path, tokenizer=tokenizer)
    assert [len(group.samples) for group in output.samples] == [2, 2]
    for number, group in enumerate(output.samples):
        chosen, rejected = group.samples
        start = chosen.prompt_length
        assert chosen.tokens[:start] == rejected.tokens[:start]
        end = "<|im_end|>"
        assert trained(chosen, tokenizer).removesuffix(end) == "good"
        assert trained(rejected, tokenizer).removesuffix(end) == "bad"
        assert chosen.tokens[-1] == rejected.tokens[-1], "both end their answer"
        assert (chosen.reward, rejected.reward) == (1.0, -1.0)
        assert (chosen.index, rejected.index) == (2 * number, 2 * number + 1)


def test_answers_of_a_reward_model_train_one_position_behind_their_end(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [ROWS["whole conversations"]] * 2)
    plain = groups_of(path, tokenizer=CHAT).samples[0].samples
    scored = groups_of(path, "reward_model", CHAT).samples[0].samples
    for before, sample in zip(plain, scored, strict=True):
        assert sample.tokens[:-1] == before.tokens
        assert sample.response_length == before.response_length + 1
        assert sample.loss_mask == [0] * before.response_length + [1]


def test_kto_scores_each_prompt_with_the_next_answer(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one", "completion": "yes", "label": True},
        {"prompt": "two", "completion": "no", "label": False},
        {"prompt": "three", "completion": "maybe so", "label": 1},
    ]
    path = write_jsonl(tmp_path / "labels.jsonl", rows)
    output = groups_of(path, "kto", rollout_batch_size=3)
    pairs = [group.samples for group in output.samples]
    assert [[one.reward for one in pair] for pair in pairs] == [[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]]
    for (own, other), (following, _) in zip(pairs, [*pairs[1:], pairs[0]], strict=True):
        start = own.prompt_length
        assert other.tokens[:start] == own.tokens[:start]
        assert other.tokens[start:] == following.tokens[following.prompt_length :]
    assert output.metrics["rollout/preference_desirable"] == pytest.approx(2 / 3)


def test_pairs_that_are_too_long_or_equal_are_left_out_whole(tmp_path: Path) -> None:
    long = {"prompt": "q", "chosen": "good", "rejected": "bad " * 40}
    equal = {"prompt": "q", "chosen": "good", "rejected": "good"}
    path = write_jsonl(tmp_path / "pairs.jsonl", [long, equal, ROWS["text"], ROWS["text"]])
    output = groups_of(path, seq_length=20)
    assert [group.index for group in output.samples] == [2, 3]
    assert output.metrics["rollout/preference_too_long"] == 2
    assert output.metrics["rollout/preference_equal_answers"] == 1


# -- before anything starts ------------------------------------------------------------------------


def report_of(path: str, loss: str = "dpo", tokenizer: Any = CHAT, **flags: Any) -> DataReport:
    return validate_data(config_for(path, loss, **flags), tokenizer)


GOOD = ROWS["whole conversations"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "q", "chosen": "good"}, "have no key 'rejected'"),
        ({"prompt": "q"}, "have no key 'chosen' and no key 'rejected'"),
        (
            {"prompt": "q", "completion": "good", "label": True},
            "are answers with a label, and the loss learns from pairs",
        ),
        ({"prompt": "q", "completion": "good", "label": True}, "pass --preference-loss kto"),
        ({"chosen": "good", "rejected": "bad"}, "have answers without a prompt"),
        ({"chosen": said("a", "b"), "rejected": said("x", "y")}, "share no prompt"),
        (
            {"chosen": said("q", "a", "w", "good"), "rejected": said("q", "a", "v", "bad")},
            "have answers to different prompts",
        ),
        (
            {"prompt": "q", "chosen": "good", "rejected": ""},
            "have an empty answer (key 'rejected')",
        ),
        ({"prompt": "q", "chosen": 5, "rejected": "bad"}, "have an answer (key 'chosen') that is"),
        (
            {"prompt": "q", "chosen": "good", "rejected": said("q", "bad")},
            "one answer that is text and one that is messages",
        ),
        ({"chosen": said("q", "good"), "rejected": said("q", "", "p")}, "cannot be trained on"),
        (
            GOOD | {"prompt": [{"role": "system", "content": "be brief"}, *said("q")]},
            "have a prompt that their answers, which are whole conversations, do not begin with",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_refused_by_name(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [GOOD, row])
    error = report_of(path).error
    assert error is not None and told in str(error) and f"{path}:2" in str(error)


def test_only_a_column_that_rows_may_lack_can_be_left_out() -> None:
    chosen = missing_key("chosen", "--chosen-key", ["prompt", "completion"])
    assert chosen.fix == "pass --chosen-key with an existing column"
    assert "leave it out" in missing_key("answer", "--label-key", ["prompt"]).fix


@pytest.mark.parametrize("prompt", ["q", " q\n", said("q")])
def test_a_prompt_that_whole_conversations_repeat_is_read_once(
    tmp_path: Path, prompt: str | list[dict[str, str]]
) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [GOOD | {"prompt": prompt}] * 2)
    assert not report_of(path).notes
    [group, _] = groups_of(path, tokenizer=CHAT).samples
    assert CHAT.decode(group.trajectories[0][0].tokens).count("q") == 1


def test_text_that_whole_conversations_do_not_hold_is_a_column_that_nothing_reads(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path / "pairs.jsonl", [GOOD | {"prompt": "another"}])
    assert "nothing reads the columns prompt (1 of 1 rows)" in report_of(path).notes[0]


@pytest.mark.parametrize("place", ["prompt", "chosen"])
def test_tools_may_stand_beside_the_messages(tmp_path: Path, place: str) -> None:
    tools = [{"name": "search", "parameters": {}}]
    row: dict[str, Any] = dict(ROWS["messages of all"])
    row[place] = {"messages": row[place], "tools": tools}
    [group, _] = groups_of(write_jsonl(tmp_path / "pairs.jsonl", [row] * 2), tokenizer=CHAT).samples
    [tool] = group.trajectories[0][0].metadata["tools"]
    assert tool["function"]["name"] == "search"


PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
SCORED = {"role": "assistant", "content": "good", "score": 5}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([PAIR | {"score_chosen": 1, "score_rejected": 9}], "higher score than the chosen one"),
        ([PAIR | {"chosen-rating": 1.0, "rejected-rating": 2.0}], "higher score than the chosen"),
        ([PAIR | {"rejected": "go od"}], "answers that differ only in blanks"),
        ([PAIR, {"prompt": "q", "chosen": "bad", "rejected": "good"}], "contradict an earlier row"),
        ([PAIR | {"rejected": "nan"}], "an answer that is the name of a missing value"),
        ([PAIR | {"prompt": said("q", "a")}], "prompts that end with a message of the assistant"),
        ([GOOD | {"prompt": "another"}], "another prompt in the column 'prompt'"),
        ([GOOD | {"chosen": said("q", "a", "w")}], "end with a message that nobody answers"),
        ([PAIR | {"chosen": [SCORED], "rejected": said("q", "bad")[1:]}], "the message keys score"),
    ],
)
def test_pairs_that_are_rarely_meant_are_told(
    tmp_path: Path, rows: list[dict[str, Any]], told: str
) -> None:
    report = report_of(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert report.error is None and [told in line for line in report.warnings] == [True]
    usual = [PAIR | {"score_chosen": 9, "score_rejected": 1}, PAIR]
    assert not report_of(write_jsonl(tmp_path / "usual.jsonl", usual)).warnings


def test_equal_answers_are_counted_and_refused_where_there_is_nothing_else(tmp_path: Path) -> None:
    equal = {"chosen": said("q", "good"), "rejected": said("q", "good")}
    path = write_jsonl(tmp_path / "some.jsonl", [GOOD, equal, GOOD])
    report = report_of(path)
    assert report.error is None
    assert any("1 of 3 rows have a rejected answer that equals" in line for line in report.warnings)
    error = report_of(write_jsonl(tmp_path / "all.jsonl", [equal] * 3)).error
    assert error is not None and "3 of 3 rows have a rejected answer that equals" in str(error)


def test_pairs_are_not_answers_of_kto(tmp_path: Path) -> None:
    error = report_of(write_jsonl(tmp_path / "pairs.jsonl", [GOOD] * 2), "kto").error
    assert error is not None and "2 of 2 rows are pairs of answers, and kto learns" in str(error)
    assert "--preference-loss with one of dpo, ipo, simpo, reward_model" in str(error)
    error = report_of(
        write_jsonl(tmp_path / "odd.jsonl", [{"prompt": "q", "chosen": "a"}]), "kto"
    ).error
    assert error is not None and "have no key 'completion' and no key 'label'" in str(error)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("dpo", "--loss-type preference_loss --preference-loss dpo"),
        ("grpo", "--advantage-estimator grpo"),
    ],
)
def test_the_name_of_an_algorithm_as_the_loss_type_names_its_flag(name: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config(loss_type=name)
    assert fix in caught.value.fix


@pytest.mark.parametrize("odd", ["yes", 2, 0.5, None, [1]])
def test_labels_of_one_side_are_refused(tmp_path: Path, odd: Any) -> None:
    def rows(*labels: Any) -> str:
        found = [
            {"prompt": "q", "completion": f"a{i}", "label": one} for i, one in enumerate(labels)
        ]
        return write_jsonl(tmp_path / f"{len(labels)}{labels[-1]}.jsonl", found)

    assert not report_of(rows(True, False), "kto").warnings
    error = report_of(rows(True, True), "kto").error
    assert error is not None and "2 of 2 rows have a desirable answer" in str(error)
    error = report_of(rows(True, False, odd), "kto").error
    assert error is not None and "neither true nor false" in str(error)


@pytest.mark.parametrize("good", [True, 1, 1.0, "true", "True", "1"])
@pytest.mark.parametrize("bad", [False, 0, 0.0, "false", "FALSE", "0"])
def test_labels_are_read_whatever_file_they_come_from(tmp_path: Path, good: Any, bad: Any) -> None:
    """Fields of a CSV file are text, and a column of pandas with gaps is one of floats."""
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (good, bad)]
    groups = groups_of(write_jsonl(tmp_path / "answers.jsonl", rows), "kto").samples
    assert [group.trajectories[0][0].reward for group in groups] == [1.0, -1.0]


def test_kto_needs_a_second_answer_in_the_batch() -> None:
    with pytest.raises(UserError, match="--rollout-batch-size 1"):
        config_for("x.jsonl", "kto", rollout_batch_size=1)


# -- packing ---------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20),
    ranks=st.integers(1, 3),
    max_tokens=st.one_of(st.none(), st.integers(10, 120)),
    global_batch_size=st.integers(1, 12),
    balance=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_pair_is_in_one_micro_batch(
    lengths: list[tuple[int, int]],
    ranks: int,
    max_tokens: int | None,
    global_batch_size: int,
    balance: bool,
) -> None:
    flat = [length for pair in lengths for length in pair]
    ids = [i // 2 for i in range(len(flat))]
    rules = PackingRules(
        global_batch_size,
        ranks,
        micro_batch_size=2,
        max_tokens=max_tokens,
        balance=balance,
        keeps_trajectories=True,
    )
    plan = plan_steps(flat, ids, [1] * len(flat), rules)
    seen = []
    for shard_, steps in zip(plan.shards, plan.steps, strict=True):
        for step in steps:
            for samples in step.micro_batches:
                positions = [shard_[i] for i in samples]
                seen += positions
                assert [ids[i] for i in positions[::2]] == [ids[i] for i in positions[1::2]]
                tokens = sum(flat[i] for i in positions)
                if max_tokens is None:
                    assert len(positions) <= 4
                else:
                    assert tokens <= max_tokens or len(positions) == 2
    assert sorted(seen) == list(range(len(flat)))
    pairs = [
        sum(len(mb) for rank in plan.steps for mb in rank[s].micro_batches) // 2
        for s in range(len(plan.steps[0]))
    ]
    assert [step.global_batch_size for step in plan.steps[0]] == pairs


def kto_groups(number: int) -> list[Group]:
    def sample(i: int, reward: float) -> Sample:
        return Sample(index=i, tokens=[1] * (4 + i), response_length=2, reward=reward)

    return [Group(i, [[sample(2 * i, (-1.0) ** i), sample(2 * i + 1, 0.0)]]) for i in range(number)]


def test_mismatched_answers_are_scored_in_the_step_of_their_prompts() -> None:
    config = config_for("x.jsonl", "kto", rollout_batch_size=6, global_batch_size=3)
    batches = to_train_batches(kto_groups(6), config, TrainLayout(2), 0)
    for step in (0, 1):
        trained_, scored = (
            sorted(
                batch.trajectory_ids[i]
                for batch in batches
                for samples in getattr(batch.steps[step], name)
                for i in samples
            )
            for name in ("micro_batches", "scored")
        )
        assert trained_ == scored == [3 * step, 3 * step + 1, 3 * step + 2]
    for batch in batches:
        assert all(
            (batch.rewards[i] == 0.0) == is_scored
            for step in batch.steps
            for is_scored, parts in ((False, step.micro_batches), (True, step.scored))
            for samples in parts
            for i in samples
        )


def test_samples_that_are_no_pairs_are_refused() -> None:
    config = config_for("x.jsonl")
    with pytest.raises(UserError, match=r"rewards \[1.0, 0.0\]"):
        to_train_batches(kto_groups(2), config, TrainLayout(), 0)


# -- training --------------------------------------------------------------------------------------

LOSSES = ("dpo", "ipo", "simpo", "kto")


def batch_for(loss: str, **kwargs: Any) -> Any:
    return preference_batch(mismatched=loss == "kto", at_end=loss == "reward_model", **kwargs)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_first_loss_is_that_of_equal_models_and_it_falls(loss: str) -> None:
    backend = trainer(**PREFERENCES, preference_loss=loss, lr=2e-3)
    try:
        history = [backend.train(batch_for(loss)) for _ in range(6)]
    finally:
        backend.close()
    first = history[0]
    starts = {"dpo": math.log(2.0), "ipo": 25.0, "kto": 0.5}
    if loss in starts:
        assert first["train/preference_loss"] == pytest.approx(starts[loss], abs=1e-6)
        assert first["train/chosen_rewards"] == first["train/reward_margin"] == 0.0
    assert history[-1]["train/preference_loss"] < first["train/preference_loss"]
    assert history[-1]["train/reward_margin"] > first["train/reward_margin"]
    assert first["train/loss"] == first["train/preference_loss"]


def test_an_evaluation_does_not_depend_on_the_batch_size() -> None:
    """Of three desirable answers one is in the first step, and each step has another KL."""
    whole = batch_for("kto", pairs=(((2, 3), (0, 1)), ((4, 5), (6, 7))))
    [step] = whole.steps
    parts = [
        StepPlan([samples], 2, step.num_loss_tokens, [scored])
        for samples, scored in zip(step.micro_batches, step.scored, strict=True)
    ]
    backend = trainer(**PREFERENCES, preference_loss="kto", lr=1e-2)
    try:
        backend.train(batch_for("kto"))
        expected = backend.evaluate(whole)
        found = backend.evaluate(dataclasses.replace(whole, steps=parts))
    finally:
        backend.close()
    assert expected["eval/preferences/kto_kl"] > 0
    assert found == pytest.approx(expected)


# -- layouts ---------------------------------------------------------------------------------------

#: Per data-parallel rank: members, micro-batches of trained and of scored samples, by place.
SHARES = {
    1: [(range(8), [[0, 1, 2, 3], [4, 5], [6, 7], []])],
    2: [((4, 5, 0, 1), [[0, 1], [2, 3]]), ((6, 7, 2, 3), [[0, 1, 2, 3], []])],
}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "TP2+SP": (2, 1, parity.TP2 | parity.SP),
    "PP2 virtual": (2, 1, parity.PP2 | parity.VIRTUAL),
    "CP2": (2, 1, parity.CP2),
    "DP2": (2, 2, {}),
    "DP2 x TP2": (4, 2, parity.TP2),
    "CP2 x PP2": (4, 1, parity.CP2 | parity.PP2),
}
ALWAYS = {
    "dpo": ("TP2+SP",),
    "kto": ("PP2 virtual", "DP2"),
    "reward_model": ("CP2",),
}
CASES = [
    pytest.param(loss, name, marks=[] if name in ALWAYS.get(loss, ()) else [pytest.mark.full])
    for loss in ("dpo", "kto", "reward_model", "ipo", "simpo")
    for name in LAYOUTS
]


def batches_for(loss: str, data_parallel: int) -> list[Any]:
    whole = batch_for(loss)
    found = []
    for members, micro_batches in SHARES[data_parallel]:
        scored: list[list[int]] = []
        if loss == "kto":
            scored = [[i for i in part if members[i] % 2] for part in micro_batches]
            micro_batches = [[i for i in part if members[i] % 2 == 0] for part in micro_batches]
        found.append(shard(whole, members, micro_batches, scored))
    return found


def preference_job(info: Any, flags: dict[str, Any], batches: list[Any]) -> dict[str, Any]:
    """Metrics of three rollouts, and the last weights."""
    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    batch = batches[backend.data_parallel_rank]
    metrics = [backend.train(batch) for _ in range(3)]
    return {
        "metrics": [{k: v for k, v in m.items() if k.startswith("train/")} for m in metrics],
        "reporting": backend.is_reporting_rank,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("qwen3", directory, layers=2)
    return directory


def flags_for(model: Path, loss: str) -> dict[str, Any]:
    return {
        **PREFERENCES,
        "preference_loss": loss,
        "hf_checkpoint": str(model),
        "optimizer": "sgd",
        "lr": 0.02,
        "clip_grad": 0.5,
        **(
            {"preference_sft_coef": 0.3, "preference_label_smoothing": 0.1} if loss == "dpo" else {}
        ),
    }


@pytest.mark.parametrize(("loss", "name"), CASES)
def test_any_layout_learns_what_one_process_does(
    loss: str, name: str, ranks: Pools, model: Path, deep: Path
) -> None:
    size, data_parallel, layout = LAYOUTS[name]
    flags = flags_for(deep if "virtual" in name else model, loss)
    [alone] = ranks.once(1, preference_job, flags, batches_for(loss, 1))
    found = ranks.run(size, preference_job, flags | layout, batches_for(loss, data_parallel))
    [reporting] = [rank for rank in found if rank["reporting"]]
    for step, (ours, theirs) in enumerate(zip(reporting["metrics"], alone["metrics"], strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if step == 0 and name == "train/reward_accuracy":
                continue  # equal models: all answers are worth the same but for rounding
            assert ours[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    first, *_, last = alone["metrics"]
    assert last["train/preference_loss"] < first["train/preference_loss"]
    if loss == "kto":
        assert last["train/kto_kl"] > 0


def test_a_step_does_not_depend_on_order_and_micro_batches(model: Path) -> None:
    """The gradient of all pairs at once is that of one pair after the other, in another order."""
    found = []
    for pairs in (
        [[(0, 1), (2, 3), (4, 5), (6, 7)]],
        [[(6, 7)], [(2, 3)], [(0, 1)], [(4, 5)]],
    ):
        backend = trainer(**flags_for(model, "dpo"))
        try:
            found.append([backend.train(preference_batch(pairs)) for _ in range(2)])
        finally:
            backend.close()
    for one, other in zip(*found, strict=True):
        for name in ("train/preference_loss", "train/grad_norm", "train/reward_margin"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), name


# -- reward models ---------------------------------------------------------------------------------


def test_a_reward_model_is_a_classifier_of_transformers(model: Path, tmp_path: Path) -> None:
    """Scores of the export are those of training, at every length, padded or not."""
    transformers = pytest.importorskip("transformers")
    make_tokenizer(CHATML).save_pretrained(model)
    backend = trainer(**flags_for(model, "reward_model"))
    batch = batch_for("reward_model")
    try:
        history = [backend.train(batch) for _ in range(8)]
        packed = backend._pack(batch, [list(range(8))])
        [values] = forward.score(backend.model_chunks, packed)
        backend.export(str(tmp_path / "reward"))
    finally:
        backend.close()
    assert history[0]["train/preference_loss"] == pytest.approx(math.log(2.0), abs=1e-6)
    assert history[-1]["train/preference_loss"] < history[0]["train/preference_loss"]
    ours = [part[-1].item() for part in values.values.split(batch.response_lengths)]
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward", dtype=torch.float32
    )
    # the last token of a sample only says where its reward is read
    theirs = [classifier(tokens[None, :-1]).logits.item() for tokens in batch.tokens]
    assert ours == pytest.approx(theirs, abs=2e-5)
    assert max(ours) - min(ours) > 1e-3


# -- log-probs of the reference, kept --------------------------------------------------------------


def test_kept_log_probs_are_those_that_were_computed(tmp_path: Path) -> None:
    """Also where a crash has cut off the last record, and in another order and shards."""
    path = tmp_path / "kept" / "model.bin"
    cache = ReferenceCache(path)
    batch = batch_for("dpo")
    assert not cache.fill([batch]) and batch.ref_log_probs is None
    computed = [torch.randn(n) for n in batch.response_lengths]
    cache.add(
        [TrainedTokens(batch.key(i), ref_log_probs=v.numpy()) for i, v in enumerate(computed)]
    )
    path.write_bytes(path.read_bytes() + b"cut off")
    again = ReferenceCache(path)
    members = (5, 4, 1, 0)
    parts = [shard(batch, members, [[0, 1, 2, 3]]), shard(batch, (2, 3, 6, 7), [[0, 1], [2, 3]])]
    assert again.fill(parts) and len(again) == 8
    assert parts[0].ref_log_probs is not None
    for place, i in enumerate(members):
        assert torch.equal(parts[0].ref_log_probs[place], computed[i])
    other = batch_for("dpo", seed=1)
    assert not again.fill([batch, other]) and batch.ref_log_probs is None
    again.add([TrainedTokens(other.key(0), ref_log_probs=computed[0].numpy())])
    assert len(ReferenceCache(path)) == 9


def test_another_reference_model_or_precision_has_another_cache(model: Path) -> None:
    def digest(**flags: Any) -> str:
        return _model_digest(trainer_config(**flags_for(model, "dpo"), **flags))

    before = digest()
    assert digest() == before and digest(fp32=False, bf16=True) != before
    assert digest(fake_quantisation="linears") != before
    (model / "model.safetensors").touch()
    assert digest() != before


def test_a_rollout_that_is_known_trains_as_one_that_is_scored(model: Path) -> None:
    found = []
    for known in (False, True):
        backend = trainer(**flags_for(model, "dpo"))
        batch = batch_for("dpo")
        try:
            if known:
                batch.ref_log_probs = backend.log_probs(batch, "reference")
            found.append([backend.train(batch)["train/loss"] for _ in range(3)])
            assert len(backend.trained_tokens) == (0 if known else 8)
        finally:
            backend.close()
    assert found[0] == found[1]


def reward_job(info: Any, flags: dict[str, Any], rollouts: int, save: bool) -> list[float]:
    """Losses of some rollouts, after which a checkpoint may be saved."""
    config = trainer_config(**flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    first = backend.setup()
    found = [
        backend.train(batch_for("reward_model"))["train/preference_loss"]
        for _ in range(first, first + rollouts)
    ]
    if save:
        backend.save(first + rollouts - 1)
    backend.close()
    return found


def test_a_reward_model_goes_on_from_its_checkpoint_at_another_layout(
    model: Path, tmp_path: Path, ranks: Pools
) -> None:
    flags = flags_for(model, "reward_model") | {"optimizer": "adam", "lr": 2e-3}
    [whole] = ranks.run(1, reward_job, flags, 4, False)
    saved = flags | {"save": str(tmp_path / "saved")}
    halves = ranks.run(2, reward_job, saved | parity.TP2, 2, True)
    [rest] = ranks.run(1, reward_job, flags | {"load": saved["save"]}, 2, False)
    assert [*halves[0], *rest] == pytest.approx(whole, rel=1e-4)
