"""`slime align` where engines hold quantised weights, and what a run's samples and weights are
known by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.quantised_files import quantise_directory
from slime.cli.align import _model
from slime.config import make_config
from slime.config.config import Config
from slime.diagnosis.align import dumps
from slime.diagnosis.align.engines import EngineHere
from slime.diagnosis.align.evidence import Scored
from slime.diagnosis.align.examine import Result, text
from slime.diagnosis.align.prepare import Options, examined
from slime.diagnosis.align.reference import Reference, Sampling
from slime.embedded.quantised_weights import import_library_for
from slime.models.quantised import Fp8, Int4, Quantisation
from slime.rollout.debug_data import save_rollout
from slime.samples.types import Sample
from slime.trainer.dumps import RankDump, save_train_data
from tests.support.embedded_models import save_tiny_model

IGNORE = ("lm_head", "model.embed_tokens.weight")
FORMATS = [
    ("qwen2", Quantisation("compressed-tensors", Int4(16), IGNORE)),
    ("qwen2", Quantisation("compressed-tensors", Int4(16, False), (*IGNORE, r"re:.*[qkv]_proj.*"))),
    ("qwen2", Quantisation("fp8", Fp8((16, 16)), IGNORE)),
    ("qwen3_moe", Quantisation("compressed-tensors", Int4(16), (*IGNORE, r"re:.*mlp\.gate\..*"))),
]


def config_of(**flags: Any) -> Config:
    return make_config(fp32=True, rollout_batch_size=1, rollout_temperature=1.0, **flags)


@pytest.mark.parametrize(("family", "quantisation"), FORMATS, ids=str)
def test_an_engine_of_quantised_weights(
    family: str, quantisation: Quantisation, tmp_path: Path
) -> None:
    """Trained are the weights of --ref-load: those that the engine stores are named as what parts
    the two."""
    pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")
    plain, small = save_tiny_model(tmp_path / "plain", family), tmp_path / "small"
    quantise_directory(plain, small, quantisation)
    config = config_of(hf_checkpoint=str(small), ref_load=str(plain))
    assert _model(config, {}) == plain
    import_library_for(str(small))
    engine = EngineHere(small, "float32", longest=64)
    reference = Reference(plain, torch.float32, Sampling(1.0))
    samples = []
    for seed in range(3):
        tokens = torch.randint(256, (40,), generator=torch.Generator().manual_seed(seed))
        counted = torch.ones(32).bool()
        sample = Scored(f"sample {seed}", tokens, torch.zeros(32).double(), None, counted)
        scores = torch.tensor(engine.score([sample], together=False)[0][-32:]).double()
        samples.append(replace(sample, engine=scores, trainer=reference.log_probs(sample)))
    result = examined(config, samples, Options(plain, with_parts=False), engine)
    best = result.reported[0]
    assert best.cause.trouble.name == "align-quantisation" and best.best.share > 0.99, text(result)
    assert (
        f"as --hf-checkpoint stores them: {quantisation}" in best.best.what
        and best.best.side == "engine"
    )
    held = engine.fingerprints()
    all_of_them = (
        f"all {len(held)} of {len(held)} tensors of the engine that can be compared are the "
        "trainer's"
    )
    assert _said_of_weights(result) == all_of_them
    scale = "weight_scale_inv" if quantisation.method == "fp8" else "weight_scale"
    name = f"model.layers.1.self_attn.o_proj.{scale}"
    stored = engine.scheduler.store.held
    parts = {
        part: stored[part].clone() for part in held if part.startswith(name.removesuffix(scale))
    }
    parts[name] *= 2
    engine.scheduler.store.update(parts.items())
    damaged = examined(config, samples, Options(plain, with_parts=False), engine)
    assert _said_of_weights(damaged) == f"1 of {len(held)} tensors differ: {name}"


def _said_of_weights(result: Result) -> str:
    return next(one.best.what for one in result.ranked if one.cause.trouble.name == "align-weights")


def test_samples_of_one_execution_are_found_by_their_tokens(tmp_path: Path) -> None:
    """A trajectory that fans out gives samples of one index; none of them was sent other tokens."""
    generated, rows = [], []
    for number, tokens in enumerate(([1, 2, 3, 4], [1, 2, 5, 6, 7], [9, 8, 7])):
        made = Sample(index=min(number, 1), prompt=f"{number}", tokens=tokens[:1])
        made.append_response_tokens(tokens=tokens[1:], log_probs=[-0.5] * (len(tokens) - 1))
        generated.append(made)
        row = {
            "sample_index": made.index,
            "tokens": torch.tensor(tokens),
            "response_length": len(tokens) - 1,
        }
        rows.append(row | {"raw_reward": 0.0, "log_probs": torch.zeros(len(tokens) - 1)})
        rows[-1]["rollout_log_probs"] = torch.full((len(tokens) - 1,), -0.5)
    rows[0]["tokens"] = torch.tensor([1, 2, 3, 3])  # and one that was
    paths = [save_rollout(str(tmp_path / "rollout_{rollout_id}.pt"), 0, generated[::-1])]
    paths.append(
        save_train_data(str(tmp_path / "train_{rollout_id}.pt"), 0, [RankDump(0, rows, [])])
    )
    found = dumps.read(paths)
    assert [sample.prompt for sample in found] == ["0", "1", "2"]
    assert [None if sample.sent is None else sample.sent.tolist() for sample in found] == [
        [1, 2, 3, 4],
        None,
        None,
    ]


def test_the_weights_that_a_run_began_with(tmp_path: Path) -> None:
    base, loaded, saved = (
        save_tiny_model(tmp_path / "base"),
        save_tiny_model(tmp_path / "loaded"),
        tmp_path / "saved",
    )
    (saved / "iter_0000003").mkdir(parents=True)
    (saved / "latest_checkpointed_iteration.txt").write_text("3")
    flags = {"hf_checkpoint": str(base), "save": str(saved)}
    assert _model(config_of(**flags), {}) == base
    assert _model(config_of(**flags, load=str(saved)), {}) == base
    # though --save holds what came of it
    assert _model(config_of(**flags, load=str(loaded)), {}) == loaded
    assert _model(config_of(**flags, ref_load=str(loaded)), {}) == loaded
