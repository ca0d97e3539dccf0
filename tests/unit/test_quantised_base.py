"""Adapters over a quantised base: the trainer's frozen base has the values that engines compute
with, at any layout, and a base of other values is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.checkpoints.load_plan import resolve_load
from slime.checkpoints.peft_files import read_config
from slime.checkpoints.quantised_files import dequantise_directory, quantise_directory
from slime.checkpoints.quantised_reader import QuantisedReader
from slime.cli import export
from slime.cli.model_source import chosen_model
from slime.cli.push import card_of
from slime.cluster.server_process import ServerProcess
from slime.embedded.kind import embedded_command
from slime.engines.fleet import EngineFleet
from slime.engines.launch import ONE_GPU, EnginePlace
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.models.spec import read_hf_config
from slime.processes.host import free_port
from slime.run.preflight import check_weights
from slime.trainer.quantised_rules import check_ignore_list, check_quantised_flags
from slime.weights.adapter_sync import AdapterSync
from slime.weights.quantised_launch import check_route
from slime.weights.transport import EngineSlots
from tests.support.embedded_models import make_scheduler, save_tiny_model
from tests.support.megatron_jobs import backend_of, exported, single
from tests.support.parity import TP2
from tests.support.peft_directories import random_adapter
from tests.support.quantised_models import INT4, make_plain, same_bits, tensors_of
from tests.support.sglang_servers import fake_sglang
from tests.support.trainer_ranks import Pools, trainer_config

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

LORA: dict[str, Any] = {"lora_rank": 4}
SP = {"sequence_parallel": True}
FORMATS = {
    "int4": INT4,
    "int4-16-asymmetric": Quantisation("compressed-tensors", Int4(16, False), INT4.ignore),
    "fp8": Quantisation("fp8", Fp8((16, 16)), ("lm_head",)),
    "fp8-tensor": Quantisation("fp8", Fp8((0, 0), "weight_scale"), ("lm_head",)),
}
TOKENS = [5, 9, 200, 31, 7, 7, 64, 12, 300, 2, 18, 90, 41, 8, 15, 3, 77, 120, 6, 11]


@dataclass(frozen=True)
class Directories:
    """Plain weights, what a conversion makes of them, and the weights that this stands for."""

    plain: Path
    quantised: Path
    back: Path

    @staticmethod
    def of(plain: Path, quantisation: Quantisation) -> Directories:
        made = Directories(plain, plain.parent / "quantised", plain.parent / "back")
        quantise_directory(plain, made.quantised, quantisation)
        dequantise_directory(made.quantised, made.back)
        return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Directories]:
    sizes = {"qwen3": {}, "qwen3_moe": {"moe_intermediate_size": 48}}
    return {
        (family, kind): Directories.of(
            make_plain(
                tmp_path_factory.mktemp(kind) / "plain", family, vocab_size=97, **sizes[family]
            ),
            FORMATS[kind],
        )
        for family in sizes
        for kind in FORMATS
    }


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not same_bits(one[name], other[name])]


# -- the values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
def test_files_give_what_an_engine_computes_with(
    made: dict[tuple[str, str], Directories], kind: str, dtype: torch.dtype
) -> None:
    """From the quantised files and from the plain ones that they were made from."""
    at = made["qwen3_moe", kind]
    name = {torch.bfloat16: "bfloat16", torch.float32: "float32"}[dtype]
    held = make_scheduler(at.quantised, dtype=name).store.named
    for directory in (at.quantised, at.plain):
        reader = QuantisedReader(directory, FORMATS[kind], dtype)
        assert any(reader.parts(one) for one in held)
        assert unlike({one: reader[one][:].to(tensor.dtype) for one, tensor in held.items()},
                      dict(held)) == []  # fmt: skip


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_the_base_is_that_of_a_conversion(
    made: dict[tuple[str, str], Directories], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    at = made["qwen3_moe", kind]
    expected = tensors_of(at.back)
    assert unlike(expected, tensors_of(at.plain)), "the format changes something"
    for flags in ({}, {"ref_load": str(at.plain)}):
        with single(at.quantised, bf16=True, **LORA, **flags) as backend:
            assert unlike(exported(backend), expected) == []
            assert backend.engine_weights is None, "nothing is rounded a second time"
        source = flags.get("ref_load", at.quantised)
        assert f"the values of {FORMATS[kind]}, from {source}" in caplog.text


def base_and_scores(info: Any, model: Path, flags: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    backend = backend_of(info, model, **flags)
    return exported(backend), backend.canary_log_probs(TOKENS[:2] + [41, 8, 15, 3, 77])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "family", "kind", "is_from_plain"),
    [
        pytest.param(TP2, "qwen3", "fp8-tensor", True, id="TP2"),
        pytest.param(TP2 | SP, "qwen3_moe", "int4-16-asymmetric", False, id="TP2+SP"),
        *(
            pytest.param(layout, family, kind, is_from_plain, marks=pytest.mark.full)
            for layout in (TP2, TP2 | SP, {"pipeline_model_parallel_size": 2})
            for family in ("qwen3", "qwen3_moe")
            for kind in FORMATS
            for is_from_plain in (False, True)
        ),
    ],
)
def test_it_is_so_at_any_layout(
    made: dict[tuple[str, str], Directories], ranks: Pools, tmp_path: Path,
    layout: dict[str, Any], family: str, kind: str, is_from_plain: bool,
) -> None:  # fmt: skip
    """Also where tensor parallelism cuts a group of columns, or a block, in two."""
    at = made[family, kind]
    random_adapter(at.quantised, tmp_path / "adapter", lora_rank=4)
    flags = {**LORA, "lora_adapter_path": str(tmp_path / "adapter")}
    flags |= {"ref_load": str(at.plain)} if is_from_plain else {}
    [(expected, expected_scores)] = ranks.run(1, base_and_scores, at.quantised, flags)
    for base, scores in ranks.run(2, base_and_scores, at.quantised, flags | layout):
        assert unlike(base, expected) == []
        assert scores is None or scores == pytest.approx(expected_scores, abs=1e-5)


# -- beside an engine ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """A running engine of a quantised model, and an adapter of it whose B is not zero."""

    url: str
    at: Directories
    adapter: Path

    def flags(self, **others: Any) -> dict[str, Any]:
        path = {"lora_adapter_path": str(self.adapter)}
        return {"rollout_engine": "embedded", "hf_checkpoint": str(self.at.quantised), **LORA,
                **path, **others}  # fmt: skip

    def log_probs(self, adapter: str) -> list[float]:
        fleet = EngineFleet([self.url])
        body = {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 0},
                "return_logprob": True, "logprob_start_len": 0, "lora_path": adapter}  # fmt: skip
        [answer] = fleet.post("/generate", body, 30)
        fleet.close()
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


@pytest.fixture(scope="module", params=["int4", pytest.param("fp8", marks=pytest.mark.full)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked_servers: None
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    int4 = Quantisation("compressed-tensors", Int4(16), INT4.ignore)
    family, quantisation = {"int4": ("qwen3_moe", int4), "fp8": ("qwen3", FORMATS["fp8"])}[
        request.param
    ]
    at = Directories.of(save_tiny_model(folder / "plain", family), quantisation)
    random_adapter(at.quantised, folder / "adapter", lora_rank=4)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    found = Served(url, at, folder / "adapter")
    config = trainer_config(**found.flags())
    spec = embedded_command(config, str(at.quantised), "127.0.0.1", port, ONE_GPU)
    process = ServerProcess("engine-0", spec, url, folder / "log")
    process.start()
    try:
        process.wait_ready()
        yield found
    finally:
        process.stop()


def farthest(backend: Any, served: Served, adapter: str) -> float:
    said = served.log_probs(adapter)
    return max(abs(a - b) for a, b in zip(backend.canary_log_probs(TOKENS), said, strict=True))


def test_trainer_and_engine_agree_on_every_token(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with single(**_model(served.flags())) as backend:
        sync = _connected(backend, served.url)
        receipt = sync.push()
        assert farthest(backend, served, receipt.adapter) <= 5e-6
        without = backend.canary_log_probs(TOKENS, base=True)
        assert max(abs(a - b) for a, b in zip(without, backend.canary_log_probs(TOKENS))) > 0.01
        sync.close()
    compared = len(tensors_of(served.at.quantised))
    assert f"the engines' base is the trainer's: {compared} weights compared" in caplog.text
    # as it was without rounding: the same adapter beside plain weights
    plain = served.flags(hf_checkpoint=str(served.at.plain))
    with single(**_model(plain)) as backend:
        assert farthest(backend, served, receipt.adapter) > 0.01


def test_another_base_is_refused(served: Served, tmp_path: Path) -> None:
    """In the trainer, by what the files stand for; in an engine, by its packed weights."""
    shutil.copytree(served.at.plain, tmp_path / "plain")
    _change(tmp_path / "plain", "model.layers.1.self_attn.o_proj.weight")
    at = Directories.of(tmp_path / "plain", Quantisation.read(read_hf_config(served.at.quantised)))
    flags = served.flags(ref_load=str(at.plain))
    said = r"1 weights of the trainer's base(.|\n)*1\.self_attn\.o_proj(.|\n)*leave --ref-load out"
    with single(**_model(flags)) as backend, pytest.raises(UserError, match=said):
        _connected(backend, served.url).push()
    flags = served.flags(hf_checkpoint=str(at.quantised))
    said = r"weights of the engines' base are not the trainer's(.|\n)*1\.self_attn\.o_proj\.weight"
    with single(**_model(flags)) as backend, pytest.raises(UserError, match=said):
        _connected(backend, served.url).push()


# -- SGLang's stand-in -----------------------------------------------------------------------------


@pytest.mark.usefixtures("sglang_stand_in")
def test_sglang_is_asked_for_what_it_does_not_pack(
    made: dict[tuple[str, str], Directories], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Norms and embeddings are compared; packed layers are left to the canary."""
    caplog.set_level("INFO")
    at = made["qwen3", "fp8-tensor"]
    flags: dict[str, Any] = {
        "rollout_engine": "sglang", "colocate": True, "sglang_fp8_gemm_backend": "triton",
        "sglang_dtype": "bfloat16", **LORA,
    }  # fmt: skip
    config = trainer_config(hf_checkpoint=str(at.quantised), **flags)
    with fake_sglang(config, at.quantised, tmp_path, EnginePlace(number=0)) as [server]:
        with single(at.quantised, **flags) as backend:
            sync = _connected(backend, server.url)
            assert sync.push().adapter == "policy-1"
            sync.close()
        packed = 2 * 7
        compared = len(tensors_of(at.plain)) - packed
        said = f"{compared} weights compared, {packed} packed for kernels"
        assert said in caplog.text
        shutil.copytree(at.quantised, tmp_path / "other")
        _change(tmp_path / "other", "model.layers.1.input_layernorm.weight")
        said = r"1 weights of the engines' base(.|\n)*layers\.1\.input_layernorm"
        other = single(tmp_path / "other", **flags)
        with other as backend, pytest.raises(UserError, match=said):
            _connected(backend, server.url).push()


