"""The check of the memory plan at launch: it logs a summary, and refuses a plan that does not fit.

The error lists changes of flags, each with the memory that the plan would need after it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.memory.hardware import DeviceMemory, device_memory
from slime.memory.plan import Facts, MemoryPlan, Phase, Use, gb, gpu_phases, node_memory, summary
from slime.memory.remedies import (
    NARROW_MOMENTS,
    OFFLOAD_ALL,
    OFFLOAD_MOMENTS,
    OFFLOAD_ROLLOUT,
    OFFLOAD_WEIGHTS,
    SEQUENCE_PARALLEL,
    SHARD_STATES,
    more_recompute,
    other_fraction,
    wider_context_parallel,
    wider_tensor_parallel,
)
from slime.memory.trainer import TrainerSettings
from slime.models.layout_rules import critic_flags
from slime.models.layouts import Layout
from slime.placement import PlacementPlan

logger = get_logger(__name__)

_SHOWN = 4
_MAX_COMBINED = 5
_MIN_GAIN = 0.02  # of a device's memory
_SMALLEST_FRACTION = 0.2
_FLOAT32_MOMENTS = 8.0


def check_memory(config: Config, device: DeviceMemory | None = None) -> MemoryPlan:
    """Log the plan, and refuse it if it does not fit.

    Args:
        device: memory of the ranks' devices as a Ray cluster reports it; default: from the flags
            and this host.
    Raises:
        UserError: on GPUs, the plan does not fit and ``--memory-plan`` is not ``warn``.
    """
    plan = MemoryPlan.of(config, device)
    for line in summary(plan):
        logger.info("%s", line)
    judge(config, plan)
    if _could_keep_weights(plan):
        logger.info(
            "memory plan: the engines' weights fit beside the trainer; "
            "--no-offload-rollout-weights saves copying them to host memory and back in each step"
        )
    return plan


def _could_keep_weights(plan: MemoryPlan) -> bool:
    """Tell whether engines copy weights to host memory although the GPUs have room for them."""
    if not (plan.device.on_gpu and plan.facts.engine_backup and plan.fits):
        return False
    facts = dataclasses.replace(plan.facts, engine_keeps_weights=True, engine_backup=False)
    phases = gpu_phases(facts, plan.device.nbytes)
    return all(phase.total <= plan.limit for phase in phases)


def check_memory_of_cluster(
    config: Config, gpu_memory: float | None, host_memory: float, *, on_gpu: bool
) -> None:
    """Call `check_memory` with the memory that the nodes of a Ray cluster report. Without GPUs
    nothing is checked, because this host's memory tells nothing about the other nodes.

    Args:
        gpu_memory: bytes of the smallest GPU of the run; None: no driver reports it.
        host_memory: bytes of the smallest node of the run.
    """
    if not on_gpu:
        return
    device = device_memory(config, seen=gpu_memory, on_gpu=True, host=host_memory)
    check_memory(config, device)


def judge(config: Config, plan: MemoryPlan) -> None:
    """Refuse a plan that does not fit, or warn if the flag says so. Without GPUs only warn, because
    the host can swap and the estimate is rough.

    Raises:
        UserError: as `check_memory`.
    """
    if plan.fits:
        return
    if not plan.device.on_gpu:
        _warn_of_host(plan)
        return
    error = refuse(plan)
    if config.cluster.memory_plan == "refuse":
        raise error
    logger.warning("%s", error)


def _warn_of_host(plan: MemoryPlan) -> None:
    logger.warning(
        "this run may need %s GB, of which %s GB are free on this host; the largest parts: %s",
        gb(plan.peak.total),
        gb(plan.device.nbytes),
        _largest(plan.peak, 3),
    )


def _largest(phase: Phase, count: int) -> str:
    return ", ".join(f"{use.owner} {use.what} {gb(use.nbytes)} GB" for use in phase.largest[:count])


@dataclass(frozen=True)
class Change:
    """A change of flags, and the plan's facts after it."""

    text: str
    facts: Facts


def refuse(plan: MemoryPlan) -> UserError:
    """Return the error for a plan that does not fit."""
    override = "or start anyway with --memory-plan warn"
    if not plan.overfull and plan.starved:
        return _starved(plan, override)
    if not plan.overfull:
        return _host_full(plan, override)
    phase = plan.overfull[0]
    largest = ", ".join(f"{_named(use)} {gb(use.nbytes)} GB" for use in phase.largest[:4])
    names = list(dict.fromkeys(other.name for other in plan.overfull))
    also = f"; {' and '.join(names[1:])} does not fit either" if len(names) > 1 else ""
    lines = []
    for rank, name in enumerate(names):
        for text, peak in remedies(plan, name)[: _SHOWN if rank == 0 else 1]:
            lines.append(f"{text}: {name} {gb(peak)} GB")
    return UserError(
        f"the memory plan does not fit: {phase.name} needs {gb(phase.total)} GB on "
        f"{phase.devices}, limit {gb(plan.limit)} GB (of {gb(plan.device.nbytes)} GB)",
        why=f"the largest parts: {largest}{also}; --dry-run shows all",
        fix="\n       ".join([*lines, override]),
    )


