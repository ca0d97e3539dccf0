"""What a run leaves behind, evaluation alone, halves of the loop alone, and functions of users."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import NAMES, chromium, tab
from tests.support import toy
from tests.support.metrics_page import documented_names
from tests.support.places import NO_HOME, shadow_modules
from tests.support.processes import ROOT
from tests.support.runs import GRPO, Run, RunResult


@pytest.fixture(scope="module")
def observed(run: Run, data: Path) -> RunResult:
    """Two rollouts with evaluation, TensorBoard and W&B."""
    flags = [
        "--eval-prompt-data",
        "sums",
        f"{data}@[0:4]",
        "--eval-interval",
        1,
        "--n-samples-per-eval-prompt",
        2,
    ]
    flags += ["--use-wandb", "--wandb-mode", "offline", "--use-kl-loss", "--kl-loss-coef", "0.01"]
    return run("observed", *GRPO, *flags, "--colocate", "--num-rollout", 2)


# -- the run folder --------------------------------------------------------------------------------


def test_configuration_says_where_values_come_from(observed: RunResult) -> None:
    text = (observed.path / "config.json").read_text()
    settings = json.loads(text)
    assert "origins" in settings
    origins = settings["origins"]
    assert "flag" in str(origins["num_rollout"]) and "default" in str(
        origins["rollout_temperature"]
    )
    assert "4" in str(origins["global_batch_size"]), "a derived value comes with its formula"


def test_metrics_are_documented(observed: RunResult) -> None:
    pattern = "|".join(re.escape(name).replace("<>", ".+") for name in documented_names())
    names = {name for row in observed.rows for name in row} - {"step", "time", "stage", "nonfinite"}
    assert len(names) > 60
    assert sorted(name for name in names if not re.fullmatch(pattern, name)) == []


def test_steps_and_evaluations(observed: RunResult) -> None:
    assert [row["step"] for row in observed.rows] == [0, 1, 2]
    assert all("eval/sums" in row and "eval/sums-pass@2" in row for row in observed.rows)
    assert [("train/loss" in row) for row in observed.rows] == [False, True, True]
    assert sorted(entry.name for entry in (observed.path / "samples").iterdir()) == [
        *("eval_000000.jsonl", "eval_000001.jsonl", "eval_start.jsonl"),
        *(
            "rollout_000000.jsonl",
            "rollout_000001.jsonl",
            "trained_000000.jsonl",
            "trained_000001.jsonl",
        ),
    ]
    assert json.loads((observed.path / "run.json").read_text())["stages"][""]["state"] == "finished"


def test_tensorboard_reads_the_event_files(observed: RunResult) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(observed.path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("rollout/raw_reward")]
    assert points == [
        (row["step"], pytest.approx(row["rollout/raw_reward"])) for row in observed.rows[1:]
    ]
    assert {"train/loss", "eval/sums", "perf/step_time"} <= set(events.Tags()["scalars"])


def test_wandb_offline(observed: RunResult) -> None:
    [file] = (observed.path / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.stat().st_size > 1000


def test_trace_opens_in_perfetto(observed: RunResult) -> None:
    """Chrome's trace-event format: complete events nest in their lane; each sample has its
    phases."""
    events = json.loads((observed.path / "trace" / "rollout_000001.json").read_text())[
        "traceEvents"
    ]
    spans = [event for event in events if event["ph"] == "X"]
    names = {span["name"] for span in spans}
    assert {"queue", "prefill", "decode", "generate", "reward_model", "generate_and_rm"} <= names
    assert {"rollout", "train", "update_weights"} <= names, "the driver's phases"
    assert sum(span["name"] == "decode" for span in spans) == 16
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for span in spans:
        assert span["dur"] >= 0
        lanes.setdefault((span["pid"], span["tid"]), []).append(
            (span["ts"], span["ts"] + span["dur"])
        )
    for lane in lanes.values():
        open_ends: list[int] = []
        for start, end in sorted(lane, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "spans of a lane nest"
            open_ends.append(end)


def test_report_is_one_file(observed: RunResult) -> None:
    page = (observed.path / "report.html").read_text()
    assert 'id="data">' in page and "finished" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page), (
        "nothing is loaded from elsewhere"
    )
    assert not re.search(r"""(src|href)=["'](?!#|data:)[^"']+\.(js|css|png)""", page), (
        "nor from beside it"
    )


