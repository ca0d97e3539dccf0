"""What has changed between two launches of a run is told, with what follows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config import Config, make_config
from slime.files import content_fingerprint
from slime.run.changed_inputs import changes, fingerprints
from slime.run.session import Session
from slime.run.stopping import StopSignals
from slime.user_code import loading as hook_loading
from tests.support.checkpoint_dirs import complete

CODE = (
    "from {helper} import score\n\n\ndef reward(args, sample, **kwargs):\n    return "
    "score(sample)\n"
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.syspath_prepend(str(tmp_path))
    helper, mine = f"helper_{os.urandom(4).hex()}", f"mine_{os.urandom(4).hex()}"
    (tmp_path / f"{helper}.py").write_text("def score(sample):\n    return 1.0\n")
    (tmp_path / f"{mine}.py").write_text(CODE.format(helper=helper))
    (tmp_path / "filters.py").write_text("def keep(args, samples, **kwargs):\n    return True\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "data.jsonl").write_text('{"input": "1+1=", "label": "2"}\n' * 5)
    return make_config(
        output_dir=str(tmp_path / "outputs"),
        run_name="run",
        save=str(tmp_path / "outputs" / "run" / "checkpoints"),
        hf_checkpoint=str(tmp_path / "model"),
        prompt_data=f"{tmp_path}/data.jsonl@[0:4]",
        custom_rm_path=f"{mine}.reward",
        dynamic_sampling_filter_path=f"{tmp_path}/filters.py:keep",
        custom_loss_function_path=f"{mine}.reward",
        loss_type="custom_loss",
        rollout_batch_size=2,
        num_rollout=4,
    )


def edit_middle_row(folder: Path) -> None:
    rows = (folder / "data.jsonl").read_text().splitlines()
    rows[3] = rows[3].replace("2", "3")
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")


def edit_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").write_bytes(bytes(999) + b"\1")


def edit_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").write_text("{}")


def edit_imported_file(folder: Path) -> None:
    [helper] = folder.glob("helper_*.py")
    helper.write_text("def score(sample):\n    return 0.5\n")


def edit_filter(folder: Path) -> None:
    (folder / "filters.py").write_text("def keep(args, samples, **kwargs):\n    return False\n")


JOURNAL_AGAIN = "groups in the journal are generated again"


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (edit_middle_row, {"--prompt-data": "the position in the data is kept if"}),
        (
            edit_weights,
            {
                "--hf-checkpoint": "tokenizer and chat template are taken from now on; "
                f"{JOURNAL_AGAIN}"
            },
        ),
        (edit_tokenizer, {"--hf-checkpoint": JOURNAL_AGAIN}),
        (
            edit_imported_file,
            {
                "--custom-rm-path": JOURNAL_AGAIN,
                "--custom-loss-function-path": "by weights that were pushed after",
            },
        ),
        (edit_filter, {"--dynamic-sampling-filter-path": "it counts from the next rollout on"}),
    ],
)
def test_each_input_that_changes_is_told_once(
    config: Config, tmp_path: Path, edit: Callable[[Path], None], told: dict[str, str]
) -> None:
    before = fingerprints(config)
    assert changes(config, fingerprints(config), before, None) == []
    edit(tmp_path)
    lines = changes(config, fingerprints(config), before, None)
    assert [line.split()[0] for line in lines] == list(told)
    assert all(" has changed since the last launch" in line for line in lines)
    assert all(words in line for line, words in zip(lines, told.values(), strict=True)), lines


def test_a_launch_compares_itself_with_the_one_before(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the terminal and in the driver's log; the weights are those of the checkpoint."""
    Session(config, StopSignals(), resuming=False).close()
    assert "has changed" not in capsys.readouterr().err
    newest = complete(tmp_path / "outputs" / "run" / "checkpoints", 1)
    edit_weights(tmp_path)
    session = Session(config, StopSignals(), resuming=True)
    session.close()
    said = capsys.readouterr().err
    for text in (said, (session.run.logs / "driver.log").read_text()):
        assert "--hf-checkpoint" in text and f"the weights are those of {newest}" in text
    Session(config, StopSignals(), resuming=True).close()
    assert "has changed" not in capsys.readouterr().err, "once"


def test_large_weight_files_are_told_apart_by_pieces(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(40 << 20)
    before = content_fingerprint(path), content_fingerprint(path, whole=True)
    with path.open("r+b") as file:
        file.seek(20 << 20)
        file.write(b"x")
    assert (
        content_fingerprint(path) != before[0]
        and content_fingerprint(path, whole=True) != before[1]
    )
    assert content_fingerprint(tmp_path / "nothing") == ""


def test_held_out_preferences_that_change_are_told(tmp_path: Path) -> None:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    config = make_config(
        loss_type="preference_loss",
        prompt_data=str(rows),
        eval_preference_data=str(rows),
        rollout_batch_size=1,
        num_rollout=1,
    )
    before = fingerprints(config)
    rows.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "4"}\n')
    told = changes(config, fingerprints(config), before, None)
    assert any(line.startswith(f"--eval-preference-data {rows} has changed") for line in told)
    assert "scores before and after do not compare" in told[-1]


def test_installed_packages_are_no_files_of_the_users(config: Config) -> None:
    files = hook_loading._imported_files(
        hook_loading.load_function(str(config.reward.custom_rm_path))
    )
    assert sorted(path.name.partition("_")[0] for path in files) == ["helper", "mine"], files