def test_adapters_of_quantised_experts_in_sglang_are_refused(
    made: dict[tuple[str, str], Directories],
) -> None:
    flags = {"rollout_engine": "sglang", "sglang_dtype": "bfloat16", **LORA}
    config = trainer_config(hf_checkpoint=str(made["qwen3_moe", "int4"].quantised), **flags)
    with pytest.raises(UserError, match=r"serves no adapters of experts(.|\n)*--lora-exclude"):
        check_route(config)


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"fake_quantisation": "linears"}, r"--fake-quantisation(.|\n)*engines' quantised values"),
        ({"measure_quantisation": True}, r"--measure-quantisation(.|\n)*quantised values already"),
        ({"fp8_format": "e4m3", "bf16": True}, "--fp8-format does not go with --lora-rank"),
        (
            {"bf16": True, "embedded_dtype": "float32"},
            r"float32 in engines and bfloat16 in the trainer(.|\n)*dtype\) bfloat16",
        ),
    ],
)
def test_what_would_part_trainer_and_engine_is_refused(
    made: dict[tuple[str, str], Directories], flags: dict[str, Any], said: str
) -> None:
    path = str(made["qwen3", "fp8"].quantised)
    with pytest.raises(UserError, match=said):
        check_quantised_flags(trainer_config(hf_checkpoint=path, **LORA, **flags))


