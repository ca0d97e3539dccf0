"""What activation recompute (``--recompute-activations`` and its kin) needs beside Megatron's own code.

Megatron recomputes whole layers, or single modules (``--recompute-modules``), in the backward pass. Three gaps:

- its checkpoint of a norm's output asks Transformer Engine whether FP8 is on, also where that is not installed;
- a checkpointed function none of whose inputs needs a gradient gives its own parameters none either: with a frozen
  embedding the layers behind it would silently not be trained; likewise a pipeline stage that is frozen as a whole
  would have nothing to send back;
- a number of layers per block that does not divide a stage's layers ends in an IndexError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor, nn

from slime.errors import UserError
from slime.train.megatron.model import PolicyModel


def prepare(chunks: Sequence[PolicyModel]) -> None:
    """Close the gaps for these model chunks.

    Raises:
        UserError: ``--recompute-num-layers`` does not divide the layers of a stage.
    """
    config = chunks[0].config
    if not megatron_random.HAVE_TE:
        # its default, False, means "not FP8" but is compared with None
        megatron_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        per_block = config.recompute_num_layers or 1
        for chunk in chunks:
            layers = len(chunk.decoder.layers)
            if layers % per_block:
                raise UserError(
                    f"--recompute-num-layers {per_block} does not fit this model",
                    why=f"a pipeline stage has {layers} layers, which cannot be divided into blocks of {per_block}",
                    fix=f"use a divisor of {layers}; 1 keeps one activation per layer",
                )
    if config.recompute_granularity is not None or config.pipeline_model_parallel_size > 1:
        for chunk in chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_let_gradients_pass)


def _let_gradients_pass(module: nn.Module, inputs: Any, embedded: Tensor) -> None:
    """A frozen embedding's output takes part in the backward pass all the same."""
    if torch.is_grad_enabled() and module.training and not embedded.requires_grad:
        embedded.requires_grad_()
