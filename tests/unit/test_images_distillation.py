"""Teachers that see images: in an engine and in the trainer, with the sample's prompt or another
one, against transformers."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slime.cluster.engine_fit import EngineInfo
from slime.config import Config, make_config
from slime.embedded.kind import embedded_command
from slime.embedded.options import EngineOptions
from slime.engines.api import EngineError
from slime.engines.launch import EnginePlace
from slime.errors import UserError
from slime.models.images import ImageReader
from slime.models.vision import ImageSpan, one_placeholder_each
from slime.prompts.images import ImagePrompts, add_images, image_prompts
from slime.prompts.tokenizer import load_tokenizer
from slime.rollout.generate import bind_state
from slime.rollout.teachers import TeacherPool
from slime.rollout.validate_rows import validate_data
from slime.run import preflight
from slime.run.preflight import check_teachers
from slime.samples.batch import TrainBatch, TrainLayout
from slime.samples.convert import to_train_batches
from slime.samples.media import Media
from slime.samples.types import Group, Sample, SampleStatus
from slime.trainer.distillation import with_teacher_prompts
from slime.trainer.megatron.backend import MegatronBackend
from tests.support.embedded_models import save_tiny_model
from tests.support.fake_engine import FakeEngine
from tests.support.fake_rollout import FakeClient, hook_args, make_state
from tests.support.images import (
    IMAGES,
    PICTURES,
    reference_logits,
    save_seeing,
    save_seeing_with_tokenizer,
    with_images,
)
from tests.support.seeing_samples import SAMPLES, batch_of, their_log_probs
from tests.support.served import served_engine
from tests.support.tiny_models import moved
from tests.support.trainers import trainer

NAMES = {data: name for name, data in PICTURES.items()}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_with_tokenizer(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_seeing_with_tokenizer(tmp_path_factory.mktemp("teacher"))
    auto = transformers.AutoModelForImageTextToText
    moved(auto.from_pretrained(path, dtype=torch.float32), path)
    return path


@pytest.fixture(scope="module")
def prompts(student: Path) -> ImagePrompts:
    return image_prompts(str(student), None)


def config_for(student: Path, **flags: Any) -> Config:
    given = {"hf_checkpoint": str(student), "use_opd": True, "num_rollout": 1}
    return make_config(**{**given, "rollout_batch_size": 4, **IMAGES, **flags})


# -- in an engine ----------------------------------------------------------------------------------


def sample_of(folder: Path, prompts: ImagePrompts, tokenizer: Any, **metadata: Any) -> Sample:
    """Two images in the prompt, and one that a tool has answered with."""
    references = []
    for name in ("portrait", "square", "landscape"):
        (folder / f"{name}.png").write_bytes(PICTURES[name])
        references.append(str(folder / f"{name}.png"))
    place = prompts.placeholder(tokenizer)
    sample = Sample(index=7, group_index=0, metadata=metadata, reward=0.0)
    starts = []
    for text, own in (
        (f"a {place} b {place}: ", references[:2]),
        (f"yes {place} no", references[2:]),
    ):
        starts.append(len(sample.tokens))
        ids = tokenizer.encode(text, add_special_tokens=False)
        tokens, spans = prompts.expand(ids, own, "it", start=len(sample.tokens))
        add_images(sample, own, spans)
        sample.tokens += tokens
    response = sample.tokens[starts[1] :]
    sample.response_length = len(response)
    sample.loss_mask = [int(token != prompts.vision.image_token) for token in response]
    sample.status = SampleStatus.COMPLETED
    return sample


def score(student: Path, urls: list[str], samples: Sequence[Sample], **flags: Any) -> None:
    """Let teachers in engines score samples, as a rollout does."""
    config = config_for(student, opd_teacher_urls=urls, **flags)
    tokenizer = load_tokenizer(str(student))

    async def main() -> None:
        pool = TeacherPool(config, tokenizer, {}, "http://policy")
        args = hook_args(apply_chat_template_kwargs={})
        images = image_prompts(str(student), None)
        bind_state(make_state(FakeClient(), args=args, tokenizer=tokenizer, images=images))
        try:
            await pool.begin(272)
            for sample in samples:
                await pool.score(sample)
        finally:
            await pool.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def engine(teacher: Path) -> Iterator[str]:
    options = EngineOptions(
        str(teacher), dtype="float32", device="cpu", max_slots=4, enable_multimodal=True
    )
    with served_engine(options) as url:
        yield url


def theirs(
    directory: Path, prompts: ImagePrompts, tokens: Sequence[int], names: Sequence[str]
) -> Tensor:
    """transformers' log-probs of ``tokens[1:]``."""
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    one = one_placeholder_each(tokens, prompts.vision)
    whole, spans = prompts.expand(one, [PICTURES[name] for name in names], "it")
    assert whole == list(tokens)
    media = [Media(ImageSpan(*span), name) for span, name in zip(spans, names)]
    with torch.no_grad():
        logits = reference_logits(model, ImageReader(directory), tokens, media)
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


