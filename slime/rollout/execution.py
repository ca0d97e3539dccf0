"""One group of samples from prompt to reward: generate → sample hooks → reward, each sample on its own.

    Execution   queued ─► generating ─► hooks ─► reward ─► done
                   └──────────┴── abort ──┘        └── abort: generated, to be scored later

A failing sample fails alone: the exception becomes its `Execution.failure`, the loop replaces its group and stops the
run when too many fail. A `UserError` is a mistake in configuration, data or user code: it stops the run at once.
Once an abort is under way neither counts: user code that stumbles over answers cut short is put back, and whatever else
is wrong with it will show in the next rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from slime.engines.api import EngineError
from slime.engines.client import RequestRefused
from slime.errors import UserError
from slime.hook_loading import accepted, check_signature, load_function, user_frames, with_user_frames
from slime.hooks import GenerateFunction, SampleHook
from slime.legacy_paths import replaced
from slime.log import get_logger
from slime.observe.trace import span
from slime.rollout.generate import (
    GenerateState,
    bind_state,
    complete_tokens,
    generate,
    is_too_long,
    note_too_long,
    prompt_token_ids,
)
from slime.rollout.sample_steps import apply_sample_hook, copy_of_prompt, set_rewards
from slime.samples.types import Group, Sample, SampleStatus

logger = get_logger(__name__)
T = TypeVar("T")

_FINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
#: A generate function that asks the engines itself is called so often, when pushes of weights cut its answers short.
_MOST_CUTS = 8
#: What plugins may have put in place of our functions of these names.
_GENERATE, _SAMPLE, _GROUP = (
    f"slime.rollout.sglang_rollout:{name}" for name in ("generate", "generate_and_rm", "generate_and_rm_group")
)


class Rewards(Protocol):
    """What the loop needs of `slime.rollout.rewards.pool`: scores for one sample, or for several scored together."""

    async def score(self, sample: Sample) -> float | dict[str, Any]: ...

    async def score_group(self, samples: list[Sample]) -> list[float | dict[str, Any]]: ...


class Activity(StrEnum):
    """Where an execution is; the watchdog's words."""

    QUEUED = "queued"
    GENERATING = "generating"
    HOOKS = "sample hooks"
    REWARD = "reward"
    DONE = "done"


@dataclass
class Execution:
    """One run of the generate function.

    Attributes:
        prompt: the sample as it was drawn, kept when user code might change it beyond repair; else ``samples[0]``.
        samples: what it is now; several after a fan-out.
        failure: what stopped it for good.
    """

    prompt: Sample
    samples: list[Sample]
    fanned_out: bool = False
    activity: Activity = Activity.QUEUED
    since: float = field(default_factory=time.monotonic)
    failure: Exception | None = None

    @property
    def is_generated(self) -> bool:
        return bool(self.samples) and all(sample.status in _FINAL for sample in self.samples)

    def enter(self, activity: Activity) -> None:
        self.activity, self.since = activity, time.monotonic()

    def rewind(self) -> None:
        """Back to what it was when this rollout took it up."""
        self.samples, self.fanned_out = [self.prompt], False
        self.enter(Activity.QUEUED)

    def restart(self) -> None:
        """Back to the prompt alone."""
        self.rewind()
        self.prompt.reset_response()


@dataclass
class GroupRun:
    """A drawn group on its way through the loop.

    Attributes:
        order: counts the draws of this rollout.
        drawn_as: see `slime.rollout.journal.drawn_as`; is_noted: the journal has it as it is.
    """

    executions: list[Execution]
    order: int = 0
    drawn_as: int = 0
    is_noted: bool = False

    @staticmethod
    def of(drawn: Sequence[Sample], order: int = 0) -> GroupRun:
        """From what a data source gives: one execution per sample, except that what had fanned out in an earlier
        rollout comes back as several samples with one ``rollout_id``."""
        executions: dict[Any, Execution] = {}
        for sample in drawn:
            key = ("of", id(sample)) if sample.rollout_id is None else sample.rollout_id
            if key in executions:
                executions[key].samples.append(sample)
                executions[key].fanned_out = True
            else:
                executions[key] = Execution(sample, [sample])
        return GroupRun(list(executions.values()), order)

    @property
    def index(self) -> int:
        index = self.executions[0].prompt.group_index
        return self.order if index is None else index

    @property
    def samples(self) -> list[Sample]:
        return [sample for execution in self.executions for sample in execution.samples]

    @property
    def is_generated(self) -> bool:
        return all(execution.is_generated for execution in self.executions)

    @property
    def is_scored(self) -> bool:
        return self.is_generated and all(sample.reward is not None for sample in self.samples)

    @property
    def failure(self) -> Exception | None:
        return next((e.failure for e in self.executions if e.failure is not None), None)

    def to_group(self) -> Group:
        return Group(self.index, [execution.samples for execution in self.executions])

    def restart(self) -> None:
        for execution in self.executions:
            execution.restart()


