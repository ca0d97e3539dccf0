"""Start a local Ray or join a running cluster, give every process the run's environment, and
reserve GPU slots."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray._private import node, parameter, ray_constants, services
from ray._private import utils as ray_utils
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime import deadlines
from slime.cluster.placement import GpuSlot, GpuSlots
from slime.cluster.slow_waits import stopped_parts
from slime.cluster.waiting import DeadlinePassed, NamedActor, StopRequested, wait_for
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.memory.hardware import seen_gpu_memory
from slime.placement import PlacementPlan, joined_cluster
from slime.processes import on_demand, preloaded
from slime.processes import tree as process_tree
from slime.processes.host import (
    PortReservation,
    folder_of_sockets,
    host_memory,
    num_gpus,
    python_module,
    reserve_port,
)
from slime.processes.owner import die_with_parent
from slime.redact import is_secret, redact_argv
from slime.user_code.loading import USER_FOLDERS

logger = get_logger(__name__)

_TOKEN = "RAY_AUTH_TOKEN"
_JOIN_SCRIPT = (
    "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
)

#: Frees the shared memory of killed trainers; runs if the driver, which normally does it, is dead.
_FREE_SHARED_MEMORY = python_module("slime.engines.wire.shared_memory")
#: Replaces Ray's dashboard agent (`_with_idle_dashboard_agent`).
_NO_AGENT = '--dashboard_agent_command=sh -c "while kill -0 $PPID; do sleep 1; done 2>/dev/null"'
_RUNTIME_ENV_AGENT = "--runtime_env_agent_command="
#: Names of the ports of Ray's agents. They stay reserved until the next start, since an agent may
#: bind its port long after the raylet is up.
_AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)
#: Modules (and names that import on access) that a local Ray's processes need on a CPU.
_PRELOADED = (
    "torch",
    "torch._dynamo",  # torch imports it for the first optimizer
    "transformers:AutoTokenizer",
    "numpy.random",
    # Ray imports all three in each worker
    "ray._common.pydantic_compat",
    "pydantic.v1.fields",
    "starlette.datastructures",
    "slime.cluster.rollout_actor",
    "slime.cluster.engine_actor",
    "slime.cluster.trainer_group",
    "slime.trainer.megatron.backend",
    "slime.weights.sync",
    "slime.rollout.loop",
    "slime.rollout.rewards.row_checks",
    "slime.embedded.server",
)
#: Defaults of Ray's environment variables for a local Ray.
_LOCAL_SETTINGS = {
    # metrics and usage reports cost processes and start-up time, and send data outside
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # prestarted workers wait for tasks; this driver has only actors, which get separate workers
    "RAY_prestart_worker_first_driver": "0",
    # workers would run at nice 15; any other program would starve the trainer and the engines
    "RAY_worker_niceness": "0",
}
_reserved_ports: dict[str, PortReservation] = {}
_ray_is_starting = False

#: Prefixes of the driver's environment variables that every process of a joined cluster gets (a
#: local Ray inherits all of them).
_FORWARDED = (
    "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "NVTE_", "SGLANG_", "SLIME_", "HF_", "OMP_", "TOKENIZERS_",
)  # fmt: skip


def start_ray(
    config: Config, num_local_slots: int, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Join the cluster named by --ray-address or RAY_ADDRESS (set under ``ray job submit``), else
    start a local one.

    Args:
        num_local_slots: process slots that a local Ray must offer. They may exceed the cores, since
            trainer and engines take turns.
        should_stop: polled while waiting.
    Returns:
        True if Ray was started here and must be stopped at the end.
    Raises:
        UserError: no cluster answers at the address, or the local one does not start.
        StopRequested: ``should_stop`` returned true.
    """
    # at every start this logger reports that token authentication is on, which is intended
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(
        logging.ERROR
    )
    if ray.is_initialized():
        return False  # a test or notebook has started its own cluster
    address = joined_cluster(config)
    environment = _environment(joined=address is not None)
    if address is not None:
        _check_answers(address, should_stop)
        _join(address, {"env_vars": environment})
        return False
    _provide_token()
    for name, value in _LOCAL_SETTINGS.items():
        os.environ.setdefault(name, value)
    sockets, why_elsewhere = folder_of_sockets()
    if why_elsewhere:
        logger.warning("%s: Ray keeps its sockets and logs in %s", why_elsewhere, sockets / "ray")
    try:
        on_loopback = _loopback_only(not config.cluster.listen_on_network)
        with (
            _without_side_effects(),
            _with_few_daemons(),
            _waiting_for_raylet(should_stop),
            on_loopback,
            _with_environment(environment),
        ):
            ray.init(
                # without an address Ray joins the cluster that was started on this host last
                address="local",
                job_config=_RayJob(),
                num_cpus=max(num_local_slots, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _temp_dir=str(sockets / "ray"),
                _metrics_export_port=_reserved_ports["metrics_export_port"].port,
            )
    except BaseException as error:  # also Ctrl-C: daemons that have started must be shut down
        # our monitor threads cannot report this while Ray waits for its GCS
        stopped = ", ".join(stopped_parts().values())
        ray.shutdown()
        if not isinstance(error, Exception) or isinstance(error, (UserError, StopRequested)):
            raise
        raise UserError(
            "Ray does not start on this host",
            why=(f"{stopped} is stopped (SIGSTOP); " if stopped else "")
            + (str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__),
            fix="begin again: a crowded host passes Ray's deadlines; its logs: "
            f"{sockets}/ray/session_latest/logs",
        ) from error
    return True


def is_ray_starting() -> bool:
    """Return whether this process is in `ray.init`, which may wait in C++ without handling
    signals."""
    return _ray_is_starting


def dead_daemons() -> list[str]:
    """Return the names of dead daemons ("raylet", "gcs_server") without which this process's local
    Ray can start nothing."""
    local = ray._private.worker._global_node
    needed = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    return (
        [kind for kind, _ in local.dead_processes() if kind in needed] if local is not None else []
    )


def _provide_token() -> None:
    """Set a token for the local Ray in the environment, unless the user has one.

    Ray would otherwise store a new token in the home folder. Every later ``ray start --head`` on
    this host would then require it, and refuse ``ray job submit``, which sends none by itself.
    """
    needs_token = (os.environ.get("RAY_AUTH_MODE") or "token").lower() == "token"
    has_token = any(os.environ.get(name) for name in (_TOKEN, f"{_TOKEN}_PATH"))
    if needs_token and not has_token and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ[_TOKEN] = secrets.token_hex(32)


def _check_answers(address: str, should_stop: Callable[[], bool]) -> None:
    """Raise unless a child process can join the cluster.

    `ray.init` waits in C++ and holds Python's lock. In this process it would ignore signals, for
    ten minutes if no cluster answers.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", _JOIN_SCRIPT, address],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    end = time.monotonic() + deadlines.RAY_SESSION_JOIN
    try:
        while True:
            try:
                errors = child.communicate(timeout=deadlines.RAY_SESSION_JOIN_POLL)[1]
                break
            except subprocess.TimeoutExpired:
                if should_stop():
                    raise StopRequested("joining the Ray cluster") from None
                if time.monotonic() > end:
                    raise _no_cluster(
                        address, f"it did not answer within {deadlines.RAY_SESSION_JOIN:.0f} s"
                    ) from None
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        raise _no_cluster(
            address, (errors.strip().splitlines() or [f"status {child.returncode}"])[-1]
        )


def _no_cluster(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address}",
        why=why,
        fix="start one with 'ray start --head', or unset --ray-address and RAY_ADDRESS to run here",
    )


def _join(address: str, environment: dict[str, Any]) -> None:
    # A job of `ray job submit` has its own environment, often with PYTHONPATH; ours includes it.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    try:
        with _without_side_effects():
            ray.init(
                address=address,
                job_config=_RayJob(),
                runtime_env=environment,
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, str(error).strip().splitlines()[0]) from error


class _Daemon(services.ConsolePopen):
    """A daemon of Ray in its own session. The raylet also runs under `slime.processes.tree`, which
    ends all its descendants with it.

    Ray starts daemons in the driver's process group, where a SIGTERM for the group (``timeout``,
    Slurm, a supervisor) or a closed terminal would end them before the driver can save a
    checkpoint. Workers join the session of the daemon that starts them. All of them still die with
    the driver.
    """

    raylet: ClassVar[subprocess.Popen[bytes] | None] = None

    def __init__(self, args: Sequence[str], **options: Any) -> None:
        options["start_new_session"] = True
        self._is_held = Path(args[0]).name == "raylet"
        if not self._is_held:
            super().__init__(args, **options)
            return
        type(self).raylet = self
        script = [sys.executable, "-S", "-E", process_tree.__file__]
        super().__init__(script, **options | {"stdin": subprocess.PIPE})
        assert self.stdin is not None
        request = {
            "owner": os.getpid(),
            "command": _preloaded(
                _with_idle_dashboard_agent(args), options["env"].get("LD_PRELOAD", "")
            ),
            "last_command": _FREE_SHARED_MEMORY,
        }
        with (
            self.stdin as pipe,
            suppress(BrokenPipeError),
        ):  # the raylet has died, which Ray will notice
            pipe.write(json.dumps(request).encode())

    def kill(self) -> None:
        """End the raylet with its tree, which a SIGKILL would leave running."""
        if self._is_held:
            self.terminate()
            self.send_signal(signal.SIGCONT)  # it may have been stopped
            with suppress(subprocess.TimeoutExpired):
                self.wait(deadlines.RAY_SESSION_KILL)
        if self.poll() is None:
            super().kill()


def _options(args: Sequence[str]) -> dict[str, str]:
    return dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)


def _with_idle_dashboard_agent(args: Sequence[str]) -> list[str]:
    """Return the raylet's command with an idle process in place of the dashboard agent, and with
    the agent for runtime environments started on demand; write the files with the agents' ports.

    The raylet exits if an agent is not alive, or if the files with the agents' ports do not appear
    within 15 seconds. A real agent imports Ray first, which takes longer on a crowded host.
    """
    options = _options(args)
    for name, reserved in _reserved_ports.items():
        port_file = Path(options["--session_dir"]) / f"{name}_{options['--node_id']}"
        port_file.write_text(str(reserved.port))
    new = [_NO_AGENT if arg.startswith("--dashboard_agent_command=") else arg for arg in args]
    return [
        _on_demand(arg, options["--node_ip_address"]) if arg.startswith(_RUNTIME_ENV_AGENT) else arg
        for arg in new
    ]


def _on_demand(option: str, host: str) -> str:
    port = str(_reserved_ports["runtime_env_agent_port"].port)
    script = [sys.executable, "-S", "-E", on_demand.__file__]
    waits = subprocess.list2cmdline([*script, host, port, str(deadlines.RAY_SESSION_AGENT_POLL)])
    return f"{_RUNTIME_ENV_AGENT}{waits} {option.removeprefix(_RUNTIME_ENV_AGENT)}"


def _preloaded(args: list[str], libraries: str) -> list[str]:
    """Return the raylet's command, wrapped in the preloaded process that forks the raylet's
    workers.

    Unchanged if the host has a GPU (CUDA does not survive a fork) and with SLIME_PRELOAD=0.

    Args:
        libraries: LD_PRELOAD for the raylet (Ray's jemalloc), which its workers do not get.
    """
    options = _options(args)
    resources = options.get("--static_resource_list", "").split(",")
    if os.environ.get("SLIME_PRELOAD") == "0" or "GPU" in resources or num_gpus() > 0:
        return args
    folder = Path(options["--session_dir"]) / "sockets" / "own"
    folder.mkdir(mode=0o700)
    path = str(folder / "fork")
    client = [sys.executable, "-S", "-E", preloaded.__file__, "--worker", path]
    option = "--python_worker_command="
    args = [
        option + subprocess.list2cmdline(client) + " " + arg.removeprefix(option)
        if arg.startswith(option)
        else arg
        for arg in args
    ]
    variables = [
        f"{preloaded.MODULES}={','.join(_PRELOADED)}",
        # Ray's C++ code reads the worker's job as it is imported; this driver's is the first one
        f"RAY_JOB_ID={ray.JobID.from_int(1).hex()}",
    ]
    server = ["env", "--unset=LD_PRELOAD", *variables, sys.executable, preloaded.__file__, path]
    if libraries:
        server += ["env", f"LD_PRELOAD={libraries}"]
    return [*server, *args]


@contextmanager
def _replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    originals = {name: getattr(owner, name) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


class _RayJob(JobConfig):
    """A job configuration that keeps the driver's working directory off the front of the workers'
    import path, where a user's ``random.py`` would hide Python's own. `slime.user_code.loading`
    appends it instead."""

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        return super()._serialize()


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """Keep `ray.init` from changing this process: signal handlers stay those of
    `slime.run.stopping`, daemons leave the process group, and Ray's table of jobs gets a command
    line without secrets."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with (
            _replaced(services, ConsolePopen=_Daemon),
            _replaced(
                ray_utils,
                set_sigterm_handler=lambda handler: None,
                # it would import all that the dashboard needs, to see whether it can run
                get_dashboard_dependency_error=lambda: ImportError("no dashboard is started"),
                get_entrypoint_name=lambda: " ".join(redact_argv(sys.orig_argv)),
            ),
        ):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            # replaces the handler of Ray's C++ code, which prints a stack
            signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)


