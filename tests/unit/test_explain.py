"""`slime explain`: each known trouble is found by its own words and by no other's, a healthy run
has none, and whatever a folder lacks or holds, it answers."""

from __future__ import annotations

import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.__main__ import main
from slime.cli.explain import as_text
from slime.diagnosis import reading
from slime.diagnosis.explain import Explanation, explain
from slime.diagnosis.reading import TextSource, read_log
from slime.diagnosis.remedies import REMEDIES
from slime.diagnosis.signatures import SIGNATURES, Seen, Signature, find_signatures
from slime.diagnosis.troubles import PLACES, SECTIONS, SIGNATURE_TABLES, TROUBLES, read_tables
from slime.observe.run_folder import RunFolder
from slime.processes.host import slime_command
from tests.support.log_excerpts import EXCERPTS, HEALTHY, Excerpt
from tests.support.run_folders import held

FLAGS = {
    "engine": {
        "rollout_engine": "sglang",
        "sglang_mem_fraction_static": 0.8,
        "sglang_server_concurrency": 512,
    },
    "rollout": {
        "rollout_batch_size": 32,
        "rollout_max_response_len": 8192,
        "rollout_num_gpus_per_engine": 2,
    },
    "train": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9000, "global_batch_size": 256},
    "cluster": {
        "colocate": True,
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 8,
        "distributed_timeout_minutes": 10,
    },
    "megatron": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
    "origins": {},
}


def run_folder(
    folder: Path, state: str = "failed", flags: dict[str, Any] | None = None, **logs: str
) -> Path:
    """A run folder as one of the given state leaves it."""
    (folder / "logs").mkdir(parents=True)
    entry = {
        "state": state,
        "started": 1000.0,
        "pid": 4711,
        "host": platform.node(),
        "cwd": str(folder),
    }
    (folder / "run.json").write_text(json.dumps({"name": folder.name, "stages": {"": entry}}))
    (folder / "config.json").write_text(json.dumps(FLAGS if flags is None else flags))
    for name, text in logs.items():
        (folder / "logs" / f"{name.replace('_', '-')}.log").write_text(text)
    return folder


def fail(folder: Path, message: str, error: str = "UserError", notes: tuple[str, ...] = ()) -> Path:
    crash = folder / "crash" / "20261123-064012"
    crash.mkdir(parents=True)
    said = {
        "error": error,
        "message": message,
        "notes": notes,
        "note": "phase: train",
        "time": 2000.0,
    }
    (crash / "crash.json").write_text(json.dumps(said))
    (crash / "traceback.txt").write_text(
        f"Traceback (most recent call last):\n  File 'x'\nslime.x.{error}: {message}\n"
    )
    return folder


def provoke(folder: Path, excerpt: Excerpt) -> Path:
    """A failed run with that in its folder, among what healthy runs write."""
    logs = {**HEALTHY}
    if excerpt.log:
        logs[excerpt.log] = logs.get(excerpt.log, "") + excerpt.text
    run_folder(folder)
    for name, text in logs.items():
        (folder / "logs" / f"{name}.log").write_text(text)
    return folder if excerpt.log else fail(folder, excerpt.text, excerpt.error)


def names(found: Explanation) -> list[str]:
    return [finding.trouble.name for finding in found.findings]


# -- every trouble ---------------------------------------------------------------------------------


@pytest.mark.parametrize("excerpt", EXCERPTS, ids=map(str, EXCERPTS))
def test_a_trouble_is_found_by_its_own_words_and_nothing_else_is(
    excerpt: Excerpt, tmp_path: Path
) -> None:
    found = explain(provoke(tmp_path / "run", excerpt))
    # that it failed, where only a log says why
    told = [name for name in names(found) if name != "unknown-error"]
    assert told == [excerpt.trouble]
    finding = found.findings[0]
    assert finding.is_fatal and finding.advice and finding.detail
    if excerpt.log:
        path = tmp_path / "run" / "logs" / f"{excerpt.log}.log"
        name, line = finding.source.split(", line ")
        assert name == f"logs/{excerpt.log}.log"
        shown = finding.detail.partition(" (and ")[0]
        assert path.read_text().split("\n")[int(line) - 1].startswith(shown[:100]), (
            "the line that is named"
        )
    else:
        assert finding.source == "crash/20261123-064012/crash.json"


