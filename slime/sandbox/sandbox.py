"""Run programs that a model wrote, each in its own sandbox, which is removed when the program ends.

    sandbox = Sandbox()
    ran = await sandbox.python("print(2 ** 10)")
    ran.text                                            # '1024\\n'

docs/security.md says what is enforced where.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from slime import deadlines
from slime.documentation import doc_url
from slime.errors import UserError
from slime.log import get_logger
from slime.processes.host import num_cpus
from slime.sandbox import isolation
from slime.sandbox.folders import PROGRAM, temporary_folder

logger = get_logger(__name__)

#: The default working directory of a program.
HOME = "/sandbox"
_SUPERVISOR = Path(__file__).with_name("supervisor.py")
#: Paths in the sandbox that belong to the system.
_TAKEN = ("/proc", "/dev", *isolation.SYSTEM)


@dataclass(frozen=True)
class Limits:
    """Resources that one program and its children may use.

    Attributes:
        seconds: wall-clock time of the program.
        cpu_seconds: CPU time of each process.
        memory: bytes of each process, and of all processes together.
        file_bytes: total bytes of its files; without namespaces, bytes of each file.
        processes: number of concurrent processes and threads.
        output_bytes: bytes of output; a program that writes more is ended.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory: int = 512 << 20
    file_bytes: int = 64 << 20
    processes: int = 16
    output_bytes: int = 16 << 10


_ENDED = {
    "time": "it took longer than {seconds:g} s",
    "cpu": "it computed for longer than {cpu_seconds} s",
    "memory": "it held more memory than {memory} bytes",
    "processes": "it had more processes than {processes}",
    "output": "it wrote more than {output_bytes} bytes",
}


@dataclass(frozen=True)
class Ran:
    """The result of a program.

    Attributes:
        status: its exit status, the negative number of the signal that ended it, or None if the
            supervisor ended it.
        output: what it wrote, errors included.
        ended_by: the limit that ended it: "time", "cpu", "memory", "processes", "output"; "" for
            none.
        holds: the restrictions that were enforced: "time", "memory", "processes", "network",
            "files", "signals".
        limits: the limits that applied.
    """

    status: int | None
    output: str
    ended_by: str
    holds: frozenset[str]
    limits: Limits

    @property
    def text(self) -> str:
        """Return the output for the model, with the limit that ended the program."""
        if not self.ended_by:
            return self.output
        return f"{self.output}\n[ended: {_ENDED[self.ended_by].format(**asdict(self.limits))}]"


