"""The memory plan of a run: what each GPU holds in each phase, whether that fits, and what to
change when it does not.

    colocated                                              separate
    phase       trainer              engine                trainer GPUs: log-probs, train, push
    generate    asleep               weights, KV cache     engine GPUs:  generate, push
    log-probs   states, a frozen     asleep
                model's weights
    critic      critic's states      asleep
    train       states, activations  asleep
    push        weights              weights

The GPUs of a critic with its own have only the phase `critic`.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.config import Config
from slime.engines.adapters import as_served
from slime.errors import UserError
from slime.memory import engine as engine_side
from slime.memory import trainer as trainer_side
from slime.memory.engine import EngineSettings
from slime.memory.hardware import FLASH4_WIDEST_ANYWHERE, DeviceMemory, device_memory
from slime.memory.trainer import TrainerSettings, longest_sequence
from slime.models import family_of, table_of
from slime.models.adapters import AdapterConfig, count_parameters
from slime.models.quantised import Quantisation
from slime.models.spec import ModelSpec, read_hf_config
from slime.models.vision import seeing
from slime.placement import PlacementPlan, critic_placed

#: Usable share of a device's memory; allocators lose the rest to fragmentation.
USABLE = 0.96

_SMALL = 0.05e9  # bytes; smaller uses share one row

#: Resident size of a process that has imported torch, and of all processes other than trainers and
#: engines.
_PROCESS_BYTES = 0.6e9
_OTHER_BYTES = 1.5e9

#: Host memory of a process with a CUDA context, NCCL and its kernels, in addition to what the plan
#: counts: of a trainer rank, and of an engine per GPU. Estimates.
TRAINER_PROCESS_BYTES = 4e9
ENGINE_PROCESS_BYTES = 6e9

#: Fraction of a host's memory above which Ray kills processes, and the variable that sets it.
RAY_SHARE = 0.95
_RAY_THRESHOLD = "RAY_memory_usage_threshold"


@dataclass(frozen=True)
class Use:
    """One use of memory."""

    owner: str
    what: str
    nbytes: float


@dataclass(frozen=True)
class Phase:
    """Memory of one of several devices with the same content, in one phase.

    Attributes:
        devices: "GPU 0-3", or "host".
        name: generate, log-probs, critic, train, push; "all" on a host without GPUs, where nothing
            sleeps.
    """

    devices: str
    name: str
    uses: tuple[Use, ...]

    @property
    def total(self) -> float:
        return sum(use.nbytes for use in self.uses)

    @property
    def largest(self) -> list[Use]:
        return sorted(self.uses, key=lambda use: -use.nbytes)


#: Host memory of a run without trainer.
NO_HOST = Phase("host", "all", ())


@dataclass(frozen=True)
class Facts:
    """All facts that the plan depends on; change one to answer "what if".

    Attributes:
        trainer, engine: None if the run has none.
        placement: the GPUs of trainer, engines and critic.
        colocate: trainer and engines share GPUs.
        trainer_sleeps, engine_sleeps: it frees its GPU memory while the other works.
        bucket: bytes of a bucket of a weight push.
        ranks_per_node: trainer ranks per node.
        engines_beside: engine GPUs on a node with trainer ranks.
        critics_beside: ranks of a critic with its own GPUs on a node with trainer ranks.
        server_groups: --sglang-config defines engines that may differ.
        engine_backup: sleeping engines keep their weights in host memory.
        engine_keeps_weights: sleeping engines keep them on the GPU.
        critic: a critic on GPUs of its own.
        rollout_tokens: maximum number of tokens in the samples of all rollouts under way.
    """

    trainer: TrainerSettings | None
    engine: EngineSettings | None
    placement: PlacementPlan
    colocate: bool
    trainer_sleeps: bool
    engine_sleeps: bool
    bucket: float
    ranks_per_node: int
    engines_beside: int = 0
    server_groups: bool = False
    engine_backup: bool = False
    engine_keeps_weights: bool = False
    critic: TrainerSettings | None = None
    critics_beside: int = 0
    rollout_tokens: int = 0


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that a run will use, phase by phase.

    Attributes:
        device: a GPU, or this host.
        phases: every phase of every group of devices.
        host: host memory of a node with trainer ranks, for a run on GPUs.
        notes: assumptions of the plan.
    """

    facts: Facts
    device: DeviceMemory
    phases: tuple[Phase, ...]
    host: Phase = NO_HOST
    notes: tuple[str, ...] = field(default=())

    @staticmethod
    def of(config: Config, device: DeviceMemory | None = None) -> MemoryPlan:
        """Make the plan for a resolved configuration. Of ``--hf-checkpoint`` it reads only
        config.json.

        Args:
            device: memory of the ranks' devices; default: from the flags and this host.
        Raises:
            UserError: the model's family is unknown.
        """
        device = device or device_memory(config)
        facts = facts_of(config, on_gpu=device.on_gpu, flash4=device.flash4)
        notes = _notes(facts, device.nbytes)
        if not device.on_gpu:
            return MemoryPlan(facts, device, (host_phase(facts),), notes=notes)
        phases = tuple(gpu_phases(facts, device.nbytes))
        return MemoryPlan(facts, device, phases, node_memory(facts, device.nbytes), notes)

    @property
    def limit(self) -> float:
        """Usable bytes of a device."""
        return self.device.nbytes * (USABLE if self.device.on_gpu else 1.0)

    @property
    def host_limit(self) -> float:
        """Usable bytes of a node's memory; above them Ray kills processes."""
        return self.device.host * _ray_share()

    @property
    def host_is_full(self) -> bool:
        return self.host.total > self.host_limit

    @property
    def peak(self) -> Phase:
        """The phase that needs most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def overfull(self) -> list[Phase]:
        """The phases that do not fit, worst first."""
        return sorted(
            (p for p in self.phases if p.total > self.limit), key=lambda phase: -phase.total
        )

    @property
    def starved(self) -> bool:
        """Whether the KV cache holds less than one sequence."""
        engine = self.facts.engine
        return (
            engine is not None
            and self.device.on_gpu
            and engine.kv_tokens(self.device.nbytes) < engine.longest
        )

    @property
    def fits(self) -> bool:
        return not self.overfull and not self.starved and not self.host_is_full


def facts_of(config: Config, *, on_gpu: bool, flash4: int = FLASH4_WIDEST_ANYWHERE) -> Facts:
    """Collect the facts that the plan depends on, from the flags and the model's config.json;
    ``flash4`` as in `DeviceMemory`."""
    placement = PlacementPlan.of(config)
    cluster = config.cluster
    hf_config = run_hf_config(config)
    spec = family_of(hf_config, config.checkpoint.model_name).model_spec(hf_config)
    quantisation = Quantisation.read(hf_config)
    longest = longest_sequence(config)[0]
    ranks = min(placement.num_train, cluster.actor_num_gpus_per_node)
    others = max(0, cluster.num_gpus_per_node - ranks)
    return Facts(
        trainer=TrainerSettings.of(config, spec, on_gpu=on_gpu, flash4=flash4)
        if placement.num_train
        else None,
        engine=EngineSettings.of(config, spec, longest, quantisation)
        if placement.num_engines
        else None,
        placement=placement,
        colocate=cluster.colocate and bool(placement.num_train and placement.num_engines),
        trainer_sleeps=bool(cluster.offload_train),
        engine_sleeps=bool(cluster.offload_rollout),
        bucket=_bucket(config, spec),
        critic=TrainerSettings.of(
            critic_placed(config), spec, on_gpu=on_gpu, flash4=flash4
        ).as_critic()
        if placement.num_critic
        else None,
        ranks_per_node=ranks,
        engines_beside=min(placement.num_rollout, ranks if cluster.colocate else others),
        critics_beside=min(
            placement.num_critic,
            others if cluster.colocate else max(0, others - placement.num_rollout),
        ),
        rollout_tokens=longest
        * config.rollout.rollout_batch_size
        * config.rollout.n_samples_per_prompt
        * (1 + config.sync.async_buffer_size),
        server_groups=config.engine.sglang_config is not None,
        # weights that no push restores after a sleep
        engine_backup=bool(cluster.offload_rollout_weights)
        and bool(config.lora.lora_rank or config.sync.update_weights_interval > 1),
        engine_keeps_weights=not cluster.offload_rollout_weights,
    )


def run_hf_config(config: Config) -> dict[str, Any]:
    """Return the config.json of ``--hf-checkpoint``, marked as a vision model if the run has
    images."""
    assert config.checkpoint.hf_checkpoint is not None, "checked with the flags"
    hf_config = read_hf_config(config.checkpoint.hf_checkpoint)
    return seeing(hf_config) if config.images.multimodal_keys else hf_config


def _ray_share() -> float:
    """Return the fraction of a host's memory above which Ray kills processes.

    Raises:
        UserError: the variable that sets it is not a number from 0 to 1.
    """
    text = os.environ.get(_RAY_THRESHOLD, str(RAY_SHARE))
    if not re.fullmatch(r"0|1|1\.0*|0?\.\d+", text):
        raise UserError(
            f"the environment variable {_RAY_THRESHOLD} is {text!r}",
            why="Ray kills processes when a host uses more than this fraction of its memory",
            fix=f"unset it, or set it to a number from 0 to 1; Ray's default is {RAY_SHARE:g}",
        )
    return float(text)


def _bucket(config: Config, spec: ModelSpec) -> float:
    """Return the bytes of a bucket of a weight push; a push of adapters may be smaller than the
    limit."""
    limit = float(config.sync.update_weight_buffer_size)
    adapters = AdapterConfig.of(config)
    if adapters is None:
        return limit
    element = 4 if config.megatron.fp32 else 2
    family = table_of(spec)
    sent = count_parameters(family, spec, as_served(adapters, family, spec))
    return min(limit, float(element * sent))


def _notes(facts: Facts, memory: float) -> tuple[str, ...]:
    found = []
    trainer = facts.trainer
    engine = facts.engine
    if trainer is not None and trainer.assumed_length:
        found.append(
            f"no flag bounds the prompt: sequences of {trainer.longest} tokens are assumed "
            "(--rollout-max-context-len)"
        )
    if engine is not None and engine.fraction_option and engine.fraction is None:
        fraction = engine.static_fraction(memory)
        found.append(f"{engine.fraction_option} is left to the engine; {fraction:g} is assumed")
    if trainer is not None and trainer.has_critic and trainer.adapters is not None:
        if trainer.shares_base:
            found.append("policy and critic share one frozen base, which is counted once")
        elif trainer.critic_adapters is not None:
            found.append("the critic's frozen layers are counted in addition to the policy's base")
    if facts.server_groups:
        found.append(
            "the server groups of --sglang-config are planned as if all served the policy without "
            "overrides"
        )
    return tuple(found)


# -- on GPUs ---------------------------------------------------------------------------------------


def gpu_phases(facts: Facts, memory: float) -> Iterator[Phase]:
    """Yield every phase of every group of GPUs with the same content."""
    for devices, stage, has_engine in _groups(facts):
        trainer = (
            facts.trainer.stages[stage] if facts.trainer is not None and stage is not None else None
        )
        engine = facts.engine if has_engine else None
        shared = trainer is not None and engine is not None
        if engine is not None:
            rest = _resting_trainer(facts, trainer)
            kv_cache = Use(
                "engine", f"KV cache ({engine.kv_tokens(memory):,} tokens)", engine.kv_cache(memory)
            )
            yield Phase(devices, "generate", (*_awake_engine(engine), kv_cache, *rest))
        if trainer is not None:
            idle = _resting_engine(facts, engine, memory)
            states = _uses("trainer", trainer.states())
            if not facts.trainer_sleeps:  # else only one of policy and critic is on the GPU
                states += _states_of_critic(trainer)
            states.append(_context(trainer))
            # broadcasts keep their buckets between pushes
            if facts.engine is not None and not facts.colocate:
                states.append(Use("trainer", "two buckets", 2 * facts.bucket))
            if trainer.settings.reference or trainer.settings.teachers:
                more = _uses("trainer", trainer.scoring())
                yield Phase(devices, "log-probs", (*states, *more, *idle))
            if trainer.critic is not None:
                if facts.trainer_sleeps:
                    awake = [*_uses("critic", trainer.critic.states()), _context(trainer)]
                else:
                    awake = states
                more = _uses("critic", trainer.critic.training())
                yield Phase(devices, "critic", (*awake, *more, *idle))
            more = _uses("trainer", trainer.training())
            yield Phase(devices, "train", (*states, *more, *idle))
        if facts.engine is not None and facts.trainer is not None:
            yield Phase(devices, "push", tuple(_push(facts, trainer, engine, memory, shared)))
    yield from _critic_phases(facts)


def _critic_phases(facts: Facts) -> Iterator[Phase]:
    """Yield the only phase of the GPUs of a critic with its own, per pipeline stage."""
    if facts.critic is None:
        return
    context = Use("critic", trainer_side.CONTEXT, trainer_side.AWAKE_BYTES)
    per_stage = facts.critic.layout.world // facts.critic.layout.pipeline
    for stage in facts.critic.stages:
        first = facts.placement.critic_offset + stage.number * per_stage
        held = (*stage.states().items(), *stage.training().items())
        uses = [Use("critic", what, size) for what, size in held]
        slots = ranges(list(range(first, first + per_stage)))
        yield Phase(f"GPU {slots}", "critic", (*uses, context))


def _groups(facts: Facts) -> Iterator[tuple[str, int | None, bool]]:
    """Yield (GPUs, pipeline stage or None, has an engine) of GPUs with the same content."""
    placement = facts.placement
    per_stage = placement.num_train // (facts.trainer.layout.pipeline if facts.trainer else 1)
    kinds: dict[tuple[int | None, bool], list[int]] = {}
    for slot in range(placement.critic_offset):
        stage = slot // per_stage if slot < placement.num_train else None
        first = placement.rollout_offset
        kinds.setdefault((stage, first <= slot < first + placement.num_rollout), []).append(slot)
    for (stage, has_engine), slots in kinds.items():
        yield f"GPU {ranges(slots)}", stage, has_engine


def ranges(numbers: list[int]) -> str:
    """Format sorted numbers as ranges.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0-2,5,7-8'
    """
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)


def _awake_engine(engine: EngineSettings) -> list[Use]:
    return [
        *_engine_weights(engine),
        Use("engine", "CUDA context and graphs, prefill", engine_side.AWAKE_BYTES),
        *_adapter_pool(engine),
    ]


def _engine_weights(engine: EngineSettings) -> list[Use]:
    draft = [Use("engine", "weights of the draft", engine.draft)] if engine.draft else []
    return [Use("engine", "weights", engine.weights), *draft]


def _adapter_pool(engine: EngineSettings) -> list[Use]:
    """Return the memory for the adapters that an engine serves at once; it stays while the engine
    sleeps."""
    size = engine.adapter_pool
    return [Use("engine", f"pool of {engine.adapters_at_once} adapters", size)] if size else []


def _uses(owner: str, sizes: Mapping[str, float]) -> list[Use]:
    return [Use(owner, what, nbytes) for what, nbytes in sizes.items()]


def _context(trainer: trainer_side.StageMemory, *, asleep: bool = False) -> Use:
    """Return the memory of a trainer process outside torch, for all layouts that it has."""
    what = f"asleep ({trainer_side.CONTEXT})" if asleep else trainer_side.CONTEXT
    nbytes = trainer_side.ASLEEP_BYTES if asleep else trainer_side.AWAKE_BYTES
    if trainer.settings.critic_layout is not None:
        nbytes += trainer_side.SECOND_LAYOUT_BYTES
    return Use("trainer", what, nbytes)


def _states_of_critic(trainer: trainer_side.StageMemory) -> list[Use]:
    """Return what a critic adds to the policy's states on the same device."""
    if trainer.critic is None:
        return []
    states = trainer.critic.states()
    if trainer.critic.borrowed:
        del states[trainer_side.FROZEN]
    return _uses("critic", states)


