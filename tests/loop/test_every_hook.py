"""Every hook of the table is called in a real run: two launches, since some take the place of
others."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.user_code.hooks import HOOKS
from tests.support.every_hook import called
from tests.support.runs import Run, RunResult

pytestmark = pytest.mark.full

SMALL = (
    "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--rollout-max-response-len", 4,
    "--colocate",
)  # fmt: skip
#: Hook → its function in `tests.support.every_hook`: in the first run, and those that have no place
#: there.
FIRST = {
    "rollout_function_path": "rollout",
    "eval_function_path": "evaluation",
    "custom_generate_function_path": "generate",
    "rollout_sample_hook_path": "sample_hook",
    "custom_rm_path": "reward",
    "dynamic_sampling_filter_path": "dynamic_filter",
    "buffer_filter_path": "buffer_filter",
    "rollout_sample_filter_path": "sample_filter",
    "rollout_all_samples_process_path": "all_samples",
    "custom_rollout_log_function_path": "rollout_log",
    "custom_eval_rollout_log_function_path": "eval_log",
    "custom_reward_post_process_path": "post_process",
    "rollout_data_postprocess_path": "postprocess",
    "custom_tis_function_path": "tis",
    "custom_pg_loss_reducer_function_path": "reducer",
    "custom_model_provider_path": "model_provider",
    "custom_megatron_init_path": "megatron_init",
    "custom_megatron_before_log_prob_hook_path": "before_log_prob",
    "custom_megatron_before_train_step_hook_path": "before_train_step",
}
SECOND = {
    "data_source_path": "Source",
    "custom_convert_samples_to_train_data_path": "convert",
    "custom_advantage_function_path": "advantage",
    "custom_loss_function_path": "loss",
}
COMMON = {"custom_rm_path": "reward", "custom_megatron_init_path": "megatron_init"}


def flags_of(functions: dict[str, str]) -> list[str]:
    words = []
    for dest, name in functions.items():
        words += [f"--{dest.replace('_', '-')}", f"tests.support.every_hook.{name}"]
    return words


@pytest.fixture(scope="module")
def runs(run: Run, data: Path) -> dict[str, RunResult]:
    # more is drawn than is needed: what is put back comes out of the buffer in the second rollout
    first = [
        "--over-sampling-batch-size",
        4,
        "--eval-prompt-data",
        "sums",
        f"{data}@[0:2]",
        "--eval-interval",
        1,
    ]
    first += ["--use-kl-loss", "--kl-loss-coef", "0.01", "--use-tis", "--num-rollout", 2]
    second = ["--loss-type", "custom_loss", "--num-rollout", 1]
    return {
        "first": run("hooks-1", *SMALL, *first, *flags_of(FIRST)),
        "second": run("hooks-2", *SMALL, *second, *flags_of(SECOND | COMMON)),
    }


@pytest.mark.parametrize("hook", [*HOOKS, "data_source_path"])
def test_it_is_called(runs: dict[str, RunResult], hook: str) -> None:
    assert hook in called(runs["first" if hook in FIRST else "second"].path)


def test_they_train(runs: dict[str, RunResult]) -> None:
    for name, steps in {"first": 2, "second": 1}.items():
        assert len(runs[name].series("train/loss")) == steps
    assert runs["second"].series("train/reinforce") and runs["first"].series(
        "rollout/num_failed_samples"
    ) == [0, 0]
