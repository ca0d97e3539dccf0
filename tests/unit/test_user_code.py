"""Whatever fails in a user's function is told with the user's own file, line and frames."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import logging
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config
from slime.engines.request_fields import BadRequest, parse_params
from slime.errors import UserError
from slime.page.report import write_report
from slime.prompts.source import make_source, save_source
from slime.rollout.dynamic_sampling import DynamicSampler
from slime.rollout.filters import call_dynamic_filter
from slime.rollout.rewards.pool import RewardPool
from slime.rollout.trajectory import GroupRunner
from slime.rollout.user_rollouts import call_rollout_fn
from slime.samples.batch import TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.types import Group, Sample, SampleStatus
from slime.trainer.user_functions import UserFunctions
from slime.user_code import process_state
from slime.user_code.hooks import RolloutFnTrainOutput
from slime.user_code.loading import (
    FunctionFailed,
    call_user_function,
    failures_of,
    load_function,
    user_frames,
    user_function,
)
from slime.user_code.process_state import kept
from tests.support.fake_rollout import FakeClient, FakeRewards, FakeSource, hook_args, make_state
from tests.support.prompt_fixtures import make_tokenizer
from tests.support.run_folders import create_run

CODE = """\
import orjson
from slime.user_code.hooks import DataSource
from slime.samples.types import Sample

def fails(*args, **kwargs):
    return helper(7)

def helper(number):
    raise LookupError(f"no {number} here")

async def fails_async(*args, **kwargs):
    fails()

def in_a_library(*args, **kwargs):
    return orjson.loads("{")

def misuses_slime(*args, **kwargs):
    Sample().append_response_tokens(tokens=[1])

def makes_a_failing_reducer(*args, **kwargs):
    return fails

class Source(DataSource):
    def __init__(self, args): self.args = args
    def get_samples(self, num_samples): fails()
    def add_samples(self, samples): fails()
    def mark_consumed(self, indices): fails()
    def state_dict(self): fails()

class BadFromTheStart(Source):
    def __init__(self, args): fails()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("user") / "users_own.py"
    file.write_text(CODE)
    return file


def config(**flags: Any) -> Any:
    return make_config(rollout_batch_size=1, n_samples_per_prompt=2, num_rollout=1, **flags)


def finished(index: int) -> Sample:
    return Sample(
        index=index, group_index=0, tokens=[1, 2], response="a", response_length=1, reward=1.0,
        rollout_log_probs=[-1.0], status=SampleStatus.COMPLETED,
    )  # fmt: skip


def source_of(path: str) -> Any:
    return make_source(config(data_source_path=path), make_tokenizer())


def batches(**flags: Any) -> Any:
    return to_train_batches(
        [Group(0, [[finished(0)], [finished(1)]])], config(**flags), TrainLayout(), 0
    )


async def generated(path: str, **flags: Any) -> Any:
    """A rollout whose generate function, or sample hook, fails."""
    state = make_state(
        FakeClient(), args=hook_args(**{"custom_generate_function_path": None, **flags})
    )
    runner = GroupRunner(state, FakeRewards(), rollout_id=0)
    collector = DynamicSampler(runner, FakeSource(2), target=1, draw_size=1, group_size=2)
    return await collector.collect()


def of_functions(name: str, **flags: Any) -> Callable[[], Any]:
    return lambda: getattr(UserFunctions.load(config(**flags)), name)()


