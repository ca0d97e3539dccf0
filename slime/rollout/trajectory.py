"""Run a group of samples from prompt to reward: generate → sample hooks → reward, independently for
each sample.

    Trajectory  queued ─► generating ─► hooks ─► reward ─► done
                   └──────────┴── abort ──┘        └── abort: generated, to be scored later

A failing sample does not affect others. If the user's code fails on it, it is tried a second time.
If it fails again, or hangs, the error becomes `Trajectory.failure`: the loop replaces the group,
and stops the run when too many fail. A `UserError` of our own code is a mistake in configuration or
data and stops the run at once. During an abort neither happens: user code may fail because its
response was cut short, so the sample is put back. A real mistake shows again in the next rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import logging
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, TypeGuard, TypeVar

from slime.engines.api import EngineError
from slime.engines.client import RequestRefused
from slime.errors import UserError, a_type, name_and_text
from slime.log import get_logger
from slime.observe.trace import span
from slime.rollout.generate import (
    GenerateState,
    bind_state,
    generate,
    is_too_long,
    note_too_long,
    prompt_token_ids,
)
from slime.rollout.response_text import TextCheck
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.teachers import TeacherPool
from slime.rollout.validate_generate_output import (
    check_values,
    finish_samples,
    keep_identity,
    samples_of,
    warn_of_missing_end_token,
    warn_of_other_prompt,
)
from slime.samples.types import Group, Sample, SampleStatus
from slime.user_code.calls import run_isolated
from slime.user_code.hooks import GenerateFunction, SampleHook
from slime.user_code.loading import (
    FunctionFailed,
    FunctionHangs,
    accepted,
    call_hook,
    check_signature,
    is_async,
    load_function,
    named,
    user_frames,
    where_to_mend,
    with_user_frames,
)
from slime.user_code.overrides import override_of
from slime.user_code.process_state import kept

logger = get_logger(__name__)
T = TypeVar("T")

#: Maximum calls of a generate function that calls the engines itself, while weight pushes keep
#: cutting its responses short.
_MAX_CUTS = 8
#: How messages name a sample's own generate function (--eval-config: one per data set).
_OF_SAMPLE = "generate_function_path of the sample"
#: Maximum number of failed samples that are logged per rollout.
_MAX_LOGGED = 20

_FINAL = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)


class Activity(StrEnum):
    """The stage of a trajectory, as the watchdog names it."""

    QUEUED = "queued"
    GENERATING = "generating"
    HOOKS = "sample hooks"
    TEACHER = "teacher"
    REWARD = "reward"
    FILTER = "filter"
    DONE = "done"


@dataclass
class Trajectory:
    """One run of the generate function, from one prompt.

    Attributes:
        prompt: the sample as this rollout received it: a copy if user code might change it, else
            ``samples[0]``.
        drawn: `Sample.to_dict` of the sample as it was first drawn; None if that is ``prompt``
            without its response.
        samples: the current samples; several after a fan-out.
        failure: the error that ended it.
        function: the user's function that is running; "" if none is.
        num_failures: how often the user's code has failed on it.
        hung_seconds: seconds without progress after which it was given up; 0 if it was not.
    """

    prompt: Sample
    samples: list[Sample]
    drawn: dict[str, Any] | None = None
    fanned_out: bool = False
    activity: Activity = Activity.QUEUED
    since: float = field(default_factory=time.monotonic)
    failure: Exception | None = None
    function: str = ""
    num_failures: int = 0
    hung_seconds: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def is_generated(self) -> bool:
        return bool(self.samples) and all(sample.status in _FINAL for sample in self.samples)

    @property
    def was_cut(self) -> bool:
        """Whether an abort has cut it short."""
        return any(sample.status is SampleStatus.ABORTED for sample in self.samples)

    @property
    def doing(self) -> str:
        """What it is doing, in words: "reward in the function …"."""
        return f"{self.activity.value}{f' in {self.function}' if self.function else ''}"

    def enter(self, activity: Activity) -> None:
        self.activity = activity
        self.since = time.monotonic()

    def rewind(self) -> None:
        """Return to the state in which this rollout received it."""
        self.samples = [self.prompt]
        self.fanned_out = False
        self.enter(Activity.QUEUED)

    def restart(self) -> None:
        """Return to the bare prompt, without changes by user code in this rollout or an earlier
        one."""
        if self.drawn is not None:
            self.prompt = copy_of_prompt(Sample.from_dict(self.drawn))
        self.rewind()
        self.prompt.reset_response()


class Decision(StrEnum):
    """What `slime.rollout.dynamic_sampling` has decided about a group."""

    KEEP = "keep"
    DROP = "drop"
    FAILED = "failed"
    STALE = "stale"
    REQUEUE = "requeue"
    """Generated again in another rollout."""


@dataclass
class GroupRun:
    """A drawn group while it is generated and scored.

    Attributes:
        order: position among the draws of this rollout.
        drawn_as: see `slime.rollout.journal.drawn_as`.
        is_noted: the journal holds its current state.
        is_restored: it was read from the journal.
        was_prompt: it was drawn as a prompt, so its whole response was read from the journal.
        decision: None as long as there is none.
        is_corrected: it is stale and trained on all the same (--stale-samples correct).
    """

    trajectories: list[Trajectory]
    order: int = 0
    drawn_as: int = 0
    is_noted: bool = False
    is_restored: bool = False
    was_prompt: bool = False
    decision: Decision | None = None
    is_corrected: bool = False

    @staticmethod
    def of(drawn: Sequence[Sample], order: int = 0) -> GroupRun:
        """Make a group of samples from a data source: one trajectory per sample, except that
        samples that fanned out in an earlier rollout come back with one ``rollout_id``."""
        trajectories: dict[Any, Trajectory] = {}
        for sample in drawn:
            own = ("sample", id(sample))
            key = own if sample.rollout_id is None else sample.rollout_id
            if key in trajectories:
                trajectories[key].samples.append(sample)
                trajectories[key].fanned_out = True
            else:
                trajectories[key] = Trajectory(sample, [sample], sample.as_drawn)
        return GroupRun(list(trajectories.values()), order)

    @property
    def num_tokens(self) -> int:
        """Tokens of the responses so far; a failed sample may hold anything instead of a number."""
        lengths: list[Any] = [sample.response_length for sample in self.samples]
        return sum(length for length in lengths if isinstance(length, int))

    def restored(self, found: Sequence[Sample]) -> GroupRun:
        """Return this drawn group in the state that was ``found`` in the journal."""
        run = GroupRun.of(found, self.order)
        for trajectory, own in zip(run.trajectories, self.trajectories):
            is_prompt = not own.prompt.response_length
            trajectory.drawn = own.drawn or (own.prompt.to_dict() if is_prompt else None)
        run.is_restored = True
        return run

    @property
    def index(self) -> int:
        index = self.trajectories[0].prompt.group_index
        return self.order if index is None else index

    @property
    def samples(self) -> list[Sample]:
        return [sample for trajectory in self.trajectories for sample in trajectory.samples]

    @property
    def is_generated(self) -> bool:
        return all(trajectory.is_generated for trajectory in self.trajectories)

    @property
    def is_scored(self) -> bool:
        return self.is_generated and all(sample.reward is not None for sample in self.samples)

    @property
    def failure(self) -> Exception | None:
        failures = (trajectory.failure for trajectory in self.trajectories)
        return next((failure for failure in failures if failure is not None), None)

    def to_group(self) -> Group:
        return Group(self.index, [trajectory.samples for trajectory in self.trajectories])

    def restart(self) -> None:
        for trajectory in self.trajectories:
            trajectory.restart()

    def for_later(self) -> list[Sample]:
        """Return the samples, to be put back. The first of each trajectory records how the
        trajectory was drawn."""
        for trajectory in self.trajectories:
            first = trajectory.samples[0]
            prompt = trajectory.prompt
            first.drawn_as = self.drawn_as
            if trajectory.drawn is not None:
                first.as_drawn = trajectory.drawn
            elif prompt is not first and not prompt.response_length:
                first.as_drawn = prompt.to_dict()
        return self.samples


def copy_of_prompt(sample: Sample) -> Sample:
    """Return a copy that shares nothing mutable that generation touches."""
    twin = copy.copy(sample)
    twin.tokens = list(sample.tokens)
    twin.prompt = copy.deepcopy(sample.prompt)
    twin.label = copy.deepcopy(sample.label)
    twin.metadata = copy.deepcopy(sample.metadata)
    twin.loss_mask = None if sample.loss_mask is None else list(sample.loss_mask)
    twin.rollout_log_probs = (
        None if sample.rollout_log_probs is None else list(sample.rollout_log_probs)
    )
    twin.token_spans = [copy.copy(token_span) for token_span in sample.token_spans]
    twin.weight_versions = list(sample.weight_versions)
    twin.spec_info = copy.copy(sample.spec_info)
    twin.prefix_cache_info = copy.copy(sample.prefix_cache_info)
    if sample.trace is not None:  # its events do not change
        twin.trace = {**sample.trace, "events": list(sample.trace.get("events", ()))}
    return twin


@dataclass(eq=False)
class GroupRunner:
    """Runs groups, for training rollouts and evaluations. It has no state of a single group.

    Args:
        state: tokenizer, client, sampling parameters.
        rewards: None if the samples already have rewards.
        teachers: score the responses; None without distillation by engines.
        rollout_id, evaluation: passed to hooks that ask for them.
        group_rm: score the finished group as a whole.
        mask_offpolicy: do not train on tokens that an earlier rollout generated.
        called_by_plugin: levels ("group", "sample") at which a plugin called the built-in function,
            which then runs although the plugin replaces it.
        hook_limit: seconds that a sample hook may take.
        on_failure: called with each failed trajectory and its error.

    Attributes:
        num_failures: failures of samples so far, including those that hung.
        num_hung: samples that hung.
    """

    state: GenerateState
    rewards: RewardPool | None
    _: KW_ONLY
    rollout_id: int | None
    evaluation: bool = False
    group_rm: bool = False
    mask_offpolicy: bool = False
    teachers: TeacherPool | None = None
    hook_limit: float | None = None
    on_failure: Callable[[Trajectory, Exception], None] = lambda trajectory, error: None
    called_by_plugin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.num_failures = 0
        self.num_hung = 0
        self.last_progress = time.monotonic()
        self._check_text = TextCheck(self.state.tokenizer)
        self._hooks_turn = asyncio.Lock()
        # by id: a sample that users' code returned, and the trajectory that it became
        self._returned: dict[int, tuple[weakref.ref[Sample], Trajectory]] = {}
        self._functions: dict[str, Any] = {}

    def _hook_at(self, path: str, protocol: type) -> Any:
        """Return the user's function at ``path``, loaded and checked once."""
        if path not in self._functions:
            fn = load_function(path)
            check_signature(fn, protocol, path)
            self._functions[path] = fn
        return self._functions[path]

    async def run(self, group: GroupRun) -> None:
        """Run every trajectory until it is scored, aborted or failed. Failures of samples are not
        raised."""
        bind_state(self.state)
        for sample in group.samples:
            sample.session_id = sample.session_id or uuid.uuid4().hex
        with span(group.samples, "generate_and_rm_group"):
            override = None
            if "group" not in self.called_by_plugin and not group.is_generated:
                override = override_of("generate_and_reward_group")
            try:
                async with asyncio.TaskGroup() as tasks:
                    if override is not None:
                        task = tasks.create_task(self._run_override(override, group))
                    for trajectory in group.trajectories:
                        if override is None:
                            task = tasks.create_task(self._run_trajectory(trajectory))
                        trajectory.task = task
            except BaseExceptionGroup as errors:  # only errors that must stop the run arrive here
                raise errors.exceptions[0] from None
            finally:
                for trajectory in group.trajectories:
                    trajectory.task = None  # its context holds the trajectory
            is_unscored = group.is_generated and not group.is_scored
            if self.group_rm and is_unscored and group.failure is None:
                await self._score_group(group)

    async def _run_override(self, function: Any, group: GroupRun) -> None:
        """Run the group through a plugin's ``generate_and_rm_group``. It fails as a whole."""
        name = "the plugin's generate_and_rm_group"
        for trajectory in group.trajectories:
            trajectory.prompt = copy_of_prompt(trajectory.samples[0])
            trajectory.function = name
            trajectory.enter(Activity.GENERATING)
        try:
            drawn = [trajectory.samples[0] for trajectory in group.trajectories]
            params = copy.deepcopy(self.state.sampling_params)
            more = accepted(function, {"evaluation": self.evaluation})
            with kept(name):
                work = function(self.state.args, drawn, params, **more)
                returned = await run_isolated(work, name)
            if not isinstance(returned, list) or len(returned) != len(group.trajectories):
                what = f"{name} did not return a list of {len(group.trajectories)}"
                raise FunctionFailed(
                    what, fix="return for each sample of the group the sample, or a list of samples"
                )
            for trajectory, samples in zip(group.trajectories, returned):
                with _blaming_users_code(trajectory):
                    self._accept(trajectory, samples, name)
                await self._score(trajectory)
                trajectory.enter(Activity.DONE)
        except Exception as error:  # a failure of user code ends here, as in `_run_trajectory`
            for trajectory in group.trajectories:
                self._handle_error(trajectory, error)
        except asyncio.CancelledError:
            hung = [trajectory for trajectory in group.trajectories if trajectory.hung_seconds]
            if not hung:
                raise  # not cancelled by the watchdog
            for trajectory in hung:
                self._handle_cancellation(trajectory)
        self.last_progress = time.monotonic()

    def _handle_error(self, trajectory: Trajectory, error: Exception) -> None:
        """Put the trajectory back during an abort, else fail it; raise what must stop the run."""
        if self.state.client.aborting:
            self._abort(trajectory, error)
        elif _stops_run(error):
            raise with_user_frames(error, error) from error.__cause__
        else:
            self._fail(trajectory, error)

    def _handle_cancellation(self, trajectory: Trajectory) -> None:
        """Fail a trajectory that the watchdog has given up; raise any other cancellation again."""
        if not trajectory.hung_seconds or self.state.client.aborting:
            raise
        assert trajectory.task is not None
        trajectory.task.uncancel()
        self.num_hung += 1
        where = f" in {trajectory.function}" if trajectory.function else ""
        error = FunctionHangs(
            f"sample {trajectory.prompt.index} hung{where}",
            why=f"the rollout had made no progress for {trajectory.hung_seconds:.0f} s "
            "(--rollout-stall-timeout)",
            fix="set a deadline for whatever it waits for",
        )
        self._fail(trajectory, error)

    async def _run_trajectory(self, trajectory: Trajectory) -> None:
        with span(trajectory.samples, "generate_and_rm") as sample_span:
            while True:
                trajectory.function = ""
                try:
                    if not trajectory.is_generated:
                        await self._generate(trajectory)
                        sample_span.adopt(trajectory.samples)
                    await self._score(trajectory)
                    trajectory.enter(Activity.DONE)
                except asyncio.CancelledError:
                    self._handle_cancellation(trajectory)
                except Exception as error:  # a failure of a sample ends here; see the module
                    if not self.state.client.aborting and self._begin_retry(trajectory, error):
                        continue
                    self._handle_error(trajectory, error)
                break
        self.last_progress = time.monotonic()

    def _begin_retry(self, trajectory: Trajectory, error: Exception) -> bool:
        """Prepare a retry of the stage in which users' code failed, once per trajectory; return
        False if there is none. A sandbox that did not start then does not fail the group."""
        trajectory.num_failures += 1
        is_of_user = bool(trajectory.function) or isinstance(error, FunctionFailed)
        if _stops_run(error) or trajectory.num_failures > 1 or not is_of_user:
            return False
        self._log_failure("sample %s is tried again, %s", trajectory, error)
        self._note_failure(trajectory, error)
        if trajectory.activity is not Activity.REWARD:
            trajectory.rewind()
        return True

    def give_up(self, trajectory: Trajectory, seconds: float) -> None:
        """Fail a trajectory that hangs in user code, after ``seconds`` without progress."""
        if trajectory.task is not None and not trajectory.task.done():
            trajectory.hung_seconds = seconds
            trajectory.task.cancel()

    def fail_group(self, group: GroupRun, error: Exception) -> None:
        """Fail a whole group because its filter failed on it."""
        for trajectory in group.trajectories:
            trajectory.enter(Activity.FILTER)
            trajectory.failure = error
        for sample in group.samples:
            sample.status = SampleStatus.FAILED
        self._note_failure(group.trajectories[0], error)

    def _log_failure(self, text: str, trajectory: Trajectory, error: Exception) -> None:
        """Log the first few failures, all with --log-level debug: one mistake may fail thousands
        of samples."""
        is_debugging = logger.isEnabledFor(logging.DEBUG)
        if self.num_failures < _MAX_LOGGED or is_debugging:
            frames = user_frames(error)
            # a failed reward function has added notes that say where
            notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
            lines = notes or (f"\n  {frames}" if frames else "")
            reason = f"while {trajectory.doing}: {name_and_text(error)}{lines}"
            logger.warning(text, trajectory.prompt.index, reason, exc_info=is_debugging and error)
        elif self.num_failures == _MAX_LOGGED:
            logger.warning("further failures of samples are only written to samples/failed_*.jsonl")

    def _note_failure(self, trajectory: Trajectory, error: Exception) -> None:
        self.num_failures += 1
        self.on_failure(trajectory, error)

    def _abort(self, trajectory: Trajectory, error: Exception) -> None:
        """Undo a failure during an abort: a sample that was being generated is put back as it was;
        one that was being scored only lacks its score."""
        logger.debug(
            "sample %s was aborted while %s: %r",
            trajectory.prompt.index,
            trajectory.activity.value,
            error,
        )
        if trajectory.activity is not Activity.REWARD:
            trajectory.rewind()
            for sample in trajectory.samples:
                sample.status = SampleStatus.ABORTED

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        self._log_failure("sample %s failed %s", trajectory, error)
        trajectory.failure = error
        for sample in trajectory.samples:
            sample.status = SampleStatus.FAILED
        self._note_failure(trajectory, error)

    # -- generation --------------------------------------------------------------------------------

    async def _generate(self, trajectory: Trajectory) -> None:
        sample = trajectory.samples[0]
        if self.mask_offpolicy and sample.response_length:
            sample.loss_mask = [0] * sample.response_length
        override = None
        if "sample" not in self.called_by_plugin:
            override = override_of("generate_and_reward")
        # a plugin's function takes a slot when it calls ours
        async with contextlib.nullcontext() if override else self.state.client.slots:
            if self.state.client.aborting:
                sample.status = SampleStatus.ABORTED
                return
            trajectory.enter(Activity.GENERATING)
            for _ in range(_MAX_CUTS):
                with _blaming_users_code(trajectory):
                    returned, origin = await self._call_generate(trajectory, override)
                    self._accept(trajectory, returned, origin)
                if self.state.client.aborting or not trajectory.was_cut:
                    break
                # user code called the engines itself, and a weight push aborted its requests
                trajectory.rewind()
                trajectory.enter(Activity.GENERATING)
            else:
                raise EngineError(
                    self.state.client.base_url,
                    f"{origin} was cut short {_MAX_CUTS} times by aborts",
                )
        if trajectory.is_generated and override is None:
            trajectory.enter(Activity.HOOKS)
            await self._run_hooks(trajectory)

    async def _call_generate(self, trajectory: Trajectory, override: Any) -> tuple[Any, str]:
        """Call the generate function (``override``: a plugin's, which scores as well); return its
        result and its name in messages."""
        sample = trajectory.samples[0]
        params = self.state.params_for(sample)
        default = getattr(self.state.args, "custom_generate_function_path", None)
        path = sample.generate_function_path or default
        if getattr(self.state.args, "rollout_sample_hook_path", None):
            trajectory.prompt = copy_of_prompt(sample)
        if override is not None:
            origin = "the plugin's generate_and_rm"
            fn = override
        elif path:
            fn = self._hook_at(path, GenerateFunction)
            flag = "--custom-generate-function-path" if path == default else _OF_SAMPLE
            origin = named(path, flag)
        elif (fn := override_of("generate")) is not None:
            origin = "the plugin's generate"
        else:
            return await generate(self.state.args, sample, params), "the generate function"
        # user code may leave the sample in any state if it is cancelled or returns other samples
        trajectory.prompt = copy_of_prompt(sample)
        trajectory.function = origin
        returned = fn(
            self.state.args, sample, params, **accepted(fn, {"evaluation": self.evaluation})
        )
        if not inspect.isawaitable(returned):
            raise UserError(
                f"{origin} is not async", fix="declare the generate function with 'async def'"
            )
        try:
            with kept(origin):
                return await run_isolated(returned, f"{origin} on sample {sample.index}"), origin
        except RequestRefused as refused:
            if not is_too_long(refused):
                raise
            note_too_long(self.state, sample, refused.what)
            prompt = trajectory.prompt
            ids = prompt.tokens[: prompt.prompt_length] or prompt_token_ids(
                self.state.tokenizer, prompt
            )
            return truncated(sample, prompt, ids), origin

    def _accept(self, trajectory: Trajectory, returned: Any, origin: str) -> None:
        """Take what a generate function returned.

        Raises:
            UserError: it cannot be used.
        """
        prompt = trajectory.prompt
        is_fan_out = isinstance(returned, list)
        samples = samples_of(returned, origin)
        from_text = finish_samples(
            samples,
            prompt,
            self.state.tokenizer,
            origin,
            is_fan_out=is_fan_out,
            aborting=self.state.client.aborting,
        )
        for sample in samples if trajectory.function else ():
            self._check_own(sample, trajectory, origin)
            check_values(sample, origin, self.state.vocab_size, self.state.args)
            if not is_fan_out:
                warn_of_other_prompt(sample, prompt, origin)
            if not self.evaluation:
                self._check_text(sample, origin)
        if not self.evaluation:
            warn_of_missing_end_token(from_text, origin, self.state)
        trajectory.samples = samples
        trajectory.fanned_out = is_fan_out
        trajectory.function = ""

    def _check_own(self, sample: Sample, trajectory: Trajectory, origin: str) -> None:
        """Check that users' code returned an object that no other trajectory has.

        Raises:
            UserError: it returned it before, for another sample.
        """
        known, owner = self._returned.get(id(sample), (None, trajectory))
        if known is not None and known() is sample and owner is not trajectory:
            raise UserError(
                f"{origin} returned one object for sample {owner.prompt.index} and for sample "
                f"{trajectory.prompt.index}",
                why="both would be trained with the content of the last one",
                fix="return the sample that was given, or a new one at each call",
            )
        self._returned[id(sample)] = (weakref.ref(sample), trajectory)

    async def _run_hooks(self, trajectory: Trajectory) -> None:
        optional = {"rollout_id": self.rollout_id, "evaluation": self.evaluation}
        for path in getattr(self.state.args, "rollout_sample_hook_path", None) or ():
            origin = named(path, "--rollout-sample-hook-path")
            hook = self._hook_at(path, SampleHook)
            trajectory.function = origin
            # each call of a sync hook has a thread, and it may keep state: one at a time
            turn = contextlib.nullcontext() if is_async(hook) else self._hooks_turn
            for position, sample in enumerate(trajectory.samples):
                trajectory_id = sample.rollout_id
                async with turn:
                    own = await apply_sample_hook(
                        hook, origin, self.state.args, sample, optional, self.hook_limit
                    )
                with _blaming_users_code(trajectory):
                    self._check_own(own, trajectory, origin)
                    check_values(own, origin, self.state.vocab_size, self.state.args)
                if not self.evaluation:
                    self._check_text(own, origin)
                keep_identity(own, trajectory.prompt, origin)
                own.rollout_id = trajectory_id
                trajectory.samples[position] = own
        trajectory.function = ""

    # -- rewards -----------------------------------------------------------------------------------

    async def _score(self, trajectory: Trajectory) -> None:
        """Get missing scores from teachers and the reward function; with --group-rm, rewards are
        set later for the whole group. If the rollout ends meanwhile, samples are scored in the next
        one."""
        if not trajectory.is_generated:
            return
        if self.teachers is not None:
            trajectory.enter(Activity.TEACHER)
            with span(trajectory.samples, "teacher"):
                for sample in trajectory.samples:
                    if await self._unless_aborted(self.teachers.score, sample) is None:
                        return
        unscored = [sample for sample in trajectory.samples if sample.reward is None]
        if not unscored or self.rewards is None or self.group_rm:
            return
        trajectory.enter(Activity.REWARD)
        with span(unscored, "reward_model"):
            if trajectory.fanned_out:
                scores = await self._unless_aborted(self.rewards.score_group, unscored)
            else:
                score = await self._unless_aborted(self.rewards.score, unscored[0])
                scores = None if score is None else [score]
        set_rewards(unscored, scores)

    async def _score_group(self, group: GroupRun) -> None:
        if self.rewards is None:
            return
        for trajectory in group.trajectories:
            trajectory.enter(Activity.REWARD)
        try:
            with span(group.samples, "group_reward_model"):
                scores = await self._unless_aborted(self.rewards.score_group, group.samples)
        except Exception as error:  # a group scored together fails together
            if _stops_run(error):
                raise
            for trajectory in group.trajectories:
                self._fail(trajectory, error)
            return
        set_rewards(group.samples, scores)
        for trajectory in group.trajectories:
            trajectory.enter(Activity.DONE)
        self.last_progress = time.monotonic()

    async def _unless_aborted(self, score: Callable[[Any], Awaitable[T]], what: Any) -> T | None:
        """Return ``await score(what)``, or None if an abort begins first: a slow judge must not
        delay the end of a rollout.

        Also return None if scoring fails during an abort: the sample is put back and scored in the
        next rollout.
        """
        client = self.state.client
        task = asyncio.current_task()
        is_cut = False
        assert task is not None

        def cut_short() -> None:
            nonlocal is_cut
            is_cut = True
            task.cancel()

        if client.aborting:
            return None
        try:
            with client.on_abort(cut_short):
                return await score(what)
        except asyncio.CancelledError:
            if not is_cut or task.cancelling() > 1:  # cancelled from elsewhere
                raise
            return None
        except Exception as error:
            if not client.aborting:
                raise
            logger.debug("a reward failed while the rollout ended: %r", error)
            return None
        finally:
            if is_cut:
                task.uncancel()


