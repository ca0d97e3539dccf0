"""Runs of experts: the same weights as one by one, from any layout, in any engine that holds them
in its own way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from slime.config import make_config
from slime.embedded.architecture import Architecture
from slime.engines.api import WEIGHT_LOADER
from slime.engines.launch import EnginePlace
from slime.engines.sglang import weight_loader
from slime.engines.sglang.weight_probe import HeldExperts, Tree, _answer
from slime.engines.wire.abilities import Abilities
from slime.engines.wire.buckets import Bucket, pack
from slime.engines.wire.expert_runs import ExpertRun, bounds
from slime.errors import UserError
from slime.weights.engine_check import SliceDigest, slice_key
from slime.weights.ipc import _bucket_and_table
from slime.weights.route import check_experts, takes_runs
from slime.weights.transport import EngineSlots
from tests.support import expert_run_jobs
from tests.support.embedded_models import save_tiny_model
from tests.support.sglang_servers import FakeSGLang, fake_sglang
from tests.support.trainer_ranks import Pools

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

LAYOUTS: list[dict[str, Any]] = [
    {"expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
]
ADAPTERS: list[dict[str, Any]] = [
    {},
    {"lora_rank": 4},
    {"lora_rank": 4, "lora_experts": "shared-outer", "lora_rank_by_topk": True},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "moe", "qwen3_moe", num_experts=8, mlp_only_layers=[]
    )


@pytest.fixture(scope="module")
def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(model_dir / "model.safetensors")


@given(st.integers(1, 40), st.integers(0, 50), st.integers(0, 300))
def test_runs_are_all_experts_once_and_small(count: int, nbytes: int, limit: int) -> None:
    ranges = bounds(count, nbytes, limit)
    assert [expert for start, stop in ranges for expert in range(start, stop)] == list(range(count))
    assert all((stop - start) * nbytes <= limit or stop == start + 1 for start, stop in ranges)


@pytest.mark.parametrize(
    ("layout", "adapters"),
    [
        *((layout, ADAPTERS[0]) for layout in LAYOUTS),
        (LAYOUTS[0], ADAPTERS[2]),
        (LAYOUTS[1], ADAPTERS[1]),
        (LAYOUTS[2], ADAPTERS[2]),
    ],
)
def test_runs_hold_what_single_tensors_hold(
    layout: dict[str, Any], adapters: dict[str, Any], model_dir: Path, ranks: Pools
) -> None:
    flags = layout | adapters
    for seen in ranks.run(2, expert_run_jobs.compare_with_singles, model_dir, flags):
        assert seen["different"] == [] and seen["several_in_a_run"] and seen["fewer"]


def in_runs(weights: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """As `ModelSource` names them."""
    found: dict[str, torch.Tensor] = {}
    families: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name, tensor in weights.items():
        owner, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            found[name] = tensor
            continue
        families.setdefault((f"{owner}.mlp.experts", rest.split(".", 1)[1]), []).append(tensor)
    for (owner, leaf), _ in families.items():
        count = sum(name.startswith(f"{owner}.") and name.endswith(leaf) for name in weights)
        for start, stop in bounds(count, 1, length):
            stacked = [weights[f"{owner}.{number}.{leaf}"] for number in range(start, stop)]
            found[f"{owner}.{start}-{stop - 1}.{leaf}"] = torch.stack(stacked)
    return found


def sent(bucket: Bucket) -> list[tuple[str, torch.Tensor]]:
    """What SGLang hands to the loader."""
    pairs: list[tuple[str, torch.Tensor]] = _bucket_and_table(bucket)(bucket.buffer)  # type: ignore[arg-type]
    return pairs


def load_all(model: nn.Module, runs: dict[str, torch.Tensor], limit: int = 20_000) -> None:
    for bucket in pack(runs.items(), limit):
        weight_loader.load(model, sent(bucket))


def rank_of(weights: dict[str, torch.Tensor], model_dir: Path, rank: int, size: int) -> nn.Module:
    """With rubbish in it."""
    from sglang.modules import sharded_model

    rubbish = {name: torch.full_like(tensor, 7.0) for name, tensor in weights.items()}
    return sharded_model(rubbish, Architecture.from_dir(model_dir), rank, size)


@pytest.mark.parametrize("length", [1, 3, 8])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_a_rank_takes_its_part(
    rank: int, size: int, length: int, weights: dict[str, torch.Tensor], model_dir: Path
) -> None:
    from sglang.modules import sharded_model

    model = rank_of(weights, model_dir, rank, size)
    calls: list[str] = []
    own = model.load_weights
    model.load_weights = lambda pairs: (calls.extend(name for name, _ in pairs), own(pairs))  # type: ignore[assignment]
    load_all(model, in_runs(weights, length))
    wanted = sharded_model(weights, Architecture.from_dir(model_dir), rank, size)
    for (name, held), (_, right) in zip(
        model.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert torch.equal(held, right), name
    # one of each projection went the long way
    assert sum(".experts." in name for name in calls) == 3


def test_experts_of_other_ranks_are_left_out(
    weights: dict[str, torch.Tensor], model_dir: Path
) -> None:
    """An engine with expert parallelism: the second of two ranks, which has the second half of the
    experts."""
    model = rank_of(weights, model_dir, 0, 1)
    for module in model.modules():
        if "moe_ep_rank" in vars(module):
            half = module.w13_weight.shape[0] // 2
            for leaf in ("w13_weight", "w2_weight"):
                module._parameters[leaf] = nn.Parameter(
                    module._parameters[leaf][half:].clone(), requires_grad=False
                )
            module.moe_ep_rank = 1
    runs = in_runs(weights, 3)  # one of them lies across the border
    load_all(model, runs)
    tree = Tree(model)
    for name, tensor in weights.items():
        held = tree.find(name, tuple(tensor.shape))
        if held is None:
            assert int(name.split(".experts.")[1].split(".")[0]) < half
        else:
            assert torch.equal(held.tensor, tensor)


def test_experts_in_another_order_go_the_long_way(
    weights: dict[str, torch.Tensor], model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that keeps up above gate: what its own loader does is what counts."""
    model = rank_of(weights, model_dir, 0, 1)
    find = Tree.find

    def swapped(tree: Tree, name: str, shape: tuple[int, ...]) -> Any:
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        parts = [other.get(part, part) if ".experts." in name else part for part in name.split(".")]
        return find(tree, ".".join(parts), shape)

    monkeypatch.setattr("sglang.modules.Tree.find", swapped)
    load_all(model, in_runs(weights, 3))
    monkeypatch.undo()
    tree = Tree(model)
    for name, tensor in weights.items():
        right = (
            name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")
        )
        held = tree.find(right if ".experts." in name else name, tuple(tensor.shape))
        assert held is not None and torch.equal(held.tensor, tensor), name


