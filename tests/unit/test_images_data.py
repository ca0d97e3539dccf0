"""Images in rows and messages: every form, in its place, and refused by name where it is broken."""

from __future__ import annotations

import base64
import functools
import http.server
import io
import itertools
import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Sequence, Value
from datasets import Image as HubImage
from PIL import Image
from transformers import AutoTokenizer

from slime.config import Config, make_config
from slime.errors import UserError
from slime.models.decode_image import decoded, for_engine
from slime.models.images import ImageReader
from slime.models.vision import ImageError, ImageSpan
from slime.prompts.images import image_prompts
from slime.prompts.source import make_source
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.preferences import PreferenceEncoder
from slime.rollout.sft import SftEncoder
from slime.rollout.validate_rows import validate_data
from slime.samples.media import Media, media_of, media_problem
from tests.support.images import IMAGES, PICTURES, picture, save_seeing_with_tokenizer

NAMES = ("portrait", "landscape", "square")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_with_tokenizer(tmp_path_factory.mktemp("seeing"))


def config_of(model: Path, data: Path, **flags: Any) -> Config:
    defaults: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "prompt_data": str(data),
        "output_dir": str(data.parent / "out"),
        "run_name": "run",
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 2,
        "num_rollout": 1,
        "rollout_shuffle": False,
    }
    return make_config(**{**defaults, **IMAGES, **flags})


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def drawn(config: Config, count: int = 1) -> list[list[Any]]:
    tokenizer = load_tokenizer(str(config.checkpoint.hf_checkpoint))
    return make_source(config, tokenizer).get_samples(count)


def refusal(config: Config) -> str:
    error = validate_data(config, load_tokenizer(str(config.checkpoint.hf_checkpoint))).error
    assert error is not None
    return str(error)


def uri(name: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(PICTURES[name]).decode()}"


def test_paths_are_referred_to_and_bytes_are_kept_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PICTURES["square"])
    plain = base64.b64encode(PICTURES["landscape"]).decode()
    data = write(
        tmp_path,
        {"input": "see <image> and <image>", "images": ["pictures/a.png", uri("portrait")]},
        {"input": "<image>", "images": plain},
        {"input": "no image at all", "images": []},
    )
    config = config_of(model, data)
    assert validate_data(config, load_tokenizer(str(model))).error is None
    (first, twin), (second, _), (third, _) = drawn(config, 3)
    references = first.multimodal_inputs["images"]
    assert references[0] == str(tmp_path / "pictures" / "a.png")
    assert Path(references[1]).read_bytes() == PICTURES["portrait"]
    assert Path(second.multimodal_inputs["images"][0]).read_bytes() == PICTURES["landscape"]
    assert twin.multimodal_inputs == first.multimodal_inputs
    assert twin.multimodal_inputs is not first.multimodal_inputs
    assert third.multimodal_inputs is None
    assert len(list((tmp_path / "out" / "run" / "media").iterdir())) == 2
    tokenizer = load_tokenizer(str(model))
    placeholder = image_prompts(str(model), None).placeholder(tokenizer)
    assert first.prompt == f"see {placeholder} and {placeholder}"


@pytest.mark.parametrize("templated", [False, True])
def test_gemma_has_empty_lines_around_images(templated: bool, tmp_path: Path) -> None:
    """As its processor writes them into the rendered prompt; its template trims messages."""
    model = save_seeing_with_tokenizer(tmp_path / "model", "gemma3")
    tokenizer = load_tokenizer(str(model))
    plain = AutoTokenizer.from_pretrained(model)
    plain.chat_template = plain.chat_template.replace("{{ m.content }}", "{{ m.content | trim }}")
    plain.save_pretrained(model)
    data = write(tmp_path, {"input": "<image> and <image>", "images": [uri("square")] * 2})
    config = config_of(model, data, apply_chat_template=templated)
    assert validate_data(config, load_tokenizer(str(model))).error is None
    ((first, _),) = drawn(config)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert image_prompts(str(model), None).placeholder(tokenizer) == image
    text = f"\n\n{image}\n\n and \n\n{image}\n\n"
    if templated:
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert first.prompt == text


