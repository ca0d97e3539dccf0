"""Check the plan: flags, GPUs, engines, memory, staleness, credentials."""

from __future__ import annotations

from importlib.util import find_spec

from slime.diagnosis.check import CheckedRun, CheckFindings, LeftOut
from slime.memory.check import judge
from slime.memory.hardware import device_memory
from slime.memory.micro_batches import packing_line, with_token_limit
from slime.memory.plan import MemoryPlan, gb
from slime.observe.trackers import TRACKERS, missing_tracker
from slime.placement import PlacementPlan, needs_engines
from slime.processes.host import num_gpus
from slime.run import preflight

#: Staleness from which a run gets a warning, in rollouts from the push of weights to training.
_STALE = 4


def flags(case: CheckedRun, findings: CheckFindings) -> None:
    """Report every error and warning about the flags."""
    for error in case.errors:
        findings.add_error(error)
    if case.config is not None:
        for warning in case.config.warnings:
            findings.add("flag-warning", warning, is_fatal=False)
        train = case.config.train
        rollout = case.config.rollout
        findings.note(
            f"{rollout.rollout_batch_size} × {rollout.n_samples_per_prompt} samples = "
            f"{train.global_batch_size} × {train.num_steps_per_rollout} steps"
        )


def slots(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that this host, or the cluster that the run joins, has enough GPUs (or process
    slots)."""
    findings.attempt(preflight.check_slots, case.run)
    findings.note(PlacementPlan.of(case.run).formula)


def node(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that this host, one of several, has --num-gpus-per-node GPUs."""
    expected = case.run.cluster.num_gpus_per_node
    here = num_gpus()
    is_told = not case.run.origins["num_gpus_per_node"].startswith("derived")
    if is_told and here < expected:
        findings.add("gpus-missing", f"--num-gpus-per-node is {expected}, and this node has {here}")
    findings.note(f"{here} on this node")


def engines(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that the engines can start and receive the trainer's weights."""
    config = case.run
    if not needs_engines(config):
        raise LeftOut("the run has no engines")
    findings.attempt(preflight.check_engine_flags, config)
    findings.attempt(preflight.check_engine, config)
    findings.attempt(preflight.warn_of_small_graphs, config)
    findings.attempt(preflight.check_external_engines, config, trouble="external-engine")
    findings.note(config.engine.rollout_engine)


def trainer(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that the libraries for the trainer's flags and its model are installed."""
    findings.attempt(preflight.check_transformer_engine, case.run)
    findings.attempt(preflight.check_windows, case.run)
    findings.attempt(preflight.warn_of_slow_delta_nets, case.run)
    findings.attempt(preflight.warn_of_high_learning_rate, case.run)


def memory(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that the memory plan fits, phase by phase."""
    config = case.run
    if preflight.joins_cluster(config) and config.cluster.gpu_memory_gb is None:
        raise LeftOut(
            "only the nodes of the cluster know the memory of their GPUs (pass --gpu-memory-gb)"
        )
    device = findings.attempt(device_memory, config)
    if device is None:
        return
    config = with_token_limit(config, device)
    plan = MemoryPlan.of(config, device)
    findings.trouble = "memory-colocated" if config.cluster.colocate else "memory-training"
    findings.attempt(judge, config, plan)
    if not plan.phases:
        raise LeftOut("neither a trainer nor an engine is started")
    peak = plan.peak
    where = "GPU" if device.on_gpu else "this host"
    findings.note(packing_line(config))
    findings.note(
        f"{gb(peak.total)} GB at most ({peak.name}), {gb(plan.limit)} GB of {where} "
        f"({device.source})"
    )


def age(case: CheckedRun, findings: CheckFindings) -> None:
    """Check the staleness of samples."""
    config = case.run
    if not needs_engines(config) or config.debug.debug_rollout_only:
        raise LeftOut("no weights are pushed")
    sync = config.sync
    most = sync.staleness
    if most >= _STALE and not config.algorithm.use_tis:
        formula = (
            f"--async-buffer-size {sync.async_buffer_size} + --update-weights-interval "
            f"{sync.update_weights_interval} − 1"
        )
        bound = f"--max-staleness {sync.max_staleness}" if sync.paced else formula
        detail = f"samples are up to {most} rollouts old when they are trained on: {bound}"
        findings.add("stale-weights", detail, is_fatal=False)
    findings.note(f"{most} rollouts at most")


def credentials(case: CheckedRun, findings: CheckFindings) -> None:
    """Check the packages of trackers, and the API key of W&B."""
    trackers = [name for name, tracker in TRACKERS.items() if tracker.is_chosen(case.run)]
    if not trackers:
        raise LeftOut("no service is used")
    for name in trackers:
        if name == "wandb":
            from slime.observe.wandb_sink import check_key

            findings.attempt(check_key, case.run, trouble="wandb-key")
        elif find_spec(name) is None:
            findings.add_error(missing_tracker(name), "tracker-missing")
