"""`slime doctor`: each trouble is provoked and found under its name; what is right is found
right."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime.__main__ import main
from slime.cli import doctor as doctor_command
from slime.config import parse_args
from slime.diagnosis import checks_host, doctor, one_round
from slime.diagnosis.doctor import CHECKS, NODE_CHECKS, Report, at_start, examine
from slime.diagnosis.troubles import SECTIONS
from slime.samples.types import Sample
from tests.support.hf_configs import config_of
from tests.support.processes import World
from tests.support.prompt_fixtures import make_tokenizer, write_jsonl

#: Those that wrong flags alone provoke: test_doctor_flags.py has each.
OF_FLAGS = {trouble.name for trouble in SECTIONS["Flags"]} - {"nccl-timeout"} | {
    *(
        "gpus-missing",
        "engine-flags",
        "model-flags",
        "model-unknown",
        "evaluation-sets",
        "reward-missing",
        "hook",
    ),
    *("data-file", "data-rows", "checkpoint", "folder"),
}
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
LARGE_GRADIENT = {"rollout/raw_reward": 0.5, "rollout/log_probs": -0.4, "train/grad_norm": 900.0}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def world(original: World, tmp_path: Path) -> World:
    """A copy, to be damaged."""
    return World(Path(shutil.copytree(original.inputs, tmp_path / "inputs")), tmp_path / "outputs")


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("NCCL_", "RAY_", "WANDB_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)


class Fault:
    """What a fault is made with: the world, flags on top of its own, and what is changed of the
    host."""

    def __init__(self, world: World, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.world, self.patch, self.folder = world, patch, folder
        self.flags: list[object] = ["--save", world.outputs / "kept"]
        self.without, self.with_round = "", False

    @property
    def model(self) -> Path:
        return self.world.inputs / "model"

    def config(self, **changes: object) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def add(self, *flags: object) -> None:
        self.flags += flags

    def rows(self, *rows: object) -> None:
        self.add("--prompt-data", write_jsonl(self.folder / "rows.jsonl", list(rows)))

    def reward(self, name: str) -> None:
        self.add("--custom-rm-path", f"{__file__}:{name}")

    def examine(self) -> Report:
        argv = self.world.flags("examined", *self.flags, without=self.without)
        return examine(argv, with_round=self.with_round)

    def round_gives(self, status: int, **metrics: float) -> None:
        """In the place of a round that is launched: how it ended, and what it measured."""

        def launch(config: object, folder: Path) -> tuple[int, list[str]]:
            (folder / "round").mkdir()
            (folder / "round" / "metrics.jsonl").write_text(
                json.dumps({"step": 1} | metrics) + "\n"
            )
            return status, ["error: the trainer died", "  why: an injected fault"]

        self.patch.setattr(one_round, "launch", launch)
        self.patch.setattr(
            one_round.tempfile,
            "mkdtemp",
            lambda prefix: str(_made(self.folder / "round-of-its-own")),
        )
        self.with_round = True


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# -- faults, by the name of what they must be found as ---------------------------------------------

FAULTS: dict[str, list[Callable[[Fault], object]]] = {}


def provokes(name: str) -> Callable[[Callable[[Fault], object]], Callable[[Fault], object]]:
    def put(fault: Callable[[Fault], object]) -> Callable[[Fault], object]:
        FAULTS.setdefault(name, []).append(fault)
        return fault

    return put


provokes("nccl-timeout")(lambda f: f.patch.setenv("NCCL_TIMEOUT", "30min"))
provokes("nccl-interface")(lambda f: f.patch.setenv("NCCL_SOCKET_IFNAME", "eth99"))
provokes("nccl-interface")(lambda f: f.patch.setenv("GLOO_SOCKET_IFNAME", "=l"))
provokes("ray-unreachable")(lambda f: f.add("--ray-address", "127.0.0.1:9"))
provokes("ray-unreachable")(lambda f: f.patch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265"))
provokes("temporary-folder")(lambda f: f.patch.setenv("RAY_TMPDIR", f"/{'long' * 25}"))
provokes("open-files")(
    lambda f: f.patch.setattr(checks_host.resource, "getrlimit", lambda _: (256, 256))
)
provokes("check-broken")(
    lambda f: f.patch.setattr("slime.run.preflight.num_cpus", lambda: int("many"))
)
provokes("memory-host")(
    lambda f: f.patch.setattr("slime.memory.hardware.free_host_memory", lambda: 1e7)
)
provokes("memory-colocated")(lambda f: f.add("--gpu-memory-gb", 1))
provokes("model-directory")(lambda f: (f.model / "config.json").unlink())
provokes("model-directory")(lambda f: (f.model / "config.json").write_text("{"))
provokes("model-unknown")(lambda f: f.config(model_type="mamba", architectures=[]))
provokes("missing-shards")(lambda f: (f.model / "model.safetensors").unlink())
provokes("missing-shards")(
    lambda f: (f.model / "model.safetensors").write_bytes(b"version https://git-lfs")
)
provokes("quantised-weights")(
    lambda f: f.config(quantization_config={"quant_method": "compressed-tensors"})
)
provokes("engine-missing")(lambda f: f.add("--rollout-engine", "sglang"))
provokes("tokenizer")(lambda f: (f.model / "tokenizer.json").write_text("{"))
provokes("tokenizer")(lambda f: [file.unlink() for file in f.model.glob("tokenizer*")])
provokes("nothing-kept")(lambda f: f.flags.append("--no-save"))
provokes("end-tokens-differ")(lambda f: f.config(eos_token_id=7))
provokes("context-length")(lambda f: f.config(max_position_embeddings=4))
provokes("reward-flat")(lambda f: f.reward("always_nothing"))
provokes("reward-flat")(lambda f: f.reward("looks_at_another_key"))
provokes("reward-inverted")(lambda f: f.reward("upside_down"))
provokes("flag-warning")(lambda f: f.add("--lora-rank", 4, "--lr", 1e-6))


@provokes("reward-flat")
def a_reward_of_labels_without_a_column(f: Fault) -> None:
    f.without = "--label-key"
    f.reward("upside_down")


provokes("reward-fails")(lambda f: f.reward("raises"))
provokes("reward-fails")(lambda f: f.reward("changes_the_response"))
provokes("data-too-few")(lambda f: f.add("--rollout-batch-size", 1000, "--num-epoch", 1))
provokes("stale-weights")(lambda f: f.add("--update-weights-interval", 5))
provokes("round-failed")(lambda f: f.round_gives(1))
provokes("log-probs-differ")(lambda f: f.round_gives(0, **{DIFFERENCE: 0.3}))
provokes("log-probs-differ")(lambda f: f.round_gives(0))
provokes("large-gradient")(lambda f: f.round_gives(0, **{DIFFERENCE: 0.01}, **LARGE_GRADIENT))
provokes("old-plugin")(lambda f: f.add("--custom-rm-path", f"{_old_plugin(f.folder)}:reward"))


def _old_plugin(folder: Path) -> Path:
    path = folder / "plugin.py"
    code = "def reward(args, sample): return float(sample.response == sample.label)\n"
    path.write_text(f"from slime.utils.types import Sample\n\n{code}")
    return path


@provokes("bytecode")
def packages_that_each_process_compiles(f: Fault) -> None:
    f.patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    f.patch.setattr(
        checks_host.importlib.util, "cache_from_source", lambda _: str(f.folder / "none.pyc")
    )


@provokes("memory-training")
def small_gpu(f: Fault) -> None:
    f.add("--no-colocate", "--gpu-memory-gb", 1)


@provokes("shared-memory")
def small_shared_memory(f: Fault) -> None:
    usage = shutil.disk_usage
    f.patch.setattr(
        checks_host.shutil,
        "disk_usage",
        lambda path: Usage(1e3, 0, 1e3) if str(path) == "/dev/shm" else usage(path),
    )


@provokes("disk-room")
def full_disk(f: Fault) -> None:
    f.patch.setattr(checks_host.shutil, "disk_usage", lambda path: Usage(1e9, 1e9, 1e5))


@provokes("torch-without-gpu")
def torch_for_cpus(f: Fault) -> None:
    f.patch.setattr(checks_host, "num_gpus", lambda environ=None: 2)
    f.patch.setattr(checks_host, "ask_torch", lambda: "None False 0")


@provokes("infiniband")
def nodes_over_tcp(f: Fault) -> None:
    f.patch.setenv("NCCL_IB_DISABLE", "1")
    f.add("--actor-num-nodes", 2)


@provokes("hostname")
def nameless_host(f: Fault) -> None:
    def fails(*_: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    f.patch.setattr(checks_host.socket, "getaddrinfo", fails)
    f.add("--actor-num-nodes", 2)


@provokes("proxy")
def reward_behind_a_proxy(f: Fault) -> None:
    f.patch.setenv("http_proxy", "http://somebody:password@proxy:3128")
    f.without = "--custom-rm-path"
    f.add("--rm-type", "remote_rm", "--rm-url", "http://10.0.0.9/score")


@provokes("ports")
def all_ports_taken(f: Fault) -> None:
    from slime.errors import UserError

    def fails() -> None:
        raise UserError("no free port of this host", fix="ss -ltnp")

    f.patch.setattr(checks_host, "reserve_port", fails)


@provokes("external-engine")
def nobody_serves(f: Fault) -> None:
    f.add("--no-colocate", "--rollout-external-engine-addrs", "127.0.0.1:9")


@provokes("transformer-engine")
def without_transformer_engine(f: Fault) -> None:
    f.patch.setattr("slime.run.preflight.is_installed", lambda: False)
    f.add("--transformer-impl", "transformer_engine")


def on_a_gpu(f: Fault, config: dict[str, Any]) -> None:
    """A GPU of this host, the kernels that no test host has, and another config.json."""
    f.patch.setattr("slime.run.preflight.num_gpus", lambda: 1)
    f.patch.setattr("slime.trainer.gpu_kernels._has_flash4", lambda: False)
    f.patch.setattr("slime.trainer.gpu_kernels.installed_release", lambda package: (2, 11))
    (f.model / "config.json").write_text(json.dumps(config))


@provokes("attention-windows")
def a_window_that_no_kernel_knows(f: Fault) -> None:
    on_a_gpu(f, config_of("mistral", sliding_window=8))
    f.add("--bf16")


@provokes("delta-net-kernels")
def no_kernels_of_delta_nets(f: Fault) -> None:
    on_a_gpu(f, config_of("qwen3_5_text"))


@provokes("hub")
def without_a_hub(f: Fault) -> None:
    f.patch.setattr("slime.hub._why_not_reached", lambda: "no network here")
    f.add("--hf-checkpoint", "nobody/nothing")


def int4(*ignore: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 8}}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }


@provokes("quantised-weights")
def int4_without_its_library(f: Fault) -> None:
    f.config(quantization_config=int4("lm_head", "model.embed_tokens"))
    find = importlib.util.find_spec
    absent = lambda name, *rest: None if name == "compressed_tensors" else find(name, *rest)  # noqa: E731
    f.patch.setattr("slime.engines.wire.quantised.importlib.util.find_spec", absent)


@provokes("quantisation-ignore-list")
def router_is_not_ignored(f: Fault) -> None:
    lists = int4("lm_head", "model.embed_tokens.weight")
    (f.model / "config.json").write_text(
        json.dumps(config_of("qwen3_moe", quantization_config=lists))
    )


@provokes("quantisation-ignore-list")
def a_rule_names_nothing(f: Fault) -> None:
    f.config(quantization_config=int4("lm_head", "model.embed_tokens", "model.layers.0"))


@provokes("vocabulary")
def more_tokens_than_rows(f: Fault) -> None:
    make_tokenizer().save_pretrained(f.model)


@provokes("teacher-vocabulary")
def other_token_ids(f: Fault) -> None:
    teacher = f.folder / "teacher"
    shutil.copytree(f.model, teacher)
    make_tokenizer().save_pretrained(teacher)
    f.add("--use-opd", "--opd-teacher-load", teacher)


@provokes("stop-tokens")
def nothing_ends_a_turn(f: Fault) -> None:
    make_tokenizer(eos="<|endoftext|>").save_pretrained(f.model)
    f.add("--apply-chat-template")


@provokes("stop-tokens")
def nothing_ends_a_turn_of_messages(f: Fault) -> None:
    make_tokenizer(eos="<|endoftext|>").save_pretrained(f.model)
    f.rows({"prompt": [{"role": "user", "content": "1+2="}], "label": "3"})


@provokes("template-twice")
def templated_rows(f: Fault) -> None:
    make_tokenizer().save_pretrained(f.model)
    f.rows({"prompt": "<|im_start|>user\n1+2=<|im_end|>\n", "label": "3"})
    f.add("--apply-chat-template")


@provokes("chat-template")
def no_template(f: Fault) -> None:
    (f.model / "chat_template.jinja").write_text("{% for %}")
    f.add("--apply-chat-template")


@provokes("checkpoint-foreign")
def another_runs_folder(f: Fault) -> None:
    (f.world.outputs / "kept" / "iter_0000003").mkdir(parents=True)


@provokes("wandb-key")
def no_key(f: Fault) -> None:
    from slime.errors import UserError

    def fails(config: object) -> None:
        raise UserError("--use-wandb: there is no API key for W&B", fix="set WANDB_API_KEY")

    f.patch.setattr("slime.observe.wandb_sink.check_key", fails)
    f.add("--use-wandb")


@provokes("tracker-missing")
def no_tracker(f: Fault) -> None:
    f.patch.setitem(sys.modules, "trackio", None)
    f.add("--use-trackio")


def always_nothing(args: Any, sample: Sample) -> float:
    return 0.0


def looks_at_another_key(args: Any, sample: Sample) -> float:
    return float(sample.response == sample.metadata.get("answer"))


def upside_down(args: Any, sample: Sample) -> float:
    return float(str(sample.label) not in sample.response)


def raises(args: Any, sample: Sample) -> float:
    raise KeyError("answer")


def changes_the_response(args: Any, sample: Sample) -> float:
    sample.response = sample.response.upper() + "!"
    return 1.0


def chatty(args: Any, sample: Sample) -> float:
    print("a score:", sample.response)
    print("asked with hf_QwErTyUiOpAsDfGhJkLzXcVb", file=sys.stderr)
    return float(sample.response == sample.label)


async def never(args: Any, sample: Sample) -> float:
    await asyncio.Event().wait()
    return 1.0


def length(args: Any, sample: Sample) -> float:
    return -float(sample.response_length)


def whole_group(args: Any, samples: list[Sample]) -> list[dict[str, float]]:
    return [
        {"score": float(f"<answer>{sample.label}</answer>" in sample.response)}
        for sample in samples
    ]


def test_every_trouble_has_a_fault_that_provokes_it() -> None:
    others = ("In a run (`slime explain`)", "Trainer and engine differ (`slime align`)")
    found = {one.name for title, group in SECTIONS.items() if title not in others for one in group}
    assert set(FAULTS) | OF_FLAGS == found


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, fault) for name, faults in FAULTS.items() for fault in faults],
    ids=lambda one: str(one)[:24],
)
def test_a_fault_is_found(
    name: str,
    fault: Callable[[Fault], object],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Fault(world, monkeypatch, tmp_path)
    fault(made)
    report = made.examine()
    found = {finding.trouble.name: finding for finding in report.findings}
    assert name in found, doctor.text(report)
    assert found[name].detail and found[name].advice and "password" not in doctor.text(report)


# -- what is right ---------------------------------------------------------------------------------


def test_nothing_is_found_in_a_run_that_is_right(world: World) -> None:
    report = examine(world.flags("examined", "--save", world.outputs / "kept"))
    assert report.findings == [] and not report.is_fatal
    states = {outcome.check.name: outcome.state for outcome in report.outcomes}
    assert list(states) == [check.name for check in CHECKS]
    assert {name for name, state in states.items() if state == "left out"} <= {
        "device",
        "hub",
        "credentials",
    }
    assert not world.outputs.exists()


@pytest.mark.parametrize("words", ["math", "dapo --reward-key score", "f1", "random"])
def test_built_in_rewards_tell_labels_from_noise(words: str, world: World) -> None:
    flags = ["--save", world.outputs / "kept", "--rm-type", *words.split()]
    report = examine(world.flags("examined", *flags, without="--custom-rm-path"))
    assert report.findings == [], doctor.text(report)
    (reward,) = (outcome for outcome in report.outcomes if outcome.check.name == "reward")
    assert reward.state == ("left out" if words == "random" else "ok")
    assert ("by chance" if words == "random" else "scores 1, ") in reward.note


@pytest.mark.parametrize(
    ("function", "more", "said"),
    [
        ("length", [], "does not depend on the label"),
        ("whole_group", ["--group-rm", "--reward-key", "score"], "scores 1"),
    ],
)
def test_rewards_of_other_kinds_are_right(
    function: str, more: list[str], said: str, world: World
) -> None:
    flags = ["--save", world.outputs / "kept", "--custom-rm-path", f"{__file__}:{function}", *more]
    report = examine(world.flags("examined", *flags))
    assert report.findings == [], doctor.text(report)
    assert any(said in outcome.note for outcome in report.outcomes)


def test_a_slow_reward_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.deadlines.CHECKS_DATA_REWARD", 0.05)
    flags = ["--save", world.outputs / "kept", "--custom-rm-path", f"{__file__}:never"]
    report = examine(world.flags("examined", *flags))
    assert report.findings == [] and any(
        "it takes more than 0.05 s" in outcome.note for outcome in report.outcomes
    )
    (found,) = examine(world.flags("examined", *flags, "--rm-timeout", 0.04)).findings
    assert found.trouble.name == "reward-fails" and "within 0.04 s" in found.detail


def test_a_remote_reward_is_not_asked(world: World) -> None:
    flags = [
        "--save",
        world.outputs / "kept",
        "--rm-type",
        "remote_rm",
        "--rm-url",
        "http://127.0.0.1:9/score",
    ]
    report = examine(world.flags("examined", *flags, without="--custom-rm-path"))
    assert report.findings == [] and any("remote" in outcome.note for outcome in report.outcomes)


def test_a_launch_looks_at_the_host_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch and Ray, and without what `slime.run.preflight` refuses anyway."""
    config = parse_args(world.flags("examined", "--save", world.outputs / "kept"))
    assert at_start(config) == []
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth99")
    monkeypatch.setattr(checks_host.resource, "getrlimit", lambda _: (256, 256))
    assert {finding.trouble.name for finding in at_start(config)} == {
        "nccl-interface",
        "open-files",
    }