#: What a hook is called by → the call, given the path of a function that fails.
CALLS: dict[str, Callable[[str], Any]] = {
    "reward": lambda path: asyncio.run(
        RewardPool(config(custom_rm_path=path)).score(Sample(index=0))
    ),
    "group reward": lambda path: asyncio.run(
        RewardPool(config(custom_rm_path=path, group_rm=True)).score_group([Sample(index=0)])
    ),
    "generate": lambda path: asyncio.run(generated(path, custom_generate_function_path=path)),
    "sample hook": lambda path: asyncio.run(generated(path, rollout_sample_hook_path=[path])),
    "rollout": lambda path: asyncio.run(
        call_rollout_fn(load_function(path), None, 0, FakeSource(2), RolloutFnTrainOutput, path)
    ),
    "dynamic filter": lambda path: asyncio.run(call_dynamic_filter(load_function(path), None, [])),
    "sample filter, log function": lambda path: asyncio.run(call_user_function(path, None, [])),
    "reward post-process": lambda path: batches(custom_reward_post_process_path=path),
    "conversion": lambda path: batches(custom_convert_samples_to_train_data_path=path),
    "advantages": lambda path: of_functions("advantages", custom_advantage_function_path=path)(),
    "postprocess": lambda path: of_functions("postprocess", rollout_data_postprocess_path=path)(),
    "loss": lambda path: of_functions(
        "loss", loss_type="custom_loss", custom_loss_function_path=path
    )(),
    "tis": lambda path: of_functions("tis", use_tis=True, custom_tis_function_path=path)(),
    "reducer": lambda path: of_functions("reducer", custom_pg_loss_reducer_function_path=path)(),
    "trainer hook": lambda path: user_function(path)(),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", ["fails", "fails_async"])
def test_a_failing_hook_tells_the_users_lines(file: Path, kind: str, name: str) -> None:
    sync_only = (
        "post-process", "conversion", "advantages", "postprocess", "loss", "tis", "reducer",
        "trainer hook",
    )  # fmt: skip
    if kind == "generate" and name == "fails":
        name = "fails_async"  # which it has to be
    if kind.endswith(sync_only):
        name = "fails"
    with pytest.raises(UserError) as caught:
        CALLS[kind](f"{file}:{name}")
    told = "\n".join(caught.value.__notes__)
    assert (
        f'File "{file}", line 6, in fails' in told and f'File "{file}", line 9, in helper' in told
    )
    assert 'raise LookupError(f"no {number} here")' in told and "slime/rollout" not in told
    assert "LookupError: no 7 here" in str(caught.value)
    assert caught.value.__notes__ == pickle.loads(pickle.dumps(caught.value)).__notes__, (
        "it survives Ray"
    )


def test_leaving_the_program_tells_the_users_line(tmp_path: Path) -> None:
    file = tmp_path / "leaves.py"
    body = "def reward(args, sample, **kwargs):\n    sys.exit(3)\n"
    file.write_text(f"import sys\n\n{body}\nasync {body.replace('reward', 'reward_async')}")
    for name, line in (("reward", 4), ("reward_async", 7)):
        with pytest.raises(UserError, match=r"it raised SystemExit\(3\)") as caught:
            asyncio.run(call_user_function(f"{file}:{name}", None, None))
        assert f'File "{file}", line {line}, in {name}' in "".join(caught.value.__notes__)
        assert "mend it at the line below" in str(caught.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: source_of(f"{path}:Source").get_samples(1),
        lambda path: source_of(f"{path}:Source").add_samples([]),
        lambda path: source_of(f"{path}:Source").mark_consumed([0]),
        lambda path: save_source(source_of(f"{path}:Source"), config(), 0),
        lambda path: source_of(f"{path}:BadFromTheStart"),
        lambda path: user_function(f"{path}:makes_a_failing_reducer")()(),
    ],
)
def test_a_failing_data_source_tells_the_users_lines(
    file: Path, call: Callable[[Path], Any]
) -> None:
    with pytest.raises((UserError, LookupError)) as caught:
        call(file)
    assert f'File "{file}", line 9, in helper' in user_frames(caught.value) + "".join(
        getattr(caught.value, "__notes__", ())
    )


def test_what_the_reducer_returned_is_the_users_code_too(file: Path) -> None:
    functions = UserFunctions.load(
        config(custom_pg_loss_reducer_function_path=f"{file}:makes_a_failing_reducer")
    )
    assert functions.reducer is not None
    with pytest.raises(UserError, match=r"what .* returned failed") as caught:
        functions.reducer([], [], [], False)(None)
    assert f'File "{file}", line 9, in helper' in caught.value.__notes__[0]


def test_a_failure_inside_a_library_tells_who_called_it(file: Path) -> None:
    with pytest.raises(UserError, match="JSONDecodeError") as caught:
        user_function(f"{file}:in_a_library")()
    assert f'File "{file}", line 15, in in_a_library' in caught.value.__notes__[0]


def test_what_our_code_raises_keeps_its_kind_and_tells_who_called(file: Path) -> None:
    with pytest.raises(
        UserError, match="1 sampled tokens were appended with none log-probs"
    ) as caught:
        user_function(f"{file}:misuses_slime")()
    assert f'File "{file}", line 18, in misuses_slime' in caught.value.__notes__[0]
    with pytest.raises(BadRequest), failures_of("a rollout function"):
        parse_params({"no_such_parameter": 1})


def test_the_crash_folder_and_the_report_have_them(file: Path, tmp_path: Path) -> None:
    run = create_run(make_config(output_dir=str(tmp_path), run_name="mine"))
    with pytest.raises(UserError) as caught:
        user_function(f"{file}:fails")()
    folder = run.write_crash(caught.value)
    assert folder is not None
    for name in ("traceback.txt", "crash.json"):
        assert "line 9, in helper" in (folder / name).read_text()
    assert "line 9, in helper" in write_report(run.path).read_text()


# -- what a process shares -------------------------------------------------------------------------

