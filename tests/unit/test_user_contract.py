"""Whatever a user's function returns or changes is trained on as it is meant, or refused by its
flag and path.

Three tables meet each kind of function: fields that nobody may change, fields that anybody may, and
values that are no rewards. Odd fields of samples come from a strategy. No traceback of slime's own
counts as an answer.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.config import make_config
from slime.errors import UserError
from slime.observe.alarms import find_alarms
from slime.rollout.debug_data import save_rollout
from slime.rollout.dynamic_sampling import DynamicSampler
from slime.rollout.filters import call_dynamic_filter, verdict_of
from slime.rollout.finish import finish_evaluation, finish_rollout
from slime.rollout.generate import generate
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.trajectory import GroupRun, GroupRunner
from slime.rollout.user_rollouts import (
    call_rollout_fn,
    call_with_groups,
    check_groups,
    validate_groups,
)
from slime.samples.batch import TrainLayout
from slime.samples.buffer import SampleBuffer
from slime.samples.convert import to_train_batches
from slime.samples.sample_fields import (
    FIELDS,
    FROZEN,
    LARGEST_LOG_PROB,
    number_problem,
    unpicklable,
)
from slime.samples.types import Group, Sample, SampleStatus, TokenSpan
from slime.trainer.non_finite import NonFiniteTraining
from slime.trainer.records import RolloutTensors
from slime.trainer.user_functions import change_rollout, functions_before_loss
from slime.user_code import process_state
from slime.user_code.hooks import (
    DynamicFilterOutput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
)
from slime.user_code.loading import (
    FunctionFailed,
    _module_of_file,
    load_function,
    makers_of_samples,
)
from tests.support.fake_rollout import (
    FakeClient,
    FakeRewards,
    FakeSource,
    FakeTokenizer,
    hook_args,
    make_state,
)
from tests.support.trainer_ranks import make_batch

ME = __name__ + "."
#: What the function under test does; set by each test.
DO: list[Callable[..., Any]] = []


def finished(index: int, **fields: Any) -> Sample:
    given = {
        "index": index,
        "group_index": 0,
        "prompt": [{"role": "user", "content": "a"}],
        "tokens": [5, 6, 7, 8],
        "response": "ab",
        "response_length": 2,
        "loss_mask": [1, 1],
        "rollout_log_probs": [-1.0, -0.5],
        "weight_versions": ["1"],
        "token_spans": [TokenSpan(0, 2, 1)],
        "reward": float(index),
        "status": SampleStatus.COMPLETED,
        "label": "x",
    }
    return Sample(**(given | fields))


# -- each kind of function that gets finished samples ----------------------------------------------


def reward(args: Any, samples: Any, **kwargs: Any) -> Any:
    for sample in samples if isinstance(samples, list) else [samples]:
        DO[0](sample)
    return [1.0] * len(samples) if isinstance(samples, list) else 1.0


async def reward_async(args: Any, sample: Any, **kwargs: Any) -> Any:
    await asyncio.sleep(0)
    return reward(args, sample)


def dynamic_filter(args: Any, samples: list[Sample], **kwargs: Any) -> bool:
    DO[0](samples[0])
    return True


def of_groups(args: Any, groups: list[list[Sample]], *more: Any) -> None:
    DO[0](groups[0][0])


def rollout_log(
    rollout_id: int, args: Any, samples: list[Sample], extra_metrics: Any, rollout_time: float
) -> None:
    DO[0](samples[0])


def post_process(args: Any, samples: list[Sample]) -> Any:
    for sample in samples:
        DO[0](sample)
    return [0.0] * len(samples), [0.0] * len(samples)


def convert(args: Any, samples: list[Sample]) -> Any:
    for sample in samples:
        DO[0](sample)
    return converted(samples)


def converted(samples: list[Sample]) -> dict[str, Any]:
    return {
        "tokens": [list(sample.tokens) for sample in samples],
        "response_lengths": [2] * len(samples),
        "rewards": [0.0] * len(samples),
    }


def config(**flags: Any) -> Any:
    return make_config(rollout_batch_size=1, n_samples_per_prompt=2, num_rollout=1, **flags)


def log_with(samples: list[Sample], path: str) -> None:
    flags = config(custom_rollout_log_function_path=path)
    output = RolloutFnTrainOutput([Group(0, [[sample] for sample in samples])])
    asyncio.run(finish_rollout(flags, flags.flat(), 0, output, 1.0))


def batches(samples: list[Sample], **flags: Any) -> Any:
    return to_train_batches(
        [Group(0, [[sample] for sample in samples])], config(**flags), TrainLayout(), 0
    )


def groups_with(dest: str, samples: list[Sample], path: str) -> None:
    asyncio.run(call_with_groups(dest, SimpleNamespace(**{dest: path}), [samples], limit=10.0))


def filter_with(samples: list[Sample], path: str) -> None:
    args = SimpleNamespace(dynamic_sampling_filter_path=path)
    asyncio.run(call_dynamic_filter(load_function(path), args, samples))


#: Kind → flag, function, and the call with two samples and the function's path.
KINDS: dict[str, tuple[str, str, Callable[[list[Sample], str], Any]]] = {
    "reward": (
        "--custom-rm-path",
        "reward",
        lambda samples, path: asyncio.run(
            RewardPool(config(custom_rm_path=path)).score(samples[0])
        ),
    ),
    "async reward": (
        "--custom-rm-path",
        "reward_async",
        lambda samples, path: asyncio.run(
            RewardPool(config(custom_rm_path=path)).score(samples[0])
        ),
    ),
    "group reward": (
        "--custom-rm-path",
        "reward",
        lambda samples, path: asyncio.run(
            RewardPool(config(custom_rm_path=path, group_rm=True)).score_group(samples)
        ),
    ),
    "dynamic filter": ("--dynamic-sampling-filter-path", "dynamic_filter", filter_with),
    "sample filter": (
        "--rollout-sample-filter-path",
        "of_groups",
        lambda samples, path: groups_with("rollout_sample_filter_path", samples, path),
    ),
    "all samples": (
        "--rollout-all-samples-process-path",
        "of_groups",
        lambda samples, path: groups_with("rollout_all_samples_process_path", samples, path),
    ),
    "rollout log": ("--custom-rollout-log-function-path", "rollout_log", log_with),
    "post-process": (
        "--custom-reward-post-process-path",
        "post_process",
        lambda samples, path: batches(samples, custom_reward_post_process_path=path),
    ),
    "conversion": (
        "--custom-convert-samples-to-train-data-path",
        "convert",
        lambda samples, path: batches(samples, custom_convert_samples_to_train_data_path=path),
    ),
}


def setting(name: str, value: Any) -> Callable[[Sample], None]:
    return lambda sample: setattr(sample, name, value)


#: Changes that no such function may make → the field.
FORBIDDEN: dict[str, tuple[str, Callable[[Sample], Any]]] = {
    "a token in place": ("tokens", lambda s: s.tokens.__setitem__(1, 9)),
    "a token more": ("tokens", lambda s: s.tokens.append(9)),
    "other tokens": ("tokens", setting("tokens", [1, 2])),
    "a mask in place": ("loss_mask", lambda s: s.loss_mask.__setitem__(0, 0)),
    "no mask": ("loss_mask", setting("loss_mask", None)),
    "a log-prob in place": (
        "rollout_log_probs",
        lambda s: s.rollout_log_probs.__setitem__(1, -9.0),
    ),
    "log-probs as an array": (
        "rollout_log_probs",
        setting("rollout_log_probs", np.array([-1.0, -0.5])),
    ),
    "the length": ("response_length", setting("response_length", 1)),
    "the index": ("index", setting("index", 17)),
    "the group": ("group_index", setting("group_index", 17)),
    "the trajectory": ("rollout_id", setting("rollout_id", 17)),
    "the prompt": ("prompt", setting("prompt", "other")),
    "a message of the prompt": ("prompt", lambda s: s.prompt[0].__setitem__("content", "other")),
    "the response": ("response", setting("response", "other")),
    "the versions": ("weight_versions", lambda s: s.weight_versions.append("2")),
    "a span in place": ("token_spans", lambda s: setattr(s.token_spans[0], "weight_version", 7)),
    "the status": ("status", setting("status", SampleStatus.FAILED)),
    "the experts": (
        "rollout_routed_experts",
        setting("rollout_routed_experts", np.zeros((3, 1, 1), dtype=np.int32)),
    ),
    "the tokens it was drawn from": (
        "rollout_top_p_token_ids",
        setting("rollout_top_p_token_ids", np.array([1], dtype=np.int32)),
    ),
    "where those begin": (
        "rollout_top_p_token_offsets",
        setting("rollout_top_p_token_offsets", np.array([0, 1], dtype=np.int32)),
    ),
    "an appended turn": ("tokens", lambda s: s.append_response_tokens(tokens=[9], trainable=False)),
    "a reset": ("tokens", lambda s: s.reset_response()),
}
ALLOWED: dict[str, Callable[[Sample], Any]] = {
    "metadata": lambda s: s.metadata.__setitem__("mine", 1),
    "train_metadata": setting("train_metadata", {"mine": 1}),
    "remove_sample": setting("remove_sample", True),
    "reward": setting("reward", 0.5),
    "teacher_log_probs": setting("teacher_log_probs", torch.tensor([-1.0, -2.0])),
    "label": setting("label", "y"),
    "an attribute of its own": setting("mine", [1]),
    "an equal list": lambda s: setattr(s, "tokens", list(s.tokens)),
}


def test_every_field_of_a_sample_has_a_row() -> None:
    assert set(FIELDS) == set(vars(Sample())) and {name for name, _ in FORBIDDEN.values()} == set(
        FROZEN
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", FORBIDDEN)
def test_what_was_generated_is_not_changed(kind: str, change: str) -> None:
    flag, name, call = KINDS[kind]
    field, DO[:] = FORBIDDEN[change][0], [FORBIDDEN[change][1]]
    samples = [finished(0), finished(1)]
    before = [copy.deepcopy(vars(sample)) for sample in samples]
    with pytest.raises(FunctionFailed) as caught:
        call(samples, ME + name)
    assert f"'{ME}{name}' ({flag}) changed {field}" in caught.value.what and caught.value.fix
    kept = [{field: vars(sample)[field] for field in FROZEN} for sample in samples]
    assert kept == [{field: values[field] for field in FROZEN} for values in before], (
        "it is set back"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ALLOWED)
def test_notes_on_a_sample_may_be_changed(kind: str, change: str) -> None:
    _, name, call = KINDS[kind]
    DO[:] = [ALLOWED[change]]
    call([finished(0), finished(1)], ME + name)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_function_leaves_the_working_directory(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_state, "_told", {})
    flag, name, call = KINDS[kind]
    DO[:] = [lambda sample: os.chdir("/")]
    before = os.getcwd()
    call([finished(0), finished(1)], ME + name)
    assert os.getcwd() == before
    assert f"'{ME}{name}' ({flag}) has changed the working directory" in caplog.text


ODD_NOTES: dict[str, tuple[str, Callable[[Sample], Any]]] = {
    "no metadata": ("metadata", setting("metadata", None)),
    "metadata as text": ("metadata", setting("metadata", "x")),
    "a word for a flag": ("remove_sample", setting("remove_sample", "no")),
    "too few teacher's": ("teacher_log_probs", setting("teacher_log_probs", [-1.0])),
    "teacher's nan": (
        "teacher_log_probs",
        setting("teacher_log_probs", np.array([math.nan, -1.0])),
    ),
    "a list of notes": ("train_metadata", setting("train_metadata", [1])),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ODD_NOTES)
def test_notes_that_cannot_be_used_name_the_function_that_made_them(kind: str, change: str) -> None:
    flag, name, call = KINDS[kind]
    field, DO[:] = ODD_NOTES[change][0], [ODD_NOTES[change][1]]
    samples = [finished(0), finished(1)]
    before = copy.deepcopy(vars(samples[0])[field])
    with pytest.raises(FunctionFailed) as caught:
        call(samples, ME + name)
    assert (
        f"'{ME}{name}' ({flag}) set " in caught.value.what
        and field in caught.value.what
        and caught.value.fix
    )
    assert vars(samples[0])[field] == before, "it is set back"


@pytest.mark.parametrize("kind", ["dynamic filter", "sample filter"])
@pytest.mark.parametrize("reward", ["bad", math.nan, 10**400])
def test_a_filter_that_sets_no_reward_is_named(kind: str, reward: Any) -> None:
    flag, name, call = KINDS[kind]
    DO[:] = [setting("reward", reward)]
    with pytest.raises(FunctionFailed) as caught:
        call([finished(0), finished(1)], ME + name)
    assert (
        f"'{ME}{name}' ({flag}) returned" in caught.value.what
        and "the reward of sample 0" in caught.value.what
    )


def test_a_sample_keeps_its_class() -> None:
    DO[:] = [lambda sample: setattr(sample, "__class__", type("Other", (Sample,), {}))]
    sample = finished(0)
    with pytest.raises(FunctionFailed, match="changed the class"):
        filter_with([sample], ME + "dynamic_filter")
    assert type(sample) is Sample


@pytest.mark.parametrize(
    ("field", "value", "is_refused"),
    [
        ("reward", 0.5, False),
        ("reward", None, False),
        ("reward", {"score": 0.5}, False),
        ("reward", float("nan"), True),
        ("metadata", {"seen": True}, False),
        ("remove_sample", True, False),
    ],
)
def test_a_reward_that_is_set_is_a_number(field: str, value: Any, is_refused: bool) -> None:
    sample = finished(0)
    DO[:] = [setting(field, value)]
    if not is_refused:
        filter_with([sample], ME + "dynamic_filter")
        assert getattr(sample, field) == value
        return
    with pytest.raises(FunctionFailed, match="the reward of sample"):
        filter_with([sample], ME + "dynamic_filter")


@pytest.mark.parametrize(("value", "is_fine"), [(LARGEST_LOG_PROB, True), (0.0011, False)])
def test_log_probs_may_be_above_zero_by_a_rounding(value: float, is_fine: bool) -> None:
    for values in ([-1.0, value], np.array([-1.0, value])):
        assert (number_problem("rollout_log_probs", values) == "") == is_fine


def test_a_verdict_without_a_truth_is_refused_by_name() -> None:
    with pytest.raises(FunctionFailed, match="the filter 'mine' returned"):
        verdict_of(np.array([True, False]), "the filter 'mine'")


def test_a_reward_that_changes_a_sample_is_not_let_through_by_the_second_try() -> None:
    DO[:] = [setting("index", 0)]
    state = make_state(FakeClient(), args=hook_args())
    group = GroupRun.of([Sample(index=5, group_index=2, tokens=[1, 2], prompt="p")])
    pool = RewardPool(config(custom_rm_path=ME + "reward"))
    asyncio.run(GroupRunner(state, pool, rollout_id=0).run(group))
    assert "changed index (from 5 to 0)" in str(group.failure) and group.samples[0].index == 5


def removes(groups: Any) -> None:
    groups.pop()


def swaps(samples: Any) -> None:
    samples.reverse()


@pytest.mark.parametrize(
    ("kind", "change", "is_refused"),
    [
        ("group reward", "swaps", True),
        ("post-process", "swaps", True),
        ("conversion", "swaps", True),
        ("dynamic filter", "removes", True),
        ("dynamic filter", "swaps", False),
        ("sample filter", "removes", True),
        ("sample filter", "swaps", False),
        ("rollout log", "removes", False),
    ],
)
def test_lists_by_which_results_go_stay_as_they_are(
    kind: str, change: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, name, call = KINDS[kind]
    DO[:] = [lambda sample: None]
    whole, do = globals()[name], globals()[change]
    position = {
        "reward": 1,
        "dynamic_filter": 1,
        "of_groups": 1,
        "rollout_log": 2,
        "post_process": 1,
        "convert": 1,
    }

    changed: list[list[Any]] = []
    before: list[list[Any]] = []

    def changes(*args: Any, **kwargs: Any) -> Any:
        result = whole(*args, **kwargs)
        given = args[position[name]]
        changed.append(given[0] if name == "of_groups" else given)
        before.append(changed[0][:])
        do(changed[0])
        return result

    monkeypatch.setitem(globals(), name, changes)
    load_function.cache_clear()
    _module_of_file.cache_clear()
    samples = [finished(0), finished(1)]
    try:
        if not is_refused:
            call(samples, ME + name)
            return
        with pytest.raises(FunctionFailed, match="of a list of samples that it was given"):
            call(samples, ME + name)
        assert changed[0] == before[0], "it is set back"
    finally:
        load_function.cache_clear()
        _module_of_file.cache_clear()


# -- rewards ---------------------------------------------------------------------------------------


class Odd:
    """A number that fails, and cannot be shown."""

    def __float__(self) -> float:
        raise ZeroDivisionError

    def __repr__(self) -> str:
        raise ZeroDivisionError


NO_REWARDS: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "1e300": 1e300,
    "-1e19": -1e19,
    "10**400": 10**400,
    "10**5000": 10**5000,
    "a fraction": Fraction(10**400),
    "Decimal nan": Decimal("nan"),
    "a signalling nan": Decimal("sNaN"),
    "Decimal 1e400": Decimal("1e400"),
    "complex": 1j,
    "complex64": np.complex64(1 + 1j),
    "text": "1.0",
    "bytes": b"1",
    "a list": [1.0],
    # of samples that have two tokens in one turn
    "an array of three": np.array([0.0, 1.0, 0.0]),
    "a tensor of three": torch.tensor([0.0, 1.0, 0.0]),
    "numpy nan": np.float32("nan"),
    "torch inf": torch.tensor(math.inf),
    "odd": Odd(),
    "a set": {1},
}
REWARDS: dict[str, Any] = {
    "bool": True,
    "Decimal": Decimal("0.5"),
    "Fraction": Fraction(1, 3),
    "numpy": np.float32(0.5),
    "numpy int": np.int64(-3),
    "numpy bool": np.bool_(True),
    "torch": torch.tensor(0.5, dtype=torch.bfloat16),
    "an array of one": np.array([0.5]),
    "1e18": 1e18,
}


def rewarding(args: Any, samples: Any, **kwargs: Any) -> Any:
    return [DO[0]] * len(samples) if isinstance(samples, list) else DO[0]


def rewarding_dicts(args: Any, sample: Any, **kwargs: Any) -> Any:
    return {"score": DO[0]}


def post_rewarding(args: Any, samples: list[Sample]) -> Any:
    return [DO[0]] * len(samples), [0.0] * len(samples)


def post_rewarding_arrays(args: Any, samples: list[Sample]) -> Any:
    return [0.0] * len(samples), [DO[0]] * len(samples)


def converting(args: Any, samples: list[Sample]) -> Any:
    return converted(samples) | {"rewards": [DO[0]] * len(samples)}


async def generating(args: Any, sample: Sample, sampling_params: Any) -> Any:
    sample = await generate(args, sample, sampling_params)
    DO[0](sample)
    return sample


def evaluating(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return {"mine": {"rewards": [DO[0]], "samples": None}}


async def evaluate_with(path: str) -> Any:
    args = SimpleNamespace(eval_function_path=path)
    output = await call_rollout_fn(
        load_function(path), args, 0, FakeSource(2), RolloutFnEvalOutput, path
    )
    assert isinstance(output, RolloutFnEvalOutput)
    return await finish_evaluation(config(), args, 0, output, 1.0)


def generated(path: str = ME + "generating", **flags: Any) -> GroupRun:
    """A group of one prompt through a generate function."""
    args = hook_args(**{"custom_generate_function_path": path, **flags})
    state = make_state(FakeClient(), args=args, vocab_size=1000)
    group = GroupRun.of(
        [Sample(index=j, group_index=0, tokens=[1, 7], prompt="p") for j in range(2)]
    )
    asyncio.run(GroupRunner(state, FakeRewards(), rollout_id=0).run(group))
    return group


def generate_with_reward(path: str) -> None:
    value = DO[0]
    DO[:] = [setting("reward", value)]
    if (failure := generated(path).failure) is not None:
        raise failure


REWARDING: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "reward": (
        "--custom-rm-path",
        "rewarding",
        lambda path: asyncio.run(RewardPool(config(custom_rm_path=path)).score(finished(0))),
    ),
    "group reward": (
        "--custom-rm-path",
        "rewarding",
        lambda path: asyncio.run(
            RewardPool(config(custom_rm_path=path, group_rm=True)).score_group([finished(0)])
        ),
    ),
    "dict reward": (
        "--custom-rm-path",
        "rewarding_dicts",
        lambda path: asyncio.run(
            RewardPool(config(custom_rm_path=path, reward_key="score")).score(finished(0))
        ),
    ),
    "raw rewards of the post-process": (
        "--custom-reward-post-process-path",
        "post_rewarding",
        lambda path: batches([finished(0)], custom_reward_post_process_path=path),
    ),
    "rewards of the post-process": (
        "--custom-reward-post-process-path",
        "post_rewarding_arrays",
        lambda path: batches([finished(0)], custom_reward_post_process_path=path),
    ),
    "conversion": (
        "--custom-convert-samples-to-train-data-path",
        "converting",
        lambda path: batches([finished(0)], custom_convert_samples_to_train_data_path=path),
    ),
    "evaluation": (
        "--eval-function-path",
        "evaluating",
        lambda path: asyncio.run(evaluate_with(path)),
    ),
    "generate": ("--custom-generate-function-path", "generating", generate_with_reward),
}


@pytest.mark.parametrize("kind", REWARDING)
@pytest.mark.parametrize("value", NO_REWARDS)
def test_what_is_no_reward_is_refused(kind: str, value: str) -> None:
    flag, name, call = REWARDING[kind]
    DO[:] = [NO_REWARDS[value]]
    if kind in ("reward", "generate", "group reward") and value == "a list":
        DO[:] = [[[1.0]]]
    with pytest.raises(FunctionFailed) as caught:
        call(ME + name)
    assert f"'{ME}{name}' ({flag}) returned" in caught.value.what and "reward" in str(caught.value)


@pytest.mark.parametrize("kind", REWARDING)
@pytest.mark.parametrize("value", REWARDS)
def test_numbers_of_every_library_are_rewards(kind: str, value: str) -> None:
    DO[:] = [REWARDS[value]]
    REWARDING[kind][2](ME + REWARDING[kind][1])


def test_a_number_beside_the_reward_is_told_and_left_out(
    fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    from slime.rollout.metrics import reward_parts

    pool = RewardPool(config(custom_rm_path=ME + "with_parts", reward_key="score"))
    rewards = [asyncio.run(pool.score(finished(index))) for index in range(2)]
    assert [
        m for m in caplog.messages if "with_parts' (--custom-rm-path) returned nan as 'bleu'" in m
    ]
    args = SimpleNamespace(reward_key="score")
    assert reward_parts([Sample(reward=reward) for reward in rewards], "r", args) == {
        "r/reward_part/n": 1.0
    }


def with_parts(args: Any, sample: Any, **kwargs: Any) -> Any:
    return {"score": 1.0, "bleu": math.nan, "huge": 10**400, "n": 1, "said": "x"}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    from slime import log

    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)


# -- what makes samples ----------------------------------------------------------------------------

#: What a generate function or a sample hook sets → what is said of it.
WRONG: dict[str, tuple[Callable[[Sample], Any], str]] = {
    "no prompt": (
        lambda s: setattr(s, "tokens", s.tokens[-s.response_length :]),
        "all of them of the response",
    ),
    "a length too long": (
        lambda s: setattr(s, "response_length", len(s.tokens) + 1),
        "response_length",
    ),
    "a length below 0": (setting("response_length", -1), "response_length -1"),
    "a length of text": (setting("response_length", "2"), "response_length '2'"),
    "a float length": (setting("response_length", 2.0), "response_length 2.0"),
    "no tokens": (setting("tokens", None), "tokens None"),
    "tokens of text": (setting("tokens", "abc"), "tokens 'abc'"),
    "a token beyond": (
        lambda s: s.tokens.__setitem__(0, 1000),
        "the token 1000, and the model has 1000 tokens",
    ),
    "a token far beyond": (lambda s: s.tokens.__setitem__(0, 10**30), "among its tokens"),
    "a token below 0": (lambda s: s.tokens.__setitem__(0, -1), "the token -1"),
    "a float token": (lambda s: s.tokens.__setitem__(0, 1.5), "1.5 among its tokens"),
    "a token of None": (lambda s: s.tokens.__setitem__(0, None), "None among its tokens"),
    "nested tokens": (lambda s: s.tokens.__setitem__(0, [1]), "[1] among its tokens"),
    "a short mask": (setting("loss_mask", [1]), "a loss_mask of 1 entries"),
    "a mask of halves": (
        lambda s: setattr(s, "loss_mask", [0.5] * s.response_length),
        "other than 0 and 1",
    ),
    "a mask of lists": (lambda s: setattr(s, "loss_mask", [[1]] * s.response_length), "loss_mask"),
    "a mask of None": (lambda s: setattr(s, "loss_mask", [None] * s.response_length), "loss_mask"),
    "a mask that is a number": (setting("loss_mask", 1), "loss_mask 1"),
    "short log-probs": (setting("rollout_log_probs", [-1.0]), "1 rollout_log_probs"),
    "log-probs of None": (lambda s: s.rollout_log_probs.__setitem__(0, None), "None at position 0"),
    "log-probs of text": (lambda s: s.rollout_log_probs.__setitem__(0, "-1"), "'-1' at position 0"),
    "log-probs of nan": (
        lambda s: s.rollout_log_probs.__setitem__(1, math.nan),
        "nan at position 1",
    ),
    "log-probs of -inf": (
        lambda s: s.rollout_log_probs.__setitem__(1, -math.inf),
        "-inf at position 1",
    ),
    "probabilities": (
        lambda s: setattr(s, "rollout_log_probs", [0.9] * s.response_length),
        "above 0: 0.9",
    ),
    "log-probs of 5": (
        lambda s: s.rollout_log_probs.__setitem__(1, 5.0),
        "above 0: 5 at position 1",
    ),
    "a log-prob": (setting("rollout_log_probs", -1.0), "rollout_log_probs -1.0"),
    "teacher's of nan": (
        lambda s: setattr(s, "teacher_log_probs", [math.nan] * s.response_length),
        "teacher_log_",
    ),
    "metadata None": (setting("metadata", None), "metadata None"),
    "train_metadata": (setting("train_metadata", [1]), "train_metadata [1]"),
    "a status": (setting("status", "done"), "status 'done'"),
    "a status None": (setting("status", None), "status None"),
    "a status of a list": (setting("status", []), "status []"),
    "versions": (setting("weight_versions", 3), "weight_versions 3"),
    "a version of None": (setting("weight_versions", ["2", None]), "weight_versions ['2', None]"),
    "a version of float": (setting("weight_versions", [2.0]), "weight_versions [2.0]"),
    "a version of lists": (setting("weight_versions", [[0, 2]]), "weight_versions [[0, 2]]"),
    "a version of spans": (setting("token_spans", [TokenSpan(0, 1, "2")]), "token_spans"),  # type: ignore[arg-type]
    "spans of tuples": (setting("token_spans", [(0, 1, 1)]), "token_spans"),
    "spans beyond": (setting("token_spans", [TokenSpan(0, 99, 1)]), "token_spans"),
    "a response of tokens": (setting("response", [1]), "response [1]"),
    "a response of None": (setting("response", None), "response None"),
    "a prompt": (setting("prompt", 3), "prompt 3"),
    "an index of text": (setting("index", "3"), "index '3'"),
    "a trajectory": (setting("rollout_id", [1]), "rollout_id [1]"),
    "seconds of nan": (setting("non_generation_time", math.nan), "non_generation_time nan"),
    "counters": (setting("spec_info", None), "spec_info None"),
    "experts of text": (setting("rollout_routed_experts", "x"), "rollout_routed_experts"),
    "too many experts": (
        setting("rollout_routed_experts", np.zeros((99, 1, 1), dtype=int)),
        "rollout_routed_experts",
    ),
    "half a mask": (setting("rollout_top_p_token_ids", []), "rollout_top_p_token_ids"),
    "a mask of text": (
        lambda s: (
            setattr(s, "rollout_top_p_token_ids", "x"),
            setattr(s, "rollout_top_p_token_offsets", [0] * (s.response_length + 1)),
        ),
        "rollout_top_p_token_ids",
    ),
}
RIGHT: dict[str, Callable[[Sample], Any]] = {
    "arrays": lambda s: (
        setattr(s, "tokens", np.array(s.tokens)),
        setattr(s, "rollout_log_probs", torch.tensor(s.rollout_log_probs)),
        setattr(s, "loss_mask", np.ones(s.response_length, dtype=bool)),
        setattr(s, "response_length", np.int64(s.response_length)),
    ),
    "numbers of arrays": lambda s: setattr(s, "tokens", [np.int64(token) for token in s.tokens]),
    "a tuple": lambda s: setattr(s, "tokens", tuple(s.tokens)),
    "almost certain": lambda s: setattr(s, "rollout_log_probs", [1e-6] * s.response_length),
    "no log-probs": setting("rollout_log_probs", None),
    "a status of text": setting("status", "truncated"),
    "versions of numbers": lambda s: setattr(s, "weight_versions", [1, np.int64(2), "default"]),
    "the index of a row": setting("index", 0),
    "the group of a row": setting("group_index", 0),
    "one trajectory for all": setting("rollout_id", 0),
    "its own prompt": lambda s: (
        setattr(s, "prompt", "other"),
        setattr(s, "tokens", [3, *s.tokens]),
    ),
}


def hooking(args: Any, sample: Sample) -> None:
    DO[0](sample)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("by", ["generate", "sample hook"])
def test_a_sample_that_cannot_be_trained_on_is_refused(wrong: str, by: str) -> None:
    DO[:], said = [WRONG[wrong][0]], WRONG[wrong][1]
    if by == "generate":
        group, name = generated(), "generating' (--custom-generate-function-path)"
    else:
        group = generated(path=None, rollout_sample_hook_path=[ME + "hooking"])  # type: ignore[arg-type]
        name = "hooking' (--rollout-sample-hook-path)"
    assert isinstance(group.failure, FunctionFailed), group.failure
    assert f"'{ME}{name}" in group.failure.what and said in str(group.failure) and group.failure.fix


@pytest.mark.parametrize("right", RIGHT)
def test_a_sample_in_other_words_is_trained_on(right: str) -> None:
    DO[:] = [RIGHT[right]]
    group = generated()
    assert group.failure is None and [sample.index for sample in group.samples] == [0, 1]
    for sample in group.samples:
        sample.reward = 1.0
    assert len(group.trajectories) == len(GroupRun.of(group.for_later()).trajectories)
    [batch] = to_train_batches([group.to_group()], config(), TrainLayout(), 0)
    assert batch.num_samples == 2


def test_versions_of_weights_are_text() -> None:
    DO[:] = [RIGHT["versions of numbers"]]
    assert [sample.weight_versions for sample in generated().samples] == [["1", "2", "default"]] * 2


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=2),
    st.lists(
        st.one_of(st.none(), st.integers(-2, 1200), st.floats(), st.text(max_size=1)), max_size=12
    ),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from(
        [
            np.zeros(3),
            np.array(2),
            torch.ones(4),
            Decimal(1),
            Odd(),
            object(),
            Sample,
            lambda: 1,
            {1},
        ]
    ),
)


@given(st.dictionaries(st.sampled_from(sorted(FIELDS)), ODD_VALUES, min_size=1, max_size=3))
@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_field_with_any_value_is_trained_on_or_refused_by_name(values: dict[str, Any]) -> None:
    DO[:] = [
        lambda sample: [setattr(sample, name, copy.copy(value)) for name, value in values.items()]
    ]
    group = generated()
    if group.failure is not None:
        assert isinstance(group.failure, FunctionFailed)
        assert f"'{ME}generating' (--custom-generate-function-path)" in group.failure.what
        return
    if not group.is_scored or not any(sample.response_length for sample in group.samples):
        return
    flags = config(custom_generate_function_path=ME + "generating", reward_key="score")
    try:
        [batch] = to_train_batches([group.to_group()], flags, TrainLayout(), 0)
    except (
        UserError
    ) as error:  # a dict reward without its key, a sample that is too long, all failed
        assert error.fix
        return
    assert all(torch.isfinite(values).all() for values in batch.rollout_log_probs or ())
    assert all(map(math.isfinite, batch.rewards))
    assert all(
        len(mask) == n < len(t)
        for mask, n, t in zip(batch.loss_masks, batch.response_lengths, batch.tokens)
    )


# -- indices ---------------------------------------------------------------------------------------


class Zeros(FakeSource):
    """Every index is 0."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for sample in (sample for group in groups for sample in group):
            setattr(sample, DO[0], 0)  # type: ignore[call-overload]
        return groups


