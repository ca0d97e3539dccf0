"""Load users' functions by their dotted path, check their signatures, and call them; errors show
the user's own lines.

The hooks themselves are in `slime.user_code.hooks`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle
import orjson
import xxhash

from slime.documentation import doc_url
from slime.errors import UserError, a_type, name_and_text, with_article
from slime.files import write_atomically
from slime.user_code import calls as user_calls
from slime.user_code.calls import run_in_thread, run_isolated, running
from slime.user_code.process_state import kept

#: Variable that gives other processes the driver's working directory and the folder of its
#: script.
USER_FOLDERS = "SLIME_USER_FOLDERS"


def save_function(function: Any, file: Path) -> str:
    """Return a path from which other processes of this host load ``function``.

    For an importable function it is the import path. Other functions (a lambda, a closure, a
    function of a notebook) are pickled to ``file``, with the objects that they refer to.

    Raises:
        UserError: it refers to an object that cannot be pickled, such as an open file or a lock.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    shown = getattr(function, "__name__", None) or type(function).__name__
    if module not in (None, "__main__") and name is not None and "<" not in name:
        return f"{module}:{name}"
    try:
        content = cloudpickle.dumps(function)
    except Exception as error:  # the objects that it refers to may raise anything
        raise UserError(
            f"{shown} cannot be handed to another process",
            why=name_and_text(error),
            fix="let it open files and connections itself, or put it into a module",
        ) from error
    write_atomically(file, content)
    return f"{file.resolve()}:{shown}"


def _find_user_modules() -> None:
    """Append the folders of users' modules to the import path; last, so that no file there replaces
    an installed module."""
    folders = [] if "" in sys.path else [os.getcwd()]
    folders += os.environ.get(USER_FOLDERS, "").split(os.pathsep)
    sys.path += [folder for folder in dict.fromkeys(folders) if folder and folder not in sys.path]


@functools.cache
def load_function(path: str) -> Any:
    """Return the object at a path: ``"pkg.module.name"``, ``"pkg.module:name"``,
    ``"folder/file.py:name"``, or what `save_function` returned; cached. Modules in the working
    directory are found too.

    Raises:
        UserError: the module or the name does not exist (suggests the nearest name), or the import
            fails.
    """
    module_path, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_path or not name:
        raise UserError(f"'{path}' names no function", fix="write it as package.module.function")
    _find_user_modules()
    if module_path.endswith(".pkl"):
        return _saved_function(path, Path(module_path))
    _check_file(path, module_path, name)
    try:
        if module_path.endswith(".py"):
            file = Path(module_path).resolve()
            target = _module_of_file(file, file.stat().st_mtime_ns)
        else:
            target = importlib.import_module(module_path)
    except (Exception, SystemExit) as error:  # user code may raise anything on import
        outer, _, leaf = module_path.rpartition(".")
        found_outer = sys.modules.get(outer)
        is_missing = getattr(error, "name", None) == module_path
        if not is_missing or found_outer is None or not hasattr(found_outer, leaf):
            raise _import_error(path, module_path, error) from error
        target = found_outer
        name = f"{leaf}.{name}"  # a method: module.Class.method
    for part in name.split("."):
        if inspect.ismodule(target):
            found = vars(target).get(part, _MISSING)
        else:
            found = getattr(target, part, _MISSING)
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


def file_of(path: str) -> Path | None:
    """Load the function at ``path`` and return the file with its code; None if it has no file.

    Raises:
        UserError: as `load_function`.
    """
    named = Path(path.partition(":")[0])
    if named.suffix in (".py", ".pkl"):
        return named
    function = load_function(path)
    while isinstance(function, functools.partial):
        function = function.func
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    return Path(file) if file else None


