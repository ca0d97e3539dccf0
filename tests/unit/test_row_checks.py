"""Rewards that rows name are there, and a launch asks before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.validate_rows import validate_data
from tests.support.prompt_fixtures import make_tokenizer

TOKENIZER = make_tokenizer()


def check(folder: Path, rm_types: list[Any], **flags: Any) -> None:
    rows = [{"input": "x", "label": "1", "metadata": {"rm_type": rm_type}} for rm_type in rm_types]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"num_rollout": 1, "prompt_data": str(path), "label_key": "label", **flags}
    error = validate_data(make_config(**flags), TOKENIZER).error
    if error is not None:
        raise error


def test_a_reward_that_a_row_names_and_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"1 of 3 rows name a reward .*first: .*rows.jsonl:3"
    ) as refused:
        check(tmp_path, ["math", "boxed_math", "maths"])
    assert "there is no reward type 'maths'" in refused.value.why
    assert "did you mean 'math'" in str(refused.value.fix)
    check(tmp_path, ["math", "boxed_math", None, ""], rm_type="math")


def test_a_row_that_asks_a_server_whose_address_is_not_given(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"rows.jsonl:2\)\s+why: the rm_type remote_rm needs an address"
    ):
        check(tmp_path, ["math", "boxed_remote_rm"])
    check(tmp_path, ["math", "remote_rm"], rm_url="http://127.0.0.1:1/judge")


@pytest.mark.parametrize(
    "flag", ["custom_rm_path", "custom_generate_function_path", "rollout_sample_hook_path"]
)
def test_functions_of_the_users_may_have_names_of_their_own(tmp_path: Path, flag: str) -> None:
    check(tmp_path, ["theirs"], **{flag: "their.function"})


@pytest.mark.parametrize(
    "flags", [{"loss_type": "sft_loss"}, {"num_rollout": 0}], ids=["SFT", "evaluation alone"]
)
def test_what_nobody_judges_may_name_anything(tmp_path: Path, flags: dict[str, Any]) -> None:
    check(tmp_path, ["theirs"], **flags)
