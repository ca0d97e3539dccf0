"""What a new user is told after a mistake: the place that is wrong and what to do about it, before
anything starts."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from slime.__main__ import main
from slime.config import make_config, parse_args
from slime.errors import UserError
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.eval_datasets import eval_datasets
from slime.rollout.validate_rows import validate_data
from tests.support import toy

GOOD = {"prompt": "1+2=", "label": "3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def write(path: Path, *rows: Any, start: bytes = b"") -> Path:
    path.write_bytes(start + b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return path


def refused(model: Path, data: Path, **flags: Any) -> UserError:
    """What the look at the data before a launch says."""
    flags = {"input_key": "prompt", "label_key": "label", "rm_type": "math", **flags}
    config = make_config(hf_checkpoint=str(model), prompt_data=str(data), num_rollout=1, **flags)
    error = validate_data(config, load_tokenizer(str(model))).error
    assert error is not None
    return error


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "fix", "never"),
    [
        (
            {"prompt": "1+2="},
            "pass --label-key with an existing column",
            "--label-key prompt",
        ),
        ({"prompt": "1+2=", "answer": "3"}, "pass --label-key answer", ""),
        ({"question": "1+2=", "label": "3", "id": 1}, "pass --input-key question", ""),
        (
            {"zzz": "1+2=", "label": "3"},
            "pass --input-key with an existing column",
            "--input-key zzz",
        ),
        (
            {"prompt": [{"role": "user", "text": "1+2="}], "label": "3"},
            "write them under 'content'",
            "remove",
        ),
        ("1+2=", "", ""),
    ],
)
def test_rows_that_cannot_be_used(
    model: Path, tmp_path: Path, row: Any, fix: str, never: str
) -> None:
    error = refused(model, write(tmp_path / "rows.jsonl", row))
    assert fix in error.fix and (not never or never not in str(error))


def test_a_byte_order_mark_is_no_mistake(model: Path, tmp_path: Path) -> None:
    for name, rows in (("a.jsonl", [GOOD, GOOD]), ("a.json", [[GOOD, GOOD]])):
        data = write(tmp_path / name, *rows, start=codecs.BOM_UTF8)
        for streaming in (False, True):
            config = make_config(
                hf_checkpoint=str(model), prompt_data=str(data), input_key="prompt", num_rollout=1,
                streaming_data=streaming,
            )  # fmt: skip
            assert validate_data(config, load_tokenizer(str(model))).error is None


def test_a_line_that_is_no_json_says_what_one_is(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+\n')
    assert "one JSON object per line" in refused(model, tmp_path / "a.jsonl").fix


def test_a_template_with_a_syntax_error_is_not_the_fault_of_the_roles(
    model: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "a.jsonl", GOOD)
    broken = toy.write_tokenizer(
        tmp_path / "broken", chat_template="{% for m in messages %}{{ m.content }"
    )
    error = refused(broken, data, apply_chat_template=True)
    assert "syntax error" in str(error) and "line 1" in error.why and str(broken) in error.fix
    strict = toy.write_tokenizer(
        tmp_path / "strict", chat_template="{{ raise_exception('roles must alternate') }}"
    )
    assert "roles" in str(refused(strict, data, apply_chat_template=True))


def test_a_folder_that_is_no_data_set_says_why(model: Path, tmp_path: Path) -> None:
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "a.parquet").write_bytes(b"no parquet at all")
    error = refused(model, tmp_path / "junk")
    assert (
        "while generating" not in str(error) and "magic bytes" in str(error).lower() and error.fix
    )


# -- labels ----------------------------------------------------------------------------------------


def drawn_label(model: Path, data: Path, **flags: Any) -> Any:
    from slime.prompts.source import make_source

    keys = {"input_key": "prompt", "label_key": "label"}
    config = make_config(
        hf_checkpoint=str(model), prompt_data=str(data), num_rollout=1, **keys, **flags
    )
    return make_source(config, load_tokenizer(str(model))).get_samples(1)[0][0].label


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (22, "22"),
        (True, "true"),
        (0.5, "0.5"),
        ("22", "22"),
        ([1, 2], [1, 2]),
        ({"a": 1}, {"a": 1}),
        (None, None),
    ],
)
def test_labels_are_text_unless_they_are_lists_or_dicts(
    model: Path, tmp_path: Path, label: Any, text: Any
) -> None:
    data = write(tmp_path / "a.jsonl", {"prompt": "1+2=", "label": label})
    found, raw = drawn_label(model, data), drawn_label(model, data, label_type="raw")
    assert (found, type(found)) == (text, type(text)) and (raw, type(raw)) == (label, type(label))


def test_a_reward_to_which_a_number_is_a_position_gets_the_number(
    model: Path, tmp_path: Path
) -> None:
    data = write(tmp_path / "a.jsonl", {"prompt": "1+2=", "label": 2})
    assert (
        drawn_label(model, data, rm_type="gpqa") == 2
        and drawn_label(model, data, rm_type="math") == "2"
    )
    data = write(
        tmp_path / "b.jsonl", {"prompt": "1+2=", "label": 2, "metadata": {"rm_type": "boxed_gpqa"}}
    )
    assert drawn_label(model, data) == 2


# -- flags -----------------------------------------------------------------------------------------

RUN = [
    "--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "3",
    "--rollout-batch-size", "4"
]  # fmt: skip
RUN += ["--n-samples-per-prompt", "4"]


@pytest.mark.parametrize(
    ("given", "fix"), [("dpo", "choose one of: grpo, dr_grpo, "), ("cipso", "did you mean cispo?")]
)
def test_a_choice_that_there_is_not(given: str, fix: str) -> None:
    """Another algorithm is no spelling of ours, however short their names."""
    with pytest.raises(UserError) as caught:
        parse_args([*RUN, "--advantage-estimator", given])
    assert caught.value.fix.startswith(fix)


def test_sections_of_a_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("rollout:\n  num_rollout: 3\n")
    with pytest.raises(UserError, match="'rollout' is a section") as caught:
        parse_args(["--config", str(tmp_path / "c.yaml")])
    assert "left edge: num_rollout" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["data/held-out.jsonl"], ["held-out"]),
        (["test.parquet@[0:10]"], ["test"]),
        (["a", "x.jsonl"], ["a"]),
    ],
)
def test_an_evaluation_set_is_called_after_its_file(given: list[str], names: list[str]) -> None:
    assert [
        found.name for found in eval_datasets(make_config(eval_prompt_data=given, num_rollout=1))
    ] == names


@pytest.mark.parametrize(
    "given", [["a.jsonl", "b.jsonl"], ["data/a", "b.jsonl"], ["a", "b.jsonl", "c.jsonl@[:9]"]]
)
def test_a_file_where_the_name_of_an_evaluation_set_is_expected(given: list[str]) -> None:
    with pytest.raises(UserError, match=r"--eval-prompt-data (has the file|has 3 values)"):
        eval_datasets(make_config(eval_prompt_data=given, num_rollout=1))


# -- models ----------------------------------------------------------------------------------------


def test_a_config_json_that_was_cut_short(tmp_path: Path) -> None:
    from slime.checkpoints.load_plan import resolve_load

    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_')
    with pytest.raises(UserError, match=r"config.json is damaged") as caught:
        resolve_load(make_config(hf_checkpoint=str(tmp_path), num_rollout=1))
    assert "Unterminated string" in caught.value.why and "copy it again" in caught.value.fix


# -- slime reward ----------------------------------------------------------------------------------


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "first_hour_rewards.py"
    file.write_text(
        "def right(args, sample, **kwargs):\n"
        "    return float(sample.response == sample.label)\n"
        "def raises(args, sample, **kwargs):\n"
        "    return 1 / 0\n"
    )
    monkeypatch.delenv("SLIME_DEBUG", raising=False)
    return file


def test_a_reward_on_the_samples_that_a_run_has_recorded(
    rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "rollout_id": 0,
        "group": 0,
        "prompt": "1+2=",
        "response": "3",
        "label": "3",
        "weight_versions": ["1"],
    }
    data = write(
        tmp_path / "rollout_000000.jsonl",
        {**row, "metadata": {}},
        {**row, "response": "4", "metadata": {}},
    )
    assert main(["reward", "--prompt-data", str(data), "--custom-rm-path", f"{rewards}:right"]) == 0
    assert "2 rows: mean 0.5000" in capsys.readouterr().out


def test_a_reward_that_raises_shows_the_users_line_and_no_advice_to_do_what_is_being_done(
    rewards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "a.jsonl", {"input": "1+2=", "response": "3"})
    assert (
        main(["reward", "--prompt-data", str(data), "--custom-rm-path", f"{rewards}:raises"]) == 2
    )
    error = capsys.readouterr().err
    assert f'File "{rewards}", line 4, in raises' in error and "return 1 / 0" in error
    assert "slime reward" not in error and "Traceback" not in error
