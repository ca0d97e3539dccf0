"""Images through every turn of a rollout: requests, resumed samples, tools, and agents' APIs."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agent_clients import anthropic_of, openai_of
from slime.agents.endpoint import AgentEndpoint
from slime.engines.api import GenerateResult
from slime.errors import UserError
from slime.models.vision import one_placeholder_each, placeholder_runs
from slime.prompts.images import ImagePrompts, image_prompts
from slime.rollout.generate import append_message, bind_state, generate
from slime.samples.media import media_of, media_problem, references_of
from slime.samples.types import Sample, SampleStatus
from tests.support.agents import TEMPLATE, Play
from tests.support.fake_rollout import FakeClient, hook_args, make_state
from tests.support.images import PICTURES, save_seeing_with_tokenizer

SIZES = {"portrait": (5, 2), "landscape": (2, 6), "square": (3, 3)}
HEAD = "data:image/png;base64,"


def encoded(name: str) -> str:
    return base64.b64encode(PICTURES[name]).decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_with_tokenizer(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def prompts(model: Path) -> ImagePrompts:
    return image_prompts(str(model), None)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from slime.prompts.tokenizer import load_tokenizer

    found = load_tokenizer(str(model))
    found.chat_template = TEMPLATE
    return found


class Client(FakeClient):
    """Notes requests; ends an answer after some tokens, or is aborted.

    Args:
        told: prompt tokens that it says it has read, where it does not tell the truth.
        says: the two tokens of every answer.
    """

    def __init__(
        self, *reasons: str, told: int | None = None, says: Sequence[int] = (65, 66)
    ) -> None:
        super().__init__()
        self.reasons = list(reasons)
        self.bodies: list[dict[str, Any]] = []
        self.told = told
        self.says = says

    async def generate(
        self, input_ids: list[int], params: dict[str, Any], **extra: Any
    ) -> GenerateResult:
        self.bodies.append({"input_ids": list(input_ids), **extra})
        reason = self.reasons.pop(0) if self.reasons else "stop"
        known = {encoded(name): size for name, size in SIZES.items()}
        sizes = [known[image] for image in extra.get("image_data", [])]
        read = len(input_ids) + sum(rows * columns - 1 for rows, columns in sizes)
        told = read if self.told is None else self.told
        meta = {"finish_reason": {"type": reason}, "prompt_tokens": told, "weight_version": "1"}
        return GenerateResult(list(self.says), [-0.5, -0.5], "AB", reason, meta)


def state_of(client: Any, prompts: Any, tokenizer: Any, folder: Path) -> Any:
    args = hook_args(apply_chat_template_kwargs={})
    return make_state(
        client,
        args=args,
        tokenizer=tokenizer,
        images=prompts,
        media_folder=str(folder / "media"),
        max_new_tokens=200,
    )


def play(state: Any, sample: Sample, turns: Callable[..., Any] = generate) -> Sample:
    async def main() -> Sample:
        bind_state(state)
        result: Sample = await turns(state.args, sample, state.params_for(sample))
        return result

    return asyncio.run(main())


def sample_with(folder: Path, prompts: ImagePrompts, tokenizer: Any, *names: str) -> Sample:
    references = []
    for name in names:
        (folder / f"{name}.png").write_bytes(PICTURES[name])
        references.append(str(folder / f"{name}.png"))
    place = prompts.placeholder(tokenizer)
    return Sample(
        index=0,
        prompt=f"see {' and '.join([place] * len(names))}: ",
        multimodal_inputs={"images": references},
    )


def check(sample: Sample, prompts: ImagePrompts, *names: str) -> None:
    media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
    assert [(one.span.rows, one.span.columns) for one in media] == [SIZES[one] for one in names]
    assert [Path(one.reference).read_bytes() for one in media] == [PICTURES[one] for one in names]
    assert media_problem(media, sample.tokens, prompts.vision.image_token) == ""
    sample.validate()


def test_requests_carry_the_images_and_one_placeholder_of_each(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    """SGLang tokenises a prompt anew that has others."""
    client = Client()
    sample = sample_with(tmp_path, prompts, tokenizer, "portrait", "square")
    play(state_of(client, prompts, tokenizer, tmp_path), sample)
    (body,) = client.bodies
    assert body["image_data"] == [encoded("portrait"), encoded("square")]
    sent = body["input_ids"]
    assert sent.count(prompts.vision.image_token) == 2
    whole, _ = prompts.expand(sent, references_of(sample), "sample 0")
    assert [*whole, 65, 66] == sample.tokens
    check(sample, prompts, "portrait", "square")


def test_what_goes_on_keeps_its_images(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    """A request that a push has aborted, and a sample that a later rollout, or another life of the
    run, goes on with."""
    client = Client("abort", "stop")
    state = state_of(client, prompts, tokenizer, tmp_path)
    sample = play(state, sample_with(tmp_path, prompts, tokenizer, "landscape"))
    first, second = client.bodies
    assert second["input_ids"] == [*first["input_ids"], 65, 66]
    assert first["image_data"] == second["image_data"] == [encoded("landscape")]
    check(sample, prompts, "landscape")
    stored = sample.to_dict()
    assert PICTURES["landscape"] not in repr(stored).encode()
    again = Sample.from_dict(stored)
    again.status = SampleStatus.ABORTED
    play(state, again)
    assert client.bodies[-1]["input_ids"] == one_placeholder_each(sample.tokens, prompts.vision)
    assert client.bodies[-1]["image_data"] == [encoded("landscape")]
    check(again, prompts, "landscape")


def test_a_policy_that_writes_placeholders_goes_no_further(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine would look for its image, and refuse the request."""
    written = [prompts.vision.start_token, prompts.vision.image_token]
    client = Client("abort", "stop", says=written)
    state = state_of(client, prompts, tokenizer, tmp_path)
    sample = play(state, sample_with(tmp_path, prompts, tokenizer, "landscape"))
    assert len(client.bodies) == 1
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.tokens[-2:] == written
    assert "the policy sampled an image placeholder" in caplog.text
    check(sample, prompts, "landscape")


