"""Tokens and text of samples that users' functions return: what is told of, and what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import decoders

from benchmarks.bpe_tokenizers import bpe_tokenizer
from slime.rollout.generate import generate
from slime.rollout.response_text import other_text
from slime.rollout.trajectory import GroupRun, GroupRunner
from slime.rollout.user_rollouts import check_groups
from slime.samples.types import Group, Sample, SampleStatus
from tests.support.bpe_tokenizers import piece_tokenizer
from tests.support.fake_rollout import FakeClient, FakeRewards, hook_args, make_state

ME = f"{__name__}."
DO: list[Callable[[Sample], None]] = []
ANSWER = "The model learns to add: 12 + 30 = 42.<|im_end|>"


@pytest.fixture(scope="module", params=["bpe", "pieces"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Trained here, not on import: the threads of training would forbid forks of this process."""
    if request.param == "bpe":
        return bpe_tokenizer()
    pieces = piece_tokenizer()
    pieces.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return pieces


async def edits(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample = await generate(args, sample, sampling_params)
    DO[0](sample)
    return sample


def edits_later(args: Any, sample: Sample) -> None:
    DO[0](sample)


def other_words(sample: Sample) -> None:
    sample.response = f"as sample {sample.index} has it"


def other_tokens(sample: Sample) -> None:
    sample.tokens[-sample.response_length :] = [3 + token for token in sample.tokens[2:]]


def both(sample: Sample) -> None:
    sample.tokens[-1] += 1
    response = sample.tokens[-sample.response_length :]
    sample.response = "".join(chr(97 + token % 26) for token in response)


@pytest.mark.parametrize(
    "flags",
    [
        {"custom_generate_function_path": ME + "edits"},
        {"rollout_sample_hook_path": [ME + "edits_later"]},
    ],
)
@pytest.mark.parametrize(("edit", "is_told"), [(other_words, 1), (other_tokens, 1), (both, 0)])
@pytest.mark.parametrize("evaluation", [False, True])
def test_a_function_that_changes_text_or_tokens_alone_is_told_of_once(
    flags: dict[str, Any],
    edit: Callable[[Sample], None],
    is_told: int,
    evaluation: bool,
    caplog: pytest.LogCaptureFixture,
    fresh_log: None,
) -> None:
    DO[:] = [edit]
    state = make_state(FakeClient(), args=hook_args(**flags))
    for _ in range(2):
        drawn = [Sample(group_index=0, index=j, tokens=[20, 7], prompt="p") for j in range(2)]
        group = GroupRun.of(drawn)
        runner = GroupRunner(state, FakeRewards(), rollout_id=0, evaluation=evaluation)
        asyncio.run(runner.run(group))
        assert group.is_scored, "nothing is refused"
    said = [message for message in caplog.messages if "do not say their text" in message]
    assert len(said) == (0 if evaluation else is_told)
    for message in said:
        path = str(next(iter(flags.values()))).strip("[]'")
        assert path in message and "sample 0" in message
        assert edit is not other_words or "is 'as sample 0 has it', and its tokens say" in message


def test_a_rollout_functions_samples_are_compared(
    caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    tokenizer = bpe_tokenizer()
    sample = answered(tokenizer, "The reward counts.", "It's the model.")
    check_groups([Group(0, [[sample]])], "mine.rollout", None, hook_args(), tokenizer)
    assert any("mine.rollout returns samples whose tokens" in one for one in caplog.messages)


def answered(
    tokenizer: Any, tokens_of: str, response: str, prompt: str = "1+1<|im_start|>assistant\n"
) -> Sample:
    before = tokenizer.encode(prompt)
    ids = tokenizer.encode(tokens_of, add_special_tokens=False)
    return Sample(
        index=0,
        tokens=before + ids,
        response=response,
        response_length=len(ids),
        status=SampleStatus.COMPLETED,
    )


@pytest.mark.parametrize(
    ("tokens_of", "response"),
    [
        (ANSWER, ANSWER),
        (ANSWER, ANSWER.removesuffix("<|im_end|>")),
        (ANSWER, f"  {ANSWER}\n".replace(" ", "  ")),
        (ANSWER, "42"),
        (ANSWER, "assistant\n" + ANSWER),
        ("Let me see. <think>12 + 30</think> It is 42.", "Let me see. It is 42."),
        ("später mehr davon, naïve café, 日本語", "später mehr davon, naïve café, 日本語"),
        ("It is ﬁne: x² \u00a0done", "It is ﬁne: x² done"),
        ("später", "später\ufffd"),
        (ANSWER + " User: what is 3 + 4?", ANSWER),
    ],
)
def test_harmless_differences_are_not_told_of(
    tokenizer: Any, tokens_of: str, response: str
) -> None:
    assert other_text(answered(tokenizer, tokens_of, response), tokenizer) is None


@pytest.mark.parametrize(
    ("tokens_of", "response"),
    [
        (ANSWER, "It's the reward that counts."),
        (ANSWER, "The model learns to add: 12 + 30 = 43."),
        (ANSWER, "The model learns to add: 12 + 30 = 42. That is all that there is."),
        ("43", "42"),
        (ANSWER, ANSWER.upper()),
    ],
)
def test_other_text_is_found(tokenizer: Any, tokens_of: str, response: str) -> None:
    said = other_text(answered(tokenizer, tokens_of, response), tokenizer)
    assert said is not None and said.strip() in tokens_of


@pytest.mark.parametrize(
    ("response", "is_other"),
    [
        ("I will add: calc(12 + 30)42So the answer is 42.", False),
        ("I will add: calc(12 + 30) forty-two, as the tool says So the answer is 42.", False),
        ("So the answer is 42.", False),
        ("I will add: calc(12 + 30)42So the answer is 43.", True),
    ],
)
def test_what_tools_said_may_be_told_otherwise(response: str, is_other: bool) -> None:
    tokenizer = bpe_tokenizer()
    sample = Sample(index=0, tokens=tokenizer.encode("1+1"), status=SampleStatus.COMPLETED)
    for text, is_trained in (
        ("I will add: calc(12 + 30)<|im_end|>", True),
        ("\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n", False),
        ("So the answer is 42.<|im_end|>", True),
    ):
        ids = tokenizer.encode(text, add_special_tokens=False)
        log_probs = [-1.0] * len(ids) if is_trained else None
        sample.append_response_tokens(tokens=ids, log_probs=log_probs, trainable=is_trained)
    sample.response = response
    assert (other_text(sample, tokenizer) is not None) == is_other