@pytest.mark.parametrize("is_module", [False, True])
def test_kernels_that_want_the_gate_below_are_known(
    is_module: bool, weights: dict[str, torch.Tensor], model_dir: Path
) -> None:
    """Else a right push would be reported as a wrong one; the method may be a module or not."""
    model = rank_of(weights, model_dir, 0, 1)
    method = nn.Module() if is_module else SimpleNamespace()
    method.load_up_proj_weight_first = True
    for module in [module for module in model.modules() if "w13_weight" in module._parameters]:
        module.quant_method = method
    load_all(model, in_runs(weights, 3))
    tree = Tree(model)
    gates = [name for name in weights if name.endswith("experts.1.gate_proj.weight")]
    for gate in gates:
        owner = tree.modules[gate.removesuffix(".1.gate_proj.weight")]
        up = weights[gate.replace("gate_proj", "up_proj")]
        assert torch.equal(owner.w13_weight[1], torch.cat([up, weights[gate]]))
        held = tree.find(gate, tuple(weights[gate].shape))
        assert held is not None and torch.equal(held.tensor, weights[gate])
    assert gates


@pytest.mark.parametrize("size", [1, 2])
def test_a_changed_number_shows(
    size: int, weights: dict[str, torch.Tensor], model_dir: Path
) -> None:
    from sglang.modules import sharded_model

    runs = {name: run for name, run in in_runs(weights, 3).items() if ExpertRun.parse(name)}
    request = {"tensors": {name: list(run.shape) for name, run in runs.items()}, "method": "words"}
    for rank in range(size):
        model = sharded_model(weights, Architecture.from_dir(model_dir), rank, size)
        slices = _answer(model, {"action": "layout", **request})["slices"]
        held = _answer(model, {"action": "fingerprint", **request})["fingerprints"]
        digest = SliceDigest({name: [tuple(part)] for name, part in slices.items()}, "words")
        for name, run in runs.items():
            assert digest(name, run) == {slice_key(slices[name]): held[name]}
            dim, start, _ = slices[name]
            changed = run.clone()
            changed[tuple(start if axis == dim else -1 for axis in range(3))] += 1
            assert digest(name, changed) != {slice_key(slices[name]): held[name]}


