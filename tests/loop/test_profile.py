"""Steps that are profiled: trainer, engine and rollout in one file, on one clock."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from slime.observe.torch_profile import read_trace
from tests.support.runs import GRPO, Run


def test_two_steps_are_on_one_page(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("profiled", *GRPO, "--num-rollout", 4, "--profile-steps", "1:3")
    (page,) = (result.path / "profile").glob("*.json.gz")
    assert page.name == "steps-1-2.json.gz"
    assert f"{page} (https://ui.perfetto.dev opens it)" in capsys.readouterr().err
    events = read_trace(page)["traceEvents"]

    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event["name"] == "process_name"
    }
    spans = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            spans[names[event["pid"]].split(":")[0]].append(event)
    assert {"trainer rank 0", "engine 0 TP-0", "rollout 1", "rollout 2"} <= set(spans)
    assert "rollout 0" not in spans and "rollout 3" not in spans

    # both kinds of process computed, in the time in which the driver says that they did
    rollout = {event["name"] for event in spans["rollout 1"]}
    assert {"train", "generate", "decode"} <= rollout
    assert any("mm" in event["name"] for event in spans["trainer rank 0"])
    assert any("mm" in event["name"] for event in spans["engine 0 TP-0"])
    phases = spans["rollout 1"] + spans["rollout 2"]
    first = min(event["ts"] for event in phases)
    last = max(event["ts"] + event["dur"] for event in phases)
    trained = [(e["ts"], e["ts"] + e["dur"]) for e in phases if e["name"] == "train"]
    backward = [e for e in spans["trainer rank 0"] if "Backward" in e["name"]]
    assert backward
    slack = 50_000.0
    for event in backward:
        assert any(start - slack <= event["ts"] <= end + slack for start, end in trained), (
            event,
            trained,
        )
    for event in itertools.islice(spans["engine 0 TP-0"], 0, None, 50):
        assert first - 1e6 <= event["ts"] <= last + 1e6
