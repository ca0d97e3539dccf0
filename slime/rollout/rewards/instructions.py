"""Reward for following the instructions of a row, by the checkers of IFBench and IFEval in the
package if-verifiable (``pip install 'slime-rl[ifbench]'``). They run in separate processes
(``python -m slime.rollout.rewards.instructions``), because they may hang and they draw from the
global ``random``.

A row's metadata has the fields of the benchmarks' files:

    {"instruction_id_list": ["count:word_count_range"],
     "kwargs": [{"min_words": 50, "max_words": 60}]}
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import math
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from slime.errors import UserError
from slime.rollout.rewards.grading_worker import serve
from slime.user_code.loading import optional_package

NAME = "ifbench"
PACKAGE = "if_verifiable"

_PROBE = "Here is a response. It has two sentences."

#: Instructions of a row, by name and arguments.
Task = list[tuple[str, dict[str, Any]]]

#: Checkers that need NLTK data, which no package contains → its paths in NLTK's folder.
_WORDS = "tokenizers/punkt_tab"
_TAGGER = "taggers/averaged_perceptron_tagger_eng"
_STOP_WORDS = "corpora/stopwords"
NEEDS_DATA: dict[str, tuple[str, ...]] = {
    "ratio:stop_words": (_STOP_WORDS,),
    "words:start_verb": (_WORDS, _TAGGER),
    "words:words_position": (_WORDS,),
    "words:keywords_specific_position": (_WORDS,),
    "format:title_case": (_WORDS,),
    "change_case:capital_word_frequency": (_WORDS,),
    "length_constraints:number_sentences": (_WORDS,),
}


def follows_all(response: str, task: Task) -> float:
    """Return 1.0 if the response follows every instruction exactly, else 0.0. Text before
    ``</think>`` is ignored. If a checker fails on a response, the instruction is not followed.

    Raises:
        UserError: the instructions cannot be checked (`check_task`, `check_data`).
    """
    check_task(task)
    check_data(name for name, _ in task)
    evaluate = optional_package(f"{PACKAGE}.common", NAME).evaluate_instructions
    names = [name for name, _ in task]
    arguments = [given for _, given in task]
    try:
        with _seeded_random(task):
            _, scores = evaluate(
                response, names, arguments, prompt="", instruction_registry=_checkers()
            )
    except LookupError as error:
        if type(error) is not LookupError:  # KeyError, IndexError: the checker failed
            return 0.0
        raise UserError(
            f"the checkers of {', '.join(names)} need NLTK data that is not installed",
            why=" ".join(str(error).replace("*", "").split())[:300],
            fix="install it with python -m nltk.downloader on each host of the run, or leave the "
            "rows out",
        ) from error
    return float(scores.binary_strict)


# -- rows ------------------------------------------------------------------------------------------


def read_task(metadata: dict[str, Any] | None, where: str) -> Task:
    """Return the instructions of a row. Arguments that are None or NaN are dropped, because
    columnar files have every argument in every row, and whole floats become integers: a column of
    integers with gaps is one of floats.

    Args:
        where: the row or sample, for errors.
    Raises:
        UserError: there are no instructions, or the arguments do not match them.

    Example:
        >>> read_task({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 3, "n": None}]},
        ...           "a.jsonl:1")
        [('count:numbers', {'N': 3})]
    """
    names = (metadata or {}).get("instruction_id_list")
    given = (metadata or {}).get("kwargs")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{where}: --rm-type {NAME} finds no instructions",
            why=f"metadata['instruction_id_list'] is {names!r:.80}",
            fix="make it a list of names, for example {'instruction_id_list': ['count:numbers'], "
            "'kwargs': [{'N': 3}]}; --metadata-key names the column",
        )
    listed = [given or {}] * len(names) if isinstance(given, dict | None) else given
    fits = (
        isinstance(listed, list)
        and len(listed) == len(names)
        and all(isinstance(one, dict | None) for one in listed)
    )
    if not fits:
        raise UserError(
            f"{where}: the arguments of its {len(names)} instructions are not a list of "
            f"{len(names)} dicts",
            why=f"metadata['kwargs'] is {given!r:.80}",
            fix="give {} to instructions that take none",
        )
    clean = [_arguments(one or {}) for one in listed]
    return [(name.strip(), arguments) for name, arguments in zip(names, clean)]


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in given.items():
        is_float = isinstance(value, float)
        if value is not None and not (is_float and math.isnan(value)):
            found[key] = int(value) if is_float and value.is_integer() else value
    return found


def check_task(task: Task) -> None:
    """Check that each instruction has a checker that accepts its arguments.

    Raises:
        UserError: names an instruction without such a checker; or the package is missing.
    """
    for name, arguments in task:
        if name not in _checkers():
            near = difflib.get_close_matches(name, _checkers(), n=1)
            raise UserError(
                f"no instruction of IFBench or IFEval is called '{name}'",
                fix=f"did you mean '{near[0]}'?"
                if near
                else "leave its rows out, or judge them in --custom-rm-path",
            )
        try:
            with _seeded_random(task):
                checker = _checkers()[name](name)
                checker.build_description(**arguments)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise _arguments_error(name, arguments, error) from error
        try:
            checker.check_following(_PROBE)
        # missing arguments and invalid patterns fail with every response
        except (TypeError, re.error) as error:
            raise _arguments_error(name, arguments, error) from error
        except (ArithmeticError, ValueError, AttributeError, LookupError):
            pass  # caused by this response, or by missing data, which `check_data` reports


def _arguments_error(name: str, arguments: dict[str, Any], error: Exception) -> UserError:
    return UserError(
        f"the instruction {name} does not take these arguments: {arguments!r:.200}",
        why=f"{type(error).__name__}: {error}",
        fix="see metadata['kwargs'] of its row",
    )


def check_data(names: Iterable[str]) -> None:
    """Check that the NLTK data that these checkers need is installed.

    Raises:
        UserError: names the checkers whose data are missing, and how to install them.
    """
    lacking = {name: missing for name in sorted(set(names)) if (missing := _missing(name))}
    if lacking:
        data = sorted({path.rpartition("/")[2] for paths in lacking.values() for path in paths})
        raise UserError(
            f"the checkers of {', '.join(lacking)} need NLTK data that is not installed: "
            f"{', '.join(data)}",
            why="no package contains it, and rewards do not wait for a download; searched "
            + ", ".join(optional_package("nltk", NAME).data.path),
            fix=f"python -m nltk.downloader {' '.join(data)}, on each host of the run (NLTK_DATA "
            "names another folder to search); or leave their rows out",
        )


def _missing(name: str) -> list[str]:
    def is_here(path: str) -> bool:
        with contextlib.suppress(LookupError):
            return bool(optional_package("nltk", NAME).data.find(path))
        return False

    return [path for path in NEEDS_DATA.get(name, ()) if not is_here(path)]


def check_package() -> None:
    """Check that the extra is installed, without importing it.

    Raises:
        UserError: it is not installed.
    """
    lacking = [name for name in (PACKAGE, "nltk") if importlib.util.find_spec(name) is None]
    if lacking:
        raise UserError(
            f"--rm-type {NAME} needs the package {lacking[0].replace('_', '-')}",
            why="it contains the checkers of IFBench and IFEval, or they import it",
            fix=f"pip install 'slime-rl[{NAME}]'",
        )


# -- the package -----------------------------------------------------------------------------------


@functools.cache
def _checkers() -> dict[str, Any]:
    """Return instruction → checker class for both benchmarks. The import takes two seconds."""
    nltk: Any = optional_package("nltk", NAME)
    download = nltk.download
    # the import would try to download data, and takes 16 s without a network
    nltk.download = lambda *_, **__: False
    try:
        registries = [
            optional_package(f"{PACKAGE}.{name}.instructions_registry", NAME)
            for name in ("ifeval", "ifbench")
        ]
    finally:
        nltk.download = download
    # without a seed, it may detect two languages in two passes over one response
    optional_package("langdetect", NAME).DetectorFactory.seed = 0
    return {
        name: checker
        for registry in registries
        for name, checker in registry.INSTRUCTION_DICT.items()
    }


@contextlib.contextmanager
def _seeded_random(task: Task) -> Iterator[None]:
    """Seed ``random`` by the task in the block, and restore it: checkers draw arguments that are
    not given."""
    state = random.getstate()
    random.seed(orjson.dumps(task))
    try:
        yield
    finally:
        random.setstate(state)


if __name__ == "__main__":
    serve({NAME: follows_all}, _checkers)
