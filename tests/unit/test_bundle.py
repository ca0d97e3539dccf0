"""`slime bundle`: all that an issue needs, and nothing that is secret, private, huge, or outside of
the run folder."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.__main__ import main
from slime.redact import HIDDEN, redact_text, secrets_in

KEY = "hf_abcDEF0123456789abcDEF0123456789ab"
WANDB = "0123456789abcdef0123456789abcdef01234567"
PASSWORD = "correct-horse-battery"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A failed run whose files hold secrets in all the ways that they come about, and everything
    that is private."""
    run = tmp_path / "outputs" / "demo"
    write(
        run / "run.json",
        {"stages": {"": {"state": "failed", "started": 1.0, "argv": ["--wandb-key", HIDDEN]}}},
    )
    write(
        run / "config.json",
        {
            "observe": {"wandb_key": WANDB},
            "cluster": {"train_env_vars": {"MY_API_KEY": PASSWORD, "NCCL_DEBUG": "INFO"}},
            "data": {"input_key": "prompt"},
            "origins": {"wandb_key": "flag", "input_key": "flag"},
        },
    )
    write(run / "metrics.jsonl", {"step": 1, "train/loss": 0.5})
    write(
        run / "logs" / "driver.log",
        f"calm\nHF_TOKEN={KEY}\npulled https://me:{PASSWORD}@hub.example/x\n",
    )
    write(
        run / "logs" / "rollout.log",
        f"sent with Authorization: Bearer {WANDB}\nthe value is {PASSWORD}.\n",
    )
    crash = run / "crash" / "20261123-064012"
    write(
        crash / "crash.json",
        {"error": "UserError", "message": f"x: {KEY}", "time": 2.0, "notes": []},
    )
    write(crash / "traceback.txt", f"Traceback\n  File 'x'\nValueError: api_key='{PASSWORD}'\n")
    write(crash / "samples.jsonl", {"prompt": "a private prompt", "response": KEY})
    write(crash / "step.pt", "tensors")
    write(run / "samples" / "rollout_000000.jsonl", {"prompt": "an old prompt"})
    write(run / "samples" / "rollout_000001.jsonl", {"prompt": "a private prompt"})
    write(run / "model" / "model.safetensors", "weights")
    write(run / "checkpoints" / "iter_0000001" / "x.distcp", "weights")
    write(run / "journal" / "rollout_1.journal", "pickle")
    return run


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")


def pack(folder: Path, *words: str) -> dict[str, str]:
    """The texts of its bundle, by name."""
    archive = folder.parent / "b.tar.gz"
    assert main(["bundle", str(folder), "--output", str(archive), *words]) == 0
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        assert all(
            member.isfile() and not member.name.startswith(("/", "..")) for member in members
        )
        assert {member.name.split("/")[0] for member in members} == {f"{folder.name}-bundle"}
        read = {member.name.split("/", 1)[1]: tar.extractfile(member) for member in members}
        return {name: file.read().decode() for name, file in read.items() if file is not None}


def test_it_holds_what_an_issue_needs_and_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = pack(folder)
    assert set(texts) == {
        *(
            "explain.txt",
            "explain.json",
            "versions.txt",
            "config.json",
            "run.json",
            "metrics.jsonl",
        ),
        *("logs/driver.log", "logs/rollout.log"),
        *("crash/20261123-064012/crash.json", "crash/20261123-064012/traceback.txt"),
    }
    assert "torch " in texts["versions.txt"] and '"findings"' in texts["explain.json"]
    assert json.loads(texts["config.json"])["data"]["input_key"] == "prompt", (
        "what is no secret stays readable"
    )
    assert '"NCCL_DEBUG": "INFO"' in texts["config.json"]
    told = capsys.readouterr().out
    assert all(name in told for name in texts)
    assert (
        "samples are not in it" in told
        and f"{(folder.parent / 'b.tar.gz').stat().st_size:,} bytes" in told
    )


@pytest.mark.parametrize("words", [(), ("--samples",)])
def test_no_secret_is_in_it(folder: Path, words: tuple[str, ...]) -> None:
    whole = "\n".join(pack(folder, *words).values())
    for secret in (KEY, WANDB, PASSWORD):
        assert secret not in whole
    assert HIDDEN in whole and "hub.example/x" in whole


def test_samples_only_where_they_are_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "a private prompt" not in "\n".join(pack(folder).values())
    capsys.readouterr()
    texts = pack(folder, "--samples")
    assert "a private prompt" in texts["samples/rollout_000001.jsonl"]
    assert "a private prompt" in texts["crash/20261123-064012/samples.jsonl"]
    assert "samples/rollout_000000.jsonl" not in texts, "the newest alone"
    assert not any(name.endswith((".pt", ".safetensors", ".distcp", ".journal")) for name in texts)
    assert "samples are in it" in capsys.readouterr().out


