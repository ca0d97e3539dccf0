"""Python code that a model's directory brings: run only with --trust-remote-code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config import make_config
from slime.embedded.kind import embedded_command
from slime.engines.launch import ONE_GPU
from slime.engines.sglang.command import sglang_options
from slime.errors import UserError
from slime.prompts.tokenizer import load_tokenizer
from tests.support.embedded_models import byte_tokenizer

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path(r"{mark}").touch()


class Mine(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def brought(tmp_path: Path) -> tuple[Path, Path]:
    """A model directory whose tokenizer is a class of its own, and the file that its code makes."""
    folder, mark = tmp_path / "model", tmp_path / "ran"
    byte_tokenizer().save_pretrained(folder)
    (folder / "mine.py").write_text(CODE.replace("{mark}", str(mark)))
    path = folder / "tokenizer_config.json"
    settings = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": [None, "mine.Mine"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder, mark


@pytest.mark.parametrize("without_torch", [False, True])
def test_a_tokenizer_that_is_code_is_refused_in_a_sentence(
    brought: tuple[Path, Path], without_torch: bool
) -> None:
    folder, mark = brought
    with pytest.raises(UserError, match="is Python code that the model brings") as refused:
        load_tokenizer(str(folder), without_torch=without_torch)
    assert "--trust-remote-code" in refused.value.fix and not mark.exists()


def test_it_runs_when_it_is_trusted(
    brought: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = brought
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    assert (
        type(load_tokenizer(str(folder), trust_remote_code=True)).__name__ == "Mine"
        and mark.exists()
    )


@pytest.mark.parametrize("trusted", [False, True])
def test_engines_are_told(trusted: bool) -> None:
    config = make_config(hf_checkpoint="m", trust_remote_code=trusted)
    assert (
        sglang_options(config, "m", "127.0.0.1", 1, ONE_GPU).get("trust_remote_code", False)
        is trusted
    )
    assert ("--trust-remote-code" in embedded_command(config, "m", "127.0.0.1", 1).argv) is trusted


def test_sglangs_own_flag_is_answered_with_ours() -> None:
    with pytest.raises(UserError, match="it is --trust-remote-code"):
        make_config(sglang_trust_remote_code=True)
