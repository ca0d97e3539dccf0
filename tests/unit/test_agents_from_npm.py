"""Command-line agents as they come from npm, unmodified, in front of a model that plays its
part."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.agents.endpoint import AgentEndpoint
from slime.engines.api import GenerateResult
from slime.engines.keys import VARIABLE
from slime.samples.types import Sample
from tests.support.agents import Model, Play

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("npm") is None or shutil.which("node") is None, reason="needs node and npm"
    ),
]
CODEX, CLAUDE = "@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.330"
SECRET = "the-key-of-this-run"
#: Its own variables and the agent's; the file is then read back by another call.
LOOK = "tr '\\0' '\\n' < /proc/$PPID/environ > seen.txt; env >> seen.txt; echo hello > greeting.txt"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thinking(said: str) -> str:
    return f"<think>\nhm\n</think>\n\n{said}"


class Parts(Model):
    """Speaks for several agents: the first mark that stands in a prompt tells whose line is next.
    Its tokens are single characters, which a tokenizer would write in another way."""

    def __init__(self, parts: dict[str, list[str]]) -> None:
        super().__init__([], merges=True)
        self.parts = parts

    async def _answer(
        self, number: int, input_ids: list[int], params: dict[str, Any]
    ) -> GenerateResult:
        prompt = self.tokenizer.decode(input_ids)
        line = next(lines for mark, lines in self.parts.items() if mark in prompt).pop(0)
        tokens = [token for character in line for token in self.tokenizer.encode(character)]
        assert tokens != self.tokenizer.encode(line)
        self._lines = iter([[*tokens, self.tokenizer.eos_token_id]])
        return await super()._answer(number, input_ids, params)


@pytest.fixture(autouse=True)
def keys_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Has npm put a package somewhere, and takes it away after the test: it has 400 MB."""
    folder = tmp_path / "npm"

    def put(package: str) -> Path:
        options = [
            "--prefix",
            str(folder),
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            "--loglevel",
            "error",
        ]
        done = subprocess.run(
            ["npm", "install", *options, package], capture_output=True, text=True, timeout=900
        )
        if any(
            code in done.stderr for code in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT")
        ):
            pytest.skip("npm's registry cannot be reached")
        assert done.returncode == 0, done.stderr
        return folder / "node_modules" / package.rpartition("@")[0]

    yield put
    shutil.rmtree(folder, ignore_errors=True)


def play(
    parts: dict[str, list[str]], command: list[str], environ: dict[str, str], room: Path
) -> tuple[Play, Any]:
    """Run an agent in ``room/work``; what it was told is compared with what it was to be told."""
    played = Play([], merges=True, max_new_tokens=4000)
    played.state.client = played.model = Parts(parts)
    work = room / "work"
    work.mkdir()

    async def agent(endpoint: AgentEndpoint) -> None:
        url = [word.replace("BASE_URL", endpoint.base_url) for word in command]
        done = await endpoint.run(
            url, environ={"HOME": str(room), **environ}, timeout=300, cwd=work
        )
        assert done.status == 0, done.output
        assert "The file is there." in done.output
        seen = (work / "seen.txt").read_text()
        # a failure does not print the environment
        assert (endpoint.api_key in seen, SECRET in seen) == (True, False)

    endpoint = played.run(agent)
    assert (work / "greeting.txt").read_text() == "hello\n"
    assert not any(parts.values()), "it was asked for all"
    return played, endpoint


def check(played: Play, samples: list[Sample], said: list[int]) -> None:
    """Tokens of every branch are the engine's, and each that was sampled is trained: ``said`` of
    them in each."""
    model = played.model
    assert [sample.metadata["agent"]["turns"] for sample in samples] == said
    rest = {tuple(asked + answer) for asked, answer in zip(model.asked, model.said)}
    trained: list[int] = []
    for sample in samples:
        sample.validate()
        assert tuple(sample.tokens) in rest
        trained += played.trained(sample)
        turns = [
            (a, s)
            for a, s in zip(model.asked, model.said)
            if sample.tokens[: len(a) + len(s)] == a + s
        ]
        assert [token for _, answer in turns for token in answer] == played.trained(sample)
    assert sorted(trained) == sorted(token for answer in model.said for token in answer)


def test_codex_through_responses(tmp_path: Path, install: Callable[[str], Path]) -> None:
    found = install(CODEX)
    lines = [
        thinking("I will write it. " + call("exec_command", cmd=LOOK)),
        thinking(call("exec_command", cmd="cat greeting.txt")),
        "Once more, and wrong. " + call("exec_command", wrong=5.0),
        thinking("The file is there. "),
    ]
    provider = {
        "name": "run",
        "base_url": "BASE_URL",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
    }
    settings = {
        "model_provider": "run",
        **{f"model_providers.run.{name}": value for name, value in provider.items()},
    }
    command = [
        "node",
        str(found / "bin" / "codex.js"),
        "exec",
        "--skip-git-repo-check",
        "--model",
        "policy",
    ]
    command += ["--dangerously-bypass-approvals-and-sandbox"]
    command += [word for name, value in settings.items() for word in ("-c", f'{name}="{value}"')]
    environ = {"CODEX_HOME": str(tmp_path)}
    played, endpoint = play(
        {"": lines}, [*command, "Write hello to greeting.txt."], environ, tmp_path
    )
    check(played, endpoint.samples(), [4])
    assert "Output:\nhello\n" in played.text(played.model.asked[2])


def test_claude_code_through_messages_with_an_agent_of_its_own(
    tmp_path: Path, install: Callable[[str], Path]
) -> None:
    found = install(CLAUDE)
    asks = {"description": "Count", "prompt": "Count letters.", "subagent_type": "general-purpose"}
    lines = [
        thinking("I will write it. " + call("Bash", command=LOOK, description="Write it")),
        thinking(call("Read", file_path=str(tmp_path / "work" / "greeting.txt"), limit=5.0)),
        "Once more, and wrong. " + call("Bash", wrong=5.0),
        call("Agent", **asks, run_in_background=False),
        thinking("The file is there. "),
    ]
    command = [
        "node",
        str(found / "cli-wrapper.cjs"),
        "-p",
        "Write hello to greeting.txt.",
        "--model",
        "policy",
    ]
    command += ["--permission-mode", "acceptEdits", "--allowedTools", "Bash,Agent"]
    environ = {
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    parts = {"greeting.txt": lines, "Count letters.": [thinking("There are five.")]}
    played, endpoint = play(parts, command, environ, tmp_path)
    check(played, endpoint.samples(), [1, 5])
    assert "There are five." in played.text(played.model.asked[-1])
