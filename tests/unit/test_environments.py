"""Adapters to environments of others: with a model that plays its part, and environments that speak
as theirs do."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import aiohttp
import pytest

from examples.environments.harbor_rollout import write_tasks
from slime.agents.endpoint import AgentError, agent_endpoint
from slime.agents.server import close_server
from slime.environments.bash_agent import bash_agent
from slime.environments.harbor import HarborTasks
from slime.environments.openenv import OpenEnvEnvironment
from slime.environments.rows import task_of
from slime.environments.verifiers import VerifiersTaskset
from slime.errors import UserError
from slime.processes.host import free_port
from slime.rollout.generate import bind_state
from slime.samples.types import Sample, SampleStatus
from slime.sandbox.sandbox import Limits, Ran, Sandbox
from slime.user_code.loading import optional_package
from tests.support.agents import Play
from tests.support.processes import ROOT
from tests.support.sandboxes import with_namespaces

LIMITS = Limits(seconds=20, memory=256 << 20)
END = "<|im_end|>"


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def play(
    lines: list[str], generate: Callable[..., Awaitable[Any]], task: Any, **options: Any
) -> tuple[Play, Any]:
    """What a generate function makes of a task, with a model that says these lines."""
    stage = Play(lines, **options)
    stage.sample.metadata["task"] = task

    async def run() -> Any:
        bind_state(stage.state)
        try:
            return await generate(
                stage.state.args, stage.sample, stage.state.params_for(stage.sample)
            )
        finally:
            await close_server()

    return stage, asyncio.run(run())


# -- rows ------------------------------------------------------------------------------------------


def test_a_row_without_a_task_says_how_rows_are_made() -> None:
    with pytest.raises(UserError, match="names no task") as caught:
        task_of(Sample(index=4, metadata={"other": 1}))
    assert "write_prompts" in caught.value.fix


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(UserError, match="no_such_package") as caught:
        optional_package("no_such_package.part", "verifiers")
    assert caught.value.fix == "pip install 'slime-rl[verifiers]'"


# -- Harbor ----------------------------------------------------------------------------------------


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_tasks(tmp_path / "tasks", 2)
    return tmp_path / "tasks"


def harbor(**options: Any) -> HarborTasks:
    return HarborTasks(runner=Sandbox(LIMITS, walls="namespaces"), **options)


def letter_of(task: Path) -> str:
    return (task / "instruction.md").read_text().split()[1]


@with_namespaces
def test_an_agent_works_in_a_box_and_the_tests_score(tasks: Path, tmp_path: Path) -> None:
    assert HarborTasks.write_prompts(tasks, tmp_path / "rows.jsonl") == 2
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    task = Path(rows[1]["metadata"]["task"])
    lines = [f"So:\n```bash\necho {letter_of(task)} > answer; ls -A; pwd\n```{END}", f"done{END}"]
    stage, samples = play(lines, harbor().generate, str(task))
    (sample,) = samples
    assert sample.reward == 1.0 and "answer\n/app" in stage.text(sample.tokens)
    assert rows[1]["prompt"].startswith("Write") and stage.text(stage.trained(sample)) == "".join(
        lines
    )


@with_namespaces
def test_a_wrong_answer_and_no_answer_score_nothing(tasks: Path) -> None:
    for said in ("```bash\necho x > answer\n```", "I will not."):
        _, samples = play([f"{said}{END}", f"done{END}"], harbor().generate, str(tasks / "write-0"))
        assert [sample.reward for sample in samples] == [0.0]


@with_namespaces
def test_the_agent_sees_no_tests_and_reaches_no_network(tasks: Path) -> None:
    said = (
        "```bash\nls /tests /logs; (echo > /dev/tcp/127.0.0.1/22) 2>&1; echo 1 > "
        "/logs/verifier/reward.txt\n```"
    )
    stage, samples = play([f"{said}{END}", f"done{END}"], harbor().generate, str(tasks / "write-0"))
    shown = stage.text(samples[0].tokens)
    assert (
        samples[0].reward == 0.0 and "cannot access '/tests'" in shown and "not permitted" in shown
    )


@with_namespaces
def test_rewards_by_name_and_tests_that_say_nothing(tasks: Path) -> None:
    test = tasks / "write-0" / "tests" / "test.sh"
    test.write_text('echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json')
    _, (sample,) = play([f"done{END}"], harbor().generate, str(test.parents[1]))
    assert sample.reward == 0.25 and sample.metadata["harbor"] == {"reward": 0.25, "style": 1}
    _, (sample,) = play([f"done{END}"], harbor(reward_key="style").generate, str(test.parents[1]))
    assert sample.reward == 1.0
    test.write_text("echo broken; ln -s /etc/hostname /logs/verifier/reward.txt")
    _, (sample,) = play([f"done{END}"], harbor().generate, str(test.parents[1]))
    assert sample.reward == 0.0 and "is a link" in sample.metadata["harbor"]["failure"]
    assert sample.metadata["harbor"]["output"] == "broken\n"
    deep = "printf '[%.0s' $(seq 100000) > reward.json"
    for made, why in (
        ("mkfifo reward.txt", "not a file"),
        ("mkfifo reward.json", "not a file"),
        (deep, "RecursionError"),
    ):
        test.write_text(f"cd /logs/verifier; {made}")
        _, (sample,) = play([f"done{END}"], harbor().generate, str(test.parents[1]))
        assert sample.reward == 0.0 and why in sample.metadata["harbor"]["failure"]


@with_namespaces
def test_the_working_directory_is_that_of_the_dockerfile(tasks: Path) -> None:
    (tasks / "write-0" / "environment" / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /srv\nWORKDIR a/./b\n"
    )
    stage, (sample,) = play(
        [f"```bash\npwd\n```{END}", f"done{END}"], harbor().generate, str(tasks / "write-0")
    )
    assert "\n/srv/a/b\n" in stage.text(sample.tokens)


@with_namespaces
def test_an_agent_has_its_time_and_a_timeout_of_its_own_is_a_failure(tasks: Path) -> None:
    async def waits(endpoint: Any, box: Any) -> None:
        await bash_agent(endpoint, box)
        await asyncio.Event().wait()

    async def gives_up(endpoint: Any, box: Any) -> None:
        raise TimeoutError("no answer from a tool")

    config = tasks / "write-0" / "task.toml"
    config.write_text("[agent]\ntimeout_sec = 1.5\n")
    _, (sample,) = play([f"done{END}"], harbor(agent=waits).generate, str(config.parent))
    assert sample.reward == 0.0 and sample.metadata["agent"]["turns"] == 1
    with pytest.raises(TimeoutError, match="no answer from a tool"):
        play([], harbor(agent=gives_up).generate, str(config.parent))


@pytest.mark.parametrize("turns", [1, None])
def test_the_bash_agent_ends_without_turns_and_fails_of_anything_else(turns: int | None) -> None:
    class Box:
        instruction = "work"

        async def run(self, command: Any) -> Ran:
            return Ran(0, "\ud83d" if turns is None else "fine", "", frozenset(), LIMITS)

    async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> list[Sample]:
        async with agent_endpoint(args, sample, params, max_turns=turns) as endpoint:
            await bash_agent(endpoint, Box())
        return endpoint.samples(reward=1.0)

    lines = [f"```bash\nls\n```{END}", f"done{END}"]
    with contextlib.nullcontext() if turns else pytest.raises(AgentError, match="surrogate"):
        _, (sample,) = play(lines, generate, None)
        assert sample.metadata["agent"]["turns"] == 1


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("task.toml", '[environment]\ndocker_image = "debian"\n', "docker_image"),
        ("task.toml", '[[steps]]\nname = "first"\n', "steps"),
        ("task.toml", '[verifier]\nenvironment_mode = "separate"\n', "a separate verifier"),
        (
            "environment/Dockerfile",
            "FROM debian\nRUN apt-get install -y \\\n  gcc\n",
            "RUN apt-get install -y gcc",
        ),
        ("environment/Dockerfile", "ARG A=/app\nWORKDIR ${A}/b\n", "WORKDIR ${A}/b"),
        ("environment/docker-compose.yaml", "services: {}\n", "docker-compose.yaml"),
    ],
)
def test_tasks_that_need_a_container_are_refused_by_what_they_need(
    tasks: Path, file: str, text: str, named: str
) -> None:
    (tasks / "write-0" / file).write_text(text)
    with pytest.raises(UserError, match="needs a container") as caught:
        play([], harbor().generate, str(tasks / "write-0"))
    assert named in caught.value.why


def test_a_task_that_cannot_be_read_is_named(tasks: Path) -> None:
    (tasks / "write-0" / "task.toml").write_text("timeout 3")
    with pytest.raises(UserError, match=r"write-0/task\.toml cannot be read"):
        play([], harbor().generate, str(tasks / "write-0"))


def test_a_runner_of_ones_own_gets_commands_and_folders(tasks: Path) -> None:
    (tasks / "write-0" / "environment" / "Dockerfile").write_text(
        "FROM debian\nWORKDIR /srv\nRUN make\n"
    )
    asked: list[tuple[list[str], str, list[str]]] = []

    class Containers:
        limits = LIMITS

        async def run(
            self, command: Any, *, folders: Any, folder: str, environ: Any, limits: Limits
        ) -> Ran:
            asked.append((list(command), folder, sorted(folders)))
            if "/logs" in folders:
                (folders["/logs"] / "verifier" / "reward.txt").write_text("0.5")
            return Ran(0, "", "", frozenset(), limits)

    lines = [f"```sh\nls\n```{END}", f"done{END}"]
    _, (sample,) = play(lines, HarborTasks(runner=Containers()).generate, str(tasks / "write-0"))
    assert asked == [
        (["bash", "-c", "ls\n"], "/srv", ["/srv"]),
        (["bash", "/tests/test.sh"], "/srv", ["/logs", "/srv", "/tests"]),
    ]
    assert sample.reward == 0.5


# -- verifiers -------------------------------------------------------------------------------------


@dataclass
class Signal:
    value: float


def verifiers_stand_in(episode: Callable[[Any, str], Awaitable[Any]]) -> ModuleType:
    """What of the package the adapter calls, as version 0.4 has it."""
    module = ModuleType("verifiers.v1")
    tasks = [SimpleNamespace(data=SimpleNamespace(prompt_text=f"task {i}")) for i in range(3)]

    class Env:
        taskset = tasks
        served = 0

        @contextlib.asynccontextmanager
        async def serving(self) -> AsyncIterator[None]:
            self.served += 1
            yield

        async def run_episode(self, task: Any, ctx: Any) -> Any:
            assert self.served == 1
            return await episode(task, ctx.client.base_url)

    made = SimpleNamespace(
        load_environment=lambda config: Env(),
        resolve_env_config=lambda config: config,
        EvalClientConfig=lambda **words: SimpleNamespace(**words),
        ModelContext=lambda **words: SimpleNamespace(**words),
    )
    vars(module).update(vars(made))
    return module


async def ask(base_url: str, text: str) -> str:
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer EMPTY"}) as session,
        session.post(f"{base_url}/chat/completions", json=body) as answer,
    ):
        if answer.status == 200:
            return str((await answer.json())["choices"][0]["message"]["content"])
        return ""


def trace_of(reward: float) -> Any:
    return SimpleNamespace(
        reward=reward,
        rewards={"right": Signal(reward)},
        metrics={"turns": 1.0},
        stop_condition=None,
        last_error=None,
    )


def with_stand_in(
    monkeypatch: pytest.MonkeyPatch, episode: Callable[[Any, str], Awaitable[Any]]
) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", verifiers_stand_in(episode))


def test_an_episode_of_verifiers_becomes_samples_with_its_reward(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def episode(task: Any, base_url: str) -> Any:
        reward = float(await ask(base_url, task.data.prompt_text) == "yes")
        return SimpleNamespace(ok=True, traces=[trace_of(reward)], last_error=None)

    with_stand_in(monkeypatch, episode)
    taskset = VerifiersTaskset("any")
    assert taskset.write_prompts(tmp_path / "rows.jsonl") == 3
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[2] == {"prompt": "task 2", "metadata": {"task": 2}}
    stage, (sample,) = play([f"yes{END}"], taskset.generate, 2)
    assert sample.reward == 1.0 and stage.text(stage.trained(sample)) == f"yes{END}"
    assert sample.metadata["verifiers"] == {
        "rewards": {"right": 1.0},
        "metrics": {"turns": 1.0},
        "stop": None,
    }
    assert "task 2" in stage.text(stage.model.asked[0])


def test_an_episode_that_failed_fails_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    async def episode(task: Any, base_url: str) -> Any:
        await ask(base_url, "hi")
        return SimpleNamespace(
            ok=False, traces=[], last_error=SimpleNamespace(type="ToolsetError", message="gone")
        )

    with_stand_in(monkeypatch, episode)
    with pytest.raises(AgentError, match="ToolsetError: gone"):
        play([f"yes{END}"], VerifiersTaskset("any").generate, 0)


def test_an_episode_without_room_is_truncated_and_scores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def episode(task: Any, base_url: str) -> Any:
        for _ in range(2):
            await ask(base_url, "a long story " * 20)
        error = SimpleNamespace(type="HarnessError", message="context")
        return SimpleNamespace(ok=False, traces=[trace_of(0.0)], last_error=error)

    with_stand_in(monkeypatch, episode)
    _, samples = play(
        [f"{'y' * 30}{END}"] * 2, VerifiersTaskset("any").generate, 0, max_new_tokens=10
    )
    assert {(sample.status, sample.reward) for sample in samples} == {(SampleStatus.TRUNCATED, 0.0)}


def test_several_agents_and_tasks_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def episode(task: Any, base_url: str) -> Any:
        await ask(base_url, "hi")
        return SimpleNamespace(ok=True, traces=[trace_of(0.0), trace_of(1.0)], last_error=None)

    with_stand_in(monkeypatch, episode)
    with pytest.raises(UserError, match="2 agents"):
        play([f"yes{END}"], VerifiersTaskset("any").generate, 0)
    with pytest.raises(UserError, match="no task 3"):
        play([], VerifiersTaskset("any").generate, 3)


@pytest.mark.skipif(
    not has("verifiers"), reason="verifiers is not installed: pip install 'slime-rl[verifiers]'"
)
@pytest.mark.parametrize("right", [True, False])
def test_verifiers_itself(right: bool, tmp_path: Path) -> None:
    from examples.environments.verifiers_rollout import TASKSET

    assert TASKSET.write_prompts(tmp_path / "rows.jsonl") == 64
    letter = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])["prompt"].split()[-1]
    stage, (sample,) = play([f"{letter if right else 'x'}{END}"], TASKSET.generate, 0)
    assert sample.reward == float(right) and f"say {letter}" in stage.text(stage.model.asked[0])
    assert sample.metadata["verifiers"]["rewards"] == {"says_it": float(right)}


# -- OpenEnv ---------------------------------------------------------------------------------------


class Count:
    """A client with the methods of OpenEnv's: it asks for the numbers after its seed."""

    def __init__(self, most: int = 3, closed: list[int] | None = None) -> None:
        self.most, self.closed, self.steps = most, closed if closed is not None else [], 0

    async def __aenter__(self) -> Count:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.closed.append(self.steps)

    async def reset(self, seed: int = 0) -> Any:
        self.number = seed
        return self._seen(None)

    async def step(self, action: dict[str, Any]) -> Any:
        right = action["number"] == self.number + 1
        self.number, self.steps = self.number + 1, self.steps + 1
        return self._seen(float(right))

    def _seen(self, reward: float | None) -> Any:
        observation = {"text": f"after {self.number}?"}
        return SimpleNamespace(observation=observation, reward=reward, done=self.steps == self.most)


