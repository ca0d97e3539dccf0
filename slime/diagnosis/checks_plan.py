"""Check the plan: flags, GPUs, engines, memory, staleness, credentials."""

from __future__ import annotations

from slime.diagnosis.look import CheckedRun, LeftOut, Look
from slime.memory.check import judge
from slime.memory.hardware import device_memory
from slime.memory.micro_batches import packing_line, with_token_limit
from slime.memory.plan import MemoryPlan, gb
from slime.placement import PlacementPlan, needs_engines
from slime.run import preflight

#: Rollouts between the weights that make a sample and the step that trains on it, from which on it
#: is said.
_STALE = 4


def flags(case: CheckedRun, look: Look) -> None:
    """Report every error and warning about the flags."""
    for error in case.errors:
        look.refused(error)
    if case.config is not None:
        for warning in case.config.warnings:
            look.found("flag-without-effect", warning, is_fatal=False)
        train = case.config.train
        rollout = case.config.rollout
        look.note(
            f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} samples = "
            f"{train.global_batch_size} × {train.num_steps_per_rollout} steps"
        )


def slots(case: CheckedRun, look: Look) -> None:
    """Check that there are as many GPUs (or process slots) as the run asks for, here or in the
    cluster that it joins."""
    look.attempt(preflight.check_slots, case.run)
    look.note(PlacementPlan.of(case.run).formula)


def engines(case: CheckedRun, look: Look) -> None:
    """Check that the engines can be started and follow the trainer's weights."""
    config = case.run
    if not needs_engines(config):
        raise LeftOut("the run has no engines")
    look.attempt(preflight.check_engine_flags, config)
    look.attempt(preflight.check_engine, config)
    look.attempt(preflight.check_external_engines, config, trouble="external-engine")
    look.note(config.engine.rollout_engine)


def trainer(case: CheckedRun, look: Look) -> None:
    """Check that the libraries that the trainer's flags need are installed."""
    look.attempt(preflight.check_transformer_engine, case.run)


def memory(case: CheckedRun, look: Look) -> None:
    """Check that the memory plan fits, phase by phase."""
    config = case.run
    if preflight.joins_cluster(config) and config.cluster.gpu_memory_gb is None:
        raise LeftOut(
            "the nodes of the cluster tell how large their GPUs are (--gpu-memory-gb says it here)"
        )
    device = look.attempt(device_memory, config)
    if device is None:
        return
    config = with_token_limit(config, device)
    plan = MemoryPlan.of(config, device)
    look.trouble = "memory-colocated" if config.cluster.colocate else "memory-training"
    look.attempt(judge, config, plan)
    if not plan.phases:
        raise LeftOut("neither a trainer nor an engine is started")
    peak = plan.peak
    where = "GPU" if device.on_gpu else "this host"
    look.note(packing_line(config))
    look.note(
        f"{gb(peak.total)} GB at most ({peak.name}), {gb(plan.limit)} GB of {where} "
        f"({device.source})"
    )


def age(case: CheckedRun, look: Look) -> None:
    """Check how old samples may be."""
    config = case.run
    if not needs_engines(config) or config.debug.debug_rollout_only:
        raise LeftOut("no weights are pushed")
    most = config.sync.staleness
    sync = config.sync
    if most >= _STALE and not config.algorithm.use_tis:
        detail = (
            f"samples are trained on up to {most} rollouts after the weights that made them: "
            f"--async-buffer-size {sync.async_buffer_size} + --update-weights-interval "
            f"{sync.update_weights_interval} − 1"
        )
        look.found("stale-weights", detail, is_fatal=False)
    look.note(f"{most} rollouts at most")


def credentials(case: CheckedRun, look: Look) -> None:
    """Check the keys of services that the run uses."""
    if not case.run.observe.use_wandb:
        raise LeftOut("no service is used")
    from slime.observe.wandb_sink import check_key

    look.attempt(check_key, case.run, trouble="wandb-key")
