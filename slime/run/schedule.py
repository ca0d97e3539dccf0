"""What of a run is due when, in rollouts: how long it is, after which one it pushes, evaluates and
saves, and how old samples become by that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

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
    """Whether what happens every ``interval`` rollouts, at the end of each epoch and after the last
    is due.

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
    """The schedule of one launch. ``rollout_id`` is the rollout that was trained on last, from 0 in
    the run's first launch.

    Attributes:
        start_rollout_id: the first rollout of this launch.
        num_rollout: of the run; known after `begin`.
        num_prompts: of an epoch; 0 where nobody needs to know.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._has_engines = PlacementPlan.of(config).has_engines
        self.start_rollout_id = self.num_rollout = self.num_prompts = 0

    def begin(self, start_rollout_id: int, num_prompts: int) -> None:
        """Once the data is read and the checkpoint is found.

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
        """Yield the rollouts of this launch; training on a rollout is a step of the run."""
        return range(self.start_rollout_id, self.num_rollout)

    @property
    def evaluates_first(self) -> bool:
        """Evaluate before training: on a fresh start unless switched off, and always when nothing
        is trained."""
        if self.num_rollout == 0:
            return True
        return self.start_rollout_id == 0 and not self._config.eval.skip_eval_before_train

    def pushes(self, rollout_id: int) -> bool:
        """Every --update-weights-interval rollouts, and before every evaluation."""
        due = (rollout_id + 1) % self._config.sync.update_weights_interval == 0
        return self._has_engines and (due or self.evaluates(rollout_id))

    def evaluates(self, rollout_id: int) -> bool:
        """Every --eval-interval rollouts, or else after the last: whoever gives evaluation data
        wants to know what training has brought."""
        return has_evaluation(self._config) and self.is_due(
            rollout_id, self._config.eval.eval_interval or self.num_rollout
        )

    @property
    def save_interval(self) -> int | None:
        """Rollouts between two checkpoints; None: there is one after the last alone."""
        flags = self._config.checkpoint
        return flags.save_interval or (math.ceil(self.num_rollout / 10) if flags.save else None)

    def is_due(self, rollout_id: int, interval: int) -> bool:
        """Every ``interval`` rollouts, at the end of each epoch, and after the last."""
        by_epoch = self.num_prompts and self._config.data.num_epoch is not None
        return is_due(rollout_id, interval, self._per_epoch if by_epoch else None, self.num_rollout)


#: Versions in a checkpoint.
_PUSHES_KEPT = 64


