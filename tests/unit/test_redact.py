"""What is secret, and that no writer of a run writes it."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime import redact
from slime.config import Config, make_config
from slime.config.flags import all_flags
from slime.errors import UserError
from slime.log import setup_logging
from slime.observe.output import tolerant_output
from slime.observe.run_data import Stage
from slime.observe.run_folder import RunFolder
from slime.page import stages
from slime.redact import (
    HIDDEN,
    Redacting,
    is_secret,
    redact_argv,
    redact_text,
    redacted,
    secrets_in,
)
from tests.support import planted_secrets as planted


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_known", set())


def config_of(folder: Path) -> Config:
    given: dict[str, Any] = {
        "output_dir": str(folder / "outputs"),
        "run_name": "one",
        "rm_url": planted.url(),
    }
    given |= {
        "wandb_key": planted.SECRETS["flag"],
        "train_env_vars": planted.variables(),
        "use_wandb": True,
    }
    return replace(
        make_config(label_key="label", input_key="prompt", **given), extra=planted.hooks()
    )


def test_every_kind_is_planted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    everything = repr((config.values(), config.extra, planted.environment())).replace("\\n", "\n")
    assert (
        planted.found_in(everything.encode()) == set(planted.SECRETS) and len(planted.SECRETS) >= 20
    )


def test_no_writer_of_a_run_writes_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    for name, value in planted.environment().items():
        monkeypatch.setenv(name, value)
    argv = ["slime", "train", "--wandb-key", planted.SECRETS["flag"], f"--rm-url={planted.url()}"]
    monkeypatch.setattr(
        "sys.argv", [*argv, "--train-env-vars", json.dumps(planted.variables()), "--lr", "1e-3"]
    )
    redact.remember(*config.for_hiding())
    run, locks = RunFolder.claim(config)
    with locks:
        setup_logging("driver", None, run.logs)
        told = f"{config.values()} {config.extra} {planted.environment()}"
        logging.getLogger("slime.x").warning("%s", told)
        (run.logs / "engine-0.log").write_text(told)
        with tolerant_output():
            print(told)
        try:
            raise UserError("the judge answered 401", why=told)
        except UserError as error:
            error.add_note(told)
            crash = run.write_crash(error, note=told)
        (run.logs / "engine-0.log").unlink()  # that of another program, before it was copied
    setup_logging("driver")
    assert crash is not None and (crash / "logs" / "engine-0.log").is_file()
    assert planted.search(tmp_path) == {}
    printed = capfd.readouterr()
    assert planted.found_in((printed.out + printed.err).encode()) == set()
    stage = Stage("", run.read_summary()["stages"][""], json.loads(run.config_path.read_text()))
    shown = json.dumps([stages.settings(stage), stages.crash(run.path), config.describe()])
    assert planted.found_in(shown.encode()) == set() and HIDDEN in config.describe()
    saved = json.loads(run.config_path.read_text())
    assert (
        saved["extra"]["sort_key"] == planted.CLEAR["sort_key"]
        and saved["extra"]["eos_token"] == "<|im_end|>"
    )
    assert (
        saved["data"]["label_key"] == "label"
        and saved["cluster"]["train_env_vars"]["NCCL_DEBUG"] == "WARN"
    )
    assert saved["reward"]["rm_url"] == f"http://me:{HIDDEN}@judge.example/v1?n=3&api_key={HIDDEN}"
    assert "--lr" in (crash / "crash.json").read_text()


def test_what_the_page_reads_of_older_runs_is_hidden_too(tmp_path: Path) -> None:
    """Their folders have secrets in the clear."""
    config = {"rollout": {"rm_url": planted.url()}, "extra": planted.hooks(), "origins": {}}
    stage = Stage("", {}, config)
    assert planted.found_in(json.dumps(stages.settings(stage)).encode()) == set()


# -- names -----------------------------------------------------------------------------------------

SECRET_NAMES = [
    "wandb_key",
    "--wandb-key", "router_api_key", "sglang_ssl_keyfile_password", "HF_TOKEN", "WANDB_API_KEY",
    "apiKey", "judge_api_key", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
    "MY_KEY", "PGPASSWORD", "MYSQL_PWD", "DB_PASS", "judgeApiKey", "passwd", "X-Api-Key",
    "Authorization", "Proxy-Authorization", "Set-Cookie", "access_token", "client_secret",
    "signing_key", "ssh_key", "token", "auth_token", "GITHUB_PAT_TOKEN", "openai_key"
]  # fmt: skip
CLEAR_NAMES = [
    "max_tokens_per_gpu", "tokenizer", "eos_token_id", "eos_token", "pad_token", "label_key",
    "input_key", "tool_key", "metadata_key", "reward_key", "eval_reward_key", "multimodal_keys",
    "rollout_stop_token_ids", "num_key_heads", "key", "keys", "tokens", "max_new_tokens",
    "tokenizer_path", "api_key_var", "password_file", "PWD", "OLDPWD", "calculate_per_token_loss",
    "log_passrate", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK", "RAY_AUTH_MODE", "monkey", "turkey",
    "sort_key", "cache_key", "bypass", "compass", "secretary_name", "author",
    "router_request_id_headers"
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name) and redacted({name: "a1b2c3d4e5f6"}) == {name: HIDDEN}


@pytest.mark.parametrize("name", CLEAR_NAMES)
def test_names_that_only_look_like_those_of_secrets(name: str) -> None:
    assert not is_secret(name) and redacted({name: "question_v2"}) == {name: "question_v2"}


def test_flags_stay_readable() -> None:
    """Of all flags only those that hold a key or a password hide their default."""
    hidden = {dest for dest in all_flags() if is_secret(dest)}
    assert hidden == {
        *("wandb_key", "router_oracle_password", "router_api_key", "router_control_plane_api_keys"),
        *("sglang_ssl_keyfile_password", "sglang_api_key", "sglang_admin_api_key"),
    }
    values = {dest: value for dest, value in make_config().values().items() if value is not None}
    assert redacted(values) == values


@pytest.mark.parametrize(
    "value", [None, True, False, 7, 0.5, "", "none", "${HF_TOKEN}", "$KEY", "/run/secrets/key.pem"]
)
def test_values_that_are_no_secrets(value: Any) -> None:
    name = "api_key" if isinstance(value, str) else "my_token"
    assert redacted(value, name) == value


def test_settings_with_words_of_secrets_in_them() -> None:
    """A system prompt, a template, a stop word: whoever hides them changes the run that goes on."""
    for text in (
        "Reply with the password: ",
        "{% if token %}",
        "token: <|im_end|>",
        "--key value",
        "sk-learn-model/x",
    ):
        assert redacted(text, "system_prompt") == text


# -- properties ------------------------------------------------------------------------------------

_WORD = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
_VALUE = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30)
)
_TREE = st.recursive(
    _VALUE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORD, inner, max_size=3)
)
_SECRET = st.text("ABCDEFGHJKLMNPQRSTUVWXYZ23456789", min_size=10, max_size=30)


@given(_TREE, st.sampled_from(SECRET_NAMES), _SECRET, st.lists(_WORD, max_size=4))
def test_a_secret_is_hidden_at_any_depth(
    tree: Any, name: str, secret: str, path: list[str]
) -> None:
    value: Any = {name: secret, "beside": tree}
    for key in path:
        value = [{key: value}]
    assert secret not in repr(redacted(value)) or secret in repr(tree)
    assert secret in secrets_in(value)


@given(_TREE)
def test_what_is_hidden_once_stays_as_it_is(tree: Any) -> None:
    once = redacted(tree)
    assert redacted(once) == once
    text = redact_text(repr(tree))
    assert redact_text(text) == text


@given(st.lists(st.text(max_size=20), max_size=6))
def test_command_lines_keep_their_length(argv: list[str]) -> None:
    assert len(redact_argv(argv)) == len(argv)


def test_a_stream_hides_what_is_known() -> None:
    redact.remember({"my_token": "words of a secret"})
    out = io.StringIO()
    print("it is words of a secret", file=Redacting(out), end="")
    assert out.getvalue() == f"it is {HIDDEN}"


@pytest.mark.parametrize(
    "text",
    [
        "error: password={}",
        "using OPENAI_API_KEY='{}'",
        "ValueError: api_key='{}'",
        "client = Client(api_key='{}')",
        "judge: api_key: {}",
        'said {{\\"api_key\\": \\"{}\\"}}',
        "os.environ['OPENAI_API_KEY'] = '{}'",
        "headers [('X-Auth-Token', 'x'), ('api_key', '{}')]",
        "machine h login me password {}",
        "it is gsk_{}",
        "it is SG.{0}.{0}",
    ],
)
def test_a_secret_is_hidden_whatever_word_is_before_its_name(text: str) -> None:
    secret = "s3cr3tXYZ987654321abc"
    assert secret not in redact_text(text.format(secret))


@pytest.mark.parametrize(
    "text",
    [
        "--wandb-key has no effect without --use-wandb",
        "the keys are 'password', 'label'",
        "a password is needed",
        "error: label_key=answer2024, eos_token: </s>",
    ],
)
def test_words_about_secrets_stay(text: str) -> None:
    assert redact_text(text) == text


# -- names and shapes of other systems -------------------------------------------------------------

#: Not the value of any other test, and with letters and digits as passwords have them.
_VALUE = "s3cr3tV4lue9xQzT7"


@pytest.mark.parametrize(
    "name",
    [
        *("userpw", "root_pw", "jwt", "webhook", "slack_webhook_url", "GITHUB_PAT", "hf_tok"),
        *("api_token_v2", "api_key_prod", "password_base64", "SERVICE_CREDENTIALS_JSON"),
        *("private_key_pem", "connection_string"),
        *("totp_seed", "seed_phrase", "пароль", "密码", "contraseña"),
    ],
)
def test_other_names_of_secrets(name: str) -> None:
    assert redacted({name: _VALUE}) == {name: HIDDEN}
    assert _VALUE not in redact_text(f"{name}: {_VALUE}")
    assert redact_argv([f"--{name}", _VALUE]) == [f"--{name}", HIDDEN]


def test_value_of_a_named_pair() -> None:
    """Lists of headers and of environment variables name a value beside it."""
    for key, name in (("name", "X-Api-Key"), ("key", "HF_TOKEN"), ("header", "Authorization")):
        assert redacted([{key: name, "value": _VALUE}]) == [{key: name, "value": HIDDEN}]
    clear = [{"name": "NCCL_DEBUG", "value": "WARN"}, {"name": "tokens", "value": 7}]
    assert redacted(clear) == clear


@pytest.mark.parametrize(
    "text",
    [
        f'Authorization: Digest username="u", response="{_VALUE}"',
        f"Authorization: ApiKey {_VALUE}",
        f"curl -u user:{_VALUE} https://host",
        f"Incorrect API key provided: {_VALUE}.",
        f"password: |\n  {_VALUE}\n",
        f"judge:\n  api_key: >-\n    {_VALUE}\nlr: 1",
        f"<password>{_VALUE}</password>",
        f"redirect=https%3A%2F%2Fme%3A{_VALUE}%40host",
        f"-----BEGIN PRIVATE KEY-----\n{_VALUE}",
        f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{_VALUE}\n-----END PGP PRIVATE KEY BLOCK-----",
        f"wandb login {'0123456789' * 4}{_VALUE}"[:52],
        f"hvs.{_VALUE * 2}",
        f"dckr_pat_{_VALUE * 2}",
        f"tvly-{_VALUE * 2}",
        f"bot12345678:AA{_VALUE * 2}",
        f"password => '{_VALUE}'",
        f"HF_TOKEN := {_VALUE}",
        f"%7B%22api_key%22%3A%20%22{_VALUE}%22%7D",
        f"https://host/?next=a%3Fapi_key%3D{_VALUE}%26b",
        f"HF_TOKEN\\u003d{_VALUE}",
        f"requests.get(url, auth=('me', '{_VALUE}'))",
        f"docker login -u me -p {_VALUE} host",
        f"sshpass -p '{_VALUE}' ssh host",
    ],
)
def test_other_shapes_of_secrets(text: str) -> None:
    shown = redact_text(text)
    assert _VALUE not in shown and "0123456789" not in shown and HIDDEN in shown
    assert _VALUE not in repr(redact_argv(["--note", text]))


def test_a_private_key_as_an_argument_is_no_flag() -> None:
    key = f"-----BEGIN PRIVATE KEY-----\n{_VALUE}\n-----END PRIVATE KEY-----"
    assert _VALUE not in repr(redact_argv(["--key-text", key, "--lr", "1"]))


def test_blocks_and_elements_of_other_names_stay() -> None:
    for text in (
        "prompt: |\n  say hi\n",
        "<answer>42</answer>",
        "-u name",
        "the secret is out",
        "cp -p a b",
    ):
        assert redact_text(text) == text
