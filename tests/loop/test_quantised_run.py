"""Runs whose engines hold INT4 or FP8 weights while the trainer keeps plain ones: every push is
compared as a whole, the trainer computes what engines compute, and what is learnt with plain
engines is learnt with these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.peft_files import read_config
from slime.checkpoints.quantised_files import plain_weights, quantise_directory
from slime.errors import UserError
from slime.models import family_of, read_hf_config
from slime.models.ignore_list import recommended
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.quantised_models import tensors_of
from tests.support.runs import GRPO, Run

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")


TOLERANCE = 1e-4  # float32, absolute, per token
APART = ("quantised_rollout_logprob_abs_diff", "quantisation_logprob_abs_diff")


@pytest.fixture(scope="module")
def quantised(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain, target = models["glm4_moe"], tmp_path_factory.mktemp("int4") / "glm4_moe"
    rules = recommended(plain_weights(plain)[1])
    quantise_directory(plain, target, Quantisation("compressed-tensors", Int4(16), rules))
    return target


def test_engines_hold_int4_and_the_trainer_does_not(
    run: Run, models: dict[str, Path], quantised: Path
) -> None:
    flags: list[Any] = [
        "--hf-checkpoint",
        quantised,
        "--ref-load",
        models["glm4_moe"],
        "--check-weight-update-equal",
    ]
    flags += [
        "--colocate", "--num-rollout", 2, "--save-hf", "{run}/exported", "--measure-quantisation"
    ]  # fmt: skip
    result = run("quantised", *GRPO, *flags)
    stored = tensors_of(quantised)
    # the first push is before the first rollout, the others after each
    checked = result.series("perf/update_weights/checked_tensors")
    assert checked and set(checked) == {len(stored)}
    assert any(name.endswith(".weight_packed") for name in stored)
    # all of the difference is the format's: with equal weights there is none, for the canary
    # neither
    left, of_format = (result.series(f"train/{name}") for name in APART)
    assert max(left) <= TOLERANCE < min(of_format)
    assert result.series("train/train_rollout_logprob_abs_diff") == pytest.approx(
        of_format, abs=TOLERANCE
    )
    assert max(result.series("train/canary_logprob_abs_diff_max")) <= TOLERANCE
    assert min(result.series("train/canary_quantisation_abs_diff")) > TOLERANCE
    log = "".join(path.read_text() for path in (result.path / "logs").glob("*.log"))
    assert "weights version 3: " in log and "zeros alone" not in log
    exported = result.path / "exported"
    family = family_of(exported)
    HfReader(exported).verify(family, family.model_spec(exported))
    assert "quantization_config" not in read_hf_config(exported)


@pytest.mark.full  # what fake quantisation computes is in tests/unit/test_engine_weights.py
def test_with_fake_quantisation_trainer_and_engine_agree_on_every_token(
    run: Run, models: dict[str, Path], quantised: Path
) -> None:
    flags: list[Any] = [
        "--hf-checkpoint",
        quantised,
        "--ref-load",
        models["glm4_moe"],
        "--colocate",
    ]
    flags += ["--fake-quantisation", "experts", "--num-rollout", 2]
    flags += ["--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3"]
    result = run("fake-quantised", *GRPO, *flags)
    apart = result.series("train/train_rollout_logprob_abs_diff_max")
    assert len(apart) == 2 and 0 < max(apart) <= TOLERANCE, apart
    assert result.series("train/kl_loss")[0] == 0.0, "the reference is rounded as the policy is"


def test_adapters_are_trained_beside_the_base_that_engines_hold(run: Run, quantised: Path) -> None:
    """From the quantised directory alone: trainer and engines agree on every token, with adapters
    and without, and the base is compared part by part."""
    flags: list[Any] = ["--hf-checkpoint", quantised, "--colocate", "--num-rollout", 2]
    flags += ["--lora-rank", 4, "--lr", "1e-2", "--use-kl-loss", "--kl-loss-coef", "0.01"]
    result = run("quantised-adapters", *GRPO, *flags)
    apart = result.series("train/train_rollout_logprob_abs_diff_max")
    assert len(apart) == 2 and max(apart) <= TOLERANCE, apart
    assert max(result.series("train/canary_logprob_abs_diff_max")) <= TOLERANCE
    assert max(result.series("train/canary_adapter_abs_diff")) > TOLERANCE
    log = "".join(path.read_text() for path in (result.path / "logs").glob("*.log"))
    assert f"base is the trainer's: {len(tensors_of(quantised))} weights compared" in log
    assert "beside a frozen base with the values of INT4 in groups of 16" in log
    assert read_config(result.path / "model")["base_model_name_or_path"] == str(quantised)


#: All Linear layers, the output layer that learns too: more than any recommended list leaves to
#: quantise.
HARDEST = {
    "fp8": Quantisation("fp8", Fp8((16, 16))),
    "int4": Quantisation("compressed-tensors", Int4(16), ("model.embed_tokens.weight",)),
}
CORRECTIONS: dict[str, list[Any]] = {
    "tis": ["--use-tis"],
    "icepop": ["--use-tis", "--tis-mode", "icepop", "--tis-clip-low", "0.5", "--tis-clip", "5"],
    "fake": ["--fake-quantisation", "linears"],
}


@pytest.mark.full
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", HARDEST)
def test_the_reward_rises_with_quantised_rollouts(
    run: Run, models: dict[str, Path], tmp_path: Path, kind: str, correction: str
) -> None:
    """As much as with plain ones (`test_learning`)."""
    quantise_directory(models["llama"], tmp_path / kind, HARDEST[kind])
    flags: list[Any] = [
        "--hf-checkpoint",
        tmp_path / kind,
        "--ref-load",
        models["llama"],
        "--bf16",
        "--colocate",
    ]
    result = run(
        f"learn-{kind}-{correction}", *GRPO, *flags, "--num-rollout", 14, *CORRECTIONS[correction]
    )
    rewards = result.series("rollout/raw_reward")
    assert len(rewards) == 14
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3, rewards


@pytest.mark.full
def test_engines_alone_need_no_plain_weights(run: Run, quantised: Path) -> None:
    """--debug-rollout-only tells whether a quantised checkpoint generates by itself."""
    flags: list[Any] = ["--hf-checkpoint", quantised, "--debug-rollout-only", "--num-rollout", 1]
    result = run("quantised-rollout", *GRPO, *flags)
    assert result.series("rollout/response_len/mean") and not list(
        (result.path / "logs").glob("trainer*")
    )


def test_the_trainer_cannot_start_from_quantised_weights(run: Run, quantised: Path) -> None:
    with pytest.raises(UserError, match=r"holds weights quantised to(.|\n)*--ref-load"):
        run("quantised-alone", *GRPO, "--hf-checkpoint", quantised, "--num-rollout", 1)