class StalenessTracker:
    """How old samples are: rollouts that the trainer has trained on since it pushed the weights
    that sampled them.

    Attributes:
        version: of the weights pushed last.
        gone: those that training cannot come to again (`PushLog`).
    """

    def __init__(self, config: Config) -> None:
        self.unreachable = frozenset[int]()
        self._config = config
        self._first = self.version = 0
        self._trained: list[int] = []
        """Rollouts trained on at each push, from that of version `_first` on, without a gap."""
        self._max_trained: list[int] = []
        """The most of these up to each push: where it is few, no version before is of more."""

    def pushed(self, version: int, trained: int) -> None:
        """Weights with this number were pushed after ``trained`` rollouts of the run had been
        trained on."""
        self.version = version
        if not self._trained or version < self._first:
            self._first = version
            self._trained = []
            self._max_trained = []
        del (
            self._trained[version - self._first :],
            self._max_trained[version - self._first :],
        )  # of a life that ended before
        for number in range(self._first + len(self._trained), version + 1):
            self._trained.append(trained if number == version else self.trained_when(number))
            self._max_trained.append(
                max(
                    self._trained[-1],
                    self._max_trained[-1] if self._max_trained else self._trained[-1],
                )
            )

    def remember(self, pushes: Mapping[int, int]) -> None:
        """What is known of earlier launches, from a checkpoint (`recent_pushes`) and from the run
        folder (`PushLog`)."""
        version = self.version
        known = {**pushes, **dict(enumerate(self._trained, self._first))}
        self._trained = []
        for number, trained in sorted(known.items()):
            self.pushed(number, trained)
        self.version = version

    def recent_pushes(self) -> dict[int, int]:
        """Version → rollouts trained on when it was pushed (`trained_when`), for the checkpoint;
        samples of older ones are rare."""
        return dict(list(enumerate(self._trained, self._first))[-_PUSHES_KEPT:])

    def trained_when(self, version: int) -> int:
        """Rollouts that had been trained on when ``version`` was pushed.

        What is not known goes by the interval: pushes behind the checkpoint that the run has gone
        on from, and those of long ago.

        Example:
            >>> config = make_config(rollout_batch_size=1, update_weights_interval=2)
            >>> ages = StalenessTracker(config)
            >>> ages.remember({1: 0, 2: 2})  # saved after rollout 2; the journal has 3 and 4, too
            >>> ages.pushed(5, trained=3)
            >>> [ages.trained_when(version) for version in range(1, 6)]
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
        """The age above which a sample is too old: --max-staleness, or what is said at launch; None
        in lock step."""
        sync = self._config.sync
        return (
            sync.staleness
            if sync.max_staleness is None and sync.async_buffer_size
            else sync.max_staleness
        )

    @property
    def put_back_policy(self) -> str:
        """How old samples may be that an earlier rollout had begun or finished and put back, in
        words."""
        sync = self._config.sync
        if sync.max_staleness is None:
            return "may be older, and are counted where they are (rollout/staleness/num_too_old)"
        became = {
            "requeue": "are generated anew",
            "drop": "are passed over",
            "correct": "are trained on all the same",
        }
        return (
            f"{became[sync.stale_samples]} when they are older than {sync.max_staleness} "
            "(--stale-samples)"
        )

    def may_start(self, rollout_id: int) -> bool:
        """Whether what this rollout samples first, were it begun now, would be trained on within
        --max-staleness."""
        most = self._config.sync.max_staleness
        return most is None or rollout_id - self.trained_when(self.version) <= most

    def versions(self, rollout_id: int) -> VersionWindow:
        """Whose samples this rollout may have under --max-staleness. Without it any: what an
        earlier one finished and put back is not generated again for an age that nobody has
        forbidden, but counted (`metrics`)."""
        most = self._config.sync.max_staleness
        now = self.trained_when(self.version)
        ahead = frozenset(version for version, trained in self._back_to(now + 1) if trained > now)
        if most is None:
            return VersionWindow(0, self.version, ahead=ahead, unreachable=self.unreachable)
        oldest = self.version
        stale = set[int]()
        for version, trained in self._back_to(rollout_id - most):
            if abs(rollout_id - trained) <= most:
                oldest = version
            else:
                stale.add(version)
        if oldest == self._first:  # those before it are in order
            spare = self.trained_when(oldest) - (rollout_id - most)
            oldest = max(1, oldest - max(0, spare) // self._config.sync.update_weights_interval)
        stale = {version for version in stale if version > oldest}
        return VersionWindow(oldest, self.version, frozenset(stale), ahead, self.unreachable)

    def _back_to(self, trained: int) -> Iterator[tuple[int, int]]:
        """(version, rollouts trained on when it was pushed), back from the version before the
        newest, until no earlier one can be of so many."""
        for index in range(self.version - 1 - self._first, -1, -1):
            if self._max_trained[index] < trained:
                return
            yield self._first + index, self._trained[index]

    def metrics(self, versions: Mapping[tuple[int, ...], int], trained: int) -> dict[str, float]:
        """``rollout/staleness/…`` of a batch that is trained on after ``trained`` others: a sample
        is as old as the oldest of its tokens.

        Weights that a run had pushed before it began again at an older checkpoint are as far away
        in steps as others.

        Args:
            versions: weight versions of a sample's tokens → samples that have these.

        Example:
            >>> ages = StalenessTracker(make_config(rollout_batch_size=1))
            >>> ages.pushed(1, trained=0)
            >>> ages.pushed(2, trained=1)
            >>> ages.metrics({(1, 2): 1, (2,): 3}, trained=1)
            {'rollout/staleness/mean': 0.25, 'rollout/staleness/max': 1.0}
        """
        if not versions:
            return {}
        most = self._max_age
        behind = {
            each: max(abs(trained - self.trained_when(version)) for version in each)
            for each in versions
        }
        mean = sum(behind[each] * count for each, count in versions.items()) / sum(
            versions.values()
        )
        found = {
            "rollout/staleness/mean": mean,
            "rollout/staleness/max": float(max(behind.values())),
        }
        if most is not None and self._config.sync.stale_samples != "correct":
            too_old = sum(count for each, count in versions.items() if behind[each] > most)
            found["rollout/staleness/num_too_old"] = float(too_old)
        return found
