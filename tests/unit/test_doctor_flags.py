"""`slime doctor` and wrong flags: forty sets of them, each found under its name, in the words of a
launch."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config import parse_args
from slime.diagnosis.check import CheckFindings
from slime.diagnosis.doctor import examine
from slime.diagnosis.troubles import PLACES, Finding
from slime.errors import UserError
from tests.support.processes import ROOT, World

#: name of the finding → sets of flags on top of a run that is right; "-" before a flag leaves it
#: out
WRONG: list[tuple[str, str]] = [
    ("flag-unknown", "--rollout-batchsize 8"),
    ("flag-unknown", "--lerning-rate 1e-6"),
    ("flag-unknown", "--rollout 3"),
    ("flag-value", "--lr fast"),
    ("flag-value", "--lr"),
    ("flag-value", "--colocate maybe"),
    ("flag-value", "--num-rollout 3 4"),
    ("flag-value", "--update-weights-interval 0"),
    ("flag-value", "--advantage-estimator grppo"),
    ("flag-value", "--rollout-external-engine-addrs nonsense:words"),
    ("flag-missing", "-num-rollout"),
    ("flag-missing", "-hf-checkpoint"),
    ("flag-missing", "--num-epoch 1"),
    ("flag-unsupported", "--teacher-port 1"),
    ("flag-unsupported", "--update-weight-mode delta"),
    ("flag-without-effect", "--image-max-pixels 4096"),
    ("flag-without-effect", "--max-staleness 0 --debug-rollout-only"),
    ("flag-without-effect", "--group-rm -custom-rm-path --rm-type math"),
    ("flags-contradict", "--bf16"),
    (
        "flags-contradict",
        "--save-debug-rollout-data d_{rollout_id} --save-debug-train-data d_{rollout_id}",
    ),
    ("flags-contradict", "--min-lr 1 --lr 0.1 --lr-decay-style cosine"),
    ("flags-contradict", "--lr-decay-style WSD"),
    ("flags-contradict", "--run-name a/b"),
    ("flags-contradict", "--partial-rollout --deterministic-rollout"),
    ("flags-contradict", "--use-rollout-logprobs --use-tis"),
    ("flags-contradict", "--advantage-estimator reinforce_plus_plus"),
    ("flags-contradict", "--update-weight-transport disk"),
    ("batch-equation", "--global-batch-size 3 --num-steps-per-rollout 1"),
    ("batch-equation", "--num-steps-per-rollout 3"),
    ("batch-equation", "-use-dynamic-batch-size -max-tokens-per-gpu --micro-batch-size 3"),
    ("parallel-layout", "--tensor-model-parallel-size 2"),
    (
        "parallel-layout",
        "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 8 --rollout-num-gpus 8",
    ),
    (
        "parallel-layout",
        "--advantage-estimator ppo --critic-num-gpus-per-node 1 "
        "--critic-tensor-model-parallel-size 2",
    ),
    (
        "parallel-layout",
        "--advantage-estimator ppo --critic-num-gpus-per-node 7 "
        "--critic-tensor-model-parallel-size 7",
    ),
    ("parallel-layout", "--advantage-estimator ppo --critic-tensor-model-parallel-size 2"),
    ("context-length", "--rollout-max-prompt-len 64"),
    ("context-length", "--seq-length 32"),
    ("colocate-async", "--async-buffer-size 1"),
    ("stale-weights", "--max-staleness 1 --update-weights-interval 4"),
    ("no-contrast", "--n-samples-per-prompt 1 --advantage-estimator grpo"),
    ("no-contrast", "--use-kl-loss"),
    ("gpus-missing", "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2"),
    ("gpus-missing", "--actor-num-gpus-per-node 512 --rollout-batch-size 512"),
    ("engine-flags", "--rollout-engine sglang --sglang-speculative-algorithm DFLASH"),
    ("model-flags", "--num-layers 7"),
    ("model-unknown", "--model-name mamba"),
    ("evaluation-sets", "--eval-prompt-data a b c"),
    ("reward-missing", "-custom-rm-path"),
    ("reward-missing", "-custom-rm-path --rm-type maths"),
    ("hook", "--custom-rm-path nowhere.reward"),
    ("hook", "--custom-generate-function-path recipes.arithmetic.problems"),
    ("data-file", "--prompt-data nowhere.jsonl"),
    ("data-rows", "--input-key promt"),
    ("data-rows", "--label-key lable"),
    ("checkpoint", "--load nowhere"),
    ("folder", "--output-dir /dev/null/outputs"),
]
#: What is wrong with a set besides: this environment may have no SGLang.
BESIDES = {"--rollout-engine sglang --sglang-speculative-algorithm DFLASH": {"engine-missing"}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("doctor"))


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "NCCL_TIMEOUT", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


def argv(world: World, words: str) -> list[str]:
    """The run of ``world`` with these flags on top, without those after a single dash."""
    given, left_out = [], set[str]()
    for word in words.split():
        if word.startswith("-") and not word.startswith("--"):
            left_out.add(f"-{word}")
        else:
            given.append(word)
    if "--actor-num-gpus-per-node" in given:
        given = [*given, "--use-dynamic-batch-size"]
    flags = world.flags("examined", "--save", world.outputs / "kept")
    kept, skipping = [], False
    for word in flags:
        skipping = word in left_out if word.startswith("--") else skipping
        kept += [] if skipping else [word]
    return [*kept, *given]


def fatal(found: list[Finding]) -> dict[str, Finding]:
    return {finding.trouble.name: finding for finding in found if finding.is_fatal}


def test_there_are_forty_sets_at_the_least() -> None:
    assert len(WRONG) >= 40 and len(set(WRONG)) == len(WRONG)


def test_the_run_that_they_are_put_on_is_right(world: World) -> None:
    assert examine(argv(world, "")).findings == []


@pytest.mark.parametrize(("name", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_flags_are_found(name: str, words: str, world: World) -> None:
    found = fatal(examine(argv(world, words)).findings)
    assert name in found, list(found)
    assert found[name].detail and found[name].advice
    assert set(found) - {name} <= BESIDES.get(words, set()), list(found)


@pytest.mark.parametrize(
    "words", ["--rollout-batchsize 8", "--global-batch-size 3 --num-steps-per-rollout 1", "--bf16"]
)
def test_the_words_are_those_of_a_launch(words: str, world: World) -> None:
    with pytest.raises(UserError) as refused:
        parse_args(argv(world, words))
    (finding,) = fatal(examine(argv(world, words)).findings).values()
    assert (
        finding.detail.splitlines()[0] == refused.value.what and refused.value.why in finding.detail
    )
    assert finding.advice[0] == refused.value.fix or not refused.value.fix


def test_several_mistakes_are_told_at_once(world: World) -> None:
    """A launch stops at the first of them."""
    words = "--min-lr 1 --lr 0.1 --lr-decay-style cosine --seq-length 32"
    words += " --input-key promt --custom-rm-path nowhere.reward --load nowhere"
    found = fatal(examine(argv(world, words)).findings)
    assert set(found) == {"flags-contradict", "context-length", "data-rows", "hook", "checkpoint"}


def test_a_missing_model_hides_no_missing_data_and_no_missing_column(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").touch()
    words = f"--hf-checkpoint ./nowhere/model --eval-prompt-data sums {tmp_path}/trian.jsonl"
    report = examine(argv(world, f"{words} --input-key promt"))
    found = fatal(report.findings)
    assert set(found) == {"model-directory", "data-rows", "data-file"}
    assert "have no key 'promt'" in found["data-rows"].detail
    assert f"{tmp_path} has: train.jsonl" in found["data-file"].detail
    assert {outcome.check.name: outcome.note for outcome in report.outcomes}["data"] == (
        "after tokenizer"
    )


def test_a_remedy_of_its_own_replaces_the_general_ones() -> None:
    findings = CheckFindings("tokenizer")
    findings.add("missing-shards", "")
    findings.add("missing-shards", "", "name a complete model directory")
    general, own = (finding.advice for finding in findings.all)
    assert general == findings.all[0].trouble.remedies
    assert own == ("name a complete model directory",)


def test_all_flags_that_cannot_be_read_are_told_at_once(world: World) -> None:
    """And nothing that would follow from them, as the rest is looked at without them."""
    report = examine(argv(world, "--rollout-batchsize 8 --lr fast --input-keyy question"))
    assert [finding.trouble.name for finding in report.findings] == [
        "flag-unknown",
        "flag-value",
        "flag-unknown",
    ]
    assert "rollout-batch-size" in "".join(report.findings[0].advice)
    assert {"ok"} == {
        outcome.state
        for outcome in report.outcomes
        if outcome.check.name in ("model", "data", "hooks")
    }


def test_flags_of_an_asynchronous_run(world: World) -> None:
    assert "colocate-async" in fatal(examine(argv(world, ""), "train_async").findings)


def test_each_place_is_there() -> None:
    """A function that is renamed would lose its name here without a word."""
    wrong = []
    for key in PLACES:
        module, _, function = key.partition(":")
        path = ROOT / "slime" / Path(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        wrong += [] if file.is_file() and f"def {function}" in file.read_text() + "def " else [key]
    assert wrong == []
