"""Drivers as processes of their own: started, hit with signals, and counted afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from slime.engines.keys import VARIABLE
from tests.support.forks import Fork, fork_or_start

ROOT = Path(__file__).parents[2]

#: Longest wait for anything; a machine may be busy with other work.
PATIENCE = 300.0


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
    """The first true value of ``condition()``; fails with ``what`` when the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def is_running(process: psutil.Process) -> bool:
    """Whether a process exists and has not ended; one that waits to be reaped has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_by_parent() -> dict[int, list[int]]:
    """The process ids of this host, read once for all members of a family: psutil would read them
    for each."""
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended since
            stat = Path(f"/proc/{name}/stat").read_text()
            parent = int(stat.rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(name))
    return found


@dataclass
class World:
    """Model and data of the demo, and the flags of a run on them: two steps of a second, once it is
    up."""

    inputs: Path
    outputs: Path

    @staticmethod
    def create(folder: Path, *, is_small: bool = True) -> World:
        """Write model and data; a small model has a tenth of the demo's parameters."""
        from recipes import arithmetic

        world = World(folder / "inputs", folder / "outputs")
        (world.inputs / "model").mkdir(parents=True)
        arithmetic.write_data(world.inputs, seed=0, num_demonstrations=64)
        arithmetic.write_model(world.inputs / "model", seed=0)
        if is_small:
            _shrink(world.inputs / "model")
        rows = [{"prompt": f"{i}0+{i}=", "better": f"{i}{i}", "worse": "00"} for i in range(1, 9)]
        lines = [json.dumps(row | {"answer": row["better"], "right": True}) for row in rows]
        lines += [json.dumps(row | {"answer": row["worse"], "right": False}) for row in rows]
        (world.inputs / "preferences.jsonl").write_text("\n".join(lines))
        return world

    def flags(self, name: str, *more: object, without: str = "") -> list[str]:
        """The flags, with those in ``more`` on top, and ``without`` some."""
        given = {
            "--output-dir": self.outputs,
            "--run-name": name,
            "--hf-checkpoint": self.inputs / "model",
            "--prompt-data": self.inputs / "train.jsonl",
            "--input-key": "prompt",
            "--label-key": "label",
            "--rollout-max-context-len": 64,
            "--rollout-max-response-len": 4,
            "--rollout-batch-size": 4,
            "--n-samples-per-prompt": 2,
            "--num-rollout": 2,
            "--max-tokens-per-gpu": 4096,
            "--custom-rm-path": "recipes.arithmetic.reward",
        }
        words = ["--colocate", "--fp32", "--use-dynamic-batch-size"]
        for flag, value in given.items():
            words += [] if flag in (*more, *without.split()) else [flag, str(value)]
        return words + [str(word) for word in more]

    def resumable(self, name: str, *more: object) -> list[str]:
        folder = self.outputs / name / "checkpoints"
        return self.flags(name, "--load", folder, "--save", folder, "--save-min-seconds", 0, *more)


def _shrink(model: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.hidden_size, config.intermediate_size, config.head_dim = 32, 64, 8
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)


