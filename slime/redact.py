"""The only place that recognises secrets: by the name of a value, its place in a text, or its
shape.

    structures (config.json, W&B's config)          redacted(value, name)
    texts (logs, tracebacks, error messages)        redact_text(text)
    command lines                                   redact_argv(argv)

Everything that slime writes passes one of them. The words of a name decide: ``judge_api_key``,
``apiKey``, ``X-Api-Key`` and ``HF_TOKEN`` are secret; ``label_key``, ``eos_token`` and
``max_tokens_per_gpu`` are not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote

HIDDEN = "•••"

# -- names -----------------------------------------------------------------------------------------

_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[^\W\dA-Z_]+|[A-Z]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Last words of a name that make any value secret.
_STRONG = _words(
    """
    password passwd passphrase passcode secret secrets credential credentials pwd apikey apikeys
    authtoken accesstoken secretkey accesskey privatekey sshpass authorization bearer cookie
    cookies jwt mnemonic webhook webhooks passwort kennwort senha contraseña пароль 密码
    密钥 口令 パスワード 비밀번호
    """
)
_STRONG_ENDS = ("password", "passwd", "apikey", "secret", "pw")
#: Last two words of such a name.
_STRONG_PAIRS = _words(
    """
    connection-string webhook-url webhook-urls seed-phrase recovery-phrase totp-seed totp-secret
    """
)
#: Words after the name of a secret that leave it one: "password_base64", "api_key_prod".
_SUFFIXES = _words(
    """
    v b base value str string text plain raw json hex pem old new backup prod production dev staging
    """
)
#: Words before "key" and "keys" in names of secrets. For other lower-case names `_COLUMNS`
#: decides.
_LOCKS = _words(
    """
    api access secret private auth signing encryption ssh license account shared wandb hf openai
    anthropic subscription master admin service deploy storage
    """
)
#: Words before "key" in names of columns, fields and places, which are not secret.
_COLUMNS = _words(
    """
    input label metadata tool tools reward multimodal eval prompt answer question response target
    output solution truth text image video audio message messages content role group sort order
    index id primary foreign partition unique row column field lookup cache dict json data dataset
    map hash shard route task routing run sample score metric feature name join query value source
    category domain difficulty rubric filter split log state step time date test weight by config
    env attention head kv qk public hot problem completion chosen rejected reference system user
    assistant session batch rollout turn teacher
    """
)
#: Words before "token" in names of vocabulary tokens and of token counts.
_VOCABULARY = _words(
    """
    bos eos pad unk sep cls mask image video audio stop start end begin first last next new per
    special cached think prefix suffix middle fim decoder draft eot eom eod newline every each by
    single one added input output time cost tool turn prompt response extra nul null
    """
)
#: Words before "token" and "tokens" in names of access tokens.
_TICKETS = _words(
    """
    access auth api refresh bearer session security hf github gitlab slack id
    """
)
#: Words before "pat", a personal access token.
_FORGES = _words("github gitlab gh azure devops bitbucket git")
#: Words before "pass" as a password; "pass" may also mean a pass over data.
_LOGINS = _words(
    """
    db database smtp mail mysql pg redis ftp proxy http login admin user
    """
)
_DIRECTORIES = ("PWD", "OLDPWD")
#: The grade of the bare name "key", which may mean anything.
_BARE = -1


def is_secret(name: str) -> bool:
    """Tell whether the name of a flag, YAML key, environment variable, header or field means a
    secret.

    Example:
        >>> secrets = "--wandb-key", "HF_TOKEN", "judgeApiKey", "X-Api-Key", "db_password"
        >>> [is_secret(name) for name in secrets]
        [True, True, True, True, True]
        >>> others = "input_key", "eos_token", "max_tokens_per_gpu", "tokenizer", "key"
        >>> [is_secret(name) for name in others]
        [False, False, False, False, False]
    """
    return _grade(name) > 0


@lru_cache(maxsize=4096)
def _grade(name: str) -> int:
    """2: any value is secret; 1: a text that may be a secret; `_BARE`: a text that looks random; 0:
    not secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or name in _DIRECTORIES:
        return 0
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    # AWS: the id that belongs to a secret access key
    if last == "id" and words[-3:-1] == ["access", "key"]:
        return 2
    if last in _STRONG or last.endswith(_STRONG_ENDS) or f"{before}-{last}" in _STRONG_PAIRS:
        return 2
    if last in _SUFFIXES and before:
        return 2 if _grade("_".join(words[:-1])) == 2 else 0
    is_variable = name.isupper() and len(words) > 1
    if last in ("key", "keys"):
        if before in _LOCKS:
            return 2
        if name.lower() == "key":
            return _BARE
        return int(last == "key" and (is_variable or before not in _COLUMNS))
    if last in ("token", "tokens"):
        if before in _TICKETS:
            return 2 if last == "token" else 1
        return int(last == "token" and (is_variable or before not in _VOCABULARY))
    if last == "pat" and (is_variable or before in _FORGES):
        return 1
    if last == "tok" and before in _TICKETS:
        return 1
    if name.lower() in ("pat", "sig", "sas", "signature"):
        return _BARE
    if last == "pass":
        return int(is_variable or before in _LOGINS) or (_BARE if name.lower() == "pass" else 0)
    return int(last == "auth" or last.endswith("token"))


