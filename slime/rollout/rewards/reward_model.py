"""``--rm-type reward_model``: a trained reward model (a Hugging Face sequence classifier with one
output) scores each sample, in this process on the CPU.

A model with the policy's vocabulary scores a sample's tokens, and plain text stays plain. A model
with another vocabulary gets the conversation through its own chat template, as in its training.
Samples with images need the policy's vocabulary, and a model that sees images.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.files import read_object
from slime.log import get_logger
from slime.prompts.chat_template import render_prompt, template_form
from slime.prompts.conversation import tools_of
from slime.prompts.images import ImagePrompts, bytes_of, image_prompts, sees_images
from slime.prompts.sft_encoding import SftEncoding
from slime.prompts.tokenizer import end_token_ids, load_tokenizer, with_opening
from slime.samples.media import media_of
from slime.samples.types import Sample

logger = get_logger(__name__)

#: The value of --rm-type.
NAME = "reward_model"
_CLASSIFIER = "ForSequenceClassification"


def check_directory(path: str | None, *, images: bool = False) -> None:
    """Check that ``path`` is the directory of a reward model.

    Args:
        images: samples have images.
    Raises:
        UserError: it is missing, holds no reward model, or one that sees no images.
    """
    fix = (
        "pass --rm-path with the model/ of a run with --preference-loss reward_model, or another "
        "sequence classifier with one output"
    )
    if not path:
        raise UserError("--rm-type reward_model needs a reward model", fix=fix)
    config = read_object(Path(path) / "config.json")
    if not config:
        raise UserError(f"--rm-path {path} holds no model", why="it has no config.json", fix=fix)
    made = [str(name) for name in config.get("architectures") or ()]
    outputs = len(config.get("id2label") or {0: "", 1: ""})
    if not any(name.endswith(_CLASSIFIER) for name in made) or outputs != 1:
        raise UserError(
            f"--rm-path {path} is not a reward model",
            why=f"config.json says architectures {made} and {outputs} labels",
            fix=fix,
        )
    if images and not sees_images(Path(path)):
        raise UserError(
            f"--rm-path {path} is a reward model that sees no images, and --multimodal-keys is set",
            why="it would read the placeholders of images as text",
            fix="train a reward model of a family that sees images, with --multimodal-keys, or use "
            "another reward",
        )


class RewardModelScorer:
    """Scores samples one at a time, in a thread; loads the model for the first one.

    Args:
        path: the directory of the reward model.
        config: groups ``checkpoint`` and ``data`` are read.
    Raises:
        UserError: as `check_directory`.
    """

    def __init__(self, path: str, config: Config) -> None:
        check_directory(path, images=bool(config.images.multimodal_keys))
        self._path = path
        self._config = config
        self._images: ImagePrompts | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self._model: Any = None
        self._encoding: SftEncoding
        self._shares_vocabulary = False
        self._has_template = False

    async def score(self, sample: Sample) -> float:
        """Return the reward of a sample.

        Raises:
            UserError: the reward model's template cannot render the prompt, or the model cannot
                read the images.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._score, sample)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score(self, sample: Sample) -> float:
        import torch

        if self._model is None:
            self._load()
        tokens = torch.tensor([list(self.tokens_of(sample))])
        with torch.no_grad():
            return float(self._model(tokens, **self._seen(sample)).logits[0, 0])

    def _seen(self, sample: Sample) -> dict[str, Any]:
        """Return the images of a sample as arguments of the model.

        Raises:
            UserError: the model cannot read them.
        """
        import torch

        media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
        if not media:
            return {}
        if self._images is None or not self._shares_vocabulary:
            raise UserError(
                f"the reward model {self._path} cannot score the images of sample {sample.index}",
                why="it sees none, or has another vocabulary than the policy",
                fix="use a reward model of the policy's family, trained with --multimodal-keys",
            )
        vision = self._images.vision
        found = [self._images.reader.read(bytes_of(one.reference)) for one in media]
        own = [vision.size_in_tokens(image.grid) for image in found]
        if own != [(one.span.rows, one.span.columns) for one in media]:
            raise UserError(
                f"the reward model {self._path} prepares images of sample {sample.index} in other "
                "sizes than the policy",
                why="their preprocessor_config.json differ",
                fix="use the policy's file in both directories",
            )
        kinds = torch.zeros((1, len(sample.tokens)), dtype=torch.int)
        for one in media:
            kinds[0, one.span.start : one.span.end] = 1
        pixels = torch.cat([image.pixels for image in found])
        if not vision.kind.has_axes:
            return {"pixel_values": pixels, "token_type_ids": kinds}
        grids = torch.tensor([image.grid for image in found])
        return {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}

    def tokens_of(self, sample: Sample) -> Sequence[int]:
        """Return the tokens to score; the reward is read at the last one.

        Raises:
            UserError: the prompt does not fit the reward model's template.
        """
        is_whole = sample.response_length or sample.multimodal_inputs
        if self._shares_vocabulary and sample.tokens and is_whole:
            return sample.tokens
        prompt = sample.prompt
        if self._config.data.apply_chat_template and not self._shares_vocabulary:
            raise UserError(
                f"--rm-path {self._path} has another vocabulary than the policy, and prompts are "
                "already in the policy's chat template",
                fix="leave --apply-chat-template out: prompts that are messages stay messages, and "
                "generation puts them into the template",
            )
        encoding = self._encoding
        tools = tools_of(sample.metadata)
        is_plain = isinstance(prompt, str) and (self._shares_vocabulary or not self._has_template)
        # the policy may say what no template writes as it is, or nothing
        with contextlib.suppress(UserError):
            if is_plain:
                return encoding.encode(prompt, sample.response).sequences[-1].tokens
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if sample.response.strip():
                answer = {"role": "assistant", "content": sample.response}
                return encoding.encode([*asked, answer], tools=tools).sequences[-1].tokens
        tokenizer = encoding.tokenizer
        text = str(prompt)
        end = tokenizer.eos_token or ""
        if not is_plain:
            kwargs = self._config.data.apply_chat_template_kwargs
            text = render_prompt(tokenizer, prompt, tools=tools, **kwargs)
            end = template_form(tokenizer, **kwargs).end or end
        ids = tokenizer.encode(f"{text}{sample.response}{end}", add_special_tokens=False)
        return with_opening(tokenizer, text, ids, templated=not is_plain)

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        flags = self._config.checkpoint
        load = functools.partial(load_tokenizer, trust_remote_code=flags.trust_remote_code)
        tokenizer = load(self._path)
        self._encoding = SftEncoding(
            tokenizer,
            end_token_ids(tokenizer, self._path),
            template_kwargs=dict(self._config.data.apply_chat_template_kwargs),
        )
        self._has_template = bool(tokenizer.chat_template)
        policy = flags.hf_checkpoint
        own = tokenizer.get_vocab()
        self._shares_vocabulary = policy is None or load(policy).get_vocab() == own
        model = AutoModelForSequenceClassification.from_pretrained(self._path, dtype=torch.float32)
        self._model = model.eval()
        if self._config.images.multimodal_keys:
            self._images = image_prompts(self._path, self._config.images.image_max_pixels)
        logger.info(
            "reward model: %s, which scores %s",
            self._path,
            "the policy's tokens" if self._shares_vocabulary else "the text, by its own template",
        )