#: A teacher's prompt, and the images that it shows.
HINTS: dict[str, tuple[Any, list[str]]] = {
    "the sample's own": (None, ["portrait", "square"]),
    "messages": (
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}]},
            {"role": "user", "content": "<image>, say yes"},
        ],
        ["portrait", "square"],
    ),
}


@pytest.mark.parametrize("kind", ["the sample's own", "messages"])
def test_an_engine_scores_as_a_teacher_in_the_trainer_and_transformers(
    kind: str, engine: str, student: Path, teacher: Path, prompts: ImagePrompts, tmp_path: Path
) -> None:
    """Also behind an image of the response. Another prompt shows the first images of the sample's,
    or none."""
    hint, seen = HINTS[kind]
    tokenizer = load_tokenizer(str(student))
    metadata = {} if hint is None else {"hint": hint}
    sample = sample_of(tmp_path, prompts, tokenizer, **metadata)
    score(student, [engine], [sample], opd_teacher_prompt_key="hint")
    found = torch.tensor(sample.teacher_log_probs)
    mask = torch.tensor(sample.loss_mask).bool()
    own = sample.tokens[: sample.prompt_length]
    prompt = own if hint is None else sample.teacher_prompt_tokens
    assert prompt is not None and (hint is None) == (prompt == own)
    tokens = [*prompt, *sample.tokens[sample.prompt_length :]]
    wanted = theirs(teacher, prompts, tokens, [*seen, "landscape"])[-len(found) :]
    assert (found - wanted)[mask].abs().max() <= 5e-6
    assert not mask.all() and not found[~mask].any()

    here = config_for(student, opd_teacher_load=[str(teacher)], opd_teacher_prompt_key="hint")
    sample.teacher_log_probs = None
    [batch] = to_train_batches([Group(0, [[sample]])], here, TrainLayout(), 0)
    flags = {"hf_checkpoint": str(student), "opd_teacher_load": [str(teacher)]}
    backend = trainer(use_opd=True, rollout_temperature=1.0, **flags, **IMAGES)
    try:
        shown = with_teacher_prompts(batch, backend.spec.vision)
        [scored] = backend.log_probs(shown, "teacher default") or []
        [policy] = backend.log_probs(batch) or []
        metrics = backend.train(batch)
    finally:
        backend.close()
    assert (scored - wanted)[mask].abs().max() <= 5e-6
    apart = float((policy - scored)[mask].mean())
    assert abs(apart) > 1e-3
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(apart, abs=1e-6)


def test_an_engine_without_sight_is_refused_before_the_first_rollout(
    student: Path, tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path / "blind", "qwen3")
    options = EngineOptions(str(model), dtype="float32", device="cpu", max_slots=4)
    with (
        served_engine(options) as url,
        pytest.raises(UserError, match="this engine serves text alone"),
    ):
        score(student, [url], [])