#: Paths of key and credential files are shown.
_PATH = re.compile(r"(?:~|\.{0,2})/[\w./-]+\.\w{2,5}")
#: Values in the place of a secret that are not secret.
_NO_VALUES = {"", "…", "none", "null", "empty", "true", "false", "yes", "no"}
_NO_VALUES |= {"auto", "basic", "bearer", "token"}
#: Words after the name of a flag in messages.
_PROSE = _words("has is needs names and or too out with without to in of")


def _hides(grade: int, value: Any) -> bool:
    """Tell whether a value whose name has this grade is hidden."""
    if not grade or value is None or isinstance(value, bool):
        return False
    if not isinstance(value, str):
        return grade == 2
    plain = value.strip()
    if grade == _BARE:
        return len(plain) >= 16 and _looks_random(plain)
    if plain.lower() in _NO_VALUES or plain == HIDDEN or re.fullmatch(r"\$\{?\w+\}?", plain):
        return False
    if grade == 2:
        return not _PATH.fullmatch(plain)
    return not (plain.startswith("<") or (plain.isdecimal() and len(plain) < 8))


# -- texts -----------------------------------------------------------------------------------------

#: Characters; shorter values are words that occur in every log ("1", "true", "none").
_LEAST = 6
#: The same for a line of a multi-line secret, such as a private key.
_MIN_LINE = 16
_PRIVATE_KEY = re.compile(
    r"(?P<before>-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----)(?P<secret>.{1,16000}?)"
    r"(?P<after>-----END [A-Z ]{0,30}PRIVATE KEY|\Z)",
    re.S,
)
#: Recognisable formats of keys: the hub, W&B, OpenAI and similar, GitHub, AWS, Google, Slack,
#: Groq, NVIDIA, Replicate, xAI, Perplexity, SendGrid, Docker, Vault, Tavily, DigitalOcean,
#: Databricks, LangSmith, Pinecone, Telegram, age, JWTs.
_SHAPES = re.compile(
    r"(?P<before>(?:hooks\.slack\.com/services/|discord(?:app)?\.com/api/webhooks/\d+/|"
    r"api\.telegram\.org/bot)?)"
    r"(?P<secret>(?<=services/)[\w/-]{12,}|(?<=webhooks/)[\w/-]{12,}|(?<=\.org/bot)\d+:[\w-]{12,}"
    r"|\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|wandb_v\d_[\w-]{16,}|local-[0-9a-f]{40}"
    r"|gh[opsru]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}|(?:AKIA|ASIA)[0-9A-Z]{12,}"
    r"|(?:dckr_pat|shpat|whsec|lsv2_pt|lsv2_sk|pcsk|jina|lin_api|figd|sntrys)_[\w-]{20,}"
    r"|(?:tvly|csk|gldt|glptt)-[\w-]{20,}|hvs\.[\w-]{20,}|do[opr]_v1_[0-9a-f]{32,}"
    r"|dapi[0-9a-f]{32}|AGE-SECRET-KEY-1[0-9A-Z]{20,}|ATATT3x[\w=-]{20,}"
    r"|gsk_[A-Za-z0-9]{20,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{20,}|(?:xai|pplx)-[A-Za-z0-9]{20,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|ya29\.[\w-]{20,}"
    r"|AIza[\w-]{20,}|xox[abeprs]-[\w-]{10,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|[rs]k_(?:live|"
    r"test)_[A-Za-z0-9]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,})|(?<![\w/.-])sk-(?=[\w-]{0,80}\d)[\w-]{12,}"
    r"|(?<!\d)\d{8,10}:AA[\w-]{30,}|(?<=wandb login )[0-9a-f]{40})"
)
#: user:password@, :password@, and a long user name, which is a token.
_IN_URL = re.compile(
    r"(?P<before>\b[a-zA-Z][a-zA-Z0-9+.-]{1,20}://(?:[^/\s:@'\"]{0,200}:(?=[^/\s'\"]{1,400}@)|"
    r"(?=[^/\s:@'\"]{16,400}@)))"
    r"(?P<secret>[^/\s'\"]{1,400})(?P<after>@)"
)
#: The same in a URL that is a parameter of another.
_IN_QUOTED_URL = re.compile(
    r"(?P<before>%3A%2F%2F[^%\s/]{0,200}%3A)(?P<secret>[^\s&/]{1,400}?)(?P<after>%40)", re.I
)
_IN_QUERY = re.compile(r"(?P<before>[?&;#](?P<name>[\w.-]{1,60})=)(?P<secret>[^&#\s\"'<>\\]+)")
_QUERY_NAMES = ("key", "sig", "signature", "token", "auth", "pass", "sas")
_BEARER = re.compile(r"(?P<before>\b(?i:bearer|basic|token) +)(?P<secret>[\w.~+/=-]{12,})")
#: An Authorization header of another scheme, to the end of its line or quote.
_SCHEME = re.compile(
    r"(?P<before>\b(?i:authorization\W{1,8}(?:digest|aws4-hmac-sha256|negotiate|ntlm|api-?key|key|"
    r"oauth|ssws|geniekey|splunk|dpop|hawk|mac)) +)(?P<secret>[^'\n]+)"
)
#: curl -u user:password
_LOGIN = re.compile(
    r"(?P<before>(?:^|\s)(?:-u|--user|--proxy-user)[ =]['\"]?[^\s:'\"]{1,80}:)(?P<secret>[^\s'\"]+)"
)
#: auth=("user", "password"), and passwords after -p.
_PAIR = re.compile(
    r"(?P<before>\bauth\s?[=:]\s?[(\[]\s?['\"][^'\"\n]{0,80}['\"],\s?['\"])(?P<secret>[^'\"\n]+)"
)
_AFTER_P = re.compile(
    r"(?P<before>\b(?:sshpass|(?:docker|podman|oras|helm registry) login|mysql\w*|mariadb\w*)\b"
    r"[^\n|;&]{0,200}?\s-p ?['\"]?)(?P<secret>[^\s'\"]+)"
)
#: "Incorrect API key provided: …", "the password is …"; the value must look random.
_IN_PROSE = re.compile(
    r"(?P<before>\b(?i:api[ -]key|(?:access|auth) token|password|secret)\b(?: \w{1,12}){0,2}?"
    r"(?: is|\s?[:=])\s*['\"]?)(?P<secret>[\w.~+/=-]{8,})"
)
#: A YAML block scalar, and an XML element; the name decides.
_BLOCK = re.compile(
    r"(?P<before>(?P<name>\b[^\W\d_][\w-]{1,60})[\"']?\s?:\s?[|>][+-]?\d?[ \t]*\n)"
    r"(?P<secret>[ \t]+[^\n]*(?:\n[ \t]+[^\n]*)*)"
)
_BLOCK_MARK = re.compile(r"[|>][+-]?\d?[ \t]*\n")
_ELEMENT = re.compile(
    r"(?P<before><(?P<name>[^\W\d_][\w-]{1,60})>)(?P<secret>[^<\n]{1,400})(?P<after></(?P=name)>)"
)
#: NAME=value, "name": "value" (quotes may be escaped), names["name"] = "value", ("name", "value"),
#: --name value; the name decides.
_NAMED = re.compile(
    r"""(?P<before>(?P<name>-{0,2}(?:\b|(?<=%\w\w))[^\W\d_][\w-]{1,60})"""
    r"""(?P<between>\\{0,3}["']?\]?\s{0,3}(?::=|=>|[=:])\s{0,3}|"""
    r"""%(?:22%)?3[AD](?:%20)?(?:%22)?|\\u003[ad]|"""
    r"""["'],\s?(?=["'])|\s(?=[^\s-])))"""
    r"""(?P<mark>\\{0,3}["']?)(?P<secret>(?<=")[^"\n]*|(?<=')[^'\n]*|[^\s,;"'}\])]+)"""
)