@pytest.mark.parametrize("field", ["index", "group_index"])
def test_a_data_source_that_gives_each_sample_one_index_is_refused(field: str) -> None:
    DO[:] = [field]  # type: ignore[list-item]
    args = hook_args(data_source_path="mine.Source")
    runner = GroupRunner(make_state(FakeClient(), args=args), FakeRewards(), rollout_id=0)
    with pytest.raises(
        FunctionFailed, match=r"'mine.Source' \(--data-source-path\) gave a group"
    ) as caught:
        asyncio.run(DynamicSampler(runner, Zeros(2), target=4, draw_size=4, group_size=2).collect())
    assert field.split("_")[-1] in caught.value.what


def rolling(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return DO[0]


def rolled(samples: Any) -> list[Group]:
    DO[:] = [samples]
    path = ME + "rolling"
    call = call_rollout_fn(load_function(path), None, 0, FakeSource(2), RolloutFnTrainOutput, path)
    output = asyncio.run(call)
    assert isinstance(output, RolloutFnTrainOutput)
    origin = f"'{path}' (--rollout-function-path)"
    validate_groups(output.samples, origin)
    check_groups(output.samples, origin, 1000, None, FakeTokenizer())
    return output.samples


def with_fields(**fields: Any) -> list[list[Sample]]:
    groups = [[finished(2 * g + j, group_index=g) for j in range(2)] for g in range(2)]
    for sample in (sample for group in groups for sample in group):
        vars(sample).update(fields)
    return groups


TWIN = finished(0)


@pytest.mark.parametrize(
    "samples",
    [
        with_fields(index=0),
        with_fields(group_index=0),
        [[TWIN, TWIN]],
        with_fields(reward=math.nan),
        with_fields(reward=10**400),
        with_fields(rollout_log_probs=[5.0, -1.0]),
        with_fields(tokens=[7, 8]),
        with_fields(tokens=[5, 6, 7, 1000]),
        with_fields(metadata=None),
        with_fields(rollout_id=[1]),
        with_fields(
            tokens=[], response_length=0, loss_mask=None, rollout_log_probs=None, token_spans=[]
        ),
        [[1]],
        [None],
        [],
        3,
        None,
        RolloutFnTrainOutput(None),  # type: ignore[arg-type]
        RolloutFnTrainOutput(with_fields(), metrics=[1]),  # type: ignore[arg-type]
    ],
)
def test_what_a_rollout_function_returns_is_refused_by_name(samples: Any) -> None:
    with pytest.raises(UserError) as caught:
        rolled(copy.deepcopy(samples))
    assert f"'{ME}rolling' (--rollout-function-path)" in caught.value.what and caught.value.fix


def test_a_rollout_function_may_leave_indices_to_the_order() -> None:
    assert len(rolled(with_fields(index=None, group_index=None))) == 2


def test_what_no_file_can_hold_is_named(tmp_path: Any) -> None:
    sample = finished(3)
    sample.metadata["lock"] = threading.Lock()
    with pytest.raises(
        UserError, match=r"metadata\['lock'\] of the sample with index 3 \(TypeError"
    ):
        save_rollout(str(tmp_path / "{rollout_id}.pt"), 0, [finished(2), sample])
    assert unpicklable([finished(0)]) == ""


# -- metrics ---------------------------------------------------------------------------------------


def logs_odd_metrics(
    rollout_id: int, args: Any, samples: Any, extra_metrics: Any, rollout_time: float
) -> Any:
    extra_metrics |= {"mine/huge": 10**400, "mine/nan": np.float32("nan"), "mine/text": "x"}
    return DO[0]


def test_metrics_that_are_not_finite_are_told_with_the_functions_name(
    fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    DO[:] = [None]  # type: ignore[list-item]
    flags = config(custom_rollout_log_function_path=ME + "logs_odd_metrics")
    output = asyncio.run(finish_rollout(flags, flags.flat(), 0, RolloutFnTrainOutput([]), 1.0))
    assert output.metrics is not None and math.isnan(output.metrics["mine/huge"])
    said = [
        m
        for m in caplog.messages
        if "logs_odd_metrics' (--custom-rollout-log-function-path) gives" in m
    ]
    assert len(said) == 3 and "mine/text" not in output.metrics
    DO[:] = [np.zeros(2)]  # type: ignore[list-item]
    with pytest.raises(FunctionFailed, match=r"returned an ndarray of shape \[2\]"):
        asyncio.run(finish_rollout(flags, flags.flat(), 0, RolloutFnTrainOutput([]), 1.0))


# -- training --------------------------------------------------------------------------------------

ORIGIN = "'mine.py:function' (--flag)"
IN_PLACE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "tokens": (lambda view: view["tokens"][0].fill_(1), "changed rollout_data['tokens'] in place"),
    "rewards": (
        lambda view: view["rewards"].__setitem__(0, 5.0),
        "changed rollout_data['rewards'] in place",
    ),
    "lengths": (
        lambda view: view["response_lengths"].pop(),
        "changed rollout_data['response_lengths'] in place",
    ),
    "nan": (
        lambda view: view["log_probs"][0].fill_(math.nan),
        "assigned rollout_data['log_probs'] with NaN",
    ),
    "masks": (
        lambda view: view["loss_masks"][0].fill_(0.5),
        "loss masks with values other than 0 and 1",
    ),
    "huge": (
        lambda view: view.update(advantages=[[10**400] * len(m) for m in view["loss_masks"]]),
        "not all of it",
    ),
    "1e300": (
        lambda view: view.update(advantages=[[1e300] * len(m) for m in view["loss_masks"]]),
        "NaN or infinite",
    ),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_what_training_goes_by_is_not_changed_in_place(change: str) -> None:
    do, said = IN_PLACE[change]
    batch = make_batch()
    masks = [mask.clone() for mask in batch.loss_masks]
    data = RolloutTensors(loss_masks=masks, log_probs=[torch.zeros_like(mask) for mask in masks])
    with pytest.raises(FunctionFailed) as caught:
        change_rollout(do, ORIGIN, batch, data, {})
    assert caught.value.what.startswith(ORIGIN) and said in caught.value.what


def test_a_loss_that_is_not_finite_names_the_users_functions_first() -> None:
    flags = config(loss_type="custom_loss", custom_loss_function_path="mine.loss")
    functions = functions_before_loss(flags)
    assert functions == ["'mine.loss' (--custom-loss-function-path)"]
    error = NonFiniteTraining(0, 0, math.nan, [3], [], functions)
    assert error.why.startswith(
        "functions of yours compute the loss: 'mine.loss'"
    ) and error.fix.startswith("check")
    assert "functions of yours" not in NonFiniteTraining(0, 0, math.nan, [3], []).why


def test_an_alarm_names_the_functions_that_made_the_log_probs() -> None:
    rows = [{"step": 1, "train/train_rollout_logprob_abs_diff": 0.5}]
    flags = {
        "custom_generate_function_path": "mine.generate",
        "rollout_function_path": "slime.rollout.loop.x",
    }
    [plain], [named] = find_alarms(rows), find_alarms(rows, flags=flags)
    assert plain.title == "Trainer and engine disagree" and "engine" not in named.title
    assert named.detail.startswith(makers_of_samples(flags)[0]) and named.fix.startswith(
        "check first"
    )


# -- return values and lists that nothing reads ----------------------------------------------------


def returning(args: Any, groups: Any, *more: Any) -> Any:
    return DO[0](groups)


def logging_function(
    rollout_id: int, args: Any, samples: Any, extra_metrics: Any, rollout_time: float
) -> Any:
    return DO[0](extra_metrics)


@pytest.mark.parametrize("dest", ["rollout_sample_filter_path", "rollout_all_samples_process_path"])
@pytest.mark.parametrize(
    ("do", "is_refused"),
    [
        (lambda groups: groups[:1], True),
        (lambda groups: [True, False], True),
        (lambda groups: groups, False),
        (lambda groups: None, False),
    ],
)
def test_a_filter_that_returns_groups_is_told_that_nothing_reads_them(
    dest: str, do: Any, is_refused: bool
) -> None:
    DO[:] = [do]
    if not is_refused:
        return groups_with(dest, [finished(0)], ME + "returning")
    with pytest.raises(FunctionFailed, match="which nothing reads") as caught:
        groups_with(dest, [finished(0)], ME + "returning")
    assert "return nothing" in caught.value.fix
    return None


@pytest.mark.parametrize("value", [{"a": 1}, {}, "ok", [1], 3, np.array([True, False])])
def test_a_log_function_does_not_switch_metrics_off_by_mistake(value: Any) -> None:
    DO[:] = [lambda metrics: value]
    with pytest.raises(FunctionFailed, match="returned") as caught:
        log_with([finished(0)], ME + "logging_function")
    assert "extra_metrics" in caught.value.fix


@pytest.mark.parametrize("value", ["x", None, [1.0], {"a": 1}, np.ones(2)])
def test_metrics_that_are_no_numbers_are_told_and_left_out(
    value: Any, fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    from slime.rollout.user_rollouts import checked_metrics

    found = checked_metrics({"a": value, "b": np.float32(1.0), "c": torch.tensor(2)}, "'mine'")
    assert found == {"b": 1.0, "c": 2.0} and "'mine' gives the metric a" in caplog.text


@pytest.mark.parametrize(
    "verdict",
    [
        math.nan,
        DynamicFilterOutput(keep="no"),  # type: ignore[arg-type]
        DynamicFilterOutput(keep=None),  # type: ignore[arg-type]
        DynamicFilterOutput(keep=False, reason=["a"]),  # type: ignore[arg-type]
        DynamicFilterOutput(keep=False, keep_when_insufficient="no"),  # type: ignore[arg-type]
    ],
)
def test_a_verdict_says_yes_or_no(verdict: Any) -> None:
    with pytest.raises(FunctionFailed, match="the filter returned"):
        verdict_of(verdict)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({}, "no data set"),
        ({"a": {"rewards": [1.0, 0.0], "truncated": [True]}}, "1 truncated for 2 rewards"),
        ({"a": {"rewards": [1.0, 0.0], "samples": [finished(0)]}}, "1 samples for 2 rewards"),
    ],
)
def test_an_evaluation_has_one_entry_per_reward(data: Any, said: str) -> None:
    flags = config()
    with pytest.raises(FunctionFailed, match=said):
        asyncio.run(finish_evaluation(flags, flags.flat(), 0, RolloutFnEvalOutput(data), 1.0))


#: What a buffer filter does with the buffer.
TAKEN: dict[str, Callable[[list[Any]], Any]] = {
    "loses one": lambda buffer: [buffer.pop(0)] if buffer.pop() else [],
    "loses all": lambda buffer: buffer.clear() or [],
    "gives one twice": lambda buffer: [buffer.pop(0)] * 2 if buffer.pop() else [],
    "gives others": lambda buffer: [[finished(9)]] if buffer.pop() else [],
    "gives none of a group": lambda buffer: [[]] if buffer.pop() else [],
    "changes an index": lambda buffer: setattr(buffer[0][0], "index", 7) or [buffer.pop(0)],
}


@pytest.mark.parametrize("change", TAKEN)
def test_a_buffer_filter_returns_what_it_removes(change: str) -> None:
    buffer = SampleBuffer(
        None, lambda args, rollout_id, groups, count: TAKEN[change](groups), "'f'"
    )
    buffer.add([[finished(index, group_index=index)] for index in range(3)])
    with pytest.raises(FunctionFailed, match="'f' returned"):
        buffer.take(2)


# -- samples that are one object, or out of step ---------------------------------------------------


async def one_for_all(args: Any, sample: Sample, sampling_params: Any) -> Any:
    return DO[0]


def replacing(args: Any, sample: Sample) -> Any:
    return DO[0](sample)


def test_one_object_for_two_samples_is_refused() -> None:
    DO[:] = [finished(0)]
    assert "returned one object for sample" in str(generated(ME + "one_for_all").failure)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda sample: setattr(sample, "tokens", sample.tokens[:-1]), "the same response_length"),
        (lambda sample: Sample(), "without tokens"),
        (setting("status", SampleStatus.ABORTED), "with the status aborted"),
        (setting("status", SampleStatus.PENDING), ""),
        (lambda sample: setattr(sample, "tokens", [9, *sample.tokens]), ""),
    ],
)
def test_a_hook_keeps_the_response_in_its_place(do: Any, said: str) -> None:
    DO[:] = [do]
    run = generated("", custom_generate_function_path=None,
                    rollout_sample_hook_path=[ME + "replacing"])  # fmt: skip
    assert (said in str(run.failure)) if said else run.failure is None


