"""How failures of groups are told: in a line where a group is replaced, and as the error that stops
the run where too many have failed. What the last failure says of its remedy is then the remedy."""

from __future__ import annotations

from slime.errors import UserError
from slime.rollout.group_run import GroupRun
from slime.samples.types import SampleStatus
from slime.user_code.loading import user_frames, where_to_mend, with_user_frames


def why_failed(run: GroupRun) -> str:
    """Which sample failed, while doing what, and of what; in one line."""
    for trajectory in run.trajectories:
        if trajectory.failure is not None:
            error = trajectory.failure
            told = f"{type(error).__name__}: {error}"
            if isinstance(error, UserError):
                told = f"{error.what} ({error.why})" if error.why else error.what
            where = f" in {trajectory.function}" if trajectory.function else ""
            return (
                f"sample {trajectory.prompt.index} while {trajectory.activity.value}{where}: {told}"
            )
    statuses = sorted(
        {
            sample.status.value
            for sample in run.samples
            if sample.status is not SampleStatus.COMPLETED
        }
    )
    return f"the generate function returned samples with status {', '.join(statuses)}"


def too_many_failed(what: str, which: str, run: GroupRun, file: str) -> UserError:
    """The error that stops the run, with the remedy and the lines of what failed in ``run``; raise
    it from that.

    Args:
        which: of the failed groups ``run`` is ("the last one").
        file: of ``samples/`` in the run folder, which has all failures.
    """
    cause = run.failure
    fix = "mend what it names"
    if isinstance(cause, UserError) and cause.fix:
        fix = cause.fix
    elif cause is not None and user_frames(cause):
        fix = where_to_mend(cause)
    why = f"{which}: {why_failed(run)}; all of them are in samples/{file} of the run folder"
    failure = UserError(what, why, fix)
    return failure if cause is None else with_user_frames(failure, cause)