def _resting_trainer(facts: Facts, trainer: trainer_side.StageMemory | None) -> list[Use]:
    """Return the memory of the trainer while the engine generates."""
    if trainer is None:
        return []
    if facts.trainer_sleeps:
        return [_context(trainer, asleep=True)]
    return [
        *_uses("trainer", trainer.states()),
        *_states_of_critic(trainer),
        _context(trainer),
    ]


def _resting_engine(facts: Facts, engine: EngineSettings | None, memory: float) -> list[Use]:
    """Return the memory of the engine while the trainer works."""
    if engine is None:
        return []
    if facts.engine_sleeps:
        asleep = Use("engine", "asleep (CUDA context and graphs)", engine_side.ASLEEP_BYTES)
        weights = _engine_weights(engine) if facts.engine_keeps_weights else []
        return [asleep, *weights, *_adapter_pool(engine)]
    return [*_awake_engine(engine), Use("engine", "KV cache", engine.kv_cache(memory))]


def _push(
    facts: Facts,
    trainer: trainer_side.StageMemory | None,
    engine: EngineSettings | None,
    memory: float,
    shared: bool,
) -> Iterator[Use]:
    """Yield the memory of a push: weights on both sides and two buckets. A colocated trainer's
    optimizer states and the KV cache are asleep."""
    if trainer is not None:
        if shared and facts.trainer_sleeps:
            states = {"weights": trainer.weights + trainer.adapter_weights}
        else:
            states = trainer.states()
        yield from _uses("trainer", states)
        if not facts.trainer_sleeps:
            yield from _states_of_critic(trainer)
        yield _context(trainer)
    if engine is not None:
        yield from _awake_engine(engine)
        if not (shared and facts.engine_sleeps):
            yield Use("engine", "KV cache", engine.kv_cache(memory))
    yield Use(
        "both" if shared else "trainer" if trainer is not None else "engine",
        "two buckets",
        2 * facts.bucket,
    )