def fingerprint(values: Any, functions: Iterable[str]) -> str:
    """Return a hash of ``values`` (plain JSON), of the files of the functions at these paths, and
    of the user's own files that they import.

    Raises:
        UserError: as `load_function`.
    """
    files: list[bytes] = []
    for path in functions:
        if (file := file_of(path)) is not None:
            if file.suffix == ".py":
                imported = sorted(_imported_files(load_function(path)) - {file})
            else:
                imported = []
            files += [one.read_bytes() for one in (file, *imported)]
    return xxhash.xxh3_128_hexdigest(
        b"\0".join([orjson.dumps(values, option=orjson.OPT_SORT_KEYS), *files])
    )


def _imported_files(function: Any) -> set[Path]:
    """Return the files of the modules that a function's module imports, except installed
    packages."""
    found: set[Path] = set()
    while isinstance(function, functools.partial):
        function = function.func
    names = vars(
        sys.modules.get(getattr(function, "__module__", None) or "", None) or object
    ).items()
    waiting = [dict(getattr(inspect.unwrap(function), "__globals__", None) or names)]
    while waiting:
        for value in waiting.pop().values():
            name = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            module = sys.modules.get(name) if isinstance(name, str) else None
            file = Path(getattr(module, "__file__", None) or "")
            if (
                module is not None
                and file.suffix == ".py"
                and file not in found
                and not _is_installed(file)
            ):
                found.add(file)
                waiting.append(dict(vars(module)))
    return found


@functools.cache
def _is_installed(file: Path) -> bool:
    """Tell whether a file belongs to Python, slime or an installed package."""
    places = [
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[1]),
    ]
    return any(file.is_relative_to(place) for place in places) or "site-packages" in file.parts


def _saved_function(path: str, file: Path) -> Any:
    try:
        return cloudpickle.loads(file.read_bytes())
    except Exception as error:  # its imports may raise anything
        raise UserError(
            f"the function {path} cannot be loaded",
            why=name_and_text(error),
            fix="start the run again",
        ) from error


_MISSING = object()
AnyUserError = TypeVar("AnyUserError", bound=UserError)


def _own_functions(target: Any) -> list[str]:
    """Return the names of the public callables that a module or class defines itself."""
    home = target.__name__ if inspect.ismodule(target) else target.__module__
    public = [
        name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name))
    ]
    return [name for name in public if getattr(getattr(target, name), "__module__", home) == home]


@functools.cache  # functions of one file share its module's state
def _module_of_file(file: Path, written_at: int) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


def _check_file(path: str, module_path: str, name: str) -> None:
    """Refuse a file without a function, without its ending, or that does not exist."""
    if path.endswith(".py"):
        raise UserError(f"'{path}' names a file and no function in it", fix=f"write {path}:NAME")
    is_file = module_path.endswith(".py")
    if not is_file and os.sep in module_path:
        raise UserError(
            f"'{path}' is neither a module nor a file",
            why="modules have dots between their parts, and files end with .py",
            fix=f"write {module_path}.py:{name}",
        )
    if is_file and not Path(module_path).is_file():
        raise UserError(
            f"'{path}' cannot be found: there is no file '{module_path}'",
            why=f"the working directory is {os.getcwd()}",
            fix="check the path",
        )


def _import_error(path: str, module_path: str, error: BaseException) -> UserError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_path == missing or module_path.startswith(missing + ".")):
        return UserError(
            f"'{path}' cannot be found: there is no module '{missing}'",
            why=f"searched the working directory {os.getcwd()} and Python's path",
            fix="check the spelling, install the package, or set PYTHONPATH",
        )
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    if module_path.endswith(".py"):
        command = f"python {module_path}"
    else:
        command = f'python -c "import {module_path}"'
    return UserError(
        f"'{path}' cannot be loaded: importing {module_path} failed",
        why=f"{name_and_text(error)}{where}",
        fix=f"mend the module; {command} shows the same error",
    )


