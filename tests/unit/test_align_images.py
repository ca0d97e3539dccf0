"""`slime align` with images: what one side sees otherwise is ranked first."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.config import make_config
from slime.diagnosis.align import dumps, sight
from slime.diagnosis.align.case import Discrepancy
from slime.diagnosis.align.engines import EngineHere, EngineThere
from slime.diagnosis.align.evidence import Scored
from slime.diagnosis.align.examine import CAUSES, Result, examine, text
from slime.diagnosis.align.prepare import Options, examined
from slime.diagnosis.align.reference import Reference, Sampling
from slime.errors import UserError
from slime.models.images import ImageReader
from slime.models.vision import ImageSpan
from slime.rollout.debug_data import save_rollout
from slime.samples.batch import TrainBatch
from slime.samples.media import Media
from slime.samples.types import Sample
from slime.trainer.dumps import save_train_data, shard_of
from slime.trainer.records import RolloutTensors
from tests.support.images import IMAGES, PICTURES, save_seeing
from tests.support.seeing_samples import SAMPLES, batch_of

VISION_CAUSE = [cause for cause in CAUSES if cause.trouble.name == "align-images"]


def save_pictures(folder: Path) -> dict[str, str]:
    """Write the pictures as files; return their paths by name."""
    folder.mkdir(exist_ok=True)
    for name, data in PICTURES.items():
        (folder / name).write_bytes(data)
    return {name: str(folder / name) for name in PICTURES}


def scored(batch: TrainBatch, paths: dict[str, str]) -> list[Scored]:
    return [
        Scored(
            f"sample {i}",
            tokens,
            torch.zeros(length).double(),
            None,
            torch.ones(length, dtype=torch.bool),
            media=[replace(one, reference=paths[one.reference]) for one in media],
        )
        for i, (tokens, media, length) in enumerate(
            zip(batch.tokens, batch.media, batch.response_lengths)
        )
    ]


def case_of(directory: Path) -> Discrepancy:
    """An engine and a trainer that agree, on samples with none, one and three images."""
    reader = ImageReader(directory)
    reference = Reference(directory, torch.float32, Sampling(1.0), images=reader)
    samples = scored(batch_of(reader, [], SAMPLES[:4]), save_pictures(directory / "pictures"))
    engine = EngineHere(directory, "float32", longest=128, images=reader)
    answers = engine.score(samples, together=True)
    told = [
        replace(
            sample,
            engine=torch.tensor(answer[-sample.response_length :]).double(),
            trainer=reference.log_probs(sample),
        )
        for sample, answer in zip(samples, answers)
    ]
    return Discrepancy(told, Sampling(1.0), reference, engine=engine)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Discrepancy:
    directory = tmp_path_factory.mktemp("seeing")
    save_seeing(directory)
    return case_of(directory)


def with_engine(case: Discrepancy, said: Callable[[Scored], Tensor]) -> Discrepancy:
    """The case with an engine that is gone and said this."""
    told = [replace(sample, engine=said(sample)) for sample in case.samples]
    return replace(case, samples=told, engine=None)


def first(result: Result) -> str:
    """What is named first: about images, it explains all, on the engine's side."""
    best = result.reported[0]
    assert best.cause.trouble.name == "align-images", text(result)
    assert best.best.share > 0.95 and best.best.side == "engine", text(result)
    return best.best.what


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_sides_that_see_alike(kind: str, tmp_path: Path) -> None:
    """Engine, trainer and reference agree, and all that is tried about images changes something."""
    save_seeing(tmp_path, kind)
    result = examine(case_of(tmp_path), always=True)
    assert not result.sides_differ and result.case.differences.mean < 1e-5
    (ranked,) = [one for one in result.ranked if one.cause.trouble.name == "align-images"]
    for cause in VISION_CAUSE:
        for tried in cause.measure(result.case):
            assert max(float(one.abs().max()) for one in tried.predicted.values()) > 1e-3, tried
    assert ranked.best.share < 0.5


