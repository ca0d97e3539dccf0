"""Imports that a plugin makes of slime are found before launch, also those inside its functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.compat.plugin_imports import check_plugin_imports, missing_imports
from slime.config import make_config
from slime.errors import UserError
from slime.user_code.hooks import hook_files

HELPER = """
def weights(args, *, pg_loss, total_lengths, response_lengths, **kwargs):
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, \
get_logits_and_tokens_offset_with_cp
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    return pg_loss, kwargs["loss_masks"], {}
"""
SOUND = """
from __future__ import annotations
from typing import TYPE_CHECKING
import slime
import slime.utils.misc
from slime.rollout import sglang_rollout
from slime.rollout.rm_hub import async_rm
from slime.samples.types import Sample
if TYPE_CHECKING:
    from slime.ray import RolloutManager
try:
    from slime.utils.wandb_utils import init_wandb
except ImportError:
    init_wandb = None

async def score(args, sample, **kwargs):
    from slime.utils.types import Sample
    return 1.0
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / f"{next(iter(files))}.py"


def test_an_import_inside_a_function_is_found_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, mis=HELPER)
    found = missing_imports(file)
    assert [(one.line, one.name.rpartition(".")[2]) for one in found] == [
        (3, "get_logits_and_tokens_offset_with_cp"),
        (4, "loss"),
    ]
    with pytest.raises(UserError, match=r"mis.py:3 imports slime.backends") as caught:
        check_plugin_imports([file])
    assert "whole samples" in caught.value.why and "line 4" in caught.value.why


def test_what_is_there_or_guarded_is_no_finding(tmp_path: Path) -> None:
    assert missing_imports(write(tmp_path, sound=SOUND)) == []


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("import slime.ray", "slime.ray"),
        ("import slime.nothing.like_this", "slime.nothing.like_this"),
        ("from slime.utils import disk_delta", "slime.utils.disk_delta"),
        ("from slime.utils.types import Nothing", "slime.utils.types.Nothing"),
        ("from slime.utils.brand_new import x", "slime.utils.brand_new"),
        ("try:\n    import slime.ray\nexcept KeyError:\n    pass", "slime.ray"),
    ],
)
def test_each_form_of_an_import_is_looked_up(tmp_path: Path, statement: str, named: str) -> None:
    (found,) = missing_imports(write(tmp_path, plugin=statement))
    assert found.name == named and found.reason


def test_files_that_the_plugin_imports_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "my_plugin_package"
    package.mkdir()
    write(
        package,
        __init__="",
        entry="from my_plugin_package import absolute\nfrom . import relative\n",
    )
    write(
        package,
        absolute="import slime.ray\nimport my_plugin_package.entry\n",
        relative="def f():\n  import slime.agent",
    )
    found = missing_imports(package / "entry.py")
    assert sorted((one.file.name, one.name) for one in found) == [
        ("absolute.py", "slime.ray"),
        ("relative.py", "slime.agent"),
    ]


def test_every_hook_of_a_run_is_looked_at(tmp_path: Path) -> None:
    reward = write(tmp_path, rewards="def score(args, sample):\n    return 1.0\n")
    config = make_config(
        custom_rm_path=f"{reward}:score", rollout_sample_hook_path=(f"{reward}:score",)
    )
    assert hook_files(config.flat()) == [reward]
