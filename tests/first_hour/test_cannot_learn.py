"""Runs of a new user that learn nothing, or end in the user's own code: what they say, while they
run."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.errors import UserError
from tests.support.runs import GRPO, Run

CODE = """\
import asyncio

from slime.rollout.generate import is_in_run

async def never(args, sample, **kwargs):
    if not is_in_run():  # the launch tries it on a label
        return 0.0
    await asyncio.Event().wait()

def raises(args, sample, **kwargs):
    return 1 / (not is_in_run())

def breaks_training(args, rollout_id, rollout_data):
    rollout_data["advantages"] = rollout_data["advantage"]
"""


def line_of(statement: str) -> int:
    return next(n for n, line in enumerate(CODE.splitlines(), 1) if statement in line)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("mine") / "my_first_rewards.py"
    file.write_text(CODE)
    return file


@pytest.mark.slow
def test_rewards_that_never_come(
    run: Run, file: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And evaluation data without an interval: it is evaluated before the first step and after the
    last."""
    flags = [
        "--custom-rm-path",
        f"{file}:never",
        "--rm-timeout",
        1,
        "--num-rollout",
        2,
        "--colocate",
    ]
    result = run("late", *GRPO, *flags, "--eval-prompt-data", f"{data}@[:2]")
    said = capfd.readouterr().err
    while_it_ran, last_lines = said.rsplit("finished, ", 1)
    assert while_it_ran.count("No reward comes") == last_lines.count(
        "No reward comes"
    ) == 1 and "16 calls ran into --rm-timeout" in " ".join(said.split())
    before, *steps = result.rows
    assert [row["step"] for row in result.rows] == [0, 1, 2]
    assert all(
        row["alarm/late_rewards"] == 1 and row["rollout/reward_timeout"] == 16 for row in steps
    )
    assert ["eval/sums" in row for row in result.rows] == [True, False, True]
    assert before["eval/rewards/timeout"] == steps[-1]["eval/rewards/timeout"] == 2
    assert "No reward comes" in (result.path / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "name", "line"),
    [
        pytest.param("--custom-rm-path", "raises", line_of("return 1 /"), marks=pytest.mark.full),
        ("--rollout-data-postprocess-path", "breaks_training", line_of('["advantage"]')),
    ],
)
def test_a_run_that_ends_in_the_users_code(
    run: Run, outputs: Path, file: Path, flag: str, name: str, line: int
) -> None:
    """In the rollout process, and in a trainer."""
    with pytest.raises(UserError) as caught:
        run(name, *GRPO, flag, f"{file}:{name}", "--num-rollout", 1, "--colocate")
    said = f'File "{file}", line {line}, in {name}'
    assert said in "\n".join(caught.value.__notes__), "guarded() prints the notes"
    (crash,) = (outputs / name / "crash").iterdir()
    assert said in (crash / "traceback.txt").read_text() and "Error" in caught.value.why
