"""The sandbox's walls, each tried by a program that runs against it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.errors import UserError
from slime.sandbox import sandbox as sandbox_module
from slime.sandbox.sandbox import HOME, Limits, Ran, Sandbox
from tests.support.sandboxes import with_namespaces

MIB = 1 << 20
LIMITS = Limits(
    seconds=120,
    cpu_seconds=5,
    memory=400 * MIB,
    file_bytes=4 * MIB,
    processes=12,
    output_bytes=20_000,
)


@pytest.fixture(params=["plain", pytest.param("namespaces", marks=with_namespaces)])
def walls(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def python(walls: str, code: str, **limits: float) -> Ran:
    asked = Limits(**{**vars(LIMITS), **limits})  # type: ignore[arg-type]
    return asyncio.run(Sandbox(asked, walls=walls).python(code))  # type: ignore[arg-type]


def left_over(mark: str) -> list[int]:
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if mark in (process.info["cmdline"] or [])
    ]


def test_output_errors_and_status_come_back(walls: str) -> None:
    ran = python(walls, "import sys\nprint(6 * 7, flush=True)\nsys.stderr.write('oh')\nsys.exit(3)")
    assert (ran.status, ran.output, ran.ended_by) == (3, "42\noh", "") and ran.text == ran.output
    assert {"time", "memory", "processes", "network"} <= ran.holds


def test_files_beside_the_code_are_read_and_its_own_written(walls: str) -> None:
    sandbox = Sandbox(LIMITS, walls=walls)  # type: ignore[arg-type]
    code = "import near\nopen('a', 'w').write(near.word)\nprint(open('a').read())"
    assert asyncio.run(sandbox.python(code, files={"near.py": "word = 'hi'"})).output == "hi\n"


def test_an_endless_loop_ends(walls: str) -> None:
    ran = python(walls, "while True: pass", cpu_seconds=1)
    assert ran.ended_by == "cpu" and "longer than 1 s" in ran.text


def test_a_program_that_only_waits_ends(walls: str) -> None:
    code = "print('so', flush=True)\nimport time\ntime.sleep(1000)"
    for seconds in (1.5, 10.0, 60.0):  # a busy host may take longer to start Python
        ran = python(walls, code, seconds=seconds)
        if ran.output:
            break
    assert (
        ran.ended_by == "time"
        and ran.status is None
        and ran.text.startswith("so\n\n[ended: it took longer")
    )


def test_memory_ends_with_one_process(walls: str) -> None:
    assert "MemoryError" in python(walls, "x = bytearray(500 << 20)").output


@with_namespaces
def test_memory_of_several_processes_is_added_up() -> None:
    code = "import os, time\nfor _ in range(3): os.fork()\nx = b'1' * (90 << 20)\ntime.sleep(1000)"
    assert python("namespaces", code).ended_by == "memory"


def test_a_fork_bomb_stays_small(walls: str) -> None:
    code = """
        import os, time
        made = 0
        try:
            for made in range(1000):
                if os.fork() == 0:
                    time.sleep(1000)
        except OSError as error:
            print(made, type(error).__name__, flush=True)
        """
    ran = python(walls, textwrap.dedent(code))
    made, error = ran.output.split()
    assert int(made) <= LIMITS.processes and error in ("BlockingIOError", "PermissionError")


def test_nothing_is_written_outside(walls: str, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o777)
    places = [
        str(tmp_path / "x"),
        "/usr/x",
        "/etc/x",
        str(Path.home() / "x"),
        f"{tempfile.gettempdir()}/slime-was-here",
    ]
    code = (
        f"for place in {places}:\n    try: open(place, 'w').write('x')\n    except OSError: "
        "pass\nprint('done')"
    )
    assert python(walls, code).output == "done\n"
    assert [place for place in places if os.path.exists(place)] == []


def test_nothing_of_the_host_is_read(walls: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    os.chmod(tmp_path / "key", 0o666)
    ran = python(walls, f"print(open({str(tmp_path / 'key')!r}).read())")
    if "files" not in ran.holds:
        pytest.skip("this kernel has neither namespaces for us nor Landlock")
    assert ran.status == 1 and "secret" not in ran.output


def test_nothing_of_the_environment_is_found(walls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret-of-the-run")
    code = """
        import glob, os
        print(sorted(os.environ))
        for path in glob.glob("/proc/*/environ") + [f"/proc/{os.getppid()}/environ"]:
            try:
                print(open(path).read())
            except OSError:
                pass
        """
    ran = python(walls, textwrap.dedent(code))
    known = [
        "HOME", "LANG", "LC_CTYPE", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
        "PATH", "TMPDIR"
    ]  # fmt: skip
    assert ran.status == 0 and set(eval(ran.output.splitlines()[0])) <= set(known)
    assert "secret-of-the-run" not in ran.output


def test_there_is_no_network(walls: str) -> None:
    code = """
        import socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
            try:
                socket.socket(family)
            except PermissionError:
                print(family.name)
        """
    assert python(walls, textwrap.dedent(code)).output == "AF_INET\nAF_INET6\nAF_UNIX\n"


def test_a_server_of_the_host_is_not_reached(walls: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ran = python(
            walls,
            f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)",
        )
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert ran.status == 1


def test_endless_output_ends(walls: str) -> None:
    ran = python(walls, "while True: print('y' * 1000)", output_bytes=5000)
    assert (
        ran.ended_by == "output"
        and len(ran.output) == 5000
        and "wrote more than 5000 bytes" in ran.text
    )


def test_a_large_file_does_not_fit(walls: str) -> None:
    ran = python(
        walls, "with open('big', 'wb') as out:\n    for _ in range(99): out.write(bytes(1 << 20))"
    )
    assert ran.status != 0


@with_namespaces
def test_many_files_do_not_fit() -> None:
    code = "for i in range(99):\n    open(f'big{i}', 'wb').write(bytes(1 << 20))"
    assert "No space left" in python("namespaces", code).output


@with_namespaces
def test_children_left_behind_end_with_it() -> None:
    mark = "a-daemon-of-the-test"
    code = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(1000)', '{mark}'],"
    )
    ran = python("namespaces", code + " start_new_session=True)\nprint('left')")
    assert ran.output == "left\n" and left_over(mark) == []


@pytest.mark.skipif(
    os.geteuid() == 0, reason="a program of root's may have no children without namespaces"
)
def test_children_left_behind_end_with_it_without_namespaces() -> None:
    mark = "another-daemon-of-the-test"
    code = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; "
        f"time.sleep(1000)', '{mark}'],"
    )
    ran = python("plain", code + " start_new_session=True)\nprint('left')")
    assert ran.output == "left\n" and left_over(mark) == []


def test_processes_of_the_host_get_no_signals(walls: str) -> None:
    ran = python(walls, f"import os\nos.kill({os.getpid()}, 0)")
    if "signals" not in ran.holds:
        pytest.skip(
            "this kernel keeps signals in with namespaces and Landlock's sixth version alone"
        )
    assert ran.status == 1 and (
        "PermissionError" in ran.output or "ProcessLookupError" in ran.output
    )


def test_whoever_is_cancelled_leaves_nothing(walls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"1000.{os.getpid()}"

    async def run() -> None:
        sandbox = Sandbox(LIMITS, walls=walls)  # type: ignore[arg-type]
        task = asyncio.create_task(sandbox.run(["sleep", mark]))
        while not left_over(mark):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with tempfile.TemporaryDirectory() as folders:
        os.chmod(folders, 0o711)  # where root runs it, the program is another user's
        monkeypatch.setattr(tempfile, "tempdir", folders)
        asyncio.run(run())
        assert left_over(mark) == [] and os.listdir(folders) == []


@with_namespaces
def test_folders_of_the_host_keep_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "in").write_text("1")
    sandbox = Sandbox(LIMITS)
    command = ["sh", "-c", "cat in >> out; touch /x"]
    for _ in range(2):
        ran = asyncio.run(sandbox.run(command, folders={"/app": tmp_path / "app"}, folder="/app"))
    assert (
        (tmp_path / "app" / "out").read_text() == "11"
        and ran.status == 1
        and "Read-only" in ran.output
    )


def test_folders_need_namespaces(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no sandbox") as caught:
        asyncio.run(Sandbox(walls="plain").run(["true"], folders={"/app": tmp_path}))
    assert "namespaces" in caught.value.why


def test_a_program_that_is_not_there_says_so(walls: str) -> None:
    ran = asyncio.run(Sandbox(LIMITS, walls=walls).run(["no-such-program"]))  # type: ignore[arg-type]
    assert ran.status == 127 and "no-such-program" in ran.output


def test_what_cannot_be_started_is_the_programs_failure_and_no_walls(walls: str) -> None:
    sandbox = Sandbox(LIMITS, walls=walls)  # type: ignore[arg-type]
    ran = asyncio.run(sandbox.run(["sh", "-c", "echo \0"]))
    assert ran.status == 127 and "null byte" in ran.output
    ran = asyncio.run(sandbox.run(["pwd"], folder="/no/such/folder"))
    assert ran.status == 127 and ran.output == "/no/such/folder: No such file or directory\n"
    ran = asyncio.run(sandbox.python("print('half a character: \ud83d')"))
    assert ran.status == 1 and "SyntaxError" in ran.output


@pytest.fixture
def interpreter_in_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A virtual environment below /tmp, as of a clone that lies there; this process's interpreter
    for the test."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="a clone ü ") as folder:
        os.chmod(folder, 0o755)
        venv.create(folder, symlinks=True)
        monkeypatch.setattr(sys, "executable", f"{folder}/bin/python")
        monkeypatch.setattr(sys, "prefix", folder)
        monkeypatch.setattr(sys, "exec_prefix", folder)
        yield Path(folder)


def test_an_interpreter_below_tmp_starts(walls: str, interpreter_in_tmp: Path) -> None:
    code = (
        "import sys, tempfile\nprint(sys.prefix)\nprint(tempfile.TemporaryFile('w').write('kept'))"
    )
    ran = python(walls, code)
    assert (ran.status, ran.output) == (0, f"{interpreter_in_tmp}\n4\n")


@with_namespaces
@pytest.mark.parametrize("readable", [["{}/a/b", "{}"], ["{}", "{}/a/b"], ["{}/a", "/tmp"]])
def test_readable_folders_are_shown_wherever_they_lie(readable: list[str], tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "a" / "b").mkdir(parents=True)
        (Path(folder) / "a" / "c").write_text("here")
        for path in (folder, f"{folder}/a", f"{folder}/a/b"):
            os.chmod(path, 0o755)
        sandbox = Sandbox(
            LIMITS, walls="namespaces", readable=[path.format(folder) for path in readable]
        )
        code = (
            f"import tempfile\nprint(open('{folder}/a/c').read(), "
            "tempfile.TemporaryFile('w').write('kept'))"
        )
        assert asyncio.run(sandbox.python(code)).output == "here 4\n"


def test_an_interpreter_that_does_not_start_is_no_failure_of_the_program(
    walls: str, interpreter_in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "_python_folders", list)
    with pytest.raises(UserError, match="does not start in a sandbox"):
        python(walls, "print(1)")


def test_a_folder_that_is_not_there_takes_no_walls_away() -> None:
    sandbox = Sandbox(LIMITS)
    before = asyncio.run(sandbox.run(["pwd"])).holds
    ways = sandbox._ways
    assert asyncio.run(sandbox.run(["pwd"], folder="/no/such/folder")).status == 127
    assert asyncio.run(sandbox.run(["pwd"])).holds == before and sandbox._ways == ways


@with_namespaces
def test_a_host_that_has_namespaces_is_not_left_without_them_by_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sandbox = Sandbox(LIMITS)
    assert "signals" in asyncio.run(sandbox.run(["true"])).holds
    asked: list[list[str]] = []

    async def no_memory(request: dict[str, Any], seconds: float) -> dict[str, Any]:
        asked.append(request["ways"])
        return {"way": request["ways"][-1], "refused": "OSError: Cannot allocate memory"}

    monkeypatch.setattr(sandbox_module, "_supervise", no_memory)
    with pytest.raises(UserError, match="no sandbox"):
        asyncio.run(sandbox.run(["true"]))
    assert asked == [["namespaces"]]


def test_walls_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UserError, match="no walls 'namespace'"):
        Sandbox(walls="namespace")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "place", ["/", "app", "/../app", "/app/", "/usr/src/app", "/proc", "/dev/shm"]
)
def test_places_where_no_folder_can_be_shown_are_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder can be shown at") as caught:
        asyncio.run(Sandbox().run(["true"], folders={place: tmp_path}))
    assert "/app" in caught.value.fix and os.listdir(tmp_path) == []


def test_a_supervisor_that_does_not_end_in_time_says_so(
    walls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.deadlines.SANDBOX_GRACE", 0.01 - LIMITS.seconds)
    with pytest.raises(UserError, match="not ended in time") as caught:
        python(walls, "import time; time.sleep(1000)")
    assert "at_once" in caught.value.fix


@pytest.mark.parametrize(
    "attempt",
    [
        "resource.prlimit(int(sys.argv[1]), resource.RLIMIT_CORE)",
        "check(libc.shmat(int(sys.argv[2]), None, 0))",
        "check(libc.mq_open(b'/none', 0))",
        "os.memfd_create('memory that no limit counts')",
    ],
)
def test_calls_that_go_around_the_walls_are_refused(attempt: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    segment = libc.shmget(0, 4096, 0o1600)
    code = f"""
