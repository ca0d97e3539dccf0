"""All rows are checked before a launch, and everything that is wrong with them is said at once."""

from __future__ import annotations

import json
import logging
import os
import queue
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.__main__ import main
from slime.config import Config, make_config
from slime.diagnosis.check import CheckedRun, CheckFindings
from slime.diagnosis.checks_data import data as doctor_data
from slime.errors import UserError
from slime.log import untold
from slime.prompts import prepare
from slime.prompts.prepare import ALL_ROWS, Checker, positions_to_check, remember
from slime.prompts.source import PromptSource
from slime.rollout.rewards.row_checks import RewardJudge
from slime.rollout.sft import generate_sft
from slime.rollout.validate_rows import DataReport, RemainingRows, _has_large, validate_data
from slime.run import preflight
from tests.support import toy
from tests.support.prompt_fixtures import CHATML, make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()
GOOD = {"input": "1+2=", "label": "3"}


@pytest.fixture(autouse=True)
def nothing_was_checked_before() -> None:
    remember([])


def config_of(path: str, **flags: Any) -> Config:
    given = {"prompt_data": path, "num_rollout": 1, "rollout_batch_size": 2, "label_key": "label"}
    return make_config(**given | flags)


def report_of(path: str, tokenizer: Any = TOKENIZER, **flags: Any) -> DataReport:
    return validate_data(config_of(path, **flags), tokenizer)


def error_of(path: str, **flags: Any) -> str:
    error = report_of(path, **flags).error
    assert error is not None
    return str(error)


def chat(question: str, *answers: str) -> dict[str, Any]:
    said = [{"role": "assistant", "content": answer} for answer in answers]
    return {"messages": [{"role": "user", "content": question}, *said]}


# -- what is said ----------------------------------------------------------------------------------


