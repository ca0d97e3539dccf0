"""What users' functions do wrong costs the sample that they did it on: each hook, each way of going
wrong, in rollouts over HTTP on a fake engine. One rollout has all ways of one hook, one per
group."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from slime.cluster.rollout_actor import RolloutActor
from slime.config import make_config
from slime.errors import UserError
from slime.files import read_lines
from slime.observe.recorder import Recorder
from slime.rollout.generate import generate
from slime.rollout.loop import RolloutLoop
from slime.rollout.validate_generate_output import check_values
from slime.samples.batch import TrainLayout
from slime.samples.types import ANY_VERSION, Sample
from slime.user_code.hooks import DataSource, RolloutFnTrainOutput
from slime.user_code.loading import FunctionHangs
from tests.support.fake_engine import FakeEngine
from tests.support.fake_rollout import FakeSource, FakeTokenizer
from tests.support.run_folders import create_run

ME = f"{__name__}."
SEEN: list[str] = []


class Case(NamedTuple):
    """One way of going wrong.

    Attributes:
        do: what the function does with a sample; what it returns is returned.
        said: what is kept of it; "": the sample goes on.
    """

    do: Callable[[Sample], Any]
    said: str


class Own(BaseException):
    pass


def raises(error: BaseException) -> Callable[[Sample], Any]:
    def do(sample: Sample) -> Any:
        raise error

    return do


def gives(value: Any) -> Callable[[Sample], Any]:
    return lambda sample: value


def with_field(name: str, value: Any) -> Callable[[Sample], Any]:
    def do(sample: Sample) -> Sample:
        setattr(sample, name, value(sample))
        return sample

    return do


def polls_for_ever(sample: Sample) -> None:
    while True:
        time.sleep(0.001)


async def awaits_for_ever(sample: Sample) -> None:
    await asyncio.Event().wait()


async def swallows(sample: Sample) -> None:
    while "over" not in SEEN:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


def joins_a_deadlocked_child(sample: Sample) -> None:
    fork = multiprocessing.get_context("fork")
    lock = fork.Lock()
    lock.acquire()
    child = fork.Process(target=lock.acquire)
    child.start()
    try:
        child.join()
    finally:
        SEEN.append("the deadlocked child has ended")


def forks(sample: Sample) -> Any:
    if (pid := os.fork()) == 0:
        signal.alarm(60)  # should the child live on, it does not do so for ever
        return 0.0
    SEEN.append(f"child ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    return 0.5


async def forks_on_the_loop(sample: Sample) -> Sample:
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        return sample
    SEEN.append(f"child of the loop ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    return sample


def leaves_a_process(sample: Sample) -> Any:
    LEFT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"]))
    return 0.5


LEFT: list[subprocess.Popen[bytes]] = []
NAN = float("nan")


class Untold(Exception):
    """Like a user's class whose __init__ has not set what its texts are made of."""

    def __str__(self) -> str:
        raise AttributeError("message")

    __repr__ = __str__


class UntoldExit(BaseException):
    __str__ = __repr__ = Untold.__str__


