"""What of a run's flags `slime doctor --round` launches: cut small, and nothing that a launch would
refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config import make_config, parse_args
from slime.diagnosis import one_round
from tests.support.processes import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("round"))


@pytest.mark.parametrize(
    "words",
    [
        "--num-rollout 50 --global-batch-size 4 --save-interval 5 --update-weights-interval 2",
        "--no-use-dynamic-batch-size --micro-batch-size 2 --actor-num-gpus-per-node 2 "
        "--rollout-batch-size 8",
        "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k2 --ref-update-interval 4 "
        "--lr-decay-style cosine",
        "--use-wandb --wandb-group g --disable-wandb-random-suffix --stage second "
        "--log-level DEBUG --rollout-stop x "
        "--dump-details {there}",
        "--eval-prompt-data sums {data} --eval-interval 2 --eval-temperature 0.5 "
        "--n-samples-per-eval-prompt 2",
        "--no-colocate --async-buffer-size 2 --max-staleness 1 --use-tis --load {there} "
        "--dynamic-sampling-filter-path"
        " slime.rollout.filters.check_reward_nonzero_std --over-sampling-batch-size 16 "
        "--advantage-estimator gspo",
    ],
)
def test_the_flags_of_a_round_are_right_themselves(
    words: str, world: World, tmp_path: Path
) -> None:
    there = world.outputs / "kept"
    filled = words.format(there=there, data=world.inputs / "test.jsonl").split()
    dynamic = "--no-use-dynamic-batch-size" not in words
    flags = world.flags(
        "examined", "--save", there, *filled, without="" if dynamic else "--max-tokens-per-gpu"
    )
    config = parse_args(flags)
    small = make_config(**one_round.flags_of_a_round(config, tmp_path))
    assert (
        small.rollout.num_rollout == 1
        and small.checkpoint.save is None
        and small.flat().check_weight_update_equal
    )
    assert small.rollout.n_samples_per_prompt == 2 and small.rollout.rollout_batch_size <= 4
    assert small.observe.output_dir == str(tmp_path) and not small.eval.eval_prompt_data
    assert (small.cluster.colocate, small.algorithm.use_tis) == (
        config.cluster.colocate,
        config.algorithm.use_tis,
    )
    assert small.warnings == config.warnings or "--eval" in words
