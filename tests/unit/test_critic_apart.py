"""A critic with its own layout, on ranks of its own or on the policy's: the numbers of one with the
policy's layout, at any two layouts; its part of checkpoints; what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime.checkpoints.critic_part import critic_records, is_part_written, take_critic
from slime.checkpoints.directory import (
    check_contents,
    iteration_name,
    partial_dir,
    read_manifest,
)
from slime.checkpoints.load_plan import resolve_load
from slime.errors import UserError
from slime.models.layout_rules import check_critic_layout, check_layout, layout_of
from slime.models.layouts import Layout
from slime.placement import PlacementPlan, critic_placed
from slime.processes.host import free_port
from slime.samples.batch import TrainBatch
from slime.trainer.megatron.critic_process import CriticProcess
from slime.trainer.megatron.parallel import RankInfo
from slime.trainer.memory import OutOfMemory
from slime.trainer.non_finite import NonFiniteTraining
from slime.trainer.role import roles_of
from tests.support import parity
from tests.support.critic_flags import TRAINING
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import Pools, make_batch, shard, tiny_spec, trainer_config

TP2, PP2, CP2, SP, VIRTUAL = parity.TP2, parity.PP2, parity.CP2, parity.SP, parity.VIRTUAL
#: Of a layout: ranks, data-parallel size, flags.
ALONE: tuple[int, int, dict[str, Any]] = (1, 1, {})


def of_critic(size: int, layout: dict[str, Any]) -> dict[str, Any]:
    """The flags of a critic on so many ranks of its own, or with 0 on the policy's; sizes that are
    not named are 1."""
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
    names = [f"{one}_parallel_size" for one in sizes]
    own = {f"critic_{name}": layout.get(name, 1) for name in names}
    own["critic_sequence_parallel"] = bool(layout.get("sequence_parallel"))
    return {**({"critic_num_gpus_per_node": size} if size else {}), **own}


class Driver:
    """What the driver does: it carries values and returns between the two groups of ranks."""

    def __init__(self, port: int, is_master: bool) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, is_master=is_master)

    def put(self, name: str, rank: int, value: Any) -> None:
        self.store.set(f"{name} {rank}", pickle.dumps(value))

    def all_of(self, name: str, ranks: int) -> list[Any]:
        return [pickle.loads(self.store.get(f"{name} {rank}")) for rank in range(ranks)]

    def end(self, rank: int, ranks: int) -> None:
        """Keep the store, which goes with the first rank, until no other one needs it."""
        self.put("ended", rank, True)
        if rank == 0:
            self.all_of("ended", ranks)


def merged(parts: list[dict[int, Any]]) -> dict[int, Any]:
    return {place: values for part in parts for place, values in part.items()}


def two_groups_job(
    info: Any,
    flags: dict[str, Any],
    ports: tuple[int, int],
    policy: tuple[int, list[TrainBatch]],
    critic: tuple[int, list[TrainBatch]],
    rollouts: int,
    saves: bool = False,
) -> dict[str, Any]:
    """Some rollouts on the ranks of both groups; metrics of each."""
    from slime.trainer.megatron.backend import MegatronBackend

    num_policy, policy_batches = policy
    num_critic, critic_batches = critic
    config = trainer_config(**{**TRAINING, **flags}, actor_num_gpus_per_node=num_policy)
    driver = Driver(ports[1], is_master=info.rank == 0)
    metrics: list[dict[str, float]] = []
    if info.rank < num_policy:
        own = RankInfo(info.rank, num_policy, info.rank, info.master_addr, info.master_port)
        backend = MegatronBackend(config, own)
        backend.setup()
        assert backend.critic is None
        driver.put("plan", info.rank, backend.plan)
        seen: list[dict[int, Any]] = []
        for rollout in range(rollouts):
            backend.score(policy_batches[backend.data_parallel_rank])
            values = merged(driver.all_of(f"values {rollout}", num_critic))
            seen.append(values)
            driver.put(f"returns {rollout}", info.rank, backend.returns(values))
            metrics.append(backend.learn())
        if saves:
            driver.all_of("saving", num_critic)
            backend.save(backend.next_rollout_id + rollouts - 1)
            backend.finish_saving()
        driver.end(info.rank, num_policy + num_critic)
        return {
            "reporting": backend.is_reporting_rank,
            "metrics": metrics,
            "is_critic": False,
            "values": seen,
        }
    own = RankInfo(info.rank - num_policy, num_critic, 0, info.master_addr, ports[0])
    process = CriticProcess(config, own)
    process.setup()
    plan = driver.all_of("plan", 1)[0]
    process.load(plan)
    for rollout in range(rollouts):
        batch = critic_batches[process.data_parallel_rank]
        driver.put(f"values {rollout}", own.rank, process.values(batch))
        found = driver.all_of(f"returns {rollout}", num_policy)
        returns, masks = (merged([part[i] for part in found]) for i in range(2))
        metrics.append(process.learn(returns, masks))
    if saves:
        process.save(plan.start_rollout_id + rollouts - 1)
        driver.put("saving", own.rank, True)
        process.finish_saving()
    driver.end(info.rank, num_policy + num_critic)
    return {"reporting": process.is_reporting_rank, "metrics": metrics, "is_critic": True}


def batches_for(data_parallel: int) -> list[TrainBatch]:
    whole = make_batch(parity.MICRO_BATCHES)
    return [shard(whole, *plan) for plan in parity.DATA_PARALLEL[data_parallel]]


def together(
    ranks: Pools,
    policy: tuple[int, int, dict[str, Any]],
    critic: tuple[int, int, dict[str, Any]],
    rollouts: int,
    **more: Any,
) -> tuple[list[dict[str, float]], list[dict[int, Any]]]:
    """Run both groups; of each rollout the metrics of both, and the values."""
    saves = more.pop("saves", False)
    flags = {**policy[2], **of_critic(critic[0], critic[2]), **more}
    found = ranks.run(
        policy[0] + critic[0],
        two_groups_job,
        flags,
        (free_port(), free_port()),
        (policy[0], batches_for(policy[1])),
        (critic[0], batches_for(critic[1])),
        rollouts,
        saves,
    )
    [of_policy] = [one for one in found if one["reporting"] and not one["is_critic"]]
    [critics] = [one for one in found if one["reporting"] and one["is_critic"]]
    pairs = zip(critics["metrics"], of_policy["metrics"], strict=True)
    return [numbers(a | b) for a, b in pairs], of_policy["values"]


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_tiny("qwen3", directory, layers=2)
    return directory


def assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def assert_same_values(found: list[dict[int, Any]], expected: list[dict[int, Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() == set(range(6))
        for place, values in theirs.items():
            assert ours[place] == pytest.approx(values, rel=1e-6, abs=1e-6)


def values_of(critic: Any, batch: TrainBatch) -> dict[int, Any]:
    """The values of a shard, by position; {} on ranks without them."""
    outputs = critic.outputs(batch)
    if outputs is None:
        return {}
    scale = critic.return_scale
    return dict(zip(batch.positions, (scale.restored(one).numpy() for one in outputs)))


def shared_job(
    info: Any, flags: dict[str, Any], batches: list[TrainBatch], rollouts: int
) -> dict[str, Any]:
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(**{**TRAINING, **flags}, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    assert backend.critic is not None
    batch = batches[backend.data_parallel_rank]
    metrics = []
    values = []
    for _ in range(rollouts):
        values.append(values_of(backend.critic, batch))
        metrics.append(numbers(backend.train(batch)))
    if "save" in flags:
        backend.save(backend.next_rollout_id + rollouts - 1)
        backend.finish_saving()
    return {"start": backend.next_rollout_id, "metrics": metrics, "values": values}


def two_layouts_job(
    info: Any,
    flags: dict[str, Any],
    policy_batches: list[TrainBatch],
    critic_batches: list[TrainBatch],
    rollouts: int,
) -> dict[str, Any]:
    """Some rollouts of a critic with its own layout on the policy's ranks."""
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(**{**TRAINING, **flags}, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup()
    assert backend.critic is not None and backend.layout.critic is not None
    assert backend.layout.data_parallel_size == len(policy_batches)
    assert backend.layout.critic.data_parallel_size == len(critic_batches)
    batch = policy_batches[backend.data_parallel_rank]
    of_critic = critic_batches[backend.critic.ranks.replica]
    metrics = []
    values = []
    for _ in range(rollouts):
        values.append(values_of(backend.critic, of_critic))
        metrics.append(numbers(backend.train(batch, of_critic)))
    if "save" in flags:
        backend.save(backend.next_rollout_id + rollouts - 1)
        backend.finish_saving()
    return {"reporting": backend.is_reporting_rank, "metrics": metrics, "values": values}


def on_the_same_ranks(
    ranks: Pools,
    policy: tuple[int, int, dict[str, Any]],
    critic: tuple[int, int, dict[str, Any]],
    rollouts: int,
    **more: Any,
) -> tuple[list[dict[str, float]], list[dict[int, Any]]]:
    """Run both on the same ranks; of each rollout the metrics, and the values."""
    assert policy[0] == critic[0]
    flags = {**policy[2], **of_critic(0, critic[2]), **more}
    batches = batches_for(policy[1]), batches_for(critic[1])
    found = ranks.run(policy[0], two_layouts_job, flags, *batches, rollouts)
    [reported] = [one["metrics"] for one in found if one["reporting"]]
    return reported, [merged(parts) for parts in zip(*(one["values"] for one in found))]


TRAINED = {"all layers": {}, "adapters": {"lora_rank": 2}}


@pytest.mark.parametrize(
    ("policy", "critic", "trained"),
    [
        (ALONE, (2, 1, TP2 | SP), "all layers"),
        ((2, 2, {}), ALONE, "adapters"),
        ((2, 1, PP2 | VIRTUAL), (2, 1, CP2), "all layers"),
    ],
)
def test_any_two_layouts_give_the_numbers_of_a_critic_on_the_policys_ranks(
    policy: Any, critic: Any, trained: str, ranks: Pools, model: Path, deep: Path
) -> None:
    is_virtual = VIRTUAL.items() <= policy[2].items()
    flags = {"hf_checkpoint": str(deep if is_virtual else model), **TRAINED[trained]}
    [alone] = ranks.once(1, shared_job, flags, batches_for(1), 3)  # one process with both
    found, values = together(ranks, policy, critic, 3, **flags)
    assert_same(found, alone["metrics"])
    assert_same_values(values, alone["values"])
    last = found[-1]
    assert values[-1][0].any()
    assert last["train/critic-explained_variance"] > 0.05 and last["rollout/kl"] != 0.0


@pytest.mark.parametrize(
    ("policy", "critic", "trained"),
    [
        ((2, 1, TP2 | SP), (2, 2, {}), "all layers"),
        ((2, 2, {}), (2, 1, TP2 | SP), "adapters"),
        ((2, 1, PP2 | VIRTUAL), (2, 1, CP2), "all layers"),
        ((2, 1, CP2), (2, 1, PP2), "all layers"),
    ],
)
def test_any_two_layouts_on_the_same_ranks_give_the_same_numbers(
    policy: Any, critic: Any, trained: str, ranks: Pools, model: Path, deep: Path
) -> None:
    is_virtual = VIRTUAL.items() <= policy[2].items()
    flags = {"hf_checkpoint": str(deep if is_virtual else model), **TRAINED[trained]}
    [alone] = ranks.once(1, shared_job, flags, batches_for(1), 3)
    found, values = on_the_same_ranks(ranks, policy, critic, 3, **flags)
    assert_same(found, alone["metrics"])
    assert_same_values(values, alone["values"])
    assert found[-1]["train/critic-explained_variance"] > 0.05


def test_its_experts_are_spread_as_its_flags_say(ranks: Pools, tmp_path: Path) -> None:
    save_tiny("qwen3_moe", tmp_path, layers=2)
    flags = {"hf_checkpoint": str(tmp_path), "critic_lr": 0.01}
    [alone] = ranks.run(1, shared_job, flags, batches_for(1), 3)
    spread = {"critic_expert_tensor_parallel_size": 1}
    found, _ = together(ranks, ALONE, (2, 2, parity.EP2), 3, **flags, **spread)
    assert_same(found, alone["metrics"])
    found, _ = on_the_same_ranks(ranks, (2, 2, {}), (2, 2, parity.EP2), 3, **flags, **spread)
    assert_same(found, alone["metrics"])


def random_job(info: Any) -> tuple[list[float], list[float]]:
    """What two ranks draw outside and inside a second layout."""
    from slime.trainer.megatron import parallel

    config = trainer_config(**PPO, actor_num_gpus_per_node=2, tensor_model_parallel_size=2)
    try:
        ranks = parallel.initialise(info, config)
        one = trainer_config(**PPO, actor_num_gpus_per_node=2)
        second = parallel.SecondLayout(one, None, ranks.device)
        outside = []
        inside = []
        for _ in range(2):
            outside += torch.rand(1 + info.rank)[:1].tolist()  # more on one rank than on the other
            with second.active(), second.active():
                inside.append(torch.rand(1).item())
        assert (ranks.replica, second.ranks.replica) == (0, info.rank)
    finally:
        parallel.shut_down()
    return outside, inside


def test_each_layout_has_its_own_random_numbers(ranks: Pools) -> None:
    (first, inside), (second, same) = ranks.run(2, random_job)
    assert inside == same and len(set(inside)) == 2
    assert first[0] == second[0] == inside[0] and first[1] == inside[1] != second[1]


# -- checkpoints -----------------------------------------------------------------------------------

RESUMING: dict[str, Any] = {
    "optimizer": "adam", "adam_eps": 1e-3, "lr": 1e-3, "critic_lr": 0.01,
    "lr_decay_style": "cosine", "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_coef": 0.0,
}  # fmt: skip


def test_a_checkpoint_has_both_and_any_run_goes_on_from_it(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    """The critic moves to ranks of its own, to another layout there, and back."""
    flags = {**RESUMING, "hf_checkpoint": str(model), "async_save": True}

    def folder(name: str) -> dict[str, str]:
        return {"load": str(tmp_path / name), "save": str(tmp_path / name)}

    shared = {**flags, **folder("shared")}
    for name in ("shared", "twin"):
        ranks.run(1, shared_job, {**flags, **folder(name)}, batches_for(1), 1)
    twin = {**flags, **folder("twin")}
    [unbroken] = ranks.run(1, shared_job, twin, batches_for(1), 2)
    assert unbroken["start"] == 1
    # on ranks of its own, from a checkpoint of the policy's ranks
    moved, _ = together(ranks, ALONE, (2, 1, TP2 | SP), 1, **shared, saves=True)
    assert_same(moved, unbroken["metrics"][:1])
    written = tmp_path / "shared" / "iter_0000001"
    check_contents(written)
    listed = {record.path for record in read_manifest(written) or []}
    assert listed >= {"critic/common.pt", "critic/.metadata", "critic/manifest.json", "common.pt"}
    assert not list((tmp_path / "shared" / ".critic").glob("iter_*"))
    # at another layout, and back
    again, _ = together(ranks, (2, 2, {}), (2, 1, PP2), 1, **shared)
    assert_same(again, unbroken["metrics"][1:])
    [back] = ranks.run(1, shared_job, shared, batches_for(1), 1)
    assert back["start"] == 2
    assert_same(back["metrics"], unbroken["metrics"][1:])


def test_a_checkpoint_is_resumed_with_other_layouts_on_the_same_ranks(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    flags = {**RESUMING, "hf_checkpoint": str(model)}
    own = {"load": str(tmp_path), "save": str(tmp_path), "async_save": True}
    [unbroken] = ranks.run(1, shared_job, flags, batches_for(1), 3)
    first, _ = on_the_same_ranks(ranks, (2, 1, TP2 | SP), (2, 2, {}), 1, **flags, **own)
    check_contents(tmp_path / "iter_0000000")
    second, _ = on_the_same_ranks(ranks, (2, 2, {}), (2, 1, PP2), 1, **flags, **own)
    [third] = ranks.run(1, shared_job, {**flags, **own}, batches_for(1), 1)
    assert third["start"] == 2
    assert_same([*first, *second, *third["metrics"]], unbroken["metrics"])


def test_a_checkpoint_of_adapters_has_the_critic_too(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    flags = {**RESUMING, "hf_checkpoint": str(model), "lora_rank": 2}
    own = {"load": str(tmp_path / "run"), "save": str(tmp_path / "run")}
    [unbroken] = ranks.run(1, shared_job, flags, batches_for(1), 2)
    first, _ = together(ranks, ALONE, (2, 1, TP2 | SP), 1, **flags, **own, saves=True)
    assert (tmp_path / "run" / "iter_0000000" / "adapter").is_dir()
    second, values = together(ranks, ALONE, ALONE, 1, **flags, **own)
    assert_same(first + second, unbroken["metrics"])
    assert values[0][0].any()
    [shared] = ranks.run(1, shared_job, {**flags, "load": own["load"]}, batches_for(1), 1)
    assert_same(shared["metrics"], unbroken["metrics"][1:])


def test_a_damaged_critic_is_a_damaged_checkpoint(
    ranks: Pools, model: Path, tmp_path: Path
) -> None:
    folder = {"load": str(tmp_path), "save": str(tmp_path), "hf_checkpoint": str(model)}
    together(ranks, ALONE, ALONE, 1, **folder, saves=True)
    [data] = (tmp_path / "iter_0000000" / "critic").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match=r"critic/.* is corrupt"):
        check_contents(tmp_path / "iter_0000000")
    data.unlink()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole"):
        resolve_load(trainer_config(**TRAINING, **folder))


# -- flags -----------------------------------------------------------------------------------------

PPO = {"advantage_estimator": "ppo"}


def test_a_critic_has_the_policys_layout_unless_it_has_its_own() -> None:
    policy = {
        "actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True,
        "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
        "decoder_first_pipeline_num_layers": 1, "colocate": True,
    }  # fmt: skip
    shared = trainer_config(**PPO, **policy)
    assert not shared.critic.has_own_gpus
    assert PlacementPlan.of(shared).total == 4 and list(roles_of(shared))[-1] == "critic"
    assert not shared.critic_has_own_layout and critic_placed(shared) == shared
    divided = trainer_config(**PPO, **policy, critic_tensor_model_parallel_size=1)
    assert divided.critic_has_own_layout and not divided.critic.has_own_gpus
    assert PlacementPlan.of(divided).total == 4 and list(roles_of(divided))[-1] == "critic"
    placed = critic_placed(divided)
    assert placed.cluster == divided.cluster and placed.cluster.offload_train
    assert not divided.critic.critic_sequence_parallel
    apart = trainer_config(**PPO, **policy, critic_num_nodes=2)
    plan = PlacementPlan.of(apart)
    assert (plan.num_critic, plan.critic_offset, plan.total) == (8, 4, 12)
    assert plan.formula.endswith("critic_num_nodes 2 x critic_num_gpus_per_node 4 = 12")
    assert list(roles_of(apart)) == ["policy"]
    assert critic_placed(apart).megatron == apart.megatron
    other = trainer_config(
        **PPO, **policy, critic_num_gpus_per_node=2, critic_tensor_model_parallel_size=1,
        critic_pipeline_model_parallel_size=1, critic_context_parallel_size=2,
    )  # fmt: skip
    placed = critic_placed(other)
    assert layout_of(placed, tiny_spec()) == Layout(world=2, context=2)
    assert not placed.megatron.transformer.keys() & {"num_layers_in_first_pipeline_stage"}
    check_layout(tiny_spec(), placed)
    # what the policy has nothing to split for is the critic's all the same
    wider = {"critic_num_gpus_per_node": 2, "critic_tensor_model_parallel_size": 2}
    split = trainer_config(**PPO, **wider, sequence_parallel=True)
    assert split.critic.critic_sequence_parallel and not split.megatron.sequence_parallel
    assert not [line for line in split.warnings if "--sequence-parallel" in line]
    # where nothing is trained, nothing is placed
    rollouts = trainer_config(**PPO, critic_num_gpus_per_node=1, debug_rollout_only=True)
    assert PlacementPlan.of(rollouts).num_critic == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {**PPO, "critic_num_gpus_per_node": 3, "critic_tensor_model_parallel_size": 2},
            "3 critic GPUs cannot be divided by 2",
        ),
        (
            {**PPO, "critic_num_gpus_per_node": 1, "tensor_model_parallel_size": 2,
             "actor_num_gpus_per_node": 2},
            "2 × 1 × 1 = 2 (other sizes are those of the policy)",
        ),
        (
            {**PPO, "critic_num_gpus_per_node": 2, "critic_expert_model_parallel_size": 2,
             "critic_expert_tensor_parallel_size": 2},
            "--critic-expert-tensor-parallel-size 1 is usual",
        ),
        ({**PPO, "critic_num_gpus_per_node": 9, "num_gpus_per_node": 8}, "--critic-num-nodes"),
        (
            {**PPO, "critic_num_gpus_per_node": 4, "micro_batch_size": 1, "global_batch_size": 6},
            "data-parallel size of the critic = 1 × 4 = 4",
        ),
        (
            {**PPO, "critic_num_nodes": 0, "critic_num_gpus_per_node": 2, "micro_batch_size": 1,
             "global_batch_size": 6},
            "--critic-num-nodes 0 and --critic-num-gpus-per-node 2 contradict each other",
        ),
        (
            {**PPO, "critic_num_nodes": 2, "critic_num_gpus_per_node": 0},
            "--critic-num-nodes 2 and --critic-num-gpus-per-node 0 contradict each other",
        ),
        (
            {**PPO, "actor_num_gpus_per_node": 2, "critic_tensor_model_parallel_size": 4},
            "2 trainer GPUs cannot be divided by 4",
        ),
        (
            {**PPO, "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2,
             "critic_tensor_model_parallel_size": 1, "micro_batch_size": 1,
             "global_batch_size": 3},
            "data-parallel size of the critic = 1 × 2 = 2",
        ),
        ({"critic_num_gpus_per_node": 2}, "--advantage-estimator ppo"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_the_launch(flags: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        trainer_config(**flags)
    assert told in str(caught.value)


def test_a_layout_that_does_not_divide_the_model_names_the_critics_flag() -> None:
    config = trainer_config(**PPO, critic_num_gpus_per_node=3, critic_tensor_model_parallel_size=3)
    check_layout(tiny_spec(), config)
    with pytest.raises(UserError, match="--critic-tensor-model-parallel-size 3 does not fit"):
        check_critic_layout(tiny_spec(), config)


# -- what goes wrong in a rank ---------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[CriticProcess]:
    """One rank, with random weights."""
    config = trainer_config(**PPO, critic_num_gpus_per_node=1, critic_lr=0.05)
    found = CriticProcess(config, RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    try:
        found.setup(spec=tiny_spec(), initialise=True)
        yield found
    finally:
        found.close()


def test_a_rank_without_memory_names_the_critics_flags(
    process: CriticProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(batch: TrainBatch) -> None:
        raise MemoryError

    monkeypatch.setattr(process.critic, "outputs", full)
    with pytest.raises(OutOfMemory, match="--critic-tensor-model-parallel-size 1 → 2") as caught:
        process.values(make_batch())
    assert " --tensor-model-parallel-size" not in str(caught.value)


def test_a_part_stays_until_its_checkpoint_takes_it(process: CriticProcess, tmp_path: Path) -> None:
    """With --async-save the critic may have written two before the policy takes the first."""
    flags = replace(process.config.checkpoint, save=str(tmp_path))
    process.config = replace(process.config, checkpoint=flags)
    for iteration in (2, 3, 4):
        process.save(iteration)
    parts = sorted(path.name for path in (tmp_path / ".critic").glob("iter_*"))
    assert parts == ["iter_0000003", "iter_0000004"]
    for iteration in (3, 4):
        final = tmp_path / iteration_name(iteration)
        partial = partial_dir(final)
        assert is_part_written(tmp_path, iteration)
        take_critic(tmp_path, iteration, partial)
        assert is_part_written(tmp_path, iteration) and critic_records(partial)
        partial.rename(final)
        assert is_part_written(tmp_path, iteration)
    assert not is_part_written(tmp_path, 5)


def nan_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> Any:
    from slime.trainer.megatron.backend import MegatronBackend

    config = trainer_config(**PPO, **flags, actor_num_gpus_per_node=info.world_size)
    backend = MegatronBackend(config, info)
    backend.setup(spec=tiny_spec(), initialise=True)
    assert backend.critic is not None and backend.critic.head is not None
    backend.critic.head.bias.data.fill_(np.nan)
    with pytest.raises(NonFiniteTraining, match="of the critic: NaN or Inf"):
        backend.train(make_batch(), batches[backend.critic.ranks.replica])
    return backend.failed_step


def test_a_critic_of_another_layout_on_the_same_ranks_keeps_its_step_with_nan(ranks: Pools) -> None:
    flags = {**TP2, **of_critic(0, {})}
    found = ranks.run(2, nan_job, flags, batches_for(2))
    assert [part.rank for part in found] == [0, 1]
    rows = [row["sample_indices"] for part in found for row in part.micro_batches]
    assert sorted(place for row in rows for place in row) == sorted(make_batch().sample_indices)


def test_a_step_with_nan_is_kept_with_the_values(process: CriticProcess) -> None:
    batch = make_batch()
    values = process.values(batch)
    returns = {place: np.ones_like(one) for place, one in values.items()}
    masks = {place: mask.numpy() for place, mask in enumerate(batch.loss_masks)}
    returns[2][:] = np.nan
    with pytest.raises(NonFiniteTraining, match="of the critic: NaN or Inf") as caught:
        process.learn(returns, masks)
    assert "--critic-lr" in caught.value.fix and "--eps-clip" not in caught.value.fix
    failed = process.failed_step
    assert failed is not None and failed.shard is not None
    assert "training_values" in failed.shard.samples[0]
    bad = [row["sample_indices"] for row in failed.micro_batches if np.isnan(row["loss"])]
    assert bad == [[batch.sample_indices[2], batch.sample_indices[3]]]
