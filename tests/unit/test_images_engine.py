"""Models that see images in the embedded engine, against transformers."""

from __future__ import annotations

import base64
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.embedded.generate_request import RequestLimits, parse_generate
from slime.embedded.images import ImageRequests
from slime.engines.request_fields import BadRequest
from slime.models.images import ImageReader
from tests.support.embedded_models import make_scheduler, make_sequence, no_adapters, run
from tests.support.images import (
    CLOSE,
    END,
    PAD,
    PICTURES,
    SEEING,
    START,
    reference_logits,
    save_seeing,
    with_images,
)
from tests.support.seeing_sequences import images_of, sequence_of

PROMPTS: list[list[Any]] = [
    [[1, 2, 3, 4]],
    [[1], "portrait", [9, 8]],
    [[5, 6], "landscape", [3, 7]],
    ["landscape", [3], "odd", "square", [4, 4]],
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    save_seeing(path)
    return path


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return save_seeing(directory)


@pytest.fixture(scope="module")
def reader(directory: Path, model: Any) -> ImageReader:
    return ImageReader(directory)


@pytest.mark.parametrize(
    ("kind", "prefill_tokens", "deterministic"),
    [
        *((kind, 7, False) for kind in SEEING),
        *((kind, 2048, False) for kind in ("qwen3_vl", "gemma3")),
        *((kind, 7, True) for kind in ("qwen3_vl_moe", "qwen3_5")),
    ],
)
def test_log_probs_are_those_of_transformers(
    kind: str, prefill_tokens: int, deterministic: bool, tmp_path: Path
) -> None:
    """Prompt and sampled tokens, in one batch; the sampled ones by one forward of all."""
    directory = tmp_path
    model = save_seeing(directory, kind)
    reader = ImageReader(directory)
    scheduler = make_scheduler(
        directory, sees_images=True, prefill_tokens=prefill_tokens, deterministic=deterministic
    )
    made = [
        sequence_of(
            scheduler,
            reader,
            pieces,
            rid=str(i),
            max_new_tokens=8,
            logprob_start=0,
            sampling_seed=i,
        )
        for i, pieces in enumerate(PROMPTS)
    ]
    run(scheduler, [sequence for sequence, _ in made])
    for sequence, media in made:
        tokens = sequence.tokens().tolist()
        if PAD in sequence.output_ids:  # which transformers would take for an image
            tokens = tokens[: len(sequence.prompt) + sequence.output_ids.index(PAD)]
        with torch.no_grad():
            logits = reference_logits(model, reader, tokens, media)
        scores = logits[:-1].log_softmax(-1)
        theirs = scores.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        ours = torch.tensor([*sequence.input_logprobs, *sequence.output_logprobs])
        far = (ours[: len(theirs)] - theirs).abs().max()
        assert len(theirs) > len(sequence.prompt) and far <= CLOSE.get(kind, 5e-6)


def test_another_image_behind_the_same_tokens_is_seen(directory: Path, reader: ImageReader) -> None:
    """Equal images share keys and values, others do not, whether they wait together or not."""
    scheduler = make_scheduler(directory, sees_images=True)
    tokens, _ = with_images(reader, [[1], "square", [9, 8, 7]])
    made = {
        name: make_sequence(
            tokens,
            rid=name,
            images=images_of(scheduler, reader, [name.split("-")[0]], tokens),
            max_new_tokens=1,
            temperature=1.0,
        )
        for name in ("square-1", "other-1", "square-2", "square-3")
    }
    run(scheduler, [made["square-1"], made["other-1"], made["square-2"]])
    run(scheduler, [made["square-3"]])
    assert made["square-1"].output_logprobs == made["square-2"].output_logprobs
    assert made["square-1"].output_logprobs == pytest.approx(made["square-3"].output_logprobs)
    assert made["square-1"].output_logprobs != made["other-1"].output_logprobs
    assert made["other-1"].num_cached <= 2 < made["square-3"].num_cached


def test_a_prefix_may_end_within_an_image(tmp_path: Path) -> None:
    """Of Gemma 3: its first tokens are cached, and have seen the others."""
    model = save_seeing(tmp_path, "gemma3")
    reader = ImageReader(tmp_path)
    scheduler = make_scheduler(tmp_path, sees_images=True)
    pieces = [[1, 2], "square", [9, 8, 7]]
    for start in (0, 6):
        options: dict[str, Any] = {"max_new_tokens": 1, "logprob_start": start}
        sequence, media = sequence_of(scheduler, reader, pieces, rid=str(start), **options)
        run(scheduler, [sequence])
    assert media[0].span.start < sequence.num_cached < media[0].span.end
    tokens = sequence.prompt.tolist()
    with torch.no_grad():
        scores = reference_logits(model, reader, tokens, media)[:-1].log_softmax(-1)
    theirs = scores.gather(1, torch.tensor(tokens)[1:, None])[6:, 0]
    assert (torch.tensor(sequence.input_logprobs) - theirs).abs().max() <= 5e-6


def test_a_retracted_sequence_sees_its_images_again(
    directory: Path, model: Any, reader: ImageReader
) -> None:
    scheduler = make_scheduler(directory, sees_images=True)
    sequence, media = sequence_of(scheduler, reader, PROMPTS[1], max_new_tokens=8)
    scheduler.submit([sequence])
    for _ in range(4):
        scheduler.step()
    scheduler.retract_all()
    scheduler.flush()
    run(scheduler, [])
    tokens = sequence.tokens().tolist()
    with torch.no_grad():
        scores = reference_logits(model, reader, tokens, media)[:-1].log_softmax(-1)
    theirs = scores.gather(1, torch.tensor(tokens)[1:, None])[-8:, 0]
    assert sequence.num_retractions == 1
    assert (torch.tensor(sequence.output_logprobs) - theirs).abs().max() <= 5e-6


def limits(directory: Path, reader: ImageReader, limit: int = 2, **changes: Any) -> RequestLimits:
    vision = make_scheduler(directory, sees_images=True).cache.arch.spec.vision
    assert vision is not None
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "context_length": 64,
        "eos_token_ids": frozenset(),
        "tokenizer": None,
        "noise": random.Random(0),
        "adapters": no_adapters(),
        "images": ImageRequests(reader, vision, limit),
    }
    return RequestLimits(**(fields | changes))


