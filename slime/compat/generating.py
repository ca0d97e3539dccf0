"""Generation with the interface of earlier versions: shared state, tasks, abort, evaluation."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime import deadlines
from slime.compat import without_run
from slime.rollout import generate as own
from slime.rollout import plugin_api
from slime.rollout.loop import current_loop
from slime.rollout.plugin_api import on_the_runs_loop
from slime.rollout.trajectory import apply_sample_hook
from slime.samples.types import Sample
from slime.user_code.hooks import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, SampleHook
from slime.user_code.loading import check_signature, load_function, named

Tasks = set[asyncio.Task[Any]]


class PluginGenerateState:
    """``PluginGenerateState(args)``: one object per run, shared by all plugin functions, which may
    set attributes on it.

    Without a run, as in a plugin's own unit tests, ``PluginGenerateState(args)`` is a
    `slime.compat.without_run.LoneState`.

    Other attributes are those of the current rollout's `slime.rollout.generate.GenerateState`:
    ``tokenizer``, ``processor``, ``semaphore``, ``args``, and ``sampling_params``, whose changes
    also apply to later rollouts.

    Attributes:
        pendings: tasks of `submit_generate_tasks`.
        remaining_batch_size: number of submitted groups; the plugin subtracts the finished ones.
        aborted: True from `abort` until `reset`; groups are then returned unchanged.
        dp_rank: always 0; an engine chooses its data-parallel rank itself.
    """

    pendings: set[asyncio.Task[Any]]
    remaining_batch_size: int
    dp_rank = 0

    def __new__(cls, args: Any = None) -> Any:
        if not own.is_in_run():
            return _lone_state(args)
        loop = current_loop()
        known: PluginGenerateState | None = vars(loop).get("plugin_state")
        if known is None:
            known = vars(loop)["plugin_state"] = super().__new__(cls)
            known.reset()
        return known

    def __getattr__(self, name: str) -> Any:
        return getattr(own.current_state(), name)

    def reset(self) -> None:
        """Return to the state before the first task."""
        self.pendings = set()
        self.remaining_batch_size = 0
        self._aborted = False

    @property
    def aborted(self) -> bool:
        return self._aborted or own.current_state().aborted

    @aborted.setter
    def aborted(self, value: bool) -> None:
        self._aborted = value

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        yield self.dp_rank

    def submit_generate_tasks(self, samples: list[list[Sample]]) -> None:
        """Start a task per group, through the current ``generate_and_rm_group``."""
        old = importlib.import_module("slime.rollout.sglang_rollout")
        for group in samples:
            params = dict(self.sampling_params)
            task = asyncio.create_task(
                old.generate_and_rm_group(self.args, group, sampling_params=params)
            )
            self.pendings.add(task)
        self.remaining_batch_size += len(samples)


#: The last state without a run, and the args that it was made from.
_lone: list[tuple[Any, without_run.LoneState]] = []


def _lone_state(args: Any) -> without_run.LoneState:
    """Return the state for ``args``; only the last one is cached."""
    if not _lone or _lone[0][0] is not args:
        _lone[:] = [(args, without_run.LoneState(args))]
    return _lone[0][1]


@on_the_runs_loop
async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`slime.rollout.generate.generate`; without a run, `without_run.generate`."""
    answer = own.generate if own.is_in_run() else without_run.generate
    return await answer(args, sample, sampling_params)


@on_the_runs_loop
async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """`slime.rollout.plugin_api.generate_and_rm`, or its version in `without_run`."""
    work = plugin_api.generate_and_rm if own.is_in_run() else without_run.generate_and_rm
    return await work(args, sample, sampling_params, evaluation=evaluation)


@on_the_runs_loop
async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """`slime.rollout.plugin_api.generate_and_rm_group`, or its version in `without_run`."""
    work = (
        plugin_api.generate_and_rm_group if own.is_in_run() else without_run.generate_and_rm_group
    )
    return await work(args, group, sampling_params, evaluation=evaluation)


