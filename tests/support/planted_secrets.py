"""Twenty kinds of secret, where users put them, and a search of everything under a folder for their
values."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

#: Kind → its value. None of them is part of another.
SECRETS = {
    "flag": "w4ndb-0b1c2d3e4f",
    "variable *_TOKEN": "tok-8f3a91bc77",
    "variable *_KEY": "key-77aa12ce90",
    "variable *PASSWORD*": "correct horse 42 battery",
    "AWS secret key": "wJalrXUtnFEMIK7MDENGbPxRfiCY",
    "AWS key id": "AKIAIOSFODNN7QWERTY1",
    "URL password": "urlpw-5d6e7f80",
    "URL api_key=": "query-0a1b2c3d4e",
    "URL sig=": "sig-99f0e1d2c3b4",
    "YAML key": "judge-123abc456def",
    "YAML key below another": "nested-654fed321cba",
    "YAML password in a list": "hunter2-in-a-list",
    "header": "bearer-5f5f5f5f5f5f",
    "header as text": "xapi-aa00bb11cc22",
    "webhook": "T00000000/B00000000/abcdefGHIJKL12345678",
    "private key": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC",
    "JWT": "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4",
    "environment HF_TOKEN": "hf_QwErTyUiOpAsDfGhJkLzXcVb",
    "environment OPENAI_API_KEY": "sk-proj-0123456789abcdefABCDEF",
    "environment GITHUB_TOKEN": "ghp_0123456789abcdefABCDEFGHIJ",
    "environment *_SECRET": "plain words as a secret",
}
#: Settings beside them that must stay readable.
CLEAR = {
    "label_key": "label",
    "input_key": "prompt",
    "eos_token": "<|im_end|>",
    "sort_key": "question_v2_answers",
}


def variables() -> dict[str, str]:
    """For --train-env-vars."""
    names = {
        "MY_TOKEN": "variable *_TOKEN",
        "SERVICE_KEY": "variable *_KEY",
        "DB_PASSWORD": "variable *PASSWORD*",
        "AWS_SECRET_ACCESS_KEY": "AWS secret key",
        "AWS_ACCESS_KEY_ID": "AWS key id",
    }
    return {**{name: SECRETS[kind] for name, kind in names.items()}, "NCCL_DEBUG": "WARN"}


def hooks() -> dict[str, Any]:
    """For --custom-config-path."""
    return {
        "judge_api_key": SECRETS["YAML key"],
        "judge": {
            "api_key": SECRETS["YAML key below another"],
            "headers": {"Authorization": f"Bearer {SECRETS['header']}"},
        },
        "mirrors": [{"user": "me", "password": SECRETS["YAML password in a list"]}],
        "curl": ["-H", f"X-Api-Key: {SECRETS['header as text']}"],
        "notify": f"https://hooks.slack.com/services/{SECRETS['webhook']}",
        "storage": f"https://store.example/a?sv=2&sig={SECRETS['URL sig=']}",
        "pem": f"-----BEGIN PRIVATE KEY-----\n{SECRETS['private key']}\n-----END PRIVATE KEY-----",
        "session": SECRETS["JWT"],
        **{
            name: value
            for name, value in CLEAR.items()
            if not name.endswith(("label_key", "input_key"))
        },
    }


def url() -> str:
    """For --rm-url."""
    return (
        f"http://me:{SECRETS['URL password']}@judge.example/v1?n=3&api_key="
        f"{SECRETS['URL api_key=']}"
    )


def environment() -> dict[str, str]:
    names = ("HF_TOKEN", "OPENAI_API_KEY", "GITHUB_TOKEN")
    found = {name: SECRETS[f"environment {name}"] for name in names}
    return {**found, "MAILER_SECRET": SECRETS["environment *_SECRET"]}


def found_in(content: bytes) -> set[str]:
    """Kinds whose value is in the content, plain, quoted for a URL, or in what is packed in it."""
    found = {
        kind
        for kind, value in SECRETS.items()
        if value.encode() in content or quote(value).encode() in content
    }
    for inner in _unpacked(content):
        found |= found_in(inner)
    return found


def _unpacked(content: bytes) -> Iterator[bytes]:
    if content[:2] == b"\x1f\x8b":
        yield gzip.decompress(content)
    elif content[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    elif content[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            members = (tar.extractfile(member) for member in tar if member.isfile())
            yield from (member.read() for member in members if member is not None)


def search(*places: Path) -> dict[str, set[str]]:
    """File → kinds of secret in it, below folders."""
    files = [
        file
        for place in places
        for file in ([place] if place.is_file() else place.rglob("*"))
        if file.is_file()
    ]
    assert files
    return {str(file): kinds for file in files if (kinds := found_in(file.read_bytes()))}
