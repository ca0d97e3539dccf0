"""The canary of models that see images: what an engine makes of a picture is compared, and must
change with it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.config import make_config
from slime.embedded.generate_request import RequestLimits, parse_generate
from slime.embedded.generate_routes import Answer
from slime.embedded.images import ImageRequests, SeenImages
from slime.embedded.scheduler import Scheduler
from slime.embedded.weight_update import ABILITIES
from slime.engines.image_canary import ImageCanary
from slime.errors import UserError
from slime.models.images import ImageReader
from slime.models.vision import ImageSpan
from slime.weights.canary import Canary
from tests.support.embedded_models import make_scheduler, no_adapters, run
from tests.support.images import IMAGES, save_seeing_with_tokenizer
from tests.support.trainers import trainer


class Engine:
    """One embedded engine, in this process, as a fleet."""

    urls = ("http://engine",)

    def __init__(self, model: Path) -> None:
        self.scheduler: Scheduler = make_scheduler(model, sees_images=True)
        vision = self.scheduler.cache.arch.spec.vision
        assert vision is not None
        images = ImageRequests(ImageReader(model), vision, 4)
        noise = random.Random(0)
        self.limits = RequestLimits(
            272, 256, frozenset({257}), None, noise, no_adapters(), images=images
        )

    def get(self, path: str, timeout: float) -> list[dict[str, Any]]:
        return [{"dtype": "float32", "abilities": ABILITIES.to_json()}]

    def post(self, path: str, body: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        [job] = parse_generate(body, self.limits).jobs
        run(self.scheduler, [job.sequence])
        return [Answer(job, None).final()]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_seeing_with_tokenizer(tmp_path / "hf", max_position_embeddings=512)


def canary_of(model: Path, engine: Engine) -> Canary:
    """With what the trainer says of its own weights."""
    config = make_config(hf_checkpoint=str(model), fp32=True, **IMAGES)
    canary = Canary(config, engine)  # type: ignore[arg-type]
    backend = trainer(hf_checkpoint=str(model), **IMAGES)
    try:
        expected = backend.canary_log_probs(canary.tokens)
    finally:
        backend.close()
    assert expected is not None and len(expected) > 31 + 2 * 16
    canary.expected = expected
    return canary


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_an_engine_that_sees_as_the_trainer_does_is_sound(kind: str, tmp_path: Path) -> None:
    model = save_seeing_with_tokenizer(tmp_path, kind, max_position_embeddings=512)
    found = canary_of(model, Engine(model)).check("a weight push")
    assert found["train/canary_logprob_abs_diff_max"] <= 1e-5
    assert found["train/canary_image_abs_diff"] > 1e-3


@pytest.mark.parametrize("part", ["patch_embed.proj.weight", "merger.linear_fc2.weight"])
def test_another_tower_is_found(part: str, model: Path) -> None:
    engine = Engine(model)
    canary = canary_of(model, engine)
    name = f"model.visual.{part}"
    weight = engine.scheduler.store.named[name]
    engine.scheduler.store.update([(name, weight + 0.05 * torch.randn_like(weight))])
    with pytest.raises(UserError, match="around a picture: the tower, the projector"):
        canary.check("a weight push")


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        *(("qwen3_vl", lost) for lost in ("features", "levels", "positions")),
        *(("gemma3", lost) for lost in ("features", "directions")),
    ],
)
def test_an_engine_that_ignores_a_part_of_images_is_found(
    kind: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_seeing_with_tokenizer(tmp_path, kind, max_position_embeddings=512)
    engine = Engine(model)
    canary = canary_of(model, engine)
    if lost == "features":
        monkeypatch.setattr(SeenImages, "placed", lambda self, hidden: hidden)
    elif lost == "levels":
        monkeypatch.setattr(SeenImages, "added", lambda self, hidden, layer: hidden)
    elif lost == "directions":
        monkeypatch.setattr(engine.scheduler, "_blocks", lambda *_: ())
    else:
        decoder = engine.scheduler.store.model
        whole = decoder.forward
        decoder.forward = lambda *given, axis_positions=None, **named: whole(*given, **named)  # type: ignore
    with pytest.raises(UserError, match="around a picture: the tower, the projector"):
        canary.check("a weight push")


def test_a_trainer_and_an_engine_that_both_ignore_images_are_found(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They agree; the picture must count all the same."""
    engine = Engine(model)
    canary = canary_of(model, engine)
    start = len(canary.tokens) - 1
    half = (len(canary.expected) - start) // 2
    same = [*canary.expected[: start + half], *canary.expected[start : start + half]]
    canary.expected = same
    monkeypatch.setattr(canary, "_ask", lambda event, adapter: [same])
    with pytest.raises(UserError, match="gives the same log-probs behind two different pictures"):
        canary.check("a weight push")


def test_an_answer_about_other_placeholders_is_refused(model: Path) -> None:
    engine = Engine(model)
    canary = canary_of(model, engine)
    assert engine.limits.images is not None
    vision = engine.limits.images.vision
    small = ImageRequests(ImageReader(model, max_pixels=1024), vision, 4)
    canary.fleet.limits = RequestLimits(  # type: ignore[attr-defined]
        272, 256, frozenset({257}), None, random.Random(0), no_adapters(), images=small
    )
    with pytest.raises(Exception, match="answered those of 34: it prepares the picture"):
        canary.check("a weight push")


def test_the_effect_of_a_picture_is_that_of_the_least_affected() -> None:
    """Two tokens are behind the image; log-probs of both pictures follow one another."""
    canary = ImageCanary([5, 9, 9, 6, 7], ImageSpan(1, 1, 2), (b"a", b"b"))
    behind = {"http://a": [-1.0, -2.0, -1.5, -2.0], "http://b": [-1.0, -2.0, -3.0, -1.0]}
    assert canary.check_effect("a push", [-4.0, -2.0, -1.0, -1.0], behind) == 0.25
    with pytest.raises(UserError, match="http://b gives the same log-probs behind two"):
        same = {**behind, "http://b": [-1.0, -2.0, -1.0, -2.0]}
        canary.check_effect("a push", [-4.0, -2.0, -1.0, -1.0], same)
