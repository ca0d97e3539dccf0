"""Hooks are found by path, checked before launch, and called as their Protocol says."""

from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.rollout.filters import call_dynamic_filter
from slime.rollout.user_rollouts import call_rollout_fn
from slime.samples.types import Group, Sample, groups_from_nested
from slime.user_code import hooks
from slime.user_code.hooks import (
    HOOKS,
    DataSource,
    DynamicFilterOutput,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    check_hooks,
)
from slime.user_code.loading import (
    _module_of_file,
    accepted,
    call_hook,
    check_signature,
    is_sync,
    load_function,
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of user code and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    yield write
    load_function.cache_clear()
    _module_of_file.cache_clear()


# -- finding ---------------------------------------------------------------------------------------


def test_dotted_colon_and_file_paths_find_the_same_function(module, tmp_path: Path) -> None:
    module(
        "user_a",
        "def score(args, sample): return 1\nclass Box:\n    @staticmethod\n    def inner(): "
        "return 2",
    )
    assert load_function("user_a.score") is load_function("user_a:score")
    assert load_function("user_a:Box.inner")() == 2
    of_file = load_function(f"{tmp_path}/user_a.py:score")
    assert of_file(None, None) == 1
    inner = load_function(f"{tmp_path}/user_a.py:Box.inner")
    assert of_file.__globals__ is inner.__globals__, "they share the module's state"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("user_b.scoer", ["user_b has no 'scoer'", "did you mean 'score'?"]),
        ("user_c.score", ["there is no module 'user_c'"]),
        ("user_c.deep.score", ["there is no module 'user_c'"]),
        ("score", ["names no function"]),
        ("user_b.py", ["names a file and no function", "write user_b.py:NAME"]),
        ("./user_b:score", ["neither a module nor a file", "write ./user_b.py:score"]),
        ("user_c.py:score", ["there is no file 'user_c.py'", "check the path"]),
        (
            "user_broken.score",
            ["importing user_broken failed", "ZeroDivisionError", "user_broken.py:2"],
        ),
        ("user_needs.score", ["importing user_needs failed", "No module named 'not_there_at_all'"]),
    ],
)
def test_what_cannot_be_found_says_why(module, path: str, said: list[str]) -> None:
    module("user_b", "def score(args, sample): return 1")
    module("user_broken", "\n1 / 0\n")
    module("user_needs", "import not_there_at_all")
    with pytest.raises(UserError) as caught:
        load_function(path)
    assert all(text in str(caught.value) for text in said), caught.value


# -- checking --------------------------------------------------------------------------------------


async def generate_with(args, sample, sampling_params, evaluation=False):
    return sample


async def generate_without(args, sample, sampling_params):
    return sample


class Callable_:
    def __call__(self, a, s, **kwargs):
        return 1.0


def yields(args, sample):
    yield 1.0


async def yields_later(args, sample, sampling_params):
    yield sample


@pytest.mark.parametrize(
    ("flag", "fn"),
    [
        ("custom_generate_function_path", generate_with),
        ("custom_generate_function_path", generate_without),
        ("custom_rm_path", Callable_()),
        ("custom_rm_path", functools.partial(lambda model, args, sample: 0, "model")),
        ("custom_rm_path", lambda *args: 0),
        ("rollout_function_path", lambda args, rollout_id, data_source, evaluation=False: []),
        ("custom_tis_function_path", lambda args, *, pg_loss, **kwargs: pg_loss),
        ("rollout_sample_hook_path", lambda args, sample: None),
    ],
)
def test_functions_that_fit(flag: str, fn: Any) -> None:
    check_signature(fn, HOOKS[flag], "my.fn")


