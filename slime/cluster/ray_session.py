"""What a run has from Ray: a local one or the running one, its environment in every process, and
reserved slots."""

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
from slime.processes import tree as process_tree
from slime.processes.host import PortReservation, folder_of_sockets, python_module, reserve_port
from slime.processes.owner import die_with_parent
from slime.redact import is_secret, redact_argv
from slime.user_code.loading import USER_FOLDERS

logger = get_logger(__name__)

_TOKEN = "RAY_AUTH_TOKEN"
_JOIN_SCRIPT = (
    "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
)

#: What trainers that were killed leave, besides processes; run where no driver is there to do it.
_FREE_SHARED_MEMORY = python_module("slime.engines.wire.shared_memory")
_NO_AGENT = '--dashboard_agent_command=sh -c "exec sleep infinity"'
#: Ports of Ray's agents, reserved until the next start: the raylet does not wait for an agent to
#: take its own.
_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "metrics_export_port",
    "runtime_env_agent_port",
)
_ports: dict[str, PortReservation] = {}
_ray_is_starting = False

#: Variables of the driver that every process gets when the cluster was there before (a local Ray
#: inherits all).
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


def start_ray(
    config: Config, num_local_slots: int, should_stop: Callable[[], bool] = lambda: False
) -> bool:
    """Join the cluster named by --ray-address or RAY_ADDRESS (set under ``ray job submit``), else
    start one here.

    Args:
        num_local_slots: process slots a local Ray must offer; cores are oversubscribed when there
            are fewer, since trainer and engines take turns.
    Returns:
        True when Ray was started here and must be stopped at the end.
    Raises:
        UserError: no cluster answers at the address, or none starts here. StopRequested.
    """
    # It says on every start that Ray's own token authentication is on, which is what we want.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(
        logging.ERROR
    )
    if ray.is_initialized():
        return False  # a test or notebook that brought its own cluster
    address = joined_cluster(config)
    environment = _environment(joined=address is not None)
    if address is not None:
        _check_answers(address, should_stop)
        _join(address, {"env_vars": environment})
        return False
    _provide_token()
    # Ray's own metrics and usage reporting cost processes and start-up time, and report to the
    # outside.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    # Workers that wait for tasks of a driver: ours are actors, each of which gets a worker of its
    # own.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray runs its workers at nice 15, where any other program would starve trainer and engines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    sockets, not_there = folder_of_sockets()
    if not_there:
        logger.warning("%s: Ray keeps its sockets and logs in %s", not_there, sockets / "ray")
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
                # without it Ray joins whatever cluster was started on this host last
                address="local",
                job_config=_RayJob(),
                num_cpus=max(num_local_slots, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                _temp_dir=str(sockets / "ray"),
                _metrics_export_port=_ports["metrics_export_port"].port,
            )
    except BaseException as error:  # Ctrl-C, for one: what is up of it by then is up
        stopped = ", ".join(
            stopped_parts().values()
        )  # while Ray waits for its GCS, no thread of ours can say so
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
    """Whether this process is in `ray.init`, which may wait in C++ and hear no signal."""
    return _ray_is_starting


def dead_daemons() -> list[str]:
    """Name the dead daemons without which a Ray of this process can start nothing:
    "raylet", "gcs_server"."""
    local = ray._private.worker._global_node
    needed = (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER)
    return (
        [kind for kind, _ in local.dead_processes() if kind in needed] if local is not None else []
    )


def _provide_token() -> None:
    """Where Ray finds no token for the cluster that it starts, it leaves one in the home folder,
    for good: every later ``ray start --head`` on this host then asks for it, and ``ray job
    submit``, which sends none by itself, is refused.
    """
    is_asked_for = (os.environ.get("RAY_AUTH_MODE") or "token").lower() == "token"
    given = any(os.environ.get(name) for name in (_TOKEN, f"{_TOKEN}_PATH"))
    if is_asked_for and not given and not (Path.home() / ".ray" / "auth_token").exists():
        os.environ[_TOKEN] = secrets.token_hex(32)


def _check_answers(address: str, should_stop: Callable[[], bool]) -> None:
    """Have a child join the cluster first. `ray.init` waits in C++ with Python's lock held: in this
    process it would hear no signal, for ten minutes where nobody answers."""
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
                said = child.communicate(timeout=deadlines.RAY_SESSION_LOOK)[1]
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
            address, (said.strip().splitlines() or [f"status {child.returncode}"])[-1]
        )