RAISES = {
    "raises": Case(raises(LookupError("mine")), "LookupError: mine"),
    "leaves the program": Case(raises(SystemExit(3)), "raised SystemExit(3)"),
    "raises what is no Exception": Case(raises(Own("mine")), "raised Own('mine')"),
    "raises what has no text": Case(raises(Untold()), "Untold: (its text raises AttributeError)"),
    "raises no Exception without a text": Case(raises(UntoldExit()), "raised <UntoldExit, whose"),
    "raises text of broken bytes": Case(raises(ValueError("\udce4 mine")), "ValueError: ? mine"),
}
CANCELS_ITSELF = {"cancels itself": Case(raises(asyncio.CancelledError()), "raised CancelledError")}
#: Of a sample's fields, for whatever returns samples.
NONSENSE = {
    "a string": Case(gives("done"), "returned a str"),
    "too many log-probs": Case(
        with_field("rollout_log_probs", lambda s: [0.0] * 99), "99 rollout_log_probs"
    ),
    "log-probs of NaN": Case(
        with_field("rollout_log_probs", lambda s: [NAN] * s.response_length),
        "rollout_log_probs that are not finite: nan",
    ),
    "a mask of twos": Case(
        with_field("loss_mask", lambda s: [2] * s.response_length), "values other than 0 and 1"
    ),
    "a reward of NaN": Case(
        with_field("reward", lambda s: NAN), "returned nan (float) as the reward"
    ),
    "a token below 0": Case(with_field("tokens", lambda s: [-7, *s.tokens[1:]]), "the token -7"),
    "tokens of text": Case(
        with_field("tokens", lambda s: ["a", *s.tokens[1:]]), "'a' among its tokens"
    ),
    "no length": Case(with_field("response_length", lambda s: None), "response_length"),
}
HANGS, ENDED = "--rollout-stall-timeout", "has not returned within"
TABLE: dict[str, dict[str, Case]] = {
    "generate": RAISES
    | CANCELS_ITSELF
    | NONSENSE
    | {
        "None": Case(gives(None), "returned a NoneType"),
        "an empty list": Case(gives([]), "returned an empty list"),
        "forks": Case(forks_on_the_loop, ""),
        "leaves a process": Case(lambda sample: leaves_a_process(sample) and sample, ""),
    },
    # by themselves: a batch that draws others in place of failed ones is full without them
    "generate, hanging": {"awaits for ever": Case(awaits_for_ever, HANGS)},
    "generate, swallowing": {"swallows its cancellation": Case(swallows, HANGS)},
    "generate, blocking": {"blocks the loop": Case(polls_for_ever, "it hung, and was ended")},
    "sample hook": RAISES | NONSENSE | {"a list": Case(gives([]), "returned a list")},
    "async sample hook": RAISES | CANCELS_ITSELF,
    "async sample hook, hanging": {"awaits for ever": Case(awaits_for_ever, ENDED)},
    "reward": RAISES
    | {
        "None": Case(gives(None), "returned None"),
        "a string": Case(gives("1.0"), "returned '1.0'"),
        "NaN": Case(gives(NAN), "returned nan"),
        "a dict": Case(gives({"mine": 1.0}), "--reward-key is not set"),
        "forks": Case(forks, ""),
        "leaves a process": Case(leaves_a_process, ""),
    },
    "reward, hanging": {
        "polls for ever": Case(polls_for_ever, ""),
        "joins a deadlocked child": Case(joins_a_deadlocked_child, ""),
    },
    "async reward": RAISES | CANCELS_ITSELF,
    "async reward, hanging": {
        "awaits for ever": Case(awaits_for_ever, ""),
        "swallows its cancellation": Case(swallows, ""),
    },
    "filter": RAISES
    | {
        "None": Case(gives(None), "returned None"),
        "a string": Case(gives("False"), "returned the str 'False'"),
    },
    "async filter": RAISES | {"awaits for ever": Case(awaits_for_ever, ENDED)},
    "blocking filter": {"polls for ever": Case(polls_for_ever, ENDED)},
}
FLAG_OF = {
    "generate": "custom_generate_function_path",
    "sample hook": "rollout_sample_hook_path",
    "reward": "custom_rm_path",
    "filter": "dynamic_sampling_filter_path",
}
_CASES: dict[str, list[Case]] = {kind: list(cases.values()) for kind, cases in TABLE.items()}
_kind = ""


def _case(sample: Sample) -> Case | None:
    """That of a sample: the first one of group i does the i-th thing wrong, whenever it is
    asked."""
    cases = _CASES[_kind]
    assert sample.group_index is not None
    wrong = sample.index is not None and sample.index % 2 == 0 and sample.group_index < len(cases)
    return cases[sample.group_index] if wrong else None


