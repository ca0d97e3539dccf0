"""Rewards: what each built-in grader says, and what the pool does with users' functions, hangs and
crashes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from slime.cli.reward import main as reward_cli
from slime.config import make_config
from slime.config.flags import own_flags
from slime.config.groups_rollout import REWARD_TYPES
from slime.errors import UserError
from slime.prompts.chat_template import render_messages
from slime.rollout.rewards import grading_pool, instructions, reward_model
from slime.rollout.rewards.grading_pool import Grade, GradingPool
from slime.rollout.rewards.labels import _CHECKS
from slime.rollout.rewards.math_grading import GRADERS, grade_deepscaler, grade_math
from slime.rollout.rewards.pool import IN_PROCESS, RewardPool
from slime.rollout.rewards.remote import RemoteReward
from slime.rollout.rewards.text import (
    grade_dapo,
    grade_f1,
    grade_gpqa,
    last_boxed,
    normalise_final_answer,
)
from slime.samples.types import Sample
from slime.user_code.loading import _module_of_file, load_function
from tests.support.processes import is_running, wait_until
from tests.support.prompt_fixtures import CHATML, make_tokenizer


def make_pool(**flags: Any) -> RewardPool:
    return RewardPool(make_config(rollout_batch_size=1, num_rollout=1, rm_num_workers=1, **flags))


def with_pool(use: Any, **flags: Any) -> Any:
    """Run ``use(pool)`` and close the pool."""

    async def run() -> Any:
        pool = make_pool(**flags)
        try:
            return await use(pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def score(sample: Sample, **flags: Any) -> Any:
    return with_pool(lambda pool: pool.score(sample), **flags)


def test_flags_know_the_built_in_rewards() -> None:
    in_workers = {name for name, facts in REWARD_TYPES.items() if facts.uses_workers}
    assert in_workers == {*GRADERS, instructions.NAME} - {"boxed_math", "boxed_deepscaler"}
    assert {*REWARD_TYPES} - in_workers == {*IN_PROCESS, reward_model.NAME, "remote_rm"}
    assert {name for name, facts in REWARD_TYPES.items() if facts.compares_label} == {*_CHECKS}
    assert set(re.findall(r"\w+", own_flags()["rm_type"].help)) >= {*REWARD_TYPES}
    for flags in ({"rm_type": "f1"}, {"custom_rm_path": "a.b"}):
        [warning] = make_config(rm_num_workers=3, **flags).warnings
        assert warning.startswith("--rm-num-workers has no effect with --")
    for rm_type in (*in_workers, "boxed_math", None):
        assert make_config(rm_num_workers=3, rm_type=rm_type).warnings == ()


# -- graders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is 4.", "4", 1.0),
        ("First 3, then 4.", "4", 1.0),
        ("The answer is 5.", "4", 0.0),
        (r"\boxed{4} is it", "4", 1.0),
        (r"\boxed{3}, no: \boxed{4}", "4", 1.0),
        (r"4, so \boxed{3}", "4", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$x + 1$", "1 + x", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        ("It is 18 dollars", "She makes 9 * 2 = <<9*2=18>>18.\n#### 18", 1.0),
        (r"\boxed{18}", 18, 1.0),
        (r"\boxed{(1, 2)}", r"\boxed{(1,2)}", 1.0),
        (r"\boxed{\text{even}}", r"\text{even}", 1.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        (r"$\boxed{2}$ or $\boxed{1}$", r"$\boxed{1}$ and $\boxed{2}$.", 1.0),
        (r"\boxed{2}", r"$\boxed{1}$ and $\boxed{2}$.", 0.0),
        (r"\boxed{2}", r"<think>\boxed{1}</think> 2", 1.0),
        ("**No.**", "no", 1.0),
        ("not Paris", "Paris", 0.0),
        ("所以共有42个苹果。", "42", 1.0),
        ("答案是 42，不是 43。", "42", 1.0),
        ("답은 42입니다", "42", 1.0),
        ("a42", "42", 0.0),
        ("The answer is:\n\\[\n42\n\\]\nas wanted.", "42", 1.0),
        ("Total cost: $1,234.50", "1234.5", 1.0),
        ("Hence x + 2 = 5, so x = 3.", "3", 1.0),
        ("The answer is\n$$\nx = 42\n$$", "42", 1.0),
        (r"<think>hm</think> I look. <think>\boxed{42}", "42", 0.0),
        (r"[THINK]\boxed{41}[/THINK] It is 42", "42", 1.0),
        (r"[THINK]\boxed{42}", "42", 0.0),
        (r"\boxed{42}", "<answer> 42 </answer>", 1.0),
    ],
)
def test_math(response: str, label: Any, reward: float) -> None:
    assert grade_math(response, label) == reward


@pytest.mark.parametrize(
    ("response", "right", "wrong"),
    [
        ("at least 5", [r"\ge 5", r"x \geq 5", r"[5,\infty)", "at least 5"], ["5", r"\le 5"]),
        ("The answer is at most 5.", [r"x \le 5"], ["5"]),
        ("There are more than 5 of them.", ["> 5"], ["5", r"\ge 5"]),
        ("It is less than $5$ here.", ["x < 5"], ["5"]),
        (r"\boxed{\text{at least }5}", [r"n \ge 5"], ["5"]),
        (r"\boxed{5 \text{ or more}}", [r"5 \le x"], ["5"]),
        (r"\boxed{\neq 3}", [r"x \neq 3", "not 3"], ["3"]),
        (r"\boxed{\geq 5}", [r"x \ge 5"], ["5", "x > 5"]),
        ("So x ≥ 5 here.", [r"\ge 5"], ["5"]),
        ("not 5 but 6", ["6"], ["5"]),
        ("The answer is not 5 but 6.", ["6"], ["5"]),
        ("The answer is 6, not 5.", ["6"], ["5"]),
        ("We get 6 rather than 5.", ["6"], ["5"]),
        ("The answer is not 5. It is 6.", ["6"], ["5"]),
        ("The answer is definitely not 5.", [], ["5"]),
        ("The answer isn't 5.", [], ["5"]),
        ("x cannot be 5.", [], ["5"]),
        ("The answer is between 5 and 6.", [], ["5", "6"]),
        ("The answer is either 5 or 6.", ["5, 6"], ["5", "6"]),
        ("The answer is negative 5.", ["-5"], ["5"]),
        ("We need at least \\boxed{5} moves.", ["5"], []),
        ("It is 16.66...%, which rounds up to 17%.", ["17%"], []),
        ("Es sind mindestens 5.", [], ["5"]),
        ("答案是至少5。", [], ["5"]),
        ("答案是5个以上。", [], ["5"]),
        ("So there are five apples.", ["5"], ["1"]),
        ("So there are one hundred and thirty-five.", ["135"], ["5", "35", "100"]),
        ("The sum: 2 + 3 => 5", ["5"], []),
        ("The answer is <b>5</b>.", ["5"], []),
        ("It is > 5 here.", ["> 5"], ["5"]),
        ("It holds up to 17 people.", [r"\le 17"], ["17"]),
        ("It is 5 and above.", [r"x \ge 5"], ["5"]),
        ("The number 5 does not work.", [], ["5"]),
        ("5 is wrong.", [], ["5"]),
        ("La respuesta es 5 porque 2 + 7 = 9.", ["5"], ["9"]),
        ("Die Antwort ist nicht 5.", [], ["5"]),
        ("答えは5です。", ["5"], []),
        ("解答：2+3=5，所以总数是 7。", ["7"], ["2", "5"]),
    ],
)
def test_bounds_and_denials_are_not_their_numbers(
    response: str, right: list[str], wrong: list[str]
) -> None:
    assert [grade_math(response, label) for label in right + wrong] == [1.0] * len(right) + [
        0.0
    ] * len(wrong)


def test_boxed_math_wants_a_box_and_deepscaler_an_end_of_thinking() -> None:
    assert grade_math("The answer is 4.", "4", boxed_only=True) == 0.0
    assert grade_deepscaler(r"<think>\boxed{4}", "4") == 0.0
    assert grade_deepscaler(r"<think>hm</think> \boxed{4}", "4") == 1.0
    assert grade_deepscaler("<think>hm</think> 4", "4") == 0.0
    assert grade_deepscaler(r"<think>hm</think> <think>\boxed{4}", "4") == 0.0


@given(
    st.text(st.sampled_from("{}ab\\ "), max_size=12), st.text(st.sampled_from("{}ab"), max_size=8)
)
def test_the_last_box_is_found_with_balanced_braces(before: str, inside: str) -> None:
    text = f"{before}\\boxed{{{inside}}}"
    found = last_boxed(text)
    depth, balanced = 0, True
    for c in inside:
        depth += {"{": 1, "}": -1}.get(c, 0)
        balanced &= depth >= 0
    if balanced and depth == 0:
        assert found == inside
    elif found is not None:
        assert found.count("{") == found.count("}")


@pytest.mark.parametrize(
    ("response", "label", "f1"),
    [
        ("The cat sat.", "cat sat", 1.0),
        ("a dog", "cat", 0.0),
        ("red green blue", "red", 0.5),
        ("", "", 1.0),
        ("", "x", 0),
        ("It don’t matter in the U.S.", "it dont matter in US", 1.0),
        ("a well-known «1,000»", "well known 1000", 1.0),
        ("<think>red or green?</think> blue", "blue", 1.0),
        ("Zoe\u0308", "Zo\u00eb", 1.0),
        ("<think>blue", "blue", 0.0),
    ],
)
def test_f1(response: str, label: str, f1: float) -> None:
    assert grade_f1(response, label) == f1


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        (r"$\frac12$", r"\frac{1}{2}"),
        (r"\boxed{7}", "7"),
        ("1,234,567", "1234567"),
        (r"12 \text{ inches}", "12"),
        ("50\\%", "50"),
        ("x = 3.0", "3"),
        ("(1, 2)", "(1,2)"),
    ],
)
def test_dapo_answers_in_plain_form(answer: str, plain: str) -> None:
    assert normalise_final_answer(answer) == plain


def test_dapo() -> None:
    assert grade_dapo("Answer: 1\nno\nAnswer: $34$", "34") == {
        "score": 1.0,
        "acc": True,
        "pred": "34",
    }
    assert grade_dapo("Answer: 35", "34")["score"] == -1.0
    assert grade_dapo(r"Answer: \boxed{1} and \boxed{2}", "1, 2")["acc"]
    assert grade_dapo("Answer: 2, 1", r"\boxed{1} and \boxed{2}")["acc"]
    assert not grade_dapo("Answer: 2", r"\boxed{1} and \boxed{2}")["acc"]
    assert grade_dapo("Answer: 2", "1 + 1 = 2\n#### 2")["acc"]
    assert grade_dapo(r"Answer: $\frac12$, as required.", r"\frac{1}{2}")["acc"]
    for unsure in (
        "$34$ or $35$", "$34$, but this is wrong", "$34$ million", "$34$, 35", "$34$ (rejected)",
    ):  # fmt: skip
        assert not grade_dapo(f"Answer: {unsure}", "34")["acc"]
    assert grade_dapo("34", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert grade_dapo("Answer: 34" + " " * 300, "34")["score"] == -1.0, (
        "only the last 300 characters count"
    )


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("A or B? The answer is (C).", "C", {}, 1.0),
        (r"So \boxed{\text{B}}", "B", {}, 1.0),
        ("<think>A it is</think>Answer: D", "D", {}, 1.0),
        ("Answer: **B**", "A", {}, 0.0),
        ("I choose B", "blue", {"choices": ["red", "blue"]}, 1.0),
        (r"\boxed{blue}", 1, {"choices": ["red", "blue"]}, 1.0),
        ("Answer: F", "F", {"valid_letters": list("ABCDEF")}, 1.0),
        ("no letter", "C", {}, 0.0),
        ("#### B", "B", {}, 1.0),
        ("The answer is C, D is wrong.", "C", {}, 1.0),
        ("Answer: A and B are incorrect.", "A", {}, 0.0),
        ("<answer> a </answer>", "A", {}, 1.0),
    ],
)
def test_gpqa(response: str, label: Any, metadata: dict[str, Any], reward: float) -> None:
    assert grade_gpqa(response, label, metadata) == reward


@pytest.mark.parametrize(
    ("label", "response", "right"),
    [
        ("$5", r"\boxed{500 \text{ cents}}", 1.0),
        ("$5", r"\boxed{5 \text{ euros}}", 0.0),
        ("1000", r"\boxed{1'000}", 1.0),
        ("1000", r"\boxed{1_000}", 1.0),
        ("5%", r"\boxed{5 \text{ percentage points}}", 1.0),
        ("10:30 AM", "The train arrives at 10:30 AM.", 1.0),
        ("10:30", "The train arrives at 10:30.", 1.0),
        ("5厘米", r"\boxed{5}", 1.0),
        ("5 cm", r"\boxed{50毫米}", 1.0),
        ("5", r"\boxed{5个}", 1.0),
        ("5", r"\boxed{5以上}", 0.0),
        ("5", r"\boxed{5 \checkmark}", 1.0),
        ("3", r"\boxed{x \not= 3}", 0.0),
        (r"x \ge 3", r"\boxed{x \nless 3}", 1.0),
        (r"1 \le x < 2", r"\boxed{x \ge 1 \text{ and } x < 2}", 1.0),
        (r"x < 1, x > 2", r"\boxed{(-\infty, 1) \cup (2, \infty)}", 1.0),
        ("1/2 or 0.5", r"\boxed{0.5}", 1.0),
        ("2 or -2", r"\boxed{2}", 0.0),
        ("5\\\\", r"\boxed{5}", 1.0),
        (r"\{(1,2)\}", r"\boxed{(1,2)}", 1.0),
        (r"\{(1,2)\}", r"\boxed{(2,1)}", 0.0),
        (r"\{1,2\}", r"\boxed{(1,2)}", 0.0),
        ("18", "She makes $<<9*2=18>>18 every day.", 1.0),
    ],
)
def test_amounts_units_and_signs(label: str, response: str, right: float) -> None:
    assert grade_math(response, label) == right


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("The answer is D. Option B is too small.", 1.0),
        ("Option D is correct. Option B describes dogs.", 1.0),
        ("The answer is D.\n- Option A: too small\n- Option C: wrong", 1.0),
        ("Answer D is the best. Answer C was close.", 1.0),
        ("Option C is tempting.\nOption D", 1.0),
        ("La respuesta es D. La alternativa B es pequeña.", 1.0),
        ("By elimination, D.", 1.0),
        ("The answer is D. A correct approach uses energy.", 1.0),
        ("The answer is D. No other option fits.", 1.0),
        ("C? No, D.", 1.0),
        ("All of them: A, B, C, D", 0.0),
        ("The answer is not Venus but Mars.", 1.0),
        ("The answer is Mars, not Venus.", 1.0),
        ("The answer is not Mars.", 0.0),
        ("The answer is Venus rather than Mars.", 0.0),
    ],
)
def test_a_choice_that_is_discussed_is_not_chosen(response: str, reward: float) -> None:
    choices = {"choices": ["Mercury", "Venus", "Earth", "Mars"]}
    assert grade_gpqa(response, "D", choices) == reward


_IN_OTHER_LANGUAGES = """Die richtige Antwort ist C, denn Option D ist falsch.
Die Antwort ist nicht D, sondern C. | Antwort: C | Ich wähle C. | Option C ist richtig.
Richtig ist C. | La bonne réponse est la C. | D est fausse, donc la réponse est C.
La respuesta es C) porque A y B son falsas | La respuesta no es D, sino C.
A resposta correta é a alternativa C. | La risposta corretta è C.
Het juiste antwoord is C. | Rätt svar är C. | Poprawna odpowiedź to C.
Správná odpověď je C. | Правильный ответ — C. | Ответ: C | Doğru cevap C'dir.
Jawaban yang benar adalah C. | Đáp án đúng là C. | 答案是C因为A错误 | 故选C。
正确答案为C，D错误。 | 答案不是D，而是C。 | 答えはCです。Dではありません。 | Cが正解です。
정답은 C입니다. | C가 정답입니다. | الإجابة الصحيحة هي C. | सही उत्तर C है। | คำตอบคือ C"""
_NO_CHOICE = """Die Antwort ist nicht C. | C ist falsch. | La réponse n'est pas C.
La respuesta es C o D | 答案不是C。 | 答案是C或D | 答えはCではありません。 | Cは間違いです
정답은 C가 아닙니다. | Doğru cevap C değil. | La réponse est Caen
Die Antwort ist eine Creme | Ответ не C | C est fausse"""


@pytest.mark.parametrize(("texts", "reward"), [(_IN_OTHER_LANGUAGES, 1.0), (_NO_CHOICE, 0.0)])
def test_choices_stated_in_other_languages(texts: str, reward: float) -> None:
    for response in re.split(r" \| |\n", texts):
        assert grade_gpqa(response, "C") == reward, response


@pytest.mark.parametrize(
    "choices",
    [
        ["red", "blue"],
        ["A. red", "(B) blue"],
        {"A": "red", "B": "blue", "C": None},
        {"text": ["red", "blue"], "label": ["A", "B"]},
        [{"label": "A", "text": "red"}, {"label": "B", "text": "blue"}],
        '["red", "blue"]',
    ],
)
def test_choices_may_have_the_form_of_any_data_set(choices: Any) -> None:
    metadata = {"choices": choices}
    for label in ("B", "blue"):
        assert grade_gpqa("The answer is B.", label, metadata) == 1.0
        assert grade_gpqa(r"\boxed{blue}", label, metadata) == 1.0
        assert grade_gpqa("The answer is A.", label, metadata) == 0.0
    assert grade_gpqa("C", "C", metadata) == 0.0


@pytest.mark.parametrize(
    "metadata",
    [{"choices": 4}, {"choices": "red, blue"}, {"choices": [{"id": 1}]}, {"valid_letters": 4},
     {"choices": {"yes": "red", "no": "blue"}}],
)  # fmt: skip
def test_choices_that_cannot_be_read_are_no_choices_from_a_to_j(metadata: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="choices that --rm-type gpqa cannot read"):
        grade_gpqa("A", "A", metadata)


# -- which function --------------------------------------------------------------------------------


def test_metadata_wins_over_the_flag_and_a_boxed_prefix_works_for_all() -> None:
    sample = Sample(
        response=r"so \boxed{red dog}", label="red dog", metadata={"rm_type": "boxed_f1"}
    )
    assert score(sample, rm_type="gpqa") == 1.0
    assert score(Sample(response="red dog", label="red dog"), rm_type="boxed_f1") == 0.0


def test_random_is_a_coin_that_depends_on_the_sample() -> None:
    async def flips(pool: RewardPool) -> list[Any]:
        return [await pool.score(Sample(index=i)) for i in range(64)]

    first = with_pool(flips, rm_type="random")
    assert set(first) == {0.0, 1.0} and first == with_pool(flips, rm_type="random")


@pytest.mark.parametrize(("rm_type", "said"), [("mathh", "did you mean 'math'"), ("", "")])
def test_unknown_types_are_refused_when_the_pool_is_made(rm_type: str, said: str) -> None:
    if rm_type:
        with pytest.raises(UserError, match=said):
            make_pool(rm_type=rm_type)
    with pytest.raises(UserError, match="no reward function for sample 3"):
        score(Sample(index=3))


# -- users' functions ------------------------------------------------------------------------------

USER_CODE = """
import asyncio, time
import numpy as np, torch
async def length(args, sample, **kwargs): return len(sample.response)
def sync(args, sample): sample.metadata["seen"] = args.rm_type; return True
def batch(args, samples, **kwargs): return [s.index for s in samples]
def array(args, samples): return np.array([s.index for s in samples])
def tensor(args, samples): return torch.tensor([s.index for s in samples], dtype=torch.bfloat16)
def short(args, samples): return [1.0]
def nan(args, sample): return float("nan")
def text(args, sample): return "1.0"
def none(args, sample): return None
def crash(args, sample): raise KeyError("no_such_field")
def own_timeout(args, sample): raise TimeoutError("the judge does not answer")
def scores(args, sample): return {"acc": 1, "style": 0.5}
async def hang(args, sample): await asyncio.sleep(3600)
def hang_sync(args, sample): time.sleep(3600)
def one_argument(sample): return 1.0
class Mute(Exception):
    def __str__(self): raise RuntimeError("no text")