async def apply_sample_hook(
    hook: Any,
    origin: str,
    args: Any,
    sample: Sample,
    optional: dict[str, Any],
    limit: float | None = None,
) -> Sample:
    """Apply a sample hook and return the sample that it makes.

    Args:
        origin: name of the hook in messages (`slime.user_code.loading.named`).
        limit: seconds that it may take.
    Raises:
        FunctionFailed: the hook hung, or returned something other than a sample, or a sample with
            inconsistent lengths.
    """
    tokens = list(sample.tokens)
    length = sample.response_length
    status = sample.status
    with kept(origin):
        own = await call_hook(
            hook,
            args,
            sample,
            optional=optional,
            what=f"{origin} on sample {sample.index}",
            limit=limit,
        )
    own = sample if own is None else own
    if not isinstance(own, Sample):
        what = f"{origin} returned {a_type(own)}"
        raise FunctionFailed(what, fix="return a sample, or None to keep it")
    try:
        own.validate(origin)
    except FunctionFailed:
        raise
    except UserError as error:
        raise FunctionFailed.of(error) from error
    if own.status is SampleStatus.PENDING:  # a new sample
        own.status = status
    _check_replaced(own, sample.index, tokens, length, origin)
    return own


def _check_replaced(
    own: Sample, index: int | None, tokens: list[int], length: int, origin: str
) -> None:
    """Check a sample that a hook made of one with ``tokens``, ``length`` of them its response.

    Raises:
        FunctionFailed: it has no tokens, is to be continued, or has other tokens in its response,
            as many as before, behind another number of prompt tokens.
    """
    is_empty = bool(tokens) and not own.tokens
    if own.status is SampleStatus.ABORTED or is_empty:
        what = "without tokens" if is_empty else "with the status aborted"
        raise FunctionFailed(
            f"{origin} returned sample {index} {what}",
            why="a hook gets finished samples, and returns finished samples",
            fix="change the sample that it is given, or return a copy",
        )
    is_shifted = own.response_length == length and len(own.tokens) != len(tokens)
    if length and is_shifted and own.tokens[-length:] != tokens[-length:]:
        raise FunctionFailed(
            f"{origin} returned sample {index} with {len(own.tokens)} tokens instead of "
            f"{len(tokens)}, and the same response_length {length}",
            why="the last tokens are the response: those of loss_mask and rollout_log_probs "
            "would be others",
            fix="change response_length, loss_mask and rollout_log_probs with the tokens",
        )


