"""Data set folders, local or downloaded from the hub: which configuration and split is read, and
how its files are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from slime.config import Config, make_config
from slime.data_path import split_name
from slime.errors import UserError
from slime.hub import dataset_name, local_data, shown_path
from slime.prompts.dataset_folders import EVALUATION, TRAINING, split_notice
from slime.prompts.readers import iter_rows, open_rows
from slime.rollout.eval_datasets import eval_datasets

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: hard
  data_files:
  - {split: train, path: hard/train-*}
---
# Sums
"""


@pytest.fixture
def sums(tmp_path: Path) -> Iterator[Path]:
    """A data set of two configurations, one of them with two splits; every row says where it comes
    from."""
    folder = tmp_path / "sums"
    for config, split in (("main", "train"), ("main", "test"), ("hard", "train")):
        (folder / config).mkdir(parents=True, exist_ok=True)
        row = '{"p": "q", "y": 5.10, "from": "' + f"{config} {split}" + '"}\n'
        (folder / config / f"{split}-00000.jsonl").write_text(row * 2)
        (folder / config / f"{split}-00001.jsonl").write_text(row.replace("5.10", "1e5"))
    (folder / "README.md").write_text(_CARD)
    yield folder


def origin(path: Any, splits: Any = TRAINING) -> str:
    rows = open_rows(str(path), splits)
    found = {rows[i]["from"] for i in range(len(rows))}
    assert found == {row["from"] for _, row in iter_rows(str(path), splits)}
    return " and ".join(sorted(found))


def test_training_takes_train_and_evaluation_takes_test(sums: Path) -> None:
    assert (
        origin(f"{sums}/main") == "main train" and origin(f"{sums}/main", EVALUATION) == "main test"
    )
    for splits in (TRAINING, EVALUATION):
        assert (
            origin(f"{sums}/main:test", splits) == "main test"
            and origin(f"{sums}/main:train", splits) == "main train"
        )
    assert origin(f"{sums}/hard", EVALUATION) == "hard train"


def test_numbers_in_files_of_a_folder_are_as_they_are_written(sums: Path) -> None:
    rows = open_rows(f"{sums}/main:train@[1:]")
    assert [rows[i].written("y") for i in range(2)] == [5.1, 100000.0]  # type: ignore[attr-defined]
    assert [str(rows[i].written("y")) for i in range(2)] == ["5.10", "1e5"]  # type: ignore[attr-defined]
    assert rows.where(1) == f"{sums}/main/train-00001.jsonl:1"
    (sums.parent / "table").mkdir()
    (sums.parent / "table" / "test.csv").write_text("p,y\nNA,007\n")
    (sums.parent / "table" / "train.csv").write_text("p,y\n1e5,5.10\n")
    assert open_rows(f"{sums.parent}/table")[0] == {"p": "1e5", "y": "5.10"}
    assert open_rows(f"{sums.parent}/table", EVALUATION)[0] == {"p": "NA", "y": "007"}


def test_which_split_is_taken_is_said_in_one_line(sums: Path) -> None:
    main = f"{sums}/main"
    assert split_notice(main, TRAINING) == (
        f"{main}: training takes the split train (others: test; {main}:SPLIT names one)"
    )
    assert split_notice(f"{main}@[:1]", EVALUATION) == (
        f"{main}: evaluation takes the split test (others: train; {main}:SPLIT names one)"
    )
    alone = f"{sums}/hard: evaluation takes the split train, as there is no other"
    assert (
        split_notice(f"{sums}/hard", EVALUATION) == alone
        and split_notice(f"{sums}/hard", TRAINING) is None
    )
    for path in (f"{main}:test", f"{main}/test-00000.jsonl"):
        assert split_notice(path, EVALUATION) is None


def test_a_launch_says_which_split_it_takes_once(sums: Path) -> None:
    from slime.rollout.validate_rows import data_inputs

    def notices(config: Config) -> list[str | None]:
        return [split_notice(one.path, one.splits) for one in data_inputs(config)]

    flags: dict[str, Any] = {"num_rollout": 1, "prompt_data": f"{sums}/main"}
    config = make_config(**flags, eval_prompt_data=("sums", f"{sums}/main@[:1]"), eval_interval=1)
    train, evaluation = notices(config)
    assert "training takes the split train" in str(train)
    assert "evaluation takes the split test" in str(evaluation)
    yaml = sums.parent / "eval.yaml"
    yaml.write_text(f"datasets: [{{name: sums, path: '{sums}/main'}}]")
    assert notices(make_config(**flags, eval_config=str(yaml), eval_interval=1)) == [
        train,
        evaluation,
    ]


