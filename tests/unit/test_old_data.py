"""Data sets, sources, loss masks, evaluation sets and tensors under the paths of earlier versions,
without a run."""

from __future__ import annotations

import contextvars
import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config
from slime.errors import UserError
from slime.prompts.source import make_source
from slime.samples.types import Sample
from tests.support.prompt_fixtures import make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()
ROWS = [{"input": f"p{i}", "answer": i, "metadata": {"level": i % 2}} for i in range(6)]


def old(module: str) -> Any:
    return importlib.import_module(f"slime.{module}")


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "d.jsonl", ROWS)


def test_a_data_set_in_both_orders(data: str) -> None:
    options = {"prompt_key": "input", "label_key": "answer", "seed": 7}
    dataset = old("utils.data").Dataset(data, TOKENIZER, None, None, **options)
    assert [(s.prompt, s.label, s.metadata) for s in dataset.samples][1] == ("p1", 1, {"level": 1})
    dataset.shuffle(0)
    config = make_config(num_rollout=1, prompt_data=data, rollout_shuffle=True, rollout_seed=7)
    drawn = [group[0].prompt for group in make_source(config, TOKENIZER).get_samples(6)]
    assert (
        [dataset[i].prompt for i in range(len(dataset))]
        == drawn
        != [s.prompt for s in dataset.origin_samples]
    )
    with pytest.raises(UserError, match="images or other media"):
        old("utils.data").Dataset(
            data, TOKENIZER, multimodal_keys={"image": "x"}, prompt_key="input"
        )


def test_rows_and_long_prompts(data: str) -> None:
    assert list(old("utils.data").read_file(f"{data}@[1:3]")) == ROWS[1:3]
    samples = [Sample(prompt="p1"), Sample(prompt="p1" * 50)]
    keep = old("utils.data").filter_long_prompt
    assert (
        keep(samples, TOKENIZER, None, 10) == samples[:1]
        and keep(samples, TOKENIZER, None, None) == samples
    )
    chat = [Sample(prompt=[{"role": "user", "content": "p1" * 50}])]
    assert keep(chat, TOKENIZER, None, 10) == chat


