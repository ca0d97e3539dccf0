"""Generation runs one batch ahead of training; weights are pushed between batches.

generate   │ 0 │ 1 │ 2 │ 3 │ …        rollout k+1 is generated with the weights of the last push
train          │ 0 │ 1 │ 2 │ …        while rollout k is trained on
push               ▲   ▲   ▲          between two generations, every --update-weights-interval rollouts
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from slime.config import parse_args

if TYPE_CHECKING:
    from slime.cluster.run_cluster import Pending
    from slime.session import Session


def main(argv: list[str]) -> None:
    """`slime train-async`, `python train_async.py`."""
    config = parse_args(argv, entry="train_async")
    if config.debug.dry_run:
        from slime.cli.dry_run import dry_run

        dry_run(config)
        return
    from slime.session import open_session  # not before the flags are right: it imports Ray

    with open_session(config, take_turns=False) as session:
        train_async(session)


def train_async(session: Session) -> None:
    cluster, phase = session.cluster, session.sinks.phase
    most_ahead = session.config.sync.async_buffer_size
    if session.evaluates_first:
        session.log(session.evaluate(rollout_id=0))

    ahead: deque[Pending] = deque()
    to_start = session.start_rollout_id
    for rollout_id in range(session.start_rollout_id, session.num_rollout):
        if not ahead:  # the first one, and after each that was waited for with nothing else under way
            ahead.append(cluster.start_generating(to_start))
            to_start += 1
        with phase("train_wait"):
            batch = cluster.collect(ahead.popleft())
        while len(ahead) < most_ahead and to_start < session.num_rollout:
            ahead.append(cluster.start_generating(to_start))
            to_start += 1
        with phase("train"):
            metrics = batch.metrics | session.staleness(batch.versions) | cluster.train(batch)
        session.trained(rollout_id, metrics)

        if session.should_save(rollout_id):
            session.save(rollout_id)
        if session.should_push(rollout_id):
            with phase("generation_wait"):  # a batch boundary: nothing is generated while weights change
                for pending in ahead:
                    cluster.collect(pending)
            metrics |= session.update_weights()
        if session.should_evaluate(rollout_id):
            metrics |= session.evaluate(rollout_id)
        session.log(metrics)
        session.stop_if_asked()
