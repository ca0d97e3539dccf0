"""The training loop: generate, train, save, push the weights, evaluate.

`Session` implements these steps; this file defines their order.

Synchronous (``slime train``, --async-buffer-size 0): nothing is generated while the trainer trains.

    generate │ 0 │       │ 1 │       │ 2 │ …     rollout k uses the weights trained on rollout k - 1
    train        │ 0 │       │ 1 │       │ 2 │
    push             ▲           ▲

Asynchronous (``slime train-async``, --async-buffer-size N): up to N rollouts are generated ahead of
the trainer.

    generate │ 0 │ 1 │ 2 │ 3 │ …      rollout k uses the weights of the last push, while one of the
    train        │ 0 │ 1 │ 2 │ …      rollouts k - N … k - 1 is trained on
    push             ▲   ▲   ▲        every --update-weights-interval rollouts, between two
                                      generations, or during them with --update-weights-in-flight

With --max-staleness, a rollout whose samples would be too old for training starts after the next
push. A synchronous run waits for an evaluation; otherwise it runs during the next steps, until the
next push or save.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.run.session import Generating, Session


def train(session: Session) -> None:
    """Train on ``session.schedule.rollout_ids``, in order; each rollout is one step of the run.

    With --max-restarts, lost trainer ranks are restarted and the steps since the newest checkpoint
    are repeated.

    Raises:
        StopRequested: between two steps, after a SIGTERM.
    """
    is_lost = False
    while True:
        try:
            if is_lost:
                session.restart_trainer()
            return train_on(session)
        except Exception as error:
            is_lost = session.may_restart_trainer(error)
            if not is_lost:
                raise


def train_on(session: Session) -> None:
    """Do the remaining steps of the run."""
    schedule = session.schedule
    if schedule.evaluates_first:
        session.log(session.evaluate(rollout_id=0))
    elif session.lacks_evaluation:
        session.log(session.evaluate(schedule.start_rollout_id - 1))

    ahead = session.config.sync.async_buffer_size
    to_start = deque(schedule.rollout_ids)
    generating: deque[Generating] = deque()

    def start_up_to(count: int) -> None:
        while to_start and len(generating) < count and session.may_start(to_start[0]):
            generating.append(session.start_generating(to_start.popleft()))

    for rollout_id in schedule.rollout_ids:
        start_up_to(max(1, ahead))  # at least the rollout that is needed now
        batch = session.collect(generating.popleft())
        start_up_to(ahead)
        metrics = session.train(batch)

        saves = session.saving.is_due(rollout_id)
        pushes = schedule.pushes(rollout_id)
        if saves or pushes:
            # an evaluation uses one weight version, and its result belongs into the checkpoint
            session.finish_evaluation()
        if saves:
            session.save(rollout_id)
        if pushes:
            if not session.config.sync.update_weights_in_flight:
                session.wait_for(generating)  # else they continue with the new weights
            metrics |= session.update_weights()
        if schedule.evaluates(rollout_id):
            metrics |= session.evaluate(rollout_id)
        start_up_to(ahead)  # rollouts that --max-staleness has held back until this push
        session.log(metrics)
        session.stop_if_asked()
