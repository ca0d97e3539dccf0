"""The whole loop through the code paths of SGLang engines, with the stand-in of
`tests/support/fake_sglang`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import World, start
from tests.support.sglang_servers import fake_environment

ALL = {"kv_cache", "weights", "cuda_graph"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("sglang"))


def calls_by_engine(file: Path) -> list[list[dict[str, Any]]]:
    by_port: dict[int, list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        call = json.loads(line)
        by_port.setdefault(call["port"], []).append(call)
    return list(by_port.values())


def phases(calls: list[dict[str, Any]]) -> list[str]:
    """The calls of one engine as words, repetitions left out."""
    words: list[str] = []
    for call in calls:
        path = call["path"]
        if "memory_occupation" in path:
            word = path.split("_")[0].strip("/") + " " + " ".join(sorted(call["tags"]))
        elif path == "/generate":
            word = "generate"
        elif path == "/pause_generation":
            word = "pause"
        elif path == "/continue_generation":
            word = "continue"
        elif "load_lora_adapter" in path:
            word = ("unload " if "unload" in path else "load ") + call["lora_name"]
        elif "weight_version" in call:
            word = "bucket " + call["weight_version"]
        else:
            continue
        if not words or words[-1] != word:
            words.append(word)
    return words


def test_colocated_engines_and_trainers_take_turns(world: World, tmp_path: Path) -> None:
    """Two trainer ranks, an engine on the slot of each: weights through handles, memory handed over
    and back.

    The router asks all the time, also engines that sleep, and would end them if they generated to
    answer."""
    calls = tmp_path / "calls.jsonl"
    flags = world.flags(
        "turns",
        "--rollout-engine",
        "sglang",
        "--actor-num-gpus-per-node",
        2,
        "--num-gpus-per-node",
        8,
    )
    with start(flags, world.outputs / "turns", **fake_environment(calls)) as driver:
        assert driver.end() == 0, driver.stderr
        assert driver.steps() == [1, 2]
        engines = calls_by_engine(calls)
        assert len(engines) == 2
        push = [
            "resume weights", "pause", "bucket {}", "continue", "resume cuda_graph kv_cache",
            "generate"
        ]  # fmt: skip
        release = "release cuda_graph kv_cache weights"
        # the last "generate" is the canary's; then the model is written
        expected = [*[release, *push] * 3, release]
        versions = iter("123")
        expected = [word.format(next(versions)) if "{}" in word else word for word in expected]
        for engine in engines:
            assert phases(engine) == expected
        steps = [row for row in driver.rows() if "rollout/raw_reward" in row]
        turns = [
            f"perf/{what}_time" for what in ("wake", "sleep", "release_engines", "resume_engines")
        ]
        assert len(steps) == 2 and all(row[name] >= 0 for row in steps for name in turns)
        assert "IPC handles" in "".join(
            log.read_text() for log in (driver.path / "logs").glob("trainer-0*")
        )
        driver.leaves_nothing()


# tests/unit/test_adapter_push_servers.py pushes adapters to the stand-in; test_sglang_command.py
# shows the flag by which it keeps its base
@pytest.mark.full
def test_adapters_come_to_engines_that_keep_their_base_while_they_sleep(
    world: World, tmp_path: Path
) -> None:
    """A trainer of two tensor-parallel ranks. The stand-in's weights are rubbish after a sleep that
    kept no copy."""
    calls = tmp_path / "calls.jsonl"
    flags = world.flags("adapters", "--rollout-engine", "sglang", "--lora-rank", 4)
    flags += ["--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"]
    flags += ["--num-gpus-per-node", "8", "--lr", "1e-2"]
    flags += ["--custom-rm-path", "tests.support.toy.distinct_share"]
    with start(flags, world.outputs / "adapters", **fake_environment(calls)) as driver:
        assert driver.end() == 0, driver.stderr
        engines = calls_by_engine(calls)
        assert len(engines) == 2
        release = "release cuda_graph kv_cache weights"
        expected = []
        for version in (1, 2, 3):
            # engines are held while they are asked how the base lies there and while it is
            # compared, once, and while what was loaded is compared
            held = ["pause", "continue"] if version == 1 else []
            unload = [f"unload policy-{version - 2}"] if version > 2 else []
            expected += [release, *held, "resume weights", *held, *unload]
            expected += [f"load policy-{version}"]
            expected += ["pause", "continue"]
            expected += ["resume cuda_graph kv_cache", "generate"]
        for engine in engines:
            assert phases(engine) == [*expected, release]
            asked = [call.get("lora_path") for call in engine if call["path"] == "/generate"]
            assert set(asked) == {None, "policy-1", "policy-2", "policy-3"}
            assert asked.count(None) >= 3, "the canary asks for the base at each push"
        steps = [row for row in driver.rows() if "rollout/raw_reward" in row]
        assert all(row["train/canary_adapter_abs_diff"] > 0 for row in steps)
        assert all(row["train/canary_logprob_abs_diff_max"] < 1e-3 for row in steps)
        driver.leaves_nothing()


@pytest.mark.full
def test_an_engine_that_dies_while_it_is_talked_to_is_named_with_its_exception(
    world: World, tmp_path: Path
) -> None:
    """At the first push, when it takes memory back."""
    env = fake_environment(tmp_path / "calls", FAKE_SGLANG_DIES_AT="/resume_memory_occupation")
    with start(
        world.flags("dies", "--rollout-engine", "sglang"), world.outputs / "dies", **env
    ) as driver:
        assert driver.end() == 1, driver.stderr
        error = driver.error()
        assert re.fullmatch(
            r"error: taking memory back: engine-0 \(pid \d+\) was killed \(SIGKILL\)", error[0]
        )
        assert (
            error[1]
            == "  why: ValueError: Pointer argument (at 0) cannot be accessed from Triton (cpu "
            "tensor?)"
        )
        assert "SIGQUIT received" in "".join(error) and "mem-fraction" not in "".join(error)
        driver.leaves_nothing()


@pytest.mark.full
def test_engines_of_their_own_get_broadcasts(world: World, tmp_path: Path) -> None:
    """train_async, one trainer, one engine of two ranks and another group's of one."""
    calls, groups = tmp_path / "calls.jsonl", tmp_path / "groups.yaml"
    groups.write_text(
        "sglang:\n  - name: policy\n    server_groups:\n"
        "      - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 2}\n"
        "      - {worker_type: regular, num_gpus: 1, overrides: {max_running_requests: 3}}\n"
    )
    flags = [flag for flag in world.flags("apart") if flag != "--colocate"]
    flags += [
        "--rollout-engine",
        "sglang",
        "--rollout-num-gpus",
        "3",
        "--sglang-config",
        str(groups),
    ]
    with start(
        flags, world.outputs / "apart", script="train_async.py", **fake_environment(calls)
    ) as driver:
        assert driver.end() == 0, driver.stderr
        assert driver.steps() == [1, 2]
        engines = calls_by_engine(calls)
        assert len(engines) == 2
        for engine in engines:
            assert next(word for word in phases(engine) if word.startswith("bucket")) == "bucket 1"
            assert not any("memory_occupation" in call["path"] for call in engine)


