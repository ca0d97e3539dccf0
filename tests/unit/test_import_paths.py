"""Every import path of existing plugins resolves with its signature, or says what to use instead;
what a plugin puts in place of a name is noticed."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.compat.import_paths import ALIASES, NO_COUNTERPART, OLD_MODULES
from slime.rollout.filters import check_reward_nonzero_std
from slime.rollout.generate import generate as own_generate
from slime.samples.types import Sample
from slime.user_code.overrides import override_of

LISTED = Path(__file__).parents[1] / "support" / "reference_paths.txt"
PATHS = [line.split(" ", 1) for line in LISTED.read_text().splitlines() if not line.startswith("#")]
THERE = [(module, rest) for module, rest in PATHS if not rest.endswith("!")]
GONE = [(module, rest[:-1]) for module, rest in PATHS if rest.endswith("!")]


def resolve(module: str, name: str) -> Any:
    scope: dict[str, Any] = {}
    name, *inner = name.split(".")
    exec(f"from {module} import {name} as found", scope)  # as plugins do
    return functools.reduce(getattr, inner, scope["found"])


def parameters(signature: str) -> list[inspect.Parameter]:
    """Those of ``name(a, b=1, *, c)``; a default of ANY may be any."""
    signature = signature.partition(".")[2] if "." in signature.partition("(")[0] else signature
    (function,) = ast.parse(f"def {signature}: pass").body
    scope: dict[str, Any] = {"ANY": inspect.Parameter.empty}
    exec(compile(ast.Module([function], []), "<listed>", "exec"), scope)
    return list(inspect.signature(scope[signature.partition("(")[0]]).parameters.values())


@pytest.mark.parametrize(("module", "rest"), THERE, ids=lambda value: value.partition("(")[0])
def test_a_path_resolves_with_its_signature(module: str, rest: str) -> None:
    name, opened, _ = rest.partition("(")
    found = resolve(module, name)
    if not opened:
        assert found is not None
        return
    theirs, ours = parameters(rest), list(inspect.signature(found).parameters.values())
    by_name = {parameter.name: parameter for parameter in ours}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    positional = [p.name for p in theirs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD][
        : len(positional)
    ] == positional
    for parameter in theirs:
        if parameter.kind in variable:
            assert any(own.kind is parameter.kind for own in ours) or parameter.name == "values"
            continue
        own = by_name.get(parameter.name)
        assert own is not None or takes_any, parameter.name
        if own is not None and parameter.default not in (parameter.empty, inspect.Parameter.empty):
            assert own.default == parameter.default, parameter.name
    for own in ours:  # what is ours alone need not be given
        assert (
            own.name in {p.name for p in theirs}
            or own.default is not own.empty
            or own.kind in variable
        ), own.name


@pytest.mark.parametrize(("module", "name"), GONE)
def test_what_has_no_counterpart_says_what_to_use(module: str, name: str) -> None:
    with pytest.raises(ImportError) as caught:
        resolve(module, name) if name else importlib.import_module(module)
    reason = NO_COUNTERPART[f"{module}:{name}" if name else module]
    assert reason in str(caught.value) and (name or module) in str(caught.value)


@pytest.mark.parametrize("path", [path for path in NO_COUNTERPART if ":" not in path])
@pytest.mark.parametrize(
    "form", ["import {path}", "from {package} import {module}", "from {path} import anything"]
)
def test_a_module_without_counterpart_says_what_to_use_however_it_is_imported(
    path: str, form: str
) -> None:
    package, _, module = path.rpartition(".")
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(form.format(path=path, package=package, module=module), {})
    assert NO_COUNTERPART[path] in str(caught.value) and path in str(caught.value)


def test_every_row_of_the_table_names_something() -> None:
    for module, names in OLD_MODULES.items():
        for name in names:
            assert resolve(module, name) is not None, (module, name)
            assert f"{module}:{name}" not in NO_COUNTERPART


def test_every_path_of_the_tables_is_in_the_list() -> None:
    """But what a module of earlier versions had imported itself, and packages."""
    listed = {f"{module}:{rest.partition('(')[0].rstrip('!')}" for module, rest in PATHS}
    assert not set(NO_COUNTERPART) & set(OLD_MODULES)
    imported = ("slime.rollout.sglang_rollout", "slime.rollout.rm_hub")
    unlisted = [
        f"{module}:{name}"
        for module, names in OLD_MODULES.items()
        if module not in imported
        for name in names
        if f"{module}:{name}" not in listed
    ]
    assert unlisted == []


@pytest.mark.parametrize(("alias", "module"), ALIASES.items())
def test_an_alias_is_the_module_itself(alias: str, module: str) -> None:
    assert importlib.import_module(alias) is importlib.import_module(module)
    with pytest.raises(ImportError):
        exec(f"from {alias} import nothing_of_that_name", {})
    with pytest.raises(ImportError):
        importlib.import_module(f"{alias}.nothing_of_that_name")


def test_a_module_below_an_alias_is_the_module_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded once under both names, so that its classes are the same and a patch acts."""
    own = importlib.import_module("slime.agents.endpoint")
    assert importlib.import_module("slime.rollout.agents.endpoint") is own
    monkeypatch.setattr("slime.rollout.agents.endpoint.agent_endpoint", own_generate)
    assert own.agent_endpoint is own_generate


def test_an_alias_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "slime.engines.embedded", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--model-path" in shown.stdout


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ImportError):
        resolve("slime.utils.types", "Nothing")
    with pytest.raises(AttributeError, match="of its names these live on: RolloutBatch, Sample"):
        _ = importlib.import_module("slime.utils.types").Nothing
    assert not hasattr(importlib.import_module("slime.utils.types"), "Nothing")


# -- replaced names --------------------------------------------------------------------------------


def test_what_replaces_a_name_is_found_until_it_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = importlib.import_module("slime.rollout.rm_hub")
    assert override_of("reward") is None
    with monkeypatch.context() as patch:
        patch.setattr(old, "async_rm", own_generate)
        assert override_of("reward") is own_generate is old.async_rm
    assert override_of("reward") is None


def test_the_same_function_in_another_old_module_is_replaced_for_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slime.rollout.sglang_rollout.async_rm", own_generate)
    assert override_of("reward") is own_generate


def test_a_replacement_that_nobody_calls_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("slime"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr("slime.rollout.data_source.pop_first", own_generate)
        assert "was replaced" not in caplog.text
        monkeypatch.setattr("slime.utils.misc.load_function", own_generate)
    assert (
        "slime.utils.misc.load_function was replaced, and no part of the run looks it up there"
        in caplog.text
    )


def test_filters_and_rollout_functions_are_called_as_they_were() -> None:
    call = resolve("slime.rollout.filter_hub.base_types", "call_dynamic_filter")
    samples = [Sample(reward=1.0), Sample(reward=1.0)]
    verdict = call(check_reward_nonzero_std, None, samples)
    assert (verdict.keep, verdict.reason) == (False, "zero_std_1.0")
    assert (
        call(None, None, samples).keep and not call(lambda args, group: False, None, samples).keep
    )
    call_rollout = resolve("slime.rollout.base_types", "call_rollout_fn")
    train = call_rollout(
        lambda args, number, source, evaluation: [[args]], 5, 0, None, evaluation=False
    )
    assert train.samples == [[5]] and train.metrics is None

    async def evaluate(args: Any, number: int, source: Any, evaluation: bool = False) -> Any:
        return {"set": {"rewards": [args]}}

    assert call_rollout(evaluate, 5, 0, None, evaluation=True).data == {"set": {"rewards": [5]}}
