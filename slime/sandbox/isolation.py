"""Restrict a program by kernel mechanisms: namespaces, Landlock, seccomp, resource limits.

Standard library only, and nothing of slime's: `supervisor.py`, which runs as a script, imports it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

_NEW_MOUNTS = 0x20000
_NEW_UTS = 1 << 26
_NEW_IPC = 1 << 27
_NEW_USER = 1 << 28
_NEW_PIDS = 1 << 29
_NEW_NET = 1 << 30
_ANY_NEW = 0x7E020000  # the flags above, and that of control groups
_BIND = 4096
_RECURSIVE = 16384
_PRIVATE = 1 << 18
_NOSUID = 2
_NODEV = 4
_NOEXEC = 8
_DETACH = 2
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR = 442
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_ATTR_READ_ONLY = 0x1 | 0x2 | 0x4
_PDEATHSIG = 1
_CAPBSET_DROP = 24
_SECCOMP = 22
_NO_NEW_PRIVS = 38
#: First user id for sandboxes of root, above every user of a host. Each sandbox has its own user,
#: so that the kernel counts its processes separately.
FIRST_UID = 2_000_000_000
_NOBODY = 65534

#: Paths of the host that programs need to start, read-only. No private file of /etc is among them.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"),
    *(
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/etc/alternatives",
        "/etc/localtime",
    ),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")


def call(function: str, *arguments: Any) -> int:
    """Call a function of the C library; raise its error as an OSError that names it."""
    result = int(getattr(LIBC, function)(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def control(option: int, first: int = 0, second: Any = 0) -> None:
    """Call prctl(2)."""
    call(
        "prctl",
        option,
        ctypes.c_ulong(first),
        second or ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )


def die_with(parent: int, signal: int = 9) -> None:
    """Do as `slime.processes.owner.die_with_parent`, which a script without packages cannot
    import."""
    control(_PDEATHSIG, signal)
    if os.getppid() != parent:
        os._exit(1)


# -- users and limits ------------------------------------------------------------------------------


def own_uid() -> int:
    """Choose the user that a sandbox of this process runs as: another one if root can choose."""
    if os.geteuid():
        return os.geteuid()
    wanted = FIRST_UID + os.getpid()
    with open("/proc/self/uid_map") as lines:
        ranges = [tuple(map(int, line.split())) for line in lines]
    return wanted if any(first <= wanted < first + count for first, _, count in ranges) else _NOBODY


def become(uid: int) -> None:
    """Become another user, for good."""
    if os.geteuid() != uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def limit(limits: dict[str, Any], processes: int | None) -> None:
    """Set resource limits, the soft and the hard ones."""
    seconds = int(limits["cpu_seconds"])
    for kind, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, limits["memory"], limits["memory"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, 256, 256),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        *([(resource.RLIMIT_NPROC, processes, processes)] if processes is not None else []),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft = min(soft, most)
            hard = min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def tasks_of(uid: int) -> int:
    """Count the processes and threads of a user, as RLIMIT_NPROC does."""
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid == uid:
                found += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue  # ended while we looked
    return found


def counts_by_namespace() -> bool:
    """Tell whether the kernel counts a user's processes per user namespace (Linux 5.14)."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int("".join(filter(str.isdigit, minor)) or 0)) >= (5, 14)


# -- namespaces ------------------------------------------------------------------------------------


def enter_namespaces() -> None:
    """Leave the host's mounts, processes (from the next fork on), network, and shared memory.

    Raises:
        OSError: this kernel, or the container around us, does not allow it.
    """
    flags = _NEW_MOUNTS | _NEW_PIDS | _NEW_NET | _NEW_IPC | _NEW_UTS
    uid = os.geteuid()
    gid = os.getegid()
    if uid == 0:
        call("unshare", flags)
        return
    call("unshare", flags | _NEW_USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def build_root(scratch: str, request: dict[str, Any], uid: int) -> None:
    """Build a new root: the system and readable paths, folders of the caller, and files in memory
    that vanish with it. The first process of the new namespaces calls it.

    Args:
        scratch: an empty folder of the host on which it is put together.
    """
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    size = int(request["limits"]["file_bytes"])
    _mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    store = _folder(f"{scratch}/.store")
    _mount(
        "tmpfs",
        store,
        "tmpfs",
        _NOSUID | _NODEV,
        f"mode=755,size={size},nr_inodes={max(1024, size >> 12)}",
    )
    _folder(f"{scratch}/dev")
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{scratch}/dev/{name}")
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
    ):
        os.symlink(target, f"{scratch}/dev/{name}")
    for name, place in (("tmp", "tmp"), ("shm", "dev/shm"), ("work", request["home"].lstrip("/"))):
        os.chown(_folder(f"{store}/{name}"), uid, uid if os.geteuid() == 0 else -1)
        _bind(f"{store}/{name}", f"{scratch}/{place}")
    # After the writable folders, which would hide what is shown below them, and parents before
    # their children.
    shown: list[str] = []
    for path in sorted({*SYSTEM, *request["readable"]}, key=os.path.realpath):
        _show(scratch, path, shown)
    for place, folder in request["folders"].items():
        _bind(folder, scratch + place)
    try:
        _mount("proc", _folder(f"{scratch}/proc"), "proc", _NOSUID | _NODEV | _NOEXEC)
    except OSError as error:  # in a container that hides parts of /proc, another is refused
        if error.errno != errno.EPERM:
            raise
    _pivot(scratch)