def test_all_kinds_of_problems_are_in_one_answer_with_their_remedies(tmp_path: Path) -> None:
    rows = [GOOD, {"input": " ", "label": "3"}, {"label": "3"}, GOOD, {"input": "", "label": "3"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    error = error_of(path, rm_type="math")
    assert f"2 of 5 rows have an empty prompt (key 'input') (first: {path}:2)" in error
    assert f"1 of 5 rows have no key 'input' (first: {path}:3)" in error
    assert "remove these rows" in error and "--input-key" in error


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_that_begins_with_a_malformed_line(tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input":\n{"input": "", "label": "3"}\n')
    error = error_of(str(path), rm_type="math", streaming_data=streaming)
    assert (
        f"{path}:1" in error
        and "not valid JSON" in error
        and (streaming or f"(first: {path}:2)" in error)
    )


def test_problems_of_all_data_sets_are_told_together(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", [{"inputs": "1+2=", "label": "3"}])
    test = write_jsonl(tmp_path / "test.jsonl", [GOOD, {"input": "1+2=", "label": None}])
    flags = {"eval_prompt_data": ["test", test], "eval_interval": 1, "eval_label_key": "label"}
    error = error_of(train, rm_type="math", **flags)
    assert "2 problems with the data" in error
    assert f"{train}: 1 of 1 rows have no key 'input'" in error and f"(first: {test}:2)" in error


def test_a_missing_file_is_told_as_such_and_missing_labels_besides(tmp_path: Path) -> None:
    error = error_of(str(tmp_path / "none.jsonl"), rm_type="math", label_key=None)
    assert f"there is no data file '{tmp_path / 'none.jsonl'}'" in error
    assert "--rm-type math compares responses with labels" in error


def test_a_missing_flag_hides_no_wrong_column_and_one_wrong_column_no_other(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "1+2=", "answer": "3"}] * 2)
    error = error_of(path, rm_type="math", label_key=None)
    assert "2 problems with the data" in error
    assert "--rm-type math compares responses with labels" in error
    assert "pass --label-key answer" in error and "pass --input-key question" in error
    assert "2 of 2 rows have no key 'input' (first: " in error and "cannot grade" not in error
    keys = {"input_key": "ask", "label_key": "lable", "metadata_key": "meta", "tool_key": "calls"}
    error = error_of(path, rm_type="math", **keys)
    assert "no key 'ask' and no key 'lable' and no key 'meta' and no key 'calls'" in error
    assert "pass --input-key question; pass --label-key answer; pass --metadata-key" in error


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata", "reason"),
    [
        ("gpqa", "Paris", {}, "is 'Paris'"),
        ("math", "\\boxed{}", {}, "empty \\boxed{}"),
        ("dapo", "$", {}, "is '$'"),
        ("math", "Paris", {"rm_type": "gpqa"}, "is 'Paris'"),
    ],
)
def test_labels_that_their_reward_cannot_grade(
    tmp_path: Path, rm_type: str, label: str, metadata: dict[str, Any], reason: str
) -> None:
    good = {"input": "q", "label": "B"}
    path = write_jsonl(
        tmp_path / "rows.jsonl", [good, {**good, "label": label, "metadata": metadata}]
    )
    error = error_of(path, rm_type=rm_type)
    assert (
        "1 of 2 rows have a label that --rm-type" in error
        and f"(first: {path}:2)" in error
        and reason in error
    )
    assert report_of(path, rm_type=rm_type, custom_rm_path="their.function").error is None


def test_one_prompt_with_two_labels_is_told(tmp_path: Path) -> None:
    rows = [GOOD, GOOD, {**GOOD, "label": "4"}, {**GOOD, "input": "1+3=", "label": "4"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    (told,) = report_of(path, rm_type="math").warnings
    assert "1 of 4 rows have the prompt of an earlier row and another label" in told
    assert f"(first: {path}:3); the first has the prompt of {path}:1" in told
    assert report_of(path, rm_type="random").warnings == []


def test_labels_that_a_response_can_match_are_told_and_not_refused(tmp_path: Path) -> None:
    solution = {**GOOD, "label": "word " * 60}
    path = write_jsonl(
        tmp_path / "rows.jsonl",
        [GOOD, GOOD, {**GOOD, "label": "<"}, solution, {**GOOD, "label": True}],
    )
    report = report_of(path, rm_type="math")
    assert report.error is None and report.sizes[path].num_kept == 5
    as_text, long, _ = sorted(report.warnings)  # the last: one prompt with several labels
    assert (
        f"1 of 5 rows have a label that --rm-type math compares as text (first: {path}:3)"
        in as_text
    )
    assert f"(first: {path}:4)" in long and "a text of 60 words" in long


def test_a_column_of_solutions_is_refused_as_a_label(tmp_path: Path) -> None:
    solution = {**GOOD, "label": "word " * 60}
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, solution, solution])
    error = error_of(path, rm_type="math")
    assert "2 of 3 rows have a long text for a label" in error and "--label-key" in error


def test_message_keys_that_nothing_reads_are_told_once_with_the_number_of_rows(
    tmp_path: Path,
) -> None:
    row = {"input": [{"role": "user", "content": "hi", "citations": [1]}], "label": "3", "id": 7}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, row, GOOD])
    (line,) = report_of(path, rm_type="math", apply_chat_template=True).warnings
    assert "citations (2 of 3 rows)" in line and "id (2 of 3 rows)" in line
    path = write_jsonl(tmp_path / "rows.jsonl", [{**GOOD, "id": 7}])
    report = report_of(path, rm_type="math")
    assert report.warnings == [] and report.notes == [
        f"{path}: nothing reads the columns id (1 of 1 rows)"
    ]