async def misgenerates(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    case = _case(sample)
    sample = await generate(args, sample, sampling_params)
    result = case.do(sample) if case else sample
    return await result if asyncio.iscoroutine(result) else result


def mishooks(args: Any, sample: Sample) -> Any:
    case = _case(sample)
    return case.do(sample) if case else None


async def mishooks_async(args: Any, sample: Sample) -> Any:
    result = mishooks(args, sample)
    return await result if asyncio.iscoroutine(result) else result


def misscores(args: Any, sample: Sample, **kwargs: Any) -> Any:
    case = _case(sample)
    return case.do(sample) if case else 1.0


async def misscores_async(args: Any, sample: Sample, **kwargs: Any) -> Any:
    result = misscores(args, sample)
    return await result if asyncio.iscoroutine(result) else result


def misfilters(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    case = _case(samples[0])
    return case.do(samples[0]) if case else True


async def misfilters_async(args: Any, samples: list[Sample], **kwargs: Any) -> Any:
    result = misfilters(args, samples)
    return await result if asyncio.iscoroutine(result) else result


FUNCTION_OF = {
    "generate": "misgenerates",
    "sample hook": "mishooks",
    "reward": "misscores",
    "filter": "misfilters",
}


class Outcome(NamedTuple):
    """Of one rollout: its batch, the failures that were written down, by group, and what was
    logged."""

    output: RolloutFnTrainOutput
    failures: dict[int, list[dict[str, Any]]]
    log: str


def rollout(
    folder: Path, source: DataSource | None = None, **flags: Any
) -> tuple[RolloutFnTrainOutput, Path]:
    """The batch, and the file of failures."""
    given = {
        "num_rollout": 1,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 8,
        "rm_type": "random",
    }
    config = make_config(
        **{**given, "rollout_max_failed_fraction": 1.0, "output_dir": str(folder), **flags}
    )
    run = create_run(config)

    async def main() -> RolloutFnTrainOutput:
        async with FakeEngine() as engine:
            loop = RolloutLoop(
                config, FakeTokenizer(), SparingSource(2) if source is None else source, engine.url
            )
            loop.record_failure = Recorder(run.path, config).record_failure
            try:
                return await asyncio.wait_for(loop.generate_batch(0), timeout=300)
            finally:
                SEEN.append("over")  # what was left behind ends, which `asyncio.run` waits for
                await loop.close()

    return asyncio.run(main()), run.samples / "failed_000000.jsonl"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Outcome]]:
    """Of the rollout with all cases of a hook; each runs once."""
    known: dict[str, Outcome] = {}

    def outcome(kind: str) -> Outcome:
        global _kind
        if kind in known:
            return known[kind]
        _kind = kind
        SEEN.clear()
        hook = next(name for name in FLAG_OF if name in kind)
        path = ME + FUNCTION_OF[hook] + ("_async" if "async" in kind else "")
        flags: dict[str, Any] = {FLAG_OF[hook]: (path,) if hook == "sample hook" else path}
        flags |= {"rm_type": None} if hook == "reward" else {}
        # only users' functions that do nothing for so long are ended; all else has as long as a
        # busy host needs
        ends = (
            any(word in kind for word in ("hanging", "swallowing", "blocking"))
            or kind == "async filter"
        )
        limits = {"rollout_stall_timeout": 4.0 if ends else 60.0, "rm_timeout": 60.0}
        limits |= {"rm_timeout": 3.0} if ends and "reward" in kind else {}
        with pytest.MonkeyPatch.context() as patch:
            for name, seconds in {
                "POLL": 0.05,
                "CANCEL": 0.2,
                "BLOCKED": 0.5,
            }.items():
                patch.setattr(f"slime.deadlines.USER_CALLS_{name}", seconds)
            count = len(TABLE[kind]) + 2
            output, file = rollout(
                tmp_path_factory.mktemp("run"), rollout_batch_size=count, **limits, **flags
            )
        failures: dict[int, list[dict[str, Any]]] = {}
        for row in read_lines(file) if file.exists() else ():
            failures.setdefault(row["group"], []).append(row)
        known[kind] = Outcome(output, failures, " ".join(SEEN))
        return known[kind]

    yield outcome
    for process in LEFT:
        process.kill()
        process.wait()