@contextlib.contextmanager
def _blaming_users_code(trajectory: Trajectory) -> Iterator[None]:
    """Within the block, a `UserError` becomes a failure of the running user function, if one runs:
    it misused our code, or returned something unusable."""
    try:
        yield
    except UserError as error:
        if not trajectory.function or isinstance(error, FunctionFailed):
            raise
        raise FunctionFailed.of(error) from error


def truncated(sample: Sample, prompt: Sample, prompt_ids: list[int]) -> Sample:
    """Return the sample as users' code left it when the context was full. If it is inconsistent
    (another prompt, or mismatched lengths), return it as user code received it."""
    try:
        sample.validate()
        whole = sample.tokens[: sample.prompt_length] == prompt_ids
    except UserError:
        whole = False
    if not whole:
        sample = copy_of_prompt(prompt)
        sample.tokens = sample.tokens or prompt_ids
    sample.status = SampleStatus.TRUNCATED
    return sample


def set_rewards(samples: list[Sample], scores: list[Any] | None) -> None:
    """Set the rewards; None leaves the samples without rewards.

    Raises:
        UserError: there is not one score for each sample.
    """
    if scores is None:
        return
    if len(scores) != len(samples):
        raise UserError(
            f"the reward function returned {len(scores)} rewards for {len(samples)} samples",
            fix="return one reward per sample, in their order",
        )
    for sample, score in zip(samples, scores):
        sample.reward = score