@pytest.mark.parametrize("is_supervised", [False, True])
def test_messages_that_the_template_leaves_out_or_does_not_know_are_told(
    tmp_path: Path, is_supervised: bool
) -> None:
    roles = ("user", "critic", "assistant") if is_supervised else ("user", "critic")
    talk = [{"role": role, "content": f"the {role}"} for role in roles]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"input": talk}, {"input": [talk[0], *talk[2:]]}])
    shy = make_tokenizer(CHATML.replace("m in messages", "m in messages if m.role != 'critic'"))
    flags: dict[str, Any] = {"label_key": None, "rm_type": "random", "apply_chat_template": True}
    if is_supervised:
        flags = {"label_key": None, "loss_type": "sft_loss"}
    foreign, left_out = report_of(path, shy, **flags).warnings
    assert "1 of 2 rows have messages of a role that is none of" in foreign
    assert "1 of 2 rows have messages that the chat template leaves out" in left_out
    assert "'critic'" in foreign and "'critic'" in left_out
    assert len(report_of(path, **flags).warnings) == 1


@pytest.mark.parametrize("loss", ["policy_loss", "sft_loss", "preference_loss"])
def test_a_part_of_the_prompt_that_nothing_reads_is_told(tmp_path: Path, loss: str) -> None:
    row = chat("1+2=", *(["3"] if loss == "sft_loss" else [])) | {"system": "be brief"}
    first = {"role": "system", "content": "be brief"}
    rows = [row, row | {"messages": [first, *row["messages"]]}, row | {"system": " "}]
    answers = {"chosen": "three and more", "rejected": "four"}
    flags: dict[str, Any] = {"input_key": "messages", "label_key": None, "loss_type": loss}
    if loss == "policy_loss":
        flags |= {"rm_type": "random", "apply_chat_template": True}
    if loss == "preference_loss":
        flags |= {"preference_loss": "dpo"}
        rows = [row | answers for row in rows]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    (line,) = report_of(path, **flags).warnings
    assert "1 of 3 rows have a part of the prompt in the column 'system'" in line


def test_answers_that_begin_otherwise_than_the_generation_prompt_are_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("1+2=", "3"), chat("2+2=", "Sum: 4")])
    sums = make_tokenizer(CHATML.replace("assistant\\n' }}", "assistant\\nSum: ' }}"))
    flags = {"input_key": "messages", "label_key": None, "loss_type": "sft_loss"}
    (line,) = report_of(path, sums, **flags).warnings
    assert "1 of 2 rows have answers that begin otherwise than the generation prompt" in line
    assert "'Sum: '" in line


@pytest.mark.parametrize(
    ("name", "value", "num_lines"),
    [
        ("history", [["1+1=", "2"]], 1),
        ("history", [], 0),
        ("functions", [{"name": "add"}], 1),
        ("notes", [1], 0),
    ],
)
def test_earlier_turns_and_tools_that_nothing_reads_are_told(
    tmp_path: Path, name: str, value: Any, num_lines: int
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD | {name: value}])
    lines = report_of(path, rm_type="math").warnings
    assert (
        sum(f"a part of the prompt in the column '{name}'" in line for line in lines) == num_lines
    )