def _no_cluster(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster answers at {address}",
        why=why,
        fix="start one with 'ray start --head', or unset --ray-address and RAY_ADDRESS to run here",
    )


def _join(address: str, environment: dict[str, Any]) -> None:
    # Under `ray job submit` the job has an environment too, PYTHONPATH often in it; ours holds that
    # already.
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
    """A daemon of Ray that leads a session, and a raylet that ends with all that came of it
    (`slime.processes.tree`).

    Ray starts them in the driver's process group, where a SIGTERM for the group (``timeout``,
    Slurm, a supervisor) or a terminal that closes would end them before the driver can save a
    checkpoint. Workers are in the session of the daemon that starts them. All still die with the
    driver.
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
            "command": _with_idle_dashboard_agent(args),
            "last_command": _FREE_SHARED_MEMORY,
        }
        with self.stdin as pipe, suppress(BrokenPipeError):  # it is killed already: Ray will notice
            pipe.write(json.dumps(request).encode())

    def kill(self) -> None:
        """End the raylet with its tree. SIGKILL would leave the tree to the host."""
        if self._is_held:
            self.terminate()
            self.send_signal(signal.SIGCONT)  # should somebody have stopped it
            with suppress(subprocess.TimeoutExpired):
                self.wait(deadlines.RAY_SESSION_KILLED)
        if self.poll() is None:
            super().kill()


def _with_idle_dashboard_agent(args: Sequence[str]) -> list[str]:
    """The raylet's command, with a process that does nothing in the place of the agent that serves
    its metrics.

    The raylet insists on an agent that lives, and ends itself where ports of agents are not in
    files of its session within 15 seconds; one that imports Ray on a crowded host takes longer.
    """
    given = dict(arg.split("=", 1) for arg in args if arg.startswith("--") and "=" in arg)
    for name, reserved in _ports.items():
        (Path(given["--session_dir"]) / f"{name}_{given['--node_id']}").write_text(
            str(reserved.port)
        )
    return [_NO_AGENT if arg.startswith("--dashboard_agent_command=") else arg for arg in args]


@contextmanager
def _replaced(owner: Any, **ours: Any) -> Iterator[None]:
    kept = {name: getattr(owner, name) for name in ours}
    try:
        for name, value in ours.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(owner, name, value)


class _RayJob(JobConfig):
    """A job whose working directory Ray does not put first on its workers' import path, where a
    user's ``random.py`` would replace Python's own. `slime.user_code.loading` puts it last."""

    def _serialize(self) -> str:
        self._py_driver_sys_path.clear()
        return super()._serialize()


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """`ray.init` leaves the signals of this process alone, which are `slime.run.stopping`'s, and
    stays out of its group. Ray's table of jobs gets the command line without secrets."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with (
            _replaced(services, ConsolePopen=_Daemon),
            _replaced(
                ray_utils,
                set_sigterm_handler=lambda handler: None,
                get_entrypoint_name=lambda: " ".join(redact_argv(sys.orig_argv)),
            ),
        ):
            yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, on_sigterm or signal.SIG_DFL
            )  # over that of Ray's C++, which prints a stack


def _with_few_daemons() -> AbstractContextManager[None]:
    """`ray.init` starts no process for what nobody asks here: nodes to be added, workers' words on
    this terminal, and a list of actors by HTTP. Each imports Ray, and the launch would wait for the
    last one."""
    names = ("start_monitor", "start_log_monitor", "start_api_server")
    return _replaced(node.Node, **dict.fromkeys(names, lambda self, **_: None))


