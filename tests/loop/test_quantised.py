"""A run whose engines hold INT4 weights while the trainer keeps plain ones; every push is compared as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.checkpoints.hf_files import HfReader
from slime.checkpoints.quantised_files import plain_weights, quantise_directory
from slime.errors import UserError
from slime.models import family_of, read_hf_config
from slime.models.ignore_list import recommended
from slime.models.quantised import Int4, Quantisation
from tests.support.quantised_models import tensors_of
from tests.support.runs import GRPO, Run

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")


@pytest.fixture(scope="module")
def quantised(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain, target = models["glm4_moe"], tmp_path_factory.mktemp("int4") / "glm4_moe"
    rules = recommended(plain_weights(plain)[1])
    quantise_directory(plain, target, Quantisation("compressed-tensors", Int4(16), rules))
    return target


def test_engines_hold_int4_and_the_trainer_does_not(run: Run, models: dict[str, Path], quantised: Path) -> None:
    flags: list[Any] = ["--hf-checkpoint", quantised, "--ref-load", models["glm4_moe"], "--check-weight-update-equal"]
    flags += ["--colocate", "--num-rollout", 2, "--save-hf", "{run}/exported"]
    result = run("quantised", *GRPO, *flags)
    stored = tensors_of(quantised)
    # the first push is before the first rollout, the others after each
    checked = result.series("perf/update_weights/checked_tensors")
    assert checked and set(checked) == {len(stored)}
    assert any(name.endswith(".weight_packed") for name in stored)
    log = "".join(path.read_text() for path in (result.path / "logs").glob("*.log"))
    assert "weights version 3: " in log and "zeros alone" not in log
    exported = result.path / "exported"
    family = family_of(exported)
    HfReader(exported).verify(family, family.model_spec(exported))
    assert "quantization_config" not in read_hf_config(exported)


def test_engines_alone_need_no_plain_weights(run: Run, quantised: Path) -> None:
    """--debug-rollout-only tells whether a quantised checkpoint generates by itself."""
    flags: list[Any] = ["--hf-checkpoint", quantised, "--debug-rollout-only", "--num-rollout", 1]
    result = run("quantised-rollout", *GRPO, *flags)
    assert result.series("rollout/response_len/mean") and not list((result.path / "logs").glob("trainer*"))


def test_the_trainer_cannot_start_from_quantised_weights(run: Run, quantised: Path) -> None:
    with pytest.raises(UserError, match=r"holds weights quantised to(.|\n)*--ref-load"):
        run("quantised-alone", *GRPO, "--hf-checkpoint", quantised, "--num-rollout", 1)
