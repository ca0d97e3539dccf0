"""The vision tower as transformers' module, for the trainer and for the embedded engine."""

from __future__ import annotations

import functools
import pkgutil
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slime.models.siglip import SiglipSpec
from slime.models.vision import VisionSpec


def build_tower(vision: VisionSpec, dtype: torch.dtype, recompute: bool = False) -> nn.Module:
    """Build tower and projector with the names of transformers' modules, on the CPU, in evaluation
    mode, with random parameters.

    Args:
        recompute: blocks keep only their inputs for the backward pass, and recompute the rest.
    """
    if isinstance(vision, SiglipSpec):
        tower: Any = SiglipTower(vision, dtype)
        blocks = tower.vision_tower.encoder.layers
    else:
        tower = _qwen_tower(vision, dtype)
        blocks = tower.blocks
    for block in blocks if recompute else ():
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    return cast(nn.Module, tower.eval())


def _qwen_tower(vision: VisionSpec, dtype: torch.dtype) -> Any:
    import transformers

    settings = {key: value for key, value in vision.config.items() if key != "model_type"}
    module: Any = pkgutil.resolve_name(vision.kind.module)
    config = module.config_class(**settings)
    # older versions of transformers do not register it
    transformers.AutoModel.register(module.config_class, module, exist_ok=True)
    make: Any = transformers.AutoModel.from_config
    tower: Any = make(config, dtype=dtype, attn_implementation="sdpa")
    tower.patch_embed.forward = functools.partial(_embed_patches, tower.patch_embed.proj)
    return tower


class SiglipTower(nn.Module):
    """The tower and projector of Gemma 3, with the interface of Qwen's towers."""

    def __init__(self, vision: SiglipSpec, dtype: torch.dtype) -> None:
        import transformers
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector
        from transformers.models.siglip.configuration_siglip import SiglipVisionConfig

        super().__init__()
        settings = {key: value for key, value in vision.config.items() if key != "model_type"}
        config = SiglipVisionConfig(**{**settings, "attention_dropout": 0.0})
        make: Any = transformers.AutoModel.from_config
        tower = make(config, dtype=dtype, attn_implementation="sdpa")
        # older versions of transformers have a module around it
        self.vision_tower = getattr(tower, "vision_model", tower)
        embeddings = self.vision_tower.embeddings
        embeddings.patch_embedding.forward = functools.partial(
            _embed_image, embeddings.patch_embedding
        )
        sizes: Any = SimpleNamespace(
            vision_config=config,
            text_config=SimpleNamespace(hidden_size=vision.out_hidden_size),
            mm_tokens_per_image=vision.tokens_per_side**2,
        )
        self.multi_modal_projector = Gemma3MultiModalProjector(sizes).to(dtype)

    def forward(self, pixels: Tensor, grid_thw: Tensor) -> Any:
        """Compute features ``pooler_output`` [tokens, hidden].

        Args:
            pixels: [images, channels, rows, columns].
            grid_thw: not used: all images have one size.
        """
        seen = self.vision_tower(pixels).last_hidden_state
        return SimpleNamespace(pooler_output=self.multi_modal_projector(seen).flatten(0, 1))


def _embed_image(convolution: nn.Conv2d, pixels: Tensor) -> Tensor:
    """Compute the convolution [images, hidden, rows, columns] of images as `_embed_patches`
    does."""
    size = convolution.kernel_size[0]
    images, channels, rows, columns = pixels.shape
    split = pixels.view(images, channels, rows // size, size, columns // size, size)
    patches = split.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return _embed_patches(convolution, patches).permute(0, 3, 1, 2)


def _embed_patches(convolution: nn.Conv2d | nn.Conv3d, pixels: Tensor) -> Tensor:
    """Compute the convolution of patches [patches, values] as a matrix product.

    Both are the same sum, as a patch has the size of the kernel. torch has no fast bfloat16
    convolution on some GPUs, and none on CPUs.
    """
    weight = convolution.weight
    return F.linear(pixels.to(weight.dtype), weight.flatten(1), convolution.bias)


def see(tower: nn.Module, pixels: Tensor, grids: Tensor) -> Tensor:
    """Compute the features of images, [tokens, (1 + levels) * hidden]: the embeddings that replace
    placeholders, and the features that are added after the first decoder layers.

    Args:
        pixels: of `slime.models.images.PreparedImage`, image after image.
        grids: int64 [images, 3], frames, rows and columns of patches.
    """
    weight = next(tower.parameters())
    found: Any = tower(pixels.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device))
    levels = getattr(found, "deepstack_features", None) or ()
    return torch.cat([found.pooler_output, *levels], dim=-1)
