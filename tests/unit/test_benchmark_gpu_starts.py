"""Every case of the GPU benchmarks reaches the launch of its engines or of its trainer ranks with
flags that this version accepts. Only the launches themselves are replaced."""

from __future__ import annotations

import importlib
import json
import resource
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.gpu import align, images, ranks, run_all, setting, trainer, weight_sync
from slime.cluster.server_process import ServerProcess
from slime.config import Config, parse_args
from slime.engines.kinds import engine_kind
from slime.engines.launch import ONE_GPU
from slime.engines.sglang import command
from slime.trainer.megatron import backend

GPUS = 4


class Launched(BaseException):
    """A process is about to start. Benchmarks catch every `Exception` of a case, but not this."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(argv)
        self.argv = argv


def write_without_weights(shape: str, path: Path) -> None:
    settings = dict(trainer.SHAPES[shape])
    kind = settings.pop("model_type")
    made = AutoConfig.for_model(kind, **settings, eos_token_id=257, bos_token_id=None)
    made.architectures = [f"{type(made).__name__.removesuffix('Config')}ForCausalLM"]
    made.save_pretrained(path)
    setting.byte_tokenizer().save_pretrained(path)


def in_blocks_of_fp8(model: Path, form: str) -> Path:
    target = model.with_name(f"{model.name}-{form}")
    target.mkdir(exist_ok=True)
    described = json.loads((model / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (target / "config.json").write_text(json.dumps(described))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((model / name).read_bytes())
    return target


def first_gpus(first: int, count: int) -> tuple[str, ...]:
    return tuple(map(str, range(GPUS)))[first : first + count]


@pytest.fixture
def only_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(process: ServerProcess) -> None:
        raise Launched(process.spec.argv)

    def run(argv: list[str], **_: Any) -> None:
        config = parse_args(argv[2:], Path(argv[1]).stem)
        model = config.checkpoint.hf_checkpoint
        kind = engine_kind(config.engine.rollout_engine)
        raise Launched(kind.command(config, str(model), "127.0.0.1", 30000, ONE_GPU).argv)

    def first_rank(job: Callable[..., None], world: int, *given: Any, **_: Any) -> None:
        job(ranks.Place(0, world, 29500), print, *given)

    def set_up(config: Config, rank: Any) -> None:
        raise Launched([f"{rank.world_size} trainer ranks"])

    monkeypatch.setattr(ServerProcess, "start", start)
    monkeypatch.setattr(setting.subprocess, "Popen", run)
    monkeypatch.setattr(ranks, "run", first_rank)
    monkeypatch.setattr(backend, "MegatronBackend", set_up)
    monkeypatch.setattr(setting, "_write_model", write_without_weights)
    monkeypatch.setattr(images, "write_weights", lambda config, path: config.save_pretrained(path))
    monkeypatch.setattr(align, "_change_weights", lambda place: None)
    monkeypatch.setattr(weight_sync, "as_served", in_blocks_of_fp8)
    monkeypatch.setattr(weight_sync, "gpu_ids", first_gpus)
    monkeypatch.setattr(command, "installed_version", lambda: "0.5.16")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)  # a benchmark raises it


@pytest.mark.usefixtures("only_launches")
@pytest.mark.parametrize("dry", [False, True], ids=["gpu", "dry"])
@pytest.mark.parametrize("case", run_all.CASES, ids=[case.name for case in run_all.CASES])
def test_a_case_reaches_its_launch(case: run_all.Case, dry: bool, tmp_path: Path) -> None:
    words = ["--out-dir", str(tmp_path), "--models", str(tmp_path / "models")]
    words += ["--engine-flags", "--attention-backend fa3 --sampling-backend pytorch"]
    args = run_all.parse_args([*words, "--dry"] if dry else words)
    _, _, module, *own = run_all.command(case, args)
    with pytest.raises(Launched) as launched:
        importlib.import_module(module).main([*own, "--budget", "60"])
    said = shlex.join(launched.value.argv)
    engine = "slime.embedded" if dry else "slime.engines.sglang"
    assert engine in said or "trainer ranks" in said
    has_engine = case.engine_flags is not None and not case.words.startswith("sleep_wake")
    assert (engine in said) == has_engine