def count_world(**options: Any) -> OpenEnvEnvironment:
    words: dict[str, Any] = {
        "act": lambda text: {"number": int(text)},
        "observe": lambda seen: seen["text"],
    }
    return OpenEnvEnvironment("http://nowhere", **{"client": Count, **words, **options})


def test_an_episode_of_openenv_is_one_sample_of_several_turns(tmp_path: Path) -> None:
    closed: list[int] = []
    world = count_world(client=lambda: Count(3, closed), system="Count.")
    assert world.write_prompts(tmp_path / "rows.jsonl", [{"seed": 4}]) == 1
    task = json.loads((tmp_path / "rows.jsonl").read_text())["metadata"]["task"]
    lines = [f"5{END}", f"9{END}", f"7{END}"]
    stage, sample = play(lines, world.generate, task)
    assert (
        sample.reward == 2.0
        and sample.metadata["openenv"]["rewards"] == [1.0, 0.0, 1.0]
        and closed == [3]
    )
    assert stage.text(stage.trained(sample)) == "".join(lines)
    told = stage.text(sample.tokens)
    assert (
        told.index("Count.")
        < told.index("after 4?")
        < told.index("after 5?")
        < told.index("after 6?")
    )
    assert "after 7?" not in told
    sample.validate()


def test_the_last_reward_alone_and_an_end_after_so_many_steps() -> None:
    _, sample = play(
        [f"1{END}", f"2{END}"], count_world(reward="last", most_steps=2).generate, {"seed": 0}
    )
    assert sample.reward == 1.0 and sample.metadata["openenv"] == {
        "steps": 2,
        "rewards": [1.0, 1.0],
        "done": False,
    }


