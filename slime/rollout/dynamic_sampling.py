"""Collecting one training batch: draw groups, run them, judge them, stop when there are enough, put
the rest back.

    source ─► drawn ─► running ─┬─► failed ──────► discarded, another is drawn
              (over_sampling_   ├─► dropped ─────► discarded, another is drawn (dynamic filter)
               batch_size at    └─► kept ─┬──────► chosen: the batch (first rollout_batch_size)
               a time)                    └──────► surplus: put back, nothing is generated twice

    still running when the batch is full ─► aborted, put back: with --partial-rollout as far as
                                            it came, else as a prompt

Every drawn group ends in exactly one of: chosen, discarded, put back.

The chosen groups are the first to finish. In deterministic mode they are the first to be drawn, and
a group is put back as a prompt, so nothing depends on timing.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from slime import deadlines
from slime.errors import UserError, a_type
from slime.log import get_logger
from slime.rollout.filters import call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.journal import Journal, RecordKind, drawn_as, is_prompt
from slime.rollout.trajectory import (
    Activity,
    Decision,
    GroupRun,
    GroupRunner,
    too_many_failed,
    why_failed,
)
from slime.rollout.watchdog import Watchdog
from slime.samples.sample_fields import kind_problem
from slime.samples.types import ANY_VERSION, Sample, SampleStatus, VersionWindow
from slime.user_code.hooks import DataSource, DynamicFilter
from slime.user_code.loading import FunctionFailed, named, shown

logger = get_logger(__name__)

#: The most groups that a filter may drop in a row, or ten batches if that is more. A filter that
#: drops everything would otherwise keep a rollout from ending.
_MAX_DROPS = 1000

_DISCARDED = (Decision.DROP, Decision.FAILED, Decision.STALE)
#: --stale-samples → the metric that counts the stale groups.
_STALE_METRICS = {
    "correct": "rollout/num_stale_corrected",
    "requeue": "rollout/num_stale_requeued",
    "drop": "rollout/num_stale_dropped",
}


@dataclass
class Collected:
    """The outcome of one rollout.

    Attributes:
        chosen: the batch, by sample index.
        finished: every group that was judged by the filter, chosen or not, by sample index.
        drops: groups dropped, by the filter's reason.
        stale: metrics of groups older than --max-staleness, by what became of them.
        data_seconds: time spent in the data source.
    """

    chosen: list[GroupRun]
    finished: list[GroupRun]
    drops: Counter[str] = field(default_factory=Counter)
    stale: Counter[str] = field(
        default_factory=lambda: Counter(dict.fromkeys(_STALE_METRICS.values(), 0))
    )
    num_failed: int = 0
    num_surplus: int = 0
    num_aborted: int = 0
    data_seconds: float = 0.0


@dataclass(eq=False)
class DynamicSampler:
    """Collects the batch of one rollout, in one call of `collect`.

    Args:
        target: groups in the batch.
        draw_size: groups drawn at a time, while fewer than ``target`` can still be kept.
        group_size: samples that each drawn group must have.
        max_failed_fraction: of ``target``; at least one group may fail.
        abort_timeout: seconds for engines and generate functions to stop at the end.
        journal: restores the drawn groups that it holds, and records the outcome of each group.
        versions: the current weight versions; a group with tokens of another version is stale.
            `Journal.restore` explains ``newest``.
        stale_samples: what happens to a stale group, as in --stale-samples.
    """

    runner: GroupRunner
    source: DataSource
    _: KW_ONLY
    target: int
    draw_size: int
    group_size: int
    dynamic_filter: DynamicFilter | None = None
    deterministic: bool = False
    partial_rollout: bool = False
    max_failed_fraction: float = 0.1
    stall_timeout: float = 600.0
    abort_timeout: float = deadlines.DYNAMIC_SAMPLING_ABORT
    journal: Journal | None = None
    versions: VersionWindow = ANY_VERSION
    stale_samples: str = "requeue"

    def __post_init__(self) -> None:
        self.client = self.runner.state.client
        self.num_failures_allowed = max(1, int(self.max_failed_fraction * self.target))
        self.watchdog = Watchdog(self.client, self.runner, self.stall_timeout)
        self.drawn: list[GroupRun] = []
        self._identities: set[tuple[str, int | None]] = set()  # `_identity_of` each drawn group
        self._max_drops = max(_MAX_DROPS, 10 * self.target)
        path = getattr(self.runner.state.args, "data_source_path", None)
        self._source_name = named(path, "--data-source-path") if path else "the data source"
        self.result = Collected([], [])
        # groups certain to be in the batch; may exceed the target
        self._certain: list[GroupRun] = []
        # in deterministic mode: every group drawn before this one has its decision
        self._next_certain = 0
        # in deterministic mode: groups that have finished, by order, and the next to be judged
        self._ready: dict[int, GroupRun] = {}
        self._next_judged = 0
        self._num_rejected = 0
        self._drops_in_a_row = 0
        self._tasks: dict[asyncio.Task[None], GroupRun] = {}
        self._finished: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()

    async def collect(self) -> Collected:
        """Run the rollout.

        Raises:
            UserError: too many failures, no prompts left, only dropped groups, a stall, or a
                mistake in user code.
            EngineError: the engines cannot be stopped at the end.
        """
        try:
            while len(self._certain) < self.target:
                while self._num_expected() < self.target:
                    self._draw_some()
                for run in await self._wait_for_some():
                    if self.deterministic and len(self._certain) >= self.target:
                        break
                    await self._judge(run)
            await self._stop_running()
        finally:
            await self._cancel(self._tasks)
        chosen = self._certain[: self.target]
        for sample in (sample for run in chosen for sample in run.samples):
            sample.drawn_as = sample.as_drawn = None  # how it was drawn is of no use in training
        self._put_back(chosen)
        result = self.result
        result.chosen = sorted(chosen, key=_sample_index)
        judged = [run for run in self.drawn if run.decision in (Decision.KEEP, Decision.DROP)]
        result.finished = sorted(judged, key=_sample_index)
        return result

    # -- choosing ----------------------------------------------------------------------------------

    def _num_expected(self) -> int:
        """Return the number of groups that are kept or may still be kept."""
        return len(self.drawn) - self._num_rejected

    def _decide(self, run: GroupRun, decision: Decision) -> None:
        """Note a decision; a rejected group is not drawn again after a resume."""
        run.decision = decision
        if decision is not Decision.KEEP:
            self._num_rejected += 1
            if decision is not Decision.REQUEUE:
                self.source.mark_discarded([run.index])
        elif not self.deterministic:
            self._certain.append(run)
        while self.deterministic and self._next_certain < len(self.drawn):
            first = self.drawn[self._next_certain]
            if first.decision is None:
                break
            if first.decision is Decision.KEEP:
                self._certain.append(first)
            self._next_certain += 1

    def _draw_some(self) -> None:
        """Draw groups. Ask a failing user source again, and leave unusable groups out, until too
        many have failed."""
        try:
            started = time.monotonic()
            groups = self.source.get_samples(self.draw_size)
            self.result.data_seconds += time.monotonic() - started
            if not isinstance(groups, list):
                raise FunctionFailed(
                    f"{self._source_name} gave {a_type(groups)}", fix="return list[group][Sample]"
                )
        except FunctionFailed as error:
            self._note_failed_draw(error)
            return
        if not groups:
            raise UserError(
                f"the data source gave no more prompts after {len(self.drawn)} groups",
                why=f"the batch needs {self.target}; the dynamic filter dropped "
                f"{sum(self.result.drops.values())}",
                fix="give more data, or lower --rollout-batch-size",
            )
        _unshare(groups)
        for samples in groups:
            wrong = _group_problem(samples, self.group_size, self._identities, self._source_name)
            if wrong is not None:
                self._note_failed_draw(wrong)
                continue
            self._identities |= _identity_of(samples)
            run = self._restored(samples)
            self.drawn.append(run)
            if self._is_stale(run) and not self._takes_stale(run):
                continue
            for sample in run.samples if run.was_prompt else ():
                self.runner.state.from_journal[sample.index] += sample.response_length
            task = asyncio.create_task(self.runner.run(run))
            self._tasks[task] = run
            task.add_done_callback(self._finished.put_nowait)

    def _note_failed_draw(self, error: FunctionFailed) -> None:
        self.result.num_failed += 1
        if self.result.num_failed > self.num_failures_allowed:
            raise error
        logger.warning("drawing again: %s", error)

    def _restored(self, drawn: list[Sample]) -> GroupRun:
        """Return a drawn group, restored from the journal if the journal holds it."""
        run = GroupRun.of(drawn, order=len(self.drawn))
        if self.journal is not None and drawn:
            key = drawn[0].drawn_as or drawn_as(drawn)
            versions = self.versions._replace(newest=None) if self.deterministic else self.versions
            found, is_noted = self.journal.restore(self._rollout_id, drawn, key, versions)
            if found is not drawn:
                run = run.restored(found)
                run.was_prompt = is_prompt(drawn)
            run.drawn_as = key
            run.is_noted = is_noted
        return run

    # -- stale groups ------------------------------------------------------------------------------

    def _is_stale(self, run: GroupRun) -> bool:
        return not run.is_corrected and (
            self.versions.stale_among(run.to_group().weight_versions()) is not None
        )

    def _takes_stale(self, run: GroupRun) -> bool:
        """Apply --stale-samples to a stale group that was drawn; return whether the group is
        used."""
        self.result.stale[_STALE_METRICS[self.stale_samples]] += 1
        if self.stale_samples == "drop":
            self._decide(run, Decision.STALE)
            return False
        if self.stale_samples == "correct":
            run.is_corrected = True
        else:
            run.is_noted = False
            run.restart()
        return True

    def _rejects_stale(self, run: GroupRun) -> bool:
        """Tell whether a generated group is rejected because its tokens are too old. Only a user's
        generate function can return such tokens. Another group is drawn instead."""
        if not self._is_stale(run):
            return False
        self.result.stale[_STALE_METRICS[self.stale_samples]] += 1
        if self.stale_samples == "correct":
            run.is_corrected = True
            return False
        self._drops_in_a_row += 1
        if self._drops_in_a_row >= self._max_drops:
            raise UserError(
                f"{self._drops_in_a_row} groups in a row were generated with tokens older than "
                "--max-staleness allows",
                why=f"{self.versions.allowed} are young enough; the generate function returns "
                "others",
                fix="leave older tokens out in that function, or pass --stale-samples correct to "
                "train on them",
            )
        self._decide(run, Decision.STALE if self.stale_samples == "drop" else Decision.REQUEUE)
        return True

    def _note(self, kind: RecordKind, run: GroupRun) -> None:
        """Write the outcome of a group into the journal, for a run that resumes after a crash."""
        if self.journal is not None and not (kind is RecordKind.FINISHED and run.is_noted):
            self.journal.note(kind, self._rollout_id, run.drawn_as, run.samples)

    @property
    def _rollout_id(self) -> int:
        return self.runner.rollout_id or 0

    async def _wait_for_some(self) -> list[GroupRun]:
        """Wait until a group has finished; return all that finished since the last call."""
        while self._finished.empty():
            try:
                async with asyncio.timeout(self.watchdog.interval):
                    self._finished.put_nowait(await self._finished.get())
            except TimeoutError:
                stalled = await self.watchdog.check(self._tasks.values())
                if stalled is not None:
                    if not self.watchdog.give_up_hung(self._tasks.values(), stalled.seconds):
                        raise stalled from None
                    logger.warning("%s", stalled)
        runs = []
        while not self._finished.empty():
            task = self._finished.get_nowait()
            runs.append(self._tasks.pop(task))
            task.result()  # raises errors that must stop the run
        if self.deterministic:
            return self._in_turn(runs)
        return sorted(runs, key=lambda run: run.order)

    def _in_turn(self, runs: list[GroupRun]) -> list[GroupRun]:
        """Return finished groups before which every drawn group is judged or finished, so that
        filters see them in the order of drawing."""
        self._ready.update((run.order, run) for run in runs)
        found = []
        while self._next_judged < len(self.drawn):
            first = self.drawn[self._next_judged]
            if first.decision is None and first.order not in self._ready:
                break
            if first.order in self._ready:
                found.append(self._ready.pop(first.order))
            self._next_judged += 1
        return found

    async def _judge(self, run: GroupRun) -> None:
        if run.failure is not None or not run.is_generated:
            self._discard_failed(run)
            return
        if self.runner.rewards is not None and not run.is_scored:
            raise UserError(
                f"the reward function returned None in group {run.index}",
                fix="return a number, or a dict of numbers",
            )
        if self._rejects_stale(run):
            return
        self._note(RecordKind.FINISHED, run)
        try:
            output = await call_dynamic_filter(
                self.dynamic_filter, self.runner.state.args, run.samples, self.watchdog.limit
            )
        except UserError as error:
            self.runner.fail_group(run, error)
            self._discard_failed(run)
            return
        if not should_drop_dynamic_filter_output(
            output, remaining_batch_size=self._num_expected(), target_data_size=self.target
        ):
            self._drops_in_a_row = 0
            self._decide(run, Decision.KEEP)
            return
        self.result.drops[output.reason or "unnamed"] += 1
        self._drops_in_a_row += 1
        self._decide(run, Decision.DROP)
        if self._drops_in_a_row >= self._max_drops:
            reasons = ", ".join(
                f"{reason} ({count})" for reason, count in self.result.drops.most_common(3)
            )
            raise UserError(
                f"the dynamic filter has dropped {self._drops_in_a_row} groups in a row",
                why=f"its reasons: {reasons}",
                fix="use prompts on which the model sometimes succeeds, raise "
                "--n-samples-per-prompt, or leave --dynamic-sampling-filter-path out",
            )

    def _discard_failed(self, run: GroupRun) -> None:
        self.result.num_failed += 1
        self._decide(run, Decision.FAILED)
        if self.result.num_failed <= self.num_failures_allowed:
            logger.warning(
                "group %d failed and is replaced by another (%s)", run.index, why_failed(run)
            )
            return
        what = f"{self.result.num_failed} groups have failed in this rollout of {self.target}"
        raise too_many_failed(what, "the last one", run, "failed_*.jsonl") from run.failure

    # -- the end -----------------------------------------------------------------------------------

    async def _stop_running(self) -> None:
        """Abort the groups that still run: abandon their rewards, stop the engines, cancel slow
        generate functions."""
        if not self._tasks:
            return
        with self.client.abort_scope():
            # tasks that have just been created see the abort before anything is sent
            await asyncio.sleep(0)
            end = time.monotonic() + self.abort_timeout
            running = [one for run in self._tasks.values() for one in run.trajectories]
            is_generating = any(one.activity is Activity.GENERATING for one in running)
            if self.client.in_flight or is_generating:
                await self.client.abort_all(self.abort_timeout)
            _, late = await asyncio.wait(self._tasks, timeout=max(0.0, end - time.monotonic()))
            if late:
                logger.warning(
                    "%d groups did not stop within %.0f s of the abort",
                    len(late),
                    self.abort_timeout,
                )
                await self._cancel(late)
                await self.client.abort_all(self.abort_timeout)
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _cancel(
        self, tasks: set[asyncio.Task[None]] | dict[asyncio.Task[None], GroupRun]
    ) -> None:
        for task in tasks:
            task.cancel()
        # user code gets a moment to end, then it is abandoned (`slime.user_code.calls`)
        if tasks:
            await asyncio.wait(tasks, timeout=deadlines.DYNAMIC_SAMPLING_CANCEL)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # marks it as retrieved: the first error has been raised

    def _put_back(self, chosen: list[GroupRun]) -> None:
        taken = {run.order for run in chosen}
        back = []
        for run in self.drawn:
            if run.order in taken or run.decision in _DISCARDED:
                continue
            if run.decision is Decision.REQUEUE:
                run.restart()
                back.append(run)
                continue
            # failed, and its siblings were aborted; whether it had failed yet depends on timing
            if run.failure is not None and not self.deterministic:
                self.result.num_failed += 1
                self._decide(run, Decision.FAILED)
                continue
            self.result.num_surplus += run.is_generated
            self.result.num_aborted += not run.is_generated
            self._rewind(run)
            back.append(run)
        if back:
            self.source.add_samples([run.for_later() for run in sorted(back, key=_sample_index)])

    def _rewind(self, run: GroupRun) -> None:
        """Put a group into the state from which the next rollout continues it."""
        if run.is_generated and not self.deterministic:
            # it finished after the batch was full: it was neither judged nor recorded
            if run.decision is None:
                self._note(RecordKind.FINISHED if run.is_scored else RecordKind.BEGUN, run)
            return
        if self.deterministic or not self.partial_rollout:
            if run.decision is not None or run.is_restored:
                self._note(RecordKind.FORGOTTEN, run)
            run.restart()
            return
        for trajectory in run.trajectories:
            if trajectory.is_generated:
                continue
            # user code left it half-done
            if trajectory.fanned_out or trajectory.activity is Activity.GENERATING:
                trajectory.rewind()
            for sample in trajectory.samples:
                if sample.response_length:
                    sample.metadata.setdefault("start_rollout_id", self.runner.rollout_id)
        if any(sample.response_length for sample in run.samples):
            self._note(RecordKind.BEGUN, run)

    def progress(self) -> dict[str, float]:
        """Return ``done`` and ``target`` in groups, ``tokens`` generated so far."""
        kept = sum(run.decision is Decision.KEEP for run in self.drawn)
        tokens = sum(run.num_tokens for run in self.drawn)
        return {"done": min(kept, self.target), "target": self.target, "tokens": tokens}


def _sample_index(run: GroupRun) -> int:
    index = run.trajectories[0].prompt.index
    assert index is not None
    return index


def _group_problem(
    samples: Any, group_size: int, taken: Collection[tuple[str, int | None]], source: str
) -> FunctionFailed | None:
    """Return the error for an invalid group from a data source; None if the group is valid.

    Args:
        group_size: trajectories that the group must have.
        taken: `_identity_of` every group that this rollout has drawn.
        source: names the data source in messages.
    """
    what = ""
    if not isinstance(samples, list) or not all(isinstance(sample, Sample) for sample in samples):
        what = f"that is {shown(samples)}"
    elif odd := next((problem for problem in map(kind_problem, samples) if problem), None):
        what = f"with {odd[0]}, which is not {odd[1].removeprefix('give ')}"
    elif odd_sample := next(filter(None, map(_half_made, samples)), ""):
        what = odd_sample
    elif any(sample.index is None for sample in samples):
        what = "whose samples have no index"
    elif (count := len(GroupRun.of(samples).trajectories)) != group_size:
        what = f"of {count} samples"
    elif len({sample.group_index for sample in samples}) > 1:
        what = f"with different group_index: {shown([sample.group_index for sample in samples])}"
    elif len({each.prompt.index for each in GroupRun.of(samples).trajectories}) < group_size:
        what = f"with samples of the same index: {shown([sample.index for sample in samples])}"
    elif again := _identity_of(samples) & set(taken):
        what = f"with the {' '.join(map(str, min(again)))} of another group of this rollout"
    why = f"a group has {group_size} samples (--n-samples-per-prompt), each with its own index"
    fix = "let get_samples continue group_index and index from draw to draw"
    if what:
        return FunctionFailed(f"{source} gave a group {what}", why, fix)
    try:
        for sample in samples:
            sample.validate(source)
    except UserError as error:
        return FunctionFailed.of(error)
    return None


def _half_made(sample: Sample) -> str:
    """Return what is wrong with a new sample that has no response, and fields of one that has; ""
    if nothing is."""
    if sample.response_length or sample.session_id:  # with a session it was put back
        return ""
    if sample.reward is not None:
        return (
            f"whose samples have a reward ({shown(sample.reward, 40)}) before their response, "
            "which would be trained on; put what answers are compared with into label"
        )
    if sample.response:
        return f"whose samples have the response {shown(sample.response, 40)}, and no tokens of it"
    if sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED):
        return f"whose samples have the status {sample.status}, and no response"
    return ""


def _unshare(groups: list[Any]) -> None:
    """Copy lists and dicts that several samples of a user's data source share: generation extends
    the tokens of one, and hooks change its metadata."""
    seen: set[int] = set()
    for samples in groups:
        for sample in samples if isinstance(samples, list) else ():
            for name, value in vars(sample).items() if isinstance(sample, Sample) else ():
                if not isinstance(value, (list, dict)):
                    continue
                if id(value) in seen:
                    setattr(sample, name, copy.deepcopy(value))
                seen.add(id(value))


def _identity_of(samples: Sequence[Sample]) -> set[tuple[str, int | None]]:
    """Return the indices that no other group of a rollout may have: the group's, and those of its
    samples."""
    indices = (
        {("group_index", samples[0].group_index)} if samples[0].group_index is not None else set()
    )
    return indices | {("index", sample.index) for sample in samples}