def node_memory(facts: Facts, gpu_bytes: float) -> Phase:
    """Return the maximum host memory of a node with trainer ranks. All its ranks may be of the
    stage that needs most."""
    trainer = facts.trainer
    if trainer is None:
        return NO_HOST
    sleeps = facts.colocate and facts.trainer_sleeps
    ranks = facts.ranks_per_node
    per_stage = [stage.on_host(sleeps=sleeps) for stage in trainer.stages]
    largest = max(per_stage, key=lambda held: sum(held.values()))
    uses = [Use("trainer", what, ranks * size) for what, size in largest.items()]
    uses.append(Use("trainer", "processes", ranks * TRAINER_PROCESS_BYTES))
    uses.append(Use("run", "driver, rollout, router", _OTHER_BYTES))
    if facts.critic is not None and facts.critics_beside:
        per_stage = [stage.on_host(sleeps=False) for stage in facts.critic.stages]
        largest = max(per_stage, key=lambda held: sum(held.values()))
        count = facts.critics_beside
        uses += [Use("critic", what, count * size) for what, size in largest.items()]
        uses.append(Use("critic", "processes", count * TRAINER_PROCESS_BYTES))
    if facts.engine is not None and facts.engines_beside:
        count = facts.engines_beside
        uses.append(Use("engine", "processes", count * ENGINE_PROCESS_BYTES))
        if facts.engine_backup:
            uses.append(Use("engine", "weights asleep", count * facts.engine.weights))
        if facts.engine.routes_per_token:
            cached = count * facts.engine.kv_tokens(gpu_bytes)
            routes = facts.engine.routes_per_token
            uses.append(Use("engine", "experts of cached tokens", cached * routes))
            # in the rollout process and in Ray's object store
            uses.append(Use("run", "experts of samples", 2 * facts.rollout_tokens * routes))
        if facts.engine.draft and facts.engine_sleeps and not facts.engine_keeps_weights:
            uses.append(Use("engine", "weights of the draft asleep", count * facts.engine.draft))
    return Phase("host", "all", tuple(uses))