def test_an_engine_that_reads_one_row_of_positions(
    case: Discrepancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As SGLang up to 0.5.16 does in hybrids; here in the engine's own code."""
    whole = sight.SequenceImages.axis_positions

    def in_time(self: Any, start: int, count: int) -> Any:
        found = whole(self, start, count)
        found[1:] = found[0]
        return found

    assert isinstance(case.engine, EngineHere)
    case.engine.scheduler.flush()
    with monkeypatch.context() as patched:
        patched.setattr(sight.SequenceImages, "axis_positions", in_time)
        answers = case.engine.score(case.samples, together=False)
    said = {sample.name: answer for sample, answer in zip(case.samples, answers)}
    wrong = with_engine(
        case, lambda sample: torch.tensor(said[sample.name][-sample.response_length :]).double()
    )
    assert first(examine(wrong)) == "rows and columns of images have the position in time"
    (details,) = {tried.details for tried in VISION_CAUSE[0].measure(wrong)}
    assert "those without by " in details[0]


def test_features_that_are_left_out(case: Discrepancy) -> None:
    model = case.model()
    zeros = sight.Sight(features=lambda own, _: own * 0)
    setting = replace(model.setting, sight=zeros)
    wrong = with_engine(case, lambda sample: model.log_probs(sample, setting))
    assert first(examine(wrong)).startswith("the features of images are zeros")


def test_levels_that_are_left_out(case: Discrepancy) -> None:
    model = case.model()
    store = model.store
    levels = [name for name in store.named if "deepstack_merger_list" in name and "fc2" in name]
    with model.holding({name: torch.zeros_like(store.named[name]) for name in levels}):
        said = {sample.name: model.log_probs(sample) for sample in case.samples}
    wrong = with_engine(case, lambda sample: said[sample.name])
    assert "inner blocks are not added" in first(examine(wrong))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_normalize": False}, "images are not normalised"),
        ({"resample": 2}, "with the bilinear filter"),
    ],
)
def test_images_that_are_prepared_otherwise(
    case: Discrepancy, settings: dict[str, Any], said: str
) -> None:
    model = case.model()
    assert model.images is not None
    read = model.images.with_settings(**settings).read
    setting = replace(model.setting, sight=sight.Sight(read=read))
    wrong = with_engine(case, lambda sample: model.log_probs(sample, setting))
    assert said in first(examine(wrong))


@pytest.mark.parametrize(
    ("part", "said"),
    [("blocks.", "tower"), pytest.param("merger.", "projector", marks=pytest.mark.full)],
)
def test_an_older_tower_or_projector(
    part: str, said: str, case: Discrepancy, tmp_path: Path
) -> None:
    """Of ``--also``; the decoder's weights have moved, too, but those arrived."""
    model = case.model()
    save_seeing(tmp_path)
    file = tmp_path / "model.safetensors"
    noise = torch.Generator().manual_seed(3)
    older = {
        name: one + 0.2 * torch.randn(one.shape, generator=noise)
        for name, one in load_file(file).items()
    }
    save_file(older, file, metadata={"format": "pt"})
    is_part = "visual." + part if part == "blocks." else part
    names = [
        name
        for name in older
        if "visual" in name and (is_part in name if part == "blocks." else "merger" in name)
    ]
    others = [n for n in older if "visual" in n and "merger" not in n and n not in names]
    names += others if part == "blocks." else []
    with model.holding({name: older[name] for name in names}):
        told = {sample.name: model.log_probs(sample) for sample in case.samples}
    wrong = with_engine(case, lambda sample: told[sample.name])
    wrong.facts = {"other_weights": {"older": tmp_path}}
    assert first(examine(wrong)) == f"the vision {said} is that of older"


def test_a_tower_that_did_not_arrive_is_named(tmp_path: Path) -> None:
    save_seeing(tmp_path)
    case = case_of(tmp_path)
    engine = case.engine
    assert isinstance(engine, EngineHere)
    name = "model.visual.merger.linear_fc2.weight"
    engine.scheduler.store.update([(name, torch.zeros_like(engine.tensor(name)))])
    answers = engine.score(case.samples, together=False)
    told = [
        replace(sample, engine=torch.tensor(answer[-sample.response_length :]).double())
        for sample, answer in zip(case.samples, answers)
    ]
    weights = [cause for cause in CAUSES if cause.trouble.name == "align-weights"]
    best = examine(replace(case, samples=told), weights).reported[0].best
    assert best.share > 0.95 and name in best.what


