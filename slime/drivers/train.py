"""Lock step: generate, train, save, push weights, evaluate.

    prompts ─► generate ─► train ─► save ─► update_weights ─► evaluate ─┐
                  ▲──────────────────── next rollout ───────────────────┘
"""

from __future__ import annotations

import time

from slime.config import Config, parse_args
from slime.drivers.session import Session, dry_run, open_session


def main(argv: list[str]) -> None:
    """`slime train`, `python train.py`."""
    config = parse_args(argv)
    if config.debug.dry_run:
        dry_run(config)
        return
    with open_session(config, take_turns=True) as session:
        train(config, session)


def train(config: Config, session: Session) -> None:
    cluster, sinks = session.cluster, session.sinks
    fresh = session.start_rollout_id == 0
    if fresh and (session.num_rollout == 0 or not config.eval.skip_eval_before_train):
        sinks.phase("evaluate")
        session.log(cluster.evaluate(rollout_id=0))

    for rollout_id in range(session.start_rollout_id, session.num_rollout):
        started = time.perf_counter()
        sinks.phase("rollout")
        batch = cluster.generate(rollout_id)
        metrics = dict(batch.metrics)

        sinks.phase("train")
        metrics |= cluster.train(batch)
        session.trained(rollout_id)

        if session.should_save(rollout_id):
            metrics["perf/save_model_time"] = session.save(rollout_id)
        if (rollout_id + 1) % config.sync.update_weights_interval == 0 or session.should_evaluate(rollout_id):
            metrics |= session.update_weights()
        metrics["perf/step_time"] = time.perf_counter() - started

        if session.should_evaluate(rollout_id):
            sinks.phase("evaluate")
            metrics |= cluster.evaluate(rollout_id)
        session.log(metrics)