@pytest.mark.parametrize(("key", "num_lines"), [("instruction", 1), ("question", 0)])
def test_the_input_of_an_instruction_is_a_part_of_the_prompt(
    tmp_path: Path, key: str, num_lines: int
) -> None:
    rows = [{key: "Add them.", "input": "1 and 2", "output": "3"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {"input_key": key, "label_key": "output", "loss_type": "sft_loss"}
    lines = report_of(path, **flags).warnings
    assert [("in the column 'input'" in line) for line in lines] == [True] * num_lines


@pytest.mark.parametrize("loss", ["sft_loss", "preference_loss"])
def test_answers_that_begin_with_their_prompt_are_told(tmp_path: Path, loss: str) -> None:
    asked = "What is one and two?"
    rows = [{"input": asked, "label": f"{asked} 3"}, {"input": asked, "label": "3"}]
    flags: dict[str, Any] = {"loss_type": loss}
    if loss == "preference_loss":
        flags |= {"preference_loss": "dpo", "input_key": "input", "label_key": None}
        rows = [
            {"input": row["input"], "chosen": row["label"], "rejected": row["label"] + "1"}
            for row in rows
        ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    (line,) = report_of(path, **flags).warnings
    assert "1 of 2 rows have answers that begin with their prompt" in line


def test_answers_that_are_cut_off_in_their_reasoning_are_told(tmp_path: Path) -> None:
    rows = [chat("1+2=", said) for said in ("<think>hm", "<think>hm</think>", "<think>hm</think>3")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags: dict[str, Any] = {"loss_type": "sft_loss", "input_key": "messages", "label_key": None}
    (line,) = report_of(path, **flags).warnings
    assert "2 of 3 rows have answers that are cut off in their reasoning" in line


@pytest.mark.parametrize("own", [["search"], "search", {"search": True}])
def test_tools_in_the_metadata_that_are_no_tools_are_left_to_the_user(
    tmp_path: Path, own: Any
) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl", [chat("1+2=", "3") | {"metadata": {"tools": own}}] * 2
    )
    config = config_of(path, loss_type="sft_loss", input_key="messages", label_key=None)
    assert validate_data(config, TOKENIZER).error is None
    output = generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)
    assert output.samples[0].samples[0].metadata == {"tools": own}


SYSTEM = {"role": "system", "content": "be brief"}
ASKED = {"role": "user", "content": "What is one and two?"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"input": "What is \x0crac{1}{2}?"}, "control characters where LaTeX commands were"),
        ({"input": "one\ufffdtwo"}, "characters that an earlier conversion has lost"),
        ({"input": r"One.\nTwo.\nThree."}, "line breaks that are written as a backslash and n"),
        ({"input": "<image>What is it?"}, "have <image> in their prompt"),
        ({"input": "[INST] 1+2= [/INST]"}, "the marks of another chat template"),
        ({"input": "\n\nHuman: 1+2=\n\nAssistant:"}, "the marks of another chat template"),
        ({"input": "1+2=", "rm_type": "gpqa"}, "name a reward in the column 'rm_type'"),
        ({"input": [SYSTEM, SYSTEM, ASKED]}, "have a message that repeats the one before it"),
        ({"input": [SYSTEM, ASKED], "system": "be long"}, "another system prompt in the column"),
        ({"input": "1+2=\nAnswer: 3"}, "have a prompt that ends with its own answer"),
        ({"input": "3"}, "have their prompt as the label"),
    ],
)
def test_prompts_that_are_rarely_meant_are_told(
    tmp_path: Path, row: dict[str, Any], told: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, {"label": "3"} | row])
    report = report_of(path, rm_type="math", apply_chat_template=True)
    assert report.error is None
    assert [told in line for line in report.warnings] == [True], report.warnings
    usual = [{"input": [SYSTEM, ASKED], "label": "3", "system": "be brief"}, GOOD]
    path = write_jsonl(tmp_path / "usual.jsonl", usual)
    assert not report_of(path, rm_type="math", apply_chat_template=True).warnings


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({"input": "1+2="}, {"input": " 1+2=\n"}, True),
        ({"metadata": {"index": 1}}, {"metadata": {"index": 2}}, True),
        ({"metadata": {"choices": ["a"]}}, {"metadata": {"choices": ["b"]}}, False),
    ],
)
def test_a_prompt_with_two_labels_is_the_same_whatever_its_blanks_and_number(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], differs: bool
) -> None:
    rows = [GOOD | first, GOOD | second | {"label": "4"}]
    lines = report_of(write_jsonl(tmp_path / "rows.jsonl", rows), rm_type="math").warnings
    assert ["have the prompt of an earlier row" in line for line in lines] == [True] * differs


