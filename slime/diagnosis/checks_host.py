"""Check the host: limits, disk, memory, GPUs and network."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from slime import deadlines
from slime.config.config import Config
from slime.diagnosis.check import CheckedRun, CheckFindings, LeftOut
from slime.errors import UserError
from slime.memory.trainer import rank_parameters
from slime.models import family_of
from slime.models.adapters import AdapterConfig, count_parameters
from slime.models.layouts import Layout
from slime.paths import fixed_folder
from slime.placement import joined_cluster, needs_engines, requests_in_flight
from slime.processes.host import (
    FEWEST_FILES,
    folder_of_sockets,
    free_host_memory,
    host_memory,
    num_cpus,
    num_gpus,
    reserve_port,
)

SHARED_MEMORY = Path("/dev/shm")
_BUCKETS = 2
#: Open files per process in addition to the connections of requests.
_OTHER_FILES = 512
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_INFINIBAND = Path("/sys/class/infiniband")
_ASK_TORCH = (
    "import torch; print(torch.version.cuda, torch.cuda.is_available(), torch.cuda.device_count())"
)
#: Packages that take seconds to compile to bytecode.
_LARGE = ("torch", "transformers", "ray", "sglang")
#: Bytes per parameter in a checkpoint: weight; Adam's states with the float32 weight.
_WEIGHT = 2
_STATES = 12


def host(case: CheckedRun, findings: CheckFindings) -> None:
    """Check RAY_TMPDIR, bytecode of large packages, and the limit of open files."""
    findings.note(
        f"{num_cpus()} cores, {free_host_memory() / 1e9:.0f} of {host_memory() / 1e9:.0f} GB free"
    )
    if case.config is None or joined_cluster(case.config) is None:
        try:
            folder_of_sockets()
        except UserError as error:
            findings.add("temporary-folder", f"{error}: {error.why}", source="RAY_TMPDIR")
    if os.environ.get("PYTHONDONTWRITEBYTECODE") and (names := _not_compiled()):
        folder = " ".join(sorted({str(path.parents[1]) for path in names.values()}))
        findings.add(
            "bytecode",
            f"PYTHONDONTWRITEBYTECODE is set, and {', '.join(names)} are not compiled",
            f"unset PYTHONDONTWRITEBYTECODE, or once: python -m compileall -q -j 0 {folder}",
            is_fatal=False,
        )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a run raises its soft limit to this
    if hard == resource.RLIM_INFINITY:
        return
    wanted = _OTHER_FILES + (requests_in_flight(case.config) if case.config is not None else 0)
    if hard < wanted:
        detail = (
            f"a process may open {hard} files, and about {wanted} are wanted for the requests "
            "under way"
        )
        findings.add("open-files", detail, is_fatal=hard < FEWEST_FILES)


def _not_compiled() -> dict[str, Path]:
    """Return large package → its __init__.py, for packages without bytecode."""
    specs = {name: importlib.util.find_spec(name) for name in _LARGE}
    begin = {
        name: Path(spec.origin) for name, spec in specs.items() if spec is not None and spec.origin
    }
    return {
        name: path
        for name, path in begin.items()
        if not Path(importlib.util.cache_from_source(str(path))).exists()
    }


def shared_memory(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that /dev/shm has room for the buckets of a push, if engines on this host receive
    weights through it."""
    config = case.run
    by_memory = needs_engines(config) and not config.debug.debug_rollout_only
    if (
        not by_memory
        or num_gpus()
        or joined_cluster(config)
        or config.sync.update_weight_transport == "disk"
    ):
        raise LeftOut("no weights go through it")
    if not SHARED_MEMORY.is_dir():
        return findings.add("shared-memory", f"there is no {SHARED_MEMORY}", is_fatal=False)
    free = shutil.disk_usage(SHARED_MEMORY).free
    bucket = config.sync.update_weight_buffer_size
    whole = _weights(config) * (4 if config.megatron.fp32 else 2)
    wanted = min(_BUCKETS * bucket, whole) if whole else _BUCKETS * bucket
    findings.note(f"{free / 1e6:,.0f} MB free, {wanted / 1e6:,.0f} MB wanted")
    if free < wanted:
        detail = (
            f"{SHARED_MEMORY} has {free / 1e6:,.0f} MB free, and a push of weights takes "
            f"{wanted / 1e6:,.0f} MB"
        )
        fits = f"--update-weight-buffer-size {max(1, int(free // (2 * _BUCKETS)))}"
        findings.add("shared-memory", detail, fits, is_fatal=False)


def _weights(config: Config) -> int:
    """Count the model's parameters; 0 if there is no config.json."""
    path = Path(config.checkpoint.hf_checkpoint or "")
    if not (path / "config.json").is_file():
        return 0
    spec = family_of(str(path), config.checkpoint.model_name).model_spec(str(path))
    return sum(held.numel for held in rank_parameters(spec, Layout(), 0))


def _saved_parameters(config: Config) -> tuple[int, int]:
    """Count the parameters of policy and critic that a checkpoint holds; (0, 0) if there is no
    config.json. A critic's output layer counts, though it has none."""
    whole = _weights(config)
    if not whole:
        return 0, 0
    path = str(config.checkpoint.hf_checkpoint)
    family = family_of(path, config.checkpoint.model_name)
    spec = family.model_spec(path)
    adapters = AdapterConfig.of(config)
    policy = count_parameters(family, spec, adapters) if adapters else whole
    if not config.algorithm.needs_critic:
        return policy, 0
    of_critic = AdapterConfig.of_critic(config, family, spec)
    return policy, count_parameters(family, spec, of_critic) if of_critic else whole


