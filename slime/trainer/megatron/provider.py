"""``--custom-model-provider-path``: a function of the user's own builds the model of a pipeline stage.

    from slime.trainer.megatron.provider import default_model

    def provider(pre_process, post_process, vp_stage=None):
        model = default_model(pre_process, post_process, vp_stage)    # as it would be without a provider
        for layer in model.decoder.layers[:2]:
            layer.requires_grad_(False)
        return model

What it returns must be a `PolicyModel` (a megatron-core ``GPTModel`` whose forward pass takes packed micro-batches and
gives log-probs); start from `default_model`, or derive a class from it. Parameters keep their names, or conversion from
and to Hugging Face, which knows the model family's, refuses what it cannot place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slime.errors import UserError
from slime.hook_loading import user_function

Build = Callable[[bool, bool, int | None], Any]

_building: list[Build] = []


def default_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    """The stage as it is built without a provider; for providers, while the trainer builds its model.

    Raises:
        UserError: called at another time.
    """
    if not _building:
        raise UserError(
            "default_model was called outside of a model provider",
            why="it builds by the configuration of the trainer that is being set up",
            fix="call it inside the function of --custom-model-provider-path",
        )
    return _building[-1](pre_process, post_process, vp_stage)


def provided(path: str, build: Build, wanted: type, first: bool, last: bool, vp_stage: int | None) -> Any:
    """The model that the provider at ``path`` returns for this stage.

    Raises:
        UserError: it returned something else than a ``wanted``, or one for another place in the pipeline.
    """
    with _offering(build):
        model = user_function(path, "--custom-model-provider-path")(first, last, vp_stage=vp_stage)
    if not isinstance(model, wanted):
        raise UserError(
            f"'{path}' returned a {type(model).__name__}",
            why=f"the trainer needs a {wanted.__name__}, whose forward pass takes packed micro-batches",
            fix="start from slime.trainer.megatron.provider.default_model(pre_process, post_process, vp_stage)",
        )
    place = (bool(model.pre_process), bool(model.post_process))  # type: ignore[attr-defined]
    if place != (first, last):
        raise UserError(
            f"'{path}' built a model with (pre_process, post_process) = {place}",
            why=f"it was called with {(first, last)}",
            fix="pass these on to default_model",
        )
    return model


@contextmanager
def _offering(build: Build) -> Iterator[None]:
    _building.append(build)
    try:
        yield
    finally:
        _building.pop()