def test_a_part_that_is_cut_twice_is_not_compared() -> None:
    held = HeldExperts(torch.zeros(2, 4, 3), 1, 3, 1, 4, "p")
    assert held.of(torch.zeros(5, 8, 3)).shape == held.target.shape
    tree = Tree(nn.Module())
    tree.experts = lambda run: held  # type: ignore[method-assign]
    run = ExpertRun("owner", 0, 4, "gate")
    assert tree._run(run, (5, 8, 3)) is None
    assert tree._run(run, (5, 4, 3)) is not None


def test_only_engines_that_leave_experts_in_place_take_runs() -> None:
    info = {
        "custom_weight_loader": [WEIGHT_LOADER],
        "init_expert_location": "trivial",
        "enable_eplb": False,
    }
    fine = Abilities.read(info)
    assert takes_runs("ipc", [fine, fine])
    assert not takes_runs("broadcast", [fine])
    for change in (
        {"custom_weight_loader": None},
        {"enable_eplb": True},
        {"quantization": "fp8"},
        {"init_expert_location": "map.json"},
        {"ep_num_redundant_experts": 4},
    ):
        assert not takes_runs("ipc", [fine, Abilities.read({**info, **change})])
    assert takes_runs("ipc", [Abilities.read({**info, "quantization": "fp8"})], quantised=True)


@pytest.mark.parametrize("backend", ["flashinfer_trtllm", "flashinfer_trtllm_routed"])
def test_engines_that_permute_experts_are_refused(backend: str) -> None:
    fine = {
        "http://a": {"moe_runner_backend": "auto"},
        "http://b": {"moe_runner_backend": "triton"},
        "http://c": {},
    }
    check_experts(fine)
    with pytest.raises(
        UserError, match=f"engine http://b cannot take experts.*{backend}"
    ) as caught:
        check_experts({**fine, "http://b": {"moe_runner_backend": backend}})
    assert "--sglang-moe-runner-backend triton" in str(caught.value)


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeSGLang]:
    """An engine of two ranks."""
    words = {
        "rollout_engine": "sglang",
        "fp32": True,
        "rollout_batch_size": 4,
        "num_rollout": 1,
        "colocate": True,
    }
    config = make_config(**words, hf_checkpoint=str(model_dir))  # type: ignore[arg-type]
    places = [EnginePlace(number=0, num_gpus=2)]
    with fake_sglang(config, model_dir, tmp_path_factory.mktemp("log"), *places) as [found]:
        yield found


def test_a_push_in_runs_arrives_and_is_proved(
    server: FakeSGLang, model_dir: Path, weights: dict[str, torch.Tensor], ranks: Pools
) -> None:
    server.forget()
    slots = EngineSlots(server.url, (0, 1))
    [receipts, names, fallback], _ = ranks.run(2, expert_run_jobs.push_in_runs, model_dir, [slots])
    assert all(receipt.full and set(receipt.checked) == set(names) for receipt in receipts)
    assert any(ExpertRun.parse(name) for name in names) and len(names) < len(weights)
    formats = {call["load_format"] for call in server.calls() if call.get("weight_version")}
    # the latter once runs could not be compared
    assert formats == {WEIGHT_LOADER, "flattened_bucket"}
    assert set(fallback) == set(weights)