def test_a_tool_answers_with_an_image(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    """Its place counts from the sample's first token; it is kept in the run's folder and not
    trained on."""

    async def turns(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        sample = await generate(args, sample, params)
        image = {"type": "image", "image": HEAD + encoded("square")}
        append_message(sample, {"role": "tool", "content": [image, {"type": "text", "text": "x"}]})
        return await generate(args, sample, params)

    client = Client()
    sample = sample_with(tmp_path, prompts, tokenizer, "portrait")
    sample = play(state_of(client, prompts, tokenizer, tmp_path), sample, turns)
    assert client.bodies[1]["image_data"] == [encoded("portrait"), encoded("square")]
    check(sample, prompts, "portrait", "square")
    response = sample.tokens[sample.prompt_length :]
    trained = [token for token, on in zip(response, sample.loss_mask or []) if on]
    assert trained == [65, 66, 65, 66]
    assert len(list((tmp_path / "media").iterdir())) == 1
    sample.reset_response()
    check(sample, prompts, "portrait")


def test_an_engine_that_counts_other_placeholders_is_refused(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    state = state_of(Client(told=7), prompts, tokenizer, tmp_path)
    with pytest.raises(UserError, match="counts 7 prompt tokens of sample 0, which has"):
        play(state, sample_with(tmp_path, prompts, tokenizer, "square"))


def test_images_for_a_model_that_reads_text_are_refused(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    state = state_of(Client(), None, tokenizer, tmp_path)
    with pytest.raises(UserError, match="this run reads no images"):
        play(state, sample_with(tmp_path, prompts, tokenizer, "square"))


def test_an_image_that_has_gone_is_named(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    sample = sample_with(tmp_path, prompts, tokenizer, "square")
    (tmp_path / "square.png").unlink()
    with pytest.raises(UserError, match="an image of sample 0 cannot be read"):
        play(state_of(Client(), prompts, tokenizer, tmp_path), sample)


# -- agents ----------------------------------------------------------------------------------------


async def chats(endpoint: AgentEndpoint) -> None:
    messages: list[Any] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": HEAD + encoded("portrait")}},
            ],
        }
    ]
    async with openai_of(endpoint) as client:
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message)
        url = {"url": HEAD + encoded("square")}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "And this?"}]
        messages.append({"role": "user", "content": content})
        await client.chat.completions.create(model="m", messages=messages)