def test_labels_that_are_all_the_same_are_told(tmp_path: Path) -> None:
    rows = [{"input": f"{number}", "label": "A"} for number in range(20)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert "all 20 labels are 'A'" in report_of(path, rm_type="gpqa").warnings[0]
    path = write_jsonl(tmp_path / "two.jsonl", [*rows, {"input": "x", "label": "B"}])
    assert not report_of(path, rm_type="gpqa").warnings


def test_repeated_prompts_are_noted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD] * 21)
    assert "20 of 21 prompts repeat an earlier one" in report_of(path).notes[0]


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"hint": "1+2= is 3"}, ""),
        ({"hint": '[{"role": "user", "content": "1+2= is 3"}]'}, ""),
        ({"hints": "1+2= is 3"}, "1 of 1 rows have no prompt for the teacher (metadata 'hint')"),
        ({"hint": " "}, "that is neither text nor messages"),
        ({"hint": [1, 2]}, "that is neither text nor messages"),
    ],
)
def test_a_prompt_for_the_teacher_is_read(
    tmp_path: Path, metadata: dict[str, Any], told: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD | {"metadata": metadata}])
    flags = {"use_opd": True, "opd_teacher_load": "self", "opd_teacher_prompt_key": "hint"}
    config = config_of(path, rm_type="math", ref_load="x", hf_checkpoint="x", **flags)
    report = validate_data(config, TOKENIZER)
    lines = [str(report.error)] if report.error else report.warnings
    assert told in "".join(lines) and len(lines) == bool(told)


def test_evaluated_prompts_that_are_trained_are_told(tmp_path: Path) -> None:
    rows = [{"input": f"{number}+1=", "label": str(number + 1)} for number in range(8)]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    asked = [row | {"input": [ASKED | {"content": f"{row['input']}\n"}]} for row in rows[6:]]
    other = write_jsonl(tmp_path / "test.jsonl", [*asked, GOOD])
    flags = {"eval_interval": 1, "eval_label_key": "label", "rm_type": "math"}
    report = report_of(path, eval_prompt_data=["t", other], apply_chat_template=True, **flags)
    (line,) = report.warnings
    assert f"{other}: 2 of its 3 different prompts are in {path}" in line
    report = report_of(path, eval_prompt_data=["t", f"{path}@[:4]"], **flags)
    assert not report.warnings and "4 of its 4 different prompts" in report.notes[-1]


@pytest.mark.parametrize("is_supervised", [False, True])
def test_arguments_that_the_template_does_not_read_are_told(
    tmp_path: Path, is_supervised: bool
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("1+2=", *(["3"] if is_supervised else []))])
    tokenizer = make_tokenizer(CHATML + "{% if enable_thinking %}<think>{% endif %}")
    flags: dict[str, Any] = {"input_key": "messages", "label_key": None, "loss_type": "sft_loss"}
    if not is_supervised:
        flags |= {"loss_type": "policy_loss", "rm_type": "random", "apply_chat_template": True}
    given = {"enable_thinkng": False}
    (line,) = report_of(path, tokenizer, apply_chat_template_kwargs=given, **flags).warnings
    assert "does not read 'enable_thinkng'" in line and "did you mean 'enable_thinking'?" in line
    given = {"enable_thinking": False}
    assert report_of(path, tokenizer, apply_chat_template_kwargs=given, **flags).warnings == []


def test_prompts_that_hold_their_answer_are_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("1+2=", "3"), chat("1+1=")])
    flags = {"input_key": "messages", "label_key": None, "rm_type": "random"}
    (line,) = report_of(path, apply_chat_template=True, **flags).warnings
    assert "1 of 2 rows have prompts that end with a message of the assistant" in line