def encoded(name: str) -> str:
    return base64.b64encode(PICTURES[name]).decode()


def test_requests_bring_images(directory: Path, reader: ImageReader) -> None:
    """One placeholder or all of them, a data URI or base64, one prompt or several."""
    own = limits(directory, reader)
    ids = [1, START, PAD, END, 3]
    whole, _ = with_images(reader, [[1], "square", [3]])
    uri = f"data:image/png;base64,{encoded('square')}"
    for given in (encoded("square"), [encoded("square")], [uri]):
        request = parse_generate({"input_ids": ids, "image_data": given}, own)
        assert request.jobs[0].sequence.prompt.tolist() == whole
    request = parse_generate({"input_ids": [whole, [1, 2]], "image_data": [[uri], None]}, own)
    assert [job.sequence.prompt.tolist() for job in request.jobs] == [whole, [1, 2]]


ONE = [1, START, PAD, END, 3]


@pytest.mark.parametrize(
    ("ids", "given", "message"),
    [
        (ONE, None, "placeholders of 1 images, image_data has 0"),
        ([1, 2], ["square"], "placeholders of 0 images, image_data has 1"),
        ([*ONE, *ONE, *ONE], ["square"] * 3, "3 images, this engine takes 2"),
        ([1, START, PAD, PAD, END], ["square"], "3 x 3 = 9 tokens, the prompt has 2"),
        (ONE, ["!"], "image 1 is not valid base64"),
        (ONE, ["AAAA"], "image 1: it is not in a format"),
        (ONE, ["https://example.org/a.png"], "takes the bytes of images"),
        (ONE, ["/etc/passwd"], "takes the bytes of images"),
        (ONE, ["data:image/png,abc"], "without base64"),
        (ONE, [7], "must be text in base64"),
    ],
)
def test_requests_that_do_not_fit_are_refused(
    ids: list[int], given: Any, message: str, directory: Path, reader: ImageReader
) -> None:
    sources = given and [encoded(one) if one in PICTURES else one for one in given]
    with pytest.raises(BadRequest, match=message):
        parse_generate({"input_ids": ids, "image_data": sources}, limits(directory, reader))


def test_an_engine_of_text_refuses_images(directory: Path, reader: ImageReader) -> None:
    with pytest.raises(BadRequest, match="this engine serves text alone"):
        parse_generate(
            {"input_ids": ONE, "image_data": encoded("square")},
            limits(directory, reader, images=None),
        )
