"""Does a response follow the instructions of its row? The checkers of IFBench and IFEval are those
of the package if-verifiable (``pip install 'slime-rl[ifbench]'``); this is how a row reaches them.
They run in processes of their own (``python -m slime.rollout.rewards.instructions``), as they may
hang and draw from the global ``random``.

A row's metadata has what the benchmarks' files have:

    {"instruction_id_list": ["count:word_count_range"],
     "kwargs": [{"min_words": 50, "max_words": 60}]}
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
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

#: Checkers that ask for data of NLTK's, which no package brings → where NLTK keeps it.
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
    """1.0 if the response follows every instruction to the letter, else 0.0. What stands before
    ``</think>`` is not looked at; a checker that trips over a response has not found it followed.

    Raises:
        UserError: the instructions cannot be judged; as `check_task`, and `check_data`.
    """
    check_task(task)
    check_data(name for name, _ in task)
    evaluate = optional_package(f"{PACKAGE}.common", NAME).evaluate_instructions
    names = [name for name, _ in task]
    arguments = [given for _, given in task]
    try:
        with _same_draws(task):
            _, scores = evaluate(
                response, names, arguments, prompt="", instruction_registry=_checkers()
            )
    except LookupError as error:
        if type(error) is not LookupError:  # those of lists and dicts are the checker's own
            return 0.0
        raise UserError(
            f"the checkers of {', '.join(names)} need data of NLTK's that is not here",
            why=" ".join(str(error).replace("*", "").split())[:300],
            fix="get it with python -m nltk.downloader on each host of the run, or leave the rows "
            "out",
        ) from error
    return float(scores.binary_strict)


# -- rows ------------------------------------------------------------------------------------------


def read_task(metadata: dict[str, Any] | None, where: str) -> Task:
    """The instructions of a row. Arguments that are None are as good as none: columnar files fill
    in all of them.

    Args:
        where: the row or sample, for errors.
    Raises:
        UserError: there are none, or they have no arguments that go with them.

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
            fix="make it a list of names, {'instruction_id_list': ['count:numbers'], 'kwargs': "
            "[{'N': 3}]} for one; "
            "--metadata-key names the column",
        )
    listed = [given or {}] * len(names) if isinstance(given, dict | None) else given
    fits = (
        isinstance(listed, list)
        and len(listed) == len(names)
        and all(isinstance(one, dict | None) for one in listed)
    )
    if not fits:
        raise UserError(
            f"{where}: the arguments of its {len(names)} instructions are no list of as many dicts",
            why=f"metadata['kwargs'] is {given!r:.80}",
            fix="give {} to instructions that take none",
        )
    clean = [
        {key: value for key, value in (one or {}).items() if value is not None} for one in listed
    ]
    return [(name.strip(), arguments) for name, arguments in zip(names, clean)]


def check_task(task: Task) -> None:
    """There is a checker for each instruction, and it takes the arguments.

    Raises:
        UserError: names the instruction; or the package is missing.
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
            with _same_draws(task):
                checker = _checkers()[name](name)
                checker.build_description(**arguments)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise _unfit(name, arguments, error) from error
        try:
            checker.check_following(_PROBE)
        # arguments are missing, or are no pattern: met with every response
        except (TypeError, re.error) as error:
            raise _unfit(name, arguments, error) from error
        except (ArithmeticError, ValueError, AttributeError, LookupError):
            pass  # of this response, or of data that `check_data` asks for


def _unfit(name: str, arguments: dict[str, Any], error: Exception) -> UserError:
    return UserError(
        f"the instruction {name} does not take these arguments: {arguments!r:.200}",
        why=f"{type(error).__name__}: {error}",
        fix="see metadata['kwargs'] of its row",
    )


def check_data(names: Iterable[str]) -> None:
    """Check that the NLTK data that these checkers need is installed.

    Raises:
        UserError: names those whose is not, and how to get it.
    """
    lacking = {name: missing for name in sorted(set(names)) if (missing := _missing(name))}
    if lacking:
        data = sorted({path.rpartition("/")[2] for paths in lacking.values() for path in paths})
        raise UserError(
            f"the checkers of {', '.join(lacking)} need data of NLTK's that is not here: "
            f"{', '.join(data)}",
            why="no package brings it, and rewards do not wait for a download; looked in "
            + ", ".join(optional_package("nltk", NAME).data.path),
            fix=f"python -m nltk.downloader {' '.join(data)}, on each host of the run (NLTK_DATA "
            "names another folder "
            "to look in); or leave their rows out",
        )


def _missing(name: str) -> list[str]:
    def is_here(path: str) -> bool:
        with contextlib.suppress(LookupError):
            return bool(optional_package("nltk", NAME).data.find(path))
        return False

    return [path for path in NEEDS_DATA.get(name, ()) if not is_here(path)]


def check_package() -> None:
    """Whether the extra is installed, without importing it.

    Raises:
        UserError: it is not.
    """
    lacking = [name for name in (PACKAGE, "nltk") if importlib.util.find_spec(name) is None]
    if lacking:
        raise UserError(
            f"--rm-type {NAME} needs the package {lacking[0].replace('_', '-')}",
            why="the checkers of IFBench and IFEval are there",
            fix=f"pip install 'slime-rl[{NAME}]'",
        )


# -- the package -----------------------------------------------------------------------------------


@functools.cache
def _checkers() -> dict[str, Any]:
    """The classes of both benchmarks by the names of their instructions. Takes two seconds."""
    nltk: Any = optional_package("nltk", NAME)
    download = nltk.download
    # on import it asks the network for data, 16 s where there is none
    nltk.download = lambda *_, **__: False
    try:
        registries = [
            optional_package(f"{PACKAGE}.{name}.instructions_registry", NAME)
            for name in ("ifeval", "ifbench")
        ]
    finally:
        nltk.download = download
    # or it draws, and calls one response by two languages
    optional_package("langdetect", NAME).DetectorFactory.seed = 0
    return {
        name: checker
        for registry in registries
        for name, checker in registry.INSTRUCTION_DICT.items()
    }


@contextlib.contextmanager
def _same_draws(task: Task) -> Iterator[None]:
    """Checkers draw what their arguments leave open: the same each time, and out of nobody else's
    numbers."""
    state = random.getstate()
    random.seed(orjson.dumps(task))
    try:
        yield
    finally:
        random.setstate(state)


if __name__ == "__main__":
    serve({NAME: follows_all}, _checkers)