class SeeingTeacher(FakeEngine):
    """Counts tokens as an engine that sees images does.

    Attributes:
        misses: placeholders that it does not count.
        sees: its log-probs depend on the images.
    """

    misses = 0
    sees = True

    def __init__(self, prompts: ImagePrompts) -> None:
        super().__init__()
        self._prompts = prompts

    def _body(self, body: dict[str, Any], tokens: list[int], reason: str) -> dict[str, Any]:
        images = [base64.b64decode(one) for one in body.get("image_data", ())]
        ids, _ = self._prompts.expand(body["input_ids"], images, "it")
        shade = len(images[0]) % 7 if images and self.sees else 0
        own = [0 if one == self._prompts.vision.image_token else one for one in ids]  # as SGLang
        pairs = [[-0.1 * (one % 5) - 0.1 * shade - 0.2, one, None] for one in own]
        found = super()._body(body, tokens, reason)
        start = body["logprob_start_len"]
        found["meta_info"] |= {
            "prompt_tokens": len(ids) - self.misses,
            "input_token_logprobs": [[None, own[start], None], *pairs[start + 1 :]],
        }
        return found


def with_seeing(
    prompts: ImagePrompts, student: Path, samples: Sequence[Sample], **knobs: Any
) -> list[dict[str, Any]]:
    """The requests to such a teacher."""

    async def main() -> list[dict[str, Any]]:
        teacher = SeeingTeacher(prompts)
        vars(teacher).update(knobs)
        async with teacher:
            await asyncio.to_thread(score, student, [teacher.url], samples)
        return teacher.bodies

    return asyncio.run(main())


def test_requests_carry_the_images_and_one_placeholder_of_each(
    student: Path, prompts: ImagePrompts, tmp_path: Path
) -> None:
    sample = sample_of(tmp_path, prompts, load_tokenizer(str(student)))
    *canary, asked = with_seeing(prompts, student, [sample])
    assert [len(body.get("image_data", ())) for body in canary] == [0, 1, 1]
    sent = [NAMES[base64.b64decode(one)] for one in asked["image_data"]]
    assert sent == ["portrait", "square", "landscape"]
    assert asked["input_ids"] == one_placeholder_each(sample.tokens, prompts.vision)
    assert asked["logprob_start_len"] == sample.prompt_length - 1


@pytest.mark.parametrize(
    ("knobs", "told"),
    [
        ({"misses": 3}, "prepares images in another way, or sees none"),
        ({"sees": False}, "gives the same log-probs behind two different pictures"),
    ],
)
def test_a_teacher_that_does_not_see_is_refused(
    knobs: dict[str, Any], told: str, student: Path, prompts: ImagePrompts
) -> None:
    with pytest.raises(UserError, match=told):
        with_seeing(prompts, student, [], **knobs)


def test_a_placeholder_that_the_policy_sampled_is_not_scored(
    student: Path, prompts: ImagePrompts, tmp_path: Path
) -> None:
    """Engines would look for its image."""
    sample = sample_of(tmp_path, prompts, load_tokenizer(str(student)))
    vision = prompts.vision
    sample.append_response_tokens(
        tokens=[vision.start_token, vision.image_token], text="", log_probs=[-1.0, -1.0]
    )
    with pytest.raises(EngineError, match="the policy sampled a placeholder itself"):
        with_seeing(prompts, student, [sample])