class GroupRunner:
    """Runs groups. Shared by training rollouts and evaluations; nothing in it belongs to one group.

    Args:
        state: tokenizer, client, sampling parameters.
        rewards: None when the samples bring their rewards along.
        rollout_id, evaluation: passed to hooks that ask for them.
        group_rm: score the finished group as a whole.
        mask_offpolicy: do not train on what an earlier rollout had generated of a resumed sample.
        ours: of "group" and "sample" those for which a plugin's function in place of ours is not called: it has called
            us.
    """

    def __init__(
        self,
        state: GenerateState,
        rewards: Rewards | None,
        *,
        rollout_id: int | None,
        evaluation: bool = False,
        group_rm: bool = False,
        mask_offpolicy: bool = False,
        ours: tuple[str, ...] = (),
    ) -> None:
        self.state, self.rewards, self._ours = state, rewards, ours
        self.rollout_id, self.evaluation, self.group_rm = rollout_id, evaluation, group_rm
        self.mask_offpolicy = mask_offpolicy
        self.last_progress = time.monotonic()
        self._default_path: str | None = getattr(state.args, "custom_generate_function_path", None)
        self._functions: dict[str, Any] = {}

    def _checked(self, path: str, protocol: type) -> Any:
        if path not in self._functions:
            fn = load_function(path)
            check_signature(fn, protocol, path)
            self._functions[path] = fn
        return self._functions[path]

    async def run(self, group: GroupRun) -> None:
        """Bring every execution as far as it goes: scored, aborted, or failed (never raises for a failure)."""
        bind_state(self.state)
        for sample in group.samples:
            sample.session_id = sample.session_id or uuid.uuid4().hex
        with span(group.samples, "generate_and_rm_group"):
            whole = None if "group" in self._ours else replaced(_GROUP)
            try:
                async with asyncio.TaskGroup() as tasks:
                    if whole is not None and not group.is_generated:
                        tasks.create_task(self._run_whole(whole, group))
                    else:
                        for execution in group.executions:
                            tasks.create_task(self._run_execution(execution))
            except BaseExceptionGroup as errors:  # only what must stop the run gets here
                raise errors.exceptions[0] from None
            if self.group_rm and group.is_generated and not group.is_scored and group.failure is None:
                await self._score_group(group)

    async def _run_whole(self, function: Any, group: GroupRun) -> None:
        """The group through a plugin's function in place of ``generate_and_rm_group``."""
        params = copy.deepcopy(self.state.sampling_params)
        for execution in group.executions:
            execution.prompt = copy_of_prompt(execution.samples[0])
            execution.enter(Activity.GENERATING)
        more = accepted(function, {"evaluation": self.evaluation})
        try:
            drawn = [execution.samples[0] for execution in group.executions]
            returned = await function(self.state.args, drawn, params, **more)
            if not isinstance(returned, list) or len(returned) != len(group.executions):
                what = f"the plugin's generate_and_rm_group did not return a list of {len(group.executions)}"
                raise UserError(what, fix="return for each sample of the group the sample, or a list of samples")
            for execution, samples in zip(group.executions, returned):
                self._accept(execution, samples, "the plugin's generate_and_rm_group")
                await self._score_unless_group_rm(execution)
                execution.enter(Activity.DONE)
        except Exception as error:  # the boundary of a group's failures, as of a sample's below
            for execution in group.executions:
                self._end_of_failure(execution, error)
        self.last_progress = time.monotonic()

    async def _score_unless_group_rm(self, execution: Execution) -> None:
        if execution.is_generated and not self.group_rm:
            await self._score(execution)

    def _end_of_failure(self, execution: Execution, error: Exception) -> None:
        if self.state.client.aborting:
            self._abort(execution, error)
        elif isinstance(error, UserError):
            raise with_user_frames(error, error) from error.__cause__
        else:
            self._fail(execution, error)

    async def _run_execution(self, execution: Execution) -> None:
        with span(execution.samples, "generate_and_rm") as sample_span:
            try:
                if not execution.is_generated:
                    await self._generate(execution)
                    sample_span.adopt(execution.samples)
                await self._score_unless_group_rm(execution)
                execution.enter(Activity.DONE)
            except Exception as error:  # the one boundary of a sample's failures; see the module's docstring
                self._end_of_failure(execution, error)
        self.last_progress = time.monotonic()

    def _abort(self, execution: Execution, error: Exception) -> None:
        """What failed while generating is to be put back as it was; what is generated only lacks its score."""
        logger.debug("sample %s was aborted while %s: %r", execution.prompt.index, execution.activity.value, error)
        if execution.activity is not Activity.REWARD:
            execution.rewind()
            for sample in execution.samples:
                sample.status = SampleStatus.ABORTED

    def _fail(self, execution: Execution, error: Exception) -> None:
        logger.warning(
            "sample %s failed while %s: %s: %s%s",
            execution.prompt.index,
            execution.activity.value,
            type(error).__name__,
            error,
            f"\n  {frames}" if (frames := user_frames(error)) else "",
            exc_info=error if logger.isEnabledFor(10) else None,
        )
        execution.failure = error
        for sample in execution.samples:
            sample.status = SampleStatus.FAILED

    # -- generation ----------------------------------------------------------------------------------------

    async def _generate(self, execution: Execution) -> None:
        sample = execution.samples[0]
        if self.mask_offpolicy and sample.response_length:
            sample.loss_mask = [0] * sample.response_length
        whole = None if "sample" in self._ours else replaced(_SAMPLE)
        async with contextlib.nullcontext() if whole else self.state.client.slots:  # ours takes one when it is called
            if self.state.client.aborting:
                sample.status = SampleStatus.ABORTED
                return
            execution.enter(Activity.GENERATING)
            for _ in range(_MOST_CUTS):
                returned, origin = await self._call_generate(execution, execution.samples[0], whole)
                self._accept(execution, returned, origin)
                if self.state.client.aborting or not _was_cut(execution):
                    break
                execution.rewind()  # user code asked the engines itself, and a push of weights came between
                execution.enter(Activity.GENERATING)
            else:
                raise EngineError(self.state.client.base_url, f"{origin} was cut short {_MOST_CUTS} times by aborts")
        if execution.is_generated and whole is None:
            execution.enter(Activity.HOOKS)
            await self._run_hooks(execution)

    async def _call_generate(self, execution: Execution, sample: Sample, whole: Any) -> tuple[Any, str]:
        """What the generate function returned (``whole``: a plugin's, which scores as well), and its name."""
        params = self.state.params_for(sample)
        path = sample.generate_function_path or self._default_path
        if whole is not None:
            path, fn = "the plugin's generate_and_rm", whole
        elif path:
            fn = self._checked(path, GenerateFunction)
        elif (fn := replaced(_GENERATE)) is not None:
            path = "the plugin's generate"
        else:
            return await generate(self.state.args, sample, params), "the generate function"
        # user code may leave anything behind when it is cancelled or returns other samples
        execution.prompt = copy_of_prompt(sample)
        returned = fn(self.state.args, sample, params, **accepted(fn, {"evaluation": self.evaluation}))
        if not inspect.isawaitable(returned):
            raise UserError(f"'{path}' is not async", fix="declare the generate function with 'async def'")
        try:
            return await returned, path
        except RequestRefused as refused:
            if not is_too_long(refused):
                raise
            note_too_long(self.state, sample, refused.what)
            return self._truncated(execution, sample), path

    def _truncated(self, execution: Execution, sample: Sample) -> Sample:
        """The sample as far as user code has built it when there was no more room; as it was given to that code, where
        it is half-built (its prompt is another, or its lengths do not fit)."""
        prompt = execution.prompt
        ids = prompt.tokens[: prompt.prompt_length] or prompt_token_ids(self.state.tokenizer, prompt)
        try:
            sample.validate()
            whole = sample.tokens[: sample.prompt_length] == ids
        except UserError:
            whole = False
        if not whole:
            sample = copy_of_prompt(prompt)
            sample.tokens = sample.tokens or ids
        sample.status = SampleStatus.TRUNCATED
        return sample

    def _accept(self, execution: Execution, returned: Any, origin: str) -> None:
        """Validate what user code returned; siblings of a fan-out share the id of their execution.

        Raises:
            UserError: no samples, lengths that do not fit, or siblings with different ``rollout_id``.
        """
        samples = returned if isinstance(returned, list) else [returned]
        if not samples or not all(isinstance(sample, Sample) for sample in samples):
            kind = "an empty list" if returned == [] else f"a {type(returned).__name__}"
            raise UserError(f"{origin} returned {kind}", fix="return the sample, or a list of samples")
        execution.samples, execution.fanned_out = samples, isinstance(returned, list)
        prompt = execution.prompt
        for sample in samples:
            sample.index = prompt.index if sample.index is None else sample.index
            sample.group_index = prompt.group_index if sample.group_index is None else sample.group_index
            sample.session_id = sample.session_id or prompt.session_id
            complete_tokens(sample, self.state.tokenizer, prompt.tokens)
            sample.validate(origin)
            if sample.status is SampleStatus.PENDING:  # user code need not set it: returned is done
                aborted = self.state.client.aborting
                sample.status = SampleStatus.ABORTED if aborted else SampleStatus.COMPLETED
        if execution.fanned_out:
            ids = {sample.rollout_id for sample in samples}
            if len(ids) > 1:
                raise UserError(
                    f"{origin} returned samples of one execution with different rollout_id: {sorted(map(str, ids))}",
                    fix="set the same sample.rollout_id on each of them, or leave it None",
                )
            for sample in samples:
                sample.rollout_id = prompt.index if sample.rollout_id is None else sample.rollout_id

    async def _run_hooks(self, execution: Execution) -> None:
        optional = {"rollout_id": self.rollout_id, "evaluation": self.evaluation}
        for path in getattr(self.state.args, "rollout_sample_hook_path", None) or ():
            hook = self._checked(path, SampleHook)
            for position, sample in enumerate(execution.samples):
                execution.samples[position] = await apply_sample_hook(hook, path, self.state.args, sample, optional)

    # -- rewards -------------------------------------------------------------------------------------------

    async def _score(self, execution: Execution) -> None:
        unscored = [sample for sample in execution.samples if sample.reward is None]
        if not unscored or self.rewards is None:
            return
        execution.enter(Activity.REWARD)
        with span(unscored, "reward_model"):
            if execution.fanned_out:
                scores = await self._unless_aborted(self.rewards.score_group(unscored))
            else:
                score = await self._unless_aborted(self.rewards.score(unscored[0]))
                scores = None if score is None else [score]
        set_rewards(unscored, scores)

    async def _score_group(self, group: GroupRun) -> None:
        if self.rewards is None:
            return
        for execution in group.executions:
            execution.enter(Activity.REWARD)
        try:
            with span(group.samples, "group_reward_model"):
                scores = await self._unless_aborted(self.rewards.score_group(group.samples))
        except UserError:
            raise
        except Exception as error:  # a group scored together fails together
            for execution in group.executions:
                self._fail(execution, error)
            return
        set_rewards(group.samples, scores)
        for execution in group.executions:
            execution.enter(Activity.DONE)
        self.last_progress = time.monotonic()

    async def _unless_aborted(self, work: Awaitable[T]) -> T | None:
        """The result, or None when an abort begins first: a slow judge must not hold up the end of a rollout.

        Neither does one that fails because of the abort: its sample is put back and scored in the next rollout.
        """
        working = asyncio.ensure_future(work)
        aborting = asyncio.ensure_future(self.state.client.wait_for_abort())
        try:
            await asyncio.wait({working, aborting}, return_when=asyncio.FIRST_COMPLETED)
            if self.state.client.aborting and working.done() and (error := working.exception()) is not None:
                logger.debug("a reward failed while the rollout ended: %r", error)
                return None
            return working.result() if working.done() else None
        finally:
            aborting.cancel()
            working.cancel()


def _was_cut(execution: Execution) -> bool:
    return any(sample.status is SampleStatus.ABORTED for sample in execution.samples)
