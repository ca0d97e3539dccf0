"""When a run pushes weights, evaluates, saves and ends, in rollouts, and how stale its samples
are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from slime.config.config import Config
from slime.errors import UserError
from slime.placement import PlacementPlan, has_evaluation
from slime.samples.types import VersionWindow


def is_due(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Return whether an action is due that happens every ``interval`` rollouts, at the end of each
    epoch and after the last rollout.

    Example:
        >>> [is_due(rollout_id, 2, num_rollout=5) for rollout_id in range(5)]
        [False, True, False, True, True]
    """
    number = rollout_id + 1
    if interval is None:
        return False
    epoch_end = bool(num_rollout_per_epoch) and number % (num_rollout_per_epoch or 1) == 0
    return number == num_rollout or epoch_end or number % interval == 0


class Schedule:
    """The schedule of one launch. In its methods, ``rollout_id`` is the last rollout trained on;
    the first is 0.

    Attributes:
        start_rollout_id: the first rollout of this launch.
        num_rollout: rollouts of the run, known after `begin`.
        num_prompts: prompts of an epoch; 0 if they were not counted.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._has_engines = PlacementPlan.of(config).has_engines
        self.start_rollout_id = 0
        self.num_rollout = 0
        self.num_prompts = 0

    def begin(self, start_rollout_id: int, num_prompts: int) -> None:
        """Set the first rollout and the length of the run, after the data and the checkpoint are
        known.

        Raises:
            UserError: --num-epoch with data of unknown length, or of less than one rollout.
        """
        self.start_rollout_id = start_rollout_id
        self.num_prompts = num_prompts
        self.num_rollout = self._count()

    def _count(self) -> int:
        rollout = self._config.rollout
        if rollout.num_rollout is not None:
            return rollout.num_rollout
        if not self.num_prompts:
            raise UserError(
                "--num-epoch needs the number of prompts, which a streamed data set does not tell",
                fix="pass --num-rollout, or leave --streaming-data out",
            )
        assert self._config.data.num_epoch is not None
        if self._per_epoch == 0:
            raise UserError(
                f"the data has {self.num_prompts} prompts, less than one --rollout-batch-size"
                f" of {rollout.rollout_batch_size}",
                fix="lower --rollout-batch-size, or pass --num-rollout (prompts are then used "
                "again in a new epoch)",
            )
        return self._per_epoch * self._config.data.num_epoch

    @property
    def _per_epoch(self) -> int:
        return self.num_prompts // self._config.rollout.rollout_batch_size

    @property
    def rollout_ids(self) -> range:
        """The rollouts of this launch; training on a rollout is a step of the run."""
        return range(self.start_rollout_id, self.num_rollout)

    @property
    def evaluates_first(self) -> bool:
        """Whether to evaluate before training: on a fresh start unless switched off, and always if
        nothing is trained."""
        if self.num_rollout == 0:
            return True
        return self.start_rollout_id == 0 and not self._config.eval.skip_eval_before_train

    def pushes(self, rollout_id: int) -> bool:
        """Return whether to push: every --update-weights-interval rollouts and before every
        evaluation."""
        due = (rollout_id + 1) % self._config.sync.update_weights_interval == 0
        return self._has_engines and (due or self.evaluates(rollout_id))

    def evaluates(self, rollout_id: int) -> bool:
        """Return whether to evaluate: every --eval-interval rollouts, or only after the last one if
        it is not set."""
        has_any = has_evaluation(self._config) or self._config.preference.eval_preference_data
        return bool(has_any) and self.is_due(
            rollout_id, self._config.eval.eval_interval or self.num_rollout
        )

    @property
    def save_interval(self) -> int | None:
        """Rollouts between two checkpoints; None if there is only the one at the end."""
        flags = self._config.checkpoint
        return flags.save_interval or (math.ceil(self.num_rollout / 10) if flags.save else None)

    def is_due(self, rollout_id: int, interval: int) -> bool:
        """Return whether an action is due that happens every ``interval`` rollouts, at the end of
        each epoch and after the last rollout."""
        by_epoch = self.num_prompts and self._config.data.num_epoch is not None
        return is_due(rollout_id, interval, self._per_epoch if by_epoch else None, self.num_rollout)


#: Number of pushes that a checkpoint records.
_PUSHES_KEPT = 64


class StalenessTracker:
    """Measures staleness of samples: the number of rollouts trained on since the push of their
    weights.

    Attributes:
        version: version number of the last push.
        unreachable: versions that training cannot reach again (`PushLog`).
    """

    def __init__(self, config: Config) -> None:
        self.unreachable = frozenset[int]()
        self._config = config
        self.version = 0
        self._first = 0
        #: Rollouts trained on at the push of each version from `_first` on, without a gap.
        self._trained: list[int] = []

    def pushed(self, version: int, trained: int) -> None:
        """Record that a version was pushed after the run had trained on ``trained`` rollouts."""
        self.version = version
        if not self._trained or version < self._first:
            self._first = version
            self._trained = []
        # an earlier launch may have used these numbers, before the run was resumed
        del self._trained[version - self._first :]
        for number in range(self._first + len(self._trained), version):
            self._trained.append(self.trained_when(number))
        self._trained.append(trained)

    def remember(self, pushes: Mapping[int, int]) -> None:
        """Add pushes of earlier launches, from a checkpoint (`recent_pushes`) and from the run
        folder (`PushLog`)."""
        version = self.version
        known = {**pushes, **dict(enumerate(self._trained, self._first))}
        self._trained = []
        for number, trained in sorted(known.items()):
            self.pushed(number, trained)
        self.version = version

    def recent_pushes(self) -> dict[int, int]:
        """Return version → rollouts trained on when it was pushed, for the checkpoint. Older pushes
        are left out, since samples of them are rare."""
        return dict(list(enumerate(self._trained, self._first))[-_PUSHES_KEPT:])

    def trained_when(self, version: int) -> int:
        """Return how many rollouts had been trained on when ``version`` was pushed.

        For unrecorded pushes (after the checkpoint that the run resumed from, or long ago) it is
        estimated from --update-weights-interval.

        Example:
            >>> config = make_config(rollout_batch_size=1, update_weights_interval=2)
            >>> tracker = StalenessTracker(config)
            >>> tracker.remember({1: 0, 2: 2})  # saved after rollout 2; 3 and 4 came later
            >>> tracker.pushed(5, trained=3)
            >>> [tracker.trained_when(version) for version in range(1, 6)]
            [0, 2, 4, 6, 3]
        """
        interval = self._config.sync.update_weights_interval
        index = version - self._first
        if index < 0:
            return self._trained[0] + index * interval
        if index < len(self._trained):
            return self._trained[index]
        return (self._trained[-1] // interval + index + 1 - len(self._trained)) * interval

    @property
    def _max_age(self) -> int | None:
        """The age above which a sample is too old: --max-staleness, or the staleness that
        --async-buffer-size implies; None for synchronous runs without --max-staleness."""
        sync = self._config.sync
        is_implied = sync.max_staleness is None and sync.async_buffer_size
        return sync.staleness if is_implied else sync.max_staleness

    @property
    def put_back_policy(self) -> str:
        """How samples that an earlier rollout put back are treated when stale; the end of a
        sentence."""
        sync = self._config.sync
        if sync.max_staleness is None:
            return "may be older, and are counted where they are (rollout/staleness/num_too_old)"
        treatment = {
            "requeue": "are generated anew",
            "drop": "are passed over",
            "correct": "are trained on all the same",
        }
        return (
            f"{treatment[sync.stale_samples]} when they are older than {sync.max_staleness} "
            "(--stale-samples)"
        )

    def may_start(self, rollout_id: int) -> bool:
        """Return whether samples of this rollout, if it started now, would be trained on within
        --max-staleness."""
        most = self._config.sync.max_staleness
        return most is None or rollout_id - self.trained_when(self.version) <= most

    def versions(self, rollout_id: int) -> VersionWindow:
        """Return the weight versions whose samples this rollout may use under --max-staleness.

        Without that flag any version is allowed: stale samples that an earlier rollout finished and
        put back are used, and counted by `metrics`.
        """
        most = self._config.sync.max_staleness
        now = self.trained_when(self.version)
        earlier = dict(enumerate(self._trained[: max(0, self.version - self._first)], self._first))
        ahead = frozenset(version for version, trained in earlier.items() if trained > now)
        if most is None:
            return VersionWindow(0, self.version, ahead=ahead, unreachable=self.unreachable)
        fresh = {
            version for version, trained in earlier.items() if abs(rollout_id - trained) <= most
        }
        oldest = min(fresh, default=self.version)
        stale = {version for version in earlier if version > oldest} - fresh
        if oldest == self._first:  # earlier versions are unrecorded: estimate from the interval
            spare = self.trained_when(oldest) - (rollout_id - most)
            oldest = max(1, oldest - max(0, spare) // self._config.sync.update_weights_interval)
        return VersionWindow(oldest, self.version, frozenset(stale), ahead, self.unreachable)

    def metrics(self, versions: Mapping[tuple[int, ...], int], trained: int) -> dict[str, float]:
        """Return the metrics ``rollout/staleness/…`` of a batch that is trained on after
        ``trained`` other rollouts. A sample is as old as the oldest of its tokens.

        Versions from before a restart at an older checkpoint may have been pushed after more
        rollouts than ``trained``; their distance counts as well.

        Args:
            versions: weight versions of a sample's tokens → number of such samples.

        Example:
            >>> tracker = StalenessTracker(make_config(rollout_batch_size=1))
            >>> tracker.pushed(1, trained=0)
            >>> tracker.pushed(2, trained=1)
            >>> tracker.metrics({(1, 2): 1, (2,): 3}, trained=1)
            {'rollout/staleness/mean': 0.25, 'rollout/staleness/max': 1.0}
        """
        if not versions:
            return {}
        most = self._max_age
        ages = {
            own: max(abs(trained - self.trained_when(version)) for version in own)
            for own in versions
        }
        total = sum(ages[own] * count for own, count in versions.items())
        metrics = {
            "rollout/staleness/mean": total / sum(versions.values()),
            "rollout/staleness/max": float(max(ages.values())),
        }
        if most is not None and self._config.sync.stale_samples != "correct":
            too_old = sum(count for own, count in versions.items() if ages[own] > most)
            metrics["rollout/staleness/num_too_old"] = float(too_old)
        return metrics