def _with_few_daemons() -> AbstractContextManager[None]:
    """Keep `ray.init` from starting daemons that a run does not use: the autoscaler's monitor, the
    log monitor and the HTTP API server. Each imports Ray, and the launch would wait for the last
    one."""
    names = ("start_monitor", "start_log_monitor", "start_api_server")
    return _replaced(node.Node, **dict.fromkeys(names, lambda self, **_: None))


@contextmanager
def _waiting_for_raylet(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Make `ray.init` wait longer for the raylet than Ray does: until
    `deadlines.RAY_SESSION_START`, while the raylet lives and the run is not asked to stop. Also
    reserve the ports of Ray's agents, one of which is fixed by default."""
    global _reserved_ports, _ray_is_starting
    _reserved_ports = {name: reserve_port() for name in _AGENT_PORTS}
    ports: dict[str, Any] = {name: reserved.port for name, reserved in _reserved_ports.items()}
    rays_get_node = services.get_node
    end = time.monotonic() + deadlines.RAY_SESSION_START

    def get_node(gcs_address: str, node_id: str) -> dict[str, Any]:
        while True:
            try:
                return dict(rays_get_node(gcs_address, node_id))
            except RuntimeError as error:  # the raylet is not up yet
                if should_stop():
                    raise StopRequested("starting Ray") from error
                if _Daemon.raylet is not None and _Daemon.raylet.poll() is not None:
                    raise Exception("The raylet ended as it started.") from error
                if time.monotonic() > end:
                    raise

    _ray_is_starting = True
    try:
        with (
            _replaced(parameter, RayParams=partial(parameter.RayParams, **ports)),
            _replaced(services, get_node=get_node),
        ):
            yield
    finally:
        _ray_is_starting = False


@contextmanager
def _loopback_only(wanted: bool) -> Iterator[None]:
    """Make Ray, and everything that uses its addresses (engines, router, process groups), listen on
    loopback only. Ray does this by default on macOS and Windows; it reads the variable when it is
    imported, here and in its daemons."""
    if not wanted:
        yield
        return
    with (
        _with_environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}),
        _replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
    ):
        yield


