"""Log-probs over what top-k, top-p and min-p left to be sampled from: engine, samples, trainer."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.algorithms import logprobs
from slime.algorithms.logprobs import KeptTokens, linear_log_probs
from slime.config import make_config
from slime.engines.api import EngineError, GenerateResult
from slime.errors import UserError
from slime.rollout.generate import bind_state, generate
from slime.samples.batch import TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.sampling_mask import extended_mask, mask_offsets_problem, mask_problem
from slime.samples.types import Group, Sample, SampleStatus
from slime.trainer.megatron.packed import PackingOptions, pack
from tests.support.fake_rollout import FakeClient, make_state
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import trainer

VOCAB = 23
CPU = torch.device("cpu")


def rows_of_kept(draw: st.DrawFn, targets: list[int]) -> list[list[int]]:
    """Sets of tokens with the target among them; some rows have none."""
    tokens = st.integers(0, VOCAB - 1)
    return [
        sorted(draw(st.sets(tokens, max_size=6)) | {target}) if draw(st.booleans()) else []
        for target in targets
    ]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    targets = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=7))
    return targets, rows_of_kept(draw, targets)


def kept_tokens(rows: list[list[int]]) -> KeptTokens:
    sizes = torch.tensor([len(row) for row in rows])
    return KeptTokens(
        ids=torch.tensor([token for row in rows for token in row], dtype=torch.long),
        rows=torch.repeat_interleave(torch.arange(len(rows)), sizes),
        bounds=[0, *sizes.cumsum(0).tolist()],
        whole=(sizes == 0)[:, None],
    )


@given(problem=problems(), seed=st.integers(0, 99), chunk=st.sampled_from([-1, 2]))
@settings(max_examples=40)
def test_log_probs_entropy_and_gradients_are_those_of_what_is_kept(
    problem: tuple[list[int], list[list[int]]], seed: int, chunk: int
) -> None:
    targets, rows = problem
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(targets), 5, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCAB, 5, dtype=torch.float64, generator=generator)
    pulls = torch.randn(2, len(targets), dtype=torch.float64, generator=generator)

    def gradients(scores: Any) -> tuple[torch.Tensor, ...]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, entropy = scores(*inputs)
        (pulls[0] @ log_probs + pulls[1] @ entropy).backward()
        return log_probs.detach(), entropy.detach(), inputs[0].grad, inputs[1].grad

    def ours(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = linear_log_probs(
            h,
            w,
            torch.tensor(targets),
            temperature=0.7,
            with_entropy=True,
            chunk_size=chunk,
            kept=kept_tokens(rows),
        )
        assert entropy is not None
        return log_probs, entropy

    def plain(h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = []
        for row, target, logits in zip(rows, targets, h @ w.t() / 0.7):
            tokens = row or list(range(VOCAB))
            log_p = torch.log_softmax(logits[tokens], 0)
            found.append((log_p[tokens.index(target)], -(log_p.exp() * log_p).sum()))
        return torch.stack([x for x, _ in found]), torch.stack([y for _, y in found])

    with pytest.MonkeyPatch.context() as patch:  # blocks of 7 columns, so that there are several
        patch.setattr(logprobs, "_MIN_COLUMNS", 7)
        patch.setattr(logprobs, "_BLOCK_ELEMENTS", {"cpu": 1})
        found = gradients(ours)
    for a, b in zip(found, gradients(plain), strict=True):
        assert torch.allclose(a, b, atol=1e-9)


def test_a_row_whose_kept_tokens_another_rank_holds_adds_nothing() -> None:
    """Vocabulary 0 to 11 of 23 on this rank; all that is kept lies behind it."""
    kept = kept_tokens([[3], [15, 20]])
    assert kept.left_out(slice(1, 2), 0, 12).tolist() == [[True] * 12]
    behind = ~kept.left_out(slice(1, 2), 12, 23)
    assert behind.shape == (1, 11) and behind.nonzero().tolist() == [[0, 3], [0, 8]]


@given(parts=st.lists(st.tuples(st.booleans(), st.integers(1, 3)), min_size=1, max_size=5))
def test_masks_grow_with_the_response(parts: list[tuple[bool, int]]) -> None:
    """Sampled tokens and the answers of tools in any order."""
    sample = Sample(tokens=[1, 2])
    expected: list[list[int]] = []
    for sampled, count in parts:
        tokens = [len(expected) + i for i in range(count)]
        if sampled:
            kept = [[token, 30 + token] for token in tokens]
            sample.append_response_tokens(
                tokens=tokens,
                log_probs=[-0.5] * count,
                meta_info={"output_token_sampling_mask": kept},
            )
            expected += kept
        else:
            sample.append_response_tokens(tokens=tokens, trainable=False)
            expected += [[]] * count
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if not any(sampled for sampled, _ in parts):
        assert ids is None and offsets is None
        return
    found = [ids[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert found == expected
    sample.validate()
    sample.rollout_top_p_token_offsets = offsets[:-1]
    with pytest.raises(UserError, match="rollout_top_p_token_offsets for"):
        sample.validate()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="2 tokens were appended with the sampling masks of 1"):
        extended_mask(None, None, 0, [[1]], 2)
    assert "decrease" in mask_offsets_problem([0, 3, 2], 9)
    assert mask_offsets_problem([0, 3, 3], 9) == ""
    assert "but the offsets end at 2" in mask_problem([1], [0, 2], 1)
    assert mask_problem([1], [0, 1], 1) == ""
    body = {
        "output_ids": [5],
        "meta_info": {
            "output_token_logprobs": [[-1.0, 5, None]],
            "output_token_sampling_logprobs": [None],
        },
    }
    with pytest.raises(EngineError, match="sampling log-probs"):
        GenerateResult.from_json(body)
    body["meta_info"]["output_token_sampling_logprobs"] = [-0.25]
    assert GenerateResult.from_json(body).log_probs == [-0.25]


def test_an_answer_with_a_mask_is_recorded_with_log_probs_over_it() -> None:
    """A generate function hands on ``output_token_logprobs``, which are of the whole vocabulary;
    the trainer's are over the mask."""
    answer = {
        "output_token_logprobs": [[-2.0, 5, None], [-3.0, 6, None]],
        "output_token_sampling_mask": [[5, 9], [6]],
        "output_token_sampling_logprobs": [-0.5, 0.0],
    }
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(
        tokens=[token for _, token, _ in answer["output_token_logprobs"]],
        log_probs=[log_prob for log_prob, _, _ in answer["output_token_logprobs"]],
        meta_info=answer,
    )
    assert sample.rollout_log_probs == [-0.5, 0.0]
    with pytest.raises(UserError, match="1 tokens were appended with 2 output_token_sampling_log"):
        sample.append_response_tokens(tokens=[5], log_probs=[-2.0], meta_info=answer)
    before = sample.to_dict()
    sample.append_response_tokens(meta_info=answer)  # what ended it, say
    assert str(sample.to_dict()) == str(before)


