"""What else must hold of layouts, besides the parity table: ranks with nothing to do, layouts that
do not fit."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime.samples.batch import TrainBatch
from slime.trainer.megatron.context import _copy_rows
from tests.support.memory_jobs import FAMILIES
from tests.support.tiny_models import save_tiny
from tests.support.trainer_ranks import VOCAB, Pools, make_batch, shard, trainer_config

LOSS = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.2,
    "kl_loss_type": "k3",
    "entropy_coef": 0.01,
    "optimizer": "sgd",
}
MICRO_BATCHES = [[0, 1], [2, 3], [4], [5]]


def train_job(info: Any, flags: dict[str, Any], batches: list[TrainBatch]) -> dict[str, Tensor]:
    """The weights after two steps, as Hugging Face tensors."""
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.weights.source import ModelSource

    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    for _ in range(2):
        backend.train(batches[backend.data_parallel_rank])
    return {
        name: tensor.clone()
        for name, tensor in ModelSource(backend.model_chunks, backend.hf_config).tensors()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("model")
    model = save_tiny("qwen3", directory, layers=2)
    return directory, model


def flags_for(checkpoint: tuple[Path, Any], **layout: Any) -> dict[str, Any]:
    return {**LOSS, **layout, "hf_checkpoint": str(checkpoint[0]), "lr": 0.02, "clip_grad": 0.5}


def timeouts_job(info: Any, flags: dict[str, Any]) -> set[datetime.timedelta]:
    import torch.distributed as dist

    from slime.trainer.megatron.backend import MegatronBackend
    from slime.trainer.megatron.parallel import initialise

    assert MegatronBackend is not None  # its import prepares megatron for this machine
    initialise(info, trainer_config(**flags, actor_num_gpus_per_node=info.world_size))
    groups = [group for group in dist.distributed_c10d._world.pg_map if dist.get_rank(group) >= 0]
    assert len(groups) > 10
    return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


def test_every_group_of_the_trainer_has_the_one_deadline(ranks: Pools) -> None:
    found = ranks.run(
        2, timeouts_job, {"tensor_model_parallel_size": 2, "distributed_timeout_minutes": 0.75}
    )
    assert found == [{datetime.timedelta(seconds=45)}] * 2


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1.0))


def test_a_rank_with_nothing_to_train_takes_part(
    ranks: Pools, checkpoint: tuple[Path, Any]
) -> None:
    batch = make_batch(MICRO_BATCHES)
    batches = [shard(batch, range(6), MICRO_BATCHES), shard(batch, [], [[], [], [], []])]
    flags = {**flags_for(checkpoint), "normalize_advantages": True}
    with_idle = ranks.run(2, train_job, flags, batches)
    alone = ranks.run(1, train_job, flags, [batch])[0]
    for parameter, value in alone.items():
        for weights in with_idle:
            assert close(weights[parameter], value, 1e-5), parameter


def loss_of_logits(
    args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half from the log-probs, half from the logits; fails without samples, as users' functions
    may."""
    log_probs = torch.cat(batch["current_log_probs"])
    assert logits.shape == (log_probs.numel(), VOCAB)
    values = logits.logsumexp(-1) - logits.mean(-1)
    return sum_of_sample_mean(0.5 * values - 0.5 * log_probs), {
        "spread": sum_of_sample_mean(values.detach())
    }


MEANS = {"normalize_advantages": True, "calculate_per_token_loss": True, "entropy_coef": 0.5}
CUSTOM = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": f"{__name__}.loss_of_logits",
    "use_kl_loss": False,
}
CUSTOM |= {"kl_loss_coef": 0.0, "kl_loss_type": "k1", "entropy_coef": 0.0}
UNEVEN = [([4, 0], [[0], [1]]), ([1, 3, 5, 2], [[0, 1, 2], [3]])]
IDLE = [(list(range(6)), MICRO_BATCHES), ([], [[], [], [], []])]


