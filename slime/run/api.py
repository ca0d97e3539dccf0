"""Training from Python: `train` starts a run in another process and returns a handle on it.

    import slime

    rows = [{"prompt": "What is 17 + 5?", "label": "22"}, …]
    exact = lambda response, label: response.strip() == label
    run = slime.train(model="path/to/model", data=rows, reward=exact)
    run.series("rollout/raw_reward"), run.samples(-1)[0]["response"], run.model

The run is a driver process, as if started by ``slime train``. Ray and Megatron-core are not
imported here, and a run that fails does not affect this process or a notebook's kernel.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from slime import deadlines
from slime.checkpoints.run_models import newest_model
from slime.errors import RunFailed, UserError, a_type
from slime.files import read_lines, write_atomically
from slime.hub import local_data
from slime.observe.notebook import LinePrinter
from slime.observe.run_data import read_metrics, rows_by_stage
from slime.observe.run_folder import RunFolder, is_held
from slime.processes.host import python_module
from slime.processes.owner import die_with_parent
from slime.user_code.loading import check_signature, save_function

#: Usual names of columns, tried in this order if --input-key or --label-key is not given.
_INPUT_KEYS = ("prompt", "question", "problem", "messages", "input")
_LABEL_KEYS = ("label", "answer", "solution")
_LAST_LINES = 40
#: Folder beside the run folders; contains a folder for each run with its inputs.
_INPUTS = "inputs"
#: An error as `slime.__main__.guarded` prints it.
_ERROR = re.compile(
    r"(?:^|\n)error: (?P<what>(?:(?!\nerror: ).)*?)(?:\n  why: (?P<why>.*?))?(?:\n  fix: "
    r"(?P<fix>.*))?$",
    re.DOTALL,
)
#: A command line option within a message.
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])")
#: Starts the drivers in a thread that lives as long as this process, since the kernel kills a
#: driver when the thread that started it ends.
_STARTER = ThreadPoolExecutor(1, thread_name_prefix="slime-start")


def train(
    model: str | Path,
    data: Any,
    reward: Callable[..., Any] | str | None = None,
    *,
    eval_data: Any = None,
    name: str | None = None,
    output_dir: str | Path = "outputs",
    wait: bool = True,
    **flags: Any,
) -> TrainingRun:
    """Train ``model`` on prompts with a reward; afterwards ``run.model`` is the trained model.

    Args:
        model: a Hugging Face directory, ``--hf-checkpoint``.
        data: prompts: the path of a file, a list of dicts, or a `datasets.Dataset`. Columns with
            usual names (prompt, question, messages …; label, answer …) are detected; ``input_key``
            and ``label_key`` name others. Training takes one epoch unless ``num_rollout`` (steps)
            or ``num_epoch`` is given.
        reward: a function, which may be defined in a notebook or in ``__main__``; the name of a
            built-in reward ("math"); or the path of a function. The function's parameters are some
            of ``response``, ``label``, ``prompt``, ``metadata`` and ``sample``, or ``(args, sample,
            **kwargs)`` as in `slime.user_code.hooks`.
        eval_data: like ``data``, for an evaluation before and after training (set ``eval_interval``
            for more).
        name, output_dir: the run folder is ``output_dir/name``; the default name is the time. The
            run's inputs (rows, functions, flags) and its output are in ``output_dir/inputs/name``.
        wait: return when the run has ended. Ctrl-C then stops it like SIGTERM: it saves a
            checkpoint.
        flags: any flag of ``slime train``, with underscores. ``save`` defaults to
            ``"{run}/checkpoints"``. A flag that takes the path of a function or class also takes
            the object.

    Raises:
        RunFailed: the run ended with an error; has the error's message.
        UserError: an argument cannot be passed to the run.

    Example:
        >>> run = slime.train(                                         # doctest: +SKIP
        ...     "Qwen3-0.6B", "train.jsonl", "math", num_rollout=100)
        >>> run.state, run.series("rollout/raw_reward")[-1]            # doctest: +SKIP
        ('finished', 0.73)
    """
    if not isinstance(model, str | Path):
        raise UserError(
            f"model is {a_type(model)}",
            fix="pass the path of a Hugging Face directory; model.save_pretrained and "
            "tokenizer.save_pretrained write one",
        )
    _refuse_twice(flags, has_reward=reward is not None, has_eval_data=eval_data is not None)
    settings: dict[str, Any] = {"hf_checkpoint": str(model), "save": "{run}/checkpoints"}
    if callable(reward):
        settings["custom_rm_path"] = reward if flags.get("group_rm") else _callable_reward(reward)
    elif isinstance(reward, str):
        settings["custom_rm_path" if "." in reward or ":" in reward else "rm_type"] = reward
    elif reward is not None:
        raise UserError(
            f"reward is {a_type(reward)}", fix="pass a function, or the name of a built-in reward"
        )
    if {"num_rollout", "num_epoch"}.isdisjoint(flags):
        settings["num_epoch"] = 1
    settings |= flags
    rows = {"train": _rows(data)}
    if eval_data is not None:
        rows["eval"] = _rows(eval_data)
    with _argument_names():
        _check_flags(settings)
        settings |= _data_keys(rows["train"], settings)
    _check_name(Path(output_dir), name, flags)

    inputs = _new_inputs_folder(Path(output_dir) / _INPUTS, name)
    name = name or inputs.name
    files = {part: _write_rows(content, inputs / part) for part, content in rows.items()}
    settings |= {"prompt_data": files["train"], "output_dir": str(output_dir), "run_name": name}
    if "eval" in files:
        settings["eval_prompt_data"] = ["eval", files["eval"]]
    for flag, value in settings.items():
        if callable(value):
            settings[flag] = save_function(value, inputs / f"{flag}.pkl")
    config = inputs / "config.yaml"
    write_atomically(config, yaml.safe_dump(_plain(settings), sort_keys=False).encode())
    run = TrainingRun(Path(output_dir) / name)
    run._start([*python_module("slime"), "train", "--config", str(config)], inputs / "driver.log")
    if wait:
        run.wait()
    return run


class TrainingRun:
    """A run and its folder, while it runs and afterwards.

    Attributes:
        path: the run folder (docs/run-folder.md).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._process: subprocess.Popen[bytes] | None = None
        self._printer: threading.Thread | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._is_awaited = False

    # -- results -----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """Either "starting", "running", "finished", "failed", or "stopped" or "interrupted", which
        can be resumed."""
        if self._process is not None and self._process.poll() not in (None, 0):
            return "failed"
        state = RunFolder(self.path).state() or "starting"
        return "interrupted" if state == "running" and not is_held(self.path) else state

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict per step so far (docs/metrics.md)."""
        stages = rows_by_stage(read_metrics(self.path / "metrics.jsonl")).values()
        return list(itertools.chain.from_iterable(stages))

    def series(self, name: str) -> list[float]:
        """Return the values of one metric, over the steps that have it."""
        return [row[name] for row in self.metrics if name in row]

    def samples(self, step: int = -1) -> list[dict[str, Any]]:
        """Return the samples generated for a step; the first step is 1, the newest -1.

        Raises:
            UserError: there are no samples of this step yet.
        """
        files = {
            int(file.stem.split("_")[1]) + 1: file
            for file in (self.path / "samples").glob("rollout_*.jsonl")
        }
        chosen = sorted(files)[step] if step < 0 and -step <= len(files) else step
        if chosen not in files:
            known = f"steps {min(files)} to {max(files)}" if files else "none"
            raise UserError(f"{self.path} has no samples of step {step}", why=f"there are: {known}")
        return read_lines(files[chosen])

    @property
    def model(self) -> Path:
        """The directory of the newest model that the run has written, in the Hugging Face format;
        of a run with ``lora_rank`` the newest adapter, as PEFT writes it.

        Raises:
            UserError: there is no model yet, or only a Megatron checkpoint.
        """
        try:
            newest = newest_model(self.path)
        except UserError as error:
            why = f"the run is {self.state}; it exports the model when it ends"
            raise UserError(f"{self.path} has no model", why=why, fix=error.fix) from error
        if newest.kind == "checkpoint":
            raise UserError(
                f"the newest model of {self.path} is the checkpoint {newest.path}",
                why=f"the run is {self.state}; it exports the model when it ends",
                fix=f"`slime chat {self.path}`, serve and export convert it; to go on from it, "
                "train with load=",
            )
        return newest.path

    @property
    def report(self) -> Path:
        """The HTML page with curves, times and samples."""
        return self.path / "report.html"

    def __repr__(self) -> str:
        shown = ""
        if rewards := self.series("rollout/raw_reward"):
            shown = f", reward {rewards[0]:.3f} → {rewards[-1]:.3f} in {len(rewards)} steps"
        return f"<run {self.path}: {self.state}{shown}>"

    # -- control -----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> TrainingRun:
        """Wait until the run has ended.

        Args:
            timeout: seconds after which to return while the run continues.
        Raises:
            RunFailed: the run ended with an error.
            KeyboardInterrupt: on Ctrl-C, once the run has saved and ended; a second Ctrl-C ends it
                at once.
        """
        if self._process is None:
            return self
        assert self._printer is not None
        self._is_awaited = True
        try:
            self._process.wait(timeout)
            self._printer.join()
        except subprocess.TimeoutExpired:
            return self
        except KeyboardInterrupt:
            self._is_awaited = False
            self.stop()
            raise
        finally:
            self._is_awaited = False
        if self._process.returncode:
            output = "".join(self._last_lines).strip()
            if (error := _ERROR.search(output)) is None:
                raise RunFailed(
                    f"the run {self.path} ended with status {self._process.returncode}", why=output
                )
            with _argument_names():
                raise RunFailed(error["what"], why=error["why"] or "", fix=error["fix"] or "")
        return self

    def stop(self) -> None:
        """End the run after the current step; it saves a checkpoint.

        Raises:
            RunFailed: the run did not end in time.
        """
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(deadlines.RUN_API_STOP)
        except subprocess.TimeoutExpired as error:
            raise RunFailed(
                f"the run {self.path} did not end within {deadlines.RUN_API_STOP:.0f} s of "
                "SIGTERM, and is killed",
                fix=f"what it said: {self.path.parent / _INPUTS}",
            ) from error
        finally:
            self._process.kill()

    def _start(self, command: list[str], log: Path) -> None:
        """Start the driver in a session of its own, so that Ctrl-C reaches only this process, which
        then stops the driver properly.

        Its output goes to a file. A pipe would break when this process dies, while the driver still
        has to save a checkpoint.
        """
        parent = os.getpid()
        with open(log, "wb") as output:

            def start() -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),
                )

            self._process = _STARTER.submit(start).result()
        self._printer = threading.Thread(
            target=self._print, args=(log, LinePrinter()), name="slime-run", daemon=True
        )
        self._printer.start()

    def _print(self, log: Path, printer: LinePrinter) -> None:
        """Show the driver's lines on this process's output, or in the notebook's cell."""
        assert self._process is not None
        is_error = False
        with open(log, encoding="utf-8", errors="replace") as lines:
            while True:
                has_ended = self._process.poll() is not None
                while line := lines.readline():
                    self._last_lines.append(line)
                    # `wait` raises the error instead
                    is_error = is_error or (self._is_awaited and line.startswith("error: "))
                    if not is_error:
                        printer.add(line)
                printer.refresh(at_once=has_ended)
                if has_ended:
                    return
                time.sleep(0.1)


