"""Weights by Hugging Face name: fused storage, whole updates or none, fingerprints, snapshot and
compare."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.embedded.architecture import Architecture
from slime.embedded.weights import WeightError, WeightStore, make_store
from slime.engines.wire.buckets import fingerprint
from slime.errors import UserError
from tests.support.embedded_models import (
    SHAPES,
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
)

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {shape: save_tiny_model(root / shape, shape) for shape in SHAPES}


@pytest.fixture
def store(directories: dict[str, Path]) -> WeightStore:
    return make_scheduler(directories["llama"]).store


def greedy(scheduler_of: Path, updated_to: Path | None = None) -> list[float]:
    scheduler = make_scheduler(scheduler_of)
    if updated_to is not None:
        # the blocked copies of the old weights exist
        run(scheduler, [make_sequence(PROMPT, max_new_tokens=2)])
        scheduler.store.update(load_file(updated_to / "model.safetensors").items(), "2")
    sequence = make_sequence(PROMPT, max_new_tokens=0, logprob_start=0)
    run(scheduler, [sequence])
    return sequence.input_logprobs


@pytest.mark.parametrize("shape", SHAPES)
def test_updated_weights_are_the_ones_that_multiply(
    directories: dict[str, Path], tmp_path: Path, shape: str
) -> None:
    other = save_tiny_model(tmp_path / "other", shape, seed=1)
    assert greedy(directories[shape], updated_to=other) == pytest.approx(greedy(other), abs=1e-6)
    assert greedy(directories[shape]) != pytest.approx(greedy(other), abs=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
def test_names_and_values_are_those_of_the_checkpoint(
    directories: dict[str, Path], shape: str
) -> None:
    scheduler = make_scheduler(directories[shape])
    saved = load_file(directories[shape] / "model.safetensors")
    named = scheduler.store.named
    assert set(saved) == set(named)
    assert all(torch.equal(saved[name], named[name]) for name in saved)
    assert scheduler.store.fingerprints() == {
        name: fingerprint(tensor) for name, tensor in saved.items()
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"model.layers.9.mlp.up_proj.weight": torch.zeros(80, 48)},
            "no parameter model.layers.9.mlp.up_proj.weight",
        ),
        ({"model.norm.weigth": torch.zeros(48)}, "nearest: model.norm.weight"),
        (
            {"model.norm.weight": torch.zeros(47)},
            r"model.norm.weight has shape \[47\], the model's is \[48\]",
        ),
    ],
)
def test_a_refused_update_changes_nothing(
    store: WeightStore, change: dict[str, torch.Tensor], said: str
) -> None:
    before, name = store.fingerprints(), "model.layers.0.input_layernorm.weight"
    with pytest.raises(WeightError, match=said):
        store.update([(name, torch.zeros(48)), *change.items()], "9")
    assert store.fingerprints() == before and store.version == "0"


def test_what_a_push_left_out_is_known(store: WeightStore) -> None:
    names = list(store.named)
    store.update([(name, store.named[name].clone()) for name in names[:-2]], "1")
    assert store.missing() == names[-2:]
    store.update([(name, store.named[name].clone()) for name in names[-2:]], "1")
    assert store.missing() == [] and store.version == "1"


@pytest.mark.parametrize(
    "asked, said",
    [("auto", "config.json of .*: dtype float64"), ("float64", "--dtype: dtype float64")],
)
def test_a_dtype_that_is_not_computed_in_is_named(
    directories: dict[str, Path], asked: str, said: str
) -> None:
    arch = replace(Architecture.from_dir(directories["llama"], False), dtype="float64")
    with pytest.raises(UserError) as raised:
        make_store(directories["llama"], arch, asked, torch.device("cpu"), 16, False)
    assert re.search(said, raised.value.what)
    assert "bfloat16, float16 (if the checkpoint has it) or float32" in raised.value.why


def test_a_tied_head_may_be_sent(store: WeightStore) -> None:
    before = store.fingerprints(["lm_head.weight", "model.embed_tokens.weight"])
    assert len(set(before.values())) == 1
    store.update([("lm_head.weight", torch.zeros(384, 48))], "1")
    assert store.fingerprints(list(before)) == before


def test_snapshot_reset_compare(store: WeightStore) -> None:
    with pytest.raises(WeightError, match="snapshot"):
        store.compare()
    store.take_snapshot()
    kept = {name: tensor.clone() for name, tensor in store.named.items()}
    store.compare()
    store.reset()
    with pytest.raises(WeightError, match=f"{len(kept)} parameters differ"):
        store.compare()
    name = "model.layers.1.self_attn.k_proj.weight"
    store.update((item for item in kept.items() if item[0] != name), "1")
    with pytest.raises(WeightError, match=name):
        store.compare()
    store.update([(name, kept[name])])
    store.compare()


def test_a_directory_is_checked_as_a_whole(
    directories: dict[str, Path], store: WeightStore, tmp_path: Path
) -> None:
    tensors = load_file(directories["llama"] / "model.safetensors")
    before = store.fingerprints()
    dropped = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"lacks 1 parameters of the model: model\.norm\.weight"):
        store.load_directory(tmp_path)
    save_file(
        tensors | {"model.norm.weight": dropped, "model.extra": dropped.clone()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(WeightError, match=r"model\.extra"):
        store.load_directory(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}})
    )
    with pytest.raises(UserError, match="model-00002-of-00002"):
        store.load_directory(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        store.load_directory(tmp_path)
    assert store.fingerprints() == before and not store.broken


def test_weights_of_a_broken_read_are_mended_by_a_complete_push(
    directories: dict[str, Path], store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load_file(directories["llama"] / "model.safetensors")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr(store, "update", lambda *_: (_ for _ in ()).throw(OSError("disk")))
        store.load_directory(directories["llama"], "1")
    assert "stopped half way" in store.broken
    names = list(tensors)
    store.update([(name, tensors[name]) for name in names[:-1]], "2")
    assert store.broken and store.missing() == names[-1:]
    store.update([(names[-1], tensors[names[-1]])], "2")
    assert not store.broken


def test_releasing_memory_loses_nothing(directories: dict[str, Path]) -> None:
    scheduler = make_scheduler(directories["qwen3"])
    first, second = (make_sequence(PROMPT, temperature=0) for _ in range(2))
    run(scheduler, [first])
    full = scheduler.store.nbytes
    scheduler.store.release()
    assert scheduler.store.nbytes < full
    scheduler.slots.reset()
    scheduler.cache.release()
    assert scheduler.cache.nbytes == 0
    scheduler.store.resume()
    run(scheduler, [second])
    assert second.output_ids == first.output_ids and second.num_cached == 0