@contextmanager
def _with_environment(environment: dict[str, str]) -> Iterator[None]:
    """Set environment variables for a local Ray's processes to inherit. As a runtime environment
    they would cost each worker an extra Python that imports Ray, half a second of CPU."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _environment(joined: bool) -> dict[str, str]:
    """Return the environment variables of every actor: the import path, and for a ``joined``
    cluster also the forwarded variables."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    # `python script.py` puts the script's folder first on sys.path: hooks may be modules there
    user_folders = dict.fromkeys([os.getcwd(), *filter(None, sys.path[:1])])
    variables = {
        "PYTHONPATH": ":".join([root, *([known] if known else [])]),
        USER_FOLDERS: ":".join(user_folders),
    }
    if joined:
        variables |= {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_FORWARDED) and not is_secret(name)
        }
    return variables


# -- slots -----------------------------------------------------------------------------------------


@ray.remote(num_cpus=0.01)
def _slot_of_bundle(bundle: int) -> GpuSlot:
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    node = ray.get_runtime_context().get_node_id()
    memory = seen_gpu_memory() if gpus else None
    address = ray.util.get_node_ip_address()
    return GpuSlot(bundle, address, node, ",".join(gpus), memory, host_memory())


def reserve(
    plan: PlacementPlan, timeout: float, should_stop: Callable[[], bool] = lambda: False
) -> GpuSlots:
    """Reserve the plan's slots, waiting at most ``timeout`` seconds.

    Raises:
        UserError: the cluster has too few slots, or they did not become free in time.
        StopRequested: ``should_stop`` returned true.
    """
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    kind = "GPU" if on_gpu else "CPU"
    things = "GPUs" if on_gpu else "process slots (CPUs)"
    num_in_cluster = ray.cluster_resources().get(kind, 0)
    if num_in_cluster < plan.total:
        raise UserError(
            f"this run needs {plan.total} {things}, the Ray cluster has {num_in_cluster:g}",
            why=plan.formula,
            fix="lower --actor-num-gpus-per-node or --rollout-num-gpus, pass --colocate to share "
            "GPUs, or add nodes",
        )
    bundle = {"GPU": 1, "CPU": 1} if on_gpu else {"CPU": 1}
    group = placement_group([dict(bundle) for _ in range(plan.total)], strategy="PACK")
    started = time.monotonic()
    try:
        _wait_for(group, timeout, should_stop)
        if on_gpu:
            asked = {
                NamedActor(f"slot {i}"): _slot_of_bundle.options(
                    num_gpus=0.01,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=i
                    ),
                ).remote(i)
                for i in range(plan.total)
            }
            places = wait_for(asked, "asking where the slots are", timeout, should_stop)
        else:
            places = _cpu_slots(group)
    except DeadlinePassed as error:
        free = ray.available_resources().get(kind, 0)
        remove_placement_group(group)
        raise UserError(
            f"{plan.total} {things} did not become free within {timeout:.0f} s",
            why=f"{plan.formula}; the cluster has {num_in_cluster:g}, of which {free:g} are free: "
            "another job holds the rest",
            fix="end the other job, wait, or raise --placement-timeout",
        ) from error
    except BaseException:
        remove_placement_group(group)
        raise
    ordered = sorted(places, key=lambda place: (_ip_key(place.ip), place.node, place.gpu))
    logger.info("placement: %s, ready after %.1f s", plan.formula, time.monotonic() - started)
    return GpuSlots(group, ordered, on_gpu)


def _wait_for(group: PlacementGroup, timeout: float, should_stop: Callable[[], bool]) -> None:
    """Wait until the slots are reserved. (`PlacementGroup.ready` would start a worker, which takes
    2 s of CPU.)"""
    began = time.monotonic()
    logged = 0.0
    while not group.wait(min(0.5, timeout)):
        if should_stop():
            raise StopRequested("placement")
        if (waited := time.monotonic() - began) >= timeout:
            raise DeadlinePassed(f"the slots were not reserved within {timeout:.0f} s")
        if waited >= logged + deadlines.SLOW_WAITS_LINE:
            logged = waited
            logger.info(
                "placement: waiting for %d slots for %.0f s, another job holds some of them "
                "(--placement-timeout %.0f)",
                len(group.bundle_specs),
                waited,
                timeout,
            )


def _cpu_slots(group: PlacementGroup) -> list[GpuSlot]:
    """Return the slots of a group without GPUs; only a process on the slot can find out its GPU."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [GpuSlot(bundle, addresses[node], node, "") for bundle, node in sorted(nodes.items())]


def _ip_key(address: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in address.split("."))