async def look_through(address: str) -> None:
    """Every view of one run, in a browser that complains of nothing."""
    drawn = {
        "overview": "figure",
        "timeline": "canvas",
        "engines": "figure",
        "samples": "details.group",
        "settings": "td",
    }
    async with tab() as page:
        for view, part in drawn.items():
            await page.open("about:blank")
            await page.open(f"{address}#view={view}")
            await page.until(f"document.querySelector('main')?.dataset.view === '{view}'")
            await page.until(f"document.querySelector('main {part}')")
        await page.click("#views a", "Samples")
        await page.click("details.group summary")
        await page.click("button.open")
        await page.until("document.querySelector('article.sample .response-text .lp')")
        assert page.errors == [] and page.dialogs == []


@pytest.mark.skipif(chromium() is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_slime_watch_and_the_report_show_a_real_run_without_complaint(observed: RunResult) -> None:
    asyncio.run(look_through((observed.path / "report.html").as_uri()))
    command = [
        sys.executable,
        "-m",
        "slime",
        "watch",
        str(observed.path),
        "--port",
        "0",
        "--no-cache",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            asyncio.run(look_through(server.stdout.readline().split()[0]))
        finally:
            server.terminate()


# -- parts of the loop -----------------------------------------------------------------------------


def test_evaluation_alone(run: Run, data: Path) -> None:
    flags = [
        "--num-rollout",
        0,
        "--eval-prompt-data",
        "sums",
        data,
        "--n-samples-per-eval-prompt",
        2,
    ]
    result = run("evaluation", *GRPO, *flags, "--colocate")
    [row] = result.rows
    assert row["step"] == 0 and 0 <= row["eval/sums"] <= 1
    assert row["eval/sums/response_len/max"] <= 8
    lines = (result.path / "samples" / "eval_start.jsonl").read_text().splitlines()
    assert len(lines) == 50 * 2 and all(json.loads(line)["dataset"] == "sums" for line in lines)


@pytest.fixture(scope="module")
def generated(run: Run, outputs: Path) -> RunResult:
    """Engines without a trainer; the reward is one of whole groups."""
    flags = [
        "--debug-rollout-only",
        "--save-debug-rollout-data",
        outputs / "generated" / "dumps" / "{rollout_id}.pt",
    ]
    flags += ["--group-rm", "--custom-rm-path", "tests.support.toy.group_rank"]
    return run("generated", *GRPO, *flags, "--num-rollout", 2)


def test_generation_alone(generated: RunResult) -> None:
    assert [row["step"] for row in generated.rows] == [1, 2]
    assert not any(name.startswith("train/") for row in generated.rows for name in row)
    samples = generated.samples(1)
    assert len(samples) == 16
    for group in (samples[i : i + 4] for i in range(0, 16, 4)):
        assert [s.reward for s in group] == toy.group_rank(None, group)
        assert len({s.group_index for s in group}) == 1


@pytest.fixture(scope="module")
def train_on(run: Run, generated: RunResult) -> Callable[..., RunResult]:
    """``train_on(name, *flags)``: trains on the dumps of the run above, without engines."""
    flags = [
        "--load-debug-rollout-data",
        generated.path / "dumps" / "{rollout_id}.pt",
        "--num-rollout",
        2,
    ]
    return lambda name, *more: run(name, *GRPO, *flags, *more)


@pytest.fixture(scope="module")
def trained(train_on: Callable[..., RunResult]) -> RunResult:
    return train_on("trained")


def test_training_alone(trained: RunResult, generated: RunResult) -> None:
    assert [row["step"] for row in trained.rows] == [1, 2]
    assert trained.series("rollout/raw_reward") == generated.series("rollout/reward/mean")
    assert trained.series("train/train_rollout_logprob_abs_diff_max")[0] < 1e-4, (
        "the weights that generated it"
    )
    assert all(norm > 0 for norm in trained.series("train/grad_norm"))


@pytest.mark.full  # every layout: tests/unit/test_debug_dumps.py
def test_a_dump_trains_alike_at_another_layout(
    train_on: Callable[..., RunResult], trained: RunResult
) -> None:
    """Two pipeline stages: also the logged metrics are those of the stage that computes the
    loss."""
    staged = train_on("staged", "--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2)
    assert staged.steps().keys() == trained.steps().keys() == {1, 2}
    for step, row in trained.steps().items():
        assert staged.steps()[step] == pytest.approx(row, rel=1e-5, abs=1e-5)


# -- functions of users ----------------------------------------------------------------------------

USER_FILE = '''
import asyncio

from slime.rollout.generate import current_state, generate
from tests.support.toy import digit_share

TOOL = "+="


async def with_tool(args, sample, sampling_params):
    """Generate, get a tool's answer, generate again."""
    tokenizer = current_state(args).tokenizer
    sample = await generate(args, sample, {**sampling_params, "max_new_tokens": 3, \
"ignore_eos": True})
    answer = tokenizer.encode(TOOL, add_special_tokens=False)
    sample.append_response_tokens(tokens=answer, trainable=False, text=TOOL)
    sample.metadata["round_number"] = 2
    return await generate(args, sample, sampling_params)


async def reward(args, sample, **kwargs):
    await asyncio.sleep(0)
    return {"score": digit_share(args, sample), "tool_calls": sample.response.count(TOOL)}
'''


@pytest.fixture(scope="module")
def with_user_code(
    models: dict[str, Path], data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """``slime train`` from a user's directory, with the functions in a file there; returns the run
    folder.

    Other files there have the names of Python's own modules, and nothing can be written to the home
    directory.
    """
    here = tmp_path_factory.mktemp("user")
    (here / "my_functions.py").write_text(USER_FILE)
    shadow_modules(here)
    flags = [
        "--hf-checkpoint",
        models["qwen3"],
        "--prompt-data",
        data,
        "--input-key",
        "prompt",
        "--label-key",
        "label",
    ]
    flags += [
        "--rollout-batch-size", 2, "--n-samples-per-prompt", 4, "--num-rollout", 2,
        "--run-name", "mine"
    ]  # fmt: skip
    flags += [
        "--rollout-max-response-len", 10, "--rollout-max-context-len", 32, "--fp32", "--colocate"
    ]  # fmt: skip
    flags += ["--custom-generate-function-path", "my_functions.with_tool", "--log-multi-turn"]
    flags += ["--custom-rm-path", "my_functions.py:reward", "--reward-key", "score"]
    # as the command `slime` does
    command = [sys.executable, "-P", "-m", "slime", "train", *map(str, flags)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HOME": NO_HOME, "FORCE_COLOR": "1"}
    done = subprocess.run(
        command, cwd=here, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return here / "outputs" / "mine"


def test_tool_tokens_are_not_trained(with_user_code: Path) -> None:
    rows = [
        json.loads(line) for line in (with_user_code / "metrics.jsonl").read_text().splitlines()
    ]
    samples = (with_user_code / "samples" / "rollout_000001.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in samples]
    assert len(records) == 8
    for record in records:
        assert record["loss_mask"][:2] == [[1, 3], [0, 2]]
        assert record["response_length"] == record["trained_tokens"] + 2 <= 10
        assert [segment["trained"] for segment in record["segments"][:2]] == [True, False]
        assert record["segments"][1] == {"text": "+=", "trained": False, "version": None}
        shown = "".join(segment["text"] for segment in record["segments"])
        assert record["response"] == re.sub("<pad>|<eos>|<unk>", "", shown), (
            "special tokens are not in the response"
        )
        assert record["reward"]["tool_calls"] >= 1
    assert rows[1]["rollout/num_loss_tokens"] == sum(record["trained_tokens"] for record in records)
    assert rows[1]["rollout/raw_reward"] == pytest.approx(
        sum(record["reward"]["score"] for record in records) / 8
    )
    assert rows[1]["multi_turn/round_number/mean"] == 2
    assert rows[1]["train/train_rollout_logprob_abs_diff_max"] < 1e-4
