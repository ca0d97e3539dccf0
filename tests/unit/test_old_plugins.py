"""Plugins that import the paths of earlier versions read what they were written for."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, make_config
from slime.legacy_paths import old_plugin
from slime.preflight import check_flags
from slime.prompts.row_format import RowFormat
from slime.rollout.eval_datasets import eval_datasets
from slime.rollout.generate import rollout_sampling_params

NEW = "def reward(args, sample, **kwargs): return 0.0\n"
OLD = "from slime.utils.types import Sample\n\n" + NEW
OLD_INSIDE = "async def generate(args, sample, params):\n    import slime.rollout.sglang_rollout as old\n"


def of(folder: Path, code: str, flag: str = "custom_rm_path", name: str = "reward", **flags: Any) -> Config:
    file = folder / f"plugin_{abs(hash(code))}.py"
    file.write_text(code)
    flags = {"num_rollout": 1, "eval_prompt_data": ["a", "a.jsonl"], **flags, flag: f"{file}:{name}"}
    return make_config(**flags)


def reads(config: Config) -> tuple[bool, bool, bool]:
    """Special tokens are left out of responses, of evaluations too; labels are text."""
    (evaluation,) = eval_datasets(config)
    skips = rollout_sampling_params(config)["skip_special_tokens"]
    return skips, evaluation.skip_special_tokens, not RowFormat.of(config).raw_label


def test_what_each_reads(tmp_path: Path) -> None:
    assert reads(of(tmp_path, NEW)) == reads(make_config(eval_prompt_data=["a", "a.jsonl"])) == (True, True, True)
    old = of(tmp_path, OLD)
    assert reads(old) == (False, False, False) and old_plugin(old) == old.reward.custom_rm_path
    assert reads(of(tmp_path, OLD_INSIDE, "custom_generate_function_path", "generate")) == (False, False, False)


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
    from slime.utils.types import Sample as OldSample

    sample = OldSample(index=1, status=OldSample.Status.COMPLETED)
    sample.spec_info = OldSample.SpecInfo(spec_accept_token_num=3, spec_draft_token_num=4)
    sample.prefix_cache_info = OldSample.PrefixCacheInfo.from_dict({"cached_tokens": 1, "total_prompt_tokens": 2})
    data = sample.to_dict()
    assert data["spec_info"]["spec_accept_token_num"] == 3 and "SpecInfo" not in data
    assert OldSample.from_dict(data) == sample == pickle.loads(pickle.dumps(sample))
    assert [field.name for field in dataclasses.fields(OldSample) if "Info" in field.name] == []