# -- on a host without GPUs ------------------------------------------------------------------------


def host_phase(facts: Facts) -> Phase:
    """Return the memory of all processes together: they share the host, and none sleeps."""
    uses = [Use("run", "driver, rollout, router", _OTHER_BYTES)]
    trainer = facts.trainer
    engine = facts.engine
    placement = facts.placement
    if trainer is not None:
        per_stage = placement.num_train // trainer.layout.pipeline
        uses.append(Use("trainer", "processes", placement.num_train * _PROCESS_BYTES))
        totals: dict[str, float] = {}
        for stage in trainer.stages:
            for what, size in (
                *stage.states().items(),
                *stage.training().items(),
                *stage.on_host(sleeps=False).items(),
            ):
                totals[what] = totals.get(what, 0.0) + size * per_stage
            uses += [
                Use(use.owner, use.what, use.nbytes * per_stage) for use in _states_of_critic(stage)
            ]
        uses += [Use("trainer", what, size) for what, size in totals.items() if size]
    if facts.critic is not None:
        uses += _critic_on_host(facts.critic)
    if engine is not None:
        count = placement.num_engines
        uses.append(Use("engine", "processes", count * _PROCESS_BYTES))
        uses.append(Use("engine", "weights", count * engine.weights))
        uses += [Use(one.owner, one.what, count * one.nbytes) for one in _adapter_pool(engine)]
        uses.append(Use("engine", "KV cache at most", count * engine.kv_cache(0.0)))
    return Phase("host", "all", tuple(uses))