def test_an_episode_is_begun_anew_not_gone_on_with() -> None:
    world = count_world(most_steps=1)
    stage = Play([f"1{END}"])
    stage.sample.metadata["task"] = {"seed": 0}
    stage.sample.tokens = [5, 6]
    stage.sample.append_response_tokens(tokens=[7], log_probs=[-1.0], text="x")

    async def run() -> Sample:
        bind_state(stage.state)
        return await world.generate(
            stage.state.args, stage.sample, stage.state.params_for(stage.sample)
        )

    sample = asyncio.run(run())
    assert (
        sample.response == "1"
        and sample.reward == 1.0
        and stage.trained(sample) == stage.model.said[0]
    )


def test_an_answer_that_is_no_action_says_which_function_failed() -> None:
    with pytest.raises(UserError, match="act= of OpenEnvEnvironment failed: ValueError") as caught:
        play([f"five{END}"], count_world().generate, {"seed": 4})
    assert "'five'" in caught.value.why


def test_a_long_answer_ends_the_episode_with_what_it_had() -> None:
    _, sample = play(
        [f"5{END}", "7" * 300], count_world().generate, {"seed": 4}, max_new_tokens=120
    )
    assert sample.status is SampleStatus.TRUNCATED and sample.reward == 1.0


@pytest.fixture
def server() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples/environments/openenv_server.py"), str(port)]
    )
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.mark.skipif(
    not has("openenv"), reason="openenv is not installed: pip install 'slime-rl[openenv]'"
)
def test_openenv_itself(server: str) -> None:
    world = OpenEnvEnvironment(
        server, act=lambda text: {"text": text}, observe=lambda seen: str(seen["text"])
    )

    async def generate(*args: Any) -> Any:
        for _ in range(600):
            with contextlib.suppress(ConnectionError):
                return await world.generate(*args)
            await asyncio.sleep(0.1)

    stage, sample = play([f"a{END}", f"a{END}"], generate, {"seed": 1})
    asked = [part[4] for part in stage.text(sample.tokens).split("\n") if part.startswith("say ")]
    assert (
        len(asked) == 2
        and sample.reward == 0.5 * asked.count("a")
        and sample.metadata["openenv"]["done"]
    )
