"""Checkpoints that hold all experts of a layer in one tensor: one expert is read out of a stack,
and a stack is put together from experts on many ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from slime.checkpoints.hf_files import HfReader
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import adaptable
from slime.models.ignore_list import check
from slime.models.layouts import OneExpert, Shard
from slime.models.quantised import Quantisation
from tests.support import stacked_jobs
from tests.support.embedded_models import make_scheduler, make_sequence, run, save_tiny_model
from tests.support.hf_configs import config_of
from tests.support.megatron_jobs import batch, exported, single
from tests.support.stacked_jobs import FORMS, save_stacked, stacked_family
from tests.support.tiny_models import EXPERTS, save_moe
from tests.support.trainer_ranks import Pools

SPEC = family_of(config_of("qwen3_moe")).model_spec(config_of("qwen3_moe"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("models") / "plain")


@given(
    form=st.sampled_from(sorted(FORMS)),
    ranks=st.sampled_from([1, 2, 4]),
    inner=st.sampled_from([4, 8, 12]),
    hidden=st.integers(1, 5),
)
def test_pieces_of_an_expert_make_it_whole_again(
    form: str, ranks: int, inner: int, hidden: int
) -> None:
    up, down = FORMS[form]
    gate_rows = torch.arange(inner * hidden).view(inner, hidden)
    up_rows = gate_rows + 1000
    down_rows = gate_rows.t().contiguous() + 2000
    names = [f"experts.0.{part}_proj.weight" for part in ("gate", "up", "down")]
    stacks = stacked_jobs.stack(dict(zip(names, (gate_rows, up_rows, down_rows))), form)
    for layout, name in ((up, "gate_up_proj"), (down, "down_proj")):
        source = stacks[f"experts.{name}"]
        pieces = [
            layout.load([OneExpert(source, 0)], Shard(rank, ranks), SPEC) for rank in range(ranks)
        ]
        assert torch.equal(layout.export(pieces, SPEC)[0], source[0])
        part = inner // ranks
        wanted = (
            torch.cat([gate_rows[:part], up_rows[:part]]) if layout is up else down_rows[:, :part]
        )
        assert torch.equal(pieces[0], wanted)


def test_one_expert_is_read_without_its_neighbours(tmp_path: Path) -> None:
    stack = torch.arange(3 * 4 * 6.0).view(3, 4, 6)
    save_file({"stack": stack}, tmp_path / "model.safetensors")
    asked: list[Any] = []

    class Recorded:
        def __init__(self, source: Any) -> None:
            self.source = source
            self.shape = source.shape

        def __getitem__(self, index: Any) -> torch.Tensor:
            asked.append(index)
            return self.source[index]

    one = OneExpert(Recorded(HfReader(tmp_path)["stack"]), 1)
    assert one.shape == (4, 6)
    assert torch.equal(one[:], stack[1])
    assert torch.equal(one[:, 2:5], stack[1][:, 2:5])
    assert all(index[0] == slice(1, 2) for index in asked)


@pytest.mark.parametrize("form", FORMS)
def test_trainer_computes_with_and_exports_stacks(plain: Path, tmp_path: Path, form: str) -> None:
    stacked = save_stacked(tmp_path / "stacked", plain, form)
    with single(plain) as backend:
        expected = backend.log_probs(batch())
    with stacked_family(form), single(stacked) as backend:
        found = backend.log_probs(batch())
        back = exported(backend)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    original = load_file(stacked / "model.safetensors")
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)


@pytest.mark.parametrize(
    "layout",
    [
        {"expert_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=lambda layout: " ".join(layout),
)
def test_every_rank_yields_whole_stacks(
    plain: Path, tmp_path: Path, layout: dict[str, Any], ranks: Pools
) -> None:
    form = "transposed, interleaved"
    stacked = save_stacked(tmp_path / "stacked", plain, form)
    original = load_file(stacked / "model.safetensors")
    for back in ranks.run(2, stacked_jobs.load_and_export, stacked, form, layout):
        assert back.keys() == original.keys()
        assert all(torch.equal(back[name], original[name]) for name in original)


@pytest.mark.parametrize("form", ["gate above up", "transposed"])
def test_embedded_engine_holds_stacks_as_they_are(tmp_path: Path, form: str) -> None:
    plain = [
        save_tiny_model(tmp_path / f"plain{seed}", "qwen3_moe", seed=seed) for seed in range(2)
    ]
    stacked = [
        save_stacked(tmp_path / f"stacked{seed}", one, form) for seed, one in enumerate(plain)
    ]

    def log_probs(scheduler: Any) -> list[float]:
        sequence = make_sequence(list(range(1, 20)), max_new_tokens=0, logprob_start=0)
        run(scheduler, [sequence])
        return sequence.input_logprobs

    expected = [log_probs(make_scheduler(directory)) for directory in plain]
    with stacked_family(form):
        scheduler = make_scheduler(stacked[0])
        assert log_probs(scheduler) == pytest.approx(expected[0], abs=2e-6)
        pushed = load_file(stacked[1] / "model.safetensors")
        scheduler.store.update(pushed.items(), "2")
        assert log_probs(scheduler) == pytest.approx(expected[1], abs=2e-6)
        assert not scheduler.store.missing()
        held = scheduler.store.held
        assert all(torch.equal(held[name], tensor) for name, tensor in pushed.items())
        # as on a GPU, where released memory moves
        scheduler.store._move(torch.device("cpu"))
        assert log_probs(scheduler) == pytest.approx(expected[1], abs=2e-6)


def test_a_stack_is_a_linear_layer_for_adapters_alone() -> None:
    with stacked_family("transposed"):
        config = {**config_of("qwen3_moe"), "num_experts": EXPERTS}
        family = family_of(config)
        spec = family.model_spec(config)
        shapes = dict(family.hf_tensors(spec))
        stack = "model.layers.0.mlp.experts.gate_up_proj"
        inner = int(spec.transformer["moe_ffn_hidden_size"])
        assert shapes[stack] == (EXPERTS, spec.hidden_size, 2 * inner)
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        assert adaptable(family, spec) == layers
        sizes = [
            parameter.numel
            for parameter in family.parameters(spec, range(1))
            if parameter.is_expert
        ]
        assert sum(sizes) == 3 * EXPERTS * inner * spec.hidden_size
        quantisation = Quantisation.read(
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
        )
        assert quantisation is not None
        with pytest.raises(UserError, match="their experts are stacked"):
            check(family, spec, replace(quantisation))