def masked_group(ids: list[int], offsets: list[int], **fields: Any) -> Group:
    """One sample, which has the response 7, 8."""
    sample = Sample(
        index=4,
        tokens=[1, 2, 7, 8],
        response_length=2,
        reward=1.0,
        status=SampleStatus.COMPLETED,
        rollout_top_p_token_ids=np.array(ids, dtype=np.int32),
        rollout_top_p_token_offsets=np.array(offsets, dtype=np.int32),
        **fields,
    )
    return Group(0, [[sample]])


def converted(group: Group, **flags: Any) -> Any:
    config = make_config(rollout_batch_size=1, n_samples_per_prompt=1, num_rollout=1, **flags)
    return to_train_batches([group], config, TrainLayout(), rollout_id=0)


def test_a_mask_without_the_token_that_was_sampled_is_refused() -> None:
    """Its log-prob would be that of a token of probability 0."""
    converted(masked_group([7, 9, 8], [0, 2, 3]))
    converted(masked_group([8], [0, 0, 1]))
    with pytest.raises(UserError, match=r"index 4.*lack token 8, sampled at position 1"):
        converted(masked_group([7, 9, 7], [0, 2, 3]))


def cut_samples(args: Any, samples: list[Sample]) -> dict[str, Any]:
    """A converter that leaves out the last token, and forgets masks and teachers' tokens."""
    return {
        "tokens": [sample.tokens[:-1] for sample in samples],
        "response_lengths": [sample.response_length - 1 for sample in samples],
        "rewards": [1.0 for _ in samples],
        "loss_masks": [[1] * (sample.response_length - 1) for sample in samples],
        **{
            name: [getattr(sample, name) for sample in samples]
            for name in (
                *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
                *("rollout_routed_experts", "teacher_top_tokens"),
            )
        },
    }


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (masked_group([7, 9, 8], [0, 2, 3]), "offsets for 2 of 1 tokens"),
        (
            masked_group([], [0, 0, 0], teacher_top_tokens=np.zeros((2, 2, 3), dtype=np.float32)),
            r"teacher_top_tokens of shape \[2, 2, 3\] for 1 response",
        ),
    ],
)
def test_what_belongs_to_tokens_that_a_converter_has_cut_off_is_refused(
    group: Group, said: str
) -> None:
    sample = group.samples[0]
    if not len(sample.rollout_top_p_token_ids):
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    path = f"{__name__}.cut_samples"
    with pytest.raises(UserError, match=said):
        converted(group, custom_convert_samples_to_train_data_path=path)