def test_every_pattern_of_a_signature_finds_an_excerpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Seen]()

    def record(source: TextSource, since: str) -> Iterator[Seen]:
        for one in find_signatures(source, since):
            seen.append(one)
            yield one

    monkeypatch.setattr("slime.diagnosis.explain.find_signatures", record)
    for number, excerpt in enumerate(EXCERPTS):
        explain(provoke(tmp_path / str(number), excerpt))
    found = {
        (SIGNATURES.index(one.signature), pattern)
        for one in seen
        for pattern in one.signature.patterns
        if pattern.match(one.line.text)
    }
    assert [
        (signature.trouble.name, pattern.pattern)
        for number, signature in enumerate(SIGNATURES)
        for pattern in signature.patterns
        if (number, pattern) not in found
    ] == []


def test_every_trouble_has_a_name_of_its_own_and_all_its_texts() -> None:
    troubles = [trouble for group in SECTIONS.values() for trouble in group]
    assert len(troubles) == len(TROUBLES), "each name once"
    assert sum(len(trouble.places) for trouble in troubles) == len(PLACES), "each place once"
    for trouble in troubles:
        assert trouble.cause.endswith(".")
        assert trouble.remedies
        assert trouble.provoke
        assert "\n" not in trouble.symptom


def test_every_trouble_and_remedy_of_a_run_is_used() -> None:
    """The rest of the section is found without signatures: by the state and the metrics."""
    by_state = {"endless-generation", "killed", "run-error", "unknown-error"}
    of_runs = {trouble.name for trouble in SECTIONS["In a run (`slime explain`)"]}
    assert of_runs - {signature.trouble.name for signature in SIGNATURES} == by_state
    assert {table.get("exact") for table in SIGNATURE_TABLES} - {None} == set(REMEDIES)


_TROUBLE = """
[[section]]
title = "Flags"
[section.trouble.x]
symptom = "s"
cause = "c"
remedies = ["r"]
provoke = "p"
"""
_SIGNATURE = """
[[signature]]
trouble = "engine-memory"
words = "x"
"""


def test_a_small_file_of_troubles_is_read() -> None:
    sections, (table,) = read_tables(_TROUBLE + _SIGNATURE)
    assert sections["Flags"][0].remedies == ("r",)
    assert Signature.from_table(**table).patterns[0].match("x")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (_TROUBLE + "remedy = 'x'" + _SIGNATURE, "remedy"),
        (_TROUBLE.replace("cause", "why") + _SIGNATURE, "why"),
        (_TROUBLE.replace("provoke = ", "test = ") + _SIGNATURE, "provoke"),
        (_TROUBLE.replace("title", "name") + _SIGNATURE, "name"),
        (_TROUBLE + _SIGNATURE.replace("signature", "signatures"), "signatures"),
    ],
)
def test_a_wrong_key_in_the_file_of_troubles_is_refused(text: str, word: str) -> None:
    with pytest.raises(TypeError, match=f"'{word}'"):
        read_tables(text)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("remedies", ["x"], TypeError),
        ("trouble", "engine-memry", KeyError),
        ("form", "said", KeyError),
        ("level", "casue", KeyError),
        ("kinds", ["engines"], ValueError),
        ("exact", "bigger-engine", KeyError),
    ],
)
def test_a_wrong_key_or_value_of_a_signature_is_refused(
    key: str, value: object, error: type[Exception]
) -> None:
    table: dict[str, Any] = {"trouble": "engine-memory", "words": "x"}
    with pytest.raises(error):
        Signature.from_table(**table | {key: value})


@pytest.mark.parametrize("state", ["finished", "running", "stopped", "failed"])
def test_a_healthy_runs_logs_say_nothing(state: str, tmp_path: Path) -> None:
    """Texts of samples that talk of errors included, whatever became of the run."""
    folder = run_folder(tmp_path / "run", state)
    for name, text in HEALTHY.items():
        (folder / "logs" / f"{name}.log").write_text(text)
    assert set(names(explain(folder))) <= {"killed", "unknown-error"}, "the state alone"


def test_what_a_run_got_over_did_not_end_it(tmp_path: Path) -> None:
    """An engine that died and was started again is worth a word; a port that was taken once is
    not."""
    by = {str(excerpt): excerpt.text for excerpt in EXCERPTS}
    folder = run_folder(
        tmp_path / "run",
        "finished",
        engine_0=by["engine-memory-engine-0"] + by["port-clash-engine-0"],
    )
    (finding,) = explain(folder).findings
    assert finding.trouble.name == "engine-memory" and not finding.is_fatal