import ctypes, errno, os, resource, sys
sys.path.insert(0, {str(Path(sandbox_module.__file__).parent)!r})
import isolation
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
isolation.control(38, 1)
isolation.refuse_calls(False)
resource.prlimit(0, resource.RLIMIT_CORE, resource.getrlimit(resource.RLIMIT_CORE))
try:
    {attempt}
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    command = [sys.executable, "-c", code, str(os.getpid()), str(segment)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    finally:
        libc.shmctl(segment, 0, None)
    assert done.stdout == "EPERM\n", done.stderr


def test_what_does_not_hold_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sandbox = Sandbox(LIMITS)
    caplog.set_level("WARNING", "slime")
    for _ in range(2):
        sandbox._look_at({"way": "plain", "before": "OSError: no", "holds": ["files", "network"]})
    assert "not kept from the host's: signals" in caplog.text and sandbox._ways == ["plain"]


@with_namespaces
def test_home_is_the_folder_behind_namespaces() -> None:
    assert (
        python("namespaces", "import os; print(os.getcwd(), os.environ['HOME'])").output
        == f"{HOME} {HOME}\n"
    )


def test_children_are_found_where_the_kernel_does_not_name_them() -> None:
    code = f"""
import sys, time, subprocess
sys.path.insert(0, {str(Path(sandbox_module.__file__).parents[2])!r})
from slime.processes import tree
subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
while len(found := tree.descendants()) < 2:
    time.sleep(0.01)
tree._SEARCHED = True
print(sorted(tree.descendants()) == sorted(found))
tree.end_all()
print(tree.descendants())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n[]\n", done.stderr