def _refuse_twice(flags: Mapping[str, Any], *, has_reward: bool, has_eval_data: bool) -> None:
    """Refuse a flag beside the argument that sets it, since one of the two would be dropped."""
    names = {"hf_checkpoint": "model", "prompt_data": "data"}
    if has_reward:
        names |= {"custom_rm_path": "reward", "rm_type": "reward"}
    if has_eval_data:
        names["eval_prompt_data"] = "eval_data"
    for flag, argument in names.items():
        if flag in flags:
            raise UserError(f"{flag} is given beside {argument}", fix=f"pass {argument} alone")
    if "run_name" in flags:
        raise UserError("run_name is the argument name here", fix="pass name instead")


def _check_flags(settings: Mapping[str, Any]) -> None:
    """Check names and types of flags before anything is written.

    Raises:
        UserError: there is no such flag, or it takes another type.
    """
    from slime.config.parse import given_by_name

    functions = {name: "a.function" for name, value in settings.items() if callable(value)}
    given_by_name(_plain({**settings, **functions}))


@contextlib.contextmanager
def _argument_names() -> Iterator[None]:
    """Within the block, errors name arguments (``input_key``) instead of command line options
    (--input-key)."""
    try:
        yield
    except UserError as error:
        renamed = (
            _OPTION.sub(lambda option: option[1].replace("-", "_"), part) for part in error.args
        )
        raise type(error)(*renamed) from error.__cause__


