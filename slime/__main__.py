"""The `slime` command: `slime train …`, `slime flags …`; `python -m slime` is the same.

Each subcommand is imported only when it is called, so that `--help` is fast and needs no torch.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType, TracebackType

from slime import __version__
from slime.cli import ENTRIES
from slime.errors import UserError, is_debugging
from slime.processes.owner import leave_what_hangs, something_hangs
from slime.redact import redact_text

_FULL = "the disk is full", "free disk space, or write somewhere else"
_READ_ONLY = (
    "a file system has become read-only",
    "look at dmesg for errors of the disk, and mount it writable again",
)
_DENIED = (
    "a file is not for this user",
    "let this user read and write it (chmod, chown), or call slime as its owner",
)
#: Error number of a file operation → what happened, and what to do about it.
_OF_THE_DISK = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _DENIED,
}


#: Command → what it is for. Its code is ``main(argv)`` in the module of the same name in
#: `slime.cli`, which may return an exit status.
COMMANDS = {
    "init": "copy the recipes and examples into a folder",
    "train": "generate, train, push the weights, in lock step",
    "train-async": "the same, with rollouts generated ahead of training",
    "doctor": "check a run's flags, machine, model and data before it starts",
    "plan": "predict memory and step time of a run, and which layouts are worth trying",
    "align": "find why log-probs of trainer and engine differ, and rank the causes",
    "launch": "write the job of a run for Slurm, KubeRay or SkyPilot",
    "resume": "continue a run that was stopped, failed or lost its host",
    "chat": "talk to a model in the terminal: a run's newest, or any directory",
    "serve": "serve a model behind OpenAI's API",
    "engines": "list the engines of a running run; let one join or leave",
    "export": "write a model as a GGUF file, for llama.cpp and Ollama",
    "push": "upload a model to the hub, with a card that says how it was trained",
    "flags": "explain a flag: what it does and needs, who reads it, its value in a run",
    "reward": "run a reward function on data, without training",
    "report": "write report.html of a run folder, or compare several",
    "compare": "judge a run by the ranges that its recipe expects",
    "watch": "show runs as a live page: curves, timelines, every sample",
    "explain": "say why a run ended or goes wrong, with causes and remedies",
    "bundle": "pack what a bug report needs of a run, without secrets and weights",
    "convert": "convert checkpoints between Hugging Face and Megatron",
}

_VERSION = "version"


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `slime` command; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _dispatch(words))


def run(name: str) -> None:
    """Run one subcommand with this process's arguments, then exit. `train.py` and the scripts in
    `tools/` call it."""
    sys.exit(main([name, *sys.argv[1:]]))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        print(_usage())
        return 0 if words else UserError.exit_status
    if words[0] in ("--version", _VERSION):
        if words[1:]:
            raise UserError(f"slime version takes no {words[1]!r}", fix="slime version")
        from slime.observe.run_folder import package_versions

        print(f"slime {__version__}, Python {platform.python_version()}")
        print(", ".join(f"{name} {version}" for name, version in package_versions().items()))
        return 0
    name = words[0] if words[0] in COMMANDS else words[0].replace("_", "-")
    rest = words[1:]
    if name not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.5)
        raise UserError(
            f"there is no command {words[0]!r}",
            why=f"the commands are: {', '.join([*COMMANDS, _VERSION])}",
            fix=f"did you mean `slime {near[0]}`?" if near else "",
        )
    entry = ENTRIES.get(name)
    if entry and any(word in ("--help", "-h") for word in rest):
        from slime.config.help import print_help

        print_help(entry, rest)
        return 0
    with _interruptible() if entry or name == "resume" else nullcontext():
        command = importlib.import_module(f"slime.cli.{'train' if entry else name}")
        function = command.main_async if name == "train-async" else command.main
        return int(function(rest) or 0)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the process at once until the run handles the signal (`slime.run.stopping`).
    During an import a library may swallow a KeyboardInterrupt, and nothing needs closing yet."""

    def leave(number: int, frame: FrameType | None) -> None:
        print("interrupted", file=sys.stderr, flush=True)
        os._exit(128 + number)

    is_ours = threading.current_thread() is threading.main_thread() and not is_debugging()
    before = signal.getsignal(signal.SIGINT)
    if not is_ours or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: slime COMMAND [arguments]      (slime COMMAND --help tells more)", ""]
    lines += [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    lines += [f"  {_VERSION:<{width}}  print the versions of slime, Python and the main packages"]
    return "\n".join(lines)


def guarded(action: Callable[[], int]) -> int:
    """Run ``action()`` and return an exit status: the one place where errors become text.

    A `UserError` is printed in a few lines, with a traceback only when SLIME_DEBUG=1, and gives 2
    (1 for a `RunFailed`); Ctrl-C gives 130; a closed pipe (``slime flags | head``) prints nothing;
    a missing package that slime imports gives 2. Any other exception is a defect: its traceback is
    printed, and the status is 1.
    """
    sys.excepthook = _show
    try:
        status = _status_of(action)
    except BaseException as error:
        if not something_hangs():
            raise
        status = 1  # the interpreter would hang before it reports the error
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            _show(type(error), error, error.__traceback__)
    leave_what_hangs(status)
    return status


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without secrets; replaces `sys.excepthook`."""
    print(
        redact_text("".join(traceback.format_exception(kind, error, trace))),
        end="",
        file=sys.stderr,
    )


def _status_of(action: Callable[[], int]) -> int:
    try:
        return action()
    except BrokenPipeError:
        # the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (UserError, OSError, ModuleNotFoundError) as error:
        shown = _as_user_error(error)
        if shown is None or is_debugging():
            raise
        # from a Ray actor comes a subclass of UserError, whose str() is the remote traceback
        # `add_note` added e.g. where the crash folder is
        notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
        text = redact_text("\n".join([UserError.__str__(shown), *notes]))
        print(f"error: {text}", file=sys.stderr)
        return shown.exit_status
    except KeyboardInterrupt as error:
        if is_debugging():
            raise
        print("interrupted", file=sys.stderr)
        return 128 + next(iter(error.args), signal.SIGINT)  # SIGQUIT also raises it


def _as_user_error(error: UserError | OSError | ModuleNotFoundError) -> UserError | None:
    """Return an error that the user can fix, with cause and remedy; None: it is a defect."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError):
        return _not_installed(error)
    if error.errno not in _OF_THE_DISK:
        return None
    what, fix = _OF_THE_DISK[error.errno]
    return UserError(f"{what}: {OSError.__str__(error)}", fix=fix)


def _not_installed(error: ModuleNotFoundError) -> UserError | None:
    """Return the error for a package that slime imports and this Python lacks; None: other code
    imports it."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    package = Path(__file__).parent
    name = (error.name or "").partition(".")[0]
    if name in ("", package.name) or not files or package not in files[-1].parents:
        return None
    environment = package.parent / ".venv"
    what = "slime-rl"
    if (package.parent / "pyproject.toml").is_file():
        what = f"-e {package.parent}"
    fix = f"in a virtual environment: pip install {what}"
    is_active = Path(sys.prefix).resolve() == environment.resolve()
    if (environment / "bin" / "activate").is_file() and not is_active:
        fix = f". {environment}/bin/activate"  # made by `make`
    return UserError(
        f"the module {name} is not installed for {sys.executable}",
        why="slime imports it, and was not installed for this Python, or not with all that it "
        "needs",
        fix=fix,
    )


if __name__ == "__main__":
    sys.exit(main())