def _starved(plan: MemoryPlan, override: str) -> UserError:
    engine = plan.facts.engine
    assert engine is not None
    memory = plan.device.nbytes
    fraction = engine.static_fraction(memory)
    sequence = engine.longest * engine.kv_per_token + engine.state_per_sequence
    wanted = (engine.weights + 4 * sequence) / memory
    ways = []
    if wanted < 0.9:
        raised = math.ceil(wanted * 100 + 1) / 100
        ways.append(f"{other_fraction(fraction, raised)}: room for four sequences")
    size = engine.tensor * engine.pipeline
    ways.append(
        f"--rollout-num-gpus-per-engine {size} → {2 * size}: half of the weights on each GPU"
    )
    return UserError(
        "the memory plan does not fit: the KV cache of an engine holds "
        f"{engine.kv_tokens(memory):,} tokens, less than one sequence of {engine.longest:,}",
        why=f"{engine.fraction_option} {fraction:g} of {gb(memory)} GB is {gb(fraction * memory)} "
        f"GB, of which the weights take {gb(engine.weights)} GB; a token takes "
        f"{engine.kv_per_token / 1e3:.0f} kB",
        fix="\n       ".join([*ways, override]),
    )


def _host_full(plan: MemoryPlan, override: str) -> UserError:
    gpu = plan.device.nbytes
    tried = [
        (change.text, node_memory(change.facts, gpu).total) for change in host_changes(plan.facts)
    ]
    useful = [(text, total) for text, total in tried if total < plan.host.total]
    enough = [(text, total) for text, total in useful if total <= plan.host_limit]
    lines = [f"{text}: {gb(total)} GB" for text, total in enough or useful]
    return UserError(
        f"the memory plan does not fit: a trainer node needs {gb(plan.host.total)} GB of host "
        f"memory, limit {gb(plan.host_limit)} GB (of {gb(plan.device.host)} GB)",
        why=f"the largest parts: {_largest(plan.host, 4)}; above the limit Ray kills processes",
        fix="\n       ".join([*lines, override]),
    )


def host_changes(facts: Facts) -> Iterator[Change]:
    """Yield changes that may reduce the host memory of a trainer node, the cheapest first."""
    trainer = facts.trainer
    if trainer is None:
        return

    def changed(text: str, **values: object) -> Change:
        other = dataclasses.replace(trainer, **values)  # type: ignore[arg-type]
        return Change(text, dataclasses.replace(facts, trainer=other))

    sleeps = facts.colocate and facts.trainer_sleeps
    if trainer.saves_async:
        yield changed("without --async-save", saves_async=False)
    if trainer.moments == _FLOAT32_MOMENTS and trainer.sharded:
        flags = NARROW_MOMENTS
        places = {}
        if not trainer.master_on_host:
            flags = f"{OFFLOAD_ALL} {NARROW_MOMENTS}{_instead(trainer)}"
            places = {"moments_on_host": 1.0, "master_on_host": 1.0}
        yield changed(flags, moments=trainer.moments / 2, **places)
    if trainer.moments_on_host and not sleeps:  # a sleeping trainer's GPU state is copied to host
        yield changed(
            f"without {OFFLOAD_ALL if trainer.master_on_host else OFFLOAD_MOMENTS}, if the GPU has "
            "room",
            moments_on_host=0.0,
            master_on_host=0.0,
        )
    world = trainer.layout.world
    if trainer.sharded:
        twice = dataclasses.replace(trainer.layout, world=2 * world)
        yield changed(f"twice the trainer nodes ({world} → {2 * world} GPUs)", layout=twice)


def _instead(trainer: TrainerSettings) -> str:
    """Return a text that names `OFFLOAD_MOMENTS` if `OFFLOAD_ALL` replaces it: they exclude each
    other."""
    replaces = trainer.moments_on_host and not trainer.master_on_host
    return f" instead of {OFFLOAD_MOMENTS}" if replaces else ""