QUICK = ("generate", "generate, hanging", "sample hook", "reward", "reward, hanging")
KINDS = [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.full) for kind in TABLE]
CELLS = [
    pytest.param(kind, name, id=f"{kind}: {name}", marks=() if kind in QUICK else pytest.mark.full)
    for kind, cases in TABLE.items()
    for name in cases
]


@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_it_costs_its_own_sample(outcomes: Callable[[str], Outcome], kind: str, name: str) -> None:
    outcome, case = outcomes(kind), TABLE[kind][name]
    group = list(TABLE[kind]).index(name)
    chosen = [group.index for group in outcome.output.samples]
    assert (group in chosen) == (not case.said), "its group is replaced"
    failures = outcome.failures.get(group, [])
    assert bool(failures) == bool(case.said)
    for row in failures:
        assert row["index"] == 2 * group, "its sibling has not failed"
        # a hook may be ended at its own limit or at the rollout's, which are the same here
        also = [HANGS] if case.said == ENDED else []
        assert any(said in row["error"] for said in (case.said, *also)) and row["traceback"]
        assert "Traceback" in row["traceback"] or HANGS in row["error"]
    assert not failures or failures[-1]["status"] == "failed"


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_is_lost(outcomes: Callable[[str], Outcome], kind: str) -> None:
    output, failures, _ = outcomes(kind)
    cases = TABLE[kind].values()
    assert output.metrics is not None
    assert len(output.samples) == len(cases) + 2
    assert output.metrics["rollout/num_failed_groups"] == sum(bool(case.said) for case in cases)
    assert output.metrics["rollout/num_failed_samples"] == sum(map(len, failures.values()))
    hung = sum(HANGS in row["error"] for rows in failures.values() for row in rows)
    assert (
        output.metrics["rollout/num_hung_samples"]
        == hung
        >= sum(case.said == HANGS for case in cases)
    )
    timeouts = len(cases) if "reward" in kind and "hanging" in kind else 0
    assert output.metrics["rollout/reward_timeout"] == timeouts
    for sample in (sample for group in output.samples for sample in group.samples):
        sample.validate()
        assert sample.reward is not None


def test_forked_children_do_not_come_back(outcomes: Callable[[str], Outcome]) -> None:
    assert "child of the loop ended with 0" in outcomes("generate").log
    assert "child ended with 0" in outcomes("reward").log


def test_what_fails_once_is_tried_again(tmp_path: Path) -> None:
    SEEN.clear()
    output, file = rollout(
        tmp_path, rollout_batch_size=2, custom_generate_function_path=ME + "fails_once"
    )
    assert [group.index for group in output.samples] == [0, 1] and output.metrics is not None
    assert (
        output.metrics["rollout/num_failed_groups"] == 0
        and output.metrics["rollout/num_failed_samples"] == 1
    )
    [row] = read_lines(file)
    assert (row["index"], row["failed"], row["rollout_id"]) == (0, "generating", 0)
    assert "in fails_once" in row["traceback"] and "the sandbox did not come up" in row["traceback"]