# -- before anything starts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hint", "told"),
    [
        ("<image> <image>", "has 2 images, and the sample's prompt has 1"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
            "has 1 images of its own",
        ),
    ],
)
def test_other_images_for_the_teacher_are_refused_by_row(
    hint: Any, told: str, student: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(PICTURES["square"])
    rows = tmp_path / "rows.jsonl"
    row = {"input": "<image>", "images": ["a.png"]}
    hints = [{"metadata": {"hint": "<image> and a hint"}}, {"metadata": {"hint": hint}}]
    rows.write_text("".join(json.dumps(row | one) + "\n" for one in hints))
    flags = {"prompt_data": str(rows), "opd_teacher_load": ["self"]}
    config = config_for(student, opd_teacher_prompt_key="hint", **flags)
    error = validate_data(config, load_tokenizer(str(student))).error
    assert error is not None and told in str(error) and "rows.jsonl:2" in str(error)


def test_tokens_of_a_function_that_are_no_images_are_refused(
    student: Path, prompts: ImagePrompts, tmp_path: Path
) -> None:
    sample = sample_of(tmp_path, prompts, load_tokenizer(str(student)))
    vision = prompts.vision
    config = config_for(student, opd_teacher_load=["self"])

    def told(tokens: list[int]) -> str:
        sample.teacher_prompt_tokens = tokens
        with pytest.raises(UserError) as caught:
            to_train_batches([Group(0, [[sample]])], config, TrainLayout(), 0)
        return str(caught.value)

    one = [5, vision.start_token, vision.image_token, vision.end_token]
    assert "in the prompt for its teacher image 1, which is 5 x 2 tokens" in told(one)
    assert "a prompt for its teacher with 3 images, and 2 images" in told(3 * one)


def test_a_teacher_of_the_engine_config_is_started_with_its_tower(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    groups = tmp_path / "groups.yaml"

    def written(path: Path) -> Config:
        groups.write_text(
            "sglang:\n"
            "  - {name: policy, server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
            f"  - {{name: big, model_path: {path}, "
            "server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
        )
        flags = {"sglang_config": str(groups), "rollout_num_gpus": 2}
        return config_for(student, rollout_engine="embedded", image_max_pixels=4096, **flags)

    config = written(teacher)
    check_teachers(config)
    place = EnginePlace(model_path=str(teacher))
    argv = embedded_command(config, str(student), "127.0.0.1", 1, place).argv
    assert argv[argv.index("--image-max-pixels") + 1] == "4096"
    assert "--enable-multimodal" in argv
    blind = save_tiny_model(tmp_path / "blind", "qwen3")
    place = EnginePlace(model_path=str(blind))
    argv = embedded_command(config, str(student), "127.0.0.1", 1, place).argv
    assert "--enable-multimodal" not in argv
    load_tokenizer(str(student)).save_pretrained(blind)
    with pytest.raises(UserError, match=r"teacher big .* sees no images"):
        check_teachers(written(blind))


@pytest.mark.parametrize("external", [False, True])
def test_an_engine_that_computes_images_of_the_teacher_wrongly_is_refused(
    external: bool, student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's attention within images of Gemma 3 is causal in some cases."""
    gemma = save_seeing_with_tokenizer(tmp_path / "gemma", "gemma3")
    groups = tmp_path / "groups.yaml"
    groups.write_text(
        "sglang:\n"
        "  - {name: policy, server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
        f"  - {{name: big, model_path: {gemma}, "
        "server_groups: [{worker_type: regular, num_gpus: 1}]}\n"
    )
    flags: dict[str, Any] = {"sglang_config": str(groups), "rollout_num_gpus": 2}
    told = "SGLang does not compute images of gemma3"
    if external:
        flags = {"opd_teacher_urls": ["big=http://other:30000"]}
        told = "the engine of teacher big cannot take part"
        info = EngineInfo({"model_path": str(gemma)}, {"version": "0.5.16", "dtype": "bfloat16"})
        monkeypatch.setattr(preflight, "fetch_engine_info", lambda url: info)
    with pytest.raises(UserError, match=told):
        check_teachers(config_for(student, rollout_engine="sglang", **flags))


# -- in the trainer --------------------------------------------------------------------------------


def distilled(reader: ImageReader) -> TrainBatch:
    batch = batch_of(reader, [[0, 1, 2], [3, 4, 5]])
    count = batch.num_samples
    return dataclasses.replace(batch, teachers=["default"] * count, rewards=[0.0] * count)


def opened(folder: Path, **flags: Any) -> tuple[MegatronBackend, Any, Any]:
    """A trainer with a teacher, and both models of transformers."""
    model = save_seeing(folder / "hf")
    other = moved(save_seeing(folder / "teacher"), folder / "teacher")
    given = {"hf_checkpoint": str(folder / "hf"), "opd_teacher_load": [str(folder / "teacher")]}
    backend = trainer(use_opd=True, rollout_temperature=1.0, **given, **IMAGES, **flags)
    return backend, model, other


def test_a_divergence_over_the_vocabulary_is_that_of_transformers_logits(tmp_path: Path) -> None:
    backend, model, other = opened(tmp_path, opd_loss="reverse_kl")
    try:
        reader = ImageReader(tmp_path / "hf")
        batch = distilled(reader)
        metrics = backend.train(batch)
    finally:
        backend.close()
    means = []
    for tokens, media, length in zip(batch.tokens, batch.media, batch.response_lengths):
        with torch.no_grad():
            own, its = (
                reference_logits(one, reader, tokens.tolist(), media)[-length - 1 : -1]
                .double()
                .log_softmax(-1)
                for one in (model, other)
            )
        means.append(float((own.exp() * (own - its)).sum(-1).mean()))
    wanted = sum(means) / len(means)
    assert wanted > 1e-3
    assert metrics["train/opd_loss"] == pytest.approx(wanted, rel=1e-5)


def test_a_teacher_whose_tower_changes_ends_the_run(tmp_path: Path) -> None:
    """The canary shows it pictures."""
    backend, _, other = opened(tmp_path)
    try:
        reader = ImageReader(tmp_path / "hf")
        batch = distilled(reader)
        scored = backend.log_probs(batch, "teacher default")
        with torch.no_grad():
            wanted = their_log_probs(other, reader, batch)
        assert scored is not None
        assert max((a - b).abs().max().item() for a, b in zip(scored, wanted)) <= 5e-6
        backend.train(batch)
        [chunk] = backend.model_chunks
        names = [name for name, _ in chunk.named_parameters()]
        tensors = backend.copies["teacher default"].tensors
        assert len(names) == len(tensors)
        tower = [one for name, one in zip(names, tensors) if "vision_model.blocks" in name]
        for tensor in tower:
            tensor.mul_(1.5)
        with pytest.raises(UserError, match="has other weights than when it was loaded"):
            backend.train(batch)
    finally:
        backend.close()


def test_the_policy_teaches_itself_behind_other_prompts(tmp_path: Path) -> None:
    """These show the first image of a sample's prompt, if it has any, and the response its own."""
    model = save_seeing(tmp_path / "hf")
    reader = ImageReader(tmp_path / "hf")
    batch = distilled(reader)
    shown: list[list[Any]] = [
        [],
        [[8], "portrait", [8]],
        [[8], "landscape"],
        [],
        [],
        [[7], "other"],
    ]
    prompts = [with_images(reader, pieces) for pieces in shown]
    tensors = [torch.tensor(tokens, dtype=torch.long) for tokens, _ in prompts]
    batch.payloads["teacher_prompts"] = tensors
    flags = {"hf_checkpoint": str(tmp_path / "hf"), "opd_teacher_load": ["self"]}
    backend = trainer(use_opd=True, rollout_temperature=1.0, **flags, **IMAGES)
    try:
        found = backend.train(batch)["rollout/opd_reverse_kl"]
    finally:
        backend.close()
    means = []
    for i, (pieces, (_, response)) in enumerate(zip(shown, SAMPLES)):
        tokens, media = with_images(reader, [*pieces, *response])
        length = batch.response_lengths[i]
        with torch.no_grad():
            own = their_log_probs(model, reader, batch)[i]
            its = own
            if pieces:
                scores = reference_logits(model, reader, tokens, media)[-length - 1 : -1]
                its = scores.log_softmax(-1).gather(1, torch.tensor(tokens)[-length:, None])[:, 0]
        means.append(float((own - its).mean()))
    assert means[0] == 0 and abs(means[1]) > 1e-3
    assert found == pytest.approx(sum(means) / len(means), abs=2e-6)


def test_adapters_have_the_base_as_a_teacher_that_sees(tmp_path: Path) -> None:
    model = save_seeing(tmp_path / "hf")
    reader = ImageReader(tmp_path / "hf")
    batch = distilled(reader)
    flags = {"hf_checkpoint": str(tmp_path / "hf"), "opd_teacher_load": ["base"], "lora_rank": 2}
    backend = trainer(use_opd=True, rollout_temperature=1.0, lr=0.05, **flags, **IMAGES)
    try:
        for _ in range(3):
            rewarded = dataclasses.replace(batch, rewards=[1.0, -1.0] * 3)
            backend.train(rewarded)
        policy = backend.log_probs(batch)
        found = backend.train(batch)["rollout/opd_reverse_kl"]
    finally:
        backend.close()
    with torch.no_grad():
        base = their_log_probs(model, reader, batch)
    assert policy is not None
    means = [float((own - its).mean()) for own, its in zip(policy, base)]
    assert abs(found) > 1e-4
    assert found == pytest.approx(sum(means) / len(means), abs=5e-6)