@dataclass
class Driver:
    """A driver process that leads its own group, and everything it ever started.

    Attributes:
        path: its run folder.
    """

    process: subprocess.Popen[bytes] | Fork
    path: Path
    _output: Path
    _family: set[psutil.Process] = field(default_factory=set)
    _ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.2):
            self._take_note()

    def _take_note(self) -> None:
        if self.process.poll() is not None:
            return
        children = children_by_parent()
        # others may have the process ids of those that have ended
        parents = [process.pid for process in list(self._family) if process.is_running()]
        parents.append(self.process.pid)
        known = set(parents)
        while parents:
            for child in children.get(parents.pop(), ()):
                if child not in known:
                    known.add(child)
                    parents.append(child)
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                        self._family.add(psutil.Process(child))

    # -- while it runs -----------------------------------------------------------------------------

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        self._take_note()
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def family(self, what: str) -> list[psutil.Process]:
        """Its living descendants whose title or command line contains ``what``."""
        self._take_note()
        found = []
        for process in tuple(self._family):
            try:
                if what in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, what: str) -> None:
        """SIGKILL to the process of its family whose title or command line contains ``what``."""
        found = self.family(what)
        assert len(found) == 1, f"{len(found)} processes have {what!r} in their command line"
        found[0].kill()

    def key(self) -> str:
        """That its engines and routers ask for; the system shows their environment to their own
        user alone. A fork of the preloaded process shows that process's, without the key."""
        names = "slime.embedded", "slime.engines.", "sglang::router"
        for process in [process for name in names for process in self.family(name)]:
            with contextlib.suppress(psutil.Error):
                if key := process.environ().get(VARIABLE):
                    return key
        raise AssertionError("no engine runs")

    def rows(self) -> list[dict[str, Any]]:
        path = self.path / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be under way
        return [json.loads(line) for line in whole.splitlines()]

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows() if "rollout/raw_reward" in row]

    # -- its end -----------------------------------------------------------------------------------

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; returns the exit status."""
        try:
            return self.process.wait(seconds)
        finally:
            self._ended.set()
            self._watcher.join()

    @property
    def stderr(self) -> str:
        return self._output.read_text()

    def error(self) -> list[str]:
        """The lines from "error:" on."""
        lines = self.stderr.splitlines()
        first = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
        assert first is not None, self.stderr
        return lines[first:]

    def living(self) -> list[str]:
        """Command lines of what it started and is still there."""
        alive = []
        for process in list(self._family):
            with contextlib.suppress(psutil.NoSuchProcess):
                if is_running(process):
                    alive.append(" ".join(process.cmdline())[:200])
        return alive

    def ports(self) -> set[int]:
        """Ports that its family listens on."""
        ports = set()
        for process in list(self._family):
            try:
                listening = [
                    c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN
                ]
            except psutil.NoSuchProcess:
                continue
            ports |= {connection.laddr.port for connection in listening}
        return ports

    def leaves_nothing(self, seconds: float = 10.0) -> None:
        """No process of its family, and so no port, and nothing in /dev/shm, within ``seconds`` of
        its end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (self.living() or shared_memory()):
            time.sleep(0.1)
        assert self.living() == [] and shared_memory() == set()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.clean_up()

    def clean_up(self) -> None:
        """Whatever the test did not end."""
        self._ended.set()
        for process in [psutil.Process(self.process.pid)] if self.process.poll() is None else []:
            self._family.update(process.children(recursive=True))
            process.kill()
        for process in list(self._family):
            if process.is_running():
                process.kill()
        self.process.wait(PATIENCE)


def shared_memory() -> set[str]:
    """Blocks of weights in /dev/shm whose owner is gone (others' runs may be under way)."""
    import fcntl

    stale = set()
    for path in Path("/dev/shm").glob("slime-weights-*"):
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.add(path.name)
        except OSError:  # its owner lives, or it went while we looked
            continue
    return stale


def start(
    flags: list[str],
    path: Path,
    script: str = "train.py",
    *,
    cwd: Path = ROOT,
    streams: tuple[int, int] | None = None,
    prefix: Sequence[str] = (),
    **env: str,
) -> Driver:
    """``python train.py <flags>`` in a process group of its own, as from a terminal; stderr goes to
    a file.

    Args:
        script: or "slime", for its commands.
        streams: descriptors of stdout and stderr instead.
        prefix: start of the command line, which runs the rest elsewhere.
    """
    # of a shell's background job; the driver would inherit it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # of nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    path.parent.mkdir(parents=True, exist_ok=True)
    output = path.parent / f"{path.name}.stderr"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "SLIME_DEBUG": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **env,
    }
    environment = {
        name: value for name, value in environment.items() if name != "RAY_ADDRESS" or name in env
    }
    words = ["-m", "slime"] if script == "slime" else [str(ROOT / script)]
    argv = [*prefix, sys.executable, *words, *flags]
    with open(output, "w") as stderr, open(os.devnull, "r+") as nothing:
        stdin, stdout, error = nothing.fileno(), *(streams or (nothing.fileno(), stderr.fileno()))
        stdio = stdin, stdout, error
        if prefix:
            process: subprocess.Popen[bytes] | Fork = subprocess.Popen(
                argv,
                stdin=stdin,
                stdout=stdout,
                stderr=error,
                cwd=cwd,
                env=environment,
                start_new_session=True,
            )
        else:
            process = fork_or_start(argv, stdio, environment, cwd)
    return Driver(process, path, output)


#: The fixture `start_held`: (flags, run folder, script, **environment) → driver.
StartHeld = Callable[..., Driver]


def wait_while_running(
    driver: Driver, condition: Callable[[], Any], what: str, seconds: float = PATIENCE
) -> Any:
    """`wait_until`, but a driver that ends meanwhile is a failure, with what it said."""
    found = wait_until(lambda: condition() or driver.process.poll() is not None, what, seconds)
    assert driver.process.poll() is None, driver.stderr
    return found


def wait_held(driver: Driver, hold: Path, rollout_id: int) -> None:
    """Until the rewards of rollout ``rollout_id`` are waiting (`tests.support.hold`)."""
    wait_while_running(driver, (hold / f"held-{rollout_id}").exists, f"rollout {rollout_id}")
