"""Bad input: one error of a few lines, exit status 2, nothing started, nothing left that blocks the
next try."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.__main__ import main
from slime.checkpoints.directory import check_contents
from tests.support.forks import run_fork
from tests.support.processes import ROOT, Driver, World, start

LONGEST_ERROR = 8


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("bad"), is_small=False)


@pytest.fixture
def refuse(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """``refuse(*flags)``: a launch that must be refused before anything starts; returns what the
    user reads."""
    monkeypatch.delenv("SLIME_DEBUG", raising=False)
    monkeypatch.setattr("slime.run.session.Session", _never)

    def launch(*flags: object, command: str = "train", without: str = "") -> str:
        status = main([command, *world.flags("refused", *flags, without=without)])
        said = capsys.readouterr().err
        assert status == 2 and "Traceback" not in said, said
        error = said[said.index("error: ") :]  # behind what was warned of
        assert len(error.splitlines()) <= LONGEST_ERROR
        assert not (world.outputs / "refused").exists()
        return error

    return launch


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a session was opened")


# -- data ------------------------------------------------------------------------------------------


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


GOOD = {"prompt": "1+2=", "label": "3"}


def test_missing_prompt_file(refuse: Callable[..., str], world: World) -> None:
    error = refuse("--prompt-data", world.inputs / "trian.jsonl")
    assert "there is no data file" in error and "train.jsonl" in error


def test_wrong_keys_name_those_there_are_and_the_nearest(refuse: Callable[..., str]) -> None:
    error = refuse("--input-key", "promt")
    assert "'promt'" in error and "prompt, label" in error and "--input-key prompt" in error
    error = refuse("--label-key", "lable")
    assert "'lable'" in error and "prompt, label" in error and "--label-key label" in error


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": " ", "label": "3"}, "empty prompt"),
        ({"prompt": None, "label": "3"}, "found None"),
        ('{"prompt": "1+', "not valid JSON"),
        ("[1, 2]", "are not JSON objects"),
    ],
    ids=["empty", "none", "malformed", "no object"],
)
def test_rows_that_cannot_be_used(
    refuse: Callable[..., str], tmp_path: Path, row: Any, told: str
) -> None:
    data = write(tmp_path / "data.jsonl", GOOD, row, GOOD)
    error = refuse("--prompt-data", data)
    assert told in error and "1 of 3 rows" in error and f"{data}:2" in error


def test_label_of_the_wrong_type(refuse: Callable[..., str], tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", {"prompt": "1+2=", "label": ["3"]})
    error = refuse("--prompt-data", data, "--rm-type", "math", without="--custom-rm-path")
    assert "'label'" in error and "found a list" in error


def test_prompts_longer_than_the_context(refuse: Callable[..., str], tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", {"prompt": "1" * 100, "label": "3"})
    error = refuse("--prompt-data", data)
    assert (
        "longer than 63 tokens" in error
        and "100 tokens" in error
        and "--rollout-max-context-len" in error
    )


def test_no_rows(refuse: Callable[..., str], tmp_path: Path, world: World) -> None:
    assert "has no rows" in refuse("--prompt-data", write(tmp_path / "data.jsonl"))
    assert "has no rows" in refuse("--prompt-data", f"{world.inputs / 'train.jsonl'}@[100000:]")


def test_evaluation_data_is_looked_at_too(refuse: Callable[..., str], world: World) -> None:
    data = world.inputs / "test.jsonl"
    error = refuse("--eval-prompt-data", "sums", data, "--eval-input-key", "question")
    assert str(data) in error and "--eval-input-key prompt" in error
    assert "there is no data file" in refuse(
        "--eval-prompt-data", "sums", data.with_name("none.jsonl")
    )


# -- models ----------------------------------------------------------------------------------------


@pytest.fixture
def model(world: World, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged."""
    return Path(shutil.copytree(world.inputs / "model", tmp_path / "model"))


def test_no_model_directory(refuse: Callable[..., str]) -> None:
    error = refuse("--hf-checkpoint", "models/../Qwen3-0.6B")
    assert "there is no models" in error and "org/name for a Hub model" in error


