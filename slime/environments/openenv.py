"""Environments on OpenEnv servers: the model's text becomes an action, the observation becomes the
next message.

    world = OpenEnvEnvironment(
        "http://127.0.0.1:8000", act=lambda text: {"message": text}, observe=lambda seen: …)
    generate = world.generate           # --custom-generate-function-path my_file.py:generate
    world.write_prompts("episodes.jsonl", [{"seed": seed} for seed in range(100)])

Written for version 0.10 of the package, which is imported when it is needed. Any client with the
same methods works."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal

from slime import deadlines
from slime.environments.rows import task_of, write_rows
from slime.errors import UserError
from slime.rollout.generate import append_message
from slime.rollout.generate import generate as one_turn
from slime.samples.types import Sample, SampleStatus
from slime.user_code.loading import optional_package


def _as_text(observation: Mapping[str, Any]) -> str:
    return json.dumps(dict(observation), ensure_ascii=False)


class OpenEnvEnvironment:
    """An environment's server, and the conversions between its actions and a model's text.

    Args:
        base_url: the server's URL. Each sample has its own session there, so the server must allow
            as many concurrent sessions as there are concurrent samples.
        act: the model's answer → the action, as the server expects it.
        observe: an observation → the text for the model.
        system: the system message; "": none.
        role: role of the messages with observations.
        reward: "sum" of the steps' rewards, or the "last" one.
        most_steps: largest number of steps in one episode.
        step_seconds: timeout of one step.
        client: makes another client; None: the package's, which takes and returns dicts.
    """

    def __init__(
        self,
        base_url: str,
        *,
        act: Callable[[str], Any],
        observe: Callable[[Any], str] = _as_text,
        system: str = "",
        role: str = "user",
        reward: Literal["sum", "last"] = "sum",
        most_steps: int = 20,
        step_seconds: float = 60.0,
        client: Callable[[], Any] | None = None,
    ) -> None:
        self.base_url = base_url
        self._act = act
        self._observe = observe
        self._system = system
        self._role = role
        self._reward = reward
        self._most_steps = most_steps
        self._step_seconds = step_seconds
        self._client = client or self._generic_client

    def _generic_client(self) -> Any:
        made = optional_package("openenv.core", "openenv").GenericEnvClient
        return made(
            self.base_url,
            connect_timeout_s=deadlines.OPENENV_CONNECT,
            message_timeout_s=self._step_seconds,
        )

    @staticmethod
    def write_prompts(path: str | PathLike[str], episodes: Iterable[Mapping[str, Any]]) -> int:
        """Write a row for each episode: the arguments of its ``reset``. Return the number of
        rows."""
        return write_rows(
            str(path), ((json.dumps(dict(episode)), dict(episode)) for episode in episodes)
        )

    async def generate(self, args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        """A generate function: one episode as one sample; observations are not trained on.

        Raises:
            UserError: the package is missing, or ``act`` or ``observe`` fails.
            ConnectionError, RuntimeError, TimeoutError: the client fails; so does the sample.
        """
        # an episode cannot be continued: its session ended with the last try
        sample.reset_response()
        rewards: list[float] = []
        async with self._client() as world:
            result = await world.reset(**task_of(sample))
            first = [{"role": "system", "content": self._system}] if self._system else []
            sample.prompt = [*first, self._message(result)]
            sample.tokens = []
            for step in range(self._most_steps):
                began = len(sample.response)
                sample = await one_turn(args, sample, sampling_params)
                if sample.status is not SampleStatus.COMPLETED:
                    break
                result = await world.step(
                    self._call("act", self._act, sample.response[began:].strip())
                )
                rewards.append(float(result.reward or 0.0))
                if result.done or step + 1 == self._most_steps:
                    break
                append_message(sample, self._message(result))
        if sample.status is not SampleStatus.ABORTED:
            sample.reward = (
                (sum(rewards) if self._reward == "sum" else rewards[-1]) if rewards else 0.0
            )
            sample.metadata["openenv"] = {
                "steps": len(rewards),
                "rewards": rewards,
                "done": bool(result.done),
            }
        return sample

    def _message(self, result: Any) -> dict[str, Any]:
        return {
            "role": self._role,
            "content": self._call("observe", self._observe, result.observation),
        }

    @staticmethod
    def _call(name: str, function: Callable[[Any], Any], value: Any) -> Any:
        try:
            return function(value)
        except Exception as error:  # a user's function may raise anything
            raise UserError(
                f"{name}= of OpenEnvEnvironment failed: {type(error).__name__}: {error}",
                why=f"it was given {str(value)[:200]!r}",
                fix="return an action for whatever the model writes, and a text for each "
                "observation",
            ) from error
