"""The hub: what is a name on it, downloads and uploads against a stub, and what is said where there
is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.hub import hub_name, is_hub_name, local_data
from slime.run import preflight
from tests.support.bpe_tokenizers import save_model_with_words
from tests.support.stub_hub import COMMIT, stub_hub

ROOT = Path(__file__).parents[2]


def python(code: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its environment when it is imported."""
    return run([sys.executable, "-c", code], home, **env)


def run(command: list[str], home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    paths = {
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(home),
        "no_proxy": "127.0.0.1",
        "SLIME_DEBUG": "0",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**kept, **paths, **env}
    )


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    for path in (
        "model",
        "./Qwen/Qwen3",
        "/Qwen/Qwen3",
        "Qwen/Qwen3/x",
        "data/train.jsonl",
        "~/model",
        "a b/c",
    ):
        assert not is_hub_name(path)
    (tmp_path / "Qwen").mkdir()
    assert not is_hub_name("Qwen/Qwen3-0.6B")  # a slip in a local path, not a download
    assert local_data("Qwen/Qwen3-0.6B@[:5]") == "Qwen/Qwen3-0.6B@[:5]"
    cached = f"/x/hub/datasets--openai--gsm8k/snapshots/{COMMIT}/main/train.parquet"
    assert hub_name(cached) == "openai/gsm8k" and hub_name("/models/openai") is None


def test_a_model_and_a_part_of_a_data_set_are_downloaded_by_name(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "pytorch_model.bin").write_bytes(b"the same once more")
    (data / "main").mkdir(parents=True)
    (data / "main" / "train.csv").write_text('question,answer\nsix,006\n"a, b",\n')
    code = (
        "from slime.hub import fetch_model, local_data; from slime.prompts.readers import "
        "open_rows\n"
        "print(sorted(p.name for p in fetch_model('me/tiny').iterdir()))\n"
        "rows = open_rows(local_data('me/sums/main/train.csv@[0:2]')); print([rows[0], rows[1]])"
    )
    with stub_hub(models__me__tiny=model, datasets__me__sums=data) as (url, _):
        done = python(code, tmp_path / "home", HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    files, rows = done.stdout.splitlines()
    assert files == "['config.json', 'model.safetensors']"
    assert rows == "[{'question': 'six', 'answer': '006'}, {'question': 'a, b', 'answer': ''}]"
    code = "from slime.hub import fetch_model; print(fetch_model('me/tiny'))"
    again = python(code, tmp_path / "home", HF_ENDPOINT=url)
    assert again.returncode == 0 and COMMIT in again.stdout  # the hub is gone, the copy is here


def test_the_doctor_looks_for_names_and_downloads_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    code = (
        "from slime.diagnosis.doctor import examine\n"
        "def said(name):\n"
        "    argv = ['--hf-checkpoint', name, '--prompt-data', name, '--num-rollout', '1', "
        "'--rm-type', 'math']\n"
        "    outcomes = {o.check.name: o for o in examine(argv).outcomes}\n"
        "    print(outcomes['hub'].state, [f.trouble.name for f in outcomes['hub'].findings], "
        "outcomes['model'].note)\n"
        "said('me/tiny'); said('me/nothing')"
    )
    with stub_hub(models__me__tiny=model, datasets__me__tiny=model) as (url, _):
        done = python(code, tmp_path / "home", HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    there, nowhere = done.stdout.splitlines()
    assert there == "ok [] me/tiny is on the hub and was not downloaded yet"
    assert nowhere.startswith("FAIL ['hub'")
    assert not list((tmp_path / "home").rglob("config.json"))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE keeps us from the hub"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 gives no answer"),
    ],
)
def test_without_a_hub_there_is_one_clear_error(
    env: dict[str, str], said: str, tmp_path: Path
) -> None:
    flags = (
        "--hf-checkpoint me/tiny --prompt-data me/sums --rollout-batch-size 4 --num-rollout 1 "
        "--rm-type math"
    )
    done = run(
        [sys.executable, "-m", "slime", "train", "--dry-run", *flags.split()], tmp_path, **env
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "'me/tiny' is no folder here" in done.stderr and said in done.stderr


def test_a_run_goes_by_the_local_copies_and_keeps_the_names_for_its_records(tmp_path: Path) -> None:
    model = save_model_with_words(tmp_path / "model", "qwen3")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("prompt,label\nsix,6\nten,10\nten,10\nten,10\n")
    code = (
        "from slime.config import make_config; from slime.run.preflight import from_the_hub\n"
        "config = from_the_hub(make_config(hf_checkpoint='me/tiny', "
        "prompt_data='me/sums/train.csv@[0:3]',"
        " num_rollout=1, rollout_batch_size=2, rm_type='math', use_kl_loss=True, "
        "kl_loss_coef=0.1))\n"
        "for value in (config.checkpoint.hf_checkpoint, config.checkpoint.ref_load, "
        "config.data.prompt_data,"
        " config.origins['hf_checkpoint'], config.origins['prompt_data']): print(value)"
    )
    with stub_hub(models__me__tiny=model, datasets__me__sums=tmp_path / "data") as (url, _):
        done = python(code, tmp_path / "home", HF_ENDPOINT=url)
    assert done.returncode == 0, done.stderr
    copy, reference, data, model_origin, data_origin = done.stdout.splitlines()
    assert copy.endswith(f"models--me--tiny/snapshots/{COMMIT}") and reference == copy
    assert data.endswith(f"datasets--me--sums/snapshots/{COMMIT}/train.csv@[0:3]")
    assert model_origin.endswith(": me/tiny") and data_origin.endswith(": me/sums/train.csv@[0:3]")


def test_held_out_preferences_come_from_the_hub_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "local_data", lambda path: path.replace("me/", "/copies/"))
    given: dict[str, Any] = {"loss_type": "preference_loss", "rollout_batch_size": 2}
    config = make_config(
        **given, num_rollout=1, prompt_data="/rows", eval_preference_data="me/pairs:test"
    )
    local = preflight.from_the_hub(config)
    assert local.preference.eval_preference_data == "/copies/pairs:test"
    assert local.origins["eval_preference_data"].endswith(": me/pairs:test")
    assert local.data == config.data