@pytest.mark.full
def test_a_model_that_judges_keeps_its_weights(world: World, tmp_path: Path) -> None:
    """Policy and judge on a GPU each, which two trainer ranks share with them; the reward asks the
    judge."""
    calls, models = tmp_path / "calls.jsonl", tmp_path / "models.yaml"
    models.write_text(
        "sglang:\n  - {name: policy, server_groups: [{num_gpus: 1}]}\n"
        f"  - {{name: judge, model_path: {world.inputs / 'model'}, update_weights: false,"
        " server_groups: [{num_gpus: 1}]}\n"
    )
    (tmp_path / "judging.py").write_text(
        "from slime.rollout.sglang_rollout import get_model_url\n"
        "from slime.utils.http_utils import post\n"
        "async def reward(args, sample, **kwargs):\n"
        "    payload = {'input_ids': sample.tokens, 'sampling_params': {'max_new_tokens': 1}}\n"
        "    answer = await post(get_model_url(args, 'judge'), payload)\n"
        "    return float(answer['meta_info']['prompt_tokens'] == len(sample.tokens))\n"
    )
    flags = world.flags("judged", "--rollout-engine", "sglang", "--sglang-config", models)
    flags += ["--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "8"]
    flags += ["--custom-rm-path", f"{tmp_path / 'judging.py'}:reward"]
    with start(flags, world.outputs / "judged", **fake_environment(calls)) as driver:
        assert driver.end() == 0, driver.stderr
        assert [
            row["rollout/raw_reward"] for row in driver.rows() if "rollout/raw_reward" in row
        ] == [1.0, 1.0]
        policy, judge = sorted(
            map(phases, calls_by_engine(calls)), key=lambda words: "bucket 1" not in words
        )
        turns = [
            "release cuda_graph kv_cache weights",
            "resume cuda_graph kv_cache weights",
            "generate",
        ] * 3
        # it sleeps while the last model is saved
        asleep = ["release cuda_graph kv_cache weights"]
        assert judge == turns[:-1] + asleep, "it is asked in two rollouts, and never gets weights"
        assert "bucket 3" in policy
        driver.leaves_nothing()


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (
            (),
            {"FAKE_SGLANG_CRASH": "torch.OutOfMemoryError: CUDA out of memory"},
            "CUDA out of memory",
        ),
        (("--sglang-dtype", "half"), {"FAKE_SGLANG_CRASH": "no"}, "engine-0 ended"),
    ],
)
def test_an_engine_that_does_not_start_ends_the_run_with_its_words(
    world: World, tmp_path: Path, flags: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    with start(
        world.flags("dead", "--rollout-engine", "sglang", *flags, "--output-dir", tmp_path),
        tmp_path / "dead",
        **fake_environment(tmp_path / "calls", **env),
    ) as driver:
        assert driver.end() == 2
        text = "\n".join(driver.error())
        assert said in text and "engine-0 ended with exit status 1 before it was ready" in text
        assert "--sglang-mem-fraction-static" in text


def test_without_sglang_the_run_is_refused_before_anything_starts(
    world: World, tmp_path: Path
) -> None:
    with start(
        world.flags("none", "--rollout-engine", "sglang", "--output-dir", tmp_path),
        tmp_path / "none",
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    ) as driver:
        assert driver.end() == 2
        assert "pip install 'slime-rl[sglang]'" in "\n".join(driver.error())
        assert not (tmp_path / "none").exists()