def _critic_on_host(critic: TrainerSettings) -> list[Use]:
    """Return the total memory of a critic with processes of its own."""
    ranks = critic.layout.world
    totals: dict[str, float] = {"processes": ranks * _PROCESS_BYTES}
    for stage in critic.stages:
        for held in (stage.states(), stage.training(), stage.on_host(sleeps=False)):
            for what, size in held.items():
                totals[what] = totals.get(what, 0.0) + size * ranks / critic.layout.pipeline
    return [Use("critic", what, size) for what, size in totals.items() if size]


# -- as text ---------------------------------------------------------------------------------------


def gb(nbytes: float) -> str:
    """Format bytes as GB.

    Example:
        >>> gb(1.25e9), gb(3e6)
        ('1.2', '0.0')
    """
    return f"{nbytes / 1e9:.1f}"


def summary(plan: MemoryPlan) -> list[str]:
    """Return one line per group of devices: each phase's total, and the limit."""
    lines = [f"memory plan: {_devices(plan)}"]
    by_devices: dict[str, list[Phase]] = {}
    for phase in plan.phases:
        by_devices.setdefault(phase.devices, []).append(phase)
    for devices, phases in by_devices.items():
        totals = ", ".join(f"{phase.name} {gb(phase.total)} GB" for phase in phases)
        lines.append(f"  {devices}: {totals} (limit {gb(plan.limit)})")
    return lines + [f"  {line}" for line in _remarks(plan)]