def test_urls_are_downloaded_when_allowed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept in the run, so that a file that changes there changes nothing here."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "a.png").write_bytes(PICTURES["square"])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    monkeypatch.setattr(handler.func, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        ((first, _),) = drawn(
            config_of(
                model,
                write(tmp_path, {"input": "<image>", "images": [f"{address}/a.png"]}),
                allow_image_urls=True,
            )
        )
        gone = write(tmp_path, {"input": "<image>", "images": [f"{address}/b.png"]})
        told = refusal(config_of(model, gone, allow_image_urls=True))
        server.shutdown()
    assert Path(first.multimodal_inputs["images"][0]).read_bytes() == PICTURES["square"]
    assert f"image 1 ({address}/b.png): HTTP Error 404" in told


@pytest.mark.parametrize("form", ["plain", "features", "saved", "streamed"])
def test_columns_of_parquet_and_of_the_hub(form: str, model: Path, tmp_path: Path) -> None:
    """Hugging Face data sets store {"bytes", "path"}; those with features would be decoded."""
    images = [[{"bytes": PICTURES[name], "path": None}] for name in NAMES]
    columns = {"input": ["a <image>"] * 3, "images": images}
    path = tmp_path / "rows.parquet"
    if form == "plain":
        pq.write_table(pa.table(columns), path)
    else:
        features = {"input": Value("string"), "images": Sequence(HubImage())}
        table = Dataset.from_dict(columns, features=Features(features))
        table.to_parquet(str(path))
    if form == "saved":
        path = tmp_path / "saved"
        table.save_to_disk(str(path))
    groups = drawn(config_of(model, path, streaming_data=form == "streamed"), 3)
    found = [Path(group[0].multimodal_inputs["images"][0]).read_bytes() for group in groups]
    assert found == [PICTURES[name] for name in NAMES]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": uri("square")},
        {"type": "image_url", "image_url": {"url": uri("square")}},
        {"type": "input_image", "image_url": uri("square")},
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": base64.b64encode(PICTURES["square"]).decode(),
            },
        },
    ],
)
def test_parts_of_messages_bring_images_at_any_turn(
    part: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    """Parts of every wire form, beside a bare part and a mark, which take those of the column."""
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "three <image>"}, part]},
    ]
    (tmp_path / "a.png").write_bytes(PICTURES["portrait"])
    (tmp_path / "b.png").write_bytes(PICTURES["landscape"])
    data = write(tmp_path, {"input": messages, "images": ["a.png", "b.png"]})
    config = config_of(model, data, apply_chat_template=True)
    ((sample, _),) = drawn(config)
    found = [Path(one).read_bytes() for one in sample.multimodal_inputs["images"]]
    assert found == [PICTURES[name] for name in ("portrait", "landscape", "square")]
    prompts = image_prompts(str(model), None)
    tokenizer = load_tokenizer(str(model))
    tokens, spans = prompts.expand(
        tokenizer.encode(sample.prompt, add_special_tokens=False), found, "it"
    )
    sizes = [(span.rows, span.columns) for span in spans]
    assert sizes == [(5, 2), (2, 6), (3, 3)]
    media = media_of(sample.multimodal_inputs, {"spans": spans})
    assert media_problem(media, tokens, prompts.vision.image_token) == ""