def disk(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that the folders of --save and --save-hf have room for one checkpoint."""
    config = case.run
    flags = case.run.checkpoint
    policy, critic = _saved_parameters(config)
    states = 0 if flags.no_save_optim or config.debug.debug_rollout_only else _STATES
    whole = (policy + critic) * (_WEIGHT + states)
    model = policy * _WEIGHT
    sizes = {"--save": (flags.save, whole), "--save-hf": (flags.save_hf, model)}
    for flag, (folder, nbytes) in sizes.items():
        if not folder or not nbytes:
            continue
        free = shutil.disk_usage(
            _nearest(fixed_folder(folder) if flag == "--save-hf" else Path(folder))
        ).free
        findings.note(
            f"{flag}: {free / 1e9:,.0f} GB free, a checkpoint takes {nbytes / 1e9:,.1f} GB"
        )
        if free < nbytes:
            detail = (
                f"{flag} {folder}: {free / 1e9:,.2f} GB are free there, one takes "
                f"{nbytes / 1e9:,.2f} GB"
            )
            findings.add("disk-room", detail, source=flag)
    if not findings.notes:
        raise LeftOut("nothing is saved, or the model's size is not known")


def _nearest(path: Path) -> Path:
    """Return the path itself or its nearest parent that exists."""
    found = path.absolute()
    while not found.exists():
        found = found.parent
    return found


def device(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that torch sees the GPUs of this host."""
    here = num_gpus({name: value for name, value in os.environ.items() if name != "SLIME_NUM_GPUS"})
    if not here:
        raise LeftOut("this host has no GPU: trainer and engines take process slots of its cores")
    answer = ask_torch()
    cuda, available, count = (*answer.split(), "", "", "")[:3]
    findings.note(f"{here} GPUs, torch sees {count or 0} (CUDA {cuda or 'unknown'})")
    if available != "True" or not count.isdigit() or int(count) < here:
        detail = (
            f"this host has {here} GPUs, and torch, built for CUDA {cuda or 'unknown'}, says: "
            f"{answer or 'nothing'}"
        )
        findings.add("torch-without-gpu", detail)


def ask_torch() -> str:
    """Ask torch in a subprocess: "<CUDA version> <CUDA is available> <GPUs>", or its error."""
    command = [sys.executable, "-P", "-c", _ASK_TORCH]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=deadlines.CHECKS_HOST_TORCH,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() or (done.stderr.strip().splitlines() or [""])[-1]


def network(case: CheckedRun, findings: CheckFindings) -> None:
    """Check the settings of NCCL and Gloo, InfiniBand between nodes, the host's name, and proxies
    for remote rewards."""
    for name in _INTERFACES:
        if missing := absent_interfaces(os.environ.get(name, ""), psutil.net_if_addrs()):
            there = ", ".join(sorted(psutil.net_if_addrs()))
            detail = f"{name} names {', '.join(missing)}, and this host has {there}"
            findings.add("nccl-interface", detail, source=name)
    config = case.config
    if config is None:
        return
    nodes = max(config.cluster.actor_num_nodes, config.critic.critic_num_nodes)
    if nodes > 1:
        _between_nodes(nodes, findings)
    _proxy(config, findings)
    findings.note(f"{nodes} node{'s' if nodes > 1 else ''} for the trainer")


def absent_interfaces(setting: str, there: Mapping[str, object]) -> list[str]:
    """Return the names in a NCCL_SOCKET_IFNAME that match no interface. Names are prefixes, or
    whole names after "="; after "^" they are interfaces to avoid.

    Example:
        >>> (absent_interfaces("eth,ib0", {"eth0": [], "lo": []}),
        ...  absent_interfaces("=eth", {"eth0": []}))
        (['ib0'], ['eth'])
        >>> absent_interfaces("^docker", {"lo": []})
        []
    """
    if setting.startswith("^"):
        return []
    names = [name for name in setting.removeprefix("=").split(",") if name]
    if setting.startswith("="):
        return [name for name in names if name not in there]
    return [name for name in names if not any(one.startswith(name) for one in there)]


def _between_nodes(nodes: int, findings: CheckFindings) -> None:
    if os.environ.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        detail = (
            f"NCCL_IB_DISABLE={os.environ['NCCL_IB_DISABLE']}, and the trainer has {nodes} nodes"
        )
        findings.add("infiniband", detail, source="NCCL_IB_DISABLE", is_fatal=False)
    elif not shutil.which("ibstat") and not _INFINIBAND.is_dir():
        detail = (
            f"the trainer has {nodes} nodes, and this host has neither ibstat nor {_INFINIBAND}"
        )
        findings.add("infiniband", detail, is_fatal=False)
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        findings.add(
            "hostname", f"this host is called {name}, which has no address: {error}", is_fatal=False
        )


def _proxy(config: Config, findings: CheckFindings) -> None:
    import urllib.request

    url = config.reward.rm_url
    asked = str(config.reward.rm_type or "").removeprefix("boxed_") == "remote_rm"
    parts = urlsplit(url or "")
    proxy = urllib.request.getproxies().get(parts.scheme)
    if asked and parts.hostname and proxy and not urllib.request.proxy_bypass(parts.hostname):
        without_password = proxy.rpartition("@")[2]
        detail = f"--rm-url {url} would be asked through {without_password}"
        findings.add(
            "proxy", detail, f"no_proxy={parts.hostname}", source="--rm-url", is_fatal=False
        )


def ports(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that a port can be reserved for engines and router."""
    reserved = findings.attempt(reserve_port, trouble="ports")
    if reserved is not None:
        reserved.release()
