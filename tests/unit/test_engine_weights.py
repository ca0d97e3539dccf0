"""The trainer computes with what engines hold quantised: the bits of a conversion at any layout,
gradients straight through, flags that would do nothing refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.quantised_files import dequantise_directory, quantise_directory
from slime.engines.wire.buckets import FLOAT32_NAMES
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.trainer.quantised_rules import check_quantised_flags
from tests.support.megatron_jobs import engine_weights, exported, single, train_and_save
from tests.support.quantised_models import INT4, make_plain, same_bits, tensors_of
from tests.support.trainer_ranks import Pools, make_batch, shard, trainer_config
from tests.support.trainers import LOSS, gradients

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

FORMATS = {
    "int4": INT4,
    "int4-16-asymmetric": Quantisation("compressed-tensors", Int4(16, False), INT4.ignore),
    "fp8": Quantisation("fp8", Fp8((16, 16)), ("lm_head",)),
    "fp8-tensor": Quantisation("fp8", Fp8((0, 0), "weight_scale"), ("lm_head",)),
}
#: In each the expected bits are those of the files; in the second columns of one group lie on two
#: ranks.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "etp2": {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    "tp2+ep2": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
}


class Models:
    """Plain directories, what conversions make of them, and back again; each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plain(self, family: str) -> Path:
        path = self._folder / family
        return path if path.is_dir() else make_plain(path, family, **self._shape(family))

    def quantised(self, family: str, kind: str) -> Path:
        path = self._folder / f"{family}-{kind}"
        if not path.is_dir():
            quantise_directory(self.plain(family), path, FORMATS[kind])
        return path

    def back(self, family: str, kind: str) -> Path:
        """Plain weights again: those that engines compute with."""
        path = self._folder / f"{family}-{kind}-back"
        if not path.is_dir():
            dequantise_directory(self.quantised(family, kind), path, torch.bfloat16)
        return path

    @staticmethod
    def _shape(family: str) -> dict[str, Any]:
        if "moe" in family:
            return {"vocab_size": 97, "moe_intermediate_size": 48}
        return {"vocab_size": 97}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def opened(models: Models, family: str, kind: str, **flags: Any) -> Any:
    """A trainer of plain weights whose engines hold quantised ones."""
    return single(models.quantised(family, kind), ref_load=str(models.plain(family)), **flags)


def unlike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    # in the trainer's precision here, and there
    biases = {name for name in one if name.endswith(FLOAT32_NAMES)}
    return [name for name in one if not same_bits(one[name], other[name]) and name not in biases]


# -- the bits --------------------------------------------------------------------------------------

ON_ONE_RANK = [
    *(("qwen3", kind) for kind in FORMATS),
    *((family, "int4") for family in ("qwen3_moe", "glm4")),
    *((family, "fp8") for family in ("qwen3_moe", "glm4", "deepseek_v3")),
]


@pytest.mark.parametrize(("family", "kind"), ON_ONE_RANK)
def test_swapped_in_are_the_bits_of_a_conversion(models: Models, family: str, kind: str) -> None:
    plain, converted = tensors_of(models.plain(family)), tensors_of(models.back(family, kind))
    with opened(models, family, kind, bf16=True) as backend:
        with backend.engine_weights.swapped_in():
            inside = exported(backend)
        assert unlike(inside, converted) == []
        assert unlike(exported(backend), plain) == [], "what was trained comes back"
    assert unlike(plain, converted), "the format changes something"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "family", "kind"),
    [
        *(("tp2", "qwen3", kind) for kind in FORMATS if kind != "int4"),
        ("tp2+sp", "qwen3", "int4"),
        ("pp2", "qwen3", "fp8"),
        ("ep2", "qwen3_moe", "int4"),
        ("etp2", "qwen3_moe", "int4-16-asymmetric"),
        ("tp2+ep2", "qwen3_moe", "fp8"),
    ],
)
def test_so_they_are_at_any_layout(
    models: Models, ranks: Pools, layout: str, family: str, kind: str
) -> None:
    """Also where tensor parallelism cuts a group of columns, or a block, in two."""
    flags = {"ref_load": str(models.plain(family)), "bf16": True, **LAYOUTS[layout]}
    for inside, after in ranks.run(2, engine_weights, models.quantised(family, kind), flags):
        assert unlike(inside, tensors_of(models.back(family, kind))) == []
        assert unlike(after, tensors_of(models.plain(family))) == []


