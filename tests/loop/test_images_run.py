"""Whole runs of a model that sees images: in lock step, with pushes in the midst of generation, and
resumed."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.samples.media import media_of, media_problem
from tests.support.images import IMAGES, PICTURES, save_seeing_with_tokenizer
from tests.support.runs import Run, RunResult

#: Steps of 4 prompts x 4 samples of at most 8 tokens.
GRPO = (
    *("--rollout-batch-size", 4, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8),
    *("--num-steps-per-rollout", 1),
    *("--custom-rm-path", "tests.support.seeing_samples.even_share"),
)
NAMES = ("portrait", "landscape", "square", "other")
IMAGE_TOKEN = 260
GROUPS = Path(__file__).parents[1] / "support" / "teacher_groups.yaml"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Flags of a tiny model and rows with no, one and two images, as paths and as bytes."""
    folder = tmp_path_factory.mktemp("seeing")
    model = save_seeing_with_tokenizer(folder / "model")
    rows = []
    for number in range(16):
        names = [NAMES[(number + place) % 4] for place in range(number % 3)]
        images: list[str] = []
        for name in names:
            (folder / f"{name}.png").write_bytes(PICTURES[name])
            whole = base64.b64encode(PICTURES[name]).decode()
            images.append(f"data:image/png;base64,{whole}" if number % 2 else f"{name}.png")
        text = f"{number}{' <image>' * len(names)}:"
        rows.append({"prompt": text, "label": "1", "images": images})
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = json.dumps(IMAGES["multimodal_keys"])
    context = ("--rollout-max-context-len", 120)
    return ("--hf-checkpoint", model, "--prompt-data", data, "--multimodal-keys", keys, *context)


@pytest.mark.full  # tests/unit/test_images_*.py compare it with transformers in trainer and engine
def test_gemma_learns_from_images(run: Run, seeing: tuple[object, ...], tmp_path: Path) -> None:
    """Its tokens of an image attend in both directions, in trainer and engine."""
    model = save_seeing_with_tokenizer(tmp_path / "gemma", "gemma3")
    result = run("seeing-gemma", *GRPO, "--hf-checkpoint", model, *seeing[2:], "--num-rollout", 2)
    assert max(result.series("train/train_rollout_logprob_abs_diff")) <= 1e-5
    assert max(result.series("train/canary_logprob_abs_diff_max")) <= 1e-5
    assert min(result.series("train/canary_image_abs_diff")) > 1e-4
    before = load_file(model / "model.safetensors")
    [file] = result.path.glob("model/*.safetensors")
    after = load_file(file)
    assert before.keys() == after.keys()
    moved = {key for key, one in before.items() if not torch.equal(one, after[key])}
    assert any(key.startswith("vision_tower.") for key in moved)


def dumps(run: Run, name: str) -> tuple[object, ...]:
    path = run.outputs / name / "dumps" / "{rollout_id}.pt"  # type: ignore[attr-defined]
    return ("--save-debug-rollout-data", path)


def check_samples(result: RunResult, count: int) -> None:
    """Every sample has its images where its tokens are, and refers to them."""
    seen = 0
    for rollout_id in range(count):
        for sample in result.samples(rollout_id):
            media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
            assert media_problem(media, sample.tokens, IMAGE_TOKEN) == ""
            assert len(media) == int(sample.prompt.split("<")[0].split(":")[0]) % 3
            assert all(Path(one.reference).read_bytes() in PICTURES.values() for one in media)
            seen += len(media)
    assert seen
    kept = sorted((result.path / "media").iterdir())
    assert len(kept) <= 4  # each picture once, whoever has it
    for name in ("journal", "dumps"):
        for file in (result.path / name).rglob("*"):
            assert not file.is_file() or PICTURES["square"][40:200] not in file.read_bytes()


#: Partial rollouts are put back, and saved.
_SAVED = (
    *("--partial-rollout", "--over-sampling-batch-size", 8),
    *("--save-interval", 1, "--save", "{run}/checkpoints"),
)


@pytest.fixture(scope="module")
def first_life(run: Run, seeing: tuple[object, ...]) -> RunResult:
    flags = (*dumps(run, "seeing"), *_SAVED, "--num-rollout", 2)
    return run("seeing", *GRPO, *seeing, *flags)


def test_a_run_learns_from_images(first_life: RunResult, seeing: tuple[object, ...]) -> None:
    """Trainer and engine agree on every token and on the canary's pictures; the tower moves, and
    what is exported has every tensor."""
    result = first_life
    check_samples(result, 2)
    # later ones have tokens of older weights, too
    assert result.series("train/train_rollout_logprob_abs_diff")[0] <= 1e-5
    assert min(result.series("train/canary_image_abs_diff")) > 1e-4
    assert min(result.series("perf/actor_train_images_per_s")) > 0
    assert sum(result.series("perf/images/trainer_time")) > 0
    # the check of rows has prepared them all in this process
    assert sum(result.series("perf/images/rollout_time")) == 0
    assert 0 < max(result.series("perf/images/step_ratio")) < 1
    assert max(result.series("train/canary_logprob_abs_diff_max")) <= 1e-5
    before = load_file(Path(str(seeing[1])) / "model.safetensors")
    [file] = result.path.glob("model/*.safetensors")
    after = load_file(file)
    assert before.keys() == after.keys()
    moved = {key for key, one in before.items() if not torch.equal(one, after[key])}
    assert any(key.startswith("model.visual.blocks.") for key in moved)


