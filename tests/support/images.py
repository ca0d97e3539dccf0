"""Tiny models that see images, pictures to show them, and samples that have some."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from slime.models.images import ImageReader
from slime.models.vision import ImageSpan
from slime.samples.media import Media
from tests.support.embedded_models import byte_tokenizer
from tests.support.tiny_models import DELTA, OTHER_FAMILIES, SHAPE, save_random

#: Flags of a run that reads images.
IMAGES: dict[str, Any] = {"multimodal_keys": {"image": "images"}}
START, END, PAD = 90, 91, 92
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0, "mrope_interleaved": True}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 24,
}
HYBRID: dict[str, Any] = {
    **DELTA,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
#: Kinds of tiny models that see images → (transformers' class, decoder, tower).
SEEING: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        transformers.Qwen3VLConfig,
        {"head_dim": 12, "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2]}},
        {**TOWER, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_vl_moe": (
        transformers.Qwen3VLMoeConfig,
        {**EXPERTS, "head_dim": 12, "rope_parameters": {**ROPE, "mrope_section": [3, 1, 2]}},
        {**TOWER, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen2_5_vl": (
        transformers.Qwen2_5_VLConfig,
        {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}},
        {**TOWER, "fullatt_block_indexes": [1], "window_size": 16},
    ),
    "qwen3_5": (transformers.Qwen3_5Config, HYBRID, TOWER),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeConfig,
        {**HYBRID, **EXPERTS, "shared_expert_intermediate_size": 40},
        TOWER,
    ),
    # images of 9 tokens, longer than the window
    "gemma3": (
        transformers.Gemma3Config,
        OTHER_FAMILIES["gemma3_text"][1],
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 24,
            "patch_size": 4,
            "vision_use_head": False,
        },
    ),
}
#: Prefix of the tower of Gemma 3 in published files; transformers writes a shorter one.
SIGLIP = "vision_tower.vision_model."
#: Side of an image of Gemma 3, in tokens.
GEMMA_SIDE = 3
#: How far log-probs may lie from transformers: a gated delta net divides by what is small here.
CLOSE = {"qwen3_5": 5e-4, "qwen3_5_moe": 5e-4}


def save_seeing(
    directory: Path,
    kind: str = "qwen3_vl",
    tokens: Sequence[int] = (START, END, PAD),
    layers: int | None = None,
    **text: Any,
) -> torch.nn.Module:
    """A random model whose every parameter matters, with its image processor: a token is 8 x 8
    pixels.

    Args:
        tokens: before and behind an image, and its placeholder.
        layers: of the decoder; default: one of each sort, and one behind those that add features
            of images.
    """
    config_class, decoder, tower = SEEING[kind]
    fewest = 3 if "deepstack_visual_indexes" in tower else 2
    text = {**first_layers(decoder, layers or fewest), **text}
    if kind == "gemma3":
        return _save_gemma(directory, tokens, text)
    config = config_class(
        text_config={**SHAPE, **decoder, "tie_word_embeddings": False, **text},
        vision_config=tower,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        image_token_id=tokens[2],
        video_token_id=93,
        vision_start_token_id=tokens[0],
        vision_end_token_id=tokens[1],
    )
    model = save_random(config, directory, scale=3 if kind.startswith("qwen3_5") else 8)
    Qwen2VLImageProcessorPil(
        patch_size=4,
        size={"shortest_edge": 64, "longest_edge": 4096},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(directory)
    return model


def first_layers(decoder: dict[str, Any], layers: int) -> dict[str, Any]:
    """Fields of a decoder of so many layers; the first are one of each sort."""
    sorts = [*dict.fromkeys(decoder.get("layer_types", ()))]
    found: dict[str, Any] = {"num_hidden_layers": layers}
    if sorts and layers < len(decoder["layer_types"]):
        found["layer_types"] = (sorts * layers)[:layers]
    return found


def _save_gemma(directory: Path, tokens: Sequence[int], text: dict[str, Any]) -> torch.nn.Module:
    config_class, decoder, tower = SEEING["gemma3"]
    config = config_class(
        text_config={**SHAPE, **decoder, "tie_word_embeddings": True, **text},
        vision_config=tower,
        mm_tokens_per_image=GEMMA_SIDE**2,
        boi_token_index=tokens[0],
        eoi_token_index=tokens[1],
        image_token_index=tokens[2],
    )
    model: Any = save_random(config, directory, scale=8)
    with torch.no_grad():
        for parameter in model.model.vision_tower.parameters():
            if parameter.dim() > 1:  # SigLIP begins with larger weights than decoders
                parameter.div_(8)
        # transformers begins with zeros
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.2)
    names = {"model.language_model.": "language_model.model.", "model.vision_tower.": SIGLIP}
    names |= {"model.multi_modal_projector.": "multi_modal_projector."}
    published = {
        names[prefix] + name.removeprefix(prefix): parameter.detach().clone()
        for name, parameter in model.named_parameters()
        for prefix in names
        if name.startswith(prefix)
    }
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})
    Gemma3ImageProcessorPil(
        size={"height": tower["image_size"], "width": tower["image_size"]},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(directory)
    return model


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """An encoded picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, kind)
    return stream.getvalue()


#: Portrait, landscape, two of one size, and one that is scaled.
PICTURES = {
    "portrait": picture(16, 40, 1),
    "landscape": picture(48, 16, 2),
    "square": picture(24, 24, 3),
    "other": picture(24, 24, 5),
    "odd": picture(37, 21, 4),
}


def with_images(
    reader: ImageReader, pieces: Sequence[str | Sequence[int]]
) -> tuple[list[int], list[Media]]:
    """Tokens of text pieces and of pictures, by their names, between start and end tokens."""
    tokens: list[int] = []
    media: list[Media] = []
    for piece in pieces:
        if not isinstance(piece, str):
            tokens += piece
            continue
        _, rows, columns = reader.read(PICTURES[piece]).grid
        size = (rows // 2, columns // 2)
        if "size" in vars(reader.processor) and "height" in dict(reader.processor.size):
            size = (GEMMA_SIDE, GEMMA_SIDE)
        span = ImageSpan(len(tokens) + 1, *size)
        media.append(Media(span, piece))
        tokens += [START, *[PAD] * span.length, END]
    return tokens, media


def reference_logits(
    model: Any, reader: ImageReader, tokens: Sequence[int], media: Sequence[Media]
) -> Tensor:
    """What transformers computes, [tokens, vocabulary]."""
    ids = torch.tensor(tokens)[None]
    if not media:
        return model(ids).logits[0]
    images = [reader.read(PICTURES[one.reference]) for one in media]
    kinds = torch.zeros_like(ids, dtype=torch.int)
    for one in media:
        kinds[0, one.span.start : one.span.end] = 1
    pixels = torch.cat([image.pixels for image in images])
    if model.config.model_type == "gemma3":
        return model(ids, pixel_values=pixels, token_type_ids=kinds).logits[0]
    found = model(
        ids,
        pixel_values=pixels,
        image_grid_thw=torch.tensor([image.grid for image in images]),
        mm_token_type_ids=kinds,
    )
    return found.logits[0]


def read_config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def save_seeing_with_tokenizer(directory: Path, kind: str = "qwen3_vl", **text: Any) -> Path:
    """A random model that sees images and whose tokens are bytes; a turn ends with
    ``<|im_end|>``."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]}
    )
    ids = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    save_seeing(directory, kind, tokens=ids, vocab_size=272, eos_token_id=257, **text)
    tokenizer.save_pretrained(directory)
    return directory
