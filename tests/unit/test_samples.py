"""The buffer, supervised samples, and the cost model."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms.reduce import token_weights
from slime.config import make_config
from slime.errors import UserError
from slime.log import untold
from slime.models import family_of
from slime.models.flops import sequence_cost
from slime.prompts.source import PromptSource
from slime.rollout.debug_data import load_samples
from slime.rollout.sft import SftEncoder, data_rollout, generate_sft
from slime.samples.batch import TrainLayout
from slime.samples.buffer import SampleBuffer
from slime.samples.convert import to_train_batches
from slime.samples.types import Sample
from slime.user_code.hooks import DataSource
from tests.support import rollout_hooks
from tests.support.prompt_fixtures import CHATML, make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()
GENERATION = CHATML.replace(
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' "
    "}}{% endif %}"
    "{{ '\\n' }}",
)
#: Past turns lose their thoughts, the last one gets an empty block, as in Qwen3.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


THOUGHT = "<think>\n\n</think>\n\n"


def config_for(**flags: Any) -> Any:
    return make_config(
        **{"rollout_batch_size": 2, "num_rollout": 1, "loss_type": "sft_loss", **flags}
    )


def trained_text(sample: Sample, tokenizer: Any) -> list[str]:
    """The trained runs of a sample as text."""
    runs: list[list[int]] = []
    before = 0
    assert sample.loss_mask is not None
    for token, bit in zip(sample.tokens[-sample.response_length :], sample.loss_mask):
        if bit and not before:
            runs.append([])
        if bit:
            runs[-1].append(token)
        before = bit
    return [tokenizer.decode(run) for run in runs]


def chat(*turns: str) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(turns)
    ]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_only_the_assistants_turns_are_trained_with_their_end_token(template: str) -> None:
    tokenizer = make_tokenizer(template)
    sample = Sample(prompt=chat("hi", "hello", "2+2?", "4"), group_index=0)
    SftEncoder(config_for(), tokenizer).encode(sample)
    assert trained_text(sample, tokenizer) == ["hello<|im_end|>", "4<|im_end|>"]
    whole = tokenizer.apply_chat_template(sample.prompt, tokenize=False)
    assert tokenizer.decode(sample.tokens) == whole.rstrip("\n"), (
        "nothing after the last trained token"
    )


@pytest.mark.parametrize(
    ("template", "trained", "said"),
    [
        (CHATML, "4<|im_end|>", ""),  # and a newline behind it
        (CHATML.replace("<|im_end|>\\n", "<|im_end|>"), "4<|im_end|>", ""),
        (
            CHATML.replace("<|im_end|>\\n", "\\n"),
            "4",
            "writes none of '<|im_end|>' after the assistant's words",
        ),
        (
            CHATML.replace("<|im_end|>\\n", ""),
            "4",
            "writes none of '<|im_end|>' after the assistant's words",
        ),
        (
            GENERATION.replace(
                "'<|im_end|>' }}{% endgeneration %}", "'' }}{% endgeneration %}{{ '<|im_end|>' }}"
            ),
            "4",
            "after its {% generation %} block",
        ),
    ],
)
def test_a_template_that_writes_no_end_is_told_once_and_trained_as_it_is(
    template: str, trained: str, said: str, caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    tokenizer = make_tokenizer(template)
    tokenizer.name_or_path = "/models/mine"
    for _ in range(2):
        sample = Sample(prompt=chat("2+2?", "4"), group_index=0)
        encoder = SftEncoder(config_for(), tokenizer)
        encoder.encode(sample)
        encoder.totals.tell(tokenizer)
        assert trained_text(sample, tokenizer) == [trained], "no token is added"
    assert len(caplog.messages) == (1 if said else 0)
    assert all(
        said in message and "tokenizer of '/models/mine'" in message for message in caplog.messages
    )


def test_rows_whose_words_end_with_the_end_token_need_no_template_for_it(
    caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    sample = Sample(prompt=chat("2+2?", "4<|im_end|>"), group_index=0)
    SftEncoder(config_for(), tokenizer).encode(sample)
    assert trained_text(sample, tokenizer) == ["4<|im_end|>"] and not caplog.messages


def test_a_tokenizer_without_an_end_token_is_told(
    caplog: pytest.LogCaptureFixture, fresh_log: None
) -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    sample = Sample(prompt="2+2=", label="4", group_index=0)
    encoder = SftEncoder(config_for(), tokenizer)
    encoder.encode(sample)
    encoder.totals.tell(tokenizer)
    assert trained_text(sample, tokenizer) == ["4"]
    assert "the tokenizer has no end token" in caplog.text


def test_a_conversation_that_the_template_rewrites_becomes_several_samples_of_one_execution(
    tmp_path: Path,
) -> None:
    tokenizer = make_tokenizer(THINKING)
    rows = [{"messages": chat("hi", "hello", "2+2?", "4")}, {"messages": chat("hi", "hello")}]
    path = write_jsonl(tmp_path / "s.jsonl", rows)
    config = config_for(prompt_data=path, input_key="messages", global_batch_size=2)
    output = generate_sft(config, PromptSource(config, tokenizer), tokenizer)
    (split,), (whole,) = (group.trajectories for group in output.samples)
    answers = ["hello", "4"]
    assert [trained_text(one, tokenizer) for one in split] == [
        [THOUGHT + text + "<|im_end|>"] for text in answers
    ]
    assert len(whole) == 1 and output.metrics is not None
    assert output.metrics["rollout/sft_split_conversations"] == 1
    [batch] = to_train_batches(output.samples, config, TrainLayout(), 0)
    assert len(batch.steps) == 1, "a conversation counts as one of the batch"
    trained = [sum(one.loss_mask or []) for one in split]
    assert batch.rollout_mask_sums[:2] == [sum(trained)] * 2, "and is weighted as one"


def test_data_of_which_no_row_fits_is_refused_after_a_whole_epoch(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    rows = [{"messages": chat("q", "a" * 100)}] * 3
    path = write_jsonl(tmp_path / "s.jsonl", rows)
    config = config_for(prompt_data=path, input_key="messages", seq_length=60)
    with pytest.raises(UserError, match="6 consecutive samples are longer than 60 tokens"):
        generate_sft(config, PromptSource(config, tokenizer), tokenizer)


@pytest.mark.parametrize("streaming", [False, True])
@given(seed=st.integers(0, 1000), num_rows=st.integers(1, 12))
@settings(max_examples=15, deadline=None)
def test_one_row_that_fits_is_found_wherever_an_epoch_has_it(
    streaming: bool, seed: int, num_rows: int
) -> None:
    """Of two epochs, the first may have it at the beginning and the second at the end."""
    tokenizer = make_tokenizer(CHATML)
    rows = [{"messages": chat("q", "a")}]
    rows += [{"messages": chat("q", "a" * 100)} for _ in range(num_rows - 1)]
    with tempfile.TemporaryDirectory() as folder:
        config = config_for(
            prompt_data=write_jsonl(Path(folder) / "s.jsonl", rows),
            input_key="messages",
            seq_length=60,
            rollout_shuffle=True,
            rollout_seed=seed,
            streaming_data=streaming,
        )
        source = PromptSource(config, tokenizer)
        for _ in range(3):
            output = generate_sft(config, source, tokenizer)
            assert all(
                len(sample.tokens) <= 60 for group in output.samples for sample in group.samples
            )


@settings(max_examples=25, deadline=None)
@given(
    # the first row is short, so that one fits where others are too long
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=5).map(lambda turns: [1, *turns]),
    template=st.sampled_from([CHATML, THINKING]),
    num_ranks=st.sampled_from([1, 2]),
    seq_length=st.sampled_from([None, 60]),
)
def test_a_split_conversation_weighs_what_an_unsplit_one_does(
    tmp_path_factory: pytest.TempPathFactory,
    turns: list[int],
    template: str,
    num_ranks: int,
    seq_length: int | None,
) -> None:
    """A step takes as many rows as --rollout-batch-size says, and each adds up to one of them in
    the loss, however many samples it becomes, on whichever ranks they are, and also where some of
    them are too long and left out."""
    tokenizer = make_tokenizer(template)
    rows = [{"messages": chat(*(["q", "a" * (1 + i)] * count))} for i, count in enumerate(turns)]
    path = write_jsonl(tmp_path_factory.mktemp("rows") / "s.jsonl", rows)
    size = len(rows)
    config = config_for(
        prompt_data=path,
        input_key="messages",
        rollout_batch_size=size,
        global_batch_size=size,
        micro_batch_size=1,
        rollout_shuffle=False,
        seq_length=seq_length,
    )
    output = generate_sft(config, PromptSource(config, tokenizer), tokenizer)
    assert len(output.samples) == size and all(
        group.num_trajectories == 1 for group in output.samples
    )
    if template == THINKING and seq_length is None:
        assert [len(group.samples) for group in output.samples] == turns
    weights: dict[int, float] = {}
    for batch in to_train_batches(
        output.samples, config, TrainLayout(data_parallel_size=num_ranks), 0
    ):
        [step] = batch.steps
        assert step.global_batch_size == size
        for trajectory, mask, total in zip(
            batch.trajectory_ids, batch.loss_masks, batch.rollout_mask_sums
        ):
            weight = token_weights([mask], [total], step.global_batch_size).sum().item()
            weights[trajectory] = weights.get(trajectory, 0.0) + weight
    assert list(weights.values()) == pytest.approx([1 / size] * size)


TEXT = st.text(st.sampled_from("abc .\n?"), min_size=1, max_size=8)
WORDS = TEXT.filter(str.strip)


@given(
    st.lists(st.tuples(TEXT, WORDS), min_size=1, max_size=4), st.sampled_from([CHATML, THINKING])
)
@settings(max_examples=60)
def test_any_conversation_trains_exactly_its_answers(
    turns: list[tuple[str, str]], template: str
) -> None:
    tokenizer = make_tokenizer(template)
    sample = Sample(prompt=chat(*[text for turn in turns for text in turn]), group_index=0)
    samples = SftEncoder(config_for(), tokenizer).encode(sample)
    runs = [run for one in samples for run in trained_text(one, tokenizer)]
    thought = THOUGHT if template is THINKING else ""
    assert runs == [f"{thought}{answer}<|im_end|>" for _, answer in turns]


def test_messages_can_be_left_out_of_the_loss() -> None:
    messages = chat("hi", "wrong", "no", "right")
    messages[1]["step_loss_mask"] = 0  # type: ignore[assignment]
    sample = Sample(prompt=messages, group_index=0)
    SftEncoder(config_for(), TOKENIZER).encode(sample)
    assert trained_text(sample, TOKENIZER) == ["right<|im_end|>"]
    marked = make_tokenizer(GENERATION)  # its marks would train all of the assistant's
    SftEncoder(config_for(), marked).encode(sample)
    assert trained_text(sample, marked) == ["right<|im_end|>"]


TEMPLATED = "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"


@pytest.mark.parametrize(
    ("flags", "prompt", "tokens", "text"),
    [
        ({}, "2+2=", [], "2+2=4<|im_end|>"),
        (
            {"apply_chat_template": True},
            "2+2=",
            [],
            "<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n4<|im_end|>",
        ),
        ({}, chat("2+2="), [], TEMPLATED),
        ({}, "", TOKENIZER.convert_tokens_to_ids([*"pre"]), "pre4<|im_end|>"),
    ],
)
def test_rows_of_prompt_and_label(flags, prompt, tokens, text) -> None:
    sample = Sample(prompt=prompt, tokens=tokens, label="4", group_index=0)
    SftEncoder(config_for(**flags), TOKENIZER).encode(sample)
    assert TOKENIZER.decode(sample.tokens) == text
    assert trained_text(sample, TOKENIZER) == ["4<|im_end|>"] == [sample.response]


@pytest.mark.parametrize(
    ("prompt", "label", "message"),
    [("2+2=", None, "no answer to train on"), ("2+2=", 4, "label is an int")],
)
def test_a_row_without_an_answer_is_refused(prompt, label, message) -> None:
    with pytest.raises(UserError, match=message):
        SftEncoder(config_for(), TOKENIZER).encode(
            Sample(prompt=prompt, label=label, group_index=3)
        )


def test_a_plain_prompt_begins_with_bos_and_its_answer_does_not() -> None:
    tokenizer = make_tokenizer(bos="<|endoftext|>")
    for prompt in ("2+2=", "<|endoftext|>2+2="):
        encoder, sample = (
            SftEncoder(config_for(), tokenizer),
            Sample(prompt=prompt, label="4", group_index=0),
        )
        encoder.read_ahead([sample])
        encoder.encode(sample)
        assert tokenizer.decode(sample.tokens) == "<|endoftext|>2+2=4<|im_end|>"
        assert trained_text(sample, tokenizer) == ["4<|im_end|>"]
    in_turns = Sample(prompt=chat("2+2?", "4"), group_index=0)
    SftEncoder(config_for(), tokenizer).encode(in_turns)
    assert tokenizer.bos_token_id not in in_turns.tokens, "the template writes what it wants"


def test_an_sft_rollout_ends_as_training_data(tmp_path: Path) -> None:
    rows = [{"messages": chat("q" * n, "a" * n)} for n in (1, 50, 2, 3)]
    config = config_for(
        prompt_data=write_jsonl(tmp_path / "s.jsonl", rows), input_key="messages", seq_length=60
    )
    source = PromptSource(config, TOKENIZER)
    output = generate_sft(config, source, TOKENIZER)
    assert [group.index for group in output.samples] == [0, 2], (
        "the long one is left out, another one drawn"
    )
    batch = to_train_batches(output.samples, config, TrainLayout(), 0)[0]
    assert batch.response_lengths == [2, 3] and batch.rewards == [0.0, 0.0]
    assert source.state_dict()["done"] == [1], "and it is not drawn again after a resume"


def test_sft_needs_something_short_enough(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "s.jsonl", [{"input": "long" * 10, "label": "x"}])
    config = config_for(prompt_data=data, label_key="label", seq_length=20)
    with pytest.raises(UserError, match="consecutive samples are longer than 20 tokens"):
        generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)


def test_sft_leaves_out_long_prompts_counts_them_and_tells_once(
    tmp_path: Path, fresh_log: None
) -> None:
    rows = [{"input": "q" * n, "label": "a"} for n in (1, 9, 2)]
    data = write_jsonl(tmp_path / "s.jsonl", rows)
    config = config_for(prompt_data=data, label_key="label", rollout_max_prompt_len=4)
    output = generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)
    assert [group.index for group in output.samples] == [0, 2] and output.metrics is not None
    assert output.metrics["rollout/sft_too_long"] == 1
    generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)
    [said] = [told for told in untold() if "too long and left out" in told]
    assert (
        "1 of 3 samples" in said
        and "the longest: 11 tokens, 9 before" in said
        and "-max-prompt-len 4" in said
    )
    config = config_for(
        prompt_data=data, label_key="label", rollout_max_prompt_len=0 + 1, seq_length=3
    )
    write_jsonl(tmp_path / "s.jsonl", rows[1:])
    with pytest.raises(
        UserError, match=r"prompt of more than --rollout-max-prompt-len 1 tokens \(shortest: 2\)"
    ):
        generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)


@pytest.mark.parametrize("name", ["log_and_replace", "log_beside"])
def test_supervised_rollouts_are_dumped_and_logged_like_others(tmp_path: Path, name: str) -> None:
    data = write_jsonl(tmp_path / "s.jsonl", [{"input": "q", "label": "a"}])
    flags = {"save_debug_rollout_data": str(tmp_path / "{rollout_id}.pt"), "rollout_batch_size": 1}
    hook = f"tests.support.rollout_hooks.{name}"
    config = config_for(
        prompt_data=data, label_key="label", custom_rollout_log_function_path=hook, **flags
    )
    rollout_hooks.calls.clear()
    source = PromptSource(config, TOKENIZER)
    output = asyncio.run(data_rollout(generate_sft, config, source, TOKENIZER, 4))
    assert load_samples(tmp_path / "4.pt") == output.samples[0].samples
    [(_, (rollout_id, samples, metrics))] = rollout_hooks.calls
    assert (rollout_id, samples) == (4, output.samples[0].samples) and metrics[
        "rollout/sft_trained_tokens"
    ] == 2
    assert output.metrics == ({} if name == "log_and_replace" else metrics)


def test_sft_ends_when_the_data_has_ended() -> None:
    class Empty(DataSource):
        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            return []

        def add_samples(self, samples: list[list[Sample]]) -> None:
            raise AssertionError

    with pytest.raises(UserError, match="gave no more samples after 0 of"):
        generate_sft(config_for(), Empty(), TOKENIZER)


# -- buffer ----------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(1, 4), st.tuples(st.integers(0, 6))), max_size=20))
def test_the_buffer_is_first_in_first_out(actions: list[Any]) -> None:
    buffer, expected, counter = SampleBuffer(), [], 0
    for action in actions:
        if isinstance(action, int):
            groups = [[Sample(group_index=counter + i)] for i in range(action)]
            counter += action
            buffer.add(groups)
            expected += [group[0].group_index for group in groups]
        else:
            taken = [group[0].group_index for group in buffer.take(action[0])]
            assert taken == expected[: action[0]]
            del expected[: action[0]]
        assert len(buffer) == len(expected) and buffer.group_indices == set(expected)
        restored = SampleBuffer()
        restored.load_state_dict(buffer.state_dict())
        assert restored.state_dict() == buffer.state_dict()


# -- cost ------------------------------------------------------------------------------------------


def test_cost_of_a_dense_model_is_two_flops_per_weight_and_quadratic_attention() -> None:
    config = {
        "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 32,
    }  # fmt: skip
    cost = sequence_cost(family_of(config), config)
    attention, mlp, output = 8 * 8 + 2 * 8 * 4 + 8 * 8, 3 * 8 * 16, 8 * 32
    assert cost.linear == 2 * (3 * (attention + mlp) + output)
    assert cost.quadratic == 2 * 3 * 8
    windowed = {**config, "model_type": "mistral", "sliding_window": 4}
    narrow = sequence_cost(family_of(windowed), windowed)
    pairs = [sum(min(place + 0.5, 4) for place in range(length)) for length in (3, 4, 10)]
    for length, seen in zip((3, 4, 10), pairs):
        assert narrow(length) - narrow.linear * length == 2 * cost.quadratic * seen
    sparse = {
        **config,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "moe_intermediate_size": 4,
        "num_experts_per_tok": 2,
    }
    moe = sequence_cost(family_of(sparse), sparse)
    router = 8 * 4
    assert cost.linear - moe.linear == 2 * 3 * (mlp - 2 * 3 * 8 * 4 - router), (
        "only the active experts count"
    )