def test_the_most_direct_cause_comes_first(tmp_path: Path) -> None:
    by = {str(excerpt): excerpt.text for excerpt in EXCERPTS}
    folder = run_folder(
        tmp_path / "run",
        engine_0=by["illegal-memory-access-engine-0"],
        trainer_0=by["connection-lost-trainer-0"],
        trainer_1=by["collective-time-out-trainer-1"],
    )
    fail(folder, by["engine-died-crash"], "RunFailed")
    assert names(explain(folder)) == [
        "illegal-memory-access",
        "collective-time-out",
        "engine-died",
        "connection-lost",
    ]


# -- this run's words ------------------------------------------------------------------------------


def advice(tmp_path: Path, name: str, **flags: Any) -> str:
    (excerpt,) = [one for one in EXCERPTS if str(one) == name][:1]
    folder = provoke(tmp_path / "run", excerpt)
    (folder / "config.json").write_text(json.dumps({**FLAGS, "more": flags}))
    return "\n".join(explain(folder).findings[0].advice)


def test_an_illegal_memory_access_has_the_four_steps_with_this_runs_flags(tmp_path: Path) -> None:
    told = advice(tmp_path, "illegal-memory-access-engine-0", sglang_speculative_algorithm="EAGLE")
    steps = [line for line in told.split("\n") if line[:2] in ("1.", "2.", "3.", "4.")]
    assert len(steps) == 4
    assert "CUDA_LAUNCH_BLOCKING=1" in steps[0] and "DeepEP is not in use" in steps[2]
    assert (
        "--sglang-speculative-algorithm (now EAGLE)" in steps[1]
        and "--sglang-disable-cuda-graph" in steps[1]
    )
    assert "CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1" in steps[3]
    assert "--sglang-mem-fraction-static 0.8 → 0.68" in told


def test_an_illegal_memory_access_without_graphs_and_with_deepep(tmp_path: Path) -> None:
    told = advice(
        tmp_path,
        "illegal-memory-access-engine-0",
        sglang_disable_cuda_graph=True,
        sglang_speculative_algorithm="EAGLE",
        sglang_speculative_moe_a2a_backend="deepep",
    )
    assert "CUDA graphs are off already" in told and "--sglang-disable-cuda-graph" not in told
    assert "leave --sglang-speculative-moe-a2a-backend out" in told


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("engine-memory-engine-0", ("--sglang-mem-fraction-static 0.8 → 0.68", "(now 512)")),
        ("engine-cache-engine-0", ("--sglang-mem-fraction-static 0.8 → 0.92", "2 → 4")),
        (
            "trainer-memory-trainer-0",
            ("--max-tokens-per-gpu 9000 → 6750", "= 4096", "--sequence-parallel"),
        ),
        (
            "trainer-memory-crash",
            ("--recompute-activations: keep one activation per layer", "9000 → 6750"),
        ),
        ("wake-memory-crash", ("--offload-rollout", "--sglang-mem-fraction-static 0.8 → 0.48")),
        (
            "collective-time-out-trainer-1",
            ("NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE=0", "NCCL_TIMEOUT"),
        ),
        ("compile-cache-engine-0", ("TORCHINDUCTOR_FORCE_DISABLE_CACHES=1",)),
        ("placement-crash", ("2 × 8 = 16", "--placement-timeout")),
        (
            "engine-died-crash",
            ("--use-fault-tolerance", "(now 0.8)", "(now 32)", "--sglang-disable-cuda-graph"),
        ),
    ],
)
def test_remedies_have_this_runs_values(name: str, words: tuple[str, ...], tmp_path: Path) -> None:
    told = advice(tmp_path, name)
    assert all(word in told for word in words), told


def test_an_error_of_ours_keeps_its_own_words(tmp_path: Path) -> None:
    """What no signature knows is told as the error told it, with the line of the user's code where
    there is one."""
    message = (
        "the data has no column 'question'\n  why: the columns are: prompt, answer\n  fix: "
        "--input-key prompt"
    )
    (finding,) = explain(fail(run_folder(tmp_path / "a"), message)).findings
    assert (finding.trouble.name, finding.advice) == ("run-error", ("--input-key prompt",))
    assert "the columns are: prompt, answer" in finding.detail
    mine = 'in your code:\n      File "rm.py", line 3, in score\n        return 1 / 0'
    message = (
        "the reward function 'rm.score' failed on sample 1\n  why: ZeroDivisionError: x\n  fix: "
        "mend it"
    )
    (finding,) = explain(fail(run_folder(tmp_path / "b"), message, notes=(mine,))).findings
    assert 'File "rm.py", line 3' in finding.detail and finding.advice == ("mend it",)


def test_a_defect_is_called_one(tmp_path: Path) -> None:
    (finding,) = explain(fail(run_folder(tmp_path / "run"), "'x'", "KeyError")).findings
    assert (
        finding.trouble.name == "unknown-error"
        and "KeyError: 'x'" in finding.detail
        and "phase: train" in finding.detail
    )