def test_a_base_of_megatrons_files_is_refused(
    made: dict[tuple[str, str], Directories], tmp_path: Path
) -> None:
    (tmp_path / "iter_0000001").mkdir()
    for name in (".metadata", "common.pt", "metadata.json"):
        (tmp_path / "iter_0000001" / name).write_text("")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    path = str(made["qwen3", "fp8"].quantised)
    config = trainer_config(hf_checkpoint=path, ref_load=str(tmp_path), **LORA)
    with pytest.raises(UserError, match=r"Megatron checkpoint(.|\n)*leave --ref-load out"):
        check_quantised_flags(config)


@pytest.mark.parametrize("is_from_plain", [False, True])
def test_what_agrees_is_not(made: dict[tuple[str, str], Directories], is_from_plain: bool) -> None:
    at = made["qwen3", "fp8"]
    flags = {"ref_load": str(at.plain)} if is_from_plain else {}
    for precision in ({}, {"bf16": True}):
        config = trainer_config(hf_checkpoint=str(at.quantised), **LORA, **flags, **precision)
        check_quantised_flags(config)
        check_weights(config, resolve_load(config))


def test_a_critic_trained_as_a_whole_starts_from_plain_weights(
    made: dict[tuple[str, str], Directories],
) -> None:
    at = made["qwen3", "fp8"]
    flags = {"hf_checkpoint": str(at.quantised), "advantage_estimator": "ppo", **LORA}
    whole = trainer_config(**flags, critic_lora_rank=0)
    elsewhere = trainer_config(**flags, critic_load=str(made["qwen3", "fp8-tensor"].quantised))
    for config in (whole, elsewhere):
        with pytest.raises(UserError, match=r"(?s)a critic cannot start from .*--critic-load"):
            check_weights(config, resolve_load(config))
    for more in ({}, {"critic_load": str(at.plain), "critic_lora_rank": 0}):
        config = trainer_config(**flags, **more)
        check_weights(config, resolve_load(config))


