"""Text without secrets: logs repeat what was in the environment, on a command line or in a URL.

>>> scrubbed("WANDB_API_KEY=abcdef123456 python train.py", secrets=())
'WANDB_API_KEY=••• python train.py'
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from slime.files import HIDDEN, is_secret_variable

#: Shorter values are words that stand in every log ("1", "true", "none").
_LEAST = 6
#: Of a secret of several lines, such as a private key.
_LEAST_LINE = 16
#: What a key looks like by itself: those of the hub, W&B, OpenAI and the like, GitHub, AWS, Google, Slack.
_KEYS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|wandb_v\d_[\w-]{16,}|local-[0-9a-f]{40}"
    r"|sk-[A-Za-z0-9_-]{12,}|gh[opsru]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}|AKIA[0-9A-Z]{12,}"
    r"|AIza[\w-]{20,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})"
)
#: user:password@, :password@ and a long user, which is a token.
_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)(?:[^/\s:@'\"]{0,200}:[^/\s'\"]{1,400}|[^/\s:@'\"]{16,400})@")
#: In texts, and in JSON, where its lines end in a backslash and an n.
_PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----).{1,16000}?(-----END [A-Z ]{0,30}PRIVATE KEY)", re.S
)
#: Tokens of a tokenizer, and counts of them.
_NO_TOKEN = re.compile(r"(?:bos|eos|pad|unk|sep|cls|mask|image|video|audio)_token")
_BEARER = re.compile(r"(?i)\b(bearer|basic|token) +[\w.~+/=-]{12,}")
#: NAME=value, "name": "value", --name value; the name decides.
_NAMED = re.compile(
    r"""(?P<name>-{0,2}\b[A-Za-z][\w-]{2,60})(?P<between>["']?\s{0,3}[=:]\s{0,3}|\s(?=[^\s-]))"""
    r"""(?P<value>"[^"\n]*"|'[^'\n]*'|[^\s,;"'}\])]+)"""
)


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """`text` with every secret hidden: the values given, what looks like a key, and what is called one.

    Args:
        secrets: values that must not be in it, wherever they stand.
    """
    shown = {shape for value in secrets if len(value) >= _LEAST for shape in _shapes(value)}
    for secret in sorted(shown, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\2", text)
    text = _KEYS.sub(HIDDEN, text)
    text = _IN_URL.sub(rf"\1{HIDDEN}@", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _NAMED.sub(_without_value, text)


def _shapes(secret: str) -> Iterable[str]:
    """A secret as texts have it: plain, in JSON, as Python writes it, in a URL, and in the lines of a longer text."""
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield quote(secret, safe="")
    yield from (line for line in secret.splitlines() if len(line) >= _LEAST_LINE)


def _without_value(match: re.Match[str]) -> str:
    name, between, value = match["name"], match["between"], match["value"]
    if not is_secret_variable(name) or _is_innocent(name, between, value):
        return match[0]
    mark = value[0] if value[:1] in ("'", '"') else ""
    return f"{name}{between}{mark}{HIDDEN}{mark}"


def _is_innocent(name: str, between: str, value: str) -> bool:
    """--input-key prompt: the flags of columns end as keys do; and "a token of …" is prose."""
    if between.isspace():
        return not name.startswith("--") or (name.lower().replace("-", "_").endswith("_key") and len(value) < 20)
    plain = name.strip("-").lower().replace("-", "_")
    if _NO_TOKEN.search(plain) or (plain.endswith("_token") and value.isdecimal() and len(value) < 8):
        return True
    columns = ("input_key", "label_key", "metadata_key", "tool_key", "reward_key", "multimodal_keys")
    return plain.endswith(columns) or value.strip("\"'") in ("None", "null", "True", "False", "")


def known_secrets(*flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Collection[str]:
    """Values of the environment, and of dicts of flags, whose names say that they are secret.

    Example:
        >>> flags = {"train_env_vars": {"MY_TOKEN": "abcdefgh"}}
        >>> sorted(known_secrets(flags, environ={"HF_TOKEN": "hf_x", "HOME": "/"}))
        ['abcdefgh', 'hf_x']
    """
    found = {value for name, value in environ.items() if value and is_secret_variable(name)}
    for one in flags:
        for name, value in one.items():
            if isinstance(value, Mapping):
                found |= set(known_secrets(value, environ={}))
            elif isinstance(value, str) and value and is_secret_variable(name) and not _is_innocent(name, "=", value):
                found.add(value)
    return found