def table(plan: MemoryPlan) -> str:
    """Return a table of the uses of every phase.

    Example:
        devices  phase     of       what            GB   total   limit
        GPU 0-3  generate  engine   weights        4.0
                           engine   KV cache      94.7
                           trainer  asleep         2.2   100.9   135.4
    """
    rows: list[tuple[str, ...]] = [("devices", "phase", "of", "what", "GB", "total", "limit")]
    devices = ""
    for phase in plan.phases:
        uses = [use for use in phase.largest if use.nbytes >= _SMALL]
        rest = phase.total - sum(use.nbytes for use in uses)
        entries = [(use.owner, use.what, gb(use.nbytes)) for use in uses]
        if rest:
            entries.append(("", "smaller uses", gb(rest)))
        for index, entry in enumerate(entries):
            last = index == len(entries) - 1
            over = " !" if phase.total > plan.limit else ""
            rows.append(
                (
                    phase.devices if index == 0 and phase.devices != devices else "",
                    phase.name if index == 0 else "",
                    *entry,
                    gb(phase.total) if last else "",
                    gb(plan.limit) + over if last else "",
                )
            )
        devices = phase.devices
    lines = [f"memory plan: {_devices(plan)}", *_aligned(rows), *_remarks(plan)]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:4], widths)]
        right = [cell.rjust(width) for cell, width in zip(row[4:], widths[4:])]
        yield "  ".join([*left, *right]).rstrip()


def _devices(plan: MemoryPlan) -> str:
    device = plan.device
    if not device.on_gpu:
        return f"{gb(device.nbytes)} GB {device.source}"
    count = plan.facts.placement.total
    return f"{count} GPU{'s' if count > 1 else ''} of {gb(device.nbytes)} GB ({device.source})"


def _remarks(plan: MemoryPlan) -> list[str]:
    lines = list(plan.notes)
    if plan.host.uses:
        parts = ", ".join(
            f"{use.owner} {use.what} {gb(use.nbytes)}"
            for use in plan.host.largest
            if use.nbytes >= _SMALL
        )
        limit = "" if math.isinf(plan.host_limit) else f" (limit {gb(plan.host_limit)} GB)"
        over = " !" if plan.host_is_full else ""
        lines.append(
            f"host memory of a trainer node: {gb(plan.host.total)} GB{limit}{over}: {parts}"
        )
    return lines
