"""Rollouts and evaluations: prompts in, groups with rewards out.

    source ─► DynamicSampler ─► GroupRunner ─► generate function ─► RolloutClient ─► router, engines
              (which)           (one group)    (one sample)         (one request)
                                     └───────► rewards (worker processes)

`RolloutLoop.generate_batch` runs between two training steps. A user's ``--rollout-function-path``
may replace it, and may call the built-in `generate_rollout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slime import deadlines
from slime.config.config import Config
from slime.engines.adapters import adapter_name
from slime.engines.api import EngineClient, EngineError
from slime.engines.client import RolloutClient
from slime.engines.keys import key_of
from slime.engines.router import list_workers, wants_routing_key
from slime.errors import UserError
from slime.log import get_logger
from slime.models import vocab_size_of
from slime.prompts.images import images_of, media_folder
from slime.prompts.tokenizer import end_token_ids
from slime.rollout.dynamic_sampling import Collected, DynamicSampler
from slime.rollout.eval_datasets import EvalDataset, eval_datasets
from slime.rollout.evaluate import EvalSet, Tasks, evaluate, progress_of, read_eval_prompts
from slime.rollout.finish import finish_evaluation, finish_rollout
from slime.rollout.generate import (
    GenerateState,
    begin_state,
    context_limit,
    current_state,
    forget_states,
    rollout_sampling_params,
)
from slime.rollout.journal import Journal
from slime.rollout.metrics import load_metrics, rollout_metrics, throughput_metrics
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.teachers import TeacherPool
from slime.rollout.trajectory import GroupRunner, Trajectory
from slime.rollout.user_rollouts import (
    call_rollout_fn,
    call_with_groups,
    check_age,
    check_groups,
    overridden_evaluation,
    tell_of_other_sizes,
    validate_groups,
)
from slime.rollout.watchdog import Watchdog
from slime.samples.types import ANY_VERSION, Sample, VersionWindow
from slime.user_code.calls import WatchedLoop, hung_threads, watch_loop
from slime.user_code.hooks import DataSource, RolloutFnEvalOutput, RolloutFnTrainOutput, check_hooks
from slime.user_code.loading import load_function, named
from slime.user_code.overrides import override_of

logger = get_logger(__name__)
T = TypeVar("T")
RecordFailure = Callable[[int | None, Sequence[Sample], str, Exception], None]


class RolloutLoop:
    """Generates training batches and evaluates, all on the event loop that called `start`.

    Several rollouts and evaluations may run at once: the first prompts of one rollout use the
    engine slots that the last long answers of another leave free. Deterministic rollouts and users'
    rollout functions, which may keep state, run one at a time.

    Args:
        source: gives prompts, and takes unfinished ones back.
        base_url: the router, or a single engine.
        model_urls: routers of all models by name (--sglang-config), for
            `slime.rollout.plugin_api.get_model_url`.
        journal: records groups generated for training; groups that it holds are not generated
            again.
    Raises:
        UserError: a hook or an evaluation set is invalid.

    Example:
        loop = RolloutLoop(config, tokenizer, source, "http://127.0.0.1:30000")
        await loop.start()
        output = await loop.generate_batch(0)
        output.samples      # rollout_batch_size groups, sorted by sample index
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        source: DataSource,
        base_url: str,
        model_urls: Mapping[str, str] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.source = source
        self._journal = journal
        self.base_url = base_url.rstrip("/")
        self.args = config.shared_args
        router, port = _address(self.base_url)
        models = model_urls or {"policy": self.base_url}
        self._datasets = eval_datasets(config)
        vars(self.args).update(
            sglang_router_ip=router,
            sglang_router_port=port,
            sglang_router_api_key=key_of(self.base_url),
            sglang_model_routers={name: _address(url) for name, url in models.items()},
            eval_datasets=self._datasets,
        )
        check_hooks(self.args)
        self._sampling_params = rollout_sampling_params(config)
        self._eval_sets: list[EvalSet] = []
        self._client: RolloutClient | None = None
        self._rewards: RewardPool | None = None
        self._model_urls = models
        self._teachers: TeacherPool | None = None
        self._end_tokens = end_token_ids(tokenizer, str(config.checkpoint.hf_checkpoint or ""))
        # is it an evaluation? → the running ones, oldest first
        self._running: dict[bool, list[GenerateState]] = {True: [], False: []}
        self._last: GenerateState | None = None  # of the rollout or evaluation that ended last
        self._starting = asyncio.Lock()
        self._one_at_a_time = asyncio.Lock()
        self._vocab_size = vocab_size_of(
            config.checkpoint.hf_checkpoint, config.checkpoint.model_name
        )
        self._images = images_of(config)
        if self._images is not None:
            self._images.reader.take_seconds()  # drops the time spent on checking rows
        self._watched: WatchedLoop | None = None
        self.record_failure: RecordFailure = lambda rollout_id, samples, stage, error: None
        """Called with each failure: rollout (None: an evaluation), samples, stage, error."""
        self.on_blocked: Callable[[str], object] = logger.error
        """Called with a message when users' code blocks the event loop for good."""

    # -- start and end -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect to the engines, start the reward workers, read the evaluation data.

        Raises:
            EngineError: the router does not answer.
            UserError: evaluation data are invalid.
        """
        config = self.config
        async with self._starting:
            if self._client is not None:
                return
            async with EngineClient(self.base_url) as router:
                engine_urls = [worker.url for worker in await list_workers(router)]
            self._watched = watch_loop(
                asyncio.get_running_loop(),
                self._blocking_limit,
                lambda message: self.on_blocked(message),
            )
            self._rewards = RewardPool(config, self.args)
            if config.distillation.use_opd:
                self._teachers = TeacherPool(
                    config, self.tokenizer, self._model_urls, self.base_url
                )
            self._eval_sets = [
                EvalSet(
                    one, await asyncio.to_thread(read_eval_prompts, one, config, self.tokenizer)
                )
                for one in self._datasets
            ]
            policy = config.engine.router.get("policy") or "cache_aware"
            self._client = RolloutClient(
                self.base_url,
                max_concurrency=config.engine.sglang_server_concurrency,
                request_timeout=config.engine.sglang_router_request_timeout_secs,
                retry_seconds=deadlines.LOOP_RETRY[config.fault_tolerance.use_fault_tolerance],
                send_routing_key=wants_routing_key(policy),
                engine_urls=engine_urls,
            )

    async def close(self) -> None:
        """Run the registered clean-ups, stop the reward workers and close the connections."""
        for clean_up in _CLEAN_UPS:
            await clean_up()
        if self._watched is not None:
            self._watched.stop()
        for part in (self._client, self._rewards, self._teachers):
            if part is not None:
                await part.close()
        self._client = self._rewards = None
        forget_states(self.args)

    async def use_adapter(self, version: int, *, cut: bool) -> None:
        """Have requests name the policy's adapter of this version (`RolloutClient.use_adapter`)."""
        await self.start()
        assert self._client is not None
        await self._client.use_adapter(adapter_name(version), cut=cut)

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters that running requests use."""
        return self._client.adapters_in_use() if self._client is not None else set()

    def _blocking_limit(self) -> float:
        """Return the seconds that users' code may block the event loop; fewer during an abort."""
        states = itertools.chain.from_iterable(self._running.values())
        limit = self.config.rollout.rollout_stall_timeout
        if any(state.aborted for state in states):
            return min(limit, deadlines.DYNAMIC_SAMPLING_ABORT)
        return limit

    def make_runner(
        self,
        state: GenerateState,
        rewards: RewardPool | None,
        *,
        rollout_id: int | None,
        evaluation: bool = False,
        **options: Any,
    ) -> GroupRunner:
        """Make a runner with this run's limits, teachers and record of failures; the arguments are
        those of `GroupRunner`."""

        def on_failure(trajectory: Trajectory, error: Exception) -> None:
            number = None if evaluation else rollout_id
            self.record_failure(number, trajectory.samples, trajectory.activity.value, error)

        return GroupRunner(
            state,
            rewards,
            rollout_id=rollout_id,
            evaluation=evaluation,
            teachers=None if evaluation else self._teachers,
            hook_limit=self.config.rollout.rollout_stall_timeout,
            on_failure=on_failure,
            **options,
        )

    @property
    def rewards(self) -> RewardPool:
        assert self._rewards is not None, "start() comes first"
        return self._rewards

    @contextlib.asynccontextmanager
    async def _session(
        self, *, alone: bool, evaluation: bool = False, versions: VersionWindow = ANY_VERSION
    ) -> AsyncIterator[GenerateState]:
        """Yield the state of one rollout or evaluation, bound for generate functions and for
        `generate_rollout`.

        Args:
            alone: wait for other rollouts and evaluations that must run alone.
        """
        await self.start()
        assert self._client is not None
        turn = self._one_at_a_time if alone else contextlib.nullcontext()
        async with turn:
            with self._client.fork(own_slots=evaluation) as client:
                rollout = self.config.rollout
                state = GenerateState(
                    args=self.args,
                    tokenizer=self.tokenizer,
                    client=client,
                    sampling_params=self._sampling_params,
                    max_context_len=context_limit(
                        rollout.rollout_max_context_len, self.config.train.seq_length
                    ),
                    deterministic=rollout.deterministic,
                    rollout_seed=rollout.rollout_seed,
                    versions=versions,
                    end_tokens=self._end_tokens,
                    request_tokens=rollout.rollout_request_tokens,
                    routed_experts=self.config.train.use_rollout_routing_replay and not evaluation,
                    sampling_mask=self.config.algorithm.use_sampling_mask and not evaluation,
                    vocab_size=self._vocab_size,
                    images=self._images,
                    media_folder=media_folder(self.config),
                    templated=self.config.data.apply_chat_template,
                    loop=asyncio.get_running_loop(),
                    rollout_loop=self,
                )
                begin_state(state)
                self._running[evaluation].append(state)
                try:
                    yield state
                finally:
                    self._running[evaluation].remove(state)
                    final_progress = state.progress()
                    # what counts it holds all samples
                    state.progress = lambda: final_progress
                    state.waits = str
                    self._last = state

    # -- training ----------------------------------------------------------------------------------

    async def generate_batch(
        self, rollout_id: int, versions: VersionWindow = ANY_VERSION
    ) -> RolloutFnTrainOutput:
        """Generate ``rollout_batch_size`` groups with rewards, sorted by sample index.

        Args:
            versions: weight versions that samples may have, see `GenerateState`.
        Returns:
            The groups and their metrics.
        Raises:
            UserError: see `DynamicSampler.collect`; or a custom rollout function returned invalid
                groups.
        """
        path = self.args.rollout_function_path
        custom = _custom_function(path) or override_of("rollout")
        alone = custom is not None or self.config.rollout.deterministic
        async with self._session(alone=alone, versions=versions) as state:
            started = time.monotonic()
            if custom is None:
                output = await self.generate_built_in(rollout_id, state, self.source)
            else:
                output = await call_rollout_fn(
                    custom, self.args, rollout_id, self.source, RolloutFnTrainOutput, path
                )
            origin = named(path, "--rollout-function-path") if path else "the rollout"
            validate_groups(output.samples, origin)
            if custom is not None:
                check_groups(output.samples, origin, self._vocab_size, self.args, self.tokenizer)
                tell_of_other_sizes(output.samples, origin, self.config.rollout)
                if self.config.sync.stale_samples != "correct":
                    check_age(output.samples, origin, versions)
            seconds = time.monotonic() - started

            def measure(samples: list[Sample]) -> dict[str, float]:
                num_gpus = self.config.cluster.rollout_num_gpus
                throughput = throughput_metrics(samples, seconds, num_gpus, state.from_journal)
                return rollout_metrics(output.samples, self.args) | throughput

            return await finish_rollout(
                self.config, self.args, rollout_id, output, seconds, measure
            )

    async def generate_built_in(
        self, rollout_id: int, state: GenerateState, source: DataSource
    ) -> RolloutFnTrainOutput:
        """Run the rollout that `slime.rollout.dynamic_sampling` describes, with prompts of
        ``source``."""
        rollout = self.config.rollout
        limit = rollout.rollout_stall_timeout
        rewards = self.rewards.fork()
        runner = self.make_runner(
            state,
            rewards,
            rollout_id=rollout_id,
            group_rm=self.config.reward.group_rm,
            mask_offpolicy=rollout.mask_offpolicy_in_partial_rollout,
        )
        teachers = self._teachers
        canary = {} if teachers is None else await teachers.begin(self._vocab_size)
        path = rollout.dynamic_sampling_filter_path
        sampler = DynamicSampler(
            runner,
            source,
            target=rollout.rollout_batch_size,
            draw_size=rollout.over_sampling_batch_size,
            group_size=rollout.n_samples_per_prompt,
            dynamic_filter=load_function(path) if path else None,
            deterministic=rollout.deterministic,
            partial_rollout=rollout.partial_rollout,
            max_failed_fraction=rollout.rollout_max_failed_fraction,
            stall_timeout=limit,
            journal=self._journal,
            versions=state.versions,
            stale_samples=self.config.sync.stale_samples,
        )
        state.progress = sampler.progress
        state.waits = lambda: sampler.watchdog.waits_for
        state.client.counters.take()
        async with _load_snapshots(state.client) as loads:
            collected = await sampler.collect()
        teacher_metrics = {} if teachers is None else canary | teachers.metrics()
        if rollout.rollout_sample_filter_path:
            views = [run.samples for run in collected.chosen]
            await call_with_groups("rollout_sample_filter_path", self.args, views, limit=limit)
        if rollout.rollout_all_samples_process_path:
            views = [run.samples for run in collected.finished]
            await call_with_groups(
                "rollout_all_samples_process_path", self.args, views, source, limit=limit
            )
        groups = [run.to_group() for run in collected.chosen]
        restored = self._journal.metrics() if self._journal is not None else {}
        metrics = _counters(collected, runner) | load_metrics(loads) | rewards.metrics()
        return RolloutFnTrainOutput(groups, metrics | restored | teacher_metrics)

    def progress(self, evaluation: bool = False) -> dict[str, float]:
        """Return ``done`` and ``target`` in prompts, and ``tokens`` so far, of the oldest running
        rollout (or ``evaluation``), else of the oldest of the other kind, else of the last one."""
        state = self._state_to_report(evaluation)
        return state.progress() if state is not None else {}

    def take_idle(self) -> dict[str, float]:
        """Return ``perf/engines_idle_ratio``: the share of the time since the last call in which no
        engine had a request."""
        if self._client is None:
            return {}
        return {"perf/engines_idle_ratio": self._client.busy.take_idle_ratio()}

    def waits(self, evaluation: bool = False) -> str:
        """Say what is waited for if there has been no progress for a while; else ""."""
        state = self._state_to_report(evaluation)
        return state.waits() if state is not None else ""

    def _state_to_report(self, evaluation: bool) -> GenerateState | None:
        running = [*self._running[evaluation], *self._running[not evaluation]]
        return running[0] if running else self._last

    # -- evaluation --------------------------------------------------------------------------------

    async def evaluate(
        self, rollout_id: int, *, before_training: bool = False
    ) -> RolloutFnEvalOutput:
        """Score every evaluation set with the weights that the engines hold.

        Raises:
            UserError: no evaluation set, too many failures, a stall, or a mistake in user code.
        """
        path = self.args.eval_function_path
        custom = _custom_function(path) or override_of("rollout")
        async with self._session(alone=custom is not None, evaluation=True) as state:
            started = time.monotonic()
            if custom is None:
                own = await overridden_evaluation(self.args, rollout_id)
                output = await self.evaluate_built_in(rollout_id, state) if own is None else own
            else:
                output = await call_rollout_fn(
                    custom, self.args, rollout_id, self.source, RolloutFnEvalOutput, path
                )
            seconds = time.monotonic() - started
            return await finish_evaluation(
                self.config, self.args, rollout_id, output, seconds, before_training=before_training
            )

    async def evaluate_built_in(
        self, rollout_id: int, state: GenerateState, names: Sequence[str] | None = None
    ) -> RolloutFnEvalOutput:
        """Score all evaluation sets, or only those in ``names``."""
        sets = [s for s in self._eval_sets if names is None or s.dataset.name in names]
        if not sets:
            raise UserError(
                "there is nothing to evaluate",
                fix="pass --eval-prompt-data NAME PATH or --eval-config",
            )

        rewards = self.rewards.fork()

        def make_runner(dataset: EvalDataset) -> GroupRunner:
            own = dataclasses.replace(
                state,
                sampling_params=dataset.sampling_params(),
                max_context_len=context_limit(
                    self.config.eval.eval_max_context_len, self.config.train.seq_length
                ),
                templated=dataset.apply_chat_template,
                template_kwargs=dataset.apply_chat_template_kwargs,
            )
            return self.make_runner(
                own,
                rewards,
                rollout_id=rollout_id,
                evaluation=True,
                group_rm=self.config.reward.group_rm,
            )

        def started(tasks: Tasks, watchdogs: Sequence[Watchdog]) -> None:
            state.progress = lambda: progress_of(tasks)
            state.waits = lambda: next(filter(None, (one.waits_for for one in watchdogs)), "")

        output = await evaluate(
            sets,
            make_runner,
            self.args,
            max_failed_fraction=self.config.rollout.rollout_max_failed_fraction,
            stall_timeout=self.config.rollout.rollout_stall_timeout,
            on_start=started,
        )
        late = {
            f"eval/rewards/{name.rpartition('_')[2]}": count
            for name, count in rewards.metrics().items()
            if count
        }
        return RolloutFnEvalOutput(output.data, (output.metrics or {}) | late)