class SharingSource(FakeSource):
    """Gives all samples of a group the same lists and dicts."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.tokens, sample.metadata = group[0].tokens, group[0].metadata
                DO[0](sample)
        return groups


def drawn_from_sharing() -> list[list[Sample]]:
    state = make_state(FakeClient(), args=hook_args())
    sampler = DynamicSampler(
        GroupRunner(state, FakeRewards(), rollout_id=0), SharingSource(2),
        target=1, draw_size=1, group_size=2, max_failed_fraction=0.0,
    )  # fmt: skip
    return [run.samples for run in asyncio.run(sampler.collect()).chosen]


def test_samples_do_not_share_tokens_and_metadata() -> None:
    DO[:] = [lambda sample: None]
    [[one, other]] = drawn_from_sharing()
    assert one.tokens is not other.tokens and one.metadata is not other.metadata
    assert len(one.tokens) - one.response_length == len(other.tokens) - other.response_length


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (setting("reward", 1.0), "have a reward"),
        (setting("response", "x"), "have the response"),
        (setting("status", SampleStatus.COMPLETED), "no response"),
    ],
)
def test_half_made_samples_of_a_source_are_refused(change: Any, said: str) -> None:
    DO[:] = [change]
    with pytest.raises(FunctionFailed, match=said):
        drawn_from_sharing()


def padding(args: Any, samples: list[Sample]) -> Any:
    return converted(samples) | {"tokens": [[*sample.tokens, 0] for sample in samples]}


def test_padding_behind_a_response_is_refused() -> None:
    with pytest.raises(FunctionFailed, match="1 more tokens behind those of the sample"):
        batches([finished(0)], custom_convert_samples_to_train_data_path=ME + "padding")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("log_probs", "rollout_log_probs"), ("remove_samples", "remove_sample"), ("my_notes", "")],
)
def test_names_of_other_systems_are_told(
    name: str, meant: str, fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    DO[:] = [setting(name, [1])]
    filter_with([finished(0)], ME + "dynamic_filter")
    assert (f"sets sample.{name}" in caplog.text) == bool(meant)
    assert f"did you mean sample.{meant}?" in caplog.text or not meant


def test_ids_beyond_the_embedding_are_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.samples.convert.vocab_size_of", lambda *args: 8)
    with pytest.raises(UserError, match="has the token 8, and the model has 8 tokens"):
        batches([finished(0)])
    monkeypatch.undo()
    with pytest.raises(UserError, match="has the token -1"):
        batches([finished(0, tokens=[-1, 6, 7, 8])])


def test_a_rollout_without_a_trained_token_is_told(
    fresh: None, caplog: pytest.LogCaptureFixture
) -> None:
    batches([finished(0, remove_sample=True), finished(1, loss_mask=[0, 0])])
    assert "rollout 0 has no trained token" in caplog.text
