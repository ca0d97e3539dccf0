"""Reward models as Hugging Face directories, in the form of transformers' sequence classifiers: the
policy's layers, and ``score.weight`` [1, H], applied to the state of the last token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slime.checkpoints.megatron_names import unwrapped
from slime.errors import UserError
from slime.log import get_logger
from slime.prompts.tokenizer import end_token_ids, load_tokenizer

logger = get_logger(__name__)

_HEAD = "output_layer.weight"


def classifier_of(hf_config: dict[str, Any]) -> str:
    """Return the class name of transformers' sequence classifier for a model.

    Raises:
        UserError: transformers has none, so that the reward model could not be loaded.

    Example:
        >>> classifier_of({"model_type": "qwen3"})
        'Qwen3ForSequenceClassification'
    """
    from transformers.models.auto import modeling_auto

    kind = str(hf_config.get("model_type"))
    name = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    if name is None:
        raise UserError(
            f"a reward model cannot be made of a model of type {kind}",
            why="the installed transformers has no sequence classifier of it, the form in which "
            "reward models are saved",
            fix="take another --hf-checkpoint",
        )
    return str(name)


def reward_config(hf_config: dict[str, Any], tokenizer_from: str) -> dict[str, Any]:
    """Return the fields in which the reward model's config.json differs from the policy's.

    transformers reads the reward at the last token that is not padding. If the padding token also
    ends answers, it would read the reward before the end of the answer: no padding token is named
    then, and transformers refuses to score several texts at once.
    """
    tokenizer = load_tokenizer(tokenizer_from)
    padding = tokenizer.pad_token_id
    if padding in {tokenizer.eos_token_id, *end_token_ids(tokenizer, tokenizer_from)}:
        logger.warning(
            "the tokenizer pads with the token that ends answers: the reward model's config.json "
            "names no pad_token_id, so that transformers scores one text at a time"
        )
        padding = None
    return {
        "architectures": [classifier_of(hf_config)],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": padding,
    }


def fill_head(chunks: Sequence[nn.Module], score: torch.Tensor) -> None:
    """Copy a head [1, H] to the stage that has one; its bias, if any, is unchanged."""
    head = _head_of(chunks)
    if head is not None:
        head.detach().copy_(score)


def held_head(chunks: Sequence[nn.Module]) -> torch.Tensor | None:
    """Return the head [1, H] in host memory; None if this rank's stage has none."""
    head = _head_of(chunks)
    return None if head is None else head.detach().cpu()


def _head_of(chunks: Sequence[nn.Module]) -> nn.Parameter | None:
    heads = (dict(chunk.named_parameters()).get(_HEAD) for chunk in unwrapped(chunks))
    return next((head for head in heads if head is not None), None)