def test_doctor_says_what_the_launch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    model = toy.write_tokenizer(tmp_path / "model")
    path = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"input": "1" * 30, "label": "3"}, {"input": "", "label": "3"}, GOOD],
    )
    config = config_of(path, rm_type="math", hf_checkpoint=str(model), rollout_max_prompt_len=20)
    with pytest.raises(UserError) as refused:
        preflight.check_data(config)
    findings = CheckFindings("data-rows")
    doctor_data(CheckedRun(config), findings)
    fatal, warning = findings.all
    assert (
        fatal.is_fatal
        and fatal.detail.splitlines()[0] == refused.value.what
        and f"{path}:2" in fatal.detail
    )
    assert (
        not warning.is_fatal
        and warning.detail in caplog.messages
        and f"first: {path}:1" in warning.detail
    )


def test_a_launch_ends_before_ray_with_the_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = toy.write_answering_model(tmp_path / "model")
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, {"input": "1+2="}])
    flags = [
        "--hf-checkpoint",
        model,
        "--prompt-data",
        path,
        "--label-key",
        "label",
        "--rm-type",
        "math",
    ]
    flags += [
        "--num-rollout",
        1,
        "--rollout-batch-size",
        1,
        "--n-samples-per-prompt",
        2,
        "--output-dir",
        tmp_path / "o",
    ]
    assert main(["train", *map(str, flags)]) == 2
    assert f"1 of 2 rows have no key 'label' (first: {path}:2)" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_slime_reward_says_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input": "q", "label": "Paris", "response": "A"}, {"input": "q", "label": "A"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert main(["reward", "--rm-type", "gpqa", "--prompt-data", path, "--label-key", "label"]) == 2
    error = capsys.readouterr().err
    assert (
        f"cannot grade (first: {path}:1)" in error
        and f"no key 'response' (first: {path}:2)" in error
    )


# -- lengths ---------------------------------------------------------------------------------------


def test_without_a_flag_prompts_are_measured_against_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 40}))
    rows = [{"input": "x" * length, "label": "3"} for length in (39, 40, 5)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    flags = {"rm_type": "math", "hf_checkpoint": str(tmp_path)}
    (line,) = report_of(path, **flags).warnings
    assert (
        "1 of 3 prompts are longer than 39 tokens and left out" in line
        and f"first: {path}:2" in line
    )
    assert len(PromptSource(config_of(path, **flags), TOKENIZER)) == 2
    assert report_of(path, **flags, rollout_external_engine_addrs=["127.0.0.1:1"]).warnings == []
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"max_position_embeddings": 40, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
        )
    )
    assert report_of(path, **flags).warnings == []


def test_an_epoch_of_less_than_a_batch_counts_what_is_left_out(tmp_path: Path) -> None:
    model = toy.write_tokenizer(tmp_path / "model")
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"input": "1" * length, "label": "3"} for length in (3, 30, 3)]
    )
    flags = {"num_rollout": None, "num_epoch": 1, "rollout_batch_size": 3, "rm_type": "math"}
    config = config_of(path, hf_checkpoint=str(model), rollout_max_prompt_len=20, **flags)
    (error,) = preflight.data_report(config).errors
    assert (
        "has 2 prompts, less than one --rollout-batch-size of 3" in error.what
        and "1 of 3 are left out" in error.why
    )


# -- supervised fine-tuning ------------------------------------------------------------------------

SFT = {"loss_type": "sft_loss", "input_key": "messages", "label_key": None}


def test_every_row_is_encoded_before_supervised_training(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl", [chat("Q", "A"), chat("nobody answers"), chat("Q", "A")]
    )
    error = error_of(path, **SFT)
    assert (
        f"1 of 3 rows cannot be trained on: there is no answer to train on (first: {path}:2)"
        in error
    )


