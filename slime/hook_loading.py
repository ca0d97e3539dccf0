"""How a hook is found by its dotted path, how its signature is checked, which keywords it takes, how it is called.

The hooks themselves are in `slime.hooks`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.errors import UserError


@functools.cache
def load_function(path: str) -> Any:
    """The object at a path: ``"pkg.module.name"``, ``"pkg.module:name"`` or ``"folder/file.py:name"``; cached. Modules
    in the working directory are found too.

    Raises:
        UserError: no such module, no such name in it (tells the nearest), or the module's own code fails on import.
    """
    module_path, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_path or not name:
        raise UserError(f"'{path}' names no function", fix="write it as package.module.function")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target = _module_of_file(module_path) if module_path.endswith(".py") else importlib.import_module(module_path)
    except Exception as error:  # whatever user code raises on import is the message
        raise _import_error(path, module_path, error) from error
    for part in name.split("."):
        found = vars(target).get(part, _MISSING) if inspect.ismodule(target) else getattr(target, part, _MISSING)
        if found is _MISSING and inspect.ismodule(target):
            found = getattr(target, part, _MISSING)  # a lazy attribute (module __getattr__)
        if found is _MISSING:
            names = _own_functions(target)
            near = difflib.get_close_matches(part, names, n=1)
            raise UserError(
                f"'{path}' cannot be found: {module_path} has no '{part}'",
                why=f"it has: {', '.join(names[:12]) or 'no functions'}",
                fix=f"did you mean '{near[0]}'?" if near else "check the name",
            )
        target = found
    return target


_MISSING = object()


def _own_functions(target: Any) -> list[str]:
    """Names of what can be called in a module or class and is not imported there."""
    home = target.__name__ if inspect.ismodule(target) else target.__module__
    public = [name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name))]
    return [name for name in public if getattr(getattr(target, name), "__module__", home) == home]


def _module_of_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module


def _import_error(path: str, module_path: str, error: BaseException) -> UserError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_path == missing or module_path.startswith(missing + ".")):
        return UserError(
            f"'{path}' cannot be found: there is no module '{missing}'",
            why=f"searched the working directory {os.getcwd()} and Python's path",
            fix="check the spelling, install the package, or set PYTHONPATH",
        )
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    command = f"python {module_path}" if module_path.endswith(".py") else f'python -c "import {module_path}"'
    return UserError(
        f"'{path}' cannot be loaded: importing {module_path} failed",
        why=f"{type(error).__name__}: {error}{where}",
        fix=f"mend the module; {command} shows the same error",
    )


def check_signature(fn: Any, protocol: type, path: str) -> None:
    """Check that ``fn`` can be called as ``protocol`` promises.

    Raises:
        UserError: not callable, or its parameters do not fit; shows the call that will be made and the signature.
    """
    if not callable(fn):
        raise UserError(f"'{path}' is not a function but a {type(fn).__name__}", fix="name a function")
    wanted = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    required = [p for p in wanted if p.default is p.empty]
    positional = [p.name for p in required if p.kind is not p.KEYWORD_ONLY]
    keywords = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins have none; the first call will tell
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join(positional + [f"{name}=…" for name in keywords])
        raise UserError(
            f"'{path}' cannot be called as ({call})",
            why=f"its signature is {signature}: {error}",
            fix=f"give it these parameters; see slime.hooks.{protocol.__name__}",
        ) from error


def check_class(cls: Any, base: type, path: str) -> None:
    """Check that ``cls`` is a ``base`` with the methods that every one must have, built as ``cls(args)``.

    Raises:
        UserError: it is something else, lacks a method, or takes other arguments.
    """
    fix = f"derive it from slime.hooks.{base.__name__}"
    if not inspect.isclass(cls) or not issubclass(cls, base):
        raise UserError(f"'{path}' is no {base.__name__}", why=f"it is {cls!r:.100}", fix=fix)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UserError(f"'{path}' lacks {' and '.join(missing)}", fix=f"add them; see slime.hooks.{base.__name__}")
    try:
        inspect.signature(cls).bind("args")
    except TypeError as error:
        raise UserError(f"'{path}' cannot be built from args", why=str(error), fix=fix) from error


@functools.lru_cache(maxsize=256)
def _accepted_keywords(fn: Any) -> frozenset[str] | None:
    """Names that ``fn`` takes by keyword; None when it takes any."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some builtins have no signature
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))


def accepted(fn: Any, optional: dict[str, Any]) -> dict[str, Any]:
    """Those of the ``optional`` keyword arguments that ``fn`` accepts.

    Example:
        >>> accepted(lambda args, sample, evaluation: 0, {"evaluation": True, "rollout_id": 3})
        {'evaluation': True}
    """
    names = _accepted_keywords(fn)
    return optional if names is None else {key: value for key, value in optional.items() if key in names}


def is_async(fn: Any) -> bool:
    """Whether calling ``fn`` gives a coroutine (functions, partials and objects with an async ``__call__``)."""
    if isinstance(fn, functools.partial):
        return is_async(fn.func)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__)


async def call_hook(
    fn: Any, *args: Any, optional: dict[str, Any] | None = None, in_thread: bool = False, **kwargs: Any
) -> Any:
    """Call a hook, sync or async, and return what it returns.

    Args:
        optional: keyword arguments passed only if ``fn`` accepts them.
        in_thread: run a sync function in a worker thread, for hooks that may take long (rewards, whole rollouts);
            others run at once on the event loop.
    """
    if optional:
        kwargs |= accepted(fn, optional)
    try:
        if in_thread and not is_async(fn):
            result = await _in_daemon_thread(functools.partial(fn, *args, **kwargs))
        else:
            result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:  # would end the event loop, and everyone else would wait for ever
        raise RuntimeError(f"it raised {error!r}") from error


async def _in_daemon_thread(call: Callable[[], Any]) -> Any:
    """The result of ``call`` in a thread of its own. Unlike `asyncio.to_thread`'s, which are few and are waited for
    when the program ends, one that hangs holds up nothing. It sees the caller's context variables, as there."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(call)
        except BaseException as raised:  # delivered to whoever awaits
            error = raised
            if isinstance(raised, StopIteration):  # which a future cannot hold
                error = RuntimeError(f"it raised {raised!r}")
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="slime-hook", daemon=True).start()
    return await future