def _check_name(output_dir: Path, name: str | None, flags: Mapping[str, Any]) -> None:
    """Raise a UserError if a run of this name has checkpoints that this run would overwrite."""
    if name is None or not {"save", "load"}.isdisjoint(flags):
        return
    folder = output_dir / name
    if (folder / "checkpoints").exists():
        fix = f"choose another name, leave it out, or go on with that run: slime resume {folder}"
        raise UserError(
            f"there is a run {folder} already", why="its checkpoints would be written over", fix=fix
        )


def _new_inputs_folder(folder: Path, name: str | None) -> Path:
    """Create a folder in ``folder`` for a run's inputs; inputs of earlier runs are not overwritten.

    Raises:
        UserError: the run's name is that of the folder of all inputs.
    """
    if name == _INPUTS:
        raise UserError(f"a run cannot be called {name}", why=f"{folder} has what runs were given")
    stem = name or time.strftime("run-%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        chosen = folder / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            chosen.mkdir(parents=True)
            return chosen
    raise AssertionError("unreachable")


def _rows(data: Any) -> Any:
    """Return the path of a data file, a list of rows, or a `datasets.Dataset` as it is.

    Raises:
        UserError: ``data`` is neither, or its rows cannot be written as JSON.
    """
    if isinstance(data, str | Path):
        return str(data)
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        raise UserError(
            f"data is {a_type(data)}",
            fix="pass a path, a list of dicts, or a datasets.Dataset of one split",
        )
    rows: Any = data if _is_table(data) else list(data)
    if not len(rows):
        raise UserError("data has no rows", fix="pass one dict per prompt")
    if rows is data:
        return rows
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(
                f"a row of data is {a_type(row)}, not a dict",
                fix="pass a list of dicts; of a table of pandas: table.to_dict('records')",
            )
        try:
            _as_json(row)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"row {number} of data has a value that JSON cannot hold",
                why=str(error),
                fix="write NumPy's values with .tolist(), dates and decimals with str(), and None "
                "for what is not there; or pass a datasets.Dataset, which has them all",
            ) from error
    return rows