#: Keys beside "value" that name it, in lists of headers and of environment variables.
_NAME_KEYS = ("name", "key", "header", "variable")


class _Hider:
    """Replaces secrets, and collects them in ``found``.

    Args:
        is_log: hide every value after a name of a secret. In settings, where a mistake would change
            a resumed run, the value in a longer text must also look random.
    """

    def __init__(self, is_log: bool) -> None:
        self.found: set[str] = set()
        self._is_log = is_log

    def text(self, text: str) -> str:
        text = _PRIVATE_KEY.sub(self._always, text)
        text = _SHAPES.sub(self._always, text)
        text = _IN_URL.sub(self._always, text)
        if "%40" in text:
            text = _IN_QUOTED_URL.sub(self._always, text)
        text = _IN_QUERY.sub(self._in_query, text)
        text = _BEARER.sub(self._always, text)
        text = _SCHEME.sub(self._always, text)
        if "-u" in text:
            text = _LOGIN.sub(self._always, text)
        if "auth" in text:
            text = _PAIR.sub(self._always, text)
        if " -p" in text:
            text = _AFTER_P.sub(self._always, text)
        text = _IN_PROSE.sub(self._if_random, text)
        if _BLOCK_MARK.search(text):
            text = _BLOCK.sub(self._if_named, text)
        if "</" in text:
            text = _ELEMENT.sub(self._if_named, text)
        return self._named_in(text)

    def value(self, value: Any, name: str, inherited: int = 0) -> Any:
        grade = inherited or _grade(name)
        if isinstance(value, Mapping):
            below = 2 if grade == 2 else 0
            named = next((value[key] for key in _NAME_KEYS if isinstance(value.get(key), str)), "")
            return {
                key: self.value(inner, named if key == "value" and named else str(key), below)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            if all(isinstance(item, str) for item in value) and any(
                item.startswith("--") for item in value
            ):
                return type(value)(self.argv(list(value)))
            return type(value)(self.value(item, name, inherited) for item in value)
        if _hides(grade, value):
            self.found.add(str(value))
            return HIDDEN
        return self.text(value) if isinstance(value, str) else value

    def argv(self, argv: list[str]) -> list[str]:
        shown: list[str] = []
        flag = ""
        for word in argv:
            if re.match(r"--[^\W_]", word):
                flag, equals, value = word.partition("=")
                shown.append(f"{flag}={self._word(flag, value)}" if equals else flag)
                flag = "" if equals else flag
            else:
                shown.append(self._word(flag, word))
        return shown

    def _word(self, flag: str, word: str) -> str:
        """A flag's value, which may be JSON."""
        if word[:1] in "{[":
            try:
                inner = json.loads(word)
            except ValueError:
                inner = None
            if isinstance(inner, dict | list):
                shown = self.value(inner, flag)
                return word if shown == inner else json.dumps(shown, ensure_ascii=False)
            # not JSON, so the names in it are unknown
            if flag == "--train-env-vars":
                self.found.add(word)
                return HIDDEN
        return str(self.value(word, flag))

    def _hide(self, match: re.Match[str]) -> str:
        groups = match.groupdict()
        self.found.add(groups["secret"])
        return f"{groups['before']}{groups.get('mark') or ''}{HIDDEN}{groups.get('after') or ''}"

    def _always(self, match: re.Match[str]) -> str:
        return match[0] if HIDDEN in match["secret"] else self._hide(match)

    def _if_random(self, match: re.Match[str]) -> str:
        return self._always(match) if _looks_random(match["secret"]) else match[0]

    def _if_named(self, match: re.Match[str]) -> str:
        is_hidden = _hides(_grade(match["name"]), match["secret"])
        return self._always(match) if is_hidden else match[0]

    def _in_query(self, match: re.Match[str]) -> str:
        words = [word.lower() for word in _WORDS.findall(match["name"])] or [""]
        grade = 2 if words[-1] in _QUERY_NAMES else _grade(match["name"])
        if _hides(grade, match["secret"]) and HIDDEN not in match["secret"]:
            return self._hide(match)
        return match[0]

    def _named_in(self, text: str) -> str:
        """Hide the values after names of secrets. What follows another name may itself be a name
        ("error: password=…"), so it is searched again."""
        parts = []
        done = 0
        at = 0
        while (match := _NAMED.search(text, at)) is not None:
            shown = self._named(match)
            at = match.start("secret")
            if shown != match[0]:
                parts += [text[done : match.start()], shown]
                done = match.end()
                at = done
        return "".join([*parts, text[done:]])

    def _named(self, match: re.Match[str]) -> str:
        name = match["name"]
        between = match["between"]
        value = match["secret"]
        grade = _grade(name)
        if HIDDEN in value or not _hides(grade, value):
            return match[0]
        if between.isspace() and value.lower() in _PROSE:
            return match[0]
        # "a token of …" is prose; "password abc123" is a line of netrc
        is_prose = between.isspace() and not name.startswith("--")
        if (is_prose or "," in between) and not (grade == 2 and _looks_random(value)):
            return match[0]
        is_clear = (
            grade == 1
            and name.lower().endswith("token")
            and "_" not in name
            and "-" not in name.strip("-")
        )
        if (is_clear or not (self._is_log or grade == 2)) and not _looks_random(value):
            return match[0]
        return self._hide(match)


def _looks_random(value: str) -> bool:
    return len(value) >= 8 and any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


# -- public functions ------------------------------------------------------------------------------


def redacted(value: Any, name: str = "") -> Any:
    """Return a setting with its secrets hidden, at any depth of dicts and lists.

    Args:
        name: the setting's name: a flag, a key, a variable.

    Example:
        >>> redacted({"api_key": "abc", "url": "https://me:pw@host/v1?sig=12ab", "key": "answer"})
        {'api_key': '•••', 'url': 'https://me:•••@host/v1?sig=•••', 'key': 'answer'}
    """
    return _Hider(is_log=False).value(value, name)


def redact_argv(argv: list[str]) -> list[str]:
    """Return a command line with its secrets hidden.

    Example:
        >>> redact_argv(["train.py", "--wandb-key", "abc", "--wandb-key=abc", "--lr", "1"])
        ['train.py', '--wandb-key', '•••', '--wandb-key=•••', '--lr', '1']
    """
    return _Hider(is_log=False).argv(argv)


def redact_text(text: str, secrets: Iterable[str] = ()) -> str:
    """Return a text with its secrets hidden: those that this process knows (`remember`), and values
    that have the format or the name of a secret.

    Args:
        secrets: further values to hide, wherever they occur.

    Example:
        >>> redact_text("WANDB_API_KEY=abcdef123456 python train.py")
        'WANDB_API_KEY=••• python train.py'
    """
    known = _pattern(frozenset((*_known, *secrets)))
    if known is not None:
        text = known.sub(HIDDEN, text)
    return _Hider(is_log=True).text(text)


def secrets_in(value: Any, name: str = "") -> set[str]:
    """Return the parts of a setting that `redacted` hides.

    Example:
        >>> sorted(secrets_in({"MY_TOKEN": "abcdefgh", "url": "https://me:pw@host/"}))
        ['abcdefgh', 'pw']
    """
    hider = _Hider(is_log=False)
    hider.value(value, name)
    return hider.found


_known: set[str] = set()


def remember(*values: Any) -> None:
    """Make `redact_text` hide the secrets of these settings and of the environment in every text of
    this process."""
    for value in (*values, dict(os.environ)):
        _known.update(secrets_in(value))


@lru_cache(maxsize=8)
def _pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern of all spellings of these values, longest first; None if there are none."""
    shapes = {shape for value in secrets if len(value) >= _LEAST for shape in _shapes(value)}
    shapes.discard(HIDDEN)
    ordered = sorted(shapes, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _shapes(secret: str) -> Iterable[str]:
    """Yield the spellings of a secret in texts: plain, in JSON, in a Python literal, in a URL, and
    each line of a multi-line secret."""
    yield secret
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield quote(secret, safe="")
    yield from (line for line in secret.splitlines() if len(line) >= _MIN_LINE)


class Redacting:
    """A text stream that hides secrets in what is written to it; the rest is the stream's own."""

    def __init__(self, stream: Any, redact: Callable[[str], str] = redact_text) -> None:
        self._stream = stream
        self._redact = redact

    def write(self, text: str) -> int:
        self._stream.write(self._redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def close(self) -> None:
        """Flush: users' code that closes the process's stdout or stderr would make each log line
        an error."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
