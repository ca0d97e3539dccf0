"""Users' functions that build the model of a pipeline stage, or that say which layers it has.

``--custom-model-provider-path``:

    from slime.trainer.megatron.provider import default_model

    def provider(pre_process, post_process, vp_stage=None):
        # the model without a provider
        model = default_model(pre_process, post_process, vp_stage)
        for layer in model.decoder.layers[:2]:
            layer.requires_grad_(False)
        return model

It must return a `PolicyModel` (a megatron-core ``GPTModel`` whose forward pass takes packed
micro-batches and returns log-probs): start from `default_model`, or return a subclass. Parameters
must have the same names as without a provider: conversion from and to Hugging Face refuses names
that are not in the model family's table.

``--spec MODULE NAME``:

    from slime.trainer.megatron.provider import default_layer_spec

    def my_spec(args, config, vp_stage):
        block = default_layer_spec(args, config, vp_stage)  # the layers without --spec
        for layer in block.layer_specs:
            layer.submodules.self_attention.module = MyAttention
        return block

The trainer replaces Megatron's attention, norms and experts in a specification by its own, which
take packed sequences, and keeps other modules. Custom attention must derive from
``PackedSelfAttention`` or ``PackedMLASelfAttention``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.errors import UserError, a_type
from slime.user_code.loading import user_function

Build = Callable[[bool, bool, int | None], Any]
Layers = Callable[[TransformerConfig, int | None], TransformerBlockSubmodules]

#: The defaults that the functions below return while a user's function runs, innermost last.
_building: list[Build] = []
_specifying: list[Layers] = []
#: Fields of the configuration that a layer specification must not change.
_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")


def default_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    """Build the stage as without a provider. Only a provider may call this.

    Raises:
        UserError: called outside of a provider.
    """
    if not _building:
        raise UserError(
            "default_model was called outside of a model provider",
            why="it builds by the configuration of the trainer that is being set up",
            fix="call it inside the function of --custom-model-provider-path",
        )
    return _building[-1](pre_process, post_process, vp_stage)


def provided(
    path: str, build: Build, wanted: type, first: bool, last: bool, vp_stage: int | None
) -> Any:
    """Return the model that the provider at ``path`` builds for this stage.

    Raises:
        UserError: it did not return a ``wanted``, or returned one for another pipeline stage.
    """
    dtypes: set[torch.dtype] = set()

    def noting_dtypes(first: bool, last: bool, vp_stage: int | None) -> Any:
        model = build(first, last, vp_stage)
        dtypes.update(parameter.dtype for parameter in model.parameters())
        return model

    with _available(_building, noting_dtypes):
        model = user_function(path, "--custom-model-provider-path")(first, last, vp_stage=vp_stage)
    if not isinstance(model, wanted):
        raise UserError(
            f"'{path}' returned {a_type(model)}",
            why=f"the trainer needs a {wanted.__name__}, whose forward pass takes packed "
            "micro-batches",
            fix="start from slime.trainer.megatron.provider.default_model(pre_process, "
            "post_process, vp_stage)",
        )
    place = (bool(model.pre_process), bool(model.post_process))  # type: ignore[attr-defined]
    if place != (first, last):
        raise UserError(
            f"'{path}' built a model with (pre_process, post_process) = {place}",
            why=f"it was called with {(first, last)}",
            fix="pass these on to default_model",
        )
    for name, parameter in model.named_parameters():  # type: ignore[attr-defined]
        is_odd = bool(dtypes) and parameter.dtype not in dtypes
        if is_odd or parameter.is_meta:
            kind = parameter.dtype if is_odd else "no values, on the device meta"
            raise UserError(
                f"'{path}' returned a model whose {name} has {kind}".replace("torch.", ""),
                why="the trainer holds parameters in the precision of the run",
                fix="pass --bf16, --fp16 or --fp32 instead of converting the model",
            )
    return model


def default_layer_spec(
    args: Any, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return the layers as without ``--spec``. Only the function of ``--spec`` may call this.

    Raises:
        UserError: called outside of that function.
    """
    if not _specifying:
        raise UserError(
            "default_layer_spec was called outside of a layer specification",
            why="it specifies the layers of the trainer that is being set up",
            fix="call it inside the function of --spec",
        )
    return _specifying[-1](config, vp_stage)


def specified_layers(
    spec: tuple[str, ...],
    args: Any,
    config: TransformerConfig,
    vp_stage: int | None,
    default: Layers,
) -> TransformerBlockSubmodules:
    """Return the layers that the function or object of ``--spec`` gives for this stage.

    Raises:
        UserError: it did not return layers, or not as many as the stage has.
    """
    path = ":".join(spec)
    shape = [getattr(config, name) for name in _SHAPE]
    found = user_function(path, "--spec")
    if callable(found) and not isinstance(found, ModuleSpec):
        with _available(_specifying, default):
            found = found(args, config, vp_stage)
    for name, before in zip(_SHAPE, shape):
        if getattr(config, name) != before:
            raise UserError(
                f"--spec {' '.join(spec)} changed config.{name} from {before} to "
                f"{getattr(config, name)}",
                why="checkpoints and engines have the model of config.json",
                fix="leave the model's shape as it is",
            )
    wanted = get_num_layers_to_build(config, vp_stage)
    if isinstance(found, ModuleSpec):
        layers = found.submodules
        if isinstance(layers, TransformerBlockSubmodules):
            found = layers
        else:
            found = TransformerBlockSubmodules(layer_specs=[found] * wanted)
    if not isinstance(found, TransformerBlockSubmodules):
        raise UserError(
            f"--spec {' '.join(spec)} gave {a_type(found)}",
            why="the trainer needs TransformerBlockSubmodules, or a ModuleSpec that all layers "
            "share",
            fix="start from slime.trainer.megatron.provider.default_layer_spec(args, config, "
            "vp_stage)",
        )
    if len(found.layer_specs or ()) != wanted:
        raise UserError(
            f"--spec {' '.join(spec)} gave {len(found.layer_specs or ())} layers",
            why=f"this pipeline stage has {wanted} of the model's {config.num_layers}",
            fix="give those of the stage; get_num_layers_to_build and "
            "get_transformer_layer_offset of megatron-core say which they are",
        )
    return found


@contextmanager
def _available(stack: list[Any], default: Any) -> Iterator[None]:
    """Let the user's function find this default on the stack inside the block."""
    stack.append(default)
    try:
        yield
    finally:
        stack.pop()