def mute(args, sample): raise Mute()
class Judge:
    @classmethod
    def of_class(cls, args, sample): return 2.0
    @staticmethod
    def plain(args, sample): return 3.0
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "user_rm.py").write_text(USER_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "user_rm"
    load_function.cache_clear()
    _module_of_file.cache_clear()


def test_sync_async_and_per_sample_functions(user: str) -> None:
    sample = Sample(response="four")
    assert score(sample, custom_rm_path=f"{user}.length") == 4.0
    assert score(sample, custom_rm_path=f"{user}.sync") == 1.0 and sample.metadata == {"seen": None}
    sample.custom_rm_path = f"{user}.length"
    assert score(sample, custom_rm_path=f"{user}.crash") == 4.0


def test_methods_of_a_class_are_found(user: str) -> None:
    for name, reward in (("Judge.of_class", 2.0), ("Judge.plain", 3.0)):
        assert score(Sample(response="r"), custom_rm_path=f"{user}.{name}") == reward
        assert score(Sample(response="r"), custom_rm_path=f"{user}:{name}") == reward
    with pytest.raises(UserError, match=r"Judge has no 'plan'\s+why.*\s+fix: did you mean 'plain'"):
        score(Sample(response="r"), custom_rm_path=f"{user}.Judge.plan")


def test_groups_are_scored_in_one_call_or_one_by_one(user: str) -> None:
    samples = [Sample(index=i, response="x" * i) for i in range(3)]
    assert with_pool(lambda pool: pool.score_group(samples), custom_rm_path=f"{user}.batch") == [
        0,
        1,
        2,
    ]
    samples[1].custom_rm_path = f"{user}.sync"
    assert with_pool(lambda pool: pool.score_group(samples), custom_rm_path=f"{user}.length") == [
        0,
        1,
        2,
    ]
    with pytest.raises(UserError, match="returned 1 rewards for a list of 3 samples"):
        with_pool(
            lambda pool: pool.score_group([Sample() for _ in range(3)]),
            custom_rm_path=f"{user}.short",
        )


@pytest.mark.parametrize("name", ["array", "tensor"])
def test_rewards_of_a_group_may_be_one_array(user: str, name: str) -> None:
    samples = [Sample(index=i) for i in range(3)]
    rewards = with_pool(lambda pool: pool.score_group(samples), custom_rm_path=f"{user}.{name}")
    assert rewards == [0.0, 1.0, 2.0]


def test_dict_rewards_need_a_key(user: str) -> None:
    assert score(Sample(), custom_rm_path=f"{user}.scores", reward_key="acc") == {
        "acc": 1.0,
        "style": 0.5,
    }
    with pytest.raises(
        UserError,
        match=r"returned a dict for sample 7, and --reward-key is not set\s+why.*acc, style",
    ):
        score(Sample(index=7), custom_rm_path=f"{user}.scores")
    with pytest.raises(UserError, match="without the key 'accuracy'"):
        score(Sample(), custom_rm_path=f"{user}.scores", reward_key="accuracy")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nan", r"returned nan \(float\) as the reward of sample 5"),
        ("text", r"returned '1.0' \(str\) as the reward of sample 5"),
        ("none", r"returned None \(NoneType\) as the reward of sample 5"),
        ("crash", r"failed on sample 5\s+why: KeyError: 'no_such_field'"),
        ("mute", r"failed on sample 5\s+why: Mute: \(its text raises RuntimeError\)"),
        ("own_timeout", r"failed on sample 5\s+why: TimeoutError: the judge does not answer"),
        ("one_argument", r"cannot be called as \(args, sample\)"),
    ],
)
def test_a_bad_function_is_named_with_its_sample(user: str, name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        score(Sample(index=5), custom_rm_path=f"{user}.{name}")


@pytest.mark.parametrize("name", ["hang", "hang_sync"])
def test_a_function_that_hangs_scores_zero_and_is_counted(user: str, name: str) -> None:
    async def use(pool: RewardPool) -> Any:
        return await pool.score(Sample()), pool.metrics(), pool.metrics()

    reward, counted, after = with_pool(use, custom_rm_path=f"{user}.{name}", rm_timeout=0.05)
    assert (reward, counted["rollout/reward_timeout"], after["rollout/reward_timeout"]) == (
        0.0,
        1.0,
        0.0,
    )


# -- worker processes ------------------------------------------------------------------------------


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_workers_start_when_needed_and_end_with_the_pool() -> None:
    async def use() -> list[int]:
        pool = GradingPool(2)
        assert pool.pids == []
        assert await pool.grade("math", r"\boxed{2}", "2", 20) == Grade(1.0)
        assert len(pool.pids) == 1, "one at a time needs one process"
        assert await asyncio.gather(*[pool.grade("math", f"{i}", "3", 20) for i in range(6)]) == [
            Grade(float(i == 3)) for i in range(6)
        ]
        pids = pool.pids
        assert len(pids) == 2
        await pool.close()
        return pids

    assert not any(psutil.pid_exists(pid) for pid in run(use()))


def test_a_request_that_is_cancelled_or_takes_too_long_leaves_the_next_one_alone() -> None:
    async def use() -> None:
        pool = GradingPool(1)
        await pool.grade("math", "1", "1", 20)
        task = asyncio.create_task(pool.grade("math", "2", "2", 20))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await pool.grade("math", "1", "2", 20) == Grade(0.0)
        (pid,) = pool.pids
        # hours, in code that no exception leaves
        slow = r"\boxed{\sum_{k=1}^{10^{9}} \frac{1}{k!}}"
        assert await pool.grade("math", slow, "3", 0.3) == Grade(0.0, "timeout")
        assert await pool.grade("math", "1", "1", 20) == Grade(1.0)
        assert pool.pids != [pid] and not psutil.pid_exists(pid)
        await pool.close()

    run(use())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_worker_had_is_graded_by_another(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Whoever is killed or stopped from outside, an idle one too, has no part in what it was
    asked."""
    monkeypatch.setattr(grading_pool, "_GRACE", 5.0 if number is signal.SIGKILL else 0.1)

    async def use() -> None:
        pool = GradingPool(1)
        await pool.grade("math", "1", "1", 20)
        (pid,) = pool.pids
        os.kill(pid, number)
        grade = await pool.grade("math", "1", "1", 20 if number is signal.SIGKILL else 1.0)
        assert grade == Grade(1.0) and pid not in pool.pids
        await pool.close()

    run(use())


def test_what_workers_crash_of_scores_nothing_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one was not killed by chance."""
    ask = grading_pool._GradingWorker.ask

    async def dies(worker: Any, request: dict[str, Any], timeout: float) -> Any:
        if request["response"] == "deadly":
            os.kill(worker.process.pid, signal.SIGKILL)
        return await ask(worker, request, timeout)

    monkeypatch.setattr(grading_pool._GradingWorker, "ask", dies)

    async def use(pool: RewardPool) -> None:
        assert await pool.score(Sample(response="1", label="1")) == 1.0
        assert await pool.score(Sample(response="deadly", label="1")) == 0.0
        assert pool.metrics()["rollout/reward_crash"] == 1.0
        assert await pool.score(Sample(response="1", label="1")) == 1.0

    with_pool(use, rm_type="math")


def test_workers_import_neither_torch_nor_ray() -> None:
    code = "import sys, math_verify, slime.rollout.rewards.math_grading\n"
    code += (
        "print([m for m in ('torch', 'ray', 'transformers', 'yaml', 'aiohttp') if m in "
        "sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
        == "[]"
    )


def test_workers_die_with_a_killed_parent() -> None:
    code = (
        "import asyncio, os, signal\nfrom slime.rollout.rewards.grading_pool import GradingPool\n"
        "async def main():\n    pool = GradingPool(1)\n    await pool.grade('math', '1', '1', 20)\n"
        "    print(pool.pids[0], flush=True)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    with contextlib.suppress(psutil.NoSuchProcess):  # it is gone already
        worker = psutil.Process(pid)
        wait_until(lambda: not is_running(worker), "the worker dies with its parent")


# -- remote ----------------------------------------------------------------------------------------


def with_server(answers: list[Any], use: Any) -> Any:
    """Run ``use(url, requests)`` against a server that gives these answers in turn (a number: that
    HTTP status)."""

    async def run_server() -> Any:
        requests: list[Any] = []

        async def handle(request: web.Request) -> web.Response:
            requests.append(await request.json())
            answer = answers[min(len(requests), len(answers)) - 1]
            if answer == "hang":
                await asyncio.sleep(3600)
            if isinstance(answer, int):
                return web.Response(status=answer)
            return web.Response(text=answer)

        app = web.Application()
        app.router.add_post("/", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            return await use(f"http://127.0.0.1:{port}/", requests)
        finally:
            await runner.cleanup()

    return asyncio.run(run_server())


def test_a_remote_reward_may_lie_behind_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(url: str, requests: list[Any]) -> None:
        monkeypatch.setenv("http_proxy", url)
        remote = RemoteReward("http://rewards.example/", timeout=5)
        assert await remote.score(Sample(prompt="p")) == 0.5 and requests[0]["prompt"] == "p"
        await remote.close()

    with_server(["0.5"], use)


def test_remote_reward_is_the_servers_json_and_what_may_pass_is_tried_again() -> None:
    async def use(url: str, requests: list[Any]) -> None:
        remote = RemoteReward(url, timeout=5, backoff=0.001)
        assert await remote.score(Sample(prompt="p", response="r", label="l")) == 0.75
        assert requests == [{"prompt": "p", "response": "r", "label": "l"}] * 3
        await remote.close()

    with_server([503, 429, "0.75"], use)


@pytest.mark.parametrize(
    ("answers", "said", "tries"),
    [([404], "answered 404", 1), (["<html>"], "no JSON", 1), ([500], "failed 10 times", 10)],
)
def test_remote_failures_that_last_stop_the_run(answers: list[Any], said: str, tries: int) -> None:
    async def use(url: str, requests: list[Any]) -> None:
        remote = RemoteReward(url, timeout=5, backoff=0.0)
        with pytest.raises(UserError, match=said):
            await remote.score(Sample())
        assert len(requests) == tries
        await remote.close()

    with_server(answers, use)


def test_connections_to_another_remote_model_are_shared_and_closed() -> None:
    async def use(url: str, requests: list[Any]) -> None:
        pool = make_pool(rm_type="remote_rm", rm_url="http://127.0.0.1:9/")
        args = argparse.Namespace(rm_url=url)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", ResourceWarning)
            for _ in range(2):
                assert await pool.reading(args).score(Sample()) == 0.5
            await pool.close()
            gc.collect()
        assert [one for one in caught if "Unclosed" in str(one.message)] == []

    with_server(["0.5"], use)


def test_a_remote_model_that_hangs_scores_zero_and_needs_an_address() -> None:
    async def use(url: str, requests: list[Any]) -> None:
        pool = make_pool(rm_type="remote_rm", rm_url=url, rm_timeout=0.02)
        pool._remotes[url] = RemoteReward(url, timeout=0.02, backoff=0.0)
        assert await pool.score(Sample()) == 0.0
        assert pool.metrics()["rollout/reward_timeout"] == 1.0
        await pool.close()

    with_server(["hang"], use)
    with pytest.raises(UserError, match="pass --rm-url"):
        score(Sample(), rm_type="remote_rm")


# -- slime reward ----------------------------------------------------------------------------------


def test_the_command_scores_rows(
    user: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        '{"input": "2+2", "label": "4", "response": "4"}\n{"input": "2+3", "label": "5", '
        '"response": "55"}\n'
    )
    common = ["--prompt-data", str(data), "--label-key", "label"]
    assert reward_cli([*common, "--custom-rm-path", f"{user}.length"]) == 0
    assert "2 rows: mean 1.5000, min 1, max 2, 2 different values" in capsys.readouterr().out
    assert reward_cli([*common, "--rm-type", "f1", "--response", "5"]) == 0
    printed = capsys.readouterr()
    assert "2 rows: mean 0.5000" in printed.out and "--prompt-data" not in printed.err
    assert reward_cli([*common, "--rm-type", "f1", "--reward-key", "acc"]) == 0
    assert "--reward-key acc has no effect" in capsys.readouterr().err
    with pytest.raises(UserError, match="pass --response-key response"):
        reward_cli([*common, "--rm-type", "f1", "--response-key", "respons"])
    with pytest.raises(UserError, match="no reward function to run"):
        reward_cli(common)
    with pytest.raises(UserError, match="not allowed with"):
        reward_cli([*common, "--rm-type", "f1", "--response", "5", "--response-key", "response"])
    with pytest.raises(UserError, match="--max-rows: must be a whole number, at least 1"):
        reward_cli([*common, "--rm-type", "f1", "--max-rows", "-1"])


def test_a_row_that_cannot_be_judged_ends_the_command_and_not_the_graders_of_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Instructions are judged by a worker process; the others' rows were on their way to it."""
    rows = [
        {"input": "1+1=", "metadata": {"instruction_id_list": ["punctuation:no_comma"]}}
    ] * 8 + [{"input": "1+1="}]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="finds no instructions"):
        reward_cli(["--rm-type", "ifbench", "--prompt-data", str(data), "--response", "2"])
    assert "was lost" not in caplog.text


def reward_model_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, load: Any, **flags: Any
) -> reward_model.RewardModelScorer:
    """A scorer with a model that scores nothing."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["QwenForSequenceClassification"], "id2label": {"0": ""}})
    )
    monkeypatch.setattr(reward_model, "load_tokenizer", load)
    monkeypatch.setattr(
        "transformers.AutoModelForSequenceClassification.from_pretrained",
        lambda path, **options: torch.nn.Linear(1, 1),
    )
    config = make_config(
        rm_type="reward_model", rm_path=str(folder), rollout_batch_size=1, num_rollout=1, **flags
    )
    scorer = reward_model.RewardModelScorer(str(folder), config)
    scorer._load()
    return scorer


def test_tokenizers_that_are_code_are_read_if_the_user_trusts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = {}

    def load(path: str, *, trust_remote_code: bool = False) -> Any:
        trusted[path] = trust_remote_code
        return make_tokenizer()

    judge, policy = tmp_path / "judge", tmp_path / "policy"
    reward_model_of(judge, monkeypatch, load, hf_checkpoint=str(policy), trust_remote_code=True)
    assert trusted == {str(judge): True, str(policy): True}


#: Leaves out what stands before the last mark, as templates of reasoning models do.
CUTTING = CHATML.replace("m['content']", "m['content'].split('</think>')[-1]")
TOOLS = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}"


@pytest.mark.parametrize("template", [None, CHATML, CUTTING, TOOLS + CHATML])
@pytest.mark.parametrize("response", ["", " ", "yes", "a</think>b</think>c"])
@pytest.mark.parametrize("turns", [1, 3])
def test_a_reward_model_of_another_vocabulary_scores_whatever_the_policy_says(
    template: str | None, response: str, turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer(template)

    def load(path: str, *, trust_remote_code: bool = False) -> Any:
        return make_tokenizer(eos="<|endoftext|>") if path == "policy" else tokenizer

    scorer = reward_model_of(tmp_path / "judge", monkeypatch, load, hf_checkpoint="policy")
    scorer._shares_vocabulary = False
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "earlier"},
        {"role": "user", "content": "r"},
    ][-turns:]
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}]
    sample = Sample(prompt=messages if template else "r", response=response)
    sample.metadata = {"tools": tools} if template and template.startswith(TOOLS) else {}
    prompt = "r"
    if template:
        prompt = render_messages(tokenizer, messages, tools=sample.metadata.get("tools"))
    scored = tokenizer.decode(scorer.tokens_of(sample))
    assert scored == f"{prompt}{response}<|im_end|>"