def remedies(plan: MemoryPlan, name: str) -> list[tuple[str, float]]:
    """Return changes of flags for the phase ``name``, which does not fit, each with the bytes of
    the phase after it.

    Returns the changes that are sufficient alone. If there are none: a combination, and then each
    change that helps.
    """
    worst = _total(plan, plan.facts, name)
    tried = [
        (change.text, _total(plan, change.facts, name))
        for change in changes(plan, plan.facts, name)
    ]
    useful = [
        (text, total) for text, total in tried if worst - total > _MIN_GAIN * plan.device.nbytes
    ]
    enough = [(text, total) for text, total in useful if total <= plan.limit]
    if enough:
        return enough
    combined = _combined(plan, name)
    return [*([combined] if combined else []), *useful]


def _combined(plan: MemoryPlan, name: str) -> tuple[str, float] | None:
    """Combine changes that help, the cheapest first, until the phase fits."""
    facts = plan.facts
    total = _total(plan, plan.facts, name)
    texts = list[str]()
    for _ in range(_MAX_COMBINED):
        for change in changes(plan, facts, name):
            lower = _total(plan, change.facts, name)
            if total - lower > _MIN_GAIN * plan.device.nbytes and _flag(change.text) not in map(
                _flag, texts
            ):
                facts = change.facts
                total = lower
                if change.text.startswith(OFFLOAD_ALL) and OFFLOAD_MOMENTS in texts:
                    texts.remove(OFFLOAD_MOMENTS)  # OFFLOAD_ALL includes the moments
                    texts.append(OFFLOAD_ALL)
                else:
                    texts.append(change.text)
                break
        else:
            break
        if total <= plan.limit:
            break
    return (" and ".join(texts), total) if len(texts) > 1 else None


def _flag(text: str) -> str:
    return text.split()[0]


def _total(plan: MemoryPlan, facts: Facts, name: str) -> float:
    """Return the bytes of the phase on the device that needs most."""
    return max(phase.total for phase in gpu_phases(facts, plan.device.nbytes) if phase.name == name)


def changes(plan: MemoryPlan, facts: Facts, name: str) -> Iterator[Change]:
    """Yield changes that may reduce the memory of a phase, the cheapest first."""
    if facts.colocate:
        yield from _sleeping(facts)
    if facts.engine is not None and name in ("generate", "push"):
        yield from _engine_changes(plan, facts, name)
    if facts.critic is not None and name == "critic":
        for text, critic in _trainer_changes(facts.critic):
            if critic.layout.world == facts.critic.layout.world:
                yield Change(critic_flags(text), dataclasses.replace(facts, critic=critic))
        return
    if facts.trainer is not None and facts.trainer.critic_layout is not None and name == "critic":
        yield from _critic_layouts(facts, facts.trainer)
    if facts.trainer is not None and name != "generate":
        for text, trainer in _trainer_changes(facts.trainer):
            placement = _with_trainers(facts, trainer.layout.world)
            yield Change(text, dataclasses.replace(facts, trainer=trainer, placement=placement))


def _critic_layouts(facts: Facts, trainer: TrainerSettings) -> Iterator[Change]:
    """Yield other layouts of a critic on the policy's GPUs."""
    own = trainer.as_critic()
    for text, critic in _trainer_changes(own):
        if critic.layout != own.layout and critic.layout.world == own.layout.world:
            changed = dataclasses.replace(
                trainer, critic_layout=critic.layout, critic_tokens=critic.tokens
            )
            yield Change(critic_flags(text), dataclasses.replace(facts, trainer=changed))


def _with_trainers(facts: Facts, count: int) -> PlacementPlan:
    """Return the placement with ``count`` trainer ranks."""
    old = facts.placement
    if facts.colocate:
        total = max(count, old.num_rollout) + old.num_critic
        return dataclasses.replace(old, num_train=count, total=total)
    total = count + old.num_rollout + old.num_critic
    return dataclasses.replace(old, num_train=count, total=total, rollout_offset=count)


def _trainer_changes(trainer: TrainerSettings) -> Iterator[tuple[str, TrainerSettings]]:
    def changed(**values: object) -> TrainerSettings:
        return dataclasses.replace(trainer, **values)  # type: ignore[arg-type]

    layout = trainer.layout
    again = more_recompute(trainer.recompute)
    if again is not None:
        yield again[0], changed(recompute=again[1])
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield SEQUENCE_PARALLEL, changed(layout=dataclasses.replace(layout, sequence_parallel=True))
    yield from _smaller_micro_batches(trainer)
    if not trainer.sharded and layout.shards > 1:
        yield SHARD_STATES, changed(sharded=True)
    if not trainer.moments_on_host:
        yield OFFLOAD_MOMENTS, changed(moments_on_host=1.0)
    if trainer.sharded and not trainer.master_on_host:
        yield f"{OFFLOAD_ALL}{_instead(trainer)}", changed(moments_on_host=1.0, master_on_host=1.0)
    yield from _wider_layouts(trainer)