def test_no_tokenizer(refuse: Callable[..., str], model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    assert "cannot be read" in refuse("--hf-checkpoint", model)
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refuse("--hf-checkpoint", model)


def test_weights_that_are_not_whole(refuse: Callable[..., str], model: Path) -> None:
    from safetensors.torch import load, save_file

    weights = model / "model.safetensors"
    content = weights.read_bytes()
    tensors = load(content)
    weights.write_bytes(content[:100_000])
    assert "the download was incomplete" in refuse("--hf-checkpoint", model)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}, weights
    )
    assert "in layers 1 of 2" in refuse("--hf-checkpoint", model)

    weights.unlink()
    assert "no weights in" in refuse("--hf-checkpoint", model)
    shards = {
        name: f"model-0000{1 + ('layers.1.' in name)}-of-00002.safetensors" for name in tensors
    }
    first = "model-00001-of-00002.safetensors"
    save_file(
        {name: tensors[name] for name, file in shards.items() if file == first}, model / first
    )
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    error = refuse("--hf-checkpoint", model)
    assert "1 of 2 shards are missing" in error and "model-00002-of-00002.safetensors" in error


def test_unknown_architecture(refuse: Callable[..., str], model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "mamba" in refuse("--hf-checkpoint", model)


def test_nothing_to_load(refuse: Callable[..., str], tmp_path: Path) -> None:
    assert "does not exist" in refuse("--load", tmp_path / "none")
    assert "holds no checkpoint" in refuse("--load", tmp_path)


# -- hooks and rewards -----------------------------------------------------------------------------


def test_reward_functions(refuse: Callable[..., str], tmp_path: Path) -> None:
    assert "did you mean 'reward'" in refuse("--custom-rm-path", "recipes.arithmetic.rewrad")
    assert "no module 'nowhere'" in refuse("--custom-rm-path", "nowhere.reward")
    file = tmp_path / "mine.py"
    file.write_text("def reward(sample):\n    return 1.0\n")
    error = refuse("--custom-rm-path", f"{file}:reward")
    assert "cannot be called as (args, sample)" in error and "(sample)" in error
    file.write_text("import nothing_of_this_name\n")
    assert "nothing_of_this_name" in refuse("--custom-generate-function-path", f"{file}:generate")


def test_reward_types(refuse: Callable[..., str]) -> None:
    error = refuse("--rm-type", "mth", without="--custom-rm-path")
    assert "did you mean 'math'" in error
    assert "no reward function" in refuse(without="--custom-rm-path")
    assert "--rm-url" in refuse("--rm-type", "remote_rm", without="--custom-rm-path")


# -- the run ---------------------------------------------------------------------------------------


def test_more_gpus_than_there_are(
    refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    error = refuse("--actor-num-gpus-per-node", 4096, "--rollout-batch-size", 2048)
    assert "needs 4096 process slots" in error and "actor_num_gpus_per_node 4096" in error
    monkeypatch.setenv("SLIME_NUM_GPUS", "2")
    error = refuse("--actor-num-gpus-per-node", 4)
    assert "needs 4 GPUs" in error and "has 2 GPUs" in error


def test_no_cluster_at_the_address(refuse: Callable[..., str]) -> None:
    with socket.socket() as silent:  # bound and not listening: refuses connections
        silent.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert f"no Ray cluster answers at {address}" in refuse("--ray-address", address)
    assert "host:port" in refuse("--ray-address", "ray://127.0.0.1:10001")


def test_flags_that_contradict_each_other(refuse: Callable[..., str]) -> None:
    assert "did you mean --rollout-batch-size?" in refuse("--rolout-batch-size", 4)
    error = refuse(command="train-async")
    assert "--colocate cannot be used with train_async" in error


def test_directories_that_cannot_be_made(refuse: Callable[..., str], tmp_path: Path) -> None:
    file = write(tmp_path / "file", "text")
    assert f"{file} is a file" in refuse("--output-dir", file)
    assert "--save" in refuse("--save", file / "checkpoints")


def test_exports_would_replace_what_must_not_be_lost(
    refuse: Callable[..., str], tmp_path: Path
) -> None:
    told = refuse("--save", tmp_path / "runs" / "ckpt", "--save-hf", tmp_path / "runs")
    assert (
        f"runs holds --save {tmp_path}/runs/ckpt" in told
        and "--save-hf exports/{rollout_id}" in told
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    assert "there is: thesis.tex" in refuse("--save-hf", tmp_path / "mine")


def test_a_file_system_that_refuses(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *world.flags("refused", "--output-dir", "/proc/outputs")]) == 2
    assert "cannot write to the folder /proc/outputs/refused" in capsys.readouterr().err


def test_an_existing_run_folder_is_refused_and_left_alone(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    assert main(["train", *world.flags("mine", "--output-dir", tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (
        "exists already" in error
        and "--run-name" in error
        and len(error.splitlines()) <= LONGEST_ERROR
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


# -- as processes ----------------------------------------------------------------------------------


def train(*flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLIME_DEBUG": "0", **env}
    command = [sys.executable, str(ROOT / "train.py"), *flags]
    done = run_fork(command, environment)
    return subprocess.CompletedProcess(
        command, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def test_exit_status_and_traceback_only_on_request(world: World) -> None:
    bad = world.flags("refused", "--input-key", "question")
    done = train(*bad)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= LONGEST_ERROR
    done = train(*bad, SLIME_DEBUG="1")
    assert done.returncode != 0 and "Traceback" in done.stderr and "UserError" in done.stderr
    assert not (world.outputs / "refused").exists()


def test_dry_run_checks_the_same(world: World) -> None:
    assert (
        "--input-key prompt"
        in train(*world.flags("refused", "--dry-run", "--input-key", "question")).stderr
    )
    done = train(*world.flags("refused", "--dry-run"))
    assert done.returncode == 0, done.stderr
    assert "1 engine(s)" in done.stdout and str(world.inputs / "model") in done.stdout
    assert not (world.outputs / "refused").exists()


def test_what_is_imported_for_a_refusal(world: World) -> None:
    """A wrong flag costs neither Ray nor torch, wrong data no torch: that is what makes the answer
    quick."""
    code = (
        "import sys; from slime.__main__ import main; status = main(sys.argv[1:]);"
        "print(status, *sorted({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    )

    def imported(*flags: str) -> str:
        command = [sys.executable, "-c", code, "train", *flags]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=ROOT
        ).stdout.strip()

    assert imported("--rolout-batch-size", "4") == "2"
    assert imported(*world.flags("refused", "--input-key", "question")) == "2 ray transformers"


# -- what only shows once processes are up ---------------------------------------------------------


@pytest.fixture
def begin(world: World) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start_driver(name: str, flags: list[str]) -> Driver:
        drivers.append(start(flags, world.outputs / name))
        return drivers[-1]

    yield start_driver
    for driver in drivers:
        driver.clean_up()


@pytest.mark.full
def test_a_bad_row_far_down(begin: Callable[..., Driver], world: World, tmp_path: Path) -> None:
    """The rollout actor looks at every row: what it finds reaches the user like any other bad
    input."""
    data = write(tmp_path / "data.jsonl", *[GOOD] * 3000, {"prompt": "1+2="})
    driver = begin("far", world.flags("far", "--prompt-data", data))
    assert driver.end() == 2, driver.stderr
    error = driver.error()
    assert "1 of 3001 rows have no key 'label'" in error[0] and f"{data}:3001" in error[0]
    assert len(error) <= LONGEST_ERROR and "Traceback" not in driver.stderr
    driver.leaves_nothing()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """``small_disk(megabytes)``: an empty file system of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(megabytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, timeout=60)
        if done.returncode:
            pytest.skip("this user may not mount a file system")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.mark.full
def test_full_disk_while_saving_keeps_the_last_checkpoint(
    begin: Callable[..., Driver], world: World, small_disk: Callable[[int], Path]
) -> None:
    """A checkpoint of this model has 6 MB: the first one fits, the second does not."""
    checkpoints = small_disk(10)
    flags = world.flags("full", "--save-interval", 1, "--load", checkpoints, "--save", checkpoints)
    driver = begin("full", flags)
    assert driver.end() == 2, driver.stderr
    error = driver.error()
    assert "iter_0000001" in error[0] and "MB are free on this disk" in "".join(error)
    assert len(error) <= LONGEST_ERROR and "Traceback" not in driver.stderr
    driver.leaves_nothing()

    visible = {path.name for path in checkpoints.iterdir() if not path.name.startswith(".")}
    assert visible == {"iter_0000000", "latest_checkpointed_iteration.txt"}
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text().strip() == "0"
    check_contents(checkpoints / "iter_0000000", 0, 1)  # every byte is as it was written
