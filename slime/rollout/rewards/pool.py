"""Score samples: `RewardPool` calls the reward function that a sample or the flags name."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import difflib
import os
import random
import shlex
from collections import Counter
from collections.abc import Callable
from typing import Any

from slime import deadlines
from slime.config.config import Config
from slime.config.groups_rollout import REWARD_TYPES
from slime.errors import UserError, a_type, name_and_text
from slime.log import get_logger, tell
from slime.prompts.labels import compares_labels, label_text
from slime.rollout.rewards import instructions, reward_model
from slime.rollout.rewards.grading_pool import GradingPool
from slime.rollout.rewards.remote import RemoteReward
from slime.rollout.rewards.text import grade_dapo, grade_f1, grade_gpqa, last_boxed
from slime.samples.frozen_fields import frozen
from slime.samples.sample_fields import as_list, is_finite, is_number, reward_number
from slime.samples.token_rewards import is_reward_list, note_token_rewards
from slime.samples.types import Sample
from slime.user_code.hooks import RewardFunction
from slime.user_code.loading import (
    FunctionFailed,
    FunctionHangs,
    call_hook,
    check_signature,
    is_async,
    load_function,
    named,
    shown,
    where_to_mend,
    with_user_frames,
)
from slime.user_code.overrides import Part, override_of
from slime.user_code.process_state import kept

logger = get_logger(__name__)
Reward = float | dict[str, Any]

#: Graders that are quick functions of (sample, response).
IN_PROCESS: dict[str, Callable[[Sample, str], Reward]] = {
    "dapo": lambda sample, response: grade_dapo(response, sample.label),
    "f1": lambda sample, response: grade_f1(response, sample.label),
    "gpqa": lambda sample, response: grade_gpqa(response, sample.label, sample.metadata),
    "random": lambda sample, response: float(random.Random(sample.index).random() < 0.5),
}
RM_TYPES = sorted(REWARD_TYPES)

#: Graders that a plugin may replace; its function is called with response and label.
_REPLACEABLE: dict[str, Part] = {
    "math": "grade_math",
    "deepscaler": "grade_deepscaler",
    "dapo": "grade_dapo",
    "f1": "grade_f1",
    "gpqa": "grade_gpqa",
    instructions.NAME: "grade_ifbench",
}
_READ_METADATA = frozenset({"gpqa", instructions.NAME})


#: Sync reward functions that run at once, each in a thread.
MAX_THREADS = 64

_TIMED_OUT = object()


def check_rm_type(rm_type: str) -> None:
    """Check that a value of --rm-type names a built-in reward that this installation has.

    Raises:
        UserError: there is no such built-in reward (suggests the closest), or its package is
            missing.
    """
    name = rm_type.removeprefix("boxed_")
    if name == instructions.NAME and override_of(_REPLACEABLE[name]) is None:
        instructions.check_package()
    is_boxed_model = name == reward_model.NAME != rm_type
    if name in RM_TYPES and not is_boxed_model:
        return
    near = difflib.get_close_matches(name, RM_TYPES, n=1)
    raise UserError(
        f"there is no reward type '{rm_type}'",
        why=f"there are: {', '.join(RM_TYPES)}, each but reward_model also with the prefix boxed_",
        fix=f"did you mean '{near[0]}'?" if near else "pass one of them, or --custom-rm-path",
    )


class RewardPool:
    """Scores samples by the first of ``sample.custom_rm_path``, ``--custom-rm-path``,
    ``metadata["rm_type"]`` and ``--rm-type`` that is set. Every call ends within ``--rm-timeout``
    seconds (math: at most 5; ``remote_rm``: each of its 10 attempts; ``reward_model`` has no
    limit). A sample whose reward is late scores 0 and is counted.

    Args:
        config: groups ``reward`` and ``rollout`` are read.
        args: passed to users' functions; ``config.shared_args`` when None.
        standalone: only rewards run (``slime reward``).
    Raises:
        UserError: unknown ``--rm-type``, or a custom function that cannot be loaded or called.

    Example:
        >>> pool = RewardPool(make_config(rm_type="math", ...))               # doctest: +SKIP
        >>> await pool.score(Sample(response="The answer is 4.", label="4"))  # doctest: +SKIP
        1.0
    """

    def __init__(self, config: Config, args: Any = None, *, standalone: bool = False) -> None:
        reward = config.reward
        self._data = config.data
        self._standalone = standalone
        self._args = config.shared_args if args is None else args
        self._rm_type = reward.rm_type
        self._path = reward.custom_rm_path
        self._url = reward.rm_url
        self._timeout = reward.rm_timeout
        self._needs_none = config.distillation.use_opd  # the policy learns from a teacher
        self._keys = [key for key in (reward.reward_key, reward.eval_reward_key) if key]
        num_workers = reward.rm_num_workers or min(8, os.cpu_count() or 1)
        self._grading = GradingPool(num_workers)
        self._instructions = GradingPool(num_workers, instructions.__name__, instructions.PACKAGE)
        self._remotes: dict[str, RemoteReward] = {}  # by URL, shared with `reading`
        self._model: reward_model.RewardModelScorer | None = None
        if reward.rm_path:
            self._model = reward_model.RewardModelScorer(reward.rm_path, config)
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._counts: Counter[str] = Counter()
        self._warned: set[str] = set()
        if self._path:
            self._load(self._path)
        elif self._rm_type:
            check_rm_type(self._rm_type)

    def fork(self) -> RewardPool:
        """Return the same pool with separate counts, for a concurrent rollout or evaluation."""
        twin = copy.copy(self)
        twin._counts = Counter()
        return twin

    def reading(self, args: Any) -> RewardPool:
        """Return the same pool with the reward flags of other ``args``."""
        twin = copy.copy(self)
        twin._args = args
        twin._rm_type = getattr(args, "rm_type", self._rm_type)
        twin._path = getattr(args, "custom_rm_path", self._path)
        twin._url = getattr(args, "rm_url", self._url)
        if key := getattr(args, "reward_key", None):
            twin._keys = [key, *(other for other in self._keys if other != key)]
        return twin

    # -- scoring -----------------------------------------------------------------------------------

    async def score(self, sample: Sample) -> Reward:
        """Score one sample: by `score_by_flags`, or by a plugin's replacement of ``async_rm``.

        Raises:
            UserError: as `score_by_flags`.
        """
        if (own := override_of("reward")) is None:
            return await self.score_by_flags(sample)
        name = "the plugin's async_rm"
        return self._checked(
            await self._call(name, own, [sample], self._args, sample), name, sample
        )

    async def score_by_flags(self, sample: Sample) -> Reward:
        """Return the reward of one sample: a finite number, or a dict that has one under
        ``--reward-key``.

        Raises:
            FunctionFailed: the function raises, or returns an invalid reward.
            UserError: this sample has no reward function.
        """
        path = sample.custom_rm_path or self._path
        if path:
            value = await self._call(path, self._load(path), [sample], self._args, sample)
            return self._checked(value, self._named(path), sample)
        rm_type = sample.metadata.get("rm_type") or self._rm_type
        is_unlabelled = sample.label is None and compares_labels(rm_type)
        if self._needs_none and (not rm_type or is_unlabelled):
            return 0.0
        if not rm_type:
            raise UserError(
                f"there is no reward function for sample {sample.index}",
                why="it has no reward yet, and neither --rm-type nor --custom-rm-path is set",
                fix="pass one of them, or set sample.reward in the generate function",
            )
        check_rm_type(rm_type)
        value = await self._built_in(rm_type, sample)
        try:
            return self._checked(value, f"--rm-type {rm_type}", sample)
        except FunctionFailed as error:  # a built-in reward would fail on every sample
            raise UserError(error.what, error.why, error.fix) from None

    async def score_group(self, samples: list[Sample]) -> list[Reward]:
        """Score a group: by `score_group_by_flags`, or by a plugin's replacement of
        ``batched_async_rm``.

        Raises:
            UserError: as `score_group_by_flags`.
        """
        if (own := override_of("batched_reward")) is None:
            return await self.score_group_by_flags(samples)
        name = "the plugin's batched_async_rm"
        return self._one_each(
            await self._call(name, own, samples, self._args, samples), name, samples
        )

    async def score_group_by_flags(self, samples: list[Sample]) -> list[Reward]:
        """Return the rewards of samples that are scored together: a custom function gets the list.
        If samples have different functions, or a built-in one, each sample is scored separately.

        Raises:
            UserError: as `score`; also a result that is not a list with one reward per sample.
        """
        paths = {sample.custom_rm_path or self._path for sample in samples}
        path = paths.pop() if len(paths) == 1 else None
        if not path:
            return list(await asyncio.gather(*map(self.score, samples)))
        values = await self._call(path, self._load(path), samples, self._args, samples)
        return self._one_each(values, path, samples)

    def _one_each(self, values: Any, path: str, samples: list[Sample]) -> list[Reward]:
        if values is _TIMED_OUT:
            return [self._zero() for _ in samples]
        values = as_list(values)
        is_list = isinstance(values, list)
        if not is_list or len(values) != len(samples):
            got = f"{len(values)} rewards" if is_list else a_type(values)
            raise FunctionFailed(
                f"{self._named(path)} returned {got} for a list of {len(samples)} samples",
                why="with --group-rm, and for samples that one trajectory fanned out into, it is "
                "called with a list",
                fix="return a list with one reward per sample",
            )
        return [
            self._checked(value, self._named(path), sample)
            for value, sample in zip(values, samples)
        ]

    def metrics(self) -> dict[str, float]:
        """Return the counts since the last call: ``rollout/reward_timeout`` and
        ``rollout/reward_crash``."""
        counts = {
            f"rollout/reward_{name}": float(self._counts[name]) for name in ("timeout", "crash")
        }
        self._counts.clear()
        return counts

    async def close(self) -> None:
        """End worker processes and connections."""
        await self._grading.close()
        await self._instructions.close()
        for remote in self._remotes.values():
            await remote.close()
        if self._model is not None:
            self._model.close()

    # -- functions ---------------------------------------------------------------------------------

    async def _built_in(self, rm_type: str, sample: Sample) -> Any:
        name = rm_type.removeprefix("boxed_")
        response = sample.response
        if name in _REPLACEABLE and (own := override_of(_REPLACEABLE[name])) is not None:
            said = response if name == rm_type else last_boxed(response) or ""
            more: dict[str, Any] = {"metadata": sample.metadata} if name in _READ_METADATA else {}
            value = await self._call(
                f"the plugin's {name}", own, [sample], said, sample.label, **more
            )
            return value[0] if name == "f1" and isinstance(value, tuple) else value
        if REWARD_TYPES[name].uses_workers and name != instructions.NAME:
            return await self._graded(self._grading, rm_type, response, sample.label, rm_type)
        if name != rm_type:
            response = last_boxed(response) or ""
        if name == instructions.NAME:
            task = instructions.read_task(sample.metadata, f"sample {sample.index}")
            return await self._graded(self._instructions, name, response, task, rm_type)
        if name in IN_PROCESS:
            return IN_PROCESS[name](sample, response)
        if name == reward_model.NAME:
            if self._model is None:
                reward_model.check_directory(None)
            assert self._model is not None
            return await self._model.score(sample)
        if (own := override_of("remote_reward")) is not None:
            return await self._call("the plugin's remote_rm", own, [sample], self._args, sample)
        if not self._url:
            raise UserError(
                "--rm-type remote_rm needs an address", fix="pass --rm-url http://host:port/path"
            )
        if self._url not in self._remotes:
            self._remotes[self._url] = RemoteReward(self._url, self._timeout)
        try:
            return await self._remotes[self._url].score(sample)
        except TimeoutError:
            self._count("timeout", self._url, 1)
            return self._zero()

    async def _graded(
        self, pool: GradingPool, grader: str, response: str, label: Any, rm_type: str
    ) -> float:
        grade = await pool.grade(
            grader, response, label_text(label), min(self._timeout, deadlines.POOL_MATH)
        )
        if grade.failure:
            self._count(grade.failure, f"--rm-type {rm_type}", 1)
        return grade.score

    async def _call(
        self, path: str, fn: Any, samples: list[Sample], *arguments: Any, **more: Any
    ) -> Any:
        """Call a user's function; `_TIMED_OUT` if it took too long.

        Args:
            path: names ``fn`` in messages.
            samples: the samples to score.
        """
        what = f"{path} on sample {samples[0].index}"
        lists = [argument for argument in arguments if argument is samples]
        try:
            # the deadline counts from the moment at which a thread is free
            async with contextlib.nullcontext() if is_async(fn) else self._threads:
                origin = self._named(path)
                with kept(origin), frozen(samples, origin, lists, keeps_reward=False):
                    return await call_hook(fn, *arguments, what=what, limit=self._timeout, **more)
        except FunctionHangs:
            self._count("timeout", path, len(samples))
            return _TIMED_OUT
        except FunctionFailed:  # raised from itself, it would be its own cause
            raise
        except UserError as error:  # raised by slime code that the user's function called
            raise FunctionFailed.of(error) from error
        except Exception as error:  # raised by the user's own code; name the sample
            failure = FunctionFailed(
                f"the reward function {self._named(path)} failed on sample {samples[0].index}",
                why=name_and_text(error),
                fix=self._fix(path, samples[0], error),
            )
            raise with_user_frames(failure, error) from error

    def _fix(self, path: str, sample: Sample, error: Exception) -> str:
        mend = where_to_mend(error)
        is_by_flag = path in (sample.custom_rm_path, self._path)
        if self._standalone or self._data.prompt_data is None or not is_by_flag:
            return mend
        words = ["slime", "reward", "--custom-rm-path", path]
        words += ["--prompt-data", self._data.prompt_data]
        words += ["--input-key", self._data.input_key]
        words += ["--label-key", self._data.label_key] if self._data.label_key else []
        words += ["--response", sample.response[:80]]
        return f"{mend}; to try it on its own: {shlex.join(words)}"

    def _named(self, path: str) -> str:
        """Return the function's name in messages."""
        if path.startswith("the plugin's "):
            return path
        is_by_flag = path == self._path
        return named(path, "--custom-rm-path" if is_by_flag else "custom_rm_path of the sample")

    def _load(self, path: str) -> Any:
        fn = load_function(path)
        check_signature(fn, RewardFunction, path)
        return fn

    def _checked(self, value: Any, origin: str, sample: Sample) -> Reward:
        """Return ``value`` as a finite float, or as a dict with one; zero if the function timed
        out.

        Raises:
            UserError: names function, sample and value.
        """
        if value is _TIMED_OUT:
            return self._zero()
        role = f"the reward of sample {sample.index}"
        why = f"response: {shown(sample.response[:80])}, label: {shown(sample.label, 80)}"
        if is_reward_list(value):
            return note_token_rewards(sample, value, origin, why)
        if not isinstance(value, dict):
            return reward_number(value, origin, role, why)
        keys = [key for key in self._keys if key in value]
        if not keys:
            lacking = ", and --reward-key is not set"
            if self._keys:
                lacking = f" without the key '{self._keys[0]}'"
            raise FunctionFailed(
                f"{origin} returned a dict for sample {sample.index}{lacking}",
                why=f"its keys are: {', '.join(map(str, value))}",
                fix="pass --reward-key with one of them",
            )
        for key, part in value.items():
            if key not in keys and is_number(part) and not is_finite(part):
                tell(
                    logger,
                    "%s returned %s as %r beside the reward of sample %s: it is left out of the "
                    "metrics",
                    origin,
                    shown(part),
                    key,
                    sample.index,
                    once=f"reward part {origin} {key}",
                )
        numbers = {
            key: reward_number(value[key], origin, f"{key!r} in {role}", why) for key in keys
        }
        return {**value, **numbers}

    def _zero(self) -> Reward:
        return dict.fromkeys(self._keys, 0.0) if self._keys else 0.0

    def _count(self, failure: str, origin: str, samples: int) -> None:
        self._counts[failure] += samples
        if origin not in self._warned:
            self._warned.add(origin)
            logger.warning(
                "reward %s in %s: the sample scores 0 (all are counted as rollout/reward_%s, this "
                "is said once)",
                failure,
                origin,
                failure,
            )