def _smaller_micro_batches(trainer: TrainerSettings) -> Iterator[tuple[str, TrainerSettings]]:
    floor = -(-trainer.longest // trainer.layout.context)
    if trainer.tokens > floor * 1.25 and trainer.dynamic:
        lower = max(floor, trainer.tokens // 2)
        text = f"--max-tokens-per-gpu {trainer.tokens} → {lower}"
        yield text, dataclasses.replace(trainer, tokens=lower)
    elif trainer.tokens > floor * 1.25:
        yield "--micro-batch-size 1", dataclasses.replace(trainer, tokens=floor)
    else:
        shorter = trainer.longest * 3 // 4
        lower = trainer.tokens * 3 // 4
        text = f"--rollout-max-context-len {trainer.longest} → {shorter}"
        if trainer.dynamic:  # else as many tokens would be packed, of more sequences
            text += f" and --max-tokens-per-gpu ≤ {lower}"
        yield text, dataclasses.replace(trainer, tokens=lower, longest=shorter)


def _wider_layouts(trainer: TrainerSettings) -> Iterator[tuple[str, TrainerSettings]]:
    """Divide the same GPUs differently, then use more GPUs."""
    spec = trainer.spec
    layout = trainer.layout
    tensor = layout.tensor
    pipeline = layout.pipeline
    context = layout.context
    expert = layout.expert

    def fits(new: Layout) -> bool:
        model = new.tensor * new.pipeline * new.context
        experts = new.expert_tensor * new.expert * new.pipeline
        return new.world % model == 0 and new.world % experts == 0

    def divided(
        text: str, tokens: int = trainer.tokens, **sizes: int | bool
    ) -> Iterator[tuple[str, TrainerSettings]]:
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
        text = f"{wider_tensor_parallel(tensor)} {SEQUENCE_PARALLEL}"
        cut = 2 * tensor
        if spec.num_experts:  # the layout of experts does not change
            cut = layout.expert_tensor
            text = f"{text} --expert-tensor-parallel-size {layout.expert_tensor}"
        yield from divided(text, tensor=2 * tensor, sequence_parallel=True, expert_tensor=cut)
    if spec.num_heads // tensor % (2 * context) == 0:
        tokens = max(trainer.tokens // 2, 1)
        text = f"{wider_context_parallel(context)}, and half of --max-tokens-per-gpu"
        yield from divided(text, tokens=tokens, context=2 * context)
    if spec.num_layers % (2 * pipeline * layout.virtual) == 0:
        yield from divided(
            f"--pipeline-model-parallel-size {pipeline} → {2 * pipeline}", pipeline=2 * pipeline
        )
    yield from divided(
        f"twice the trainer GPUs ({layout.world} → {2 * layout.world})", world=2 * layout.world
    )


def _sleeping(facts: Facts) -> Iterator[Change]:
    if not facts.trainer_sleeps:
        yield Change("--offload-train", dataclasses.replace(facts, trainer_sleeps=True))
    if not facts.engine_sleeps:
        yield Change(OFFLOAD_ROLLOUT, dataclasses.replace(facts, engine_sleeps=True))
    elif facts.engine_keeps_weights:
        yield Change(
            OFFLOAD_WEIGHTS,
            dataclasses.replace(facts, engine_keeps_weights=False, engine_backup=True),
        )


def _engine_changes(plan: MemoryPlan, facts: Facts, name: str) -> Iterator[Change]:
    engine = facts.engine
    memory = plan.device.nbytes
    assert engine is not None
    if engine.fraction_option:
        over = (_total(plan, facts, name) - plan.limit) / memory
        fraction = engine.static_fraction(memory)
        lower = math.floor((fraction - over) * 100) / 100
        smaller = dataclasses.replace(engine, fraction=lower)
        if over > 0 and lower >= _SMALLEST_FRACTION and smaller.kv_tokens(memory) >= engine.longest:
            yield Change(
                other_fraction(fraction, lower), dataclasses.replace(facts, engine=smaller)
            )
    size = engine.tensor * engine.pipeline
    if facts.placement.num_rollout % (2 * size) == 0:
        wider = dataclasses.replace(
            engine, tensor=2 * engine.tensor, attention=2 * engine.attention
        )
        text = f"--rollout-num-gpus-per-engine {size} → {2 * size}"
        yield Change(text, dataclasses.replace(facts, engine=wider))


def _named(use: Use) -> str:
    return f"{use.owner}: {use.what}" if use.owner == "engine" else use.what
