"""Tasksets of the package verifiers: its environment runs the task, and its agent calls the model
that is trained.

    taskset = VerifiersTaskset("my_taskset", agent={"max_turns": 8})
    generate = taskset.generate         # --custom-generate-function-path my_file.py:generate
    taskset.write_prompts("tasks.jsonl")

Written for version 0.4 of the package, which is imported when it is needed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Mapping
from typing import Any

from slime.agents.endpoint import AgentError, agent_endpoint
from slime.documentation import doc_url
from slime.environments.rows import task_of, write_rows
from slime.errors import UserError
from slime.processes.host import past_proxies
from slime.samples.types import Sample, SampleStatus
from slime.user_code.loading import optional_package

#: A variable that does not exist: the key is in the URL's path, because all samples share this
#: process's environment.
_NO_KEY = "SLIME_HAS_NO_KEY"


class VerifiersTaskset:
    """A taskset of the package verifiers, with one agent.

    Args:
        name: an installed package, or a module in the working directory: verifiers'
            ``taskset.id``.
        taskset: further configuration of the taskset.
        agent: configuration of the agent: ``harness``, ``max_turns``, ``timeout``, ``runtime``.
            By default its program runs as a process on this host, not in the package's cloud.
        config: the rest of the environment's configuration.
        most_tasks: largest number of tasks to read; some tasksets are infinite.
    """

    def __init__(
        self,
        name: str,
        *,
        taskset: Mapping[str, Any] | None = None,
        agent: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        most_tasks: int = 100_000,
    ) -> None:
        self.name = name
        self._most_tasks = most_tasks
        self._config = {
            **(config or {}),
            "taskset": {**(taskset or {}), "id": name},
            "agent": {"runtime": {"type": "subprocess"}, **(agent or {})},
        }
        self._tasks: list[Any] | None = None
        self._reading = asyncio.Lock()

    def _environment(self) -> Any:
        vf = optional_package("verifiers.v1", "verifiers")
        return vf.load_environment(vf.resolve_env_config(self._config))

    def _read(self) -> list[Any]:
        if self._tasks is None:
            self._tasks = list(itertools.islice(self._environment().taskset, self._most_tasks))
        return self._tasks

    def write_prompts(self, path: str | os.PathLike[str]) -> int:
        """Write a row for each task, with its number; return the number of rows."""
        return write_rows(
            os.fspath(path), ((task.data.prompt_text, i) for i, task in enumerate(self._read()))
        )

    async def _task(self, number: int) -> Any:
        async with self._reading:  # it may download: do it once, and not on the event loop
            tasks = await asyncio.to_thread(self._read)
        if not 0 <= number < len(tasks):
            raise UserError(
                f"there is no task {number}",
                why=f"{self.name} has {len(tasks)}",
                fix="write the prompts again, with the same taskset and configuration",
            )
        return tasks[number]

    async def generate(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any]
    ) -> list[Sample]:
        """A generate function: returns a sample for each branch of the agent's conversation,
        with the trace's reward.

        Raises:
            UserError: the package is missing, or the environment has several agents.
            AgentError: the environment reports that its agent failed.
        """
        vf = optional_package("verifiers.v1", "verifiers")
        task = await self._task(int(task_of(sample)))
        async with agent_endpoint(args, sample, sampling_params) as endpoint:
            os.environ.update(past_proxies([]))  # the package's clients read proxy variables
            client = vf.EvalClientConfig(base_url=endpoint.keyed_base_url, api_key_var=_NO_KEY)
            # an environment per sample, so that its servers are closed with it
            environment = self._environment()
            async with environment.serving():
                episode = await environment.run_episode(
                    task, vf.ModelContext(model="policy", client=client)
                )
        if len(episode.traces) > 1:
            raise UserError(
                f"an episode of {self.name} has {len(episode.traces)} agents",
                why="their rewards differ, and one endpoint speaks for all of them",
                fix="give each agent an endpoint in a generate function of your own: "
                + doc_url("agents.md"),
            )
        trace = episode.traces[0] if episode.traces else None
        samples = endpoint.samples(reward=trace.reward if trace is not None else 0.0)
        if not episode.ok and all(one.status is not SampleStatus.TRUNCATED for one in samples):
            error = episode.last_error or (trace.last_error if trace is not None else None)
            raise AgentError(
                f"{self.name}: {error.type}: {error.message}" if error else f"{self.name} failed"
            )
        if trace is not None:
            said = {
                "rewards": {
                    name: one.value for name, one in trace.rewards.items() if one is not None
                },
                "metrics": dict(trace.metrics),
                "stop": trace.stop_condition,
            }
            for one in samples:
                one.metadata["verifiers"] = said
        return samples
