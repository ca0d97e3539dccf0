"""Plugins that import the paths of earlier versions read what they were written for."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pickle
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, make_config
from slime.processes.host import own_addresses
from slime.prompts.row_format import RowFormat
from slime.rollout.eval_datasets import eval_datasets
from slime.rollout.generate import rollout_sampling_params
from slime.run.preflight import check_flags
from slime.user_code.overrides import old_plugin

NEW = "def reward(args, sample, **kwargs): return 0.0\n"
OLD = "from slime.utils.types import Sample\n\n" + NEW
OLD_INSIDE = (
    "async def generate(args, sample, params):\n    import slime.rollout.sglang_rollout as old\n"
)


def of(
    folder: Path, code: str, flag: str = "custom_rm_path", name: str = "reward", **flags: Any
) -> Config:
    file = folder / f"plugin_{abs(hash(code))}.py"
    file.write_text(code)
    flags = {
        "num_rollout": 1,
        "eval_prompt_data": ["a", "a.jsonl"],
        **flags,
        flag: f"{file}:{name}",
    }
    return make_config(**flags)


def reads(config: Config) -> tuple[bool, bool, bool]:
    """Special tokens are left out of responses, of evaluations too; labels are text."""
    (evaluation,) = eval_datasets(config)
    skips = rollout_sampling_params(config)["skip_special_tokens"]
    return skips, evaluation.skip_special_tokens, not RowFormat.of(config).raw_label


def test_what_each_reads(tmp_path: Path) -> None:
    assert (
        reads(of(tmp_path, NEW))
        == reads(make_config(eval_prompt_data=["a", "a.jsonl"]))
        == (True, True, True)
    )
    old = of(tmp_path, OLD)
    assert reads(old) == (False, False, False) and old_plugin(old) == old.reward.custom_rm_path
    assert reads(of(tmp_path, OLD_INSIDE, "custom_generate_function_path", "generate")) == (
        False,
        False,
        False,
    )


def test_a_flag_says_otherwise(tmp_path: Path) -> None:
    asked = of(tmp_path, OLD, rollout_skip_special_tokens=True, label_type="text")
    assert reads(asked) == (True, True, True)
    new = of(tmp_path, NEW, rollout_skip_special_tokens=False, label_type="raw")
    assert reads(new) == (False, False, False)


def test_a_warning_says_which_default_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        check_flags(of(tmp_path, NEW, output_dir=str(tmp_path)))
        assert "earlier versions" not in caplog.text
        check_flags(of(tmp_path, OLD, output_dir=str(tmp_path)))
    assert "responses keep their special tokens and labels their type" in caplog.text
    assert "--rollout-skip-special-tokens and --label-type text" in caplog.text


def test_counters_that_a_plugin_makes_itself_survive_dicts_and_pickles() -> None:
    OldSample = importlib.import_module("slime.utils.types").Sample
    sample = OldSample(index=1, status=OldSample.Status.COMPLETED)
    sample.spec_info = OldSample.SpecInfo(spec_accept_token_num=3, spec_draft_token_num=4)
    sample.prefix_cache_info = OldSample.PrefixCacheInfo.from_dict(
        {"cached_tokens": 1, "total_prompt_tokens": 2}
    )
    data = sample.to_dict()
    assert data["spec_info"]["spec_accept_token_num"] == 3 and "SpecInfo" not in data
    assert OldSample.from_dict(data) == sample == pickle.loads(pickle.dumps(sample))
    assert [field.name for field in dataclasses.fields(OldSample) if "Info" in field.name] == []


def test_small_things_that_log_functions_and_scripts_import() -> None:
    metric_utils = importlib.import_module("slime.utils.metric_utils")
    assert metric_utils.compute_statistics([1.0, 2.0, 6.0]) == {
        "mean": 3.0,
        "median": 2.0,
        "max": 6.0,
        "min": 1.0,
    }
    assert metric_utils.compute_pass_rate([1, 0, 0, 0], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    assert metric_utils.compute_pass_rate([1, 0, 0], 2, group_ids=["a", "b", "a"]) == {
        "pass@1": 0.25,
        "pass@2": 1.0,
    }
    assert metric_utils.compute_pass_rate([1, 0], 1) == {}
    assert metric_utils.has_repetition("no " * 5000) and not metric_utils.has_repetition("It is 4.")
    misc = importlib.import_module("slime.utils.misc")
    assert misc.exec_command("echo $((1 + 1))", capture_output=True) == "2\n"
    with pytest.raises(subprocess.CalledProcessError):
        misc.exec_command("exit 3")
    name, address = importlib.import_module("slime.utils.http_utils").get_host_info()
    assert (
        name == socket.gethostname()
        and address == misc.get_current_node_ip()
        and address in own_addresses()
    )