def test_the_place_of_an_image_has_tokens_on_both_sides() -> None:
    for start, tokens in ((0, [9, 9, 5]), (1, [5, 9, 9])):
        media = [Media(ImageSpan(start, 1, 2), "a.png")]
        assert media_problem(media, tokens, 9) == "image 1 without tokens around it"
    assert media_problem([Media(ImageSpan(1, 1, 2), "a.png")], [5, 9, 9, 5], 9) == ""


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"input": "no place", "images": ["a.png"]}, {}, "1 images, 0 places"),
        ({"input": "<image> <image>", "images": ["a.png"]}, {}, "1 images, 2 places"),
        ({"input": "<image>"}, {}, "0 images, 1 places"),
        ({"input": "<image>", "images": ["gone.png"]}, {}, "image 1 (gone.png): there is no file"),
        ({"input": "<image>", "images": ["https://x.org/a"]}, {}, "without --allow-image-urls"),
        ({"input": "<image>", "images": [7]}, {}, "it is an int"),
        (
            {"input": "<image>" * 3, "images": ["a.png"] * 3},
            {"images_per_sample": 2},
            "3 images, 2 are allowed",
        ),
        (
            {"input": "<|image_pad|> <|vision_start|><|image_pad|><|vision_end|>", "images": []},
            {},
            "1 placeholders",
        ),
        ({"input": [{"role": "user", "content": [{"type": "video"}]}]}, {}, "'video'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    row: dict[str, Any], flags: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(PICTURES["square"])
    assert message in refusal(config_of(model, write(tmp_path, row), **flags))


def test_images_without_a_key_are_refused(model: Path, tmp_path: Path) -> None:
    """A run that reads no images does not leave them out."""
    messages = [{"role": "user", "content": [{"type": "image", "image": uri("square")}]}]
    config = config_of(model, write(tmp_path, {"input": messages}), multimodal_keys=None)
    assert "only text is taken here" in refusal(config)


@pytest.mark.parametrize("keys", [{"video": "v"}, {"image": "i", "audio": "a"}, {"image": 3}])
def test_keys_of_other_media_are_refused(keys: dict[str, Any], model: Path, tmp_path: Path) -> None:
    config = config_of(model, write(tmp_path, {"input": "a"}), multimodal_keys=keys)
    assert "images are read; audio and video are not" in refusal(config)


def malformed(number: int, source: random.Random) -> bytes:
    """One of many ways in which a file is no picture."""
    kind = ("PNG", "JPEG", "BMP", "GIF", "WEBP")[number % 5]
    whole = picture(40, 30, number, kind)
    way = number // 5 % 5
    if way == 0:
        return whole[: source.randrange(len(whole) // 2)]
    if way == 1:
        return source.randbytes(64)
    if way == 2:
        return source.randbytes(8) + whole[8:]
    if way == 3:
        return json.dumps({"number": number}).encode()
    return b"" if number % 2 else b"<html>404 not found</html>"


def test_a_hundred_malformed_files_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    """Every one in one report, before the launch, with its row; sound ones beside them are not."""
    source = random.Random(0)
    rows = []
    for number in range(100):
        (tmp_path / f"broken{number:03d}.png").write_bytes(malformed(number, source))
        rows.append({"input": "<image>", "images": [f"broken{number:03d}.png"]})
        (tmp_path / f"sound{number:03d}.png").write_bytes(picture(24, 24, number))
        rows.append({"input": "<image>", "images": [f"sound{number:03d}.png"]})
    told = refusal(config_of(model, write(tmp_path, *rows)))
    assert "100 of 200 rows have images that cannot be read" in told
    for number in range(100):
        assert f"rows.jsonl:{2 * number + 1}: image 1 (broken{number:03d}.png): it " in told
    assert "sound" not in told


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    mode = "P" if kind == "BLP" else "RGB"
    Image.open(io.BytesIO(picture(40, 30))).convert(mode).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize(("kind", "places"), [("DDS", (80,)), ("BLP", (4,)), ("TIFF", (4, 8))])
def test_damaged_files_of_any_format_are_images_that_cannot_be_read(
    kind: str, places: tuple[int, ...]
) -> None:
    """Readers of rare formats raise errors of their own."""
    whole = encoded(kind)
    refused = 0
    for place, value in itertools.product(places, range(256)):
        data = bytearray(whole)
        data[place] = value
        try:
            decoded(bytes(data))
        except ImageError:
            refused += 1
    assert refused


@pytest.mark.parametrize("url", ["http://[x/a.png", "http://127.0.0.1:port/a.png"])
def test_addresses_that_are_none_are_refused_by_row(url: str, model: Path, tmp_path: Path) -> None:
    data = write(tmp_path, {"input": "<image>", "images": [url]})
    assert f"rows.jsonl:1: image 1 ({url})" in refusal(
        config_of(model, data, allow_image_urls=True)
    )


def test_pictures_are_upright_and_of_one_frame() -> None:
    stream = io.BytesIO()
    turned = Image.new("RGB", (40, 20))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(stream, "JPEG", exif=exif)
    assert decoded(stream.getvalue()).size == (20, 40)
    with Image.open(io.BytesIO(for_engine(stream.getvalue()))) as sent:  # what an engine opens
        assert sent.size == (20, 40)
    assert for_engine(PICTURES["portrait"]) == PICTURES["portrait"]
    stream = io.BytesIO()
    frames = [Image.new("L", (8, 8), shade) for shade in (0, 200)]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="2 frames"):
        decoded(stream.getvalue())


def drawing(kind: str) -> bytes:
    """A dark square on a light ground, in a mode that Pillow's own conversion to RGB spoils."""
    square = Image.new("L", (24, 24), 0)
    square.paste(255, (8, 8, 16, 16))
    if kind == "16 bits":
        image = Image.fromarray(65535 - 257 * np.asarray(square).astype(np.uint16) // 2)
    elif kind == "palette":
        image = Image.new("P", (24, 24), 0)
        image.putpalette([0, 0, 0, 0, 0, 255])
        image.paste(1, (8, 8, 16, 16))
    else:
        image = Image.new(kind, (24, 24), 0)
        image.putalpha(square)
    stream = io.BytesIO()
    image.save(stream, "PNG", **({"transparency": 0} if kind == "palette" else {}))
    return stream.getvalue()


@pytest.mark.parametrize("kind", ["RGB", "L", "palette", "16 bits"])
def test_transparent_and_deep_images_are_seen_as_they_look(kind: str) -> None:
    data = drawing(kind)
    ground, square = (decoded(data).getpixel(place) for place in ((2, 2), (12, 12)))
    assert ground == (255, 255, 255)
    assert square == {"palette": (0, 0, 255), "16 bits": (128, 128, 128)}.get(kind, (0, 0, 0))
    with Image.open(io.BytesIO(for_engine(data))) as sent:
        assert sent.mode == "RGB" and sent.tobytes() == decoded(data).tobytes()


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_unknown_range_are_refused(dtype: type) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.ones((8, 8), dtype)).save(stream, "TIFF")
    with pytest.raises(ImageError, match="32 bits"):
        decoded(stream.getvalue())


def test_a_reader_counts_the_seconds_of_what_it_prepares(model: Path) -> None:
    reader = ImageReader(model)
    reader.read(picture(256, 128))
    taken = reader.take_seconds()
    assert taken > 0 and reader.take_seconds() == 0
    reader.read(picture(256, 128))  # kept
    assert reader.take_seconds() == 0


def test_images_that_were_read_ahead_are_those_that_reading_gives(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is prepared once, and no more than the cache holds."""
    images = [picture(64 + 8 * i, 64) for i in range(12)]
    expected = [ImageReader(model).read(image) for image in images]
    reader, small = ImageReader(model), ImageReader(model, kept_bytes=1)
    prepared = []
    original = ImageReader._prepared

    def counted(self: ImageReader, data: bytes) -> Any:
        prepared.append(data)
        return original(self, data)

    monkeypatch.setattr(ImageReader, "_prepared", counted)
    reader.read_ahead([*images, *images])
    assert reader.take_seconds() > 0
    for image, one in zip(images, expected, strict=True):
        found = reader.read(image)
        assert found.grid == one.grid and found.pixels.equal(one.pixels)
    assert sorted(prepared) == sorted(images)
    prepared.clear()
    small.read_ahead(images)
    assert 0 < len(prepared) < len(images)
    with pytest.raises(ImageError, match="Pillow"):
        reader.read_ahead([b"no image"])


def test_large_images_are_scaled_down_by_flag(model: Path) -> None:
    large = picture(256, 128)
    assert ImageReader(model).read(large).grid == (1, 10, 22)
    assert ImageReader(model, max_pixels=1024).read(large).grid == (1, 4, 10)


@pytest.mark.parametrize("written", [1, 9])
def test_a_tokenised_row_counts_all_placeholders(written: int, model: Path, tmp_path: Path) -> None:
    """It has one or all of them; the limit of prompts knows the tokens of the image."""
    (tmp_path / "a.png").write_bytes(PICTURES["square"])
    vision = image_prompts(str(model), None).vision
    ids = [5, vision.start_token, *[vision.image_token] * written, vision.end_token]
    data = write(tmp_path, {"input": ids, "images": ["a.png"]})
    flags: dict[str, Any] = {"rollout_max_prompt_len": 12}
    ((sample, _),) = drawn(config_of(model, data, **flags))
    assert sample.tokens == ids
    told = refusal(config_of(model, data, rollout_max_prompt_len=11))
    assert "12" in told


def test_a_tokenised_row_with_other_placeholders_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURES["square"])
    vision = image_prompts(str(model), None).vision
    ids = [5, vision.start_token, *[vision.image_token] * 2, vision.end_token]
    told = refusal(config_of(model, write(tmp_path, {"input": ids, "images": ["a.png"]})))
    assert "2 for image 1, which is 3 x 3 tokens" in told


def test_supervised_conversations_have_images(model: Path, tmp_path: Path) -> None:
    """Images of several turns; their placeholders are not trained."""
    messages = [
        {"role": "user", "content": "first <image>"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "<image> second"},
        {"role": "assistant", "content": "two"},
    ]
    (tmp_path / "a.png").write_bytes(PICTURES["portrait"])
    (tmp_path / "b.png").write_bytes(PICTURES["square"])
    data = write(tmp_path, {"input": messages, "images": ["a.png", "b.png"]})
    config = config_of(model, data, loss_type="sft_loss", n_samples_per_prompt=1)
    assert validate_data(config, load_tokenizer(str(model))).error is None
    tokenizer = load_tokenizer(str(model))
    ((sample,),) = drawn(config)
    (one,) = SftEncoder(config, tokenizer).encode(sample)
    vision = image_prompts(str(model), None).vision
    media = media_of(one.multimodal_inputs, one.multimodal_train_inputs)
    assert media_problem(media, one.tokens, vision.image_token) == ""
    assert [(m.span.rows, m.span.columns) for m in media] == [(5, 2), (3, 3)]
    mask = [0] * one.prompt_length + one.loss_mask
    trained = [token for token, on in zip(one.tokens, mask, strict=True) if on]
    assert "one" in tokenizer.decode(trained) and "two" in tokenizer.decode(trained)
    assert vision.image_token not in trained


@pytest.mark.parametrize("templated", [False, True])
@pytest.mark.parametrize("loss", ["sft_loss", "preference_loss"])
def test_answers_to_text_for_gemma_have_empty_lines_around_images(
    loss: str, templated: bool, tmp_path: Path
) -> None:
    """Once, wherever the template is applied."""
    model = save_seeing_with_tokenizer(tmp_path / "model", "gemma3")
    (tmp_path / "a.png").write_bytes(PICTURES["square"])
    row = {"input": "<image>?", "label": "one", "chosen": "one", "rejected": "two"}
    flags: dict[str, Any] = {"loss_type": loss, "n_samples_per_prompt": 1}
    flags |= {"label_key": "label"} if loss == "sft_loss" else {"preference_loss": "simpo"}
    data = write(tmp_path, {**row, "images": ["a.png"]})
    config = config_of(model, data, apply_chat_template=templated, **flags)
    tokenizer = load_tokenizer(str(model))
    assert validate_data(config, tokenizer).error is None
    ((sample,),) = drawn(config)
    encoder = SftEncoder if loss == "sft_loss" else PreferenceEncoder
    one = encoder(config, tokenizer).encode(sample)[0]
    text = str(tokenizer.decode(one.tokens[: one.prompt_length])).replace("<|image_pad|>" * 9, "I")
    image = "\n\n<|vision_start|>I<|vision_end|>\n\n?"
    if templated:
        image = f"<|im_start|>user\n{image}<|im_end|>\n<|im_start|>assistant\n"
    assert text == image


def test_placeholders_in_the_text_itself_are_refused(model: Path) -> None:
    prompts = image_prompts(str(model), None)
    vision = prompts.vision
    ids = [5, vision.start_token, vision.image_token, vision.end_token]
    with pytest.raises(UserError, match="placeholders of 2 images and 1 images"):
        prompts.expand([*ids, *ids], [PICTURES["square"]], "sample 3")
    with pytest.raises(UserError, match="2 placeholders for an image of 3 x 3 tokens"):
        prompts.expand([*ids[:2], *ids[2:3] * 2, *ids[3:]], [PICTURES["square"]], "sample 3")