def test_what_the_hub_does_not_have(tmp_path: Path) -> None:
    with stub_hub() as (url, _):
        done = run(
            [sys.executable, "-m", "slime", "export", "me/tiny", "--gguf", "x.gguf"],
            tmp_path,
            HF_ENDPOINT=url,
        )
    assert done.returncode == 2 and f"{url} has nothing of that name" in done.stderr


def test_push_uploads_the_runs_model_with_a_card(tmp_path: Path) -> None:
    run_folder = write_run(tmp_path)
    template = run_folder / "model" / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    command = [sys.executable, "-m", "slime", "push", str(run_folder), "me/sums"]
    with stub_hub() as (url, hub):
        done = run(command, tmp_path, HF_ENDPOINT=url, HF_TOKEN="hf_secret")
        assert done.returncode == 0, done.stderr
        files = hub.uploads["me/sums"]
        assert hub.tokens == {"Bearer hf_secret"}
    assert done.stdout.strip().endswith(f"is at {url}/me/sums")
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files.keys()
    assert files["additional_chat_templates/tool_use.jinja"] == template.read_bytes()
    assert files["model.safetensors"] == (run_folder / "model" / "model.safetensors").read_bytes()
    card = files["README.md"].decode()
    for said in (
        "license: apache-2.0",
        "base_model: org/base",
        "- Data: sums.jsonl",
        "- Reward: rewards.score",
        "- Algorithm: grpo",
        "- Steps: 3",
        "| rollout/raw_reward | 0.25 (step 1) | 0.75 (step 3) |",
        "| eval/held | 0.1 (step 0) | 0.9 (step 3) |",
        "--lr 1e-05",
        "slime-rl 9.9, torch 2.0",
    ):
        assert said in card, card
    assert (
        "secret" not in card
        and "sglang" not in card
        and str(tmp_path) not in card
        and "--run-name" not in card
    )


def write_run(tmp_path: Path) -> Path:
    """A run folder with a model, and a base model from the hub that says its licence."""
    base = tmp_path / "hub" / "models--org--base" / "snapshots" / COMMIT
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# base\n")
    folder = tmp_path / "outputs" / "sums"
    save_model_with_words(folder / "model", "qwen3")
    config = {
        "checkpoint": {"hf_checkpoint": str(base), "save": None, "save_hf": None},
        "data": {"prompt_data": f"{tmp_path}/sums.jsonl"},
        "reward": {"custom_rm_path": "rewards.score", "rm_type": None},
        "algorithm": {"advantage_estimator": "grpo"},
        "megatron": {"optimizer": {"lr": 1e-5}, "lr": 1e-5},
        "observe": {"output_dir": "outputs", "run_name": "sums", "wandb_key": None},
        "eval": {"eval_prompt_data": ["held", f"{tmp_path}/test.jsonl"]},
        "origins": {
            "lr": "flag",
            "run_name": "flag",
            "prompt_data": "flag",
            "advantage_estimator": "default",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    packages = {"slime-rl": "9.9", "torch": "2.0", "sglang": "not installed"}
    (folder / "run.json").write_text(
        json.dumps({"stages": {"": {"state": "finished", "packages": packages}}})
    )
    rows = [{"step": 0, "eval/held": 0.1}]
    rows += [{"step": step, "rollout/raw_reward": step / 4} for step in (1, 2, 3)] + [
        {"step": 3, "eval/held": 0.9}
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_base_model_that_was_named_from_where_the_run_began(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    base = tmp_path / "models" / "my-base"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    config = json.loads((folder / "config.json").read_text())
    config["checkpoint"]["hf_checkpoint"] = "models/my-base"
    (folder / "config.json").write_text(json.dumps(config))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = run(
        [sys.executable, "-m", "slime", "push", str(folder), "me/sums", "--card-only"], elsewhere
    )
    assert done.returncode == 0, done.stderr
    assert "license: mit" in done.stdout and "`my-base` after reinforcement learning" in done.stdout
    assert "base_model" not in done.stdout, "the hub does not know it"


def test_push_without_a_token_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    done = run(
        [sys.executable, "-m", "slime", "push", str(tmp_path / "nothing"), "me/sums"], tmp_path
    )
    assert done.returncode == 2 and "there is no token to write to me/sums with" in done.stderr
    assert "nothing does not exist" not in done.stderr


def test_a_card_alone_needs_no_hub_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    model = save_model_with_words(tmp_path / "model", "qwen3")
    command = [sys.executable, "-m", "slime", "push", str(model), "me/sums", "--card-only"]
    done = run(command, tmp_path, HF_HUB_OFFLINE="1")
    assert (
        done.returncode == 0
        and "license: unknown" in done.stdout
        and "nothing is known here" in done.stdout
    )
