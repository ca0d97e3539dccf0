"""Search for layouts of a number of GPUs that fit into memory, fastest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slime.forecast.engine import EngineSpeed
from slime.forecast.rates import Rates
from slime.forecast.steps import Step, Workload, mean_phases, simulate
from slime.forecast.trainer import train_seconds
from slime.memory.plan import USABLE, Facts, gpu_phases
from slime.memory.trainer import TrainerSettings
from slime.models.flops import SequenceCost
from slime.models.layouts import Layout
from slime.placement import PlacementPlan

_SIZES = (1, 2, 4, 8)
#: Fractions of the GPUs for the trainer in plans with separate GPUs; the engines have the rest.
_TRAINER_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
#: Rollouts ahead of the trainer in asynchronous plans, if the flags do not set them.
_AHEAD = 2
#: Field of `TrainerSeconds` → its name as the limit of a step.
_TRAINING = {
    "compute": "training",
    "exchange": "exchange between layers",
    "gradients": "exchange of gradients",
    "optimizer": "the optimizer",
    "scoring": "log-probs",
}


@dataclass(frozen=True)
class Plan:
    """One way to use the GPUs, and the time of its steps.

    Attributes:
        facts: placement and layouts.
        work: what a step generates and trains on, and how many rollouts ahead.
        seconds: mean seconds of a step.
        phases: mean seconds of a step by phase; their sum is ``seconds``.
        generation: seconds to generate a rollout, also if they overlap with training.
        tokens_per_gpu: response tokens per second and GPU.
        limit: what takes most of a step.
    """

    facts: Facts
    work: Workload
    seconds: float
    phases: dict[str, float]
    generation: float
    tokens_per_gpu: float
    limit: str

    def flags(self, now: Plan, gpus_per_host: int) -> str:
        """Return the flags that change the plan ``now`` to this one, when appended to its flags."""
        facts = self.facts
        assert facts.trainer is not None and now.facts.trainer is not None
        layout = facts.trainer.layout
        old = now.facts.trainer.layout
        hosts = _hosts(layout.world, gpus_per_host)
        words = [f"--actor-num-nodes {hosts}", f"--actor-num-gpus-per-node {layout.world // hosts}"]
        sizes = {
            "tensor-model": (layout.tensor, old.tensor),
            "context": (layout.context, old.context),
            "pipeline-model": (layout.pipeline, old.pipeline),
            "expert-model": (layout.expert, old.expert),
        }
        # if unset, the expert-tensor size equals the tensor-parallel size
        if facts.trainer.spec.num_experts and max(layout.tensor, old.tensor, old.expert_tensor) > 1:
            sizes["expert-tensor"] = (layout.expert_tensor, 2)
        words += [
            f"--{name}-parallel-size {size}"
            for name, (size, before) in sizes.items()
            if max(size, before) > 1
        ]
        if layout.tensor > 1:
            words.append("--sequence-parallel")
        if facts.colocate != now.facts.colocate:
            words.append("--colocate" if facts.colocate else "--no-colocate")
        words.append(f"--rollout-num-gpus {facts.placement.num_rollout}")
        words.append(f"--rollout-num-gpus-per-engine {facts.placement.slots_per_engine}")
        if self.work.ahead != now.work.ahead:
            words.append(f"--async-buffer-size {self.work.ahead}")
        if self.work.in_flight != now.work.in_flight:
            off = "" if self.work.in_flight else "no-"
            words.append(f"--{off}update-weights-in-flight")
        return " ".join(words)


def _hosts(gpus: int, gpus_per_host: int) -> int:
    return -(-gpus // gpus_per_host)


def plan_of(
    facts: Facts, work: Workload, cost: SequenceCost, rates: Rates, gpu_bytes: float
) -> Plan:
    """Simulate steps with these facts, and return the plan with their times."""
    assert facts.engine is not None
    steps = simulate(facts, work, cost, rates, gpu_bytes)
    phases = mean_phases(steps)
    seconds = sum(phases.values())
    gpus = facts.placement.total
    return Plan(
        facts=facts,
        work=work,
        seconds=seconds,
        phases=phases,
        generation=sum(step.generation for step in steps) / len(steps),
        tokens_per_gpu=sum(step.tokens for step in steps) / len(steps) / seconds / gpus,
        limit=_limit(phases, steps, EngineSpeed.of(facts.engine, cost, rates, gpu_bytes)),
    )


def _limit(phases: dict[str, float], steps: list[Step], speed: EngineSpeed) -> str:
    """Name what takes most of a step."""
    name = max(phases, key=lambda phase: phases[phase])
    if name == "waiting for generation":
        longest_only = sum(step.longest for step in steps) * speed.iteration(1)
        generation = sum(step.generation for step in steps)
        return "the longest response" if longest_only > generation / 2 else "generation"
    if name != "training":
        return name
    parts = dataclasses.asdict(steps[0].trainer)
    return _TRAINING[max(parts, key=lambda part: parts[part])]


def best_plans(
    facts: Facts, work: Workload, cost: SequenceCost, rates: Rates, gpus: int, gpu_bytes: float
) -> list[Plan]:
    """Return plans for a number of GPUs, fastest first: colocated and asynchronous ones, for each
    size of an engine, with the fastest trainer layout that fits."""
    assert facts.trainer is not None
    found = []
    gpus -= facts.placement.num_critic  # a critic keeps its own
    trainers = dict[int, list[TrainerSettings]]()
    for engine_size in _SIZES:
        for changed, changed_work in _splits(facts, work, gpus, engine_size, rates.gpus_per_host):
            world = changed.placement.num_train
            if world not in trainers:
                trainers[world] = _trainers(facts.trainer, world, work, cost, rates)
            fitted = _first_that_fits(changed, trainers[world], gpu_bytes)
            if fitted is not None:
                found.append(plan_of(fitted, changed_work, cost, rates, gpu_bytes))
    return sorted(found, key=lambda plan: plan.seconds)


def _splits(
    facts: Facts, work: Workload, gpus: int, engine_size: int, gpus_per_host: int
) -> Iterator[tuple[Facts, Workload]]:
    """Yield ways to share the GPUs between trainer and engines of ``engine_size`` GPUs each. A
    trainer on several hosts uses all GPUs of each."""
    assert facts.engine is not None
    if gpus < 1 or gpus % engine_size or facts.engine.spec.num_heads % engine_size:
        return
    engine = dataclasses.replace(
        facts.engine, tensor=engine_size, attention=engine_size, pipeline=1
    )
    critics = facts.placement.num_critic

    def shared(placement: PlacementPlan, *, together: bool) -> Facts:
        return dataclasses.replace(
            facts,
            engine=engine,
            placement=placement,
            colocate=together,
            trainer_sleeps=together,
            engine_sleeps=together,
        )

    if gpus % _hosts(gpus, gpus_per_host) == 0:
        placement = PlacementPlan(
            gpus, gpus, engine_size, 0, gpus + critics, "", num_critic=critics
        )
        lock_step = dataclasses.replace(work, ahead=0, in_flight=False)
        yield shared(placement, together=True), lock_step
    ahead = dataclasses.replace(work, ahead=work.ahead or _AHEAD, in_flight=True)
    for share in _TRAINER_SHARES:
        trainer = round(gpus * share)
        rest = gpus - trainer
        if trainer < 1 or trainer != gpus * share or rest < engine_size or rest % engine_size:
            continue
        if trainer > gpus_per_host and trainer % gpus_per_host:
            continue
        placement = PlacementPlan(
            trainer, rest, engine_size, trainer, gpus + critics, "", num_critic=critics
        )
        yield shared(placement, together=False), ahead


def _trainers(
    settings: TrainerSettings, world: int, work: Workload, cost: SequenceCost, rates: Rates
) -> list[TrainerSettings]:
    """Return trainer settings with layouts of ``world`` ranks, fastest first."""
    lengths = work.tokens(0)

    def seconds(one: TrainerSettings) -> float:
        return train_seconds(
            one, cost, rates, lengths, updates=work.updates, scorings=work.scorings
        ).total

    return sorted(_layouts(settings, world, rates, len(lengths)), key=seconds)


def _first_that_fits(
    facts: Facts, trainers: Sequence[TrainerSettings], gpu_bytes: float
) -> Facts | None:
    """Return the facts with the first trainer that fits into memory; None if none fits."""
    assert facts.engine is not None
    if facts.engine.kv_tokens(gpu_bytes) < facts.engine.longest:
        return None
    for settings in trainers:
        changed = dataclasses.replace(facts, trainer=settings)
        if all(phase.total <= USABLE * gpu_bytes for phase in gpu_phases(changed, gpu_bytes)):
            return changed
    return None


def _layouts(
    settings: TrainerSettings, world: int, rates: Rates, samples: int
) -> Iterator[TrainerSettings]:
    """Yield layouts of ``world`` ranks that split the model evenly, with at least one sample per
    replica."""
    spec = settings.spec
    of_critic = settings.critic_layout
    if of_critic is not None:
        stages = of_critic.pipeline
        models = of_critic.tensor * of_critic.context * stages
        if world % models or world % (of_critic.expert_tensor * of_critic.expert * stages):
            return
    experts = _SIZES if spec.num_experts else (1,)
    for tensor in _SIZES:
        if spec.num_heads % tensor or tensor > rates.gpus_per_host:
            continue
        for context in _SIZES:
            for pipeline in _SIZES:
                model = tensor * context * pipeline
                if world % model or spec.num_layers % pipeline or world // model > samples:
                    continue
                if spec.num_heads // tensor % context:
                    continue
                for expert in experts:
                    if spec.num_experts and spec.num_experts % expert:
                        continue
                    if world % (expert * pipeline):
                        continue
                    layout = Layout(
                        world=world,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        expert_tensor=1 if spec.num_experts else tensor,
                        sequence_parallel=tensor > 1,
                    )
                    yield dataclasses.replace(
                        settings,
                        layout=layout,
                        spec=spec.padded(tensor),
                        tokens=max(settings.tokens, -(-settings.longest // context)),
                    )