# -- a round ---------------------------------------------------------------------------------------


def test_a_round_that_is_right_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Fault(world, monkeypatch, tmp_path)
    made.round_gives(0, **{DIFFERENCE: 0.001})
    report = made.examine()
    assert report.findings == [] and "differ by 0.0010" in report.outcomes[-1].note
    assert not (tmp_path / "round-of-its-own").exists()


def test_no_round_where_something_stands_in_its_way(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Fault(world, monkeypatch, tmp_path)
    made.round_gives(0)
    made.add("--input-key", "promt")
    assert (made.examine().outcomes[-1].state, made.examine().outcomes[-1].note) == (
        "left out",
        "after data",
    )


# -- the command -----------------------------------------------------------------------------------


def test_the_command_says_all_and_ends_accordingly(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = world.flags("examined", "--save", world.outputs / "kept")
    assert main(["doctor", *flags]) == 0
    said = capsys.readouterr().out
    assert "nothing found" in said and "reward" in said
    chatty = ["--custom-rm-path", f"{__file__}:chatty"]
    assert main(["doctor", "--json", *flags, *chatty]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"]
    assert "asked with" in printed.err and "hf_QwEr" not in printed.err
    assert main(["doctor", "train-async", *flags, "--input-key", "promt", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["fatal"] and not told["ok"]
    found = {
        finding["name"]
        for check in told["checks"]
        for finding in check["findings"]
        if finding["fatal"]
    }
    assert found == {"colocate-async", "data-rows"}
    assert main(["doctor"]) == 2 and "needs the flags of a run" in capsys.readouterr().err
    assert main(["doctor", "--help"]) == 0 and "train-async" in capsys.readouterr().out


def test_a_warning_alone_stops_nobody(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *world.flags("examined", "--no-save")]) == 0
    printed = capsys.readouterr()
    assert "warning: nothing-kept" in printed.out and "try: leave --no-save out" in printed.out
    assert printed.err == ""  # said once


# -- one node of several ---------------------------------------------------------------------------


def test_a_node_is_asked_for_its_own_gpus_alone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 16 GPUs on a node of 8 is right; a node with 4 is not."""
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # as `slime doctor --node` sets it
    monkeypatch.setattr("slime.run.preflight._check_answers", lambda address: pytest.fail(address))
    sizes = ("--actor-num-nodes", 2, "--actor-num-gpus-per-node", 8, "--num-gpus-per-node", 8)
    argv = world.flags("examined", *sizes, "--colocate", "--rollout-batch-size", 16)
    (check,) = [one for one in NODE_CHECKS if one.name == "GPUs"]
    for here, found in ((8, []), (4, ["gpus-missing"])):
        monkeypatch.setattr("slime.diagnosis.checks_plan.num_gpus", lambda here=here: here)
        assert [one.trouble.name for one in examine(argv, checks=[check]).findings] == found
    monkeypatch.setattr("slime.diagnosis.checks_plan.num_gpus", lambda: 0)  # and no size was told
    assert examine(world.flags("examined"), checks=[check]).findings == []


def test_the_command_looks_at_a_node(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.delenv("RAY_ADDRESS")  # and what the command sets goes at the end of the test
    monkeypatch.setattr("slime.diagnosis.checks_plan.num_gpus", lambda: 1)
    doctor_command.main(["--node", "train", *map(str, world.flags("examined"))])
    assert "1 on this node" in capsys.readouterr().out
    assert os.environ["RAY_ADDRESS"] == "auto"
