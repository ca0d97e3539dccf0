"""The batch equation: rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config.specs import option_of
from slime.errors import UserError

if TYPE_CHECKING:
    from slime.config.resolve import Draft

EQUATION = "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout"


def derive_batch_sizes(draft: Draft) -> None:
    """Fill in what the user left out of the equation.

    Raises:
        UserError: it does not hold, or nothing whole can be derived; prints it with the user's numbers.

    Example:
        32 × 8 samples and --num-steps-per-rollout 2 give a global_batch_size of 128.
    """
    for dest in ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout"):
        if draft[dest] is not None and draft[dest] < 1:
            raise UserError(f"{option_of(dest)} is {draft[dest]}", why="it must be at least 1")
    samples = draft["n_samples_per_prompt"]
    if draft["rollout_batch_size"] is None:
        prompts, formula = _prompts(draft["global_batch_size"], draft["num_steps_per_rollout"], samples)
        draft.derive("rollout_batch_size", prompts, formula)
    prompts, batch, steps = draft["rollout_batch_size"], draft["global_batch_size"], draft["num_steps_per_rollout"]
    total, product = prompts * samples, f"{prompts} × {samples}"
    if batch is not None and steps is not None:
        if total != batch * steps:
            raise _contradiction(prompts, samples, batch, steps)
    elif batch is not None:
        if total % batch:
            raise _not_whole(product, total, "global_batch_size", batch)
        formula = "rollout_batch_size × n_samples_per_prompt ÷ global_batch_size"
        draft.derive("num_steps_per_rollout", total // batch, f"{formula} = {product} ÷ {batch}")
    else:
        if steps is None:
            steps = 1
            draft.derive("num_steps_per_rollout", 1, "1, as global_batch_size is not given either")
        if total % steps:
            raise _not_whole(product, total, "num_steps_per_rollout", steps)
        formula = "rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout"
        draft.derive("global_batch_size", total // steps, f"{formula} = {product} ÷ {steps}")


def _prompts(batch: int | None, steps: int | None, samples: int) -> tuple[int, str]:
    """rollout_batch_size when it was left out (`parse_args` requires it)."""
    total = (batch or samples) * (steps or 1)
    if total % samples:
        raise UserError(
            f"no whole rollout_batch_size fits {EQUATION}",
            why=f"global_batch_size × num_steps_per_rollout = {total}, no multiple of n_samples_per_prompt {samples}",
            fix="pass --rollout-batch-size",
        )
    return total // samples, "global_batch_size × num_steps_per_rollout ÷ n_samples_per_prompt"


def _contradiction(prompts: int, samples: int, batch: int, steps: int) -> UserError:
    total = prompts * samples
    ways = []
    if total % steps == 0:
        ways.append(f"--global-batch-size {total // steps}")
    if total % batch == 0:
        ways.append(f"--num-steps-per-rollout {total // batch}")
    if (batch * steps) % samples == 0:
        ways.append(f"--rollout-batch-size {batch * steps // samples}")
    return UserError(
        f"the batch sizes contradict each other: {EQUATION}",
        why=f"{prompts} × {samples} = {total}, but {batch} × {steps} = {batch * steps}",
        fix=f"pass {' or '.join(ways)}; or leave one of the last two out" if ways else "leave one of the last two out",
    )


def _not_whole(product: str, total: int, name: str, divisor: int) -> UserError:
    option = option_of(name)
    below = next(d for d in range(min(divisor, total), 0, -1) if total % d == 0)
    above = next((d for d in range(divisor, total + 1) if total % d == 0), None)
    near = f"{option} {below}" + (f" or {option} {above}" if above is not None else "")
    return UserError(
        f"the batch sizes do not divide: {EQUATION}",
        why=f"{product} = {total} is not a multiple of {name} {divisor}",
        fix=f"pass {near}",
    )