@pytest.mark.parametrize("flags", [
    {"embedded_dtype": "bfloat16"}, {"rollout_engine": "sglang", "sglang_dtype": "bfloat16"},
])  # fmt: skip
def test_the_engines_dtype_decides_what_is_rounded(models: Models, flags: dict[str, str]) -> None:
    """A float32 trainer with engines of bfloat16 has the values that those have."""
    expected = {
        name: tensor.float() for name, tensor in tensors_of(models.back("qwen3", "int4")).items()
    }
    with opened(models, "qwen3", "int4", **flags) as backend, backend.engine_weights.swapped_in():
        assert unlike(exported(backend), expected) == []


def test_experts_alone(models: Models) -> None:
    plain, converted = (
        tensors_of(models.plain("qwen3_moe")),
        tensors_of(models.back("qwen3_moe", "int4")),
    )
    opening = opened(models, "qwen3_moe", "int4", bf16=True)
    with opening as backend, backend.engine_weights.swapped_in(experts_only=True):
        inside = exported(backend)
    expected = {
        name: converted[name] if ".experts." in name else tensor for name, tensor in plain.items()
    }
    assert unlike(inside, expected) == [] and unlike(inside, converted)


# -- gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "chosen"), [("qwen3", "fp8", "linears"), ("qwen3_moe", "int4", "linears")]
)
def test_gradients_go_straight_through(models: Models, family: str, kind: str, chosen: str) -> None:
    """They are those of the plain forward pass at the quantised weights, to the bit, and move the
    plain weights."""
    batch = make_batch()
    with single(models.back(family, kind), bf16=True, **LOSS) as backend:
        expected, expected_log_probs = gradients(backend, batch), backend.log_probs(batch)
        reference = backend.log_probs(batch, "reference")
    with opened(models, family, kind, bf16=True, **LOSS) as backend:
        unrounded = gradients(backend, batch)
        assert unlike({"log-probs": torch.cat(backend.log_probs(batch, as_engines=True))},
                      {"log-probs": torch.cat(expected_log_probs)}) == []  # fmt: skip
    with opened(models, family, kind, bf16=True, fake_quantisation=chosen, **LOSS) as backend:
        assert unlike(gradients(backend, batch), expected) == []
        assert unlike(unrounded, expected), "the format changes gradients"
        assert all(torch.equal(*pair) for pair in zip(backend.log_probs(batch), expected_log_probs))
        assert all(
            torch.equal(*pair) for pair in zip(backend.log_probs(batch, "reference"), reference)
        )
        before = exported(backend)
        metrics = backend.train(batch)
        after = exported(backend)
    assert metrics["train/kl_loss"] == 0.0, "the reference is rounded alike"
    moved = {
        name: (after[name].float() - before[name].float()).abs().max().item() for name in before
    }
    # a step of Adam's is the learning rate; one from the rounded weights would be as far as these
    # are
    assert unlike(before, tensors_of(models.plain(family))) == []
    assert all(
        0 < far <= 2.5e-2 for name, far in moved.items() if name.endswith("mlp.down_proj.weight")
    )


def test_several_steps_are_rounded_anew(models: Models) -> None:
    batch = make_batch(num_steps=3)
    with opened(models, "qwen3", "int4", fake_quantisation="linears", **LOSS) as backend:
        backend.train(batch)
        trained = exported(backend)
        with backend.engine_weights.swapped_in():
            rounded = exported(backend)
        canary, plain = (
            backend.canary_log_probs([5, 6, 7]),
            backend.canary_log_probs([5, 6, 7], plain=True),
        )
    assert unlike(trained, rounded) and canary != plain
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())