def write_dumps(case: Discrepancy, reader: ImageReader, folder: Path) -> list[Path]:
    """The dumps of a rollout that trainer and engine agree on."""
    batch = batch_of(reader, [], SAMPLES[:4])
    batch.media = [sample.media for sample in case.samples]
    batch.rollout_log_probs = [sample.engine.float() for sample in case.samples]
    data = RolloutTensors(
        log_probs=[sample.trainer.float() for sample in case.samples if sample.trainer is not None],
        loss_masks=batch.loss_masks,
    )
    data.rollout_log_probs = batch.rollout_log_probs
    trained = save_train_data(str(folder / "train_{rollout_id}.pt"), 0, [shard_of(batch, data, 0)])
    generated = []
    for index, sample in enumerate(case.samples):
        made = Sample(group_index=0, index=index, prompt="?")
        made.tokens = sample.tokens.tolist()
        made.response_length = sample.response_length
        made.rollout_log_probs = sample.engine.tolist()
        made.multimodal_inputs = {"images": [one.reference for one in sample.media]}
        made.multimodal_train_inputs = {"spans": [list(one.span) for one in sample.media]}
        generated.append(made)
    return [trained, save_rollout(str(folder / "rollout_{rollout_id}.pt"), 0, generated)]


def test_dumps_of_either_kind_tell_the_images(case: Discrepancy, tmp_path: Path) -> None:
    model = case.model()
    assert model.images is not None
    for path in write_dumps(case, model.images, tmp_path):
        read = dumps.read([path])
        assert [sample.media for sample in read] == [sample.media for sample in case.samples]
        config = make_config(hf_checkpoint=str(model.directory), fp32=True, **IMAGES)
        result = examined(config, read, Options(model.directory))
        assert not result.sides_differ and result.parts is not None, text(result)
        assert result.parts.first is None and "images" in result.parts.apart


def test_transformers_is_asked_about_images(case: Discrepancy) -> None:
    """The engine is gone; the one in this process stands in for it part by part."""
    model = case.model()
    setting = replace(model.setting, sight=sight.Sight(is_blind=True))
    wrong = [
        replace(one, trainer=None, engine=model.log_probs(one, setting)) for one in case.samples
    ]
    config = make_config(hf_checkpoint=str(model.directory), fp32=True, **IMAGES)
    result = examined(config, wrong, Options(model.directory))
    assert first(result).startswith("images are not looked at")
    (note,) = [note for note in result.notes if note.startswith("transformers and the reference")]
    assert "wrong" not in note, note
    assert result.parts is not None and result.parts.first is None, text(result)


def test_an_engine_behind_a_url_gets_images_and_one_placeholder_of_each(
    case: Discrepancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(self: EngineThere, path: str, body: Any) -> Any:
        asked.append(body)
        return {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}}

    monkeypatch.setattr(EngineThere, "_ask", answer)
    engine = EngineThere("http://127.0.0.1:1")
    sample = case.samples[1]
    assert engine.score([sample], together=False) == [[-0.5]]
    span = sample.media[0].span
    tokens = sample.tokens.tolist()
    assert asked[-1]["input_ids"] == [*tokens[: span.start + 1], *tokens[span.end :]]
    assert asked[-1]["image_data"] == [base64.b64encode(PICTURES["portrait"]).decode()]
    engine.score(case.samples[:1], together=False)
    assert "image_data" not in asked[-1]


def test_an_image_that_is_gone_is_told(case: Discrepancy) -> None:
    model = case.model()
    lost = [
        replace(one, media=[Media(own.span, "/nowhere/a.png") for own in one.media])
        for one in case.samples
    ]
    config = make_config(hf_checkpoint=str(model.directory), fp32=True, **IMAGES)
    with pytest.raises(UserError, match=r"/nowhere/a.png is gone, an image of a sample"):
        examined(config, lost, Options(model.directory))


def test_a_sample_is_cut_before_an_image() -> None:
    media = [Media(ImageSpan(2, 1, 2), "a"), Media(ImageSpan(8, 1, 2), "b")]
    tokens = torch.arange(12)
    sample = Scored("x", tokens, torch.zeros(6).double(), None, torch.ones(6).bool(), media=media)
    cut = dumps.cut(sample, 9)
    assert len(cut.tokens) == 8 and cut.response_length == 2 and cut.media == media[:1]
    assert dumps.cut(sample, 10).media == media and dumps.cut(sample, 12) is sample


def test_places_behind_another_prompt(case: Discrepancy) -> None:
    """A prompt with a token more moves all images; one without a placeholder has no place."""
    model = case.model()
    sample = case.samples[SAMPLES.index(SAMPLES[3])]
    prompt = sample.tokens[: sample.prompt_length]
    moved = model.media_behind(sample, torch.cat([torch.tensor([4]), prompt]))
    assert moved is not None
    assert [one.span.start - own.span.start for one, own in zip(moved, sample.media)] == [1, 1]
    assert model.media_behind(sample, prompt[:3]) is None
