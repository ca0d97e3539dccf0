"""Images of samples on pages, and in the chat route of the embedded engine."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from examples.seeing import data as seeing_data
from slime.cli.chat import Conversation
from slime.cli.serve import sees_images, serving
from slime.embedded.generate_request import RequestLimits
from slime.embedded.images import ImageRequests
from slime.embedded.openai_request import parse_chat
from slime.engines.request_fields import BadRequest
from slime.errors import UserError
from slime.models.images import ImageReader
from slime.observe.recorder import sample_record
from slime.observe.run_data import read_stages
from slime.page import report_contents
from slime.page.index import SampleIndex
from slime.page.pictures import with_pictures
from slime.page.rows import Query
from slime.prompts.images import image_prompts
from slime.prompts.tokenizer import load_tokenizer
from slime.samples.types import Sample
from tests.support.embedded_models import no_adapters
from tests.support.images import PICTURES, save_seeing_with_tokenizer


def a_run(folder: Path) -> Path:
    """Two samples of one prompt with two images, of which one file is gone."""
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0}) + "\n")
    (folder / "a.png").write_bytes(PICTURES["landscape"])
    images = [str(folder / "a.png"), str(folder / "gone.png")]
    records = [
        sample_record(
            Sample(
                group_index=0,
                index=index,
                prompt="what?",
                response="this",
                reward=0.0,
                multimodal_inputs={"images": images},
            )
        )
        for index in range(2)
    ]
    assert records[0]["images"] == images
    (folder / "samples").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "samples" / "rollout_000000.jsonl").write_text(lines)
    return folder


def size_of(picture: str) -> tuple[int, int]:
    data = base64.b64decode(picture.removeprefix("data:image/jpeg;base64,"))
    return Image.open(io.BytesIO(data)).size


def test_the_page_shows_the_images_of_a_sample(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    index = SampleIndex(run, None)
    index.update(read_stages(run, {}))
    rows, _ = index.find(Query(), 0, 10)
    sample = index.sample(rows[0]["id"])
    assert sample is not None
    [picture] = sample["record"]["pictures"]
    assert size_of(picture) == (48, 16)


def test_the_page_shows_photos_upright(tmp_path: Path) -> None:
    """As the model sees them."""
    photo = Image.new("RGB", (40, 20))
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(tmp_path / "a.jpg", exif=exif)
    [picture] = with_pictures({"images": [str(tmp_path / "a.jpg")]})["pictures"]
    assert size_of(picture) == (20, 40)


def test_the_report_shows_them_too(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    [stage] = read_stages(run, {})
    rows, _, _ = report_contents._samples(run, stage, 1 << 20)
    assert [len(row["record"]["pictures"]) for row in rows] == [1, 1]


def test_samples_of_text_are_recorded_as_before() -> None:
    assert "images" not in sample_record(Sample(prompt="a", response="b"))


# -- the chat route --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_with_tokenizer(tmp_path_factory.mktemp("seeing"))


def parsed(model: Path, content: Any, *, sees: bool = True) -> Any:
    tokenizer: Any = load_tokenizer(str(model))
    vision = image_prompts(str(model), None).vision
    images = ImageRequests(ImageReader(model), vision, 2) if sees else None
    limits = RequestLimits(
        272, 256, frozenset(), tokenizer, random.Random(0), no_adapters(), images=images
    )
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 3}
    return parse_chat(body, limits, tokenizer, "m").generate.jobs[0].sequence


def part(name: str) -> dict[str, Any]:
    data = base64.b64encode(PICTURES[name]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_the_chat_route_takes_images(model: Path) -> None:
    token = image_prompts(str(model), None).vision.image_token
    sequence = parsed(
        model, [{"type": "text", "text": "What is"}, part("square"), part("portrait")]
    )
    assert [image.span.length for image in sequence.images.images] == [9, 10]
    assert sequence.prompt.tolist().count(token) == 19


@pytest.mark.parametrize(
    ("content", "sees", "message"),
    [
        ([part("square")], False, "only text is taken here"),
        ([part("square")] * 3, True, "3 images, this engine takes 2"),
        ("<|vision_start|><|image_pad|><|vision_end|>", True, "placeholders of 1 images"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], True, "the bytes"),
    ],
)
def test_images_that_the_chat_route_refuses(
    content: Any, sees: bool, message: str, model: Path
) -> None:
    with pytest.raises(BadRequest, match=message):
        parsed(model, content, sees=sees)


@pytest.mark.usefixtures("forked_servers")
def test_a_chat_sends_images_with_its_questions(tmp_path: Path) -> None:
    """To a served model whose directory says that it sees."""
    model = tmp_path / "model"
    seeing_data.write_model(model, seed=3)
    for name in ("landscape", "portrait"):
        (tmp_path / f"{name}.png").write_bytes(PICTURES[name])
    (tmp_path / "text.txt").write_text("no image")
    sampling = {"temperature": 0.0, "max_tokens": 8}
    with serving(model, "tiny", engine="embedded") as server:
        chat = Conversation(server.url, "tiny", sampling, forgets=True)
        with pytest.raises(UserError, match="takes no images"):
            next(chat.attach(str(tmp_path / "landscape.png")))
        chat.sees = sees_images(model)
        with pytest.raises(UserError, match=r"text\.txt cannot be read as an image"):
            next(chat.attach(str(tmp_path / "text.txt")))
        answers = []
        for name in ("landscape", "portrait", ""):
            if name:
                assert "goes with the next question" in next(chat.attach(f"{tmp_path}/{name}.png"))
            answers.append("".join(chat.ask("how many?")))
    assert len(set(answers)) > 1