@pytest.mark.parametrize(
    ("flag", "fn", "said"),
    [
        ("custom_rm_path", lambda sample: 0, "cannot be called as (args, sample)"),
        (
            "custom_rm_path",
            lambda args, sample, tokenizer: 0,
            "missing a required argument: 'tokenizer'",
        ),
        ("rollout_function_path", lambda args, rollout_id, data_source: [], "evaluation=…"),
        ("custom_tis_function_path", lambda args, *, pg_loss: pg_loss, "train_log_probs"),
        ("custom_rm_path", lambda sample, args: 0, "its 'sample' would be the args"),
        ("custom_rm_path", lambda prompts, completions, **kwargs: 0, "a parameter of TRL's"),
        (
            "custom_rm_path",
            lambda data_source, solution_str, ground_truth, extra_info=None: 0,
            "sample.response is the solution_str",
        ),
        (
            "custom_rollout_log_function_path",
            lambda args, rollout_id, samples, extra_metrics, rollout_time: None,
            "its 'args' would be the rollout_id",
        ),
        ("custom_rm_path", 3, "is not a function but an int"),
        ("custom_rm_path", Callable_, "name an object: callable_ = Callable_(…)"),
        ("custom_rm_path", yields, "is a generator"),
        ("custom_generate_function_path", functools.partial(yields_later), "is a generator"),
    ],
)
def test_functions_that_do_not_fit(flag: str, fn: Any, said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_signature(fn, HOOKS[flag], "my.fn")
    assert said in str(caught.value)


class Generates:
    def __call__(self, args, sample, sampling_params):
        sample.response = "4"
        return sample


def logged(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs)

    return wrapper


@logged
def returns_from_a_wrapper(args, sample, sampling_params):
    return sample


def returns_a_copy(args, sample, sampling_params):
    sample = generate_with(args, sample, sampling_params)
    return sample


def returns_what_an_inner_function_set(args, sample, sampling_params):
    def ask():
        nonlocal sample
        sample = generate_with(args, sample, sampling_params)

    ask()
    return sample


def sometimes_sync(args, sample, sampling_params):
    if sample.response:
        return sample
    return generate_with(args, sample, sampling_params)


def returns_nothing(args, sample, sampling_params):
    sample.response = "4"


def returns_branches(args, sample, sampling_params):
    def key(one):
        return generate_with(args, one, sampling_params)

    if key is None:
        return [sample]
    return sample


@pytest.mark.parametrize(
    "fn",
    [
        Generates(),
        Generates().__call__,
        functools.partial(Generates()),
        returns_nothing,
        returns_branches,
        returns_from_a_wrapper.__wrapped__,
    ],
)
def test_a_generate_function_that_cannot_be_awaited_is_refused_before_the_launch(fn: Any) -> None:
    with pytest.raises(UserError, match=r"'my\.fn' is not async") as caught:
        check_signature(fn, HOOKS["custom_generate_function_path"], "my.fn")
    assert "declare it with 'async def'" in caught.value.fix
    check_signature(fn, SampleHookOfThree, "my.fn")  # others may be either


class SampleHookOfThree(Protocol):
    def __call__(self, args: Any, sample: Any, sampling_params: Any, /) -> Any: ...


@pytest.mark.parametrize(
    "fn",
    [
        generate_with,
        functools.partial(generate_with),
        logged(generate_with),
        returns_from_a_wrapper,
        returns_a_copy,
        returns_what_an_inner_function_set,
        sometimes_sync,
        lambda args, sample, sampling_params: sample,
        max,
        eval("lambda args, sample, sampling_params: sample"),  # without source
    ],
)
def test_what_only_a_call_can_tell_is_left_to_the_call(fn: Any) -> None:
    assert not is_sync(fn)
    check_signature(fn, HOOKS["custom_generate_function_path"], "my.fn")


async def never_awaited(*args: Any, **kwargs: Any) -> None:
    pass


class AsyncSource(DataSource):
    def __init__(self, args: Any) -> None: ...

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return []

    async def add_samples(self, samples: list[list[Sample]]) -> None: ...


@pytest.mark.parametrize(
    "flag",
    [
        "buffer_filter_path",
        "custom_convert_samples_to_train_data_path",
        "rollout_data_postprocess_path",
        "custom_megatron_init_path",
        "custom_megatron_before_train_step_hook_path",
    ],
)
def test_a_coroutine_that_nobody_would_await_is_refused_before_the_launch(flag: str) -> None:
    path = f"{__name__}.never_awaited"
    with pytest.raises(UserError, match=f"'{path}' is async"):
        check_hooks(SimpleNamespace(**{flag: path}))
    check_hooks(SimpleNamespace(rollout_sample_filter_path=path))
    with pytest.raises(UserError, match=r"AsyncSource\.add_samples' is async"):
        check_hooks(SimpleNamespace(data_source_path=f"{__name__}.AsyncSource"))


def test_all_hooks_of_a_configuration_are_checked_before_launch(module) -> None:
    module("user_hooks", "def good(args, sample): pass\ndef bad(args): pass")
    flags = {"rollout_batch_size": 1, "num_rollout": 1}
    check_hooks(make_config(custom_rm_path="user_hooks.good", **flags).flat())
    with pytest.raises(UserError, match=r"user_hooks\.bad"):
        check_hooks(
            make_config(
                rollout_sample_hook_path=("user_hooks.good", "user_hooks.bad"), **flags
            ).flat()
        )
    with pytest.raises(UserError, match="is no DataSource"):
        check_hooks(make_config(data_source_path="user_hooks.good", **flags).flat())


def test_every_function_flag_of_the_configuration_has_a_protocol() -> None:
    flags = vars(make_config(rollout_batch_size=1, num_rollout=1).flat())
    functions = {
        name for name in flags if name.endswith(("_function_path", "_hook_path", "_filter_path"))
    }
    assert functions <= HOOKS.keys()
    assert HOOKS.keys() <= flags.keys(), "what is refused is no hook"


# -- calling ---------------------------------------------------------------------------------------


def test_optional_keywords_are_passed_only_where_they_are_accepted() -> None:
    optional = {"evaluation": True, "rollout_id": 3}
    assert accepted(generate_with, optional) == {"evaluation": True}
    assert accepted(generate_without, optional) == {}
    assert accepted(lambda args, **kwargs: 0, optional) == optional


def test_sync_and_async_hooks_and_threads() -> None:
    async def run() -> None:
        assert await call_hook(lambda a, b: a + b, 1, 2) == 3
        assert await call_hook(generate_with, None, "s", {}, optional={"evaluation": True}) == "s"
        assert await call_hook(lambda: generate_without(0, "x", {})) == "x", (
            "a sync wrapper of async"
        )
        assert await call_hook(threading.get_ident) != threading.get_ident(), (
            "sync functions have a thread"
        )
        with pytest.raises(KeyError):
            await call_hook({}.__getitem__, "k")

    asyncio.run(run())


@pytest.mark.parametrize("raised", [SystemExit(3), StopIteration()], ids=["exit", "stop"])
def test_what_would_end_the_loop_is_an_error_like_any_other(raised: BaseException) -> None:
    """`sys.exit()` and a bare `next()` in users' code: nobody may be left waiting for them."""

    def hook() -> None:
        raise raised

    async def hook_async() -> None:
        raise raised

    async def run() -> None:
        for fn in (hook, hook_async):
            async with asyncio.timeout(10):
                with pytest.raises(RuntimeError, match=type(raised).__name__):
                    await asyncio.create_task(call_hook(fn))

    asyncio.run(run())


def test_a_hook_in_a_thread_does_not_block_the_loop() -> None:
    async def run() -> None:
        started, release = threading.Event(), threading.Event()

        def wait() -> bool:
            started.set()
            return release.wait(10)

        waiting = asyncio.create_task(call_hook(wait))
        while not started.is_set():
            await asyncio.sleep(0)
        release.set()  # only possible because the loop goes on
        assert await waiting

    asyncio.run(run())


def test_dynamic_filter_wraps_bare_bools() -> None:
    async def run() -> None:
        assert (await call_dynamic_filter(None, None, [])).keep
        assert await call_dynamic_filter(lambda a, s: False, None, []) == DynamicFilterOutput(
            keep=False
        )
        full = DynamicFilterOutput(False, "why", True)
        assert await call_dynamic_filter(lambda a, s: full, None, []) == full

    asyncio.run(run())


@pytest.mark.parametrize("wrap", [lambda x: x, RolloutFnTrainOutput])
def test_rollout_functions_may_return_bare_lists_and_dicts(wrap) -> None:
    samples = [[Sample(index=0, group_index=4), Sample(index=1, group_index=4)]]

    def rollout(args, rollout_id, data_source, evaluation=False):
        return {"set": {"rewards": [1.0]}} if evaluation else wrap(samples)

    async def call(evaluation: bool) -> Any:
        wanted: Any = RolloutFnEvalOutput if evaluation else RolloutFnTrainOutput
        return await call_rollout_fn(rollout, SimpleNamespace(), 0, None, wanted)

    trained = asyncio.run(call(False))
    assert trained.samples == [Group(4, [[samples[0][0]], [samples[0][1]]])]
    assert asyncio.run(call(True)) == RolloutFnEvalOutput({"set": {"rewards": [1.0]}})
    with pytest.raises(UserError, match="returned the int"):
        asyncio.run(call_rollout_fn(lambda *a, **k: 3, None, 0, None, RolloutFnTrainOutput))


def test_fan_out_shapes_become_trajectories() -> None:
    a, b, c, d = (Sample(index=i, rollout_id=r) for i, r in enumerate([None, 7, 7, None]))
    assert [len(e) for e in groups_from_nested([[a, [b, c], d]])[0].trajectories] == [1, 2, 1]
    assert [len(e) for e in groups_from_nested([[a, b, c, d]])[0].trajectories] == [1, 2, 1]
    for bad in ([[[a, d]]], [[[a, b]]]):
        with pytest.raises(UserError, match=r"set the same sample\.rollout_id"):
            groups_from_nested(bad, "my.fn")
    with pytest.raises(UserError, match="other than samples"):
        groups_from_nested([["text"]])


def test_the_module_lists_no_hook_twice() -> None:
    protocols = list(HOOKS.values())
    assert len(set(protocols)) == len(protocols) - 1, (
        "only the rollout and evaluation functions share one"
    )
    assert all(
        getattr(hooks, protocol.__name__) is protocol and protocol.__doc__ for protocol in protocols
    )
