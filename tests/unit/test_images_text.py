"""Text costs no more in a model that sees images than in the text model inside it: both call the
same operations, as often."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.embedded_models import make_scheduler, make_sequence, run
from tests.support.images import IMAGES, save_seeing
from tests.support.tiny_models import SHAPE, save_random
from tests.support.trainer_ranks import make_batch
from tests.support.trainers import trainer

FROZEN = {"freeze_vision_tower": True, "freeze_vision_projector": True}
PLACE = [[0, 1], [2, 3, 4, 5]]


class Operations(TorchDispatchMode):
    """Counts torch's operations by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import transformers

    folder = tmp_path_factory.mktemp("models")
    save_seeing(folder / "seeing", layers=4)
    config = transformers.Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=False)
    save_random(config, folder / "text", scale=8)
    return {name: folder / name for name in ("text", "seeing")}


def in_the_trainer(model: Path, **flags: Any) -> Counter[str]:
    backend = trainer(hf_checkpoint=str(model), **flags)
    try:
        backend.train(make_batch(PLACE))
        with Operations() as found:
            backend.train(make_batch(PLACE))
    finally:
        backend.close()
    return found.counts


def in_the_engine(model: Path, sees_images: bool) -> Counter[str]:
    scheduler = make_scheduler(model, sees_images=sees_images)
    with Operations() as found:
        run(scheduler, [make_sequence([1, 2, 3, 4], rid=str(i)) for i in range(3)])
    return found.counts


def test_the_trainer_computes_no_more(models: dict[str, Path]) -> None:
    """Without --multimodal-keys, and with a frozen tower on rows of text, where a number is made a
    tensor and back for a metric."""
    text = in_the_trainer(models["text"])
    assert sum(text.values()) > 1000
    assert in_the_trainer(models["seeing"]) == text
    metric = Counter(["aten.lift_fresh.default", "aten._local_scalar_dense.default"])
    assert in_the_trainer(models["seeing"], **IMAGES, **FROZEN) == text + metric


def test_the_embedded_engine_computes_no_more(models: dict[str, Path]) -> None:
    text = in_the_engine(models["text"], False)
    assert sum(text.values()) > 1000
    for sees_images in (False, True):
        assert in_the_engine(models["seeing"], sees_images) == text