@pytest.mark.slow
def test_weights_that_are_gathered_late_are_rounded_when_they_are_there(
    models: Models, ranks: Pools
) -> None:
    """With --overlap-param-gather a rank has its own share of a step's result until a forward pass
    asks for more."""
    common = {"ref_load": str(models.plain("qwen3")), "fake_quantisation": "linears"}
    late = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}
    batch = make_batch(num_samples=8, num_steps=2)
    steps = [
        dataclasses.replace(step, micro_batches=[[2 * n, 2 * n + 1]])
        for n, step in enumerate(batch.steps)
    ]
    halves = [
        [dataclasses.replace(shard(batch, members, [[0, 1]]), steps=steps)]
        for members in ([0, 1, 4, 5], [2, 3, 6, 7])
    ]
    plain, overlapped = (
        ranks.run(
            2, train_and_save, models.quantised("qwen3", "int4"), common | flags, halves, None
        )[0]["weights"]
        for flags in ({}, late)
    )
    assert all(torch.allclose(plain[name], overlapped[name], atol=1e-4) for name in plain)


# -- what is measured ------------------------------------------------------------------------------


def test_the_parts_of_the_mismatch(models: Models) -> None:
    """Samples of an engine that computes as the trainer does with the engines' weights: all of it
    is the format's."""
    batch = make_batch()
    with opened(models, "qwen3", "int4", measure_quantisation=True) as backend:
        batch = dataclasses.replace(
            batch, rollout_log_probs=backend.log_probs(batch, as_engines=True)
        )
        metrics = backend.train(batch)
    whole = metrics["train/train_rollout_logprob_abs_diff"]
    assert metrics["train/quantised_rollout_logprob_abs_diff"] == 0.0 < whole
    assert metrics["train/quantisation_logprob_abs_diff"] == pytest.approx(whole, rel=1e-5)


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "flags", "said"),
    [
        (
            "qwen3",
            None,
            {"fake_quantisation": "linears"},
            r"--fake-quantisation linears has no effect(.|\n)*no quant",
        ),
        (
            "qwen3",
            None,
            {"measure_quantisation": True},
            r"--measure-quantisation has no effect(.|\n)*hf-to-int4",
        ),
        (
            "qwen3",
            "int4",
            {"fake_quantisation": "experts"},
            r"experts has no effect(.|\n)*no routed experts",
        ),
        (
            "qwen3",
            "int4",
            {"fake_quantisation": "linears", "measure_quantisation": True},
            r"--measure-quantisation has no effect with --fake-quantisation linears",
        ),
        (
            "qwen3",
            "fp8",
            {"fake_quantisation": "linears", "fp8_format": "e4m3", "bf16": True},
            r"--fake-quantisation linears and --fp8-format exclude each other",
        ),
        (
            "qwen3",
            "fp8",
            {"fp8_format": "e4m3", "fp8_param_gather": True, "bf16": True},
            r"--fp8-param-gather and engines of quantised weights exclude each other",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(
    models: Models, family: str, kind: str | None, flags: dict[str, Any], said: str
) -> None:
    model = models.plain(family) if kind is None else models.quantised(family, kind)
    with pytest.raises(UserError, match=said):
        check_quantised_flags(trainer_config(hf_checkpoint=str(model), **flags))


def test_what_acts_is_not(models: Models) -> None:
    for chosen in ("experts", "linears"):
        check_quantised_flags(
            trainer_config(
                hf_checkpoint=str(models.quantised("qwen3_moe", "int4")), fake_quantisation=chosen
            )
        )
    measured = {"fake_quantisation": "experts", "measure_quantisation": True}
    check_quantised_flags(
        trainer_config(hf_checkpoint=str(models.quantised("qwen3_moe", "int4")), **measured)
    )


def test_the_switch_of_earlier_versions_is_told_of(
    models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    config = {"hf_checkpoint": str(models.quantised("qwen3_moe", "int4"))}
    check_quantised_flags(trainer_config(**config))
    assert (
        "OPEN_TRAINING_INT4_FAKE_QAT_FLAG, which has no effect; pass --fake-quantisation experts"
        in caplog.text
    )
    caplog.clear()
    check_quantised_flags(trainer_config(**config, fake_quantisation="experts"))
    assert "no effect" not in caplog.text