def check_signature(fn: Any, protocol: type, path: str) -> None:
    """Check that ``fn`` can be called as ``protocol`` defines.

    Raises:
        UserError: ``fn`` is not callable, is sync where ``protocol`` is async, or its parameters do
            not fit; the message shows the call and the signature.
    """
    if not callable(fn):
        raise UserError(f"'{path}' is not a function but {a_type(fn)}", fix="name a function")
    if inspect.isclass(fn) and any("__call__" in vars(base) for base in fn.__mro__):
        raise UserError(
            f"'{path}' is a class, and each call would build an object of it",
            why="its objects are what is called",
            fix=f"name an object: {fn.__name__.lower()} = {fn.__name__}(…) in its module",
        )
    if _kind_of(fn, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        raise UserError(
            f"'{path}' is a generator: calling it returns nothing yet",
            why="there is a yield in it",
            fix="let it return its result",
        )
    if inspect.iscoroutinefunction(protocol.__call__) and is_sync(fn):
        raise UserError(
            f"'{path}' is not async",
            why="it is awaited, and what it returns is no coroutine",
            fix="declare it with 'async def'; wait in it with 'await', for sync work with 'await "
            "asyncio.to_thread(…)'",
        )
    wanted = list(inspect.signature(protocol.__call__).parameters.values())[1:]
    required = [p for p in wanted if p.default is p.empty]
    positional = [p.name for p in required if p.kind is not p.KEYWORD_ONLY]
    keywords = [p.name for p in required if p.kind is p.KEYWORD_ONLY]
    try:
        signature = inspect.signature(fn)
    except ValueError:  # some builtins have no signature; the first call checks it
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        _check_names(signature, signature.parameters, positional, path)
        call = ", ".join(positional + [f"{name}=…" for name in keywords])
        raise UserError(
            f"'{path}' cannot be called as ({call})",
            why=f"its signature is {signature}: {error}",
            fix=f"give it these parameters; see slime.user_code.hooks.{protocol.__name__}",
        ) from error
    _check_order(signature, positional, path)


#: Parameters of reward functions of other systems → the system.
_FOREIGN = {
    "completions": "TRL",
    "completion_ids": "TRL",
    "queries": "OpenRLHF",
    "prompts": "TRL",
    "solution_str": "verl",
    "ground_truth": "verl",
}
#: System → what a sample has in place of what its functions are given.
_IN_A_SAMPLE = {
    "TRL": "sample.response is one of the completions, and label and metadata are its columns",
    "OpenRLHF": "sample.response is one of the queries without its prompt, sample.label its label",
    "verl": "sample.response is the solution_str, sample.label the ground_truth, sample.metadata "
    "the extra_info",
}


def _check_order(signature: inspect.Signature, wanted: list[str], path: str) -> None:
    """Check that parameters with the names of the protocol are in its order, as they are passed by
    position, and that none has the name of another system's.

    Raises:
        UserError: the function would take one argument for another.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in signature.parameters.values() if p.kind in kinds][: len(wanted)]
    call = f"'{path}' is called as ({', '.join(wanted)}), and its signature is {signature}"
    for name, passed in zip(names, wanted):
        if name != passed and name in wanted:
            raise UserError(
                call,
                why=f"its '{name}' would be the {passed}: arguments are passed by position",
                fix="put its parameters into this order",
            )
    _check_names(signature, names, wanted, path)


def _check_names(
    signature: inspect.Signature, names: Iterable[str], wanted: list[str], path: str
) -> None:
    """Refuse a function that has the parameters of another system's functions."""
    name = next((name for name in names if name in _FOREIGN), "")
    if not name:
        return
    system = _FOREIGN[name]
    raise UserError(
        f"'{path}' is called as ({', '.join(wanted)}), and its signature is {signature}",
        why=f"'{name}' is a parameter of {system}'s functions, which are called otherwise",
        fix=f"take ({', '.join(wanted)}): {_IN_A_SAMPLE[system]}",
    )


def check_class(cls: Any, base: type, path: str) -> None:
    """Check that ``cls`` is a subclass of ``base`` that implements all abstract methods, and can
    be built as ``cls(args)``.

    Raises:
        UserError: ``cls`` is something else, lacks a method, or takes other arguments.
    """
    fix = f"derive it from slime.user_code.hooks.{base.__name__}"
    if not inspect.isclass(cls) or not issubclass(cls, base):
        raise UserError(f"'{path}' is no {base.__name__}", why=f"it is {cls!r:.100}", fix=fix)
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UserError(
            f"'{path}' lacks {' and '.join(missing)}",
            fix=f"add them; see slime.user_code.hooks.{base.__name__}",
        )
    try:
        inspect.signature(cls).bind("args")
    except TypeError as error:
        raise UserError(f"'{path}' cannot be built from args", why=str(error), fix=fix) from error


@functools.lru_cache(maxsize=256)
def _accepted_keywords(fn: Any) -> frozenset[str] | None:
    """Return the names that ``fn`` takes by keyword; None if it takes any name."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some builtins have no signature
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(
        p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


def accepted(fn: Any, optional: dict[str, Any]) -> dict[str, Any]:
    """Return the ``optional`` keyword arguments that ``fn`` accepts.

    Example:
        >>> accepted(lambda args, sample, evaluation: 0, {"evaluation": True, "rollout_id": 3})
        {'evaluation': True}
    """
    names = _accepted_keywords(fn)
    if names is None:
        return optional
    return {key: value for key, value in optional.items() if key in names}


def is_async(fn: Any) -> bool:
    """Tell whether calling ``fn`` gives a coroutine (functions, partials and objects with an async
    ``__call__``)."""
    return _kind_of(fn, inspect.iscoroutinefunction)


def is_sync(fn: Any) -> bool:
    """Tell whether calling ``fn`` certainly gives nothing to await: every ``return`` has a literal,
    or a parameter as it was passed. False if that is unknown before the call, as where it returns
    what another function gives.

    Example:
        >>> def shout(args, sample): sample.response += "!"; return sample
        >>> is_sync(shout), is_sync(lambda args, sample: ask(sample))
        (True, False)
    """
    if isinstance(fn, functools.partial):
        return is_sync(fn.func)
    function = fn if inspect.isroutine(fn) else type(fn).__call__
    code = getattr(function, "__code__", None)
    if is_async(fn) or code is None:
        return False
    try:
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(code))).body
    # no source, as of a shell, or a lambda, whose source is a part of a statement
    except (OSError, SyntaxError, ValueError):
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assigned = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    as_passed = {*code.co_varnames[: code.co_argcount]} - assigned
    return isinstance(tree, ast.FunctionDef) and all(
        isinstance(value, (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.ListComp, type(None)))
        or (isinstance(value, ast.Name) and value.id in as_passed)
        for value in _returned(tree.body)
    )


def _returned(nodes: Iterable[ast.AST]) -> Iterator[ast.expr | None]:
    """Yield what the ``return`` statements of a function's body give, without those of functions
    within it."""
    for node in nodes:
        if isinstance(node, ast.Return):
            yield node.value
        elif not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        ):
            yield from _returned(ast.iter_child_nodes(node))


def _kind_of(fn: Any, *kinds: Callable[[Any], bool]) -> bool:
    """Tell whether ``fn``, or the function that a call of it runs, is of one of these kinds."""
    if isinstance(fn, functools.partial):
        return _kind_of(fn.func, *kinds)
    return any(kind(fn) or kind(type(fn).__call__) for kind in kinds)


# -- failures --------------------------------------------------------------------------------------


class FunctionFailed(UserError):
    """A user's function raised, hung, or returned an invalid value. If it was called for one sample
    or group, only that sample or group is lost (`slime.rollout.trajectory`)."""

    @classmethod
    def of(cls, error: UserError) -> FunctionFailed:
        """Convert an error of slime's code that the user's function called, or that rejected the
        function's result."""
        if isinstance(error, FunctionFailed):
            return error
        return with_user_frames(cls(error.what, error.why, error.fix), error).with_traceback(
            error.__traceback__
        )


class FunctionHangs(FunctionFailed):
    """A user's function did not return in time."""


_SLIME = str(Path(__file__).parents[1]) + os.sep
_SITE_PACKAGES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_MAX_FRAMES = 12


def user_frames(error: BaseException) -> str:
    """Return the frames of the traceback of ``error``, as Python prints them, without those of
    slime and of the standard library; frames of other libraries stay. "" if there are none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_SLIME, "<frozen"))
        and (
            frame.filename.startswith(_SITE_PACKAGES)
            or not frame.filename.startswith(_STANDARD_LIBRARY)
        )
    ]
    if len(frames) > _MAX_FRAMES:
        frames = frames[: _MAX_FRAMES // 2] + frames[-_MAX_FRAMES // 2 :]
    lines = "".join(traceback.format_list(frames)).rstrip("\n").splitlines()
    return "\n".join(["in your code:", *(f"  {line}" for line in lines)]) if lines else ""


def where_to_mend(error: BaseException) -> str:
    """Return the text of ``fix`` for an error with `with_user_frames`; there may be no line of the
    user's."""
    if user_frames(error):
        return "mend it at the line below"
    return f"see which arguments it is called with: {doc_url('hooks.md')}"


def with_user_frames(failure: AnyUserError, error: BaseException) -> AnyUserError:
    """Add `user_frames` of ``error`` and its notes to ``failure``, for terminal and crash folder,
    and return it."""
    frames = user_frames(error).replace("\n", "\n  ")
    known = getattr(failure, "__notes__", ())
    for note in [*getattr(error, "__notes__", ()), *([frames] if frames else [])]:
        if note not in known:
            failure.add_note(note)
            known = failure.__notes__
    return failure


@contextlib.contextmanager
def failures_of(what: str) -> Iterator[None]:
    """Run user code in the block; ``what`` is its name in messages. An error that the code or a
    library raises becomes a `FunctionFailed`. An error of slime's code that it called keeps its
    type. Both show the user's lines.

    Raises:
        FunctionFailed: the user's code raised.
    """
    try:
        yield
    except UserError as error:
        with_user_frames(error, error)
        raise
    except (Exception, SystemExit) as error:  # an exit with status 0 would look like a good end
        *_, last = traceback.extract_tb(error.__traceback__)
        if last.filename.startswith(_SLIME) and last.filename not in (
            __file__,
            user_calls.__file__,
        ):
            if frames := user_frames(error):
                error.add_note(frames)
            raise
        failure = FunctionFailed(
            f"{what} failed", why=name_and_text(error), fix=where_to_mend(error)
        )
        raise with_user_frames(failure, error) from error


def check_returns_nothing(returned: Any, given: Iterable[Any], origin: str, instead: str) -> None:
    """Check the return value of a function that works by changing what it is given.

    Args:
        given: its arguments; it may return one of them.
        instead: what it should do.
    Raises:
        FunctionFailed: it returned something else, which nothing would read.
    """
    if returned is not None and not any(returned is one for one in given):
        raise FunctionFailed(
            f"{origin} returned {described(returned)}, which nothing reads", fix=instead
        )


def named(path: str, flag: str = "") -> str:
    """Return the name of the function at ``path`` in messages, with its flag."""
    return f"'{path}' ({flag})" if flag else f"'{path}'"


def shown(value: Any, most: int = 60) -> str:
    """Return the repr of ``value``, cut to ``most`` characters; a description of its type if the
    repr raises."""
    try:
        return f"{value!r:.{most}}"
    except Exception as error:  # a user's class, or an integer of more than 4,300 digits
        return f"{a_type(value)} whose repr raises {type(error).__name__}"


#: Flags of functions that make training data, in the order of likely causes of an error.
_MAKERS = (
    "custom_convert_samples_to_train_data_path",
    "custom_generate_function_path",
    "rollout_sample_hook_path",
    "rollout_function_path",
    "data_source_path",
)


def makers_of_samples(flags: Mapping[str, Any]) -> list[str]:
    """Return the names, for messages, of the user's functions that make tokens and log-probs in a
    run with these ``flags``.

    Example:
        >>> makers_of_samples({"custom_generate_function_path": "mine.generate",
        ...                    "custom_rm_path": "mine.reward"})
        ["'mine.generate' (--custom-generate-function-path)"]
    """
    return named_functions(flags, _MAKERS)


def named_functions(flags: Mapping[str, Any], dests: Iterable[str]) -> list[str]:
    """Return the names, for messages, of the user's functions in the flags ``dests``."""
    found = []
    for dest in dests:
        given = flags.get(dest) or ()
        paths = [given] if isinstance(given, str) else given
        found += [
            named(path, "--" + dest.replace("_", "-"))
            for path in paths
            if not path.startswith("slime.")
        ]
    return found


def described(value: Any) -> str:
    """Return a short description of a function's result, for messages.

    Example:
        >>> described(None), described(0.5), described((1, 2)), described("yes")
        ('None', 'the float 0.5', 'a tuple of 2', "the str 'yes'")
    """
    kind = type(value).__name__
    if value is None:
        return "None"
    if hasattr(value, "shape"):
        return f"{with_article(kind)} of shape {list(value.shape)}"
    if isinstance(value, (int, float, str, bytes)):
        return f"the {kind} {shown(value)}"
    if inspect.iscoroutine(value):
        value.close()
        return "a coroutine, as it is async"
    size = f" of {len(value)}" if isinstance(value, (list, tuple, dict)) else ""
    return f"{with_article(kind)}{size}"


def user_function(path: str, flag: str = "") -> Callable[..., Any]:
    """Return the sync function at ``path``; its failures show the user's lines (`failures_of`).

    Args:
        flag: the function's flag, for messages.
    Raises:
        UserError: the function cannot be loaded.
    """
    fn = load_function(path)

    origin = named(path, flag)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with failures_of(origin), kept(origin, in_training=True), running(path):
            return fn(*args, **kwargs)

    return call


# -- calls -----------------------------------------------------------------------------------------


async def call_user_function(path: str, *args: Any, flag: str = "", **kwargs: Any) -> Any:
    """Call the function at ``path`` with `call_hook`; failures show the user's lines
    (`failures_of`).

    Args:
        flag: the function's flag, for messages.
    """
    fn = load_function(path)
    origin = named(path, flag)
    with failures_of(origin), kept(origin):
        return await call_hook(fn, *args, what=path, **kwargs)


async def call_hook(
    fn: Any,
    *args: Any,
    optional: dict[str, Any] | None = None,
    what: str = "",
    limit: float | None = None,
    **kwargs: Any,
) -> Any:
    """Call a hook and return its result: a sync function in a thread, an async function in its own
    task (`slime.user_code.calls`), so that the caller can stop waiting.

    Args:
        optional: keyword arguments passed only if ``fn`` accepts them.
        what: the path, for messages.
        limit: seconds.
    Raises:
        FunctionHangs: ``fn`` did not return within ``limit``.
    """
    if optional:
        kwargs |= accepted(fn, optional)
    what = what or getattr(fn, "__qualname__", type(fn).__name__)
    clock: asyncio.Timeout | None = None
    try:
        async with asyncio.timeout(limit) as clock:
            if is_async(fn):
                return await run_isolated(fn(*args, **kwargs), what)
            seconds = {} if limit is None else {"limit": limit}
            result = await run_in_thread(functools.partial(fn, *args, **kwargs), what, **seconds)
            return await run_isolated(result, what) if inspect.isawaitable(result) else result
    except TimeoutError:
        if clock is None or not clock.expired():  # raised by the function itself
            raise
        raise FunctionHangs(
            f"'{what}' has not returned within {limit:g} s",
            why="it hangs, or takes long: where it stood is in the log",
            fix="set a deadline for whatever it waits for",
        ) from None


def optional_package(module: str, extra: str) -> ModuleType:
    """Import a module of an optional dependency.

    Raises:
        UserError: the package is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"the package {module.partition('.')[0]} is needed here and cannot be imported",
            why=str(error),
            fix=f"pip install 'slime-rl[{extra}]'",
        ) from error
