"""Adapters in `slime serve`, `chat` and `export`: which model a path means, what is served under
which name, and what is written."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.merging import with_adapter
from slime.checkpoints.peft_files import is_loadable, module_of, read_adapter, write_adapter
from slime.checkpoints.run_models import newest_model
from slime.cli import chat, export
from slime.cli.model_source import (
    ChosenModel,
    chosen_model,
    model_directory,
    named_models,
)
from slime.cli.push import card_of
from slime.cli.serve import _check_modules, serving
from slime.config.groups_lora import LoraConfig
from slime.engines.keys import header_of, key_of
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adapter_family
from slime.models.peft_config import CONFIG
from tests.support.bpe_tokenizers import save_model_with_words
from tests.support.embedded_models import save_tiny_model

pytestmark = pytest.mark.usefixtures("forked_servers")


def save_adapter(directory: Path, base: Path, seed: int = 0, **flags: Any) -> Path:
    family = family_of(base)
    spec = family.model_spec(base)
    config = LoraConfig(**{"lora_rank": 4, "lora_alpha": 8.0, **flags})
    adapters = AdapterConfig.for_model(config, family, spec)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in adapter_family(family, spec, adapters).hf_tensors(spec)
    }
    return write_adapter(directory, tensors, adapters, spec, base=str(base))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return save_adapter(base.parent / "adapter", base)


def make_run(folder: Path, base: Path, adapter: Path | None) -> Path:
    folder.mkdir()
    config = {
        "checkpoint": {"hf_checkpoint": str(base)},
        "observe": {"output_dir": str(folder.parent)},
        "origins": {},
    }
    (folder / "config.json").write_text(json.dumps(config))
    if adapter is not None:
        adapter_copy = folder / "model"
        adapter_copy.mkdir()
        for file in adapter.iterdir():
            (adapter_copy / file.name).write_bytes(file.read_bytes())
    return folder


# -- which model -----------------------------------------------------------------------------------


def test_a_path_means_an_adapter_and_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    assert chosen_model(str(base)) == ChosenModel(base)
    assert chosen_model(str(adapter)) == ChosenModel(base, adapter)
    run = make_run(tmp_path / "run", base, adapter)
    assert newest_model(run).kind == "adapter"
    assert chosen_model(str(run)) == ChosenModel(base, run / "model")
    other = save_tiny_model(tmp_path / "other", "qwen3", seed=3)
    assert chosen_model(str(run), str(other)).directory == other
    with pytest.raises(UserError, match="no whole model") as error:
        model_directory(str(run))
    assert "--merge" in error.value.fix


def test_a_base_that_is_not_here(base: Path, tmp_path: Path) -> None:
    lost = save_adapter(tmp_path / "lost", base)
    config = json.loads((lost / CONFIG).read_text()) | {"base_model_name_or_path": "/no/such"}
    (lost / CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match="base model") as error:
        chosen_model(str(lost))
    assert "/no/such" in error.value.why and "--hf-checkpoint" in error.value.fix


def test_names_of_what_is_served(base: Path, adapter: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "sums", base, adapter)
    chosen = chosen_model(str(run))
    models = named_models(chosen, "sums", [f"b={adapter}", f"c={run}"])
    assert models.base == "tiny"
    assert models.adapters == {"sums": run / "model", "b": adapter, "c": run / "model"}
    assert models.requested == "tiny:sums"
    assert named_models(ChosenModel(base), "tiny", [str(adapter)]).adapters == {"adapter": adapter}
    assert named_models(chosen, "tiny", []).requested == "tiny-base:tiny"
    for given, word in (
        ([f"a:b={adapter}"], "no name"),
        ([f"sums={adapter}"], "taken"),
        ([f"x={base}"], "no adapter"),
        (["x=/no/such"], "no adapter"),
    ):
        with pytest.raises(UserError, match=word):
            named_models(chosen, "sums", given)


# -- serve and chat --------------------------------------------------------------------------------


def saved_by_peft(directory: Path, base: Path) -> Path:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, use_rslora=True, target_modules=["q_proj", "v_proj"])
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.save_pretrained(directory)
    return directory


def test_several_adapters_are_served_at_once(base: Path, adapter: Path, tmp_path: Path) -> None:
    """One that PEFT saved with another scaling, of a part of what engines fuse."""
    other = saved_by_peft(tmp_path / "peft", base)
    assert not is_loadable(read_adapter(other), family_of(base).describe(base))
    assert is_loadable(read_adapter(adapter), family_of(base).describe(base))
    prompt = list(range(5, 25))
    with serving(
        base, "tiny", adapters={"one": adapter, "other": other}, engine="embedded"
    ) as server:
        headers = header_of(key_of(server.url))

        def tokens(lora_path: str | None) -> list[int]:
            body = {
                "input_ids": prompt,
                "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
                "lora_path": lora_path,
            }
            answer = httpx.post(f"{server.url}/generate", json=body, headers=headers, timeout=60)
            return answer.json()["output_ids"]

        found = {name: tokens(name) for name in (None, "one", "other")}
        listed = httpx.get(f"{server.url}/v1/models", headers=headers, timeout=60).json()["data"]
    assert {card["id"] for card in listed} == {"tiny", "one", "other"}
    for name, directory in ((None, None), ("one", adapter), ("other", other)):
        assert found[name] == greedy(base, directory, prompt), name
    assert len({tuple(one) for one in found.values()}) == 3


def greedy(base: Path, adapter: Path | None, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        read = read_adapter(adapter)
        with torch.no_grad():
            for module in {module_of(name) for name in read.tensors}:
                weight = model.get_submodule(module).weight
                weight.copy_(with_adapter(weight, module, read))
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("shape, module", [("qwen3_moe", "mlp.gate"), ("gpt_oss", "mlp.router")])
def test_an_adapter_of_a_router_is_refused_before_a_server_starts(
    shape: str, module: str, tmp_path: Path
) -> None:
    base = save_tiny_model(tmp_path / "base", shape)
    served = save_adapter(tmp_path / "adapter", base)
    _check_modules(served, base)
    tensors = load_file(served / "adapter_model.safetensors")
    router = f"base_model.model.model.layers.1.{module}"
    experts = next(
        len(tensor)
        for name, tensor in load_file(base / "model.safetensors").items()
        if name.endswith(f"layers.1.{module}.weight")
    )
    hidden = json.loads((base / "config.json").read_text())["hidden_size"]
    tensors |= {
        f"{router}.lora_A.weight": torch.ones(4, hidden),
        f"{router}.lora_B.weight": torch.ones(experts, 4),
    }
    save_file(tensors, served / "adapter_model.safetensors")
    settings = json.loads((served / CONFIG).read_text())
    settings["target_modules"] = [*settings["target_modules"], module]
    (served / CONFIG).write_text(json.dumps(settings))
    with (
        pytest.raises(UserError, match=rf"has an adapter of model.layers.1.{module}.*no engine"),
        serving(base, "tiny", adapters={"a": served}, engine="embedded"),
    ):
        pass
    export.main([str(served), "--hf-checkpoint", str(base), "--merge", "--to", str(tmp_path / "m")])
    merged = load_file(tmp_path / "m" / "model.safetensors")
    before = load_file(base / "model.safetensors")
    name = f"model.layers.1.{module}.weight"
    assert not torch.equal(merged[name], before[name])


def test_a_chat_of_a_run_is_with_its_adapter(
    base: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path / "sums", base, adapter)

    def answer(*flags: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
        common = ("--temperature", "0", "--max-tokens", "12", "--engine", "embedded")
        assert chat.main([*flags, *common]) == 0
        return capsys.readouterr().out

    assert answer(str(run)) != answer(str(base))
    with pytest.raises(UserError, match="2 times --adapter"):
        chat.main([str(base), "--adapter", f"a={adapter}", "--adapter", f"b={adapter}"])


# -- export ----------------------------------------------------------------------------------------


def test_export_writes_adapter_or_merged_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "sums", base, adapter)
    assert export.main([str(run), "--to", str(tmp_path / "a")]) == 0
    ours, theirs = read_adapter(tmp_path / "a"), read_adapter(adapter)
    assert ours.base == str(base)
    assert all(torch.equal(tensor, theirs[name][:]) for name, tensor in ours.items())
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"An adapter (LoRA) of `{base.name}`" in card and "library_name: peft" in card
    assert export.main([str(run), "--merge", "--to", str(tmp_path / "m")]) == 0
    merged, plain = HfReader(tmp_path / "m"), HfReader(base)
    module = "model.layers.1.mlp.down_proj"
    weight = plain[f"{module}.weight"][:]
    assert torch.equal(merged[f"{module}.weight"][:], with_adapter(weight, module, theirs))
    assert torch.equal(merged["model.norm.weight"][:], plain["model.norm.weight"][:])
    assert "library_name: transformers" in card_of(str(run), ChosenModel(base))
    with pytest.raises(UserError, match="whole model"):
        export.main([str(base), "--merge", "--to", str(tmp_path / "x")])
    with pytest.raises(UserError, match="what to write"):
        export.main([str(base)])


def test_export_of_a_whole_model_copies_it(base: Path, tmp_path: Path) -> None:
    assert export.main([str(base), "--to", str(tmp_path / "copy")]) == 0
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "copy", base))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(UserError, match="is the"):
        export.main([str(base), "--to", str(base)])


def test_export_replaces_neither_the_base_of_the_run_nor_a_file_of_another_kind(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(base, run / "model")
    flags = {"checkpoint": {"hf_checkpoint": str(base)}, "observe": {}, "origins": {}}
    (run / "config.json").write_text(json.dumps(flags))
    before = (base / "model.safetensors").read_bytes()
    for path, to in ((run, base), (adapter, base), (adapter, adapter)):
        with pytest.raises(UserError, match=r"is the (run's --hf-checkpoint|model|adapter) itself"):
            export.main([str(path), "--to", str(to)])
    assert (base / "model.safetensors").read_bytes() == before
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    with pytest.raises(UserError, match="is there, and is no GGUF file"):
        export.main([str(adapter), "--gguf", str(rows)])
    assert rows.read_text() == "{}\n"


def test_export_in_pefts_own_layout_of_experts(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "moe", "qwen3_moe")
    adapter = save_adapter(tmp_path / "adapter", base)
    to = tmp_path / "a"
    assert export.main([str(adapter), "--to", str(to), "--experts", "peft-3d"]) == 0
    names = load_file(to / "adapter_model.safetensors")
    assert any(".experts.base_layer.lora_A" in name for name in names)
    ours, theirs = read_adapter(to), read_adapter(adapter)
    assert ours.names() == theirs.names() and ours.scaling == theirs.scaling
    assert all(torch.equal(tensor, theirs[name][:]) for name, tensor in ours.items())


@pytest.mark.parametrize("shape", ["llama", "qwen3", "qwen3_moe"])
def test_gguf_adapter_and_gguf_of_the_merged_model_agree(shape: str, tmp_path: Path) -> None:
    """llama.cpp computes base + alpha / rank · b·a."""
    gguf = pytest.importorskip("gguf")
    changes = {"mlp_only_layers": []} if shape == "qwen3_moe" else {}
    base = save_model_with_words(tmp_path / "base", shape, **changes)
    save_adapter(tmp_path / "adapter", base)
    for words in (["base"], ["adapter"], ["adapter", "--merge"]):
        file = str(tmp_path / f"{'-'.join(words)}.gguf")
        path = str(tmp_path / words[0])
        assert export.main([path, *words[1:], "--gguf", file]) == 0
    plain, low, merged = (
        {one.name: one for one in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
        for name in ("base", "adapter", "adapter---merge")
    )
    fields = gguf.GGUFReader(tmp_path / "adapter.gguf").fields
    assert fields["general.type"].contents() == "adapter"
    assert fields["adapter.type"].contents() == "lora"
    scaling = fields["adapter.lora.alpha"].contents() / 4
    assert {name.rpartition(".")[0] for name in low} <= plain.keys() == merged.keys()
    for name, tensor in plain.items():
        expected = torch.tensor(tensor.data)
        if f"{name}.lora_a" in low:
            down, up = (torch.tensor(low[f"{name}.{side}"].data) for side in ("lora_a", "lora_b"))
            assert down.shape[-2] == 4 == up.shape[-1]
            expected = expected + scaling * (up @ down)
        torch.testing.assert_close(torch.tensor(merged[name].data), expected)


@pytest.mark.parametrize("words", [[], ["--merge"]])
def test_what_llama_cpp_does_not_compute_is_refused_of_adapters_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the name of the base, and before anything is merged."""
    pytest.importorskip("gguf")
    base = save_tiny_model(tmp_path / "base", "qwen3_moe")
    save_adapter(tmp_path / "adapter", base)
    monkeypatch.delattr("slime.cli.export.merge_adapter")
    to = tmp_path / "adapter.gguf"
    with pytest.raises(UserError, match=rf"{base} has dense layers .* among those with experts"):
        export.main([str(tmp_path / "adapter"), *words, "--gguf", str(to)])
    assert not to.exists()
