"""The process that supervises one program of a sandbox: it starts the program in isolation, and
ends it with everything that it started.

    supervisor (on the host) ─► first process of the namespaces ─► the program ─► its children

A script of the standard library, because it must start in 20 ms. It reads a request
(`sandbox.Sandbox.run`) and writes the result, both as JSON. Its environment has no variables that
the program could find.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import types
from typing import Any

if __name__ == "__main__":  # slime/__init__.py needs packages that this script does without
    package = types.ModuleType("slime")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    sys.modules["slime"] = package

from slime.processes import tree
from slime.sandbox import isolation

_LOOK_SECONDS = 0.03
_PAGE = os.sysconf("SC_PAGE_SIZE")
#: Processes in the sandbox besides the program's own, and the bytes that they hold.
_OURS = 2
_OURS_BYTES = 32 << 20

_told_to_end = False


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    tree.adopt_orphans()
    signal.signal(signal.SIGTERM, _end)
    isolation.die_with(request["owner"], signal.SIGTERM)
    result: dict[str, Any] = {}
    for way in request["ways"]:
        result = {"way": way, "before": result.get("refused", "")} | Supervisor(request, way).run()
        if "refused" not in result:
            break
    print(json.dumps(result))


def _end(*_: Any) -> None:
    global _told_to_end
    _told_to_end = True


class Supervisor:
    """One try to run the program, with one kind of isolation."""

    def __init__(self, request: dict[str, Any], way: str) -> None:
        self.request = request
        self.way = way
        self.limits = request["limits"]
        self.home = (
            request["home"] if way == "namespaces" else os.path.join(request["scratch"], "home")
        )
        self.uid = isolation.own_uid()
        if way == "plain" and not self._can_be_read_by_uid():
            self.uid = os.geteuid()
        has_own_count = way == "namespaces" and os.geteuid() and isolation.counts_by_namespace()
        # processes that count against the limit besides the program's
        self.others = _OURS if has_own_count else isolation.tasks_of(self.uid)
        self.output = bytearray()
        self.reported: dict[str, Any] = {}
        self._report_fd = -1  # isolated processes write their state here

    def run(self) -> dict[str, Any]:
        report_end, self._report_fd = os.pipe()
        output_end, output_fd = os.pipe()
        self._prepare_folders()
        pid = os.fork()
        if pid == 0:
            self._in_child(output_fd)
        os.close(self._report_fd)
        os.close(output_fd)
        try:
            ended_by = self._watch(pid, report_end, output_end)
        finally:
            tree.end_all()
        self._read_output(output_end, last=True)
        self._read_report(report_end)
        for descriptor in (report_end, output_end):
            os.close(descriptor)
        if "refused" in self.reported or "holds" not in self.reported:
            return {"refused": self.reported.get("refused", "it ended before it was begun")}
        return {
            "status": self.reported.get("status"),
            "ended_by": ended_by,
            "output": self.output[: self.limits["output_bytes"]].decode(errors="replace"),
            "holds": self.reported["holds"],
        }

    def _prepare_folders(self) -> None:
        """Give the program its own folder; under root also the folders that it may write to."""
        folders = list(self.request["folders"].values())
        if self.way == "plain":
            # it remains ours, so that its removal cannot be led elsewhere
            os.chmod(self.request["scratch"], 0o711)
            os.mkdir(self.home, 0o700)
            folders.append(self.home)
        if os.geteuid():
            return
        for folder in folders:
            os.chown(folder, self.uid, self.uid)
        while folders:
            # the program may have nested it deeper than a path can name
            with contextlib.suppress(OSError):
                for entry in os.scandir(folders.pop()):
                    os.chown(entry.path, self.uid, self.uid, follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self, pid: int, report_end: int, output_end: int) -> str:
        """Wait until the child has ended or must end; return the limit that ended it."""
        deadline = time.monotonic() + self.limits["seconds"]
        child = os.pidfd_open(pid)
        open_ends = {report_end, output_end, child}
        for descriptor in (report_end, output_end):
            os.set_blocking(descriptor, False)
        try:
            while not self._has_ended(pid):
                ready = select.select(list(open_ends), [], [], _LOOK_SECONDS)[0]
                if output_end in ready and not self._read_output(output_end):
                    open_ends.discard(output_end)
                if report_end in ready and not self._read_report(report_end):
                    open_ends.discard(report_end)
                if exceeded := self._exceeded_limit(deadline):
                    return exceeded
        finally:
            os.close(child)
        self._read_report(report_end)
        return "cpu" if self.reported.get("status") == -signal.SIGXCPU else ""

    def _has_ended(self, pid: int) -> bool:
        """Tell whether the program has ended; also reaps orphans that ended by themselves."""
        ended = 1
        status = 0
        while ended:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if ended == pid:
                if self.way == "plain":
                    self.reported["status"] = os.waitstatus_to_exitcode(status)
                return True
        return False

    def _exceeded_limit(self, deadline: float) -> str:
        """Return the limit that is exceeded, or "cancelled" for a request to end; "" if neither."""
        if _told_to_end:
            return "cancelled"
        if len(self.output) > self.limits["output_bytes"]:
            return "output"
        if time.monotonic() > deadline:
            return "time"
        processes, memory = usage()
        if processes > self.limits["processes"] + _OURS:
            return "processes"
        return "memory" if memory > self.limits["memory"] + _OURS_BYTES else ""

    def _read_output(self, output_end: int, last: bool = False) -> bool:
        """Read what the program has written; False at the end. The last call reads all that the
        pipe still holds."""
        while True:
            try:
                piece = os.read(output_end, 1 << 16)
            except BlockingIOError:
                return True
            self.output += piece
            if not piece or not last or len(self.output) > self.limits["output_bytes"]:
                return bool(piece)

    def _read_report(self, report_end: int) -> bool:
        """Read what the isolated processes have reported; False at the end."""
        try:
            piece = os.read(report_end, 1 << 16)
        except BlockingIOError:
            return True
        for line in piece.splitlines():
            self.reported.update(json.loads(line))
        return bool(piece)

    def _report(self, **words: Any) -> None:
        os.write(self._report_fd, json.dumps(words).encode() + b"\n")

    # -- in the sandbox: none of these returns -----------------------------------------------------

    def _in_child(self, output_fd: int) -> None:
        """Run in the supervisor's child. With namespaces it only waits for their first process."""
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            isolation.die_with(os.getppid())
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (output_fd, 1), (output_fd, 2)):
                os.dup2(source, target)
            if self.way == "plain":
                self._become_program()
            isolation.enter_namespaces()
            pid = os.fork()
            if pid == 0:
                self._first_process()
            os.waitpid(pid, 0)
        except BaseException as error:  # the supervisor must hear of any error
            self._report(refused=f"{type(error).__name__}: {error}")
        os._exit(0)

    def _first_process(self) -> None:
        """Run as process 1 of the namespaces: when it ends, the kernel ends all of them."""
        try:
            isolation.die_with(os.getppid())
            os.umask(0o022)  # another user reads the folders that are made here
            isolation.build_root(self.request["scratch"], self.request, self.uid)
            pid = os.fork()
            if pid == 0:
                self._become_program()
            ended = 0
            status = 0
            while ended != pid:
                ended, status = os.wait()
            self._report(status=os.waitstatus_to_exitcode(status))
        except BaseException as error:
            self._report(refused=f"{type(error).__name__}: {error}")
        os._exit(0)

    def _become_program(self) -> None:
        request = self.request
        has_namespaces = self.way == "namespaces"
        home = self.home
        try:
            holds = {"memory", "time", "processes"}
            if not has_namespaces:
                holds |= self._without_namespaces()
            else:
                holds |= {"files", "network", "signals"}
                isolation.limit(self.limits, self.limits["processes"] + self.others)
                isolation.become(self.uid)
                isolation.give_up_privileges()
            alone = self.uid == 0  # no limit of processes holds for root: it may have no other
            if isolation.refuse_calls(alone):
                holds.add("network")
            elif alone:
                raise PermissionError("nothing limits the processes of a program of root's")
            self._report(holds=sorted(holds))
        except BaseException as error:
            self._report(refused=f"{type(error).__name__}: {error}")
            os._exit(0)
        at = ""  # from here on the program fails, not its isolation
        try:
            for name, text in request["files"].items():
                at = os.path.join(home, name)
                os.makedirs(os.path.dirname(at), exist_ok=True)
                with open(at, "w", encoding="utf-8", errors="surrogatepass") as out:
                    out.write(text)
            at = home if request["folder"] == request["home"] else request["folder"]
            os.chdir(at)
            # Python ignores these signals, and its children would inherit that
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            at = request["command"][0]
            environ = {
                "HOME": home,
                "TMPDIR": "/tmp" if has_namespaces and os.access("/tmp", os.W_OK) else home,
            }
            os.execvpe(at, request["command"], environ | request["environ"])
        except BaseException as error:
            said = (
                error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            )
            os.write(2, f"{at}: {said}\n".encode(errors="replace"))
        os._exit(127)

    def _without_namespaces(self) -> set[str]:
        """Isolate without namespaces; return what is enforced."""
        readable = [*isolation.SYSTEM, *self.request["readable"]]
        holds: set[str] = set()
        isolation.limit(self.limits, self.limits["processes"] + self.others)
        if self.uid != os.geteuid():
            isolation.become(self.uid)
            if self.uid >= isolation.FIRST_UID:  # other sandboxes may share the user nobody
                holds.add("signals")
        isolation.die_with(os.getppid())  # a change of user resets it
        isolation.give_up_privileges()
        version = isolation.landlock(readable, [self.home])
        if not version and os.geteuid() == 0:
            raise PermissionError("nothing keeps a program of root's from the files of this host")
        return holds | ({"files"} if version else set()) | ({"signals"} if version >= 6 else set())

    def _can_be_read_by_uid(self) -> bool:
        """Tell whether the user that root would become can read what the program needs."""
        if self.uid == os.geteuid():
            return True
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(OSError):  # a container that has no other user
                isolation.become(self.uid)
                os._exit(not all(os.access(path, os.R_OK) for path in self.request["readable"]))
            os._exit(1)
        return os.waitpid(pid, 0)[1] == 0


# -- the descendants of this process ---------------------------------------------------------------


def usage() -> tuple[int, int]:
    """Count the descendants of this process and the bytes that they hold; shared memory counts for
    each."""
    pids = tree.descendants()
    pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm") as statm:
                pages += int(statm.read().split()[1])
        except OSError:
            continue
    return len(pids), pages * _PAGE


if __name__ == "__main__":
    main()
