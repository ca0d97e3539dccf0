"""The rollout actor, an asyncio process for prompts, generation, rewards, conversion and packing,
and the driver's handle of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ray

from slime.checkpoints.directory import own_iterations
from slime.cluster.waiting import NamedActor, Process, Watch, this_process, wait_for
from slime.config.config import Config
from slime.engines import keys
from slime.engines.keys import RunKeys
from slime.errors import UserError, name_and_text
from slime.log import get_logger, log_to_file_only, tell, untold
from slime.observe.run_folder import RunFolder
from slime.processes.children import end_children
from slime.processes.footprint import Footprint
from slime.processes.garbage import freeze_gc
from slime.processes.host import past_proxies
from slime.prompts.prepare import CheckedRows, remember, remembered
from slime.prompts.source import load_source, make_source, save_source, source_again
from slime.samples.batch import TrainBatch, TrainedTokens, TrainLayout
from slime.samples.types import Group, VersionWindow
from slime.user_code.hooks import RolloutFnTrainOutput

if TYPE_CHECKING:  # imported by the methods that need them, when the actor starts
    from slime.rollout.journal import Journal
    from slime.rollout.reference_cache import ReferenceCache

logger = get_logger(__name__)


@dataclass
class RolloutResult:
    """Result of a rollout for the driver: references to the shards, never the data itself.

    Attributes:
        shards: one object reference per data-parallel rank.
        critic_shards: the same for a critic with its own layout.
        metrics: ``rollout/…`` and ``perf/…``.
        versions: weight versions of a sample's tokens → number of such samples.
        warnings: lines for the terminal.
    """

    rollout_id: int
    shards: list[ray.ObjectRef]
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[tuple[int, ...], int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    critic_shards: list[ray.ObjectRef] = field(default_factory=list)


@dataclass(frozen=True)
class Generating:
    """A rollout, or an evaluation, that was started and not yet collected."""

    rollout_id: int
    ref: ray.ObjectRef

    def ends_within(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether it has ended, with or without success."""
        return bool(ray.wait([self.ref], timeout=seconds)[0])


def _cancelled(what: str) -> UserError:
    return UserError(
        f"{what} was cancelled",
        why="a function of yours cancels tasks that are not its own, such as all of "
        "asyncio.all_tasks()",
        fix="cancel only the tasks that it has made",
    )