def test_secrets_of_the_environment_are_hidden_wherever_they_stand(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_JUDGE_TOKEN", "no-pattern-knows-this")
    write(folder / "logs" / "engine-0.log", "asked with no-pattern-knows-this, answered 401\n")
    assert pack(folder)["logs/engine-0.log"] == f"asked with {HIDDEN}, answered 401\n"


def test_links_lead_nowhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither of files nor of folders, nor pipes, and a link to the run folder itself is no
    obstacle."""
    outside = tmp_path / "outside"
    write(outside / "private.log", "not of this run")
    write(outside / "samples" / "rollout_000009.jsonl", "not of this run")
    (folder / "logs" / "engine-0.log").symlink_to(outside / "private.log")
    (folder / "crash" / "20261124-000000").symlink_to(outside)
    (folder / "samples" / "sft").symlink_to(outside / "samples")
    write(outside / "crash.json", {"error": "not of this run"})
    (folder / "config.sft.json").symlink_to(outside / "crash.json")
    os.mkfifo(folder / "logs" / "engine-1.log")
    link = tmp_path / "link"
    link.symlink_to(folder)
    texts = pack(folder, "--samples")
    assert "not of this run" not in "\n".join(texts.values())
    told = capsys.readouterr().out
    assert (
        "left out: logs/engine-0.log: a link" in told
        and "left out: config.sft.json: a link" in told
    )
    archive = tmp_path / "c.tar.gz"
    assert main(["bundle", str(link), "--output", str(archive)]) == 0
    with tarfile.open(archive) as tar:
        assert "demo-bundle/logs/driver.log" in tar.getnames()


def test_huge_files_are_cut_and_damaged_ones_taken_as_they_are(folder: Path) -> None:
    with (folder / "logs" / "engine-0.log").open("wb") as log:
        log.write(b"the first line\n")
        log.seek(1 << 33)
        log.write(b"\nthe last line\n")
    (folder / "config.json").write_bytes(b'{"wandb_key": "' + WANDB.encode() + b'", \xff')
    texts = pack(folder)
    log_text = texts["logs/engine-0.log"]
    assert (
        len(log_text) < 1 << 20
        and log_text.startswith("the first line\n")
        and log_text.endswith("the last line\n")
    )
    assert "bytes left out" in log_text
    assert WANDB not in texts["config.json"]


def test_a_folder_that_has_almost_nothing_is_packed(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    assert {"explain.txt", "versions.txt"} <= set(pack(tmp_path / "run"))


@pytest.mark.parametrize("output", ["x.txt", "{folder}", "{folder}/config.json/x.tar.gz"])
def test_a_wrong_place_is_refused(
    output: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "config.json").read_bytes()
    assert main(["bundle", str(folder), "--output", output.replace("{folder}", str(folder))]) == 2
    assert "--output" in capsys.readouterr().err and (folder / "config.json").read_bytes() == before


# -- the words that are hidden ---------------------------------------------------------------------

_SECRET = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_/+.", min_size=6, max_size=60
)


@settings(max_examples=30)
@given(st.text(max_size=80), _SECRET, st.text(max_size=80))
def test_a_known_secret_is_nowhere(before: str, secret: str, after: str) -> None:
    assert secret not in redact_text(f"{before}{secret}{after}", [secret]).replace(HIDDEN, "")


_NAME = st.sampled_from(
    ["HF_TOKEN", "WANDB_API_KEY", "api_key", "--wandb-key", "MY_SECRET", "db_password", "X_TOKEN"]
)
_BETWEEN = st.sampled_from(["=", ": ", " = ", "='", '="', '": "'])
_VALUE = st.text("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", min_size=8, max_size=40)


@given(_NAME, _BETWEEN, _VALUE)
def test_what_is_called_a_secret_is_hidden(name: str, between: str, value: str) -> None:
    quote = between[-1] if between[-1] in "'\"" else ""
    if between.startswith('"'):
        text = f'{{"{name}{between}{value}{quote} and more'
    else:
        text = f"{name}{between}{value}{quote} and"
    assert value not in redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "--input-key prompt --label-key label",
        '"input_key": "prompt"',
        "hf_checkpoint: /models/qwen",
        "max_new_tokens=512, 3 tokens of 7",
        "eos_token_id: 7; num_tokens: 128",
        "2026-11-23 06:40:01.360 INFO    driver  session: launched: ray 6.5 s",
        "loaded from 5f0b1c0e9a1b2c3d4e5f60718293a4b5c6d7e8f9",
        "http://127.0.0.1:19218/generate",
        '"eos_token": "<|im_end|>", pad_token=<|endoftext|>',
        "last_token=151645 #new-token: 512, #cached-token: 3",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "redis://:hunter2hunter2@host:6379/0",
        "https://hunter2hunter2hunter2@github.example/me/x.git",
        "postgres://me:p@hunter2hunter2@host/db",
        "-----BEGIN RSA PRIVATE KEY-----\\nhunter2hunter2\\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2hunter2\n-----END PRIVATE KEY-----",
    ],
)
def test_secrets_are_known_by_where_they_stand(text: str) -> None:
    assert "hunter2" not in redact_text(text)


def test_a_known_secret_is_hidden_in_every_shape() -> None:
    secret = 'first line "of" é\\\nthe second line of it/'
    shapes = [
        secret,
        json.dumps(secret),
        json.dumps(secret, ensure_ascii=False),
        repr(secret),
        quote(secret, safe=""),
    ]
    for text in [*shapes, *secret.splitlines()]:
        left = redact_text(text, [secret])
        assert HIDDEN in left and "second" not in left and "first" not in left, text


def test_short_secrets_do_not_blank_everything() -> None:
    assert redact_text("a banana at 12345", ["a", "", "12345"]) == "a banana at 12345"


def test_secrets_are_known_by_the_names_of_flags_and_variables() -> None:
    flags = {
        "wandb_key": "abcdefgh",
        "input_key": "prompt",
        "train_env_vars": {"A_TOKEN": "ijklmnop", "B": "qrstuvwx"},
    }
    assert secrets_in([flags, {"S3_SECRET_KEY": "12345678", "HOME": "/root"}]) == {
        *("abcdefgh", "ijklmnop", "12345678"),
    }
