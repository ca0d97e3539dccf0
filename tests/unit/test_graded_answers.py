"""The graders on answers whose truth is known by construction, and on any text at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.rewards.math_answers import same_answer
from slime.rollout.rewards.math_grading import grade_math
from slime.rollout.rewards.text import grade_dapo, grade_gpqa
from tests.support.graded_answers import (
    GradedAnswer,
    choice_answers,
    dapo_answers,
    math_answers,
    math_answers_in_prose,
)


def check(cases: Sequence[GradedAnswer], grade: Callable[[GradedAnswer], float]) -> None:
    """At most 1 % of the right answers are missed, and no wrong one scores."""
    graded = [(case, grade(case) > 0) for case in cases]
    missed = [case for case, score in graded if case.right and not score]
    taken = [case for case, score in graded if score and not case.right]
    assert not taken, taken[:5]
    assert len(missed) <= 0.01 * sum(case.right for case in cases), missed[:5]


def test_math_answers() -> None:
    cases = math_answers(rounds=1) + math_answers_in_prose()
    assert len(cases) >= 750 and sum(case.right for case in cases) >= 400
    check(cases, lambda case: grade_math(case.response, case.label))


def test_boxed_answers_alone() -> None:
    cases = math_answers(seed=11, rounds=1)
    check(cases, lambda case: grade_math(case.response, case.label, boxed_only=True))


def test_dapo_answers() -> None:
    cases = dapo_answers(rounds=1)
    assert len(cases) >= 600
    check(cases, lambda case: float(grade_dapo(case.response, case.label)["acc"]))


def test_choices() -> None:
    cases = choice_answers()
    assert len(cases) >= 400 and sum(case.right for case in cases) >= 100
    check(cases, lambda case: grade_gpqa(case.response, case.label, case.metadata))


_PIECES = st.sampled_from(
    [*"0123456789abxyzABCeiI.,;:!?+-*/^_=<>()[]{}|%$°½√±∞ '\"", "\\", r"\frac", r"\sqrt", r"\pm",
     "{}", r"\left(", r"\right)", r"\text{", r"\overline{3}", r"\begin{pmatrix}", r"\end{pmatrix}",
     r"\\", "&", r"\cup", r"\infty", r"\le", r"\in", " cm", " and ", "10^", "!!", "sin", r"\log_",
     "e-9", ":30 pm", "_2", r"\binom", r"\{", r"\}", r"^\circ", "99999", "1,000", r"\boxed{"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(_PIECES, max_size=14).map("".join), st.lists(_PIECES, max_size=14).map("".join))
def test_any_text_is_graded_and_equals_itself(label: str, answer: str) -> None:
    assert same_answer(label, answer) in (True, False, None)
    assert grade_dapo(f"Answer: {answer}", label)["score"] in (1.0, -1.0)
    assert grade_gpqa(answer, label) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("10^{10^{10}}", "10^{10^{11}}"),
        ("9^{9^{9^{9^9}}}", "9^{9^{9^{9^8}}}"),
        ("100000!", "100001!"),
        ("(10^9)!!", "(10^9)!"),
        ("2^{10^{10^{10}}}", "5"),
        (r"\sqrt[3]{10^{10^{9}}}", "5"),
        (r"\sin(10^{10^{9}})", "0.5"),
        ("e^{10^{10^{10}}}", "e"),
        (r"\binom{10^{12}}{10^{11}}", "5"),
        ("1e99999999", "2e99999999"),
        ("1" * 20000, "2"),
    ],
)
def test_what_is_too_big_to_compute_is_decided_here(label: str, answer: str) -> None:
    """None would hand it to sympy, which computes all digits."""
    assert same_answer(label, answer) is False and same_answer(answer, label) is False


@pytest.mark.parametrize(
    ("label", "answer", "right"),
    [
        ("1,2", r"\boxed{12}", False),
        ("11/2", r"\boxed{1 1/2}", False),
        (r"6.63 \times 10^{-34}", r"\boxed{1.05 \times 10^{-34}}", False),
        ("0.0000013", r"\boxed{0.0000012}", False),
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", False),
        (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", False),
        (r"4\sqrt(2)", r"\boxed{4}", False),
        ("ABC", r"\boxed{ACB}", False),
        ("1011_2", r"\boxed{1011_3}", False),
        ("12 cm", r"\boxed{12 m}", False),
        (r"\{1,2\}", r"\boxed{(1,2)}", False),
        ("5", r"\boxed{x+2=5}", False),
        ("x", r"\boxed{X}", False),
        ("12", r"\boxed{\$12}", True),
        (r"\frac{\pi}{4}", r"\boxed{45^\circ}", True),
        ("1000000", r"\boxed{1 million}", True),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{(1,2)}", True),
        (r"(3,\infty)", r"\boxed{x>3}", True),
        ("1011_2", r"\boxed{11_{10}}", True),
    ],
)
def test_where_math_verify_is_wrong(label: str, answer: str, right: bool) -> None:
    assert grade_math(answer, label) == right


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("1, 2", r"x \in \Z"),
        ("f(x) = 2", "(x, y) = (1, 2)"),
        ("x < 5", "(x, y) < 3"),
        (r"x \equiv 2 \pmod{5}", "(x, y) = 1"),
        (r"\frac{\pi}{4} + k\pi, k \in \Z", "k - 1e999999"),
        ("3", "15:30 pm"),
        (r"x \ne 5", r"\begin{cases}\end{cases}"),
        ("(1, 2)", r"\begin{pmatrix}\end{pmatrix}"),
        ("3", "127.0.0.1 port 80 tcp"),
        ("63 in", "1.2.3 ft 3 in"),
        (r"2k + 1, k \in \Z", r"\frac{\pi}{2} + k\pi, k \in \Z"),
    ],
)
def test_an_answer_of_another_kind_than_its_label_is_wrong(label: str, answer: str) -> None:
    assert grade_dapo(f"Answer: {answer}", label)["score"] == -1.0


@pytest.mark.parametrize("label", ["", " ", r"\boxed{}", "####", None])
@pytest.mark.parametrize("response", [r"\boxed{}", r"\boxed{ }", "", r"\boxed{4}"])
def test_nothing_equals_an_empty_label(label: str | None, response: str) -> None:
    assert grade_math(response, label) == 0.0
    assert grade_dapo("Answer: ", label)["acc"] is False


@pytest.mark.parametrize(
    ("label", "answer", "right"),
    [
        ("3", r"1 \approx 2 \approx 3", False),
        ("5", r"x = 6 \approx 5", False),
        (r"\frac{1}{6}", r"\frac{1}{6} \approx 0.2", True),
        ("1000", r"1234 \approx 1000", True),
        (r"\frac{7}{3}", r"\frac{7}{3} \approx 2", True),
        (r"\pi", r"\pi \approx 3", True),
        (r"4\pi", r"A = 4\pi \approx 12.57\text{ cm}^2", True),
        ("5", r"\max(5, x)", False),
        ("5", r"5 + \lfloor |x|/100 \rfloor", False),
        (r"\max(a, b)", r"\frac{a+b+|a-b|}{2}", True),
    ],
)
def test_an_answer_that_is_right_only_in_part_is_wrong(
    label: str, answer: str, right: bool
) -> None:
    assert grade_math(rf"\boxed{{{answer}}}", label) == right


def test_a_box_without_braces_is_one() -> None:
    assert grade_math(r"$\boxed5$, since $1 + 4 = 5$ and $2 + 4 = 6$", "5") == 1.0
    assert grade_math(r"\boxed 1,234.", "1234") == 1.0
    assert grade_math(r"\boxed{42}: I used \boxed I think", "42") == 1.0


def test_only_what_follows_the_reasoning_counts() -> None:
    assert grade_math(r"<think>\boxed{5}</think> So \boxed{4}", "4") == 1.0
    assert grade_math(r"<think>\boxed{4}</think> So \boxed{5}", "4") == 0.0
    assert grade_math(r"<think>\boxed{4}", "4") == 0.0
    assert grade_math(r"hm, 4</think> The answer is 5.", "5") == 1.0
    assert grade_math(r"\boxed{4}</think> So it is", "4", boxed_only=True) == 0.0
