"""Two hosts of this machine's own making, on a cable that tests cut and slow down.

Each host is a set of Linux namespaces (network, processes, host name, mounts) and ends with its
first process, and that with this process. The cable is a thread that carries packets between two
TUN devices, so no queueing discipline of the kernel is needed.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import PATIENCE, wait_until

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_CLONE_NEWNET = 0x40000000
_PACKET = 9000
#: Seconds of traffic that a slow cable queues before it drops packets.
_QUEUE_SECONDS = 2.0
_GCS_PORT = 6379

#: First process of a host. It adopts and reaps what others leave behind.
_FIRST_PROCESS = """
hostname {name}
mount --bind {hosts} /etc/hosts
mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && mount -t tmpfs tmpfs /dev/shm
ip link set lo up
echo ready
while :; do sleep 3600 & wait $!; done
"""


@dataclass
class Host:
    """One host.

    Attributes:
        pid: its first process, as this process sees it.
    """

    name: str
    address: str
    pid: int

    @property
    def prefix(self) -> list[str]:
        """Start of a command line that runs on this host."""
        namespaces = ["--net", "--pid", "--uts", "--ipc", "--mount"]
        return ["nsenter", "--target", str(self.pid), *namespaces, "--wd=."]

    def run(self, *command: str, **environment: str) -> str:
        done = subprocess.run(
            [*self.prefix, *command],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def processes(self) -> dict[int, str]:
        """Process id, as this process sees it → command line of all that runs on this host."""
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns/pid") == own:
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = words.strip()
            except OSError:  # it has ended
                continue
        return {pid: words for pid, words in found.items() if words}  # a zombie has none

    def of_runs(self) -> list[str]:
        """Command lines of what belongs to a run: actors, engines and routers."""
        own = (
            *("ray::RolloutActor", "ray::TrainerActor", "ray::EngineActor"),
            *("slime.embedded", "sglang::router", "train.py"),
        )
        return [words for words in self.processes().values() if any(part in words for part in own)]


class Cable:
    """Carries packets between two hosts.

    Attributes:
        is_cut: packets vanish without an error, as behind a broken switch.
        delay: seconds that a packet is under way.
        rate: bits a second in each direction; None is no limit.
        carried: bytes since the beginning.
    """

    def __init__(self, ends: tuple[int, int]) -> None:
        self.is_cut = False
        self.delay = 0.0
        self.rate: float | None = None
        self.carried = 0
        self._ends = ends
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="cable", daemon=True)
        self._thread.start()

    def heal(self) -> None:
        self.is_cut = False
        self.delay = 0.0
        self.rate = None

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _run(self) -> None:
        to = {self._ends[0]: self._ends[1], self._ends[1]: self._ends[0]}
        queue: list[tuple[float, int, int, bytes]] = []
        numbers = itertools.count()
        free_at = dict.fromkeys(to, 0.0)
        while not self._is_over:
            now = time.monotonic()
            while queue and queue[0][0] <= now:
                _, _, end, packet = heapq.heappop(queue)
                self._write(end, packet)
            wait = min(0.05, max(0.0, queue[0][0] - now)) if queue else 0.05
            for end in select.select(list(to), [], [], wait)[0]:
                packet = os.read(end, _PACKET + 100)
                now = time.monotonic()
                if self.is_cut:
                    continue
                if self.rate is None and not self.delay and not queue:
                    self._write(to[end], packet)
                    continue
                begins = max(now, free_at[end])
                if begins - now > _QUEUE_SECONDS:
                    continue
                free_at[end] = begins + (len(packet) * 8 / self.rate if self.rate else 0.0)
                due = free_at[end] + self.delay
                heapq.heappush(queue, (due, next(numbers), to[end], packet))

    def _write(self, end: int, packet: bytes) -> None:
        if self.is_cut:
            return
        try:
            os.write(end, packet)
            self.carried += len(packet)
        except OSError:  # the device is down
            return


@dataclass
class TwoHosts:
    """A Ray cluster of two nodes; drivers start on the first."""

    first: Host
    second: Host
    cable: Cable

    @property
    def ray_address(self) -> str:
        return f"{self.first.address}:{_GCS_PORT}"

    def start_ray(self, slots: tuple[int, int], **environment: str) -> None:
        """Start the head on the first host and a node on the second.

        Args:
            slots: process slots of each.
        """
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        head = ["--head", f"--port={_GCS_PORT}", "--include-dashboard=false"]
        node = [f"--address={self.ray_address}"]
        for host, count, options in zip((self.first, self.second), slots, (head, node)):
            options = [*options, f"--node-ip-address={host.address}", f"--num-cpus={count}"]
            options += ["--object-store-memory=200000000"]
            host.run(*ray, *options, **environment)


def why_impossible() -> str:
    """Return why this machine cannot make such hosts; "" if it can."""
    if not os.access("/dev/net/tun", os.W_OK):
        return "/dev/net/tun is not there or not writable"
    command = ["unshare", "--net", "--pid", "--uts", "--ipc", "--mount", "--fork", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        subprocess.run(["ip", "-Version"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stderr.strip()


@contextmanager
def two_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Two hosts and the cable between them; all of their processes end with the block."""
    addresses = {"host-a": "10.213.0.1", "host-b": "10.213.0.2"}
    hosts_file = folder / "hosts"
    lines = [f"{address} {name}" for name, address in addresses.items()]
    hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    holders: list[subprocess.Popen[str]] = []
    ends: list[int] = []
    cable = None
    try:
        found = []
        for name, address in addresses.items():
            holder = _begin(name, hosts_file)
            holders.append(holder)
            host = Host(name, address, _child(holder.pid))
            ends.append(_tun(host.pid))
            host.run("ip", "address", "add", f"{address}/24", "dev", "tun0")
            host.run("ip", "link", "set", "tun0", "mtu", str(_PACKET), "up")
            found.append(host)
        cable = Cable((ends[0], ends[1]))
        yield TwoHosts(found[0], found[1], cable)
    finally:
        for holder in holders:
            holder.kill()  # unshare takes the first process with it, the kernel all the others
            holder.wait()
        if cable is not None:
            cable.close()


def _begin(name: str, hosts: Path) -> subprocess.Popen[str]:
    namespaces = ["--net", "--pid", "--uts", "--ipc", "--mount"]
    script = _FIRST_PROCESS.format(name=name, hosts=hosts)
    holder = subprocess.Popen(
        ["unshare", *namespaces, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n", f"{name} did not start"
    return holder


def _child(pid: int) -> int:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return int(wait_until(lambda: path.read_text().split(), "the host's first process")[0])


def _tun(pid: int) -> int:
    """A new TUN device of a process's network namespace. It ends with its descriptor."""
    made: list[int] = []

    def make() -> None:  # a thread may have a network namespace of its own
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{pid}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"tun0", _TUN_WITHOUT_HEADER))
        made.append(device)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    [device] = made
    return device
