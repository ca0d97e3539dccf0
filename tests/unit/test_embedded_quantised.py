"""The embedded engine with quantised weights: it computes with what they stand for, and holds what
was sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.quantised_files import dequantise_directory, quantise_directory
from slime.embedded.scheduler import Scheduler
from slime.embedded.weights import WeightError
from slime.engines.wire.buckets import fingerprint, pack
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.embedded_models import make_scheduler, make_sequence, run
from tests.support.quantised_models import INT4, make_plain, same_bits, tensors_of

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

PROMPT = [5, 9, 20, 31, 7]
KINDS = {
    "int4": INT4,
    "int4 asymmetric": Quantisation("compressed-tensors", Int4(8, False), INT4.ignore),
    "fp8": Quantisation("fp8", Fp8((16, 16)), ("lm_head",)),
    "fp8 per tensor": Quantisation("fp8", Fp8((0, 0), "weight_scale"), ("lm_head",)),
}


def engine(directory: Path, dtype: str = "bfloat16") -> Scheduler:
    return make_scheduler(directory, dtype=dtype)


def log_probs(scheduler: Scheduler) -> list[float]:
    sequence = make_sequence(PROMPT, max_new_tokens=0, logprob_start=0)
    run(scheduler, [sequence])
    return sequence.input_logprobs


@pytest.fixture(params=KINDS)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    quantise_directory(
        make_plain(tmp_path / "plain", "qwen3_moe", shards=3),
        tmp_path / "small",
        KINDS[request.param],
    )
    return tmp_path / "small"


def test_it_computes_with_the_dequantised_weights(small: Path, tmp_path: Path) -> None:
    dequantise_directory(small, tmp_path / "back")
    told = log_probs(engine(small))
    assert told == log_probs(engine(tmp_path / "back"))
    assert told != log_probs(engine(tmp_path / "plain"))
    # in float32 nothing is rounded to bfloat16, scales included
    assert log_probs(engine(small, "float32")) == pytest.approx(told, abs=0.02)


def test_an_update_in_buckets_is_what_it_holds(small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    quantise_directory(
        make_plain(tmp_path / "other-plain", "qwen3_moe", seed=1), other, _kind_of(small)
    )
    scheduler = engine(small)
    store, sent = scheduler.store, load_file(other / "model.safetensors")
    store.reset()
    # a weight and its scale have different dtypes, and come in different buckets
    for bucket in pack(sent.items(), 2000, torch.bfloat16):
        store.update(bucket.tensors, "7")
    assert store.missing() == [] and store.version == "7"
    assert store.fingerprints() == {name: fingerprint(tensor) for name, tensor in sent.items()}
    assert log_probs(scheduler) == log_probs(engine(other))
    store.take_snapshot()
    store.compare()
    store.reset()
    with pytest.raises(WeightError, match="differ from the snapshot"):
        store.compare()


def _kind_of(directory: Path) -> Quantisation:
    from slime.models import read_hf_config

    found = Quantisation.read(read_hf_config(directory))
    assert found is not None
    return found


def test_a_scale_that_did_not_come_is_missed(small: Path, tmp_path: Path) -> None:
    store, sent = engine(small).store, tensors_of(small)
    [left_out] = [
        name for name in sent if "experts.3.down_proj.weight_scale" in name and "layers.1" in name
    ]
    before = store.named["model.layers.1.mlp.experts.3.down_proj.weight"].clone()
    store.update(((name, tensor) for name, tensor in sent.items() if name != left_out), "2")
    assert store.missing() == [left_out]
    assert same_bits(store.named["model.layers.1.mlp.experts.3.down_proj.weight"], before)


def test_a_push_that_failed_comes_again_under_the_same_version(small: Path, tmp_path: Path) -> None:
    """The second one brings its parts in another order than the first one, which did not bring
    all."""
    other, third = tmp_path / "other", tmp_path / "third"
    for seed, target in enumerate((other, third), start=1):
        plain = make_plain(tmp_path / f"{target.name}-plain", "qwen3_moe", seed=seed)
        quantise_directory(plain, target, _kind_of(small))
    scheduler = engine(small)
    first, second = tensors_of(other), tensors_of(third)
    scheduler.store.update(((name, first[name]) for name in first if "_scale" not in name), "2")
    for name in sorted(second, key=lambda name: ("_scale" not in name, name)):
        scheduler.store.update([(name, second[name])], "2")
    assert log_probs(scheduler) == log_probs(engine(third))


def test_plain_weights_are_refused_where_quantised_ones_belong(small: Path, tmp_path: Path) -> None:
    store, plain = engine(small).store, tensors_of(tmp_path / "plain")
    before = store.fingerprints()
    with pytest.raises(
        WeightError,
        match=r"no parameter .*down_proj.weight|down_proj.weight is bfloat16, and stored as",
    ):
        store.update([(name, plain[name]) for name in plain if "down_proj" in name], "2")
    assert store.fingerprints() == before and store.version != "2"


def test_a_directory_of_plain_weights_under_such_a_config_is_refused(
    small: Path, tmp_path: Path
) -> None:
    config = (small / "config.json").read_text()
    (tmp_path / "plain" / "config.json").write_text(config)
    with pytest.raises((UserError, WeightError), match=r"lacks \d+ parameters"):
        engine(tmp_path / "plain")


def test_without_the_library_int4_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantise_directory(make_plain(tmp_path / "plain", "llama"), tmp_path / "small", INT4)
    monkeypatch.setattr("slime.engines.wire.quantised.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="slime-rl"):
        engine(tmp_path / "small")
