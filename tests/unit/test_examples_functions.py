"""The functions of the examples: what they make of a model's words, and that an engine takes what
they ask.

Whole runs of their scripts are in first_hour/test_examples.py.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from examples import tiny
from examples.calculator import data as products
from examples.calculator import rollout as calculator
from examples.curriculum import data as words
from examples.curriculum import source as curriculum
from examples.custom_advantage import credit
from examples.environments import letters
from examples.judge import data as reviews
from examples.judge import rollout as judge
from examples.python_sandbox import data as programs
from examples.search import data as mountains
from examples.search import rollout as search
from examples.seeing import data as pictures
from examples.seeing import rollout as seeing
from examples.self_play import data as games
from examples.self_play import rollout as nim
from slime.engines.client import RolloutClient
from slime.processes.host import free_port
from slime.prompts.images import image_prompts
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.generate import bind_state
from slime.rollout.trajectory import GroupRun, GroupRunner
from slime.samples.types import Sample, SampleStatus
from tests.support.contract_servers import Server, embedded_argv, logprobs_of, running
from tests.support.fake_rollout import FakeClient, hook_args, make_state
from tests.support.scripted_model import ScriptedModel, conversation, play, trained

# -- seeing ----------------------------------------------------------------------------------------


def test_pictures_have_as_many_squares_as_the_answer_says(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    rng = random.Random(1)
    for number in range(20):
        row = pictures.row(tmp_path, str(number), rng, sloppy=False)
        (colour,) = (name for name in pictures.COLOURS if name in row["question"][0]["content"])
        picture = Image.open(tmp_path / row["images"][0])
        pixels = [picture.getpixel((x, y)) for x in range(32) for y in range(32)]
        assert pixels.count(pictures.COLOURS[colour]) == 25 * int(row["answer"])
        sample = Sample(response=f" {row['answer']}", label=row["answer"])
        assert asyncio.run(seeing.reward(None, sample)) == 1.0


def test_the_model_that_sees_has_a_token_for_each_cell(tmp_path: Path) -> None:
    pictures.write_model(tmp_path / "model", 0)
    (tmp_path / "pictures").mkdir()
    row = pictures.row(tmp_path, "0", random.Random(1), sloppy=True)
    prompts = image_prompts(str(tmp_path / "model"), None)
    assert prompts.size(str(tmp_path / row["images"][0])) == (pictures.CELLS, pictures.CELLS)


# -- calculator ------------------------------------------------------------------------------------


def test_a_call_of_the_calculator_is_answered_and_its_answer_is_not_trained_on() -> None:
    model = ScriptedModel("<calc>17 * 23</calc>", "391<|im_end|>")
    sample = play(calculator.generate, model, Sample(index=0, prompt="17 * 23?\n", label="391"))
    assert sample.response == "<calc>17 * 23</calc>\n391\n391"
    assert trained(sample) == "<calc>17 * 23</calc>391<|im_end|>"
    assert calculator.reward(None, sample) == {"score": 1.0, "how": "called"}
    sample.validate()


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["It is 391<|im_end|>"], {"score": 1.0, "how": "alone"}),
        (["It is 390<|im_end|>"], {"score": 0.0, "how": "alone"}),
        (["<calc>17 * 23</calc>", "<|im_end|>"], {"score": 0.0, "how": "called"}),
        (
            ["<calc>17 * 2</calc>", "<calc>17 * 23</calc>", "391<|im_end|>"],
            {"score": 1.0, "how": "called"},
        ),
    ],
)
def test_the_reward_is_for_the_models_own_words(lines: list[str], expected: dict[str, Any]) -> None:
    sample = play(
        calculator.generate,
        ScriptedModel(*lines),
        Sample(index=0, prompt="17 * 23?\n", label="391"),
    )
    assert calculator.reward(None, sample) == expected


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("3 * (4 - 6)", "-6"),
        ("2 ** 9", "error"),
        ("True + 1", "error"),
        ("f(1)", "error"),
        ("1 +", "error"),
    ],
)
def test_the_calculator(expression: str, said: str) -> None:
    assert calculator.calculate(expression).partition(":")[0] == said


# -- self-play -------------------------------------------------------------------------------------


def nim_game(*moves: str, stones: int, **optional: Any) -> Any:
    model = ScriptedModel(*(f"{move}<|im_end|>" for move in moves))
    drawn = Sample(index=5, group_index=2, prompt=str(stones), tokens=[9])
    return play(nim.generate, model, drawn, **optional)


def test_both_sides_of_a_game_are_trained_on() -> None:
    first, second = nim_game("1", "3", "2", stones=6)
    assert conversation(first) == (
        "<|im_start|>user\n6 stones<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\n2 stones<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"
    )
    assert trained(first) == "1<|im_end|>2<|im_end|>" and trained(second) == "3<|im_end|>"
    assert (first.reward, second.reward) == (
        {"score": 1.0, "how": "won"},
        {"score": -1.0, "how": "lost"},
    )
    for side in (first, second):
        side.validate()
        assert (side.index, side.group_index) == (5, 2)


@pytest.mark.parametrize("move", ["4", "0", "two", "", "3"])
def test_who_breaks_the_rules_loses(move: str) -> None:
    first, second = nim_game("1", move, stones=3)
    assert first.reward["score"] == 1.0 and second.reward == {
        "score": -1.0,
        "how": "broke the rules",
    }


def test_a_game_that_is_over_at_once_has_one_side() -> None:
    [side] = nim_game("2", stones=2)
    assert side.reward["score"] == 1.0


def test_in_an_evaluation_the_opponent_moves_by_chance() -> None:
    side = nim_game("1", "1", "1", "1", stones=4, evaluation=True)
    assert side.metadata["seat"] == 0 and side.reward["score"] in (0.0, 1.0)


def test_a_game_that_is_cut_short_begins_anew() -> None:
    model = ScriptedModel("1<|im_end|>", reason="abort")
    model._aborting.set()
    drawn = Sample(index=5, prompt="6", tokens=[9])
    assert play(nim.generate, model, drawn) is drawn
    assert drawn.status is SampleStatus.ABORTED and drawn.tokens == [9]


def test_a_seat_is_compared_with_the_same_seat() -> None:
    games_of_a_group = [
        *nim_game("1", "1", stones=2),
        *nim_game("2", stones=2),
        *nim_game("1", "1", stones=2),
    ]
    rewards, advantages = nim.compare(None, games_of_a_group)
    assert rewards == [-1.0, 1.0, 1.0, -1.0, 1.0]
    assert advantages == pytest.approx([-2 / 3, 0.0, 4 / 3, -2 / 3, 0.0])


# -- judge -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "score"), [("yes", 1.0), ("Yes, it is", 1.0), ("no", 0.0), ("", 0.0)]
)
def test_the_judge_is_asked_for_its_word(said: str, score: float) -> None:
    asked: list[tuple[str, Any]] = []

    class Router(FakeClient):
        async def post(self, path: str, body: Any = None, **kwargs: Any) -> Any:
            asked.append((kwargs["url"] + path, body))
            return {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}

    args = SimpleNamespace(sglang_model_routers={"judge": ("10.0.0.2", 4000)})

    async def run() -> float:
        bind_state(make_state(Router()))
        return await judge.reward(args, Sample(response="lovely "))

    assert asyncio.run(run()) == score
    [(url, body)] = asked
    assert url == "http://10.0.0.2:4000/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "Is this kind? lovely"}]


# -- curriculum ------------------------------------------------------------------------------------


def scored(source: curriculum.Curriculum, score: float, groups: int) -> None:
    drawn = source.get_samples(groups)
    for group in drawn:
        for sample in group:
            sample.reward = {"score": score}
    curriculum.tell_source(None, drawn, source)


def test_the_curriculum_gets_harder_when_a_level_is_mastered() -> None:
    source = curriculum.Curriculum(SimpleNamespace(n_samples_per_prompt=2, rollout_seed=1))
    scored(source, 0.5, curriculum.WINDOW)
    assert source.level == 1
    scored(source, 1.0, curriculum.WINDOW)
    assert source.level == 2
    group = next(group for group in source.get_samples(30) if group[0].metadata["level"] == 2)
    first, second = group
    assert (
        len(first.label) == 3
        and first.prompt[0]["content"] == first.label[::-1] == second.label[::-1]
    )
    assert second.index == first.index + 1 and first.group_index == second.group_index
    for _ in range(20):
        scored(source, 1.0, 4 * curriculum.WINDOW)
    assert source.level == curriculum.LEVELS


def test_the_curriculum_resumes_and_takes_groups_back() -> None:
    args = SimpleNamespace(n_samples_per_prompt=2, rollout_seed=1)
    source, resumed = curriculum.Curriculum(args), curriculum.Curriculum(args)
    scored(source, 1.0, curriculum.WINDOW)
    resumed.load_state_dict(source.state_dict())
    [group], [again] = source.get_samples(1), resumed.get_samples(1)
    assert [sample.to_dict() for sample in group] == [
        sample.to_dict() for sample in again
    ] and resumed.level == 2
    source.add_samples([group])
    assert source.get_samples(1) == [group]


def test_the_curriculums_reward() -> None:
    sample = Sample(label="b a", response="b a ", metadata={"level": 2})
    assert curriculum.reward(None, sample) == {"score": 1.0, "level": "level-2"}


# -- custom advantage ------------------------------------------------------------------------------


def test_a_wrong_answer_is_wrong_at_its_first_mistake() -> None:
    samples = [Sample(label="654", response=response) for response in ("654", "694", "65", "6547")]
    assert [credit.reward(None, sample) for sample in samples] == [1.0, 0.0, 0.0, 0.0]
    data = {
        "rewards": [1.5, -0.5, -0.5, -0.5, -0.5],
        "response_lengths": [4, 4, 3, 4, 2],  # with the end of the turn; the fourth was cut
        # the last got no reward in time
        "metadata": [*(sample.train_metadata for sample in samples), None],
    }
    credit.advantages(None, data)
    expected = [[1.5] * 4, [0, -0.5, 0, 0], [0, 0, -0.5], [0, 0, 0, -0.5], [-0.5, -0.5]]
    assert all(
        torch.equal(found, torch.tensor(row)) for found, row in zip(data["advantages"], expected)
    )


# -- environments ----------------------------------------------------------------------------------


def test_the_letter_that_is_asked_for_stands_in_a_question_once() -> None:
    """A small model says what it looks at: nothing else may look like the answer."""
    for lesson in (letters.say, letters.write):
        for seed in range(20):
            asked = lesson(random.Random(seed))[0]["content"]
            assert len([word for word in re.findall(r"\w+", asked) if word in letters.LETTERS]) == 1


# -- in front of an engine -------------------------------------------------------------------------

LESSONS = (products, words, reviews, mountains, games, programs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: it has seen each example's conversations a few times."""
    folder = tmp_path_factory.mktemp("examples") / "model"
    tiny.write_model(folder, lambda rng: rng.choice(LESSONS).lesson(rng), steps=12)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("engine") / "log"
    flags = ["--dtype", "float32", "--device", "cpu", "--served-model-name", "judge"]
    with running(embedded_argv(model, port, *flags), port, log) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("generate", "prompt"),
    [
        (calculator.generate, "What is 41 * 52?"),
        (search.generate, "How high is Fuji?"),
        (nim.generate, "7"),
    ],
    ids=["calculator", "search", "self_play"],
)
def test_an_engine_generates_for_the_examples(
    generate: Callable[..., Any], prompt: str, engine: Server, model: Path
) -> None:
    """Through the rollout's own runner; the log-probs of what is trained on are those of
    transformers."""

    async def run() -> list[Sample]:
        path = f"{generate.__module__}.{generate.__name__}"
        args = hook_args(
            apply_chat_template_kwargs={}, custom_generate_function_path=path, reward_key="score"
        )
        client = RolloutClient(engine.url, max_concurrency=8)
        state = make_state(
            client, max_new_tokens=24, args=args, tokenizer=load_tokenizer(str(model))
        )
        state.sampling_params["skip_special_tokens"] = True
        group = GroupRun.of(
            [Sample(index=i, group_index=0, prompt=prompt, label="1") for i in range(3)]
        )
        async with client:
            await GroupRunner(state, Scores(), rollout_id=0).run(group)
        assert group.failure is None and group.is_scored
        return group.samples

    class Scores:
        async def score(self, sample: Sample) -> dict[str, float]:
            return {"score": 0.0}

        async def score_group(self, samples: list[Sample]) -> list[dict[str, float]]:
            return [{"score": 0.0} for _ in samples]

    for sample in asyncio.run(run()):
        sample.validate()
        assert (
            sample.reward is not None
            and sample.loss_mask is not None
            and sample.rollout_log_probs is not None
        )
        expected = logprobs_of(model, sample.tokens)[-sample.response_length :]
        far = [
            abs(theirs - ours)
            for theirs, ours, counts in zip(expected, sample.rollout_log_probs, sample.loss_mask)
            if counts
        ]
        assert far and max(far) < 1e-3


@pytest.mark.slow
def test_an_engine_judges_in_openais_words(engine: Server) -> None:
    args = SimpleNamespace(
        sglang_model_routers={"judge": engine.url.removeprefix("http://").split(":")}
    )

    async def run() -> float:
        async with RolloutClient(engine.url, max_concurrency=8) as client:
            bind_state(make_state(client))
            return await judge.reward(args, Sample(response="lovely"))

    assert asyncio.run(run()) in (0.0, 1.0)
