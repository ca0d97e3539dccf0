"""Start a local Ray or join the running one, so that environment and imports reach every process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from slime.cluster.reaper import start_reaper
from slime.config import Config
from slime.errors import UserError
from slime.files import is_secret_variable
from slime.log import get_logger
from slime.placement import joined_cluster

logger = get_logger(__name__)

#: The reaper of this process; it ends by itself when the process does.
_reaper: subprocess.Popen[bytes] | None = None

#: Variables of the driver that every process gets when the cluster was there before (a local Ray inherits all).
_FORWARDED = (
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_",
    "SGLANG_",
    "SLIME_",
    "HF_",
    "OMP_",
    "TOKENIZERS_",
)


def start_ray(config: Config, num_local_slots: int) -> bool:
    """Join the cluster named by --ray-address or RAY_ADDRESS (set under ``ray job submit``), else start one here.

    Args:
        num_local_slots: process slots a local Ray must offer; cores are oversubscribed when there are fewer,
            since trainer and engines take turns.
    Returns:
        True when Ray was started here and must be stopped at the end.
    """
    # It says on every start that Ray's own token authentication is on, which is what we want.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    if ray.is_initialized():
        return False  # a test or notebook that brought its own cluster
    address = joined_cluster(config)
    environment = {"env_vars": _environment(joined=address is not None)}
    if address is not None:
        _join(address, environment)
        return False
    # Ray's own metrics and usage reporting cost processes and start-up time, and report to the outside.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    global _reaper
    if _reaper is None or _reaper.poll() is not None:
        _reaper = start_reaper()
    with _own_signal_handlers():
        ray.init(
            address="local",  # without it Ray joins whatever cluster was started on this host last
            num_cpus=max(num_local_slots, os.cpu_count() or 1),
            include_dashboard=False,
            runtime_env=environment,
            log_to_driver=False,
            logging_level=logging.WARNING,
        )
    return True


def _join(address: str, environment: dict[str, Any]) -> None:
    # Under `ray job submit` the job has an environment too, PYTHONPATH often in it; ours holds that already.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    try:
        with _own_signal_handlers():
            ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster answers at {address}",
            why=str(error).strip().splitlines()[0],
            fix="start one with 'ray start --head', or unset --ray-address and RAY_ADDRESS to run here",
        ) from error


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """`ray.init` takes SIGTERM for itself and would end the program; here it means: save, then leave."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _environment(joined: bool) -> dict[str, str]:
    """Environment of every actor: the import path (user functions live next to the script), and forwarded variables."""
    here = [str(Path(__file__).resolve().parents[2]), os.getcwd()]
    # a recipe or `python script.py` puts its folder first on sys.path: hooks given by path are found there
    if sys.path and sys.path[0] and sys.path[0] not in here:
        here.append(sys.path[0])
    known = os.environ.get("PYTHONPATH", "")
    variables = {"PYTHONPATH": ":".join([*here, *([known] if known else [])])}
    if joined:
        variables |= {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED) and not is_secret_variable(name)
        }
    return variables