class RolloutActor:
    """Async actor; it answers other calls while a rollout runs."""

    def __init__(self, config: Config, run_path: Path, checked: Sequence[CheckedRows]) -> None:
        self.config = config
        self.run_path = run_path
        remember(checked)
        self._groups_of: dict[int, list[int]] = {}
        self._under_way: dict[int, asyncio.Task[RolloutResult]] = {}
        self._given_up: set[int] = set()
        self.loop: Any = None  # a `RolloutLoop`, from `connect` on
        self._footprint = Footprint()
        self._writer = ThreadPoolExecutor(1, "writer")  # of samples, and training data beside them
        self._written: list[Future[None]] = []  # since the last `_wait_until_recorded`
        self.journal: Journal | None = None  # unless it is switched off
        self.references: ReferenceCache | None = None  # if preferences need a reference
        self._held_out: list[Group] | None = None
        log_to_file_only(
            "rollout", run_path / "logs", config.observe.log_level, *config.for_hiding()
        )

    async def process(self) -> Process:
        return this_process()

    async def setup(self) -> tuple[int, list[str]]:
        """Open the data and load the tokenizer; refuse bad data before engines or trainers start.

        Returns:
            Prompts per epoch (0: unknown, or not needed because of --num-rollout), and warnings for
            the terminal.
        """
        return await asyncio.to_thread(self._setup), untold()

    def _setup(self) -> int:
        from slime.observe.recorder import Recorder
        from slime.prompts.tokenizer import load_tokenizer
        from slime.rollout.journal import open_journal
        from slime.rollout.reference_cache import reference_cache
        from slime.rollout.rewards.row_checks import RewardJudge

        self.tokenizer = load_tokenizer(
            self.config.checkpoint.model_dir,
            trust_remote_code=self.config.checkpoint.trust_remote_code,
        )
        self.source = make_source(self.config, self.tokenizer, RewardJudge.of_training(self.config))
        self.recorder = Recorder(
            self.run_path, self.config, decode=lambda tokens: str(self.tokenizer.decode(tokens))
        )
        folder = RunFolder(self.run_path, self.config.observe.stage or None)
        self.journal = open_journal(self.config, folder.journal)
        self.references = reference_cache(self.config, folder.reference_log_probs)
        if self.config.debug.dump_details:  # so that the dumped tokens can be read anywhere
            self.tokenizer.save_pretrained(Path(self.config.debug.dump_details) / "tokenizer")
        data = self.config.data
        # a user's data source may not know its length, and not every run has a data set
        return len(self.source) if data.num_epoch is not None and not data.streaming_data else 0

    async def connect(
        self, router_url: str, router_urls: dict[str, str], run_keys: RunKeys
    ) -> list[str]:
        """Build the rollout loop; check hooks and evaluation data. Return warnings.

        Args:
            router_urls: by model, for user functions that call other models too.
            run_keys: API keys of routers and engines.
        """
        from slime.rollout.loop import RolloutLoop

        keys.set_run_keys(run_keys)
        keys.register_own(router_url, *router_urls.values())
        # user functions may call the routers with clients that read proxies from the environment
        os.environ.update(
            past_proxies(
                urlsplit(url).hostname or "" for url in (router_url, *router_urls.values())
            )
        )
        self.loop = RolloutLoop(
            self.config, self.tokenizer, self.source, router_url, router_urls, self.journal
        )
        self.loop.record_failure = self.recorder.record_failure
        self.loop.on_blocked = _exit_with_reason
        await self.loop.start()
        freeze_gc(many_samples=True)
        return untold()

    async def generate(
        self, rollout_id: int, layout: TrainLayout, versions: VersionWindow
    ) -> RolloutResult | None:
        """Generate a rollout and put it into the object store, one shard per data-parallel rank.

        Args:
            versions: weight versions that its samples may have.
        Returns:
            None if the rollout was given up.
        Raises:
            UserError: a user's function has cancelled it.
        """
        task = asyncio.ensure_future(self._generate(rollout_id, layout, versions))
        self._under_way[rollout_id] = task
        try:
            return await task
        except asyncio.CancelledError:
            if rollout_id not in self._given_up:
                raise _cancelled(f"rollout {rollout_id}") from None
            return None
        finally:
            task.cancel()
            self._given_up.discard(rollout_id)
            del self._under_way[rollout_id]

    async def give_up(self, rollout_id: int) -> None:
        """Cancel a rollout; its finished samples stay in the journal."""
        if task := self._under_way.get(rollout_id):
            self._given_up.add(rollout_id)
            task.cancel()
            await asyncio.wait([task])

    async def _generate(
        self, rollout_id: int, layout: TrainLayout, versions: VersionWindow
    ) -> RolloutResult:
        from slime.samples.convert import to_batches_of_roles

        started = time.perf_counter()
        if self.config.algorithm.trains_on_data:
            output = await self._read_rollout(rollout_id)
        else:
            output = await self.loop.generate_batch(rollout_id, versions)
        groups: list[Group] = output.samples
        metrics = dict(output.metrics or {})
        generated = time.perf_counter()
        batches, of_critic = to_batches_of_roles(groups, self.config, layout, rollout_id)
        metrics |= batches[0].global_stats
        if self.references is not None:
            is_known = await asyncio.to_thread(self.references.fill, batches)
            metrics["rollout/reference_known"] = float(is_known)
        shards = self._put_shards(batches, groups)
        self._groups_of[rollout_id] = [group.index for group in groups]
        metrics["perf/rollout_time"] = generated - started
        metrics["perf/data_preprocess_time"] = time.perf_counter() - generated
        self._record(self.recorder.record_rollout, rollout_id, groups)
        sampled_by = Counter(
            versions for batch in batches for versions in batch.weight_versions if versions
        )
        return RolloutResult(
            rollout_id,
            shards,
            metrics,
            dict(sampled_by),
            untold(),
            critic_shards=[ray.put(batch) for batch in of_critic],
        )

    async def _read_rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Return groups with the data's own answers."""
        from slime.rollout.preferences import generate_preferences
        from slime.rollout.sft import data_rollout, generate_sft

        is_supervised = self.config.algorithm.preference is None
        generate = generate_sft if is_supervised else generate_preferences
        return await data_rollout(generate, self.config, self.source, self.tokenizer, rollout_id)

    async def load_dump(
        self, rollout_id: int, layout: TrainLayout, versions: VersionWindow
    ) -> RolloutResult:
        """Return the samples of ``--load-debug-rollout-data`` instead of generated ones."""
        from slime.rollout.debug_data import load_rollout
        from slime.samples.convert import to_batches_of_roles

        groups = load_rollout(self.config, rollout_id)
        batches, of_critic = to_batches_of_roles(groups, self.config, layout, rollout_id)
        metrics = dict(batches[0].global_stats)
        self._record(self.recorder.record_rollout, rollout_id, groups)
        return RolloutResult(
            rollout_id,
            self._put_shards(batches, groups),
            metrics,
            warnings=untold(),
            critic_shards=[ray.put(batch) for batch in of_critic],
        )

    def _put_shards(self, batches: list[TrainBatch], groups: list[Group]) -> list[ray.ObjectRef]:
        recorded = self.recorder.token_keys(groups)
        for batch in batches:
            batch.recorded = recorded
        return [ray.put(batch) for batch in batches]

    async def evaluate(self, rollout_id: int, is_first: bool) -> dict[str, float]:
        """Evaluate the engines' weights; return metrics ``eval/…``.

        Args:
            is_first: it comes before any training; its files are named ``eval_start``.
        """
        name = "eval_start" if is_first else f"eval_{rollout_id:06d}"
        try:
            output = await self.loop.evaluate(rollout_id, before_training=is_first)
        except asyncio.CancelledError:
            raise _cancelled(f"the evaluation after rollout {rollout_id}") from None
        self._record(self.recorder.record_evaluation, name, rollout_id, output.data)
        return dict(output.metrics or {})

    async def held_out(self, layout: TrainLayout) -> list[ray.ObjectRef]:
        """Return the pairs of --eval-preference-data, one shard per data-parallel rank."""
        from slime.rollout.preferences import held_out_groups
        from slime.samples.convert import to_train_batches

        if self._held_out is None:
            self._held_out = await asyncio.to_thread(held_out_groups, self.config, self.tokenizer)
        batches = to_train_batches(self._held_out, self.config, layout, 0)
        if self.references is not None:
            await asyncio.to_thread(self.references.fill, batches)
        return [ray.put(batch) for batch in batches]

    async def keep_references(self, scored: Sequence[TrainedTokens]) -> None:
        """Keep log-probs of the reference model that the trainer has computed."""
        if self.references is not None:
            await asyncio.to_thread(self.references.add, scored)

    async def use_adapter(self, version: int, cut: bool) -> None:
        """Make requests name the policy's adapter of this version.

        Args:
            cut: abort requests for older versions; they continue with this one.
        """
        await self.loop.use_adapter(version, cut=cut)

    async def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters that running requests use."""
        return self.loop.adapters_in_use() if self.loop is not None else set()

    async def progress(self, evaluation: bool) -> tuple[dict[str, float], str]:
        """Return counters (``done``, ``target``, ``tokens``), and who waits for whom if stuck.

        Args:
            evaluation: prefer an evaluation to a rollout if both run.
        """
        if self.loop is not None:
            return (self.loop.progress(evaluation), self.loop.waits(evaluation))
        return {}, ""

    async def mark_consumed(
        self, rollout_id: int, trained: Sequence[TrainedTokens] = ()
    ) -> dict[str, float]:
        """Mark the prompts of ``rollout_id`` as trained on: a resumed run does not draw them again.

        Args:
            trained: training data of the tokens, written beside the samples meanwhile.
        Returns:
            Metrics of the engines' requests since the last call.
        """
        self.source.mark_consumed(self._groups_of.pop(rollout_id, []))
        await self._wait_until_recorded()
        gc.collect()  # samples in cycles of users' code; see `freeze_gc`
        if self.references is not None:
            await asyncio.to_thread(self.references.add, trained)
            trained = [one for one in trained if one.ref_log_probs is None]
        if trained:
            self._record(self.recorder.record_training, rollout_id, trained)
        generates = not self.config.algorithm.trains_on_data
        metrics = self.loop.take_idle() if self.loop is not None and generates else {}
        return metrics | {"perf/rollout_memory_gb": self._footprint.gigabytes(os.getpid())}

    async def save_source(self, rollout_id: int) -> dict[str, Any]:
        """Return the data position for a checkpoint; drop journal files that are no longer needed.

        A user's data source writes its own file.
        """
        if self.journal is not None:
            self.journal.drop(oldest_needed_rollout(self.config))
        return save_source(self.source, self.config, rollout_id)

    async def forget(self, rollout_id: int) -> None:
        """Drop groups that training failed on from the journal, so that a resume generates them
        again.
        """
        if self.journal is not None:
            self.journal.forget(rollout_id, self._groups_of.get(rollout_id))

    async def forget_newer(self, rollout_id: int, version: int) -> None:
        """Drop groups of ``rollout_id`` with newer weight versions than ``version``."""
        if self.journal is not None:
            self.journal.forget_newer(rollout_id, version)

    async def load_source(
        self, config: Config, rollout_id: int | None, state: dict[str, Any], is_again: bool
    ) -> list[str]:
        """Restore the data position that `save_source` returned; return warnings.

        Args:
            config: that of the launch, or with the checkpoint that restarted trainers load.
            rollout_id: None for the state at the launch, which is in no checkpoint.
            is_again: trainers were restarted, so prompts were drawn from the source already.
        """
        self._groups_of.clear()
        if is_again:
            self.source = await asyncio.to_thread(source_again, self.source, config, self.tokenizer)
            if self.loop is not None:
                self.loop.source = self.source
        load_source(self.source, config, rollout_id, state)
        return untold()

    async def source_state(self) -> dict[str, Any]:
        """Return the data position at the launch, for a restart before the first checkpoint."""
        return self.source.state_dict()

    async def newest_version(self) -> int:
        """Return the newest weight version in the journal; 0 without a journal."""
        return self.journal.newest_version if self.journal is not None else 0

    def _record(self, write: Callable[..., None], *arguments: object) -> None:
        """Write in a thread, beside training and generation, in the order of the calls."""
        self._written.append(self._writer.submit(write, *arguments))

    async def _wait_until_recorded(self) -> None:
        """Wait until everything is written. A failure costs the record, not the run."""
        pending = self._written
        self._written = []
        for one in pending:
            written = asyncio.wrap_future(one)
            try:
                await written
            except Exception as problem:  # a full disk, or a user's value whose repr raises
                tell(
                    logger,
                    "samples or traces are missing in %s, the run goes on without them: %s",
                    self.run_path,
                    name_and_text(problem),
                    once=f"not recorded {type(problem).__name__}",
                )

    async def close(self) -> None:
        if self.loop is not None:
            await self.loop.close()
        if self.journal is not None:
            self.journal.close()
        await self._wait_until_recorded()
        end_children()  # processes that user functions left behind


def log_warnings(warnings: Sequence[str]) -> None:
    """Log an actor's warnings on the driver's terminal."""
    for warning in warnings:
        logger.warning("%s", warning)


def _exit_with_reason(reason: str) -> None:
    # the driver notices the end of this process; the log holds the reason
    logger.error("%s", reason)
    logging.shutdown()
    os._exit(1)


def oldest_needed_rollout(config: Config) -> int:
    """Return the first rollout whose journal file may still be needed.

    A resume may start from the second newest checkpoint, if the newest is damaged, and draw groups
    that earlier rollouts put back. With --save-retain 1 there is only one checkpoint. This is
    called before the next checkpoint is written, which may fail.
    """
    flags = config.checkpoint
    root = Path(flags.save or "")
    kept = 1 if flags.save_retain == 1 else 2
    newest = own_iterations(root)[-kept:]
    return newest[0] - config.sync.async_buffer_size if len(newest) == kept else 0


class RolloutHandle:
    """The driver's handle of the `RolloutActor`.

    Attributes:
        worker: the actor's name in messages, and the key of its answers.
        counters: counters of the running rollout, updated by `watch_progress`.
        waits: what the rollout waits for if it is stuck, else ""; updated likewise.
        shows_evaluation: both describe an evaluation if one runs beside a rollout.
    """

    def __init__(self, config: Config, run_path: Path) -> None:
        # Any: Ray makes the methods remote, which its types do not express
        remote: Any = ray.remote(RolloutActor)
        self._actor = remote.options(num_cpus=0, max_concurrency=16).remote(
            config, run_path, remembered()
        )
        self._loads_dump = bool(config.debug.load_debug_rollout_data)
        self._answer_seconds = config.cluster.distributed_timeout_minutes * 60.0
        self.worker = NamedActor("rollout", self._actor.process.remote())
        self.counters: dict[str, float] = {}
        self.waits = ""
        self.shows_evaluation = False

    def begin_setup(self) -> ray.ObjectRef:
        """Return a ref to the result of `RolloutActor.setup`."""
        return self._actor.setup.remote()

    def connect(self, router_url: str, router_urls: dict[str, str], run_keys: RunKeys) -> None:
        ref = self._actor.connect.remote(router_url, router_urls, run_keys)
        log_warnings(self._answer(ref, "connecting to the router"))

    def begin_rollout(
        self, rollout_id: int, layout: TrainLayout, versions: VersionWindow
    ) -> ray.ObjectRef:
        """Return a ref to a `RolloutResult`, generated or read (--load-debug-rollout-data)."""
        begin = self._actor.load_dump if self._loads_dump else self._actor.generate
        return begin.remote(rollout_id, layout, versions)

    def begin_evaluation(self, rollout_id: int, is_first: bool) -> ray.ObjectRef:
        """Return a ref to metrics ``eval/…``."""
        return self._actor.evaluate.remote(rollout_id, is_first)

    def held_out(self, layout: TrainLayout) -> list[ray.ObjectRef]:
        """Return the held-out pairs, one shard per data-parallel rank."""
        return self._answer(self._actor.held_out.remote(layout), "reading the held-out pairs")

    def keep_references(self, scored: Sequence[TrainedTokens]) -> None:
        self._answer(self._actor.keep_references.remote(scored), "keeping log-probs")

    def mark_consumed(
        self, rollout_id: int, trained: Sequence[TrainedTokens] = ()
    ) -> dict[str, float]:
        ref = self._actor.mark_consumed.remote(rollout_id, trained)
        return self._answer(ref, "noting consumed prompts")

    def use_adapter(self, version: int, cut: bool) -> None:
        """Make requests name the policy's adapter of this version; see
        `RolloutActor.use_adapter`."""
        self._answer(self._actor.use_adapter.remote(version, cut), "naming the new adapter")

    def adapters_in_use(self) -> set[str]:
        """Return the names of the adapters that running requests use."""
        ref = self._actor.adapters_in_use.remote()
        return self._answer(ref, "asking which adapters are in use")

    def give_up(self, rollout_id: int) -> None:
        self._answer(self._actor.give_up.remote(rollout_id), "giving a rollout up")

    def forget(self, rollout_id: int) -> None:
        self._answer(self._actor.forget.remote(rollout_id), "forgetting what cannot be trained on")

    def forget_newer(self, rollout_id: int, version: int) -> None:
        self._answer(
            self._actor.forget_newer.remote(rollout_id, version),
            "forgetting what a broken push has touched",
        )

    def save_source(self, rollout_id: int) -> dict[str, Any]:
        """Return the data position for the checkpoint of ``rollout_id``."""
        ref = self._actor.save_source.remote(rollout_id)
        return self._answer(ref, "asking for the data position")

    def load_source(
        self,
        config: Config,
        rollout_id: int | None,
        state: dict[str, Any],
        *,
        is_again: bool = False,
    ) -> None:
        """Restore the data position, with the arguments of `RolloutActor.load_source`."""
        ref = self._actor.load_source.remote(config, rollout_id, state, is_again)
        log_warnings(self._answer(ref, "restoring the data position"))

    def source_state(self) -> dict[str, Any]:
        return self._answer(self._actor.source_state.remote(), "asking for the data position")

    def newest_version(self) -> int:
        """Return the newest weight version in the journal; 0 without a journal."""
        return self._answer(self._actor.newest_version.remote(), "asking what the journal has")

    def watch_progress(self, show: Callable[[dict[str, float]], None]) -> Watch:
        """Return a watch that updates `counters` and `waits`, and shows the counters."""

        def on_answer(name: str, answer: tuple[dict[str, float], str]) -> None:
            self.counters, self.waits = answer
            show(self.counters)

        return Watch(
            {self.worker: lambda: self._actor.progress.remote(self.shows_evaluation)}, on_answer
        )

    def ping(self) -> ray.ObjectRef:
        """Return a ref to its `Process`."""
        return self._actor.process.remote()

    def close(self, timeout: float) -> None:
        ray.wait([self._actor.close.remote()], timeout=timeout)
        ray.kill(self._actor, no_restart=True)

    def _answer(self, ref: ray.ObjectRef, what: str) -> Any:
        return wait_for({self.worker: ref}, what, self._answer_seconds)[0]
