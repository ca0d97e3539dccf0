"""Lock step: generate, train, save, push weights, evaluate.

prompts ─► generate ─► train ─► save ─► update_weights ─► evaluate ─┐
              ▲──────────────────── next rollout ───────────────────┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.config import parse_args

if TYPE_CHECKING:
    from slime.session import Session


def main(argv: list[str]) -> None:
    """`slime train`, `python train.py`."""
    config = parse_args(argv)
    if config.debug.dry_run:
        from slime.cli.dry_run import dry_run

        dry_run(config)
        return
    from slime.session import open_session  # not before the flags are right: it imports Ray

    with open_session(config, take_turns=True) as session:
        train(session)


def train(session: Session) -> None:
    cluster, phase = session.cluster, session.sinks.phase
    if session.evaluates_first:
        session.log(session.evaluate(rollout_id=0))

    for rollout_id in range(session.start_rollout_id, session.num_rollout):
        with phase("rollout"):
            batch = cluster.generate(rollout_id)
        with phase("train"):
            metrics = batch.metrics | session.staleness(batch.versions) | cluster.train(batch)
        session.trained(rollout_id, metrics)

        if session.should_save(rollout_id):
            session.save(rollout_id)
        if session.should_push(rollout_id):
            metrics |= session.update_weights()
        if session.should_evaluate(rollout_id):
            metrics |= session.evaluate(rollout_id)
        session.log(metrics)
        session.stop_if_asked()
