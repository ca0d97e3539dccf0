"""Tasks in Harbor's format, without Harbor and containers: an agent works in a sandbox, and the
task's tests compute the reward.

    tasks = HarborTasks()
    generate = tasks.generate           # --custom-generate-function-path my_file.py:generate
    tasks.write_prompts("tasks", "tasks.jsonl")

    task.toml  instruction.md  environment/  tests/test.sh
        ──► /logs/verifier/reward.json, or reward.txt

docs/environments.md says which tasks need a container.
"""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime.agents.endpoint import agent_endpoint
from slime.documentation import doc_url
from slime.environments.bash_agent import Agent, bash_agent
from slime.environments.rows import task_of, write_rows
from slime.errors import UserError
from slime.samples.types import Sample
from slime.sandbox.folders import TASK, temporary_folder
from slime.sandbox.sandbox import Ran, Sandbox


class RunningTask:
    """A task in progress; `run` runs the agent's commands.

    Attributes:
        task: the task's folder.
        config: content of task.toml.
        instruction: the agent's prompt.
        workdir: working directory of commands; only files in it are kept until the tests.
    """

    def __init__(self, task: Path, place: Path, runner: Any) -> None:
        self.task = task
        self._place = place
        self._runner = runner
        self.config = read_toml(task / "task.toml")
        self.instruction = (task / "instruction.md").read_text(encoding="utf-8").strip()
        lines = dockerfile_lines(task)
        self._refuse_what_needs_more(lines)
        workdirs = [words for word, words in lines if word == "WORKDIR"]
        # a relative path continues the one before
        workdir = posixpath.join("/", *workdirs) if workdirs else "/app"
        self.workdir = posixpath.normpath(
            str(self._section("environment").get("workdir") or workdir)
        )
        shutil.copytree(
            task / "environment", place / "app", ignore=shutil.ignore_patterns("Dockerfile")
        )
        self._folders = {self.workdir: place / "app"}
        self._environ = {
            name: str(value) for name, value in self._section("environment").get("env", {}).items()
        }

    def _section(self, name: str) -> dict[str, Any]:
        return dict(self.config.get(name, {}))

    def _refuse_what_needs_more(self, dockerfile: list[tuple[str, str]]) -> None:
        if not isinstance(self._runner, Sandbox):
            return
        environment = self._section("environment")
        verifier = self._section("verifier")
        more = [
            name
            for name in ("docker_image", "mcp_servers", "gpus", "healthcheck")
            if environment.get(name)
        ]
        more += ["steps"] * bool(self.config.get("steps"))
        more += ["a separate verifier"] * (verifier.get("environment_mode") == "separate")
        more += ["docker-compose.yaml"] * (
            self.task / "environment" / "docker-compose.yaml"
        ).exists()
        known = ("FROM", "WORKDIR", "LABEL", "ARG")
        more += [
            f"{w} {rest}"
            for w, rest in dockerfile
            if w not in known and (w, rest) != ("COPY", ". .")
        ]
        more += [f"WORKDIR {rest}" for w, rest in dockerfile if w == "WORKDIR" and "$" in rest]
        if more:
            raise UserError(
                f"the task {self.task} needs a container",
                why=f"a sandbox has no {', '.join(more)}",
                fix="leave the task out, or give HarborTasks a runner that starts containers: "
                + doc_url("environments.md"),
            )

    async def run(self, command: Sequence[str], *, seconds: float | None = None) -> Ran:
        """Run a command in ``workdir``; its child processes end with it."""
        limits = replace(self._runner.limits, seconds=seconds or self._runner.limits.seconds)
        asked: dict[str, Any] = {
            "folders": self._folders,
            "folder": self.workdir,
            "environ": self._environ,
        }
        return await self._runner.run(command, **asked, limits=limits)

    async def score(self, reward_key: str) -> tuple[float, dict[str, Any]]:
        """Run the task's tests; return (reward, all values that they wrote), with reward 0 if they
        wrote none. Tests and log folder are copied after the agent has ended, so it never sees
        them."""
        shutil.copytree(self.task / "tests", self._place / "tests")
        logs = self._place / "logs"
        (logs / "verifier").mkdir(parents=True)
        self._folders = {**self._folders, "/tests": self._place / "tests", "/logs": logs}
        self._environ |= {
            name: str(value) for name, value in self._section("verifier").get("env", {}).items()
        }
        ran = await self.run(
            ["bash", "/tests/test.sh"],
            seconds=float(self._section("verifier").get("timeout_sec", 600)),
        )
        try:
            if os.path.lexists(told := logs / "verifier" / "reward.json"):
                values = dict(json.loads(text_left_in(told)))
                return float(
                    values[reward_key] if len(values) != 1 else next(iter(values.values()))
                ), values
            return float(text_left_in(logs / "verifier" / "reward.txt")), {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return 0.0, {"failure": f"{type(error).__name__}: {error}", "output": ran.text[-2000:]}


class HarborTasks:
    """Tasks in Harbor's format; each data row names the folder of its task.

    Args:
        agent: solves a task with the endpoint's model and `RunningTask.run`.
        runner: runs the agent's commands and the tests: a `Sandbox`, or an object with the same
            ``limits`` and ``run``.
        max_turns: largest number of the model's turns in one task.
        reward_key: the value of a reward.json to train on, if it has several.
    """

    def __init__(
        self,
        agent: Agent = bash_agent,
        runner: Any = None,
        max_turns: int = 20,
        reward_key: str = "reward",
    ) -> None:
        self._agent = agent
        self._max_turns = max_turns
        self._reward_key = reward_key
        self._runner = runner or Sandbox(walls="namespaces")

    @staticmethod
    def write_prompts(folder: str | Path, path: str | Path) -> int:
        """Write a row for each task below the folder; return the number of rows."""
        tasks = sorted(file.parent.resolve() for file in Path(folder).rglob("task.toml"))
        return write_rows(
            path,
            (((task / "instruction.md").read_text(encoding="utf-8"), str(task)) for task in tasks),
        )

    async def generate(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any]
    ) -> list[Sample]:
        """A generate function: returns a sample for each branch of the agent's conversation,
        with the reward of the tests."""
        task = Path(task_of(sample))
        async with temporary_folder(TASK) as place:
            box = RunningTask(task, Path(place), self._runner)
            limit = asyncio.timeout(box.config.get("agent", {}).get("timeout_sec"))
            async with agent_endpoint(
                args, sample, sampling_params, max_turns=self._max_turns
            ) as endpoint:
                try:
                    async with limit:
                        await self._agent(endpoint, box)
                except TimeoutError:
                    if not limit.expired():  # the agent itself raised it: the sample fails
                        raise
                reward, sample.metadata["harbor"] = await box.score(self._reward_key)
        return endpoint.samples(reward=reward)


# -- files -----------------------------------------------------------------------------------------


def read_toml(file: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        UserError: the file is not valid TOML.
    """
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{file} cannot be read", why=str(error), fix="mend it, or leave the task out"
        ) from error


def text_left_in(file: Path) -> str:
    """Read a file that a program wrote.

    Raises:
        OSError: it is missing, a link, which may lead to another file of this host, or not a
            regular file: opening a pipe would block.
    """
    if file.resolve() != file:
        raise OSError(f"{file.name} is a link")
    if file.exists() and not file.is_file():
        raise OSError(f"{file.name} is not a file")
    return file.read_text(encoding="utf-8")


def dockerfile_lines(task: Path) -> list[tuple[str, str]]:
    """Read a task's Dockerfile as (instruction, arguments) pairs; [] without a Dockerfile."""
    file = task / "environment" / "Dockerfile"
    lines = (
        file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines() if file.is_file() else []
    )
    pairs = [
        line.strip().partition(" ")
        for line in lines
        if line.strip() and not line.strip().startswith("#")
    ]
    return [(word.upper(), " ".join(rest.split())) for word, _, rest in pairs]