@pytest.mark.parametrize(
    ("flags", "plans"),
    [
        (MEANS, UNEVEN),
        (MEANS | {"context_parallel_size": 2}, IDLE[:1]),
        (CUSTOM | {"context_parallel_size": 2}, IDLE[:1]),
        (CUSTOM, IDLE),
    ],
    ids=["means, dp2", "means, cp2", "custom loss, cp2", "custom loss, idle rank"],
)
def test_means_and_losses_are_over_all_ranks(
    ranks: Pools, checkpoint: tuple[Path, Any], flags: dict[str, Any], plans: Any
) -> None:
    batch = make_batch(MICRO_BATCHES)
    # clipping would hide a wrong scale
    flags = {**flags_for(checkpoint), "clip_grad": 0.0, "lr": 0.1, **flags}
    one = {**flags, "context_parallel_size": 1}
    alone = ranks.once(1, train_job, one, [batch])[0]
    for weights in ranks.run(
        2, train_job, flags, [shard(batch, members, plan) for members, plan in plans]
    ):
        for parameter, value in alone.items():
            assert close(weights[parameter], value, 1e-5), parameter


@pytest.mark.parametrize(
    ("layout", "plan"),
    [
        ({"context_parallel_size": 2}, IDLE[0]),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, IDLE[0]),
    ],
    ids=["cp2", "tp2, sequence"],
)
def test_sampling_masks_mean_the_same_on_every_layout(
    ranks: Pools, checkpoint: tuple[Path, Any], layout: dict[str, Any], plan: Any
) -> None:
    """Of each response token that is not the third of its sample five others are kept, too."""
    batch = make_batch(MICRO_BATCHES)
    ids: list[Tensor] = []
    offsets: list[Tensor] = []
    for tokens, length in zip(batch.tokens, batch.response_lengths):
        targets = tokens[tokens.numel() - length :]
        kept = [(targets[i] + torch.arange(6) * 7) % VOCAB for i in range(length) if i != 2]
        sizes = [0 if i == 2 else 6 for i in range(length)]
        ids.append(torch.cat(kept))
        offsets.append(torch.tensor([0, *sizes]).cumsum(0))
    batch.payloads |= {"sampling_mask_ids": ids, "sampling_mask_offsets": offsets}
    flags = flags_for(checkpoint)
    alone = ranks.once(1, train_job, flags, [batch])[0]
    plain = ranks.once(1, train_job, flags, [make_batch(MICRO_BATCHES)])[0]
    assert any(not close(plain[name], value, 1e-4) for name, value in alone.items())
    shards = [shard(batch, *plan)]
    for weights in ranks.run(2, train_job, {**flags, **layout}, shards):
        for parameter, value in alone.items():
            assert close(weights[parameter], value, 1e-5), parameter


