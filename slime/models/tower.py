"""The vision tower as transformers' module, for the trainer and for the embedded engine."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from slime.models.vision import VisionSpec


def build_tower(vision: VisionSpec, dtype: torch.dtype, recompute: bool = False) -> nn.Module:
    """Build tower and projector with the names of transformers' modules, on the CPU, in evaluation
    mode, with random parameters.

    Args:
        recompute: blocks keep only their inputs for the backward pass, and recompute the rest.
    """
    import transformers

    settings = {key: value for key, value in vision.config.items() if key != "model_type"}
    module: Any = pkgutil.resolve_name(vision.kind.module)
    config = module.config_class(**settings)
    # older versions of transformers do not register it
    transformers.AutoModel.register(module.config_class, module, exist_ok=True)
    make: Any = transformers.AutoModel.from_config
    tower: Any = make(config, dtype=dtype, attn_implementation="sdpa")
    tower.patch_embed.forward = functools.partial(_embed_patches, tower.patch_embed.proj)
    for block in tower.blocks if recompute else ():
        block.forward = functools.partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    return cast(nn.Module, tower.eval())


def _embed_patches(convolution: nn.Conv3d, pixels: Tensor) -> Tensor:
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
        pixels: [patches, values per patch], image after image.
        grids: int64 [images, 3], frames, rows and columns of patches.
    """
    weight = next(tower.parameters())
    found: Any = tower(pixels.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device))
    levels = getattr(found, "deepstack_features", None) or ()
    return torch.cat([found.pooler_output, *levels], dim=-1)