async def fails_once(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    if sample.index == 0 and "failed" not in SEEN:
        SEEN.append("failed")
        raise OSError("the sandbox did not come up")
    return await generate(args, sample, sampling_params)


async def always_fails(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    raise OSError("the sandbox is gone")


def test_above_the_set_rate_the_run_stops(tmp_path: Path) -> None:
    flags = {
        "rollout_max_failed_fraction": 0.5,
        "custom_generate_function_path": ME + "always_fails",
    }
    with pytest.raises(UserError, match="3 groups have failed in this rollout of 4") as caught:
        rollout(tmp_path, rollout_batch_size=4, **flags)
    assert "the sandbox is gone" in caught.value.why and "in always_fails" in "".join(
        caught.value.__notes__
    )


class SparingSource(FakeSource):
    """After its first draw it gives one group at a time: none is drawn that is not needed, so that
    each that can be is chosen, in whichever order they finish."""

    def get_samples(self, num_samples: int) -> Any:
        return super().get_samples(1 if self.drawn else num_samples)


class OddSource(FakeSource):
    """Raises at its first draw; later draws have a group that is none, one too small, one without
    indices."""

    draws = 0

    def get_samples(self, num_samples: int) -> Any:
        self.draws += 1
        if self.draws == 1:
            raise ConnectionError("the database is away")
        if self.draws == 2:
            return None
        odd = [[], ["text"], [Sample(), Sample()]] if self.draws == 3 else []
        return odd + super().get_samples(num_samples)


def test_a_data_source_that_fails_is_asked_again(tmp_path: Path) -> None:
    from slime.prompts import source as prompts

    source = OddSource(2)
    source.get_samples = prompts._telling_failures(source.get_samples, "OddSource.get_samples")  # type: ignore[method-assign]
    output, _ = rollout(tmp_path, source, rollout_batch_size=6, rollout_max_failed_fraction=0.9)
    assert [group.index for group in output.samples] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ] and output.metrics is not None
    assert output.metrics["rollout/num_failed_groups"] == 5


@pytest.mark.parametrize("name", ["hangs_at_the_end", "hangs_at_the_end_async"])
def test_what_gets_the_whole_batch_and_hangs_stops_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.deadlines.USER_CALLS_POLL", 0.05)
    flags = {"rollout_sample_filter_path": ME + name, "rollout_stall_timeout": 1.0}
    with pytest.raises(FunctionHangs, match=f"{name}' has not returned within 1 s"):
        rollout(tmp_path, rollout_batch_size=2, **flags)


def hangs_at_the_end(args: Any, groups: list[list[Sample]]) -> None:
    polls_for_ever(groups[0][0])


async def hangs_at_the_end_async(args: Any, groups: list[list[Sample]]) -> None:
    await awaits_for_ever(groups[0][0])


def test_tokens_that_the_model_does_not_have() -> None:
    sample = Sample(index=3, tokens=[1, 31], response_length=1)
    check_values(sample, "mine", 32, None)
    with pytest.raises(
        UserError, match=r"mine returned a sample \(index 3\) with the token 31"
    ) as caught:
        check_values(sample, "mine", 31, None)
    assert "the model has 31 tokens" in caught.value.what


def test_code_that_cancels_an_evaluation_is_told() -> None:
    actor: Any = object.__new__(RolloutActor)

    async def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    actor.loop = SimpleNamespace(evaluate=cancelled)
    with pytest.raises(UserError, match="the evaluation after rollout 4 was cancelled"):
        asyncio.run(actor.evaluate(4, is_first=False))


@pytest.mark.parametrize("is_given_up", [True, False])
def test_code_that_cancels_all_tasks_is_told(is_given_up: bool) -> None:
    actor: Any = object.__new__(RolloutActor)
    actor._under_way = {}
    actor._given_up = set()
    actor._generate = lambda *_: asyncio.sleep(600)

    async def main() -> Any:
        generating = asyncio.create_task(actor.generate(4, TrainLayout(), ANY_VERSION))
        while not actor._under_way:
            await asyncio.sleep(0)
        if is_given_up:
            await actor.give_up(4)
        else:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
        return await generating

    if is_given_up:
        assert asyncio.run(main()) is None
    else:
        with pytest.raises(UserError, match="rollout 4 was cancelled"):
            asyncio.run(main())
