"""Rewards that rows name are there, and a launch asks before it starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.rewards.row_checks import check_rows


def check(folder: Path, rm_types: list[Any], **flags: Any) -> None:
    rows = [{"input": "x", "label": "1", "metadata": {"rm_type": rm_type}} for rm_type in rm_types]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_rows(make_config(**{"num_rollout": 1, "prompt_data": str(path), **flags}), 10)


def test_a_reward_that_a_row_names_and_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:3: there is no reward type 'maths'") as refused:
        check(tmp_path, ["math", "boxed_math", "maths"])
    assert "did you mean 'math'" in str(refused.value.fix)
    check(tmp_path, ["math", "boxed_math", None, ""], rm_type="math")


def test_a_row_that_asks_a_server_whose_address_is_not_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rows.jsonl:2: its rm_type remote_rm needs an address"):
        check(tmp_path, ["math", "boxed_remote_rm"])
    check(tmp_path, ["math", "remote_rm"], rm_url="http://127.0.0.1:1/judge")


@pytest.mark.parametrize("flag", ["custom_rm_path", "custom_generate_function_path", "rollout_sample_hook_path"])
def test_functions_of_the_users_may_have_names_of_their_own(tmp_path: Path, flag: str) -> None:
    check(tmp_path, ["theirs"], **{flag: "their.function"})


@pytest.mark.parametrize("flags", [{"loss_type": "sft_loss"}, {"num_rollout": 0}], ids=["SFT", "evaluation alone"])
def test_what_nobody_judges_may_name_anything(tmp_path: Path, flags: dict[str, Any]) -> None:
    check(tmp_path, ["theirs"], **flags)