def test_labels_beside_conversations_that_end_with_an_answer_are_counted(tmp_path: Path) -> None:
    rows = [
        chat("Q", "A") | {"label": "B"},
        chat("Q") | {"label": "A"},
        chat("Q", "A"),
        {"messages": [*chat("Q", "A")["messages"], {"role": "user", "content": "R"}], "label": 5},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    lines = report_of(path, **SFT | {"label_key": "label", "label_type": "raw"}).warnings
    (answered,) = [line for line in lines if "end with an answer" in line]
    assert "1 of 4 rows have labels that are not trained" in answered and f"{path}:1" in answered
    assert "leave --label-key out" in answered
    assert sum("because they are no text" in line for line in lines) == 1


def test_conversations_that_are_too_long_are_counted_and_refused_only_if_all_are(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("Q", "A"), chat("Q", "A" * 200)])
    (line,) = report_of(path, **SFT, seq_length=100).warnings
    assert (
        "1 of 2 rows are longer than 100 tokens, and left out when they are drawn" in line
        and f"{path}:2" in line
    )
    assert "2 of 2 rows are longer than 10 tokens" in error_of(path, **SFT, seq_length=10)


def test_a_row_that_cannot_be_trained_on_is_named_by_file_and_line_when_it_is_drawn(
    tmp_path: Path,
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat("Q", "A"), chat("nobody answers")])
    config = config_of(path, **SFT, rollout_shuffle=False)
    with pytest.raises(UserError, match=f"{path}:2: there is no answer to train on"):
        generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)


def test_unchecked_rows_that_cannot_be_trained_on_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.prompts.source.ALL_ROWS", 2)
    untold()
    path = write_jsonl(
        tmp_path / "rows.jsonl", [chat("Q", "A"), chat("nobody answers"), chat("Q", "B")]
    )
    config = config_of(path, **SFT, rollout_shuffle=False)
    output = generate_sft(config, PromptSource(config, TOKENIZER), TOKENIZER)
    assert [group.samples[0].response[0] for group in output.samples] == ["A", "B"]
    assert any(f"{path}:2: there is no answer to train on" in line for line in untold())


# -- checked once ----------------------------------------------------------------------------------


def test_the_process_that_draws_does_not_check_again_unless_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD, {"input": "x" * 90, "label": "3"}, GOOD])
    flags = {"rm_type": "math", "rollout_max_prompt_len": 20}
    remember(report_of(path, **flags).checked)
    scans: list[int] = []
    scan = Checker.scan
    monkeypatch.setattr(
        Checker, "scan", lambda self, rows, at: scans.append(len(at)) or scan(self, rows, at)
    )
    assert len(PromptSource(config_of(path, **flags), TOKENIZER)) == 2 and scans == []
    assert len(PromptSource(config_of(path, **flags), make_tokenizer(bos="<|endoftext|>"))) == 2
    assert (
        len(PromptSource(config_of(path, rm_type="math", rollout_max_prompt_len=99), TOKENIZER))
        == 3
        and scans
    )
    scans.clear()
    os.utime(path, ns=(1, 1))
    assert len(PromptSource(config_of(path, **flags), TOKENIZER)) == 2 and scans


def test_a_slow_check_is_shared_among_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(
        tmp_path / "rows.jsonl", [GOOD] * 20 + [{"input": "", "label": "3"}] + [GOOD] * 9
    )
    for name, value in (("_BATCH", 4), ("_TASK", 8), ("_SLOW_CHECK", 0.0)):
        monkeypatch.setattr(prepare, name, value)
    monkeypatch.setattr(prepare, "num_cpus", lambda: 2)
    assert f"1 of 30 rows have an empty prompt (key 'input') (first: {path}:21)" in error_of(
        path, rm_type="math"
    )


# -- large data sets -------------------------------------------------------------------------------