def test_a_converter_may_copy_what_no_sample_has() -> None:
    group = masked_group([], [0, 0, 0])
    sample = group.samples[0]
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = None
    path = f"{__name__}.cut_samples"
    (batch,) = converted(group, custom_convert_samples_to_train_data_path=path)
    assert batch.payloads == {}


def test_packing_puts_masks_behind_each_other() -> None:
    tokens = [torch.arange(4), torch.arange(5), torch.arange(3)]
    masks = {
        "sampling_mask_ids": [torch.tensor([7, 8, 9]), torch.tensor([]), torch.tensor([4, 5])],
        "sampling_mask_offsets": [
            torch.tensor([0, 2, 3]),
            torch.tensor([]),  # a sample that trains nothing
            torch.tensor([0, 2]),
        ],
    }
    kept = pack([2, 0, 1], tokens, [2, 2, 1], PackingOptions(CPU), masks).kept
    assert kept is not None
    assert kept.ids.tolist() == [4, 5, 7, 8, 9] and kept.rows.tolist() == [0, 0, 1, 1, 2]
    assert kept.bounds == [0, 2, 4, 5, 5, 5]
    assert kept.whole[:, 0].tolist() == [False] * 3 + [True] * 2


def test_a_trainer_computes_over_what_is_kept() -> None:
    """The same batch with masks of everything gives the same numbers; one with the target alone
    gives log-probs of 0."""
    batch = make_batch()
    vocab = 0
    backend = trainer()
    try:
        plain = backend.log_probs(batch)
        vocab = backend.spec.vocab_size

        def scores(rows_of: Any) -> list[torch.Tensor]:
            ids = []
            offsets = []
            for tokens, length in zip(batch.tokens, batch.response_lengths):
                rows = [rows_of(int(token)) for token in tokens[tokens.numel() - length :]]
                ids.append(torch.tensor([token for row in rows for token in row]))
                offsets.append(torch.tensor(np.cumsum([0, *map(len, rows)])))
            batch.payloads |= {"sampling_mask_ids": ids, "sampling_mask_offsets": offsets}
            found = backend.log_probs(batch)
            assert found is not None
            return found

        everything = scores(lambda token: range(vocab))
        alone = scores(lambda token: [token])
    finally:
        backend.close()
    assert plain is not None
    assert all(torch.equal(a, b) for a, b in zip(plain, everything, strict=True))
    assert all((values == 0).all() for values in alone)


def test_an_engine_that_tells_no_mask_stops_the_run() -> None:
    """Its log-probs would be those of the whole vocabulary, the trainer's too, and ratios wrong."""
    state = make_state(FakeClient(), sampling_mask=True)
    sample = Sample(index=0, prompt="Hi", tokens=[1, 2])

    async def in_a_rollout() -> None:
        bind_state(state)
        await generate(state.args, sample, state.params_for(sample))

    with pytest.raises(UserError, match="http://fake returned no sampling mask"):
        asyncio.run(in_a_rollout())
