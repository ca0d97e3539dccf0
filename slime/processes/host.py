"""Facts about this host, found without torch: processors, memory, limits of open files, folders,
addresses, free ports and proxy settings."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import random
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from slime.errors import UserError

_MEMINFO = Path("/proc/meminfo")
_FIRST_PORT = 15000  # below the kernel's ephemeral range: no outgoing connection takes one
_LAST_PORT = 32000
_PORT_TRIES = 200
#: Limits of open files: enough for any run, and the least with which a run starts.
MANY_FILES = 65536
FEWEST_FILES = 256
#: A socket's path may have 107 bytes; Ray appends /ray/session_<26
#: characters>_<pid>/sockets/plasma_store to the folder, 68 bytes.
_LONGEST_FOLDER = 107 - 68
_SHORT_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
#: Bytes written to test a folder: about what Ray logs while it starts.
_TRIED_BYTES = 1 << 20
_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def num_gpus(environ: dict[str, str] | None = None, devices: Path = Path("/dev")) -> int:
    """Return the number of this host's GPUs that the process may use: ``SLIME_NUM_GPUS`` if set,
    else the NVIDIA device nodes that ``CUDA_VISIBLE_DEVICES`` allows.

    Example:
        >>> num_gpus({"SLIME_NUM_GPUS": "4"})
        4

    Raises:
        UserError: SLIME_NUM_GPUS is not a number.
    """
    env = os.environ if environ is None else environ
    given = env.get("SLIME_NUM_GPUS", "")
    if given.isdigit():
        return int(given)
    if given:
        raise UserError(
            f"SLIME_NUM_GPUS is {given!r}",
            fix="set it to the number of GPUs of a host, or unset it",
        )
    installed = sum(1 for node in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name))
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or installed == 0:
        return installed
    names = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(installed, len(names))


def version_of(text: str) -> tuple[int, ...]:
    """Return the release part of a version.

    Example:
        >>> version_of("0.5.12.post1")
        (0, 5, 12)
    """
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group(0).split(".")) if found else ()


def installed_release(package: str) -> tuple[int, ...] | None:
    """Return the release of an installed package without importing it; None where there is none."""
    try:
        return version_of(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def num_cpus() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory() -> float:
    """Return the bytes of this host's memory, or of its container's limit if that is lower."""
    limits = [_number(limit) for limit, _ in _CGROUPS]
    return min([_meminfo("MemTotal"), *(limit for limit in limits if limit is not None)])


def free_host_memory() -> float:
    """Return the bytes of memory that new processes can allocate."""
    free = [_meminfo("MemAvailable")]
    for limit, used in _CGROUPS:
        most = _number(limit)
        now = _number(used)
        if most is not None and now is not None:
            free.append(max(0.0, most - now))
    return min(free)


def _meminfo(key: str) -> float:
    if not _MEMINFO.exists():
        return float("inf")
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith(key + ":"):
            return float(line.split()[1]) * 1024
    return float("inf")


def _number(path: Path) -> float | None:
    """Return the number in a file of the control group; None if there is no file or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return float(text) if text.isdigit() and int(text) < 1 << 60 else None


# -- limits of a process ---------------------------------------------------------------------------


def raise_open_files() -> int:
    """Raise the soft limit of open files towards the hard limit, for this process and its future
    children.

    Returns:
        The new soft limit.
    Raises:
        UserError: the hard limit is too low for a run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if most < FEWEST_FILES:
        raise UserError(
            f"a process may open {hard} files here, and a run needs at least {FEWEST_FILES}",
            why="its processes hold connections to each other, and one for each request under way",
            fix=f"ulimit -Hn {MANY_FILES}, as root; docker run --ulimit nofile={MANY_FILES}; "
            "LimitNOFILE= of systemd",
        )
    return soft


def folder_of_sockets(environ: Mapping[str, str] = os.environ) -> tuple[Path, str]:
    """Return the folder for Ray's sockets and logs, and the reason why it is not TMPDIR ("" if it
    is).

    Raises:
        UserError: RAY_TMPDIR names an unsuitable folder, or no folder is suitable.
    """
    named = environ.get("RAY_TMPDIR")
    wanted = Path(named or environ.get("TMPDIR") or "/tmp").absolute()
    reason = _why_no_sockets(wanted)
    if not reason:
        return wanted, ""
    others = [] if named else [folder for folder in _SHORT_FOLDERS if folder != wanted]
    for folder in others:
        if not _why_no_sockets(folder):
            return folder, reason
    raise UserError(
        f"Ray cannot keep its sockets in {wanted}",
        why=reason + ("" if named else f"; nor in {', '.join(map(str, others))}"),
        fix=f"export RAY_TMPDIR=<a folder that can be written, of at most {_LONGEST_FOLDER} bytes>",
    )


def _why_no_sockets(folder: Path) -> str:
    length = len(os.fsencode(folder))
    if length > _LONGEST_FOLDER:
        return f"{folder} has {length} bytes, and names of sockets leave room for {_LONGEST_FOLDER}"
    nearest = folder / "ray"  # may belong to another user: the first one to start Ray creates it
    while not nearest.is_dir() and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        _write_to(nearest)
    except OSError as error:
        return f"{nearest} cannot be written: {error.strerror}"
    return ""


def _write_to(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_TRIED_BYTES))
        file.flush()


# -- address and ports -----------------------------------------------------------------------------


def own_addresses() -> set[str]:
    """Return every address of this host's network interfaces."""
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def slime_command() -> str:
    """Return the command to show to users: "slime" if it is on the PATH, else this interpreter with
    ``-m slime``."""
    return "slime" if shutil.which("slime") else f"{sys.executable} -m slime"