#: What a function leaves behind → a part of the warning.
LEFT_BEHIND: dict[str, tuple[Callable[[], Any], str]] = {
    "directory": (lambda: os.chdir("/"), "the working directory"),
    "handler": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "a signal handler"),
    "alarm": (lambda: signal.setitimer(signal.ITIMER_REAL, 900.0), "an alarm"),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "torch's default dtype"),
    "device": (lambda: torch.set_default_device("meta"), "torch's default device"),
    "gradients": (lambda: torch.set_grad_enabled(False), "whether torch computes gradients"),
    "algorithms": (
        lambda: torch.use_deterministic_algorithms(True),
        "torch's deterministic algorithms",
    ),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        "torch's precision of matrix products",
    ),
    "seed": (lambda: torch.manual_seed(5), "torch's seed"),
    "limit": (
        lambda: resource.setrlimit(
            resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        ),
        "a resource limit",
    ),
    "umask": (lambda: os.umask(0o777), "the umask"),
    "stdout": (lambda: setattr(sys, "stdout", io.StringIO()), "sys.stdout or sys.stderr"),
    "logging": (lambda: logging.disable(logging.DEBUG), "logging.disable"),
}


def state_of_process() -> list[Any]:
    return [
        os.getcwd(),
        signal.getsignal(signal.SIGTERM),
        signal.getitimer(signal.ITIMER_REAL),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_rng_state().tolist(),
        resource.getrlimit(resource.RLIMIT_FSIZE),
        process_state._umask(),
        sys.stdout,
        logging.root.manager.disable,
    ]


@pytest.fixture
def untold_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "_told", {})
    monkeypatch.setattr(process_state, "_usual_streams", [])  # each test has other streams


@pytest.mark.parametrize("change", LEFT_BEHIND)
def test_what_a_process_shares_is_set_back_and_told_once(
    change: str, untold_yet: None, caplog: pytest.LogCaptureFixture
) -> None:
    do, said = LEFT_BEHIND[change]
    before = state_of_process()
    for _ in range(2):
        with kept("'mine.f' (--flag)", in_training=True):
            do()
        assert state_of_process() == before
    [line] = caplog.messages
    assert line.startswith(f"'mine.f' (--flag) has changed {said}") and "set back" in line


def test_draws_and_new_variables_are_the_functions_own(
    untold_yet: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIME_TEST_OLD", "1")
    before = torch.get_rng_state()
    with kept("f", in_training=True):
        torch.rand(())
        monkeypatch.setenv("SLIME_TEST_NEW", "1")
    assert not torch.equal(torch.get_rng_state(), before) and not caplog.messages
    with kept("f"):
        monkeypatch.setenv("SLIME_TEST_OLD", "2")
    assert "the variable SLIME_TEST_OLD of the environment" in caplog.text


def test_streams_that_a_lost_call_still_borrows_are_not_kept(
    untold_yet: None, caplog: pytest.LogCaptureFixture
) -> None:
    with kept("first"):
        pass
    usual = sys.stdout
    second = contextlib.ExitStack()
    with contextlib.redirect_stdout(io.StringIO()):  # in a thread that nobody waits for
        second.enter_context(kept("second"))
    second.close()
    assert sys.stdout is usual and not caplog.messages


def test_overlapping_functions_are_told_together_and_disturb_no_other(
    untold_yet: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = os.getcwd()
    with kept("first"):
        os.chdir(tmp_path)
        with kept("second"):
            pass
        assert os.getcwd() == str(tmp_path), "the first one still works there"
    assert os.getcwd() == before and caplog.messages[0].startswith("first or second has changed")


def test_hooks_share_args_and_change_no_flag() -> None:
    config = make_config(rollout_stop=["a"], rollout_batch_size=2)
    args = config.shared_args
    args.mine = [1]
    assert config.shared_args.mine == [1] and not hasattr(config.flat(), "mine")
    assert "mine" not in vars(pickle.loads(pickle.dumps(config)).shared_args)
    args.rollout_batch_size = 2  # as it is
    changes: list[Callable[[], Any]] = [
        lambda: setattr(args, "rollout_batch_size", 4),
        lambda: delattr(args, "lr"),
        lambda: args.rollout_stop.append("b"),
        lambda: args.train_env_vars.update(A="1"),
    ]
    for change in changes:
        with pytest.raises(FunctionFailed, match="which would have no effect") as caught:
            change()
        assert "copy.copy(args)" in caught.value.fix
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        twin.rollout_batch_size = 4
        twin.rollout_stop.append("b")
    assert args.rollout_batch_size == 2 and args.rollout_stop == ["a"]


def test_a_function_that_exits_has_failed(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("def f(*args): raise SystemExit(0)")
    with pytest.raises(FunctionFailed, match="SystemExit: 0"):
        user_function(f"{tmp_path}/exits.py:f", "--flag")()
