"""The vision tower of Gemma 3: SigLIP for images of one size, and a projector that averages squares
of patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import UserError
from slime.models.layouts import REPLICATED
from slime.models.rules import VISION_MODEL, Rule, Size, has_vision, vision_of
from slime.models.vision import ImageError, VisionKind, VisionSpec

_TOWER = "vision_tower."
#: Published files have another level of names than transformers' modules.
_TOWER_IN_FILES = "vision_tower.vision_model."
#: Names that transformers gives the tower's tensors in files → those of published files.
SIGLIP_NAMES = (rf"{_TOWER}(?!vision_model\.)", _TOWER_IN_FILES)
#: Defaults of transformers' Gemma3Config for fields that config.json lacks.
_TOKENS = {
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}

GEMMA3_VISION = VisionKind(
    "transformers.models.siglip.modeling_siglip:SiglipVisionModel",
    sections=(),
    names=r"(vision_tower|multi_modal_projector)\..*",
    kept=(8, 2),
    bidirectional=True,
    around="\n\n",
)


@dataclass(frozen=True)
class SiglipSpec(VisionSpec):
    """A SigLIP tower and its projector.

    Attributes:
        tokens_per_side: an image is a square of tokens with this side.
        out_hidden_size: hidden size of the decoder.
    """

    tokens_per_side: int
    out_hidden_size: int

    def size_in_tokens(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        own = int(self.config["image_size"])
        if grid[1:] != (own, own):
            raise ImageError(
                f"the image processor makes it {grid[1]} x {grid[2]} pixels, and the vision tower "
                f"takes {own} x {own}"
            )
        return self.tokens_per_side, self.tokens_per_side

    @property
    def depth(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def num_positions(self) -> int:
        return self._patches_per_side**2

    @property
    def channels(self) -> int:
        return int(self.config.get("num_channels", 3))

    @property
    def merge_size(self) -> int:
        return self._patches_per_side // self.tokens_per_side

    @property
    def _patches_per_side(self) -> int:
        return int(self.config["image_size"]) // self.patch_size


def image_tokens(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the tokens before, in and after an image from a parsed config.json of Gemma 3."""
    image, start, end = (int(config.get(name) or own) for name, own in _TOKENS.items())
    return start, image, end


def read_siglip(config: Mapping[str, Any], kind: VisionKind, hidden_size: int) -> VisionSpec:
    """Read the tower of a parsed config.json of Gemma 3, and the tokens around images.

    Args:
        hidden_size: of the decoder.
    Raises:
        UserError: a field is missing, or has a value that is not supported.
    """
    tower = dict(config.get("vision_config") or {})
    needed = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "image_size", "patch_size",
    )  # fmt: skip
    fix = "use the config.json that belongs to the weights"
    missing = [f"vision_config.{name}" for name in needed if tower.get(name) is None]
    if missing:
        raise UserError(
            f"the model's config.json has no {', '.join(missing)}",
            why="images need the sizes of the tower",
            fix=fix,
        )
    if tower.get("vision_use_head", True):
        raise UserError(
            "the vision tower has a pooling head, which Gemma 3 does not use",
            why="vision_use_head of vision_config in config.json is true, or missing; published "
            "models have false",
            fix=fix,
        )
    start, image, end = image_tokens(config)
    count = int(config.get("mm_tokens_per_image") or 256)
    side = math.isqrt(count)
    patches, rest = divmod(int(tower["image_size"]), int(tower["patch_size"]))
    if side * side != count or rest or patches % side:
        raise UserError(
            f"images of {patches} x {patches} patches cannot be averaged to {count} tokens",
            why="mm_tokens_per_image must be the square of a number that divides the patches of a "
            f"side, and patch_size {tower['patch_size']} must divide image_size "
            f"{tower['image_size']}",
            fix=fix,
        )
    vocabulary = int(config["text_config"].get("vocab_size") or 262208)
    if image >= vocabulary:
        raise UserError(
            f"the image token {image} is outside of the vocabulary of {vocabulary} tokens",
            why="image_token_index of config.json is not below vocab_size of text_config",
            fix=fix,
        )
    return SiglipSpec(kind, tower, image, start, end, (), side, hidden_size)


def _rule(name: str, rows: Size, columns: Size | tuple[Size, ...] | None = None) -> Rule:
    repeated = (lambda spec: vision_of(spec).depth) if "{block}" in name else None
    in_files = name.replace(_TOWER, _TOWER_IN_FILES)
    megatron = VISION_MODEL + name
    return Rule(megatron, in_files, REPLICATED, rows, columns, has_vision, repeated=repeated)


def _with_bias(name: str, rows: Size, columns: Size | None) -> tuple[Rule, ...]:
    return _rule(f"{name}.weight", rows, columns), _rule(f"{name}.bias", rows)


_BLOCK = _TOWER + "encoder.layers.{block}."
_PATCH: tuple[Size, ...] = ("vision channels", "vision patch", "vision patch")
SIGLIP_TOWER = (
    _rule(f"{_TOWER}embeddings.patch_embedding.weight", "vision hidden", _PATCH),
    _rule(f"{_TOWER}embeddings.patch_embedding.bias", "vision hidden"),
    _rule(f"{_TOWER}embeddings.position_embedding.weight", "vision positions", "vision hidden"),
    *_with_bias(f"{_BLOCK}layer_norm1", "vision hidden", None),
    *_with_bias(f"{_BLOCK}layer_norm2", "vision hidden", None),
    *_with_bias(f"{_BLOCK}self_attn.q_proj", "vision hidden", "vision hidden"),
    *_with_bias(f"{_BLOCK}self_attn.k_proj", "vision hidden", "vision hidden"),
    *_with_bias(f"{_BLOCK}self_attn.v_proj", "vision hidden", "vision hidden"),
    *_with_bias(f"{_BLOCK}self_attn.out_proj", "vision hidden", "vision hidden"),
    *_with_bias(f"{_BLOCK}mlp.fc1", "vision inner", "vision hidden"),
    *_with_bias(f"{_BLOCK}mlp.fc2", "vision hidden", "vision inner"),
    *_with_bias(f"{_TOWER}post_layernorm", "vision hidden", None),
    _rule("multi_modal_projector.mm_input_projection_weight", "vision hidden", "hidden"),
    _rule("multi_modal_projector.mm_soft_emb_norm.weight", "vision hidden"),
)
