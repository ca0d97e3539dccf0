"""What to change when the memory plan does not fit: each change is tried out on the plan, and told with its result."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from slime.cluster.memory.activations import Recompute
from slime.cluster.memory.parameters import Layout
from slime.cluster.memory.plan import Facts, MemoryPlan, Phase, Use, gpu_phases
from slime.cluster.memory.table import gb
from slime.cluster.memory.trainer import TrainerSettings
from slime.cluster.plan import PlacementPlan
from slime.errors import UserError

_SHOWN, _MOST_TOGETHER = 4, 6
_WORTH_IT = 0.02  # of a device's memory
_SMALLEST_FRACTION = 0.2


@dataclass(frozen=True)
class Change:
    """A change of the flags, and the facts that would follow."""

    text: str
    facts: Facts


def refuse(plan: MemoryPlan) -> UserError:
    """The error of a plan that does not fit."""
    goes_on = "or go on all the same with --memory-plan warn"
    if not plan.overfull:
        return _starved(plan, goes_on)
    phase = plan.overfull[0]
    others = [f"{other.name} on {other.devices}" for other in plan.overfull[1:]]
    largest = ", ".join(f"{_named(use)} {gb(use.nbytes)} GB" for use in phase.largest[:4])
    also = f"; nor fits {', '.join(others)}" if others else ""
    lines = [f"{text}: then {gb(peak)} GB" for text, peak in remedies(plan)]
    return UserError(
        f"the memory plan does not fit: {phase.name} needs {gb(phase.total)} GB on {phase.devices}, limit "
        f"{gb(plan.limit)} GB (of {gb(plan.device.nbytes)} GB)",
        why=f"the largest parts: {largest}{also}; --dry-run shows all",
        fix="\n       ".join([*lines, goes_on]),
        check_id="memory_plan",
    )


def _starved(plan: MemoryPlan, goes_on: str) -> UserError:
    engine = plan.facts.engine
    assert engine is not None
    memory = plan.device.nbytes
    wanted = (engine.weights + 4 * engine.longest * engine.kv_per_token) / memory
    ways = []
    if wanted < 0.9:
        raised = math.ceil(wanted * 100 + 1) / 100
        ways.append(f"--sglang-mem-fraction-static {engine.fraction:g} → {raised:g}: room for four sequences")
    size = engine.tensor * engine.pipeline
    ways.append(f"--rollout-num-gpus-per-engine {size} → {2 * size}: half of the weights on each GPU")
    return UserError(
        f"the memory plan does not fit: the KV cache of an engine holds {engine.kv_tokens(memory):,} tokens, less than "
        f"one sequence of {engine.longest:,}",
        why=f"--sglang-mem-fraction-static {engine.fraction:g} of {gb(memory)} GB is {gb(engine.fraction * memory)} GB,"
        f" of which the weights take {gb(engine.weights)} GB; a token takes {engine.kv_per_token / 1e3:.0f} kB",
        fix="\n       ".join([*ways, goes_on]),
        check_id="memory_plan",
    )


def remedies(plan: MemoryPlan) -> list[tuple[str, float]]:
    """(change of the flags, the worst phase's bytes with it): the changes that suffice alone; where none does, those
    that help, and as many of them together as it takes."""
    worst = plan.overfull[0].total
    tried = [(change.text, _peak(plan, change.facts)) for change in changes(plan.facts, plan)]
    useful = [(text, peak) for text, peak in tried if worst - peak > _WORTH_IT * plan.device.nbytes]
    enough = [(text, peak) for text, peak in useful if peak <= plan.limit]
    if enough:
        return enough[:_SHOWN]
    together = _together(plan)
    return [*useful[:_SHOWN], *([together] if together else [])]


def _together(plan: MemoryPlan) -> tuple[str, float] | None:
    """The changes on top of each other, the cheapest first, each where it helps, until the plan fits."""
    facts, peak, texts = plan.facts, plan.overfull[0].total, list[str]()
    for _ in range(_MOST_TOGETHER):
        for change in changes(facts, plan):
            lower = _peak(plan, change.facts)
            if peak - lower > _WORTH_IT * plan.device.nbytes and _flag(change.text) not in map(_flag, texts):
                facts, peak = change.facts, lower
                texts.append(change.text)
                break
        else:
            break
        if peak <= plan.limit:
            break
    return (" and ".join(texts), peak) if len(texts) > 1 else None


def _flag(text: str) -> str:
    return text.split()[0]


def _peak(plan: MemoryPlan, facts: Facts) -> float:
    """Of the phases that do not fit now, or of any that would no longer fit."""
    return max(phase.total for phase in gpu_phases(facts, plan.device.nbytes))


def changes(facts: Facts, plan: MemoryPlan) -> Iterator[Change]:
    """All that may help, the cheapest first."""
    worst = plan.overfull[0] if plan.overfull else plan.peak
    if facts.trainer is not None and worst.name != "generate":
        for text, trainer in _trainer_changes(facts.trainer):
            placement = _with_trainers(facts, trainer.layout.world)
            yield Change(text, dataclasses.replace(facts, trainer=trainer, placement=placement))
    if facts.colocate:
        yield from _sleeping(facts)
    if facts.engine is not None:
        yield from _engine_changes(facts, plan, worst)


def _with_trainers(facts: Facts, count: int) -> PlacementPlan:
    """The placement with so many trainer ranks."""
    old = facts.placement
    if facts.colocate:
        return dataclasses.replace(old, num_train=count, total=max(count, old.num_rollout))
    return dataclasses.replace(old, num_train=count, total=count + old.num_rollout, rollout_offset=count)


def _trainer_changes(trainer: TrainerSettings) -> Iterator[tuple[str, TrainerSettings]]:
    def changed(**values: object) -> TrainerSettings:
        return dataclasses.replace(trainer, **values)  # type: ignore[arg-type]

    layout, granularity = trainer.layout, trainer.recompute.granularity
    whole = Recompute("full", "uniform", 1, trainer.recompute.modules)
    if granularity is None:
        yield "--recompute-activations", changed(recompute=whole)
    elif granularity == "selective":
        yield "--recompute-granularity selective → full", changed(recompute=whole)
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield "--sequence-parallel", changed(layout=dataclasses.replace(layout, sequence_parallel=True))
    yield from _smaller_micro_batches(trainer)
    if not trainer.sharded and layout.shards > 1:
        yield "no --no-use-distributed-optimizer", changed(sharded=True)
    if not trainer.moments_on_host:
        yield "--offload-optimizer-states", changed(moments_on_host=1.0, staged=True)
    yield from _wider_layouts(trainer)


def _smaller_micro_batches(trainer: TrainerSettings) -> Iterator[tuple[str, TrainerSettings]]:
    layout = trainer.layout
    floor = -(-trainer.longest // layout.context)
    if trainer.dynamic and trainer.tokens > floor * 1.25:
        lower = max(floor, trainer.tokens // 2)
        text = f"--max-tokens-per-gpu {trainer.tokens} → {lower}"
        yield text, dataclasses.replace(trainer, tokens=lower)
    elif not trainer.dynamic and trainer.tokens > floor * 1.25:
        yield "--micro-batch-size 1", dataclasses.replace(trainer, tokens=floor)
    elif not trainer.dynamic or trainer.tokens <= floor * 1.25:
        shorter = trainer.longest * 3 // 4
        yield (
            f"--rollout-max-context-len {trainer.longest} → {shorter}",
            dataclasses.replace(trainer, tokens=trainer.tokens * 3 // 4, longest=shorter),
        )


def _wider_layouts(trainer: TrainerSettings) -> Iterator[tuple[str, TrainerSettings]]:
    """The same GPUs divided otherwise, then more GPUs."""
    spec, layout = trainer.spec, trainer.layout
    tensor, pipeline, context, expert = layout.tensor, layout.pipeline, layout.context, layout.expert

    def fits(new: Layout) -> bool:
        model = new.tensor * new.pipeline * new.context
        experts = new.expert_tensor * new.expert * new.pipeline
        return new.world % model == 0 and new.world % experts == 0

    def divided(text: str, tokens: int = trainer.tokens, **sizes: int | bool) -> Iterator[tuple[str, TrainerSettings]]:
        new = dataclasses.replace(layout, **sizes)  # type: ignore[arg-type]
        if fits(new):
            padded = spec.padded(new.tensor)
            yield text, dataclasses.replace(trainer, layout=new, spec=padded, tokens=tokens)

    if spec.num_experts and spec.num_experts % (2 * expert) == 0:
        yield from divided(
            f"--expert-model-parallel-size {expert} → {2 * expert} --expert-tensor-parallel-size 1",
            expert=2 * expert,
            expert_tensor=1,
        )
    if spec.num_heads % (2 * tensor) == 0 and tensor < 8:
        text = f"--tensor-model-parallel-size {tensor} → {2 * tensor} --sequence-parallel"
        cut = 2 * tensor
        if spec.num_experts:  # they stay as they are
            cut, text = layout.expert_tensor, f"{text} --expert-tensor-parallel-size {layout.expert_tensor}"
        yield from divided(text, tensor=2 * tensor, sequence_parallel=True, expert_tensor=cut)
    if spec.num_heads // tensor % (2 * context) == 0:
        tokens = max(trainer.tokens // 2, 1)
        text = f"--context-parallel-size {context} → {2 * context}, and half of --max-tokens-per-gpu"
        yield from divided(text, tokens=tokens, context=2 * context)
    if spec.num_layers % (2 * pipeline * layout.virtual) == 0:
        yield from divided(f"--pipeline-model-parallel-size {pipeline} → {2 * pipeline}", pipeline=2 * pipeline)
    yield from divided(f"twice the trainer GPUs ({layout.world} → {2 * layout.world})", world=2 * layout.world)


def _sleeping(facts: Facts) -> Iterator[Change]:
    if not facts.trainer_sleeps:
        yield Change("--offload-train", dataclasses.replace(facts, trainer_sleeps=True))
    if not facts.engine_sleeps:
        yield Change("--offload-rollout", dataclasses.replace(facts, engine_sleeps=True))


def _engine_changes(facts: Facts, plan: MemoryPlan, worst: Phase) -> Iterator[Change]:
    engine = facts.engine
    assert engine is not None
    held = [use for use in worst.uses if use.owner == "engine" and use.what.startswith("KV cache")]
    if engine.is_sglang and held:
        over = (worst.total - plan.limit) / plan.device.nbytes
        lower = math.floor((engine.fraction - over) * 100) / 100
        smaller = dataclasses.replace(engine, fraction=lower)
        if lower >= _SMALLEST_FRACTION and smaller.kv_tokens(plan.device.nbytes) >= engine.longest:
            text = f"--sglang-mem-fraction-static {engine.fraction:g} → {lower:g}"
            yield Change(text, dataclasses.replace(facts, engine=smaller))
    size = engine.tensor * engine.pipeline
    if worst.name in ("generate", "push") and facts.placement.num_rollout % (2 * size) == 0:
        wider = dataclasses.replace(engine, tensor=2 * engine.tensor, attention=2 * engine.attention)
        text = f"--rollout-num-gpus-per-engine {size} → {2 * size}"
        yield Change(text, dataclasses.replace(facts, engine=wider))


def _named(use: Use) -> str:
    return f"{use.owner}: {use.what}" if use.owner == "engine" else use.what