@pytest.mark.full  # tests/unit/test_images_adapters.py compares both sides
def test_adapters_learn_from_images(run: Run, seeing: tuple[object, ...]) -> None:
    """Pushed alone, and named by the canary's requests with pictures, too."""
    flags = ("--lora-rank", 4, "--lr", "1e-2", "--num-rollout", 3)
    result = run("seeing-adapters", *GRPO, *seeing, *flags)
    assert max(result.series("train/train_rollout_logprob_abs_diff")) <= 1e-5
    assert max(result.series("train/canary_logprob_abs_diff_max")) <= 1e-5
    assert min(result.series("train/canary_image_abs_diff")) > 1e-4
    assert result.series("train/canary_adapter_abs_diff")[-1] > 1e-4
    assert (result.path / "model" / "adapter_model.safetensors").is_file()


@pytest.mark.full  # tests/unit/test_images_rollout.py: what goes on keeps its images
def test_pushes_in_flight_keep_the_images(run: Run, seeing: tuple[object, ...]) -> None:
    name = "seeing-in-flight"
    flags: list[Any] = ["--update-weights-in-flight", "--async-buffer-size", 2, "--num-rollout", 4]
    flags += ["--rollout-max-response-len", 60, "--use-tis", "--lr", "1e-4"]
    result = run(name, *GRPO, *seeing, *dumps(run, name), *flags, driver="train_async")
    check_samples(result, 4)
    assert sum(result.series("rollout/continued_requests")) > 0


def test_a_resumed_run_goes_on_with_images(
    run: Run, seeing: tuple[object, ...], first_life: RunResult
) -> None:
    """A second life takes over from the checkpoint, with the partial rollouts put back."""
    name = first_life.path.name
    flags = (*dumps(run, name), *_SAVED, "--load", "{run}/checkpoints", "--num-rollout", 3)
    check_samples(run(name, *GRPO, *seeing, *flags), 3)


def test_answers_of_the_data_are_learned_with_images(run: Run, seeing: tuple[object, ...]) -> None:
    """Supervised; only the tower's projector is frozen."""
    flags: list[Any] = ["--loss-type", "sft_loss", "--rollout-batch-size", 8, "--num-rollout", 2]
    flags += ["--freeze-vision-projector", "--label-key", "label"]
    result = run("seeing-sft", *seeing, *flags)
    losses = result.series("train/loss")
    assert losses[-1] < losses[0]
    before = load_file(Path(str(seeing[1])) / "model.safetensors")
    [file] = result.path.glob("model/*.safetensors")
    after = load_file(file)
    moved = {key for key, one in before.items() if not torch.equal(one, after[key])}
    assert any(key.startswith("model.visual.blocks.") for key in moved)
    assert not any("merger" in key for key in moved)


@pytest.mark.full  # tests/unit/test_images_preferences.py: losses are those of transformers
def test_pairs_are_learned_with_images(run: Run, seeing: tuple[object, ...]) -> None:
    """DPO, and its evaluation; the second epoch knows what the reference has scored."""
    folder = Path(str(seeing[3])).parent
    rows = [json.loads(line) for line in Path(str(seeing[3])).read_text().splitlines()]
    data = folder / "pairs.jsonl"
    answers = {"chosen": "yes", "rejected": "no"}
    data.write_text("".join(json.dumps({**row, **answers}) + "\n" for row in rows))
    flags: list[Any] = ["--loss-type", "preference_loss", "--preference-loss", "dpo"]
    flags += ["--rollout-batch-size", 8, "--num-epoch", 2, "--lr", "2e-3", "--prompt-data", data]
    flags += ["--eval-preference-data", data, "--eval-interval", 2]
    result = run("seeing-dpo", *seeing, *flags)
    for name in ("train/preference_loss", "eval/preferences/preference_loss"):
        losses = result.series(name)
        assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6) and losses[-1] < losses[0]
    assert result.series("rollout/reference_known")[-1] == 1.0


@pytest.mark.full  # tests/unit/test_images_distillation.py: an engine's scores are transformers'
def test_a_teacher_in_an_engine_sees_the_images(run: Run, seeing: tuple[object, ...]) -> None:
    """It is the policy's first weights: nothing is to be learned in the first step."""
    flags = ["--use-opd", "--opd-loss", "forward_kl", "--opd-top-k", 5, "--entropy-coef", 1.0]
    flags += ["--rollout-num-gpus", 2, "--sglang-config", GROUPS, "--num-rollout", 2]
    result = run("seeing-teacher", *GRPO[:8], *seeing, *flags)
    apart = result.series("train/opd_loss")
    assert apart[0] == pytest.approx(0.0, abs=1e-6) and apart[1] > 1e-5
    assert result.series("rollout/opd_reverse_kl")[0] == pytest.approx(0.0, abs=1e-4)
    assert result.series("rollout/teacher_requests") == [16.0, 16.0]