@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(8, 2, 4), (8, 2, 8), (6, 3, 2), (8, 8, 4), (12, 4, 6), (4, 1, 2)]
)
def test_each_rank_gets_the_keys_of_its_queries(heads: int, groups: int, size: int) -> None:
    from slime.trainer.megatron.context import _repeated

    keys = _repeated(torch.arange(groups)[None, :, None], heads, size)[0, :, 0]
    for rank, (mine, queries) in enumerate(zip(keys.chunk(size), torch.arange(heads).chunk(size))):
        per_key = len(queries) // len(mine)
        wanted = [int(query) // (heads // groups) for query in queries]
        assert [int(mine[i // per_key]) for i in range(len(queries))] == wanted, rank


def test_layouts_that_do_not_fit_are_refused_by_number(checkpoint: tuple[Path, Any]) -> None:
    from slime.errors import UserError
    from slime.models import family_of
    from slime.models.layout_rules import check_layout

    spec = family_of(checkpoint[0]).model_spec(checkpoint[0]).padded(1)
    config = trainer_config(
        actor_num_gpus_per_node=3, tensor_model_parallel_size=3, rollout_batch_size=6
    )
    with pytest.raises(UserError, match="3") as caught:
        check_layout(spec, config)
    assert "attention heads" in caught.value.why and "4" in caught.value.why


@pytest.mark.parametrize(
    ("facts", "tensor", "said"),
    [
        ({"num_attention_heads": 12, "num_query_groups": 4}, 6, "4 key-value heads"),
        (
            {"num_attention_heads": 12, "num_query_groups": 12, "ffn_hidden_size": 64},
            3,
            "64 intermediate features",
        ),
    ],
)
def test_megatrons_own_asserts_are_not_met(
    checkpoint: tuple[Path, Any], facts: Any, tensor: int, said: str
) -> None:
    from slime.errors import UserError
    from slime.models import family_of
    from slime.models.layout_rules import check_layout

    spec = family_of(checkpoint[0]).model_spec(checkpoint[0])
    spec = dataclasses.replace(
        spec, transformer={**spec.transformer, "ffn_hidden_size": 96, **facts}
    ).padded(tensor)
    config = trainer_config(
        actor_num_gpus_per_node=tensor, tensor_model_parallel_size=tensor, rollout_batch_size=6
    )
    with pytest.raises(UserError, match=f"--tensor-model-parallel-size {tensor}") as caught:
        check_layout(spec, config)
    assert said in caught.value.why


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("qwen3", ["mla_up_proj", "moe", "moe_act", "shared_experts"]),
        ("gpt_oss", ["mlp", "mlp_act", "mla_up_proj", "shared_experts"]),
        ("deepseek_v3", []),
    ],
)
def test_modules_to_recompute_that_a_model_lacks_are_refused(name: str, modules: list[str]) -> None:
    from slime.errors import UserError
    from slime.models import family_of
    from slime.models.layout_rules import check_layout

    spec = family_of(FAMILIES[name]).model_spec(FAMILIES[name]).padded(1)
    refused = []
    known = ["core_attn", "layernorm", "mla_up_proj", "mlp", "mlp_act", "moe", "moe_act"]
    for module in [*known, "shared_experts"]:
        config = trainer_config(recompute_granularity="selective", recompute_modules=(module,))
        try:
            check_layout(spec, config)
        except UserError as error:
            assert f"--recompute-modules {module} has no effect" in str(error)
            refused.append(module)
    assert sorted(refused) == sorted(modules)


@pytest.mark.parametrize(("per_stage", "expected"), [(1, 2), (2, None)])
def test_virtual_stages_by_layers(
    checkpoint: tuple[Path, Any], per_stage: int, expected: int | None
) -> None:
    from slime.errors import UserError
    from slime.models import family_of
    from slime.models.layout_rules import virtual_stages

    def stages(num_layers: int) -> int | None:
        spec = family_of(checkpoint[0]).model_spec(checkpoint[0])
        facts = {**spec.transformer, "num_layers": num_layers}
        return virtual_stages(dataclasses.replace(spec, transformer=facts), config)

    layout = {
        "actor_num_gpus_per_node": 2,
        "pipeline_model_parallel_size": 2,
        "rollout_batch_size": 6,
    }
    config = trainer_config(**layout, num_layers_per_virtual_pipeline_stage=per_stage)
    assert stages(4) == expected, "one chunk per rank is no interleaving"
    if per_stage == 2:
        with pytest.raises(UserError, match="2 does not fit") as caught:
            stages(6)
        assert "6 / 2 = 3 layers" in caught.value.why


def layout_job(info: Any, flags: dict[str, Any]) -> int:
    from slime.trainer.megatron.backend import MegatronBackend

    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    assert backend.canary_log_probs([1, 2, 3]) is not None or not backend.ranks.has_output
    return backend.layout.micro_batch_multiple


def test_steps_have_whole_groups_of_micro_batches(ranks: Pools, tmp_path: Path) -> None:
    """Megatron's schedule stops at a part of one, in the middle of a run."""
    deep = (tmp_path, save_tiny("qwen3", tmp_path, layers=4))
    flags = flags_for(deep, pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    assert ranks.run(2, layout_job, flags) == [2, 2]
    assert ranks.run(2, layout_job, {**flags, "microbatch_group_size_per_vp_stage": 3}) == [3, 3]


def test_a_group_of_micro_batches_fills_the_pipeline() -> None:
    from slime.errors import UserError

    flags = {
        "actor_num_gpus_per_node": 2,
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
    }
    with pytest.raises(UserError, match="1 is less than the pipeline parallel size 2"):
        trainer_config(**flags, microbatch_group_size_per_vp_stage=1)


@given(
    rows=st.integers(1, 5),
    size=st.integers(1, 3),
    width=st.integers(1, 40),
    before=st.integers(0, 9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
)
@settings(max_examples=60)
def test_rows_are_copied_in_wide_words_or_narrow_ones(
    rows: int, size: int, width: int, before: int, dtype: torch.dtype
) -> None:
    whole = torch.randn(size, rows, before + width).to(dtype)
    source = whole[:, :, before:].transpose(0, 1)
    target = torch.zeros(rows, size, width + 3, dtype=dtype)
    _copy_rows(target[..., :width], source)
    assert torch.equal(target[..., :width], source)
    assert not target[..., width:].any()