def python_module(name: str) -> list[str]:
    """Return the start of a command line that runs a module of this package in another process.

    ``-P`` keeps the working directory off the import path: a user's ``random.py`` there would
    replace Python's own. A clone that is not installed is found only through that directory.
    """
    is_in_clone = os.getcwd() == str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-m" if is_in_clone else "-Pm", name]


def without_working_directory() -> AbstractContextManager[None]:
    """Keep the working directory off the import path of processes that multiprocessing starts."""
    return environment_variable("PYTHONSAFEPATH", "1")


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of this process's environment within the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def past_proxies(hosts: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables that make HTTP clients bypass a configured proxy for ``hosts``
    and localhost. Our own clients of engines ignore proxies anyway.

    Example:
        >>> environment = {"NO_PROXY": "intranet", "HTTP_PROXY": "http://proxy:3128"}
        >>> past_proxies(["10.0.0.7"], environment)["no_proxy"]
        'intranet,localhost,127.0.0.1,10.0.0.7'
    """
    known = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    names = dict.fromkeys([*filter(None, known.split(",")), "localhost", "127.0.0.1", *hosts])
    # libraries differ in which of the two they read
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(names))


@dataclass
class PortReservation:
    """A reserved port, held until ``release``."""

    port: int
    _lock: IO[str]

    def release(self) -> None:
        self._lock.close()  # closing drops the lock; the empty file stays and is reused


def reserve_port(host: str = "0.0.0.0", port: int | None = None) -> PortReservation:
    """Reserve a free TCP port on this node with a lock file and a trial bind.

    The lock keeps servers that start on one host at the same time from choosing the same port,
    which would end in "Max retries exceeded … /get_model_info".

    Args:
        port: reserve this port instead of any free one.
    Raises:
        UserError: no free port was found, or ``port`` is taken.
    """
    folder = Path(tempfile.gettempdir()) / f"slime-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    # not of the global generator: programs that seed it alike would all try the same ports
    ports = random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), _PORT_TRIES)
    tried = ports if port is None else [port]
    for number in tried:
        lock = open(folder / f"{number}.lock", "w")  # noqa: SIM115  held open as the lock
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, number))
        except OSError:
            lock.close()
            continue
        return PortReservation(number, lock)
    if port is None:
        sought = f"between {_FIRST_PORT} and {_LAST_PORT} in {_PORT_TRIES} tries"
    else:
        sought = f"at {port}"
    raise UserError(
        f"no free port of this host {sought}",
        fix="end what holds them: ss -ltnp lists the listening processes",
    )


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port for a server that binds it soon. It lies outside the kernel's ephemeral
    range, so no outgoing connection takes it in the meantime, as could happen with a port found by
    binding port 0."""
    reservation = reserve_port(host)
    reservation.release()
    return reservation.port


def bind(host: str, port: int, inherited_fd: int | None = None) -> socket.socket:
    """Return a listening socket. Call it before any slow work, so that a taken port is reported at
    once.

    Args:
        inherited_fd: descriptor of a socket that the parent process is already listening on.
    Raises:
        UserError: the port is taken, or this host does not have the address.
    """
    if inherited_fd is not None:
        return socket.socket(fileno=inherited_fd)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:  # a number above 65535 overflows
        listener.close()
        raise UserError(
            f"cannot listen on {host}:{port}", why=str(error), fix="choose another --port"
        ) from error
    listener.listen(1024)
    return listener