def test_evaluation_reads_the_split_that_is_said(sums: Path) -> None:
    from slime.rollout.evaluate import read_eval_prompts

    flags: dict[str, Any] = {
        "num_rollout": 1,
        "eval_interval": 1,
        "input_key": "from",
        "label_key": "y",
    }
    config = make_config(**flags, eval_prompt_data=("sums", f"{sums}/main"), rm_type="math")
    prompts = read_eval_prompts(eval_datasets(config)[0], config, None)
    assert [(sample.prompt, sample.label) for sample in prompts] == [
        ("main test", "5.10"),
        ("main test", "5.10"),
        ("main test", "1e5"),
    ]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", ["has several configurations: main, hard", "name one: {}/main"]),
        (":test", ["has several configurations"]),
        (
            "/main:tset",
            [
                "'{}/main' has no split 'tset'",
                "it has: train, test",
                "name one of them: {}/main:test",
            ],
        ),
        ("/easy", ["there is no data file '{}/easy'", "README.md, hard, main"]),
        ("/easy:train", ["there is no data file '{}/easy:train'"]),
    ],
)
def test_what_is_not_there_or_ambiguous_names_the_spelling_that_works(
    sums: Path, path: str, said: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        open_rows(f"{sums}{path}")
    assert all(text.format(sums) in str(caught.value) for text in said), str(caught.value)


def test_splits_without_a_usual_name_have_to_be_named(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([{"from": "here"}])
    datasets.DatasetDict({"easy": table, "hard": table}).save_to_disk(str(tmp_path / "saved"))
    for splits in (TRAINING, EVALUATION):
        with pytest.raises(UserError, match=f"name one: {tmp_path}/saved:easy"):
            open_rows(f"{tmp_path}/saved", splits)
    assert origin(f"{tmp_path}/saved:hard@[:1]") == "here"
    datasets.DatasetDict(
        {"train": table, "validation": table.map(lambda _: {"from": "there"})}
    ).save_to_disk(str(tmp_path / "usual"))
    assert (origin(f"{tmp_path}/usual"), origin(f"{tmp_path}/usual", EVALUATION)) == (
        "here",
        "there",
    )


def test_parquet_files_of_a_folder(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        datasets.Dataset.from_list([{"from": split}]).to_parquet(
            f"{tmp_path}/{split}-00000-of-00001.parquet"
        )
    assert (origin(tmp_path), origin(tmp_path, EVALUATION), origin(f"{tmp_path}:validation")) == (
        *("train", "validation"),
        "validation",
    )


def test_settings_of_a_card_that_change_how_files_are_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a;b\n1;2\n")
    card = "---\nconfigs:\n- {config_name: default, data_files: train.csv, sep: ';'}\n---\n"
    (tmp_path / "README.md").write_text(card)
    with pytest.raises(UserError, match="sets sep or delimiter"):
        open_rows(str(tmp_path))


# -- names on the hub ------------------------------------------------------------------------------


@pytest.fixture
def hub_copy(sums: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data set as a download of me/sums leaves it, and no hub to be reached."""
    from huggingface_hub import constants

    cache = sums.parent / "home" / "hub"
    repo = cache / "datasets--me--sums"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    sums.rename(repo / "snapshots" / COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(sums.parent)
    return repo / "snapshots" / COMMIT


def test_names_on_the_hub_with_configuration_split_and_slice(hub_copy: Path) -> None:
    assert local_data("me/sums/main:test@[:1]") == f"{hub_copy}/main:test@[:1]"
    assert local_data("me/sums:train") == f"{hub_copy}:train"
    assert local_data("me/other:test", download=False) == "me/other:test"
    assert (
        dataset_name("me/sums/main:test@[:1]") == "me/sums"
        and dataset_name("me/sums.jsonl") is None
    )
    assert shown_path(f"{hub_copy}/main") == "me/sums/main" and shown_path("/a/b") == "/a/b"
    assert origin(local_data("me/sums/main:test")) == "main test"
    assert origin(local_data("me/sums/main"), EVALUATION) == "main test"
    Path("me").mkdir()
    assert dataset_name("me/sums:test") is None, "a folder here wins"


def test_errors_and_notices_use_the_name_on_the_hub(hub_copy: Path) -> None:
    with pytest.raises(UserError, match=r"name one: me/sums/main$"):
        open_rows(local_data("me/sums"))
    with pytest.raises(UserError, match="name one of them: me/sums/main:test"):
        open_rows(local_data("me/sums/main:tests"))
    assert str(split_notice(local_data("me/sums/main"), EVALUATION)).startswith(
        "me/sums/main: evaluation takes"
    )


def test_evaluation_files_name_data_sets_of_the_hub(hub_copy: Path) -> None:
    Path("eval.yaml").write_text("datasets: [{name: sums, path: 'me/sums/main'}]")
    config = make_config(num_rollout=1, eval_config="eval.yaml", eval_interval=1)
    assert eval_datasets(config)[0].path == f"{hub_copy}/main"
    single = make_config(num_rollout=1, eval_prompt_data=("me/sums/main:test",), eval_interval=1)
    assert [(one.name, split_name(one.path)) for one in eval_datasets(single)] == [
        ("main", ("me/sums/main", "test"))
    ]


def test_rows_of_saved_tables_keep_what_json_holds(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"from": "x", "meta": {"a": [1, 2.5]}}]).save_to_disk(
        str(tmp_path / "saved")
    )
    assert json.loads(json.dumps(open_rows(f"{tmp_path}/saved")[0])) == {
        "from": "x",
        "meta": {"a": [1, 2.5]},
    }


def test_a_cache_that_cannot_be_written_stands_in_nobodys_way(
    sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets.Dataset.from_list([{"from": "x"}]).to_parquet(tmp_path / "rows.parquet")
    # which root cannot write either
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", "/dev/null/datasets")
    assert len(open_rows(f"{sums}/main:test")) > 0
    assert list(open_rows(str(tmp_path / "rows.parquet"))) == [{"from": "x"}]