async def abort(args: Any, rollout_id: int) -> list[list[Sample]]:
    """Abort the requests of this rollout and the tasks of
    `PluginGenerateState.submit_generate_tasks`. Until `PluginGenerateState.reset`, groups are
    returned unchanged.

    Returns:
        With ``--partial-rollout`` the unfinished groups, with ``metadata["start_rollout_id"]``;
        else [].
    Raises:
        EngineError: engines do not stop within the deadline.
    """
    state = PluginGenerateState(args)
    done = await _stop_engines(state.pendings, asyncio.get_running_loop())
    state.pendings = set()
    state.aborted = True
    if not getattr(args, "partial_rollout", False):
        return []
    groups = [task.result() for task in done if not task.cancelled() and task.exception() is None]
    for sample in (sample for group in groups for item in group for sample in _leaves(item)):
        if sample.response_length:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


@on_the_runs_loop
async def _stop_engines(tasks: Tasks, home: asyncio.AbstractEventLoop) -> Tasks:
    """Abort all requests and block new ones until the tasks have ended on ``home``, their event
    loop."""
    client = own.current_state().client
    with client.abort_scope():
        # let new tasks start: they see the abort before they send a request
        await asyncio.sleep(0)
        await client.abort_all(deadlines.DYNAMIC_SAMPLING_ABORT)
        if home is asyncio.get_running_loop():
            return await _ended(tasks)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_ended(tasks), home))


async def _ended(tasks: Tasks) -> Tasks:
    """Return the tasks that end within the deadline; cancel the others."""
    if not tasks:
        return set()
    done, late = await asyncio.wait(tasks, timeout=deadlines.DYNAMIC_SAMPLING_ABORT)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late, timeout=deadlines.DYNAMIC_SAMPLING_ABORT)
    return done


def _leaves(value: Sample | list[Any]) -> list[Sample]:
    if isinstance(value, list):
        return [sample for item in value for sample in _leaves(item)]
    return [value]


@on_the_runs_loop
async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Apply the functions of ``--rollout-sample-hook-path`` to a sample, or to every sample of
    nested lists."""
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    for path in getattr(args, "rollout_sample_hook_path", None) or ():
        hook = load_function(path)
        check_signature(hook, SampleHook, path)
        value = await apply_sample_hook(
            hook, named(path, "--rollout-sample-hook-path"), args, value, kwargs
        )
    return value


class _Drawing(DataSource):
    """A data source made from a ``get_samples`` function or bound method.

    Attributes:
        given_back: groups that were put back, which only the caller can return to its source.
    """

    def __init__(self, get_samples: Callable[[int], list[list[Sample]]]) -> None:
        self._get_samples = get_samples
        owner = getattr(get_samples, "__self__", None)
        self._source = owner if isinstance(owner, DataSource) else None
        self.given_back: list[list[Sample]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return self._get_samples(num_samples)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.given_back += samples

    def mark_consumed(self, group_indices: Iterable[int]) -> None:
        if self._source is not None:
            self._source.mark_consumed(group_indices)

    def mark_discarded(self, group_indices: Iterable[int]) -> None:
        if self._source is not None:
            self._source.mark_discarded(group_indices)


@on_the_runs_loop
async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Callable[[int], list[list[Sample]]] | DataSource
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """Run the built-in rollout with prompts of ``data_source``, a source or its ``get_samples``.

    Returns:
        (output, groups that the caller must put back into the source). The groups are [] if
        ``data_source`` is a source: it already has them.
    """
    source = data_source if isinstance(data_source, DataSource) else _Drawing(data_source)
    output = await current_loop().generate_built_in(rollout_id, own.current_state(), source)
    return output, source.given_back if isinstance(source, _Drawing) else []


@on_the_runs_loop
async def eval_rollout(
    args: Any, rollout_id: int
) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Run the built-in evaluation of all sets, and []."""
    return await current_loop().evaluate_built_in(rollout_id, own.current_state()), []


@on_the_runs_loop
async def eval_rollout_single_dataset(
    args: Any, rollout_id: int, dataset_cfg: Any
) -> dict[str, dict[str, list[Any]]]:
    """Run the built-in evaluation of one of ``args.eval_datasets``."""
    output = await current_loop().evaluate_built_in(
        rollout_id, own.current_state(), names=[dataset_cfg.name]
    )
    return output.data