async def responds(endpoint: AgentEndpoint) -> None:
    def item(name: str) -> dict[str, Any]:
        image = {"type": "input_image", "image_url": HEAD + encoded(name)}
        return {"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]}

    async with openai_of(endpoint) as client:
        first: Any = await client.responses.create(model="m", input=[item("portrait")])  # type: ignore
        await client.responses.create(
            model="m",
            input=[item("square")],  # type: ignore[list-item]
            previous_response_id=first.id,
        )


async def messages_with_tools(endpoint: AgentEndpoint) -> None:
    """A tool's result holds an image."""

    def image(name: str) -> dict[str, Any]:
        source = {"type": "base64", "media_type": "image/png", "data": encoded(name)}
        return {"type": "image", "source": source}

    said: list[Any] = [{"role": "user", "content": [image("portrait")]}]
    tools: Any = [{"name": "f", "input_schema": {"type": "object"}}]
    async with anthropic_of(endpoint) as client:
        answer = await client.messages.create(model="m", max_tokens=99, messages=said, tools=tools)
        call = next(block for block in answer.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [image("square")]}
        said += [
            {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(model="m", max_tokens=99, messages=said, tools=tools)


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>'


def agent_play(
    prompts: ImagePrompts,
    tokenizer: Any,
    folder: Path,
    *lines: str,
    shown: Sequence[str] = ("portrait", "square"),
) -> Play:
    found = Play(
        lines, images=prompts, media_folder=str(folder / "media"), args={"images_per_sample": 4}
    )
    found.model.tokenizer = found.state.tokenizer = tokenizer

    def expanded_length(ids: list[int]) -> int:
        images = len(placeholder_runs(ids, prompts.vision))
        sizes = [SIZES[name] for name in shown[:images]]
        return len(ids) + sum(rows * columns - 1 for rows, columns in sizes)

    found.model.prompt_length = expanded_length
    return found


@pytest.mark.parametrize("agent", [chats, responds, messages_with_tools])
def test_agents_send_images(
    agent: Callable[[AgentEndpoint], Any], prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    """Two turns are one conversation, whose second image is behind the first answer."""
    played = agent_play(prompts, tokenizer, tmp_path, CALL, "Yes.<|im_end|>")
    (sample,) = played.run(agent).samples()
    check(sample, prompts, "portrait", "square")
    asked = one_placeholder_each(sample.tokens, prompts.vision)
    assert asked == played.model.asked[-1] + played.model.said[-1]
    spans = sample.multimodal_train_inputs["spans"]  # type: ignore[index]
    assert spans[0][0] < sample.prompt_length < spans[1][0]
    assert played.trained(sample) == [token for said in played.model.said for token in said]


def test_another_image_with_the_same_words_is_another_conversation(
    prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    """The two images have the same size, so that their tokens are equal."""

    def ask(data: str) -> list[Any]:
        return [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": HEAD + data}}]}
        ]

    async def agent(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client:
            first = ask(encoded("square"))
            answer = await client.chat.completions.create(model="m", messages=first)
            second = [
                *ask(encoded("other")),
                answer.choices[0].message,
                {"role": "user", "content": "more"},
            ]
            await client.chat.completions.create(model="m", messages=second)  # type: ignore

    lines = ("One.<|im_end|>", "Two.<|im_end|>")
    played = agent_play(prompts, tokenizer, tmp_path, *lines, shown=["square"])
    samples = played.run(agent).samples()
    assert len(samples) == 2
    media = [media_of(one.multimodal_inputs, one.multimodal_train_inputs) for one in samples]
    assert media[0][0].span == media[1][0].span
    assert Path(media[1][0].reference).read_bytes() == PICTURES["other"]
    assert media[0][0].reference != media[1][0].reference


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}], "only bytes"),
        ([{"type": "image_url", "image_url": {"url": HEAD + "AAAA"}}], "not in a format"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "may not stand in a text"),
        (
            [{"type": "image_url", "image_url": {"url": HEAD + encoded("square")}}] * 5,
            "5 images, the run allows 4",
        ),
    ],
)
def test_images_that_agents_may_not_send(
    content: Any, message: str, prompts: ImagePrompts, tokenizer: Any, tmp_path: Path
) -> None:
    import openai

    async def agent(endpoint: AgentEndpoint) -> None:
        async with openai_of(endpoint) as client:
            messages: Any = [{"role": "user", "content": content}]
            with pytest.raises(openai.BadRequestError, match=message):
                await client.chat.completions.create(model="m", messages=messages)

    agent_play(prompts, tokenizer, tmp_path).run(agent)