def test_a_critics_frozen_layers_have_the_values_of_the_engines(
    made: dict[tuple[str, str], Directories],
) -> None:
    at = made["qwen3", "fp8"]
    with single(at.quantised, advantage_estimator="ppo", **LORA) as backend:
        assert backend.critic is not None
        policy, critic = (
            dict(chunks[0].module.named_parameters())
            for chunks in (backend.model_chunks, backend.critic.chunks)
        )
        name = "decoder.layers.1.mlp.linear_fc2.weight"
        assert torch.equal(policy[name], critic[name])


def test_published_lists_of_linear_layers_alone_are_enough(tmp_path: Path) -> None:
    """Nothing is quantised by them: embeddings and routers are plain in the files."""
    at = Directories.of(make_plain(tmp_path / "plain", "qwen3_moe"), INT4)
    config = json.loads((at.quantised / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head"]
    (at.quantised / "config.json").write_text(json.dumps(config))
    adapted = trainer_config(hf_checkpoint=str(at.quantised), **LORA)
    check_ignore_list(adapted)
    check_weights(adapted, resolve_load(adapted))
    whole = trainer_config(hf_checkpoint=str(at.quantised), ref_load=str(at.plain))
    with pytest.raises(UserError, match="ignore list"):
        check_ignore_list(whole)


# -- what is left ----------------------------------------------------------------------------------


def test_the_adapter_names_the_quantised_base(
    made: dict[tuple[str, str], Directories], tmp_path: Path
) -> None:
    at = made["qwen3", "fp8"]
    with single(at.quantised, ref_load=str(at.plain), bf16=True, **LORA) as backend:
        backend.export(str(tmp_path / "adapter"))
    assert read_config(tmp_path / "adapter")["base_model_name_or_path"] == str(at.quantised)
    card = card_of(str(tmp_path / "adapter"), chosen_model(str(tmp_path / "adapter")))
    assert "of `quantised` (FP8 in blocks of 16×16 (fp8)), in PEFT's format" in card


def test_a_merge_is_into_plain_weights_of_the_users_choice(
    made: dict[tuple[str, str], Directories], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = made["qwen3", "fp8"]
    random_adapter(at.quantised, tmp_path / "adapter", lora_rank=4)
    words = [str(tmp_path / "adapter"), "--merge", "--to", str(tmp_path / "merged")]
    with pytest.raises(UserError, match=r"cannot be merged(.|\n)*FP8(.|\n)*--hf-checkpoint"):
        export.main(words)
    assert not (tmp_path / "merged").exists()
    assert export.main([*words, "--hf-checkpoint", str(at.plain)]) == 0
    assert f"trained beside {at.quantised} (FP8 in blocks" in capsys.readouterr().out
    merged, plain = tensors_of(tmp_path / "merged"), tensors_of(at.plain)
    assert unlike(merged, plain) and merged.keys() == plain.keys()


def _connected(backend: Any, url: str) -> AdapterSync:
    sync = AdapterSync(backend.config, backend.model_chunks, backend.hf_config, backend.adapters)
    sync.connect([EngineSlots(url, (0,))])
    return sync


def _model(flags: dict[str, Any]) -> dict[str, Any]:
    return {"model": Path(flags["hf_checkpoint"])} | {
        name: value for name, value in flags.items() if name != "hf_checkpoint"
    }


def _change(directory: Path, name: str) -> None:
    tensors = tensors_of(directory)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
