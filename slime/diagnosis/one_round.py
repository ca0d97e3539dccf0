"""Run one minimal round in its own folder: generate, train, push.

The command and the flags are the run's own, except for flags of its length and size.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import yaml

from slime import deadlines
from slime.checkpoints.directory import read_tracker
from slime.config.config import Config
from slime.diagnosis.check import Check, CheckedRun, CheckFindings, LeftOut
from slime.observe.first_step import large_gradient
from slime.observe.trackers import TRACKERS
from slime.placement import needs_engines
from slime.processes.host import python_module
from slime.processes.owner import die_with_parent

_PROMPTS = 2
_SAMPLES = 2
_TOKENS = 64
#: Mean difference of log-probs up to which trainer and engine count as equal, in nats.
_DIFFERENCE = 0.1
_METRIC = "train/train_rollout_logprob_abs_diff"
_LAST_LINES = 8
#: Flags that a round does not take from the run: length, size, saving, evaluation, trackers.
_NOT_GIVEN = (
    "config", "custom_config_path", "megatron_config_path", "dry_run", "num_epoch", "num_rollout",
    "start_rollout_id", "stage", "run_name", "output_dir", "global_batch_size",
    "num_steps_per_rollout", "over_sampling_batch_size", "dynamic_sampling_filter_path",
    "update_weights_interval",
    "max_staleness", "ref_update_interval", "rollout_request_tokens", "skip_eval_before_train",
    "n_samples_per_eval_prompt", "log_passrate", "dump_details",
    "disable_wandb_random_suffix",
)  # fmt: skip
_NOT_GIVEN_PREFIXES = (
    "save", "no_save", "eval_", "tb_", "use_tensorboard", "debug_",
    "profile_", "use_pytorch_profiler", "record_memory", "memory_snapshot",
    *TRACKERS, *(f"use_{name}" for name in TRACKERS),
)  # fmt: skip
_KEPT = ("debug_train_only",)


def one_round(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that weights reach engines unchanged, and that both sides agree on log-probs."""
    config = case.run
    if not goes_round(config):
        raise LeftOut("the run does not generate, train and push")
    folder = Path(tempfile.mkdtemp(prefix="slime-doctor-"))
    status, output = launch(config, folder)
    row = _last_row(folder)
    if status != 0:
        return findings.add("round-failed", how_it_failed(status, output, folder))
    difference = row.get(_METRIC, math.nan)
    if not difference <= _DIFFERENCE:
        detail = (
            f"the mean difference is {difference:.3f}; below 0.01 is usual in float32, below 0.05 "
            "in bfloat16"
        )
        findings.add("log-probs-differ", f"{detail}; the folder of the round is {folder}")
    gradient = large_gradient([row], {})
    if gradient is not None:
        findings.add("large-gradient", f"{gradient[0]}; the folder of the round is {folder}")
    elif difference <= _DIFFERENCE:
        shutil.rmtree(folder, ignore_errors=True)
    findings.note(f"all weights arrived; log-probs differ by {difference:.4f}")


def goes_round(config: Config) -> bool:
    """Tell whether the run generates, trains and pushes."""
    trains_on_data = config.algorithm.trains_on_data
    return not trains_on_data and needs_engines(config) and not config.debug.debug_rollout_only


def how_it_failed(status: int, output: Sequence[str], folder: Path) -> str:
    """Format the exit status and the last lines of a round."""
    lines = "\n".join(output[-_LAST_LINES:])
    return f"it ended with status {status}; its folder is {folder}:\n{lines}"


def flags_of_a_round(
    config: Config, folder: Path, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the flags of a minimal round for a configuration file; ``more`` overrides them."""
    values = config.values()
    given = {
        dest: values[dest]
        for dest, origin in config.origins.items()
        if origin.startswith(("flag", "yaml"))
    }
    kept = {
        dest: value
        for dest, value in given.items()
        if dest not in _NOT_GIVEN and (dest in _KEPT or not dest.startswith(_NOT_GIVEN_PREFIXES))
    }
    load = config.checkpoint.load
    if load is not None and load == config.checkpoint.save and read_tracker(Path(load)) is None:
        kept.pop("load", None)  # --load is the run's own --save, and has no checkpoint yet
    megatron = config.megatron
    cluster = config.cluster
    model = (
        megatron.tensor_model_parallel_size
        * megatron.pipeline_model_parallel_size
        * megatron.context_parallel_size
    )
    ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node // model
    samples = min(_SAMPLES, config.rollout.n_samples_per_prompt)
    prompts = max(
        _PROMPTS,
        ranks * (1 if config.train.use_dynamic_batch_size else config.train.micro_batch_size),
    )
    kept |= {
        "num_rollout": 1,
        "rollout_batch_size": prompts,
        "n_samples_per_prompt": samples,
        "num_steps_per_rollout": 1,
        "rollout_max_response_len": min(_TOKENS, config.rollout.rollout_max_response_len),
        "check_weight_update_equal": True,
        "save": "",
        "output_dir": str(folder),
        "run_name": "round",
        **(more or {}),
    }
    return {dest: _plain(value) for dest, value in kept.items()} | (
        {"finetune": True} if "load" in kept else {}
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def launch(
    config: Config, folder: Path, more: Mapping[str, Any] | None = None
) -> tuple[int, list[str]]:
    """Run the round until it ends or its deadline passes.

    Args:
        more: further flags, by name with underscores.
    Returns:
        Exit status (negative for a signal), and the lines that it printed.
    """
    flags = flags_of_a_round(config, folder, more)
    if config.extra:
        flags["custom_config_path"] = str(folder / "extra.yaml")
        # as JSON, which is YAML: quotes keep texts such as "1e-6" apart from numbers
        extra = json.dumps(_plain(config.extra), ensure_ascii=False, default=str)
        (folder / "extra.yaml").write_text(extra, encoding="utf-8")
    (folder / "round.yaml").write_text(yaml.safe_dump(flags), encoding="utf-8")
    entry = "train-async" if config.sync.async_buffer_size else "train"
    command = [*python_module("slime"), entry, "--config", str(folder / "round.yaml")]
    parent = os.getpid()
    with open(folder / "driver.log", "wb") as log:
        driver = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
        )
        try:
            status = driver.wait(deadlines.ONE_ROUND_RUN)
        except subprocess.TimeoutExpired:
            driver.terminate()
            try:
                driver.wait(deadlines.ONE_ROUND_EXIT)
            except subprocess.TimeoutExpired:
                driver.kill()
            status = -signal.SIGTERM
    return status, (folder / "driver.log").read_text(
        encoding="utf-8", errors="replace"
    ).splitlines()


def _last_row(folder: Path) -> dict[str, float]:
    """Return the metrics of the round's step; {} if there are none."""
    file = folder / "round" / "metrics.jsonl"
    rows = [orjson.loads(line) for line in file.read_bytes().splitlines()] if file.is_file() else []
    return next((row for row in reversed(rows) if _METRIC in row), {})


ROUND = Check("round", one_round, "round-failed")