@given(st.integers(1, 3_000_000))
def test_small_data_sets_are_checked_whole_and_of_large_ones_the_ends_and_between(
    num_rows: int,
) -> None:
    chosen = positions_to_check(num_rows)
    if num_rows <= ALL_ROWS:
        assert chosen == range(num_rows)
        return
    assert list(chosen[:2000]) == list(range(2000)) and list(chosen[-2000:]) == list(
        range(num_rows - 2000, num_rows)
    )
    assert len(set(chosen)) == len(chosen) == 6000 and list(chosen) == sorted(chosen)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two rows that cannot be used are among those that are not checked before a launch."""
    rows = [{"input": "q", "label": "A"}] * (ALL_ROWS + 1000)
    rows[10_003] = {"input": "q", "label": "Paris"}
    rows[10_005] = {"input": "q", "label": "Rome"}
    return write_jsonl(tmp_path_factory.mktemp("large") / "rows.jsonl", rows)


def test_the_rest_of_a_large_data_set_is_checked_beside_the_run(large: str, tmp_path: Path) -> None:
    model = toy.write_tokenizer(tmp_path / "model")
    config = config_of(large, rm_type="gpqa", hf_checkpoint=str(model))
    report = validate_data(config, TOKENIZER)
    assert (
        report.error is None
        and "6000 of 21000 rows were checked" in report.notes[-1]
        and not report.checked
    )
    said = queue.SimpleQueue[str]()
    remaining = RemainingRows(config, said.put)
    try:
        first, last = said.get(timeout=120), said.get(timeout=120)
    finally:
        remaining.close()
    assert first.startswith(
        f"{large}:10004: rows here have a label that --rm-type gpqa cannot grade"
    )
    assert (
        f"2 of 15000 rows have a label that --rm-type gpqa cannot grade (first: {large}:10004)"
        in last
    )


def test_the_rest_of_held_out_preferences_is_checked_beside_the_run(
    large: str, tmp_path: Path
) -> None:
    few = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    flags: dict[str, Any] = {"loss_type": "preference_loss", "label_key": None}
    assert _has_large(config_of(few, **flags, eval_preference_data=large))
    assert not _has_large(config_of(few, **flags, eval_preference_data=few))


def test_unchecked_rows_of_no_use_are_passed_over_and_told(large: str) -> None:
    untold()
    config = config_of(f"{large}", rm_type="gpqa", rollout_shuffle=False)
    source = PromptSource(config, TOKENIZER, RewardJudge.of_training(config))
    labels = [group[0].label for group in source.get_samples(10_010)]
    assert set(labels) == {"A"} and len(source) == 21_000
    assert [line for line in untold() if f"{large}:10004" in line]
    assert source.where(10_002) == f"{large}:10003" and source.where(10_003) == f"{large}:10005"


# -- tokens without a row in the embedding ---------------------------------------------------------

MESSAGES = {"messages": [{"role": "user", "content": "1+2="}], "label": "3"}
CHAT = {"input_key": "messages"}


@pytest.mark.parametrize(
    ("vocab_size", "row", "flags", "token"),
    [
        (110, MESSAGES, {**CHAT, "apply_chat_template": True}, ""),
        (97, GOOD, {}, ""),
        (97, GOOD | {"input": "1<|im_end|>"}, {}, "<|im_end|>"),
        (97, MESSAGES, {**CHAT, "apply_chat_template": True}, "<|im_"),
        (97, MESSAGES, CHAT, "<|im_"),  # rendered when they are drawn
        (97, chat("1", "2"), {**CHAT, "loss_type": "sft_loss"}, "<|im_"),
        (60, GOOD, {}, ""),
        (60, GOOD | {"input": "what"}, {}, "w"),
        (60, {"input": [1, 70], "label": "3"}, {}, "e"),
    ],
)
def test_tokens_beyond_the_embedding_are_refused_where_they_occur(
    vocab_size: int, row: Any, flags: Any, token: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("slime.prompts.source.vocab_size_of", lambda *args: vocab_size)
    flags = {"label_key": None, **flags} if "sft_loss" in flags.values() else flags
    error = report_of(write_jsonl(tmp_path / "rows.jsonl", [row]), **flags).error
    if not token:
        assert error is None
        return
    assert "1 of 1 rows have tokens that the model does not know" in str(error)
    assert f"'{token}" in str(error) and "resize_token_embeddings" in str(error)