@contextmanager
def _waiting_for_raylet(should_stop: Callable[[], bool]) -> Iterator[None]:
    """Reserve the ports of Ray's agents, one of which is fixed otherwise, and wait longer than Ray
    does for the raylet to come up: as long as it lives, and nobody asks the run to stop."""
    global _ports, _ray_is_starting
    _ports = {name: reserve_port() for name in _PORTS}
    ports: dict[str, Any] = {name: reserved.port for name, reserved in _ports.items()}
    ask = services.get_node
    end = time.monotonic() + deadlines.RAY_SESSION_START

    def get_node(gcs_address: str, node_id: str) -> dict[str, Any]:
        while True:
            try:
                return dict(ask(gcs_address, node_id))
            except RuntimeError as error:  # not yet; Ray itself catches it
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
    """Ray and what goes by its addresses (engines, router, process groups) listen on loopback
    alone. Ray knows this as its way on systems whose firewalls ask, and looks the variable up when
    it is imported: here, and in its daemons."""
    if not wanted:
        yield
        return
    name = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        del os.environ[name]
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _with_environment(environment: dict[str, str]) -> Iterator[None]:
    """What a local Ray's processes inherit, its agents too. As a runtime environment it would cost
    each worker a Python before its own, that imports Ray, too: half a second of CPU."""
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
    """Environment of every actor: the import path (user functions live next to the script), and
    forwarded variables."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    # a recipe or `python script.py` puts its folder first on sys.path: hooks given by path are
    # found there
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


# -- slots
# --------------------------------------------------------------------------------------------------


@ray.remote(num_cpus=0.01)
def _slot_of_bundle(bundle: int) -> GpuSlot:
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    node = ray.get_runtime_context().get_node_id()
    memory = seen_gpu_memory() if gpus else None
    return GpuSlot(bundle, ray.util.get_node_ip_address(), node, ",".join(gpus), memory)


def reserve(
    plan: PlacementPlan, timeout: float, should_stop: Callable[[], bool] = lambda: False
) -> GpuSlots:
    """Reserve the plan's slots, waiting at most ``timeout`` seconds.

    Raises:
        UserError: the cluster does not have that many, or they did not become free in time.
            StopRequested.
    """
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    kind = "GPU" if on_gpu else "CPU"
    there = ray.cluster_resources().get(kind, 0)
    if there < plan.total:
        raise UserError(
            f"this run needs {plan.total} {_slots(on_gpu)}, the Ray cluster has {there:g}",
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
            options = [_on_bundle(group, slot, on_gpu) for slot in range(plan.total)]
            places = {
                NamedActor(f"slot {i}"): _slot_of_bundle.options(**own).remote(i)
                for i, own in enumerate(options)
            }
            found = wait_for(places, "asking where the slots are", timeout, should_stop)
        else:
            found = _places(group)
    except DeadlinePassed as error:
        free = ray.available_resources().get(kind, 0)
        remove_placement_group(group)
        raise UserError(
            f"{plan.total} {_slots(on_gpu)} did not become free within {timeout:.0f} s",
            why=f"{plan.formula}; the cluster has {there:g}, of which {free:g} are free: another "
            "job holds the rest",
            fix="end the other job, wait, or raise --placement-timeout",
        ) from error
    except BaseException:
        remove_placement_group(group)
        raise
    ordered = sorted(found, key=lambda place: (_ip_key(place.ip), place.node, place.gpu))
    logger.info("placement: %s, ready after %.1f s", plan.formula, time.monotonic() - started)
    return GpuSlots(group, ordered, on_gpu)


def _wait_for(group: PlacementGroup, timeout: float, should_stop: Callable[[], bool]) -> None:
    """Until the slots are reserved. `PlacementGroup.ready` would start a worker to tell so, 2 s of
    CPU."""
    began = time.monotonic()
    said = 0.0
    while not group.wait(min(0.5, timeout)):
        if should_stop():
            raise StopRequested("placement")
        if (waited := time.monotonic() - began) >= timeout:
            raise DeadlinePassed(f"the slots were not reserved within {timeout:.0f} s")
        if waited >= said + deadlines.SLOW_WAITS_QUIET:
            said = waited
            logger.info(
                "placement: waiting for %d slots for %.0f s, another job holds some of them "
                "(--placement-timeout %.0f)",
                len(group.bundle_specs), waited, timeout,
            )  # fmt: skip


def _places(group: PlacementGroup) -> list[GpuSlot]:
    """Return the places of slots without a GPU, whose number only a process there knows."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [GpuSlot(bundle, addresses[node], node, "") for bundle, node in sorted(nodes.items())]


def _on_bundle(group: PlacementGroup, index: int, on_gpu: bool) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=index
    )
    return {"scheduling_strategy": strategy, **({"num_gpus": 0.01} if on_gpu else {})}


def _slots(on_gpu: bool) -> str:
    return "GPUs" if on_gpu else "process slots (CPUs)"


def _ip_key(address: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in address.split("."))