def test_text_of_a_sample_within_an_error_sets_nothing_off(tmp_path: Path) -> None:
    message = (
        "rm.py:score returned nan as the reward of sample 0\n"
        "  why: response: 'RuntimeError: CUDA error: an illegal memory access was encountered', "
        "label: '9'"
    )
    assert names(explain(fail(run_folder(tmp_path / "run"), message))) == ["own-function"]


# -- whatever the folder is like -------------------------------------------------------------------


def test_a_run_that_was_killed_says_so_with_its_checkpoint_and_the_next_command(
    tmp_path: Path,
) -> None:
    folder = run_folder(
        tmp_path / "run",
        "running",
        flags={**FLAGS, "checkpoint": {"save": str(tmp_path / "run/saves")}},
    )
    whole = folder / "saves" / "iter_0000003"
    whole.mkdir(parents=True)
    for name in ("metadata.json", "common.pt", ".metadata"):
        (whole / name).write_text("{}")
    (folder / "saves" / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "metrics.jsonl").write_text('{"step": 4, "train/loss": 0.1}\n{"step": 5, "tra')
    found = explain(folder)
    assert (found.state, names(found), found.step, found.checkpoint) == (
        "killed",
        ["killed"],
        4,
        whole,
    )
    assert found.next == f"{slime_command()} resume {folder}" and "pid 4711" in as_text(found)


def test_a_run_that_goes_on_is_left_in_peace(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "running")
    descriptor = held(RunFolder(folder))
    try:
        found = explain(folder)
    finally:
        descriptor.close()
    assert (found.state, found.findings) == ("running", ())


def test_what_an_earlier_launch_failed_of_is_over(tmp_path: Path) -> None:
    """Logs and crash folders of a run that was resumed are those of all its launches."""
    started = time.mktime(time.strptime("2026-11-23 12:00:00", "%Y-%m-%d %H:%M:%S"))
    (old,) = [one.text for one in EXCERPTS if str(one) == "engine-memory-engine-0"]
    folder = fail(
        run_folder(tmp_path / "run", "failed", engine_0=old),
        "weights of version 7 did not arrive: x",
    )
    summary = json.loads((folder / "run.json").read_text())
    for begun, told in ((started, ["unknown-error"]), (0.0, ["push-mismatch", "engine-memory"])):
        summary["stages"][""]["started"] = begun
        (folder / "run.json").write_text(json.dumps(summary))
        assert names(explain(folder)) == told


