"""The vision tower as a module: transformers' own, for the trainer and for the embedded engine."""

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
    mode. Their parameters hold random numbers until weights are loaded.

    Args:
        recompute: blocks keep their inputs alone for the backward pass, and compute the rest again.
    """
    import transformers

    settings = {key: value for key, value in vision.config.items() if key != "model_type"}
    module: Any = pkgutil.resolve_name(vision.kind.module)
    config = module.config_class(**settings)
    # older versions do not know it
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
    """Return the convolution of patches [patches, numbers] as a product of matrices.

    A patch has the size of the kernel, so that both are the same sum. torch convolves in bfloat16
    without a fast kernel on some GPUs and with none on a CPU.
    """
    weight = convolution.weight
    return F.linear(pixels.to(weight.dtype), weight.flatten(1), convolution.bias)


def see(tower: nn.Module, pixels: Tensor, grids: Tensor) -> Tensor:
    """Compute the features of images, [tokens, (1 + levels) * hidden]: what takes the place of a
    placeholder's embedding, and what is added behind the first decoder layers.

    Args:
        pixels: [patches, numbers per patch], image after image.
        grids: int64 [images, 3], frames, rows and columns of patches.
    """
    weight = next(tower.parameters())
    found: Any = tower(pixels.to(weight.device, weight.dtype), grid_thw=grids.to(weight.device))
    levels = getattr(found, "deepstack_features", None) or ()
    return torch.cat([found.pooler_output, *levels], dim=-1)