def _is_table(data: Any) -> bool:
    """Tell whether it is a `datasets.Dataset` whose columns are all that its rows have."""
    datasets = sys.modules.get("datasets")
    is_dataset = datasets is not None and isinstance(data, datasets.Dataset)
    return is_dataset and data.format["type"] != "custom"


def _as_json(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


def _write_rows(rows: Any, file: Path) -> str:
    """Write rows to ``file``, whose suffix is added, and return its path; return the path of rows
    that are in a file.

    A data set keeps the types of its columns, which say how a label is spelt.
    """
    if isinstance(rows, str):
        return rows
    if _is_table(rows):
        import pyarrow.parquet

        path = file.with_suffix(".parquet")
        pyarrow.parquet.write_table(rows.with_format("arrow")[:], path)
        return str(path)
    path = file.with_suffix(".jsonl")
    write_atomically(path, b"".join(_as_json(row) + b"\n" for row in rows))
    return str(path)


def _data_keys(rows: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return --input-key and --label-key, unless given, from the columns of the first row.

    Raises:
        UserError: there is no such file, it has no rows, or a needed column has no usual name.
    """
    from slime.prompts.readers import iter_rows

    _, first = next(iter(iter_rows(local_data(rows)))) if isinstance(rows, str) else ("", rows[0])
    found = {}
    for flag, names in (("input_key", _INPUT_KEYS), ("label_key", _LABEL_KEYS)):
        column = next((name for name in names if name in first), None)
        if flag not in settings and column is not None:
            found[flag] = column
        elif flag not in settings and flag in _needed_columns(settings):
            raise UserError(
                f"no column of the data is known for {_needed_columns(settings)[flag]}",
                why=f"the columns are: {', '.join(first)}; looked for: {', '.join(names)}",
                fix=f"pass {flag}=, the name of the column",
            )
    return found


def _needed_columns(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return flag → content of each column that the run needs."""
    from slime.rollout.rewards.by_name import RewardByName

    if settings.get("data_source_path") or settings.get("rollout_function_path"):
        return {}  # users' code reads the rows
    columns = {"input_key": "the prompts"}
    reward = settings.get("custom_rm_path")
    if isinstance(reward, RewardByName) and "label" in reward.required:
        columns["label_key"] = "the label that the reward takes"
    return columns


def _callable_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the signature of rewards in a run.

    Raises:
        UserError: a run cannot call a function with these parameters.
    """
    from slime.rollout.rewards.by_name import NAMES, RewardByName
    from slime.user_code.hooks import RewardFunction

    named = RewardByName.of(function)
    why = f"it is {function!r:.100}"
    with contextlib.suppress(TypeError, ValueError):  # a builtin has no signature
        why = f"its signature is {inspect.signature(function)}"
    wrong = UserError(
        "the reward cannot be called",
        why=why,
        fix=f"let it take some of {', '.join(NAMES)}, by these names and each for one answer; or "
        "(args, sample, **kwargs)",
    )
    try:
        check_signature(named, RewardFunction, "reward")
        misspelt = named is function and {"response", "label", "prompt"} & set(
            inspect.signature(function).parameters
        )
    except (UserError, ValueError) as error:  # a builtin has no signature
        raise wrong from error
    if misspelt:
        raise wrong
    return named


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