class Sandbox:
    """Runs programs, each isolated: no network, no files but its own and the system's, no variables
    of the environment. Use it from one event loop.

    Args:
        limits: limits of each program.
        readable: further files and folders of the host that programs may read.
        at_once: largest number of concurrent programs; None: one per processor.
        walls: "best": namespaces if the kernel allows them, else what it does allow, with a warning
            that names what is not enforced; "namespaces": these or an error; "plain": no
            namespaces, for trying out what is left.
    Raises:
        UserError: ``walls`` has another value.

    Example:
        >>> ran = await Sandbox(Limits(seconds=2)).python("print(6 * 7)")  # doctest: +SKIP
        >>> ran.status, ran.output                                         # doctest: +SKIP
        (0, '42\\n')
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        readable: Sequence[str | Path] = (),
        at_once: int | None = None,
        walls: Literal["best", "namespaces", "plain"] = "best",
    ) -> None:
        self.limits = limits or Limits()
        self._readable = [*_python_folders(), *(os.path.abspath(path) for path in readable)]
        if walls not in ("best", "namespaces", "plain"):
            raise UserError(
                f"a sandbox has no walls {walls!r}", fix='pass "best", "namespaces" or "plain"'
            )
        self._ways = ["namespaces", "plain"] if walls == "best" else [walls]
        self._slots = asyncio.Semaphore(at_once or num_cpus())
        self._python_starts = False

    async def python(self, code: str, *, files: Mapping[str, str] | None = None) -> Ran:
        """Run Python code with this process's interpreter and its packages.

        Args:
            files: name → text of files in the working directory.
        Raises:
            UserError: no sandbox can be made here, or this interpreter does not start in one.
        """
        if not self._python_starts:
            await self._check_interpreter()
        return await self._run_code(code, files or {})

    async def _run_code(self, code: str, files: Mapping[str, str]) -> Ran:
        return await self.run([sys.executable, "-B", "main.py"], files={**files, "main.py": code})

    async def _check_interpreter(self) -> None:
        """Refuse an interpreter that cannot start: it would make every program look wrong, and
        every reward 0."""
        ran = await self._run_code("print('started')", {})
        if (ran.status, ran.output) != (0, "started\n"):
            raise UserError(
                f"{sys.executable} does not start in a sandbox",
                why=ran.text.strip() or f"its status was {ran.status}",
                fix="name the folders it needs with Sandbox(readable=…), or raise the limits",
            )
        self._python_starts = True

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        folders: Mapping[str, str | Path] | None = None,
        folder: str = HOME,
        environ: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Ran:
        """Run a program to its end.

        Args:
            command: found in the system's folders; its input is empty.
            files: name → text of files in its home.
            folders: path in the sandbox → folder of the host that the program may write to; what it
                leaves there stays. They need namespaces. A run as root makes the sandbox's user
                their owner.
            folder: the working directory.
            environ: environment variables added to PATH, HOME, TMPDIR and LANG.
        Raises:
            UserError: no sandbox can be made here, or none with such folders; or this host is too
                busy to end it.
        """
        asked = limits or self.limits
        if folders:
            self._check_places(folders)
        async with self._slots, temporary_folder(PROGRAM) as scratch:
            request = {
                "owner": os.getpid(),
                "ways": self._ways[:1] if folders else self._ways,
                "scratch": scratch,
                "home": HOME,
                "folder": folder,
                "folders": {
                    place: os.path.abspath(path) for place, path in (folders or {}).items()
                },
                "files": dict(files or {}),
                "readable": self._readable,
                "command": list(command),
                "environ": _environ() | dict(environ or {}),
                "limits": asdict(asked),
            }
            result = await _supervise(request, asked.seconds)
        if "refused" in result:
            raise _no_sandbox(result["refused"])
        if "plain" in self._ways and "namespaces" in self._ways:
            self._look_at(result)
        holds = frozenset(result["holds"])
        return Ran(result["status"], result["output"], result["ended_by"], holds, asked)

    def _check_places(self, folders: Mapping[str, str | Path]) -> None:
        """Check where folders of the host will be shown.

        Raises:
            UserError: there are no namespaces, or a folder would lie where none can be shown.
        """
        if self._ways[0] == "plain":
            raise _no_sandbox("folders of the host can be shown with namespaces alone")
        for place in folders:
            taken = next(
                (path for path in _TAKEN if place == path or place.startswith(f"{path}/")), None
            )
            if (
                taken
                or place == "/"
                or not os.path.isabs(place)
                or os.path.normpath(place) != place
            ):
                raise UserError(
                    f"no folder can be shown at {place!r} in a sandbox",
                    why=f"{taken} is the system's there"
                    if taken
                    else "it is no path of a folder below the root",
                    fix="show it elsewhere, at /app for one",
                )

    def _look_at(self, result: dict[str, Any]) -> None:
        """Keep the kind of isolation that worked for the first program, so that later ones get no
        less."""
        self._ways = [result["way"]]
        if result["way"] == "namespaces":
            return
        missing = sorted({"files", "network", "signals"} - set(result["holds"]))
        logger.warning(
            "the sandbox does without namespaces, which are not allowed here (%s): files are "
            "limited one by one%s",
            result["before"],
            f"; not kept from the host's: {', '.join(missing)}" if missing else "",
        )


async def _supervise(request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Have a supervisor run the request. If it does not end by itself, it is told to end, then
    killed."""
    supervisor = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-s", "-E", "-B", str(_SUPERVISOR)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environ(),
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(seconds + deadlines.SANDBOX_GRACE):
            output, errors = await supervisor.communicate(json.dumps(request).encode())
    except TimeoutError as error:
        raise UserError(
            "a program in a sandbox was not ended in time",
            why=f"its {seconds:g} s ended {deadlines.SANDBOX_GRACE:g} s ago: this host is "
            "overloaded or was suspended",
            fix="run fewer programs at once: Sandbox(at_once=…)",
        ) from error
    finally:
        if supervisor.returncode is None:
            supervisor.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadlines.SANDBOX_TERMINATE):
                    await asyncio.shield(supervisor.wait())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(supervisor.pid, signal.SIGKILL)
    if supervisor.returncode or not output:
        said = errors.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else "no output"
        raise _no_sandbox(f"its supervisor ended with status {supervisor.returncode}: {last}")
    return dict(json.loads(output))


def _no_sandbox(why: str) -> UserError:
    return UserError(
        "no sandbox can be made for a program here",
        why=why,
        fix="run on a host, or in a container, that allows unprivileged user namespaces: "
        + doc_url("security.md"),
    )


def _environ() -> dict[str, str]:
    """Return the environment of the supervisor and its programs: nothing of this process except
    where its interpreter finds its libraries."""
    environ = {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",  # threads of numerical libraries count among the processes
        "OPENBLAS_NUM_THREADS": "1",
    }
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return environ | ({"LD_LIBRARY_PATH": libraries} if libraries else {})


def _python_folders() -> list[str]:
    """Return the folders that Python code needs to start: the interpreter, its library and its
    packages."""
    folders = {
        sys.prefix,
        sys.exec_prefix,
        sys.base_prefix,
        os.path.dirname(os.path.realpath(sys.executable)),
    }
    return sorted(folder for folder in folders if not folder.startswith("/usr") and folder != "/")
