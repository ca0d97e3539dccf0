"""`slime watch` over HTTP: what it answers, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.watched_runs import make_run, metrics_row, write_lines
from slime.cli.watch import address, main
from slime.errors import UserError
from slime.http_access import POLICY, host_of, is_loopback
from slime.observe.chrome_trace import SAMPLES, chrome_trace
from slime.observe.phases import PhaseEvent
from slime.observe.run_folder import RunFolder
from slime.page.folders import runs_below
from slime.page.index import SampleIndex, path_key
from slime.page.lanes import timeline
from slime.page.server import Runs, application
from slime.processes.host import bind
from tests.support.run_folders import held

ROOT = Path(__file__).parents[2]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;<!--\u2028"
Visit = Callable[[TestClient[Any, Any], Runs], Coroutine[Any, Any, None]]


def visit(paths: list[Path], what: Visit, token: str | None = None) -> None:
    """Run ``what`` with a client of a server of these folders, after one look at them."""

    async def inner() -> None:
        runs = Runs(paths)
        runs.look()
        async with TestClient(TestServer(application(runs, token))) as client:
            await what(client, runs)

    asyncio.run(inner())


async def ask(client: TestClient[Any, Any], question: str, **parameters: Any) -> Any:
    async with client.get(f"/api/{question}", params=parameters) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


def run_id(folder: Path) -> str:
    """Of a run that has one stage."""
    return f"{path_key(folder)}."


def test_every_question_about_two_runs(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", rollouts=6, lr=1e-5, seed=1)

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        told = await ask(client, "runs")
        assert {run["name"]: run["step"] for run in told["runs"]} == {"one": 4, "two": 6}
        first, second = (
            next(run["id"] for run in told["runs"] if run["name"] == name)
            for name in ("one", "two")
        )
        assert [part["section"] for part in told["catalog"]] == ["Learning", "Policy", "Speed"]
        metrics = await ask(client, "metrics", run=first, names="rollout/raw_reward,nothing")
        assert metrics["steps"] == [1, 2, 3, 4] and list(metrics["columns"]) == [
            "rollout/raw_reward"
        ]
        assert {"train/kl_loss", "perf/step_time"} <= {name for name, _, _ in metrics["names"]}
        assert (await ask(client, "phases", run=first))[0]["name"] == "generate"
        assert list((await ask(client, "engines", run=first))["loads"]) == ["0", "1"]
        line = await ask(client, "timeline", run=first, step=2)
        assert line["steps"] == [1, 2, 3, 4] and len(line["timeline"]["lanes"]) == 16
        steps = await ask(client, "steps", run=first)
        assert [(each["kind"], each["step"]) for each in steps["steps"]] == [
            ("eval", 0),
            *(("rollout", i) for i in range(1, 5)),
        ]
        assert steps["samples"] == steps["texts"] == 67
        page = await ask(client, "samples", run=first, sort="reward", descending=1, limit=10)
        assert page["more"] and [row["reward"] for row in page["samples"]] == [1.0] * 10
        whole = await ask(client, "sample", run=first, id=page["samples"][0]["id"])
        assert len(whole["record"]["tokens"]["text"]) == whole["response_length"]
        groups = await ask(client, "groups", run=first, step=2, limit=3)
        assert [group["step"] for group in groups["groups"]] == [2, 2, 2] and groups["more"]
        assert all(
            group["question"].startswith("Tell me of ") and group["label"]
            for group in groups["groups"]
        )
        flags = {row["flag"]: row["value"] for row in await ask(client, "settings", run=second)}
        assert float(flags["lr"]) == 1e-05
        differing = await ask(client, "differences", runs=f"{first},{second},none")
        ((flag, values),) = [(row["flag"], row["values"]) for row in differing["flags"]]
        assert flag == "lr" and [float(value) for value in values] == [1e-6, 1e-5]
        for question, asked in (("metrics", "9."), ("samples", "../x"), ("timeline", "")):
            async with client.get(f"/api/{question}", params={"run": asked}) as answer:
                assert answer.status == 404
        for wrong in (
            {"sort": "id; DROP TABLE rows"},
            {"step": "x"},
            {"step": str(1 << 70)},
            {"kind": "y"},
        ):
            async with client.get("/api/samples", params={"run": first, **wrong}) as answer:
                assert answer.status == 400

    visit([one, two], what)


def test_only_steps_that_are_new_come_over_the_wire(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=3)
    path, chance = folder / "metrics.jsonl", random.Random(0)

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        first = await ask(client, "metrics", run=run_id(folder), names="train/loss")
        new = {"names": "train/loss", "generation": first["generation"]}
        with path.open("a") as file:
            file.write(json.dumps(metrics_row(4, 4, chance)) + '\n{"step": 5, "train/lo')
        runs.look()
        second = await ask(client, "metrics", run=run_id(folder), **new, since=first["since"])
        assert second["steps"] == [4] and second["columns"] == {"train/loss": [0.0]}
        with path.open("a") as file:
            # an evaluation beside training comes behind its step
            file.write('ss": 7}\n{"step": 2, "eval/late": 1}\n')
        runs.look()
        third = await ask(client, "metrics", run=run_id(folder), **new, since=second["since"])
        assert third["steps"] == [2, 5] and third["columns"] == {"train/loss": [0.0, 7]}
        assert ["eval/late", "Evaluation: late", "reward"] in third["names"]
        write_lines(path, [{"step": 1, "train/loss": 3.0}])  # steps that a resumed run took back
        runs.look()
        fourth = await ask(client, "metrics", run=run_id(folder), **new, since=third["since"])
        assert fourth["generation"] != first["generation"] and fourth["columns"] == {
            "train/loss": [3.0]
        }

    visit([folder], what)


def test_alarms_crashes_and_stages(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows = [
        {"step": i, "stage": s, "time": 5.0, "train/loss": 1.0}
        for s in ("sft", "rl")
        for i in range(3)
    ]
    write_lines(
        folder / "metrics.jsonl", [*rows, {"step": 4, "stage": "rl", "nonfinite": ["train/loss"]}]
    )
    for i, stage in enumerate(("sft", "rl")):
        (folder / f"config.{stage}.json").write_bytes(
            orjson.dumps({"group": {"wandb_key": "hush", "lr": i}})
        )
    stages = {
        "sft": {"state": "finished", "started": 1.0, "ended": 2.0},
        "rl": {"state": "failed", "started": 3.0},
    }
    (folder / "run.json").write_bytes(orjson.dumps({"name": "run", "stages": stages}))
    crash = {
        "error": "ValueError",
        "message": HOSTILE,
        "notes": ["in reward.py"],
        "argv": ["secret"],
    }
    (folder / "crash" / "1").mkdir(parents=True)
    (folder / "crash" / "1" / "crash.json").write_bytes(orjson.dumps(crash))

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        last, first = (await ask(client, "runs"))["runs"]
        assert (last["name"], first["name"]) == ("run/rl", "run/sft")
        assert last["alarms"][0]["name"] == "nonfinite" and first["alarms"] == []
        assert (
            last["crash"]["message"] == HOSTILE
            and "argv" not in last["crash"]
            and first["crash"] is None
        )
        text = json.dumps(await ask(client, "settings", run=last["id"]))
        assert "hush" not in text and "wandb_key" in text

    visit([folder], what)


def test_only_names_of_this_host_are_answered_on_loopback(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        for host, status in {
            "localhost:80": 200,
            "127.0.0.1": 200,
            "[::1]:5": 200,
            "127.0.0.2": 200,
            "evil.example": 403,
            "localhost.evil.example": 403,
            "127.0.0.1.evil.example:80": 403,
            "10.0.0.1": 403,
        }.items():
            for path in ("/", "/main.js", "/api/runs"):
                async with client.get(path, headers={"Host": host}) as answer:
                    assert answer.status == status, (host, path)
                    assert answer.headers["Content-Security-Policy"] == POLICY
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"

    visit([folder], what)
    assert "unsafe" not in POLICY


def test_a_token_is_asked_for_in_address_cookie_or_header(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        for path in (
            "/",
            "/main.js",
            "/api/runs",
            "/?token=wrong",
            "/api/runs?token=",
            "/?token=%F0%9F%92%A9",
        ):
            async with client.get(path, allow_redirects=False) as answer:
                assert answer.status == 401, path
                assert (
                    "Set-Cookie" not in answer.headers
                    and answer.headers["Referrer-Policy"] == "no-referrer"
                )
        async with client.get("/api/runs", headers={"X-Slime-Token": "right"}) as answer:
            assert answer.status == 200
        async with client.get("/?token=right", allow_redirects=False) as answer:
            # it leaves the address bar
            assert answer.status == 302 and answer.headers["Location"] == "/"
            assert re.search("HttpOnly.*SameSite=Strict", answer.headers["Set-Cookie"])
        async with client.get("/", headers={"Host": "a.host.of.ours"}) as answer:
            assert answer.status == 200  # with the cookie

    visit([folder], what, token="right")


def test_nothing_but_reading_and_nothing_beside_the_runs(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    (tmp_path / "secret.js").write_text("secret")
    (folder / "trace" / "rollout_000007.json").symlink_to(tmp_path / "secret.js")

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            async with client.request(method, "/api/runs") as answer:
                assert answer.status == 405
        for path in (
            "/../secret.js",
            "/%2e%2e/secret.js",
            "/..%2fsecret.js",
            "/page/main.js",
            "/server.py",
            "/none.js",
        ):
            async with client.get(path) as answer:
                assert answer.status == 404, path
        assert (await ask(client, "timeline", run=run_id(folder), rollout=7))["timeline"] is None

    visit([folder], what)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    write_lines(
        folder / "samples" / "rollout_000001.jsonl",
        [{"prompt": HOSTILE, "response": HOSTILE, "reward": 1}],
    )

    async def what(client: TestClient[Any, Any], runs: Runs) -> None:
        async with client.get(
            "/api/samples", params={"run": run_id(folder), "search": HOSTILE, "whole": 1}
        ) as answer:
            assert answer.content_type == "application/json"
            (row,) = (await answer.json())["samples"]
            assert row["record"]["response"] == HOSTILE
        async with client.get("/") as answer:
            assert "<script>" not in await answer.text()  # none inline

    visit([folder], what)
    files = sorted((ROOT / "slime" / "page" / "static").glob("*.js"))
    assert files
    for file in files:  # nothing there that would make markup of text
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function",
            file.read_text(),
        )


def test_a_trace_of_the_recorder_becomes_lanes() -> None:
    events = chrome_trace(
        [], [PhaseEvent("rollout", 10.0, 2.0, 0), PhaseEvent("train", 12.0, 1.0, 0)]
    )["traceEvents"]
    told = timeline(events)
    assert told["length"] == 3000 and told["phases"] == [
        ["generate", 0, 2000, 1],
        ["train", 2000, 1000, 2],
    ]
    assert (told["lanes_from"], told["lanes_to"]) == (0, 0), "no sample"
    sample = {
        "ph": "X",
        "pid": SAMPLES,
        "tid": 7,
        "name": "generate_and_rm",
        "ts": 10.5e6,
        "dur": 0.5e6,
    }
    told = timeline([*events, sample, {**sample, "tid": 8, "ts": 10.25e6}])
    assert (told["lanes_from"], told["lanes_to"]) == (250, 1000), (
        "the lanes fill this time, not the whole step"
    )
    assert [lane["spans"][0][0] for lane in told["lanes"]] == ["sample", "sample"]
    for broken in (
        [],
        [None, 3, {"ph": "X"}, {"ph": "X", "ts": "x"}],
        [{"ph": "X", "ts": 1, "pid": 1}],
    ):
        timeline(broken)


def test_folders_that_are_meant(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one", rollouts=1), make_run(tmp_path / "two", rollouts=1)
    (tmp_path / "inputs").mkdir()
    os.utime(one / "metrics.jsonl", (1, 1))
    os.utime(one / "run.json", (1, 1))
    assert runs_below([tmp_path]) == [two, one] and runs_below([one, two]) == [one, two]
    with pytest.raises(UserError, match="holds no run"):
        runs_below([tmp_path / "inputs"])
    with pytest.raises(UserError, match="there is no folder"):
        runs_below([tmp_path / "nothing"])
    runs = Runs([tmp_path])
    assert len(runs.all()) == 2
    make_run(tmp_path / "three", rollouts=1)
    runs.look()
    assert {watch.path.name for watch, _ in runs.all().values()} == {"one", "two", "three"}
    runs.close()


def test_a_folder_that_goes_or_cannot_be_read_keeps_nobody_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, odd, good = (make_run(tmp_path / name, rollouts=1) for name in ("gone", "odd", "good"))
    runs = Runs([gone, odd, good])
    shutil.rmtree(gone)
    (odd / "metrics.jsonl").unlink()
    (odd / "metrics.jsonl").mkdir()
    write_lines(good / "metrics.jsonl", [{"step": 7}])
    for _ in range(3):
        runs.look()
    steps = {
        watch.path.name: stage.rows[-1]["step"]
        for watch, stage in runs.all().values()
        if stage.rows
    }
    assert steps["good"] == 7
    assert {watch.path.name: watch.index.progress()["samples"] for watch, _ in runs.all().values()}[
        "good"
    ] == 19
    assert len([record for record in caplog.records if str(odd) in record.getMessage()]) == 1
    runs.close()


def test_curves_are_followed_while_an_index_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make_run(tmp_path / "one", rollouts=3), make_run(tmp_path / "two", rollouts=1)
    monkeypatch.setattr("slime.deadlines.PAGE_POLL", 0.0)
    runs = Runs([one, two])
    update, steps = SampleIndex.update, []

    def grown(index: SampleIndex, stages: Any, goes_on: Callable[[], bool]) -> bool:
        write_lines(two / "metrics.jsonl", [{"step": 9}])
        goes_on()
        steps.extend(
            stage.rows[-1]["step"] for watch, stage in runs.all().values() if watch.path == two
        )
        return update(index, stages, goes_on)

    monkeypatch.setattr(SampleIndex, "update", grown)
    runs.look()
    assert steps[0] == 9
    runs.close()


def test_a_page_of_an_earlier_server_meets_the_same_runs_and_asks_for_all(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", rollouts=1)
    first = Runs([tmp_path])
    two = make_run(tmp_path / "two", rollouts=1)
    second = Runs([tmp_path])
    names = {key: watch.path for key, (watch, _) in second.all().items()}
    assert [names[key] for key in first.all()] == [one] and two in names.values()
    before, after = (
        {w.path: w.generation for w, _ in runs.all().values()}[one] for runs in (first, second)
    )
    assert before != after and after < 2**53  # what a page can tell apart
    first.close()
    second.close()


def test_a_run_that_goes_on_is_running_as_long_as_somebody_holds_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", rollouts=1)
    stages = {"": {"state": "running", "started": 1.0, "ended": None}}
    (folder / "run.json").write_bytes(orjson.dumps({"name": "run", "stages": stages}))
    lock = held(RunFolder(folder))
    runs = Runs([folder])
    assert [stage.summary["state"] for _, stage in runs.all().values()] == ["running"]
    lock.close()
    runs.look()
    assert [stage.summary["state"] for _, stage in runs.all().values()] == ["interrupted"]
    runs.close()


def test_addresses() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost")
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))
    assert [host_of(header) for header in ("A.b:1", "[::1]:80", "::", "")] == ["a.b", "::1", "", ""]
    assert address("::1", 1, None) == "http://[::1]:1/"
    assert address("0.0.0.0", 1, "t") == f"http://{socket.gethostname()}:1/?token=t"


def test_mistakes_are_told_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no outputs/ here"):
        main([])
    with pytest.raises(UserError, match="cannot listen on"):
        main([str(make_run(tmp_path / "large", rollouts=1)), "--port", "99999"])
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match="cannot listen on"):
        main([str(make_run(tmp_path / "run", rollouts=1)), "--port", str(taken.getsockname()[1])])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_address_and_ends_quietly(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = make_run(tmp_path / "outputs" / "run", rollouts=2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "slime", "watch", "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"http://\S+:(\d+)/\?token=(\S{32})  \(Ctrl-C ends it\)\n", line)
        assert found, line
        place = f"http://127.0.0.1:{found[1]}/api/runs?token={found[2]}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        told = orjson.loads(opener.open(place, timeout=60).read())
        assert [run["name"] for run in told["runs"]] == [folder.name]
        process.send_signal(number)
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out, error) == (0, "", "")
    finally:
        process.kill()
        process.wait()