def _stops_run(error: Exception) -> TypeGuard[UserError]:
    """Tell whether it is an error of our own code: a mistake in configuration or data."""
    return isinstance(error, UserError) and not isinstance(error, FunctionFailed)


# -- failed groups ---------------------------------------------------------------------------------


def why_failed(run: GroupRun) -> str:
    """Return one line that says which sample failed, while doing what, and why."""
    for trajectory in run.trajectories:
        if trajectory.failure is not None:
            error = trajectory.failure
            reason = error.in_brief if isinstance(error, UserError) else name_and_text(error)
            return f"sample {trajectory.prompt.index} while {trajectory.doing}: {reason}"
    statuses = {sample.status.value for sample in run.samples} - {SampleStatus.COMPLETED.value}
    return f"the generate function returned samples with status {', '.join(sorted(statuses))}"


def too_many_failed(what: str, which: str, run: GroupRun, file: str) -> UserError:
    """Return the error that stops the run, with the fix and the lines of the failure of ``run``;
    raise it from that failure.

    Args:
        which: which of the failed groups ``run`` is ("the last one").
        file: the file in ``samples/`` of the run folder that has all failures.
    """
    cause = run.failure
    fix = "fix what the cause names"
    if isinstance(cause, UserError) and cause.fix:
        fix = cause.fix
    elif cause is not None and user_frames(cause):
        fix = where_to_mend(cause)
    why = f"{which}: {why_failed(run)}; all failures are in samples/{file} of the run folder"
    failure = UserError(what, why, fix)
    return failure if cause is None else with_user_frames(failure, cause)
