"""Generation runs one batch ahead of training; weights are pushed between batches.

    generate   │ 0 │ 1 │ 2 │ 3 │ …        rollout k+1 is generated with the weights of the last push
    train          │ 0 │ 1 │ 2 │ …        while rollout k is trained on
    push               ▲   ▲   ▲          between two generations, every --update-weights-interval rollouts
"""

from __future__ import annotations

import time

from slime.config import Config, parse_args
from slime.drivers.session import Session, dry_run, open_session


def main(argv: list[str]) -> None:
    """`slime train-async`, `python train_async.py`."""
    config = parse_args(argv, entry="train_async")
    if config.debug.dry_run:
        dry_run(config)
        return
    with open_session(config, take_turns=False) as session:
        train_async(config, session)


def train_async(config: Config, session: Session) -> None:
    cluster, sinks = session.cluster, session.sinks
    if session.start_rollout_id == 0 and (session.num_rollout == 0 or not config.eval.skip_eval_before_train):
        sinks.phase("evaluate")
        session.log(cluster.evaluate(rollout_id=0))
    if session.start_rollout_id >= session.num_rollout:
        return

    pending = cluster.start_generating(session.start_rollout_id)
    for rollout_id in range(session.start_rollout_id, session.num_rollout):
        started = time.perf_counter()
        sinks.phase("rollout")
        batch = cluster.collect(pending)
        metrics = dict(batch.metrics)
        metrics["perf/train_wait_time"] = time.perf_counter() - started
        is_last = rollout_id + 1 == session.num_rollout
        if not is_last:
            pending = cluster.start_generating(rollout_id + 1)

        sinks.phase("train")
        metrics |= cluster.train(batch)
        session.trained(rollout_id)
        if session.should_save(rollout_id):
            metrics["perf/save_model_time"] = session.save(rollout_id)

        evaluate = session.should_evaluate(rollout_id)
        if evaluate or (rollout_id + 1) % config.sync.update_weights_interval == 0:
            if not is_last:
                cluster.finish(pending)  # a batch boundary: no request is under way while weights change
            metrics |= session.update_weights()
        metrics["perf/step_time"] = time.perf_counter() - started
        if evaluate:
            sinks.phase("evaluate")
            metrics |= cluster.evaluate(rollout_id)
        session.log(metrics)
