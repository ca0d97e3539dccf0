"""Simulate the steps of a run: rollouts, training and pushes, in lock step or overlapping."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime.config.config import Config
from slime.engines.adapters import as_served
from slime.forecast.engine import EngineSpeed, Fleet, Request
from slime.forecast.rates import Rates
from slime.forecast.trainer import TrainerSeconds, train_seconds
from slime.memory.plan import Facts
from slime.models import table_of
from slime.models.adapters import count_parameters
from slime.models.flops import SequenceCost

#: Constant seconds of a push, bytes/s of its transfer between GPUs of one host, and seconds of the
#: wait for interrupted responses in flight. From docs/performance.md: 8 GB in 0.11 to 0.15 s, 61 GB
#: in 1.0 s; 1.0 s in flight.
_PUSH = 0.03
_PUSH_RATE = 65e9
_INTERRUPTION = 1.0
#: Time of a trainer's sleep relative to its wake, and seconds for the engines' memory.
_SLEEP_TO_WAKE = 1.25
_ENGINE_MEMORY = 0.3
#: Seconds per step, and per token, of rewards, packing, records and the transfer of batches.
_HANDOVER = 0.3
_HANDOVER_PER_TOKEN = 0.5e-6
#: Simulated steps in lock step, and waves of rollouts (see `simulate`) otherwise, after the first
#: rollouts, which are not counted.
_STEPS = 3
_WAVES = 2
#: For large fleets only so many engines are simulated that a rollout has about this many responses.
_RESPONSES = 2048


@dataclass(frozen=True)
class Workload:
    """What one step generates and trains on.

    Attributes:
        prompts, samples: groups per rollout, and responses per group.
        prompt_tokens: tokens of a prompt.
        lengths: tokens of responses, repeated in this order.
        updates: optimizer steps per rollout.
        scorings: passes of the trainer without gradients.
        ahead: rollouts ahead of the trainer (--async-buffer-size).
        in_flight: pushes interrupt responses instead of waiting for them.
        interval: rollouts from one push to the next (--update-weights-interval).
        drawn: groups that a rollout begins with, until ``prompts`` of them have ended
            (--over-sampling-batch-size); 0 for ``prompts``.
        partial: groups that are put back keep what they have generated (--partial-rollout).
    """

    prompts: int
    samples: int
    prompt_tokens: int
    lengths: Sequence[int]
    updates: int = 1
    scorings: int = 0
    ahead: int = 0
    in_flight: bool = False
    interval: int = 1
    drawn: int = 0
    partial: bool = False

    @staticmethod
    def of(config: Config, lengths: Sequence[int], prompt_tokens: int) -> Workload:
        """Read the flags."""
        algorithm = config.algorithm
        train = config.train
        rollout = config.rollout
        scores_old = train.num_steps_per_rollout > 1 and not algorithm.use_rollout_logprobs
        return Workload(
            prompts=rollout.rollout_batch_size,
            samples=rollout.n_samples_per_prompt,
            prompt_tokens=prompt_tokens,
            lengths=lengths,
            updates=train.num_steps_per_rollout,
            scorings=int(algorithm.needs_reference) + int(scores_old),
            ahead=config.sync.async_buffer_size,
            in_flight=config.sync.update_weights_in_flight,
            interval=config.sync.update_weights_interval,
            # in deterministic mode a rollout takes the first groups that it has drawn
            drawn=0 if rollout.deterministic else rollout.over_sampling_batch_size,
            partial=rollout.partial_rollout,
        )

    @property
    def draws(self) -> int:
        """Groups that a rollout begins with."""
        return max(self.prompts, self.drawn)

    def group(self, number: int) -> list[Request]:
        """Return the requests of a group. Only the first one prefills the prompt."""
        indices = range(number * self.samples, (number + 1) * self.samples)
        return [
            Request(
                number,
                self.prompt_tokens,
                self.lengths[index % len(self.lengths)],
                0 if index % self.samples else self.prompt_tokens,
            )
            for index in indices
        ]

    def rollout(self, number: int) -> list[Request]:
        """Return the requests of a rollout that takes groups in their order."""
        groups = range(number * self.prompts, (number + 1) * self.prompts)
        return [request for group in groups for request in self.group(group)]

    def tokens(self, number: int) -> list[int]:
        """Return the number of tokens of each sample of a rollout, including its prompt."""
        return [request.prompt + request.response for request in self.rollout(number)]


@dataclass(frozen=True)
class Step:
    """Seconds of one step.

    Attributes:
        generation: from the start of the rollout to the end of its last response.
        waiting: the trainer's wait for the rollout; in lock step equal to ``generation``.
        trainer: training, by activity.
        push, memory, handover: the rest; ``memory`` is sleep and wake of both sides.
        total: from the end of the previous step to the end of this one.
        longest: tokens of the longest response.
        tokens: tokens of all responses.
    """

    generation: float
    waiting: float
    trainer: TrainerSeconds
    push: float
    memory: float
    handover: float
    total: float
    longest: int
    tokens: int

    def phases(self) -> dict[str, float]:
        """Return the seconds by phase, of which `total` is the sum."""
        return {
            "waiting for generation": self.waiting,
            "training": self.trainer.total,
            "push": self.push,
            "sleep and wake": self.memory,
            "handover": self.handover,
        }


def simulate(
    facts: Facts,
    work: Workload,
    cost: SequenceCost,
    rates: Rates,
    gpu_bytes: float,
    waves: int = _WAVES,
) -> list[Step]:
    """Simulate steps of a run in steady state.

    Args:
        facts: placement and layouts.
        cost: forward FLOPs of a sequence.
        gpu_bytes: memory of one GPU.
        waves: how many times all rollouts in flight are replaced by the next; ignored in lock step,
            where three steps are simulated.
    """
    assert facts.engine is not None and facts.trainer is not None
    speed = EngineSpeed.of(facts.engine, cost, rates, gpu_bytes)
    num_parts = _num_parts(work, facts.placement.num_engines)
    fleet = Fleet(speed, facts.placement.num_engines // num_parts)
    cycle = -(-work.draws // work.prompts)  # the groups of a rollout last for so many steps
    first = max(cycle, work.ahead)
    wanted = waves * first if work.ahead else cycle * -(-_STEPS // cycle)
    count = first + -(-wanted // work.interval) * work.interval  # whole intervals between pushes
    trained = (_trained_seconds(facts, work, cost, rates, number) for number in itertools.count())
    steps = list(itertools.islice(_steps(facts, work, rates, fleet, num_parts, trained), count))
    return steps[first:]


def _trained_seconds(
    facts: Facts, work: Workload, cost: SequenceCost, rates: Rates, number: int
) -> TrainerSeconds:
    """Return the seconds to train on a rollout; those of a critic on its own GPUs if it takes
    longer."""
    lengths = work.tokens(number)
    assert facts.trainer is not None
    policy = train_seconds(
        facts.trainer, cost, rates, lengths, updates=work.updates, scorings=work.scorings
    )
    if facts.critic is None:
        return policy
    critic = train_seconds(facts.critic, cost, rates, lengths, updates=work.updates, scorings=1)
    return max(policy, critic, key=lambda seconds: seconds.total)


def _num_parts(work: Workload, engines: int) -> int:
    """Return into how many equal parts engines and prompts are divided; one is simulated."""
    limit = min(engines, work.prompts, max(1, work.prompts * work.samples // _RESPONSES))
    return max(
        part for part in range(1, limit + 1) if not engines % part and not work.prompts % part
    )


def _steps(
    facts: Facts,
    work: Workload,
    rates: Rates,
    fleet: Fleet,
    num_parts: int,
    trained: Iterator[TrainerSeconds],
) -> Iterator[Step]:
    push_seconds = _push_seconds(facts, rates, work.in_flight)
    memory = _memory_seconds(facts, rates)
    rollouts = _Rollouts(
        replace(work, prompts=work.prompts // num_parts, drawn=work.draws // num_parts), fleet
    )
    now = 0.0
    for number in range(max(1, work.ahead)):
        rollouts.begin(number, now)
    for number in itertools.count():
        started = now
        while number not in rollouts.ended:
            rollouts.generate(fleet.next_end())
        now = max(now, rollouts.ended[number])
        waiting = now - started
        if work.ahead:
            rollouts.begin(number + work.ahead, now)
        trainer = next(trained)
        lengths = [request.response for request in work.rollout(number)]
        handover = _HANDOVER + _HANDOVER_PER_TOKEN * sum(work.tokens(number))
        now += trainer.total + handover + memory
        rollouts.generate(now)
        push = 0.0 if (number + 1) % work.interval else push_seconds
        if push and work.ahead and not work.in_flight:  # the push waits for all responses
            while any(engine.load for engine in fleet.engines):
                rollouts.generate(fleet.next_end())
            drained = max(engine.time for engine in fleet.engines)
            waiting += max(0.0, drained - now)
            now = max(now, drained)
        fleet.stall(now, push)
        now += push
        if not work.ahead:
            rollouts.begin(number + 1, now)
        yield Step(
            generation=rollouts.ended[number] - rollouts.begun[number],
            waiting=waiting,
            trainer=trainer,
            push=push,
            memory=memory,
            handover=handover,
            total=now - started,
            longest=max(lengths),
            tokens=sum(lengths),
        )


class _Rollouts:
    """The groups of each rollout on a fleet, and those that were put back.

    Attributes:
        begun, ended: by rollout, when it began and when enough of its groups had ended.
    """

    def __init__(self, work: Workload, fleet: Fleet) -> None:
        self.begun = dict[int, float]()
        self.ended = dict[int, float]()
        self._work = work
        self._fleet = fleet
        self._new = itertools.count()
        self._put_back = deque[tuple[int, list[Request]]]()
        self._rollout_of = dict[int, int]()  # groups that have not ended
        self._left = Counter[int]()  # responses of a group that have not ended
        self._taken = Counter[int]()  # groups of a rollout that have ended

    def begin(self, number: int, now: float) -> None:
        """Draw groups, first those that were put back."""
        self.begun[number] = now
        groups = [self._draw() for _ in range(self._work.draws)]
        for group, requests in groups:
            self._rollout_of[group] = number
            self._left[group] = len(requests)
        self._fleet.add([request for _, requests in groups for request in requests], now)
        for group, requests in groups:
            if not requests and group in self._rollout_of:
                self._end_group(group, now)

    def generate(self, until: float) -> None:
        """Process all ends of responses up to ``until``."""
        while self._fleet.next_end() <= until:
            time, request = self._fleet.finish()
            self._left[request.group] -= 1
            if not self._left[request.group]:
                self._end_group(request.group, time)

    def _draw(self) -> tuple[int, list[Request]]:
        if self._put_back:
            return self._put_back.popleft()
        group = next(self._new)
        return group, self._work.group(group)

    def _end_group(self, group: int, time: float) -> None:
        """Note that a group has ended. The last one that its rollout needs ends the rollout."""
        number = self._rollout_of.pop(group)
        self._taken[number] += 1
        if self._taken[number] < self._work.prompts:
            return
        self.ended[number] = time
        rest = [other for other, rollout in self._rollout_of.items() if rollout == number]
        left = {other: list[Request]() for other in rest}
        for request in self._fleet.stop(left, time):
            left[request.group].append(request)
        for other in rest:
            del self._rollout_of[other]
            ended = not self._left[other]
            kept = self._work.partial or ended
            self._put_back.append((other, left[other] if kept else self._work.group(other)))


def _push_seconds(facts: Facts, rates: Rates, in_flight: bool) -> float:
    """Return the seconds of a push, from pausing to resuming generation."""
    assert facts.trainer is not None and facts.engine is not None
    spec = facts.trainer.spec
    adapters = facts.trainer.adapters
    if adapters is not None:
        family = table_of(spec)
        pushed = count_parameters(family, spec, as_served(adapters, family, spec))
    else:
        stages = facts.trainer.stages
        pushed = sum(one.parameter.numel for stage in stages for one in stage.parameters)
    nbytes = pushed * facts.trainer.element
    within = facts.placement.total <= rates.gpus_per_host
    speed = _PUSH_RATE if facts.colocate or within else rates.network
    return _PUSH + nbytes / speed + _INTERRUPTION * in_flight


def _memory_seconds(facts: Facts, rates: Rates) -> float:
    """Return the seconds per step in which trainer and engines sleep and wake."""
    assert facts.trainer is not None
    if not facts.colocate or not facts.trainer_sleeps:
        return 0.0
    stage = facts.trainer.stages[0]
    moved = stage.weights + stage.master * (1 - facts.trainer.master_on_host)
    moved += stage.moments * (1 - facts.trainer.moments_on_host)
    return moved / rates.host_link * (1 + _SLEEP_TO_WAKE) + _ENGINE_MEMORY


def mean_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean seconds by phase."""
    rows = [step.phases() for step in steps]
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