def _counters(collected: Collected, runner: GroupRunner) -> dict[str, float]:
    """Return counters of the sampler, the runner and the client."""
    state = runner.state
    counts = state.client.counters.take()
    metrics: dict[str, float] = {
        "rollout/num_failed_samples": runner.num_failures,
        "rollout/num_hung_samples": runner.num_hung,
        "rollout/hung_threads": hung_threads(),
        "rollout/num_failed_groups": collected.num_failed,
        "rollout/num_surplus_groups": collected.num_surplus,
        "rollout/num_aborted_groups": collected.num_aborted,
        "rollout/prompt_too_long": state.counts["prompt_too_long"],
        "rollout/continued_requests": state.counts["continued"],
        "rollout/requests": counts["requests"],
        "rollout/retries": counts["retries"],
        "perf/data_wait_time": collected.data_seconds,
    }
    for reason, count in collected.drops.items():
        metrics[f"rollout/dynamic_filter/drop_{reason}"] = count
    if state.images is not None:
        metrics["perf/images/rollout_time"] = state.images.reader.take_seconds()
    return metrics | collected.stale


@contextlib.asynccontextmanager
async def _load_snapshots(client: RolloutClient) -> AsyncIterator[list[dict[str, int]]]:
    """Collect the number of requests on each engine every few seconds while the block runs, for
    `slime.rollout.metrics.load_metrics`."""
    snapshots: list[dict[str, int]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(deadlines.LOOP_LOAD_INTERVAL)
            with contextlib.suppress(EngineError):  # a missing metric must not end the run
                loads = await client.worker_loads()
                snapshots.append({url: max(0, requests) for url, (requests, _) in loads.items()})

    task = asyncio.create_task(watch())
    try:
        yield snapshots
    finally:
        task.cancel()


# -- for users' rollout functions ------------------------------------------------------------------

_CLEAN_UPS: list[Callable[[], Awaitable[None]]] = []


def close_with_rollouts(clean_up: Callable[[], Awaitable[None]]) -> None:
    """Await ``clean_up`` whenever a `RolloutLoop` closes, in its event loop: for servers that
    samples share."""
    _CLEAN_UPS.append(clean_up)


def current_loop() -> RolloutLoop:
    """Return the loop whose rollout this code runs in.

    Raises:
        UserError: called outside a rollout.
    """
    loop = current_state().rollout_loop
    assert isinstance(loop, RolloutLoop), "bound by the loop that generates"
    return loop


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run the built-in rollout (or evaluation) from an async ``--rollout-function-path``."""
    state = current_state(args)
    loop = current_loop()
    if evaluation:
        return await loop.evaluate_built_in(rollout_id, state)
    return await loop.generate_built_in(rollout_id, state, data_source)


def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run the built-in rollout (or evaluation) from a sync ``--rollout-function-path``; existing
    launch scripts name it as their rollout function."""
    return run(generate_rollout_async(args, rollout_id, data_source, evaluation))


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the rollout's event loop from a sync rollout function, and wait for its
    result.

    Raises:
        UserError: called on the event loop itself, where it would deadlock.
    """
    loop = current_state().loop
    assert loop is not None
    try:
        running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coroutine.close()
        raise UserError(
            "a sync rollout call was made from async code",
            why="it would block the event loop whose result it waits for",
            fix="await the async one (generate_rollout_async), or make your function sync",
        )
    # the coroutine's own deadlines bound this
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()


def _address(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def _custom_function(path: str | None) -> Any:
    """Return the user's rollout function; None for the built-in one."""
    fn = load_function(path) if path else None
    return None if fn in (generate_rollout, generate_rollout_async) else fn