def test_tools_of_rows_are_read_where_their_column_is_named(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    path, build = (
        write_jsonl(tmp_path / "t.jsonl", [{"input": "p1", "tools": tools}]),
        old("utils.data").Dataset,
    )
    assert build(path, TOKENIZER, prompt_key="input")[0].metadata == {}
    assert build(path, TOKENIZER, prompt_key="input", tool_key="tools")[0].metadata == {
        "tools": tools
    }


def curriculum() -> type:
    """As plugins write it: hard prompts late, groups built by hand, finished ones looked at when
    they come back."""

    class Curriculum(old("rollout.data_source").RolloutDataSourceWithBuffer):  # type: ignore[misc]
        def __init__(self, args: Any) -> None:
            super().__init__(args)
            self.metadata["drawn"] = 0

        def get_samples(self, num_samples: int) -> list[list[Sample]]:
            groups = self._get_samples_from_buffer(num_samples)
            easy = sorted(self.dataset.samples, key=lambda sample: sample.metadata["level"])
            while len(groups) < num_samples:
                prompt = easy[self.sample_offset % len(easy)]
                group = [
                    Sample(prompt=prompt.prompt, label=prompt.label)
                    for _ in range(self.args.n_samples_per_prompt)
                ]
                for sample in group:
                    sample.index, sample.group_index = self.sample_index, self.sample_group_index
                    self.sample_index += 1
                self.sample_group_index += 1
                self.sample_offset += 1
                self.update_metadata({"drawn": self.get_metadata()["drawn"] + 1})
                groups.append(group)
            return groups

    return Curriculum


def test_a_source_that_draws_by_itself_resumes(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Curriculum", curriculum())
    flags = {
        "num_rollout": 1,
        "prompt_data": data,
        "n_samples_per_prompt": 2,
        "label_key": "answer",
    }
    config = make_config(data_source_path=f"{__name__}.Curriculum", **flags)
    source: Any = make_source(config, TOKENIZER)
    groups = source.get_samples(4)
    assert [group[0].prompt for group in groups] == ["p0", "p2", "p4", "p1"]
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    source.add_samples(groups[3:])
    assert source.get_buffer_length() == 1 and source.buffer == groups[3:]
    source.mark_consumed([0, 1, 2])
    state = json.loads(json.dumps(source.state_dict()))
    again: Any = make_source(config, TOKENIZER)
    again.load_state_dict(state)
    (restored,) = again.get_samples(1)
    assert (restored[0].prompt, restored[0].index, again.get_metadata()) == ("p1", 6, {"drawn": 4})
    ((new, _),) = again.get_samples(1)  # numbered on: the restored group has the number 3
    assert (new.prompt, new.index, new.group_index) == ("p3", 8, 4)
    again.mark_consumed([3, 4])
    assert again.state_dict()["low"] == 5


def test_a_data_set_that_was_looked_at_before_is_in_the_order_of_the_epoch_that_is_resumed(
    data: str,
) -> None:
    config = make_config(
        data_source_path="slime.rollout.data_source.RolloutDataSource",
        **{"num_rollout": 1, "prompt_data": data, "rollout_shuffle": True},
    )
    source: Any = make_source(config, TOKENIZER)
    source.epoch_id = 2
    again: Any = make_source(config, TOKENIZER)
    before = [sample.prompt for sample in again.dataset.samples]
    again.load_state_dict(source.state_dict())
    assert (
        [sample.prompt for sample in again.dataset.samples]
        == [s.prompt for s in source.dataset.samples]
        != before
    )


def test_a_source_from_a_few_attributes(data: str) -> None:
    # in which no run has built one
    contextvars.Context().run(check_a_source_from_a_few_attributes, data)


def check_a_source_from_a_few_attributes(data: str) -> None:
    module = old("rollout.data_source")
    args = Namespace(rollout_global_dataset=False, n_samples_per_prompt=3, buffer_filter_path=None)
    source = module.RolloutDataSourceWithBuffer(args)
    assert [s.index for s in source.get_samples(1)[0]] == [0, 1, 2] and source.args is args
    source.buffer_filter = lambda args, rollout_id, buffer, num_samples: [buffer.pop()]
    source.add_samples([[Sample(index=7)], [Sample(index=8)]])
    assert source.get_samples(1)[0][0].index == 8 and source.dataset is None
    with pytest.raises(UserError, match="is built where there is no run"):
        module.RolloutDataSource(Namespace(prompt_data=data))


def test_loss_masks_of_conversations() -> None:
    module = old("utils.mask_utils")
    generator = module.MultiTurnLossMaskGenerator(TOKENIZER, tokenizer_type="qwen3")
    messages = [
        {"role": "user", "content": "p1"},
        {"role": "assistant", "content": "p2"},
        {"role": "user", "content": "p3"},
        {"role": "assistant", "content": "p4"},
    ]
    tokens, mask = generator.get_loss_mask(messages)
    texts = generator.get_text_from_loss_mask(tokens, mask)
    assert len(tokens) == len(mask) and ["p2" in texts[0], "p4" in texts[1], len(texts)] == [
        True,
        True,
        2,
    ]
    assert generator.get_response_lengths([mask, [0, 0]]) == [len(mask) - mask.index(1), 0]


def test_evaluation_sets() -> None:
    module = old("utils.eval_config")
    entries = module.ensure_dataset_list(
        {"a": {"path": "a.jsonl", "temperature": 0.5}, "b": {"path": "b.jsonl"}}
    )
    a, b = module.build_eval_dataset_configs(
        Namespace(eval_top_p=0.9), entries, {"n_samples_per_eval_prompt": 4}
    )
    assert (a.name, a.temperature, a.top_p, a.n_samples_per_eval_prompt) == ("a", 0.5, 0.9, 4)
    assert b.temperature == 1.0 and a.sampling_params()["temperature"] == 0.5
    alone = module.EvalDatasetConfig("c", "c.jsonl", rm_type="math", stop=None)
    assert alone.inject_metadata({"x": 1}) == {"x": 1, "rm_type": "math"} and alone.stop == ()
    with pytest.raises(ValueError, match="must have a name"):
        module.ensure_dataset_list([{"path": "a.jsonl"}])


# -- tensors ---------------------------------------------------------------------------------------


def test_losses_agree_with_the_formulas() -> None:
    ppo = old("utils.ppo_utils")
    new, behaviour = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    advantages = torch.tensor([1.0, -1.0, 2.0])
    ratio = (new - behaviour).exp()
    loss, clipped = ppo.compute_policy_loss(behaviour - new, advantages, 0.2, 0.28)
    limited = ratio.clamp(0.8, 1.28)
    torch.testing.assert_close(loss, torch.maximum(-ratio * advantages, -limited * advantages))
    assert clipped.tolist() == (-limited * advantages > -ratio * advantages).float().tolist()
    loss, _ = ppo.compute_cispo_loss(behaviour - new, new, advantages, 1.0, 0.1)
    torch.testing.assert_close(loss, -ratio.clamp(0.0, 1.1) * advantages * new)
    weighted = ppo.compute_approx_kl(new, behaviour, "k2", importance_ratio=ratio)
    torch.testing.assert_close(weighted, ratio * (new - behaviour) ** 2 / 2)
    masks = [torch.tensor([1.0, 1.0]), torch.tensor([1.0])]
    split = [new[:2], new[2:]], [behaviour[:2], behaviour[2:]]
    gspo = ppo.compute_gspo_kl(*split, split[0], masks)
    torch.testing.assert_close(gspo, torch.tensor([0.15, 0.15, 0.0]), atol=1e-6, rtol=0)
    args = Namespace(opsm_delta=0.1)
    mask, taken = ppo.compute_opsm_mask(
        args, *split, [torch.tensor([-1.0, -1.0]), torch.tensor([1.0])], masks
    )
    assert mask.tolist() == [0.0, 0.0, 1.0] and float(taken) == 1.0


def test_advantages_agree_with_the_formulas() -> None:
    ppo = old("utils.ppo_utils")
    kl, masks = [torch.tensor([0.5, 0.0]), torch.zeros(1)], [torch.ones(2), torch.ones(1)]
    assert [t.tolist() for t in ppo.get_grpo_returns(torch.tensor([2.0, 3.0]), kl)] == [
        [2.0, 2.0],
        [3.0],
    ]
    returns = ppo.get_reinforce_plus_plus_returns([1.0, 1.0], kl, masks, [2, 1], [4, 2], 0.1, 0.5)
    torch.testing.assert_close(returns, [torch.tensor([0.45, 1.0]), torch.tensor([1.0])])
    baseline = ppo.get_reinforce_plus_plus_baseline_advantages([1.0, 1.0], kl, masks, 0.1)
    torch.testing.assert_close(baseline, [torch.tensor([0.95, 1.0]), torch.tensor([1.0])])
    rewards, values, gamma, lambd = torch.rand(2, 300), torch.rand(2, 300), 0.99, 0.95
    expected, last = torch.zeros(2, 300), torch.zeros(2)
    for t in reversed(range(300)):
        ahead = values[:, t + 1] if t < 299 else torch.zeros(2)
        last = rewards[:, t] + gamma * ahead - values[:, t] + gamma * lambd * last
        expected[:, t] = last
    for gae in (ppo.vanilla_gae, ppo.chunked_gae):
        advantages, returns = gae(rewards, values, gamma, lambd)
        torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(returns, expected + values, atol=1e-4, rtol=1e-4)
    one = ppo.get_advantages_and_returns(400, 300, values[0], rewards[0], gamma, lambd)
    many = ppo.get_advantages_and_returns_batch(
        [400], [300], [values[0]], [rewards[0]], gamma, lambd
    )
    torch.testing.assert_close(one[0], many[0][0])


def test_a_schedule_places_each_sample_once() -> None:
    args = Namespace(use_dynamic_batch_size=True, max_tokens_per_gpu=10, balance_data=True)
    layout = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    lengths, trajectories = [8, 7, 3, 4, 2, 5], [0, 0, 1, 2, 3, 3]
    shards, micro_batches, counts, sizes = old("utils.dp_schedule").build_dp_schedule(
        args, layout, lengths, global_batch_size=2, rollout_indices=trajectories
    )
    assert sorted(shards[0] + shards[1]) == list(range(6)) and sizes == [2, 2] and len(counts) == 2
    for shard, bins in zip(shards, micro_batches):
        assert sorted(i for bin_ in bins for i in bin_) == list(range(len(shard))) and len(
            bins
        ) == sum(counts)
        assert all(sum(lengths[shard[i]] for i in bin_) <= 10 for bin_ in bins)
