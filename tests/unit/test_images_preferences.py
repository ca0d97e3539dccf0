"""Preferences between answers to prompts with images: rows, packing, and the trainer against
transformers."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import logsigmoid

from slime.config import Config, make_config
from slime.errors import UserError
from slime.models.images import ImageReader
from slime.prompts.images import add_images, image_prompts
from slime.prompts.prepare import remember
from slime.prompts.source import make_source
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.preferences import PreferenceEncoder, generate_preferences, held_out_groups
from slime.rollout.reference_cache import ReferenceCache
from slime.rollout.rewards.reward_model import RewardModelScorer, check_directory
from slime.rollout.validate_rows import DataReport, validate_data
from slime.run.preflight import check_architecture
from slime.samples.batch import StepPlan, TrainBatch, TrainedTokens, TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.media import media_of, media_problem
from slime.samples.types import Group, Sample
from slime.trainer.megatron import forward
from tests.support.embedded_models import byte_tokenizer
from tests.support.images import IMAGES, PICTURES, save_seeing, save_seeing_with_tokenizer
from tests.support.parity import CP2
from tests.support.seeing_samples import batch_of, their_log_probs
from tests.support.tiny_models import moved
from tests.support.trainer_ranks import Pools, trainer_config
from tests.support.trainers import trainer

SIZES = {"portrait": (5, 2), "landscape": (2, 6), "square": (3, 3)}


@pytest.fixture(autouse=True)
def nothing_was_checked_before() -> None:
    remember([])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_with_tokenizer(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in SIZES:
        (tmp_path / f"{name}.png").write_bytes(PICTURES[name])
    return tmp_path


def config_for(model: Path, data: Path, rows: Sequence[Any], loss: str, **flags: Any) -> Config:
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "prompt_data": str(data),
        "output_dir": str(data.parent / "out"),
        "run_name": "run",
        "rollout_batch_size": len(rows),
        "num_rollout": 1,
        "rollout_shuffle": False,
        "loss_type": "preference_loss",
        "preference_loss": loss,
    }
    return make_config(**{**given, **IMAGES, **flags})


def pairs_of(config: Config) -> list[list[Sample]]:
    tokenizer = load_tokenizer(str(config.checkpoint.hf_checkpoint))
    output = generate_preferences(config, make_source(config, tokenizer), tokenizer)
    return [group.samples for group in output.samples]


def report_of(config: Config) -> DataReport:
    return validate_data(config, load_tokenizer(str(config.checkpoint.hf_checkpoint)))


def check(sample: Sample, model: Path, *names: str) -> None:
    """The sample has these images, in their places, which are not trained."""
    media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
    assert [(one.span.rows, one.span.columns) for one in media] == [SIZES[one] for one in names]
    assert [Path(one.reference).read_bytes() for one in media] == [PICTURES[one] for one in names]
    image_token = image_prompts(str(model), None).vision.image_token
    assert media_problem(media, sample.tokens, image_token) == ""
    response = sample.tokens[sample.prompt_length :]
    assert sample.loss_mask is not None and len(sample.loss_mask) == len(response)
    assert not any(bit for token, bit in zip(response, sample.loss_mask) if token == image_token)
    sample.validate()


def uri(name: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(PICTURES[name]).decode()}"


def part(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri(name)}}


def asked(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content) if len(content) > 1 else content[0]}


def answered(*content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(content) if len(content) > 1 else content[0]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


# -- rows ------------------------------------------------------------------------------------------

FILES = {"images": ["portrait.png", "square.png"]}
#: A row, and the images of its chosen and its rejected answer.
ROWS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "text": (
        {"prompt": "<image> and <image>?", "chosen": "yes", "rejected": "no", **FILES},
        ["portrait", "square"],
        ["portrait", "square"],
    ),
    "messages of the prompt": (
        {"prompt": [asked({"type": "image"}, text("?"))], "chosen": "yes", "rejected": "no"}
        | {"images": ["portrait.png"]},
        ["portrait"],
        ["portrait"],
    ),
    "whole conversations": (
        {
            "chosen": [asked("<image> and <image>?"), answered("yes")],
            "rejected": [asked("<image> and <image>?"), answered("no")],
            **FILES,
        },
        ["portrait", "square"],
        ["portrait", "square"],
    ),
    "a prompt that whole conversations repeat": (
        {
            "prompt": [asked(part("square"), text("?"))],
            "chosen": [asked(part("square"), text("?")), answered("yes")],
            "rejected": [asked(part("square"), text("?")), answered("no")],
        },
        ["square"],
        ["square"],
    ),
    "text that whole conversations repeat": (
        {
            "prompt": "<image>?",
            "chosen": [asked("<image>?"), answered("yes")],
            "rejected": [asked("<image>?"), answered("no")],
            "images": ["square.png"],
        },
        ["square"],
        ["square"],
    ),
    "answers with images": (
        {
            "prompt": [asked("<image>?")],
            "chosen": [answered("look"), asked(part("landscape"), text("so?")), answered("yes")],
            "rejected": [answered("see <image>")],
            **FILES,
        },
        ["portrait", "landscape"],
        ["portrait", "square"],
    ),
    "an image of one answer": (
        {"prompt": "?", "chosen": "<image>", "rejected": "no", "images": ["landscape.png"]},
        ["landscape"],
        [],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_both_answers_have_the_images_of_their_prompt_and_their_own(
    kind: str, model: Path, folder: Path
) -> None:
    row, chosen_images, rejected_images = ROWS[kind]
    config = config_for(model, folder / "rows.jsonl", [row, row], "dpo")
    assert report_of(config).error is None
    for chosen, rejected in pairs_of(config):
        check(chosen, model, *chosen_images)
        check(rejected, model, *rejected_images)
        start = chosen.prompt_length
        if "answer" not in kind:
            assert chosen.tokens[:start] == rejected.tokens[:start]
            assert chosen.response.removesuffix("<|im_end|>") == "yes"
    kept = folder / "out" / "run" / "media"
    written = set(kept.iterdir()) if kept.exists() else set()
    assert len(written) == len({name for name in SIZES if uri(name) in json.dumps(row)})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "<image>?", "chosen": "a", "rejected": "b", "images": []}, "0 images, 1 plac"),
        (
            {"prompt": "?", "chosen": "<image>", "rejected": "<image>", "images": ["square.png"]},
            "1 images, 2 places",
        ),
        (
            {
                "chosen": [asked(part("square"), text("?")), answered("a")],
                "rejected": [asked(part("portrait"), text("?")), answered("b")],
            },
            "have answers whose prompts have different images",
        ),
        (
            {"prompt": "<image>", "chosen": "a", "rejected": "b", "images": ["broken.png"]},
            "rows.jsonl:2: image 1 (broken.png): it cannot be decoded",
        ),
        (
            {"prompt": "<image>", "chosen": "a", "rejected": "b", "images": ["gone.png"]},
            "rows.jsonl:2: image 1 (gone.png): there is no file",
        ),
        (
            {
                "prompt": "?",
                "chosen": "<|vision_start|><|image_pad|><|vision_end|>",
                "rejected": "b",
                "images": [],
            },
            "1 placeholders",
        ),
        (
            {"prompt": "<image>" * 2, "chosen": "a", "rejected": "<image>"}
            | {"images": ["square.png"] * 3},
            "3 images, 2 are allowed",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(
    row: dict[str, Any], told: str, model: Path, folder: Path
) -> None:
    (folder / "broken.png").write_bytes(PICTURES["square"][:80])
    rows = [ROWS["text"][0], row]
    config = config_for(model, folder / "rows.jsonl", rows, "dpo", images_per_sample=2)
    error = report_of(config).error
    assert error is not None and told in str(error) and "rows.jsonl:2" in str(error)


def test_answers_that_differ_by_an_image_alone_are_a_pair(model: Path, folder: Path) -> None:
    def row(chosen: str, rejected: str) -> dict[str, Any]:
        answers = {"chosen": [answered(part(chosen))], "rejected": [answered(part(rejected))]}
        return {"prompt": [asked("?")], **answers}

    rows = [row("square", "other"), row("square", "square")]  # of one size
    config = config_for(model, folder / "rows.jsonl", rows, "dpo", rollout_batch_size=1)
    assert "1 of 2 rows have a rejected answer that equals" in report_of(config).warnings[0]
    [(chosen, rejected)] = pairs_of(config)
    assert chosen.tokens == rejected.tokens
    assert chosen.multimodal_inputs != rejected.multimodal_inputs


def test_tokens_of_images_count_towards_the_limit(model: Path, folder: Path) -> None:
    """One image of 9 tokens fits, one of 12 does not."""

    def row(name: str) -> dict[str, Any]:
        return {"prompt": "<image>", "chosen": "a", "rejected": "b", "images": [f"{name}.png"]}

    rows = [row("landscape"), row("square")]
    flags = {"seq_length": 13, "rollout_batch_size": 1}
    config = config_for(model, folder / "rows.jsonl", rows, "dpo", **flags)
    assert "1 of 2 rows are longer than 13 tokens" in report_of(config).warnings[0]
    [(chosen, _)] = pairs_of(config)
    check(chosen, model, "square")
    assert len(chosen.tokens) == 13


def test_kto_moves_the_images_of_the_next_answer(model: Path, folder: Path) -> None:
    """An image that the limit would cut is left out, with all that follows."""
    rows = [
        {"prompt": "<image> abc", "completion": "a <image>", "label": True, **FILES},
        {"prompt": "d", "completion": "see <image>!", "label": False, "images": ["landscape.png"]},
    ]
    config = config_for(model, folder / "rows.jsonl", rows, "kto")
    assert report_of(config).error is None
    (own, other), (second, mismatched) = pairs_of(config)
    check(own, model, "portrait", "square")
    check(second, model, "landscape")
    check(other, model, "portrait", "landscape")
    check(mismatched, model, "square")
    start = own.prompt_length
    assert other.tokens[:start] == own.tokens[:start]
    assert other.tokens[start:] == second.tokens[second.prompt_length :]
    longest = len(own.tokens)
    assert len(other.tokens) > longest
    short = config_for(model, folder / "rows.jsonl", rows, "kto", seq_length=longest)
    (_, cut), _ = pairs_of(short)
    check(cut, model, "portrait")
    assert cut.response == second.response
    end = second.tokens.index(image_prompts(str(model), None).vision.start_token)
    assert cut.tokens == [*own.tokens[:start], *second.tokens[second.prompt_length : end]]


def test_held_out_pairs_name_images_from_their_own_folder(model: Path, folder: Path) -> None:
    (folder / "held").mkdir()
    (folder / "held" / "own.png").write_bytes(PICTURES["landscape"])
    row = {"prompt": "<image>", "chosen": "a", "rejected": "b", "images": ["own.png"]}
    held = folder / "held" / "rows.jsonl"
    held.write_text(json.dumps(row) + "\n")
    flags = {"eval_preference_data": str(held), "eval_interval": 1}
    config = config_for(model, folder / "rows.jsonl", [ROWS["text"][0]], "dpo", **flags)
    assert report_of(config).error is None
    [group] = held_out_groups(config, load_tokenizer(str(model)))
    check(group.samples[0], model, "landscape")


# -- batches ---------------------------------------------------------------------------------------


def test_pairs_with_the_same_images_share_a_micro_batch(model: Path, folder: Path) -> None:
    """A micro-batch computes the features of an image once; a pair is never divided."""

    def row(name: str, number: int) -> dict[str, Any]:
        answers = {"chosen": f"yes {number}", "rejected": f"no {number}"}
        return {"prompt": "<image>", "images": [f"{name}.png"], **answers}

    rows = [row(("square", "landscape")[number % 2], number) for number in range(4)]
    flags = {"micro_batch_size": 2, "global_batch_size": 4, "balance_data": True}
    config = config_for(model, folder / "rows.jsonl", rows, "dpo", **flags)
    tokenizer = load_tokenizer(str(model))
    output = generate_preferences(config, make_source(config, tokenizer), tokenizer)
    [batch] = to_train_batches(output.samples, config, TrainLayout(), 0)
    assert len(batch.images) == 2 and batch.global_stats["rollout/num_images"] == 8
    [step] = batch.steps
    assert len(step.micro_batches) == 2
    for samples in step.micro_batches:
        assert len({one.reference for i in samples for one in batch.media[i]}) == 1
        assert sorted(batch.trajectory_ids[i] for i in samples[::2]) == sorted(
            batch.trajectory_ids[i] for i in samples[1::2]
        )


def test_log_probs_of_the_reference_are_kept_by_image(model: Path, tmp_path: Path) -> None:
    """Equal tokens behind another picture, or behind a file that has changed, are scored again."""
    save_seeing(tmp_path / "hf")
    batch = preferences(ImageReader(tmp_path / "hf"))
    cache = ReferenceCache(tmp_path / "kept.bin")
    assert not cache.fill([batch])
    computed = [torch.randn(length) for length in batch.response_lengths]
    keys = [batch.key(i) for i in range(batch.num_samples)]
    cache.add([TrainedTokens(key, ref_log_probs=one.numpy()) for key, one in zip(keys, computed)])
    again = ReferenceCache(tmp_path / "kept.bin")
    assert again.fill([batch]) and torch.equal(batch.ref_log_probs[2], computed[2])  # type: ignore
    changed = dataclasses.replace(batch, images={**batch.images, "square": PICTURES["other"]})
    assert not again.fill([changed])
    others = [[dataclasses.replace(one, reference="odd") for one in own] for own in batch.media]
    assert not again.fill([dataclasses.replace(batch, media=others)])


def test_images_that_a_data_source_brings_to_a_run_of_text_are_refused(
    model: Path, folder: Path
) -> None:
    row = {"prompt": "?", "chosen": "a", "rejected": "b"}
    config = config_for(model, folder / "rows.jsonl", [row], "simpo", multimodal_keys=None)
    encoder = PreferenceEncoder(config, load_tokenizer(str(model)))
    label = {"chosen": "a", "rejected": "b"}
    drawn = Sample(prompt="?", label=label, multimodal_inputs={"images": ["square.png"]})
    pair = encoder.encode(drawn)
    with pytest.raises(UserError, match="has images without their places"):
        to_train_batches([Group(0, [pair])], config, TrainLayout(), 0)


# -- training --------------------------------------------------------------------------------------

#: Prompt and answer of each sample: two pairs, the second with an image in an answer.
SAMPLES: list[tuple[list[Any], list[Any]]] = [
    ([[1], "portrait", [9, 8]], [[7, 6, 5, 30]]),
    ([[1], "portrait", [9, 8]], [[11, 12]]),
    ([[5, 6], "square", [3], "landscape", [4]], [[12, 13, 14, 15]]),
    ([[5, 6], "square", [3], "landscape", [4]], [[12], "odd", [13, 14]]),
]


def preferences(reader: ImageReader, loss: str = "dpo") -> TrainBatch:
    """Two pairs; for KTO one answer of each kind, each with an answer that is only scored."""
    batch = batch_of(reader, [[0, 1], [2, 3]], SAMPLES)
    batch.rollout_log_probs = None
    batch.rewards = [1.0, -1.0, 1.0, -1.0]
    batch.trajectory_ids = [0, 0, 1, 1]
    batch.loss_masks[3][1:-2] = 0.0  # the image in the answer
    if loss == "kto":
        batch.rewards = [1.0, 0.0, -1.0, 0.0]
        batch.steps = [StepPlan([[0], [2]], 2, 8, [[1], [3]])]
    elif loss == "reward_model":
        batch.loss_masks = [torch.eye(n)[-1] for n in batch.response_lengths]
        batch.steps = [StepPlan([[0, 1], [2, 3]], 2, 4)]
    else:
        batch.steps = [StepPlan([[0, 1], [2, 3]], 2, 12)]
    return batch


def by_definition(loss: str, own: list[Tensor], theirs: list[Tensor], masks: list[Tensor]) -> float:
    """The mean loss of the two pairs, or of the two answers of KTO; β 0.1."""
    sums = [float((one * mask).sum()) for one, mask in zip(own, masks)]
    ratios = [total - float((one * mask).sum()) for total, one, mask in zip(sums, theirs, masks)]
    if loss == "kto":
        drift = max(0.0, (ratios[1] + ratios[3]) / 2)
        values = [0.1 * (ratios[0] - drift), 0.1 * (drift - ratios[2])]
        return sum(1 - 1 / (1 + math.exp(-value)) for value in values) / 2
    found = []
    for c, r in ((0, 1), (2, 3)):
        found.append(-float(logsigmoid(torch.tensor(0.1 * (ratios[c] - ratios[r])))))
    return sum(found) / 2


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_losses_are_those_of_transformers_log_probs(loss: str, tmp_path: Path) -> None:
    """The reference is another model, so that its own tower and decoder count."""
    model = save_seeing(tmp_path / "hf")
    other = moved(save_seeing(tmp_path / "ref"), tmp_path / "ref")
    reader = ImageReader(tmp_path / "hf")
    batch = preferences(reader, loss)
    with torch.no_grad():
        own = their_log_probs(model, reader, batch)
        theirs = their_log_probs(other, reader, batch)
    assert max((a - b).abs().max().item() for a, b in zip(own, theirs)) > 0.01
    flags = {"load": str(tmp_path / "hf"), "ref_load": str(tmp_path / "ref")}
    backend = trainer(
        hf_checkpoint=str(tmp_path / "hf"),
        loss_type="preference_loss",
        preference_loss=loss,
        **flags,
        **IMAGES,
    )
    try:
        scored = backend.log_probs(batch, "reference")
        assert scored is not None
        assert max((a - b).abs().max().item() for a, b in zip(scored, theirs)) <= 5e-6
        found = backend.train(batch)
    finally:
        backend.close()
    wanted = by_definition(loss, own, theirs, batch.loss_masks)
    assert found["train/preference_loss"] == pytest.approx(wanted, rel=2e-6, abs=2e-6)
    assert found["train/grad_norm"] > 0


def test_a_reward_model_is_a_classifier_that_sees_and_a_reward(tmp_path: Path) -> None:
    """transformers and --rm-type reward_model score as training does."""
    save_seeing(tmp_path / "hf", "gemma3")
    byte_tokenizer().save_pretrained(tmp_path / "hf")
    reader = ImageReader(tmp_path / "hf")
    batch = preferences(reader, "reward_model")
    flags = {"loss_type": "preference_loss", "preference_loss": "reward_model", "lr": 1e-2}
    backend = trainer(hf_checkpoint=str(tmp_path / "hf"), **flags, **IMAGES)
    try:
        losses = [backend.train(batch)["train/preference_loss"] for _ in range(4)]
        packed = backend._pack(batch, [[0, 1, 2, 3]])
        [values] = forward.score(backend.model_chunks, packed)
        backend.export(str(tmp_path / "reward"))
    finally:
        backend.close()
    assert losses[0] == pytest.approx(math.log(2.0), abs=1e-6) and losses[-1] < 0.6
    ours = [part[-1].item() for part in values.values.split(batch.response_lengths)]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "reward", dtype=torch.float32
    )
    assert any("visual" in name or "vision" in name for name, _ in loaded.named_parameters())
    config = make_config(
        hf_checkpoint=str(tmp_path / "hf"),
        rm_type="reward_model",
        rm_path=str(tmp_path / "reward"),
        rollout_batch_size=1,
        num_rollout=1,
        **IMAGES,
    )
    scorer = RewardModelScorer(str(tmp_path / "reward"), config)
    scores = []
    for tokens, media, length in zip(batch.tokens, batch.media, batch.response_lengths):
        sample = Sample(index=0, tokens=tokens[:-1].tolist(), response_length=length - 1)
        for one in media:
            (tmp_path / one.reference).write_bytes(PICTURES[one.reference])
            add_images(sample, [str(tmp_path / one.reference)], [one.span])
        scores.append(asyncio.run(scorer.score(sample)))
    scorer.close()
    assert scores == pytest.approx(ours, abs=2e-5)
    assert min(abs(a - b) for a, b in zip(scores[::2], scores[1::2])) > 0.1


def test_reward_models_that_see_nothing_are_refused_before_the_launch(tmp_path: Path) -> None:
    """Those that would be trained, and those that would score."""
    save_seeing_with_tokenizer(tmp_path / "hf")
    flags = {"loss_type": "preference_loss", "preference_loss": "reward_model"}
    config = make_config(hf_checkpoint=str(tmp_path / "hf"), **flags, **IMAGES)
    with pytest.raises(UserError, match="cannot be made of a model of type qwen3_vl"):
        check_architecture(config)
    (tmp_path / "blind").mkdir()
    blind = {"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}
    (tmp_path / "blind" / "config.json").write_text(json.dumps({**blind, "id2label": {"0": "r"}}))
    check_directory(str(tmp_path / "blind"))
    with pytest.raises(UserError, match="is a reward model that sees no images"):
        check_directory(str(tmp_path / "blind"), images=True)


# -- layouts ---------------------------------------------------------------------------------------


def preference_job(info: Any, flags: dict[str, Any], batch: TrainBatch) -> list[dict[str, float]]:
    """Metrics of two rollouts."""
    from slime.trainer.megatron.backend import MegatronBackend

    backend = MegatronBackend(
        trainer_config(**flags, actor_num_gpus_per_node=info.world_size), info
    )
    backend.setup()
    names = ("train/preference_loss", "train/reward_margin", "train/grad_norm")
    metrics = [backend.train(batch) for _ in range(2)]
    return [{name: one[name] for name in names if name in one} for one in metrics]


def test_another_layout_learns_what_one_process_does(ranks: Pools, tmp_path: Path) -> None:
    save_seeing(tmp_path / "hf")
    batch = preferences(ImageReader(tmp_path / "hf"))
    flags = {"hf_checkpoint": str(tmp_path / "hf"), "loss_type": "preference_loss", **IMAGES}
    flags |= {"preference_loss": "dpo", "optimizer": "sgd", "lr": 0.02}
    [alone] = ranks.run(1, preference_job, flags, batch)
    found = ranks.run(2, preference_job, flags | CP2, batch)
    ours = next(one for one in found if len(one[0]) == 3)
    for step, wanted in zip(ours, alone, strict=True):
        assert step == pytest.approx(wanted, rel=2e-4, abs=2e-5)
    assert alone[1]["train/preference_loss"] < alone[0]["train/preference_loss"]