def _pivot(root: str) -> None:
    old = _folder(f"{root}/.old")
    call("syscall", _SYS_PIVOT_ROOT[platform.machine()], root.encode(), old.encode())
    os.chdir("/")
    for left in ("/.old", "/.store"):
        call("umount2", left.encode(), _DETACH)
        os.rmdir(left)
    _read_only("/", recursive=False)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    call("mount", *words, ctypes.c_ulong(flags), data.encode() or None)


def _folder(path: str) -> str:
    os.makedirs(path, exist_ok=True)
    return path


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        _folder(target)
    else:
        _folder(os.path.dirname(target))
        Path(target).touch()
    _mount(source, target, None, _BIND | _RECURSIVE)


def _show(root: str, path: str, shown: list[str]) -> None:
    """Bind a path of the host read-only below ``root``, unless a folder in ``shown`` contains it;
    links keep their targets."""
    if not os.path.exists(path):
        return
    real = os.path.realpath(path)
    if not any(is_below(real, folder) for folder in shown):
        _bind(real, root + real)
        if is_below(root, real):  # the copy of what is put together here
            call("umount2", (root + root).encode(), _DETACH)
        _read_only(root + real)
        shown.append(real)
    if path != real and not os.path.lexists(root + path):
        _folder(os.path.dirname(root + path))
        os.symlink(real, root + path)


def is_below(path: str, folder: str) -> bool:
    """Tell whether ``path`` is ``folder`` or lies in it."""
    return os.path.commonpath((path, folder)) == folder


def _read_only(path: str, recursive: bool = True) -> None:
    attributes = struct.pack("QQQQ", _ATTR_READ_ONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    call(
        "syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes)
    )


# -- seccomp ---------------------------------------------------------------------------------------

#: Refused call → its numbers on x86-64 and on 64-bit ARM; None if it has none.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
}
#: System calls that create processes and threads, besides clone.
_FORKS: dict[str, tuple[int | None, int | None]] = {"fork": (57, None), "vfork": (58, None)}
#: prlimit is allowed only for the calling process (pid 0): limits could end another process.
_PRLIMIT = (302, 261)
_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
_CLONE3 = 435
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06


def refuse_calls(alone: bool) -> bool:
    """Refuse sockets, other processes' memory, and calls that help to leave a sandbox, for this
    process and its children; with ``alone`` it may have no children. Return False if that is not
    possible."""
    if platform.machine() not in _MACHINES:
        return False
    column, machine, clone = _MACHINES[platform.machine()]
    refused = _ERROR | errno.EPERM
    unknown = _ERROR | errno.ENOSYS
    program = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x86-64's second table of calls
        (_RETURN, 0, 0, refused),
        (_EQUAL, 0, 1, _CLONE3),  # its flags cannot be checked here; libraries fall back to clone
        (_RETURN, 0, 0, unknown),
    ]
    numbers = [calls[column] for calls in (_REFUSED | (_FORKS if alone else {})).values()]
    for number in filter(None, numbers):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refused)]
    program += [
        (_EQUAL, 0, 4, _PRLIMIT[column]),
        (_LOAD, 0, 0, 16),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_AT_LEAST, 0, 1, 0) if alone else (_ANY_BIT, 0, 1, _ANY_NEW),
        (_RETURN, 0, 0, refused),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    try:
        control(_SECCOMP, 2, filter_)
    except OSError:
        return False
    return True


# -- Landlock --------------------------------------------------------------------------------------

_CREATE = 444
_ADD = 445
_RESTRICT = 446
_READ = 0b1101  # execute, read files, list; what a rule of a single file may name
_OF_FILES = 0b1100000000000111


def landlock(readable: list[str], writable: list[str]) -> int:
    """Restrict this process and its children to these paths, and from signals and TCP if the kernel
    can.

    Returns:
        the version of Landlock, 0 if there is none. Version 6 also restricts signals.
    """
    version = int(LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), 1))
    if version < 1:
        return 0
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    everything = (1 << bits) - 1
    attributes = struct.pack("QQQ", everything, 0b11, 0b11)[
        : 8 if version < 4 else 16 if version < 6 else 24
    ]
    rules = call("syscall", _CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    for access, paths in (
        (_READ, readable),
        (everything, writable),
        (everything, [f"/dev/{n}" for n in _DEVICES]),
    ):
        for path in filter(os.path.exists, paths):
            allowed = access if os.path.isdir(path) else access & everything & _OF_FILES
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", allowed, descriptor)
            call("syscall", _ADD, rules, 1, rule, 0)
            os.close(descriptor)
    call("syscall", _RESTRICT, rules, 0)
    os.close(rules)
    return version


def give_up_privileges() -> None:
    """Keep this process and its children from gaining privileges by executing a file, including
    root's."""
    control(_NO_NEW_PRIVS, 1)
    if os.geteuid() == 0:
        for capability in range(64):
            if LIBC.prctl(_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
                break  # the kernel knows no more capabilities