def test_alarms_of_the_metrics_follow(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run", "finished", flags={**FLAGS, "more": {"rollout_max_response_len": 512}}
    )
    rows = [
        {"step": step, "rollout/truncated_ratio": 1.0, "train/grad_norm": 1.0} for step in range(20)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (finding,) = explain(folder).findings
    assert finding.trouble.name == "endless-generation" and not finding.is_fatal
    assert "--rollout-stop-token-ids" in finding.advice[0] and "(now " in finding.advice[1]
    (folder / "metrics.jsonl").write_text(
        '{"step": "no number"}\n[1]\n{"step": 1, "train/grad_norm": "x"}\n'
    )
    assert explain(folder).findings == (), "rows of no use are left out"


_DAMAGE = (
    b"",
    b"{",
    b"[1, 2]",
    b"\xff\xfe\x00",
    b'{"stages": {"": "failed"}}',
    b'{"stages": {"": {"state": 3}}}',
)


@pytest.mark.parametrize(
    "name", ["run.json", "config.json", "metrics.jsonl", "crash/20261123-064012/crash.json"]
)
@pytest.mark.parametrize("content", _DAMAGE)
def test_damaged_files_are_no_obstacle(name: str, content: bytes, tmp_path: Path) -> None:
    (excerpt,) = [one for one in EXCERPTS if str(one) == "engine-memory-engine-0"]
    folder = fail(provoke(tmp_path / "run", excerpt), "boom\n  fix: do x")
    (folder / name).write_bytes(content)
    found = explain(folder)
    if name in ("config.json", "metrics.jsonl"):
        assert "engine-memory" in names(found)
    json.dumps(found.as_json())
    as_text(found)


@settings(max_examples=50)
@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_a_log(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    folder = run_folder(tmp_path_factory.mktemp("any") / "run")
    content = b"\n".join(lines)
    (folder / "logs" / "engine-0.log").write_bytes(content)
    explain(folder)
    source = read_log(folder / "logs" / "engine-0.log", folder)
    assert len(source.lines) == content.count(b"\n") + (
        1 if content and not content.endswith(b"\n") else 0
    )


def test_of_a_huge_log_the_ends_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (excerpt,) = [one for one in EXCERPTS if str(one) == "engine-memory-engine-0"]
    last = f"{excerpt.text}the last line\n"
    folder = run_folder(
        tmp_path / "run", engine_0="calm\n" * 100 + "x" * 5000 + "\n" + "calm\n" * 100_000 + last
    )
    monkeypatch.setattr(reading, "read_log", None)  # nobody else reads it
    log = folder / "logs" / "engine-0.log"
    source = read_log(log, folder)
    assert source.num_skipped == 0, "it fits"
    with log.open("r+b") as file:
        file.truncate()
        file.write(b"calm\n" * 100)
        file.seek(1 << 33)  # a hole of 8 GB: whoever read it all would take minutes
        file.write(b"\n" + last.encode())
    source = read_log(log, folder)
    assert source.num_skipped > 1 << 32 and sum(len(line.text) for line in source.lines) < 1 << 20
    assert source.lines[0].number == 1 and source.lines[-1].place == "line 1 from the end"
    found = explain(folder)
    assert found.findings[0].source == "logs/engine-0.log, line 2 from the end"
    assert any("were not read" in note for note in found.notes)


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    (excerpt,) = [one for one in EXCERPTS if str(one) == "engine-memory-engine-0"]
    elsewhere = tmp_path / "elsewhere.log"
    elsewhere.write_text(excerpt.text)
    folder = run_folder(tmp_path / "run", "finished")
    (folder / "logs" / "engine-0.log").symlink_to(elsewhere)
    os.mkfifo(folder / "logs" / "engine-1.log")
    os.mkfifo(folder / "metrics.jsonl")
    assert explain(folder).findings == ()
    link = tmp_path / "link"
    link.symlink_to(run_folder(tmp_path / "other", engine_0=excerpt.text))
    assert "engine-memory" in names(explain(link)), (
        "a link to the whole folder is as good as the folder"
    )


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [1e300, -1e300, True, "now", None, [1]])
def test_a_time_that_is_none_is_no_obstacle(started: object, tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run", "failed", driver="2026-11-23 06:40:11.132 ERROR   driver  x: y\n"
    )
    summary = {"stages": {"": {"state": "failed", "started": started, "host": platform.node()}}}
    (folder / "run.json").write_text(json.dumps(summary))
    assert explain(folder).state == "failed"


@pytest.mark.parametrize("nonfinite", [None, 5, "x", {}])
def test_a_row_of_another_version_is_no_obstacle(nonfinite: object, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "finished")
    rows = [
        {"step": 1, "nonfinite": nonfinite},
        {"step": 1, "nonfinite": nonfinite},
        {"step": 2, "nonfinite": ["x"]},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert explain(folder).step == 2


def test_the_next_command_can_be_pasted(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "my run", "failed", {"checkpoint": {"save": "x"}, "origins": {"save": "flag"}}
    )
    assert shlex.split(explain(folder).next)[-1] == str(folder)


def test_the_command_tells_and_its_status_says_whether_something_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = run_folder(tmp_path / "good", "finished"), provoke(tmp_path / "bad", EXCERPTS[0])
    assert main(["explain", str(good)]) == 0
    assert "Nothing is wrong" in capsys.readouterr().out
    assert main(["explain", str(bad)]) == 1
    told = capsys.readouterr().out
    assert (
        told.index("[engine-memory]")
        < told.index("why: ")
        < told.index("try: ")
        < told.index("checkpoint: none")
    )
    assert max(map(len, told.splitlines())) <= 120
    assert main(["explain", str(bad), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["state"] == "failed" and said["findings"][0]["name"] == "engine-memory"
    assert said["findings"][0]["remedies"] and said["findings"][0]["source"].startswith(
        "logs/engine-0.log, line "
    )


@pytest.mark.parametrize("words", [[], ["nowhere"], ["{empty}"], ["{empty}", "--what"]])
def test_a_mistake_in_the_call_is_2(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *(word.replace("{empty}", str(tmp_path)) for word in words)]) == 2
    assert "error: " in capsys.readouterr().err


def test_it_imports_nothing_heavy() -> None:
    heavy = ("torch", "ray", "transformers", "megatron", "sglang", "datasets")
    code = (
        f"import slime.cli.explain, slime.cli.bundle, sys; print([m for m in {heavy} if m in "
        "sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_no_two_excerpts_are_the_same() -> None:
    assert all(one.text != other.text for one, other in itertools.combinations(EXCERPTS, 2))
